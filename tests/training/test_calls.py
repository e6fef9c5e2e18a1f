"""One step runs few Python calls, in few files, and seldom goes from one file to another."""

from __future__ import annotations

from benchmarks.calls import count

MOST = 120, 11, 40  # calls, files, changes of file; by Python 3.11, where a list comprehension is a call too


def test_a_step_can_be_read_in_one_sitting_and_has_the_same_calls_each_time() -> None:
    count(rows=False)  # fills the caches, such as the control word's; with rows the clock decides when some go on
    once, again = count(rows=False), count(rows=False)
    found = len(once.codes), len(set(once.files)), once.changes
    assert all(one <= most for one, most in zip(found, MOST, strict=True)), (found, MOST)
    assert found[0] > 100  # the profile sees the package
    assert [code.co_qualname for code in once.codes] == [code.co_qualname for code in again.codes]
