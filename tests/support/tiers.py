"""Two tiers of tests: `make test` runs one case for each value of each axis, `make test-all` the combinations too.

[Note: Axes] The arguments that a test is parametrised over are its axes: ranks, shards, culprits, stages. Arguments
that one `parametrize` names together are one axis: whoever lists their values together means each. The quick cases are
chosen so that every value of every axis is there at least once; the other combinations are the full tier. A test marked
`slow` is in the full tier, with each value of each axis and no combination beyond. This is the each-choice coverage of
Ammann and Offutt, Introduction to Software Testing. A case beyond is run if it is asked for by its name.

[Note: The kind of device] What runs on fake GPUs too runs there with each value of each axis and no combination beyond.
These cases are in the full tier, but for the first one of a test marked `quick_on_gpus`; at least one test of each such
file is marked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.support.devices import GPU, kinds_of

FULL = "full"
ALL_ITEMS = pytest.StashKey[list[pytest.Item]]()

Case = Mapping[str, object]


def values_of(case: Case) -> frozenset[tuple[str, str]]:
    """(axis, value) of a case; a value counts as another one if it is written otherwise, or is another object."""
    return frozenset((axis, _written(value)) for axis, value in case.items())


def _written(value: object) -> str:
    return str(id(value)) if callable(value) else repr(value)  # lambdas of one list have one name


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
        functions[item.nodeid.partition("[")[0]].append((item, _case_of(item)))
    return functions


def _case_of(item: pytest.Item) -> Case:
    """The value of each axis: of arguments that `parametrize` names together, the values together."""
    callspec = getattr(item, "callspec", None)
    case = {} if callspec is None else dict(callspec.params)
    for names in map(names_of, item.iter_markers("parametrize")):
        if len(names) > 1:
            case[" ".join(names)] = tuple(_written(case.pop(name)) for name in names)
    return case


def names_of(mark: pytest.Mark) -> list[str]:
    """The arguments that a `parametrize` names together."""
    names = mark.args[0]
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def combinations(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases of slow tests, and those on a GPU, whose values of all axes are in others. See [Note: Axes]."""
    found: set[pytest.Item] = set()
    for cases in cases_by_function(items).values():
        is_slow = all(item.get_closest_marker("slow") for item, _ in cases)
        on_gpus = [(item, case) for item, case in cases if is_on_gpu(item, case)]
        others = [(item, case) for item, case in cases if case and is_slow and not is_on_gpu(item, case)]
        for group in (on_gpus, others):
            chosen = representatives([case for _, case in group])
            found.update(item for number, (item, _) in enumerate(group) if number not in chosen)
    return found


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark what only `make test-all` runs as `full`."""
    for cases in cases_by_function(items).values():
        first = [(item, case) for item, case in cases if not is_on_gpu(item, case)]
        chosen = {first[number][0] for number in representatives([case for _, case in first])}
        again = [item for item, case in cases if is_on_gpu(item, case) and not item.get_closest_marker("slow")]
        chosen.update(item for item in again[:1] if item.get_closest_marker("quick_on_gpus"))
        for item, case in cases:
            if item.get_closest_marker("slow") or (case and item not in chosen):
                item.add_marker(FULL)


def is_on_gpu(item: pytest.Item, case: Case) -> bool:
    """Whether a case repeats on a GPU what another one does on the CPU."""
    return case.get("device_kind") == GPU and len(kinds_of(item)) > 1


def is_quick(item: pytest.Item) -> bool:
    """Whether `make test` runs it."""
    return item.get_closest_marker(FULL) is None
