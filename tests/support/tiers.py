"""Two tiers of tests: `make test` runs one case for each value of each axis, `make test-all` runs every case.

[Note: Axes] The arguments that a test is parametrised over are its axes: ranks, shards, culprits, stages. Its quick
cases are chosen so that every value of every axis is there at least once; the other combinations are the full tier. A
test marked `slow` is in the full tier with all its cases. This is the each-choice coverage of Ammann and Offutt,
Introduction to Software Testing.

[Note: The mode of the device] What runs in both modes of `device_modes` has its asynchronous cases in the full tier,
but for the first one of a test marked `quick_in_both_modes`; at least one test of each such file is marked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.support.device_modes import ASYNCHRONOUS, modes_of

FULL = "full"
ALL_ITEMS = pytest.StashKey[list[pytest.Item]]()

Case = Mapping[str, object]


def values_of(case: Case) -> frozenset[tuple[str, str]]:
    """(axis, value) of a case; a value counts as another one if it is written otherwise, or is another object."""
    return frozenset((axis, _written(value)) for axis, value in case.items())


def _written(value: object) -> str:
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', id(value))}"
    return repr(value)


def representatives(cases: Sequence[Case]) -> set[int]:
    """Which cases to keep so that each value of each axis is in one of them: the one with most new values, again and
    again, of equals the first."""
    have = [values_of(case) for case in cases]
    left = set().union(*have)
    chosen: set[int] = set()
    while left:
        best = max(range(len(cases)), key=lambda i: (len(have[i] & left), -i))
        chosen.add(best)
        left -= have[best]
    return chosen


def cases_by_function(items: Iterable[pytest.Item]) -> dict[str, list[tuple[pytest.Item, Case]]]:
    """The items of each test function, each with its parameters."""
    functions: dict[str, list[tuple[pytest.Item, Case]]] = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        functions[item.nodeid.partition("[")[0]].append((item, {} if callspec is None else callspec.params))
    return functions


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark what only `make test-all` runs as `full`."""
    for cases in cases_by_function(items).values():
        first = [(item, case) for item, case in cases if not is_second_mode(item, case)]
        chosen = {first[number][0] for number in representatives([case for _, case in first])}
        again = [item for item, case in cases if is_second_mode(item, case)]
        chosen.update(item for item in again[:1] if item.get_closest_marker("quick_in_both_modes"))
        for item, case in cases:
            if item.get_closest_marker("slow") or (case and item not in chosen):
                item.add_marker(FULL)


def is_second_mode(item: pytest.Item, case: Case) -> bool:
    """Whether a case repeats another one in the other mode of the device."""
    return case.get("device_mode") == ASYNCHRONOUS and len(modes_of(item)) > 1


def is_quick(item: pytest.Item) -> bool:
    """Whether `make test` runs it."""
    return item.get_closest_marker(FULL) is None
