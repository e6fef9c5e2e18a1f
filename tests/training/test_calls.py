"""One step runs few Python calls, in few files, and seldom goes from one file to another."""

from __future__ import annotations

import pytest

from benchmarks.calls import count

# By Python 3.11, where a list comprehension is a call too.
LIMITS = {False: (220, 14, 70), True: (250, 21, 95)}


@pytest.mark.parametrize("rows", LIMITS)
def test_a_step_can_be_read_in_one_sitting(rows: bool) -> None:
    calls = count(rows=rows)
    most = LIMITS[rows]
    found = len(calls.codes), len(set(calls.files)), calls.changes
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), (found, most)
    assert found[0] > 100  # the profile sees the package


def test_the_count_is_the_same_each_time() -> None:
    once, again = count(rows=False), count(rows=False)
    assert [code.co_qualname for code in once.codes] == [code.co_qualname for code in again.codes]
