"""The benchmark of the page, on short runs."""

from __future__ import annotations

import pytest

from benchmarks import page
from tests.support.browsing import NEEDS_BROWSER

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]


@pytest.mark.parametrize(
    ("part", "lab", "measured"), [("long", page.Lab(20, 60, 4), 13), ("many", page.Lab(1000, 3, 3), 8)]
)
def test_each_row_is_measured(part: str, lab: page.Lab, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(page.PARTS, part, lab)
    monkeypatch.setattr(page, "MOST_S", 60.0)
    rows = list(page.rows(part))
    assert [row[0] for row in rows] == [part] * measured
    assert rows[-1][1:] == ("errors and warnings in the browser", "0")
