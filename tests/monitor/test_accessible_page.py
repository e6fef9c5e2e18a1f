"""What the page gives to those who do not see it well: contrast, heads of tables, and labels that have their texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import NEEDS_BROWSER, PHONE, WIDE, Visit
from tests.support.harness import until
from tests.support.sweep_folders import write_sweep

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
LEAST = 4.5  # contrast of small texts to their ground, by WCAG 2.1

# The cells of the matrix whose text has too little contrast; the canvas turns any colour into sRGB.
FAINT = """(least) => {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
        .getContext("2d", { willReadFrequently: true });
    const light = (colour) => {
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const part = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        const [red, green, blue] = [...pen.getImageData(0, 0, 1, 1).data].map((value) => part(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
    };
    const faint = (cell) => {
        const style = getComputedStyle(cell);
        const [ink, ground] = [light(style.color), light(style.backgroundColor)];
        return Math.max(ink, ground) / Math.min(ink, ground) < least;
    };
    return [...document.querySelectorAll(".matrix td:not(.accuracy)")].filter(faint).map((cell) => cell.title);
}"""
MUTE = """() => [...document.querySelectorAll("th")].filter((one) => !one.textContent.trim()).length"""
# Buttons whose label lacks the text that is seen, but for single signs.
MISNAMED = """() => [...document.querySelectorAll("button[aria-label]")]
    .map((one) => [one.textContent.trim(), one.getAttribute("aria-label")])
    .filter(([text, label]) => text.length > 1 && !label.toLowerCase().includes(text.toLowerCase()))"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep with a matrix whose cells have all shares of their rows."""
    sweep = write_sweep(tmp_path / "digits", 3)
    values = [[share, 20 - share] for share in range(21)]
    table = {"name": "shares", "rows": [str(k) for k in range(21)], "columns": ["a", "b"], "values": values}
    path = sweep / "trials" / "0001" / "tables" / "shares.json"
    path.write_text(json.dumps(table | {"iteration": 1, "at": 1.0}))
    (sweep / "trials" / "0001" / "note.txt").write_text("a note")
    return sweep


def screens(one: Visit) -> Iterator[str]:
    """Show the curves, a card with its table, and the results with a matrix, and yield the name of each."""
    yield "curves"
    one.unfold()
    one.open_card("trials/0001")
    one.at("button[data-panel=tables]").click()
    one.at(".matrix").wait_for()
    yield "card"
    one.key("Escape")
    one.tab("Results")
    one.at(".sweep").first.wait_for()  # a line that comes after the tab opened moves the table
    one.press("Matrix trials/0001")
    place = one.at("#results .matrix-place")
    place.locator(".matrix").wait_for()
    place.locator("select").select_option("shares")
    until(lambda: place.locator("tbody tr").count() == 21, "the shares are shown")
    yield "results"


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_texts_have_contrast_heads_have_texts_and_labels_have_what_is_seen(
    show: Any, sweep: Path, size: tuple[int, int], scheme: str
) -> None:
    one = show(sweep, size, scheme)
    for screen in screens(one):
        assert one.page.evaluate(FAINT, LEAST) == [], screen
        assert one.page.evaluate(MUTE) == 0, screen
        assert one.page.evaluate(MISNAMED) == [], screen
