"""The tiers of the tests, and what continuous integration fails, checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.devices import GPU, kinds_of
from tests.support.documents import claimed_rows, text_of
from tests.support.paths import ROOT
from tests.support.scripts import run
from tests.support.skips import KNOWN_REASONS
from tests.support.tiers import ALL_ITEMS, cases_by_function, is_on_gpu, is_quick, names_of, representatives, values_of


def rows_of(item: pytest.Item) -> set[str]:
    return {str(row) for mark in item.iter_markers("covers") for row in mark.args}


def test_each_value_of_each_axis_is_in_a_representative_and_no_case_is_there_for_nothing() -> None:
    cases = [{"ranks": ranks, "kind": kind} for ranks in (1, 2, 3) for kind in "ab"]
    chosen = [cases[number] for number in sorted(representatives(cases))]
    assert chosen == [{"ranks": 1, "kind": "a"}, {"ranks": 2, "kind": "b"}, {"ranks": 3, "kind": "a"}]


def test_one_axis_and_no_axis_keep_all_cases() -> None:
    assert representatives([{"ranks": ranks} for ranks in (1, 2, 2, 3)]) == {0, 1, 3}
    assert representatives([{}]) == set()


def test_the_two_tiers_have_the_same_axes(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[ALL_ITEMS]
    for function, cases in cases_by_function(items).items():
        if any(item.get_closest_marker("slow") for item, _ in cases):
            continue
        everything = set().union(*(values_of(case) for item, case in cases if not is_on_gpu(item, case)))
        assert set().union(*(values_of(case) for item, case in cases if is_quick(item))) >= everything, function
        assert any(is_quick(item) for item, _ in cases), function


def is_whole_suite(items: list[pytest.Item]) -> bool:
    return {item.path for item in items} == set((ROOT / "tests").rglob("test_*.py"))


def test_each_case_of_a_list_runs(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[ALL_ITEMS]
    if not is_whole_suite(items):
        return  # cases may have been asked for by their names
    for function, cases in cases_by_function(items).items():
        for mark in cases[0][0].iter_markers("parametrize"):
            names = names_of(mark)
            if len(names) > 1 and isinstance(mark.args[1], list):
                run = {case[" ".join(names)] for _, case in cases}
                assert len(run) == len({repr(getattr(one, "values", one)) for one in mark.args[1]}), function


def test_each_value_of_each_axis_runs_on_gpus_too_and_no_case_is_there_for_nothing(
    request: pytest.FixtureRequest,
) -> None:
    items = request.config.stash[ALL_ITEMS]
    for function, cases in cases_by_function(items).items():
        on_gpus = [values_of(case) for item, case in cases if is_on_gpu(item, case)]
        elsewhere = set().union(*(values_of(case) for item, case in cases if not is_on_gpu(item, case)))
        if on_gpus:
            axes = {axis for axis, _ in elsewhere}
            left = {axis for axis, _ in elsewhere - set().union(*on_gpus)}
            assert left <= {"device_kind", "exchange"}, function  # a GPU has one exchange
            assert len(on_gpus) <= sum(len({value for name, value in elsewhere if name == axis}) for axis in axes)


def kinds_marked(item: pytest.Item) -> tuple[str, ...]:
    alone = item.get_closest_marker("one_device")
    return () if alone is None else alone.args[:1]


def test_each_file_that_runs_on_gpus_too_has_a_quick_test_there(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[ALL_ITEMS]
    again = [
        (item.path.name, is_quick(item))
        for cases in cases_by_function(items).values()
        for item, case in cases
        if is_on_gpu(item, case)
    ]
    assert {name for name, quick in again if quick} == {name for name, _ in again}
    for item in items:  # these marks stand in no other file
        if item.get_closest_marker("quick_on_gpus") or item.get_closest_marker("one_device"):
            assert item.get_closest_marker("on_gpus_too"), item.nodeid
        if item.get_closest_marker("quick_on_gpus") or (GPU in kinds_marked(item)):  # a test without ranks has none
            assert GPU in kinds_of(item), item.nodeid


def test_every_claimed_capability_has_a_quick_test(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[ALL_ITEMS]
    if not is_whole_suite(items):
        return  # a row's quick test may be in a file that was not asked for
    shown = set().union(*map(rows_of, items))
    # A test that needs a GPU is skipped where there is none, and shows nothing there.
    run = [item for item in items if is_quick(item) and not item.get_closest_marker("gpu")]
    quick = set().union(*map(rows_of, run))
    assert shown & claimed_rows() - quick == set()


def test_continuous_integration_runs_what_make_test_leaves_out_too() -> None:
    makefile, ci = text_of("Makefile"), (ROOT / ".ci" / "run").read_text()
    lines = re.findall(r"^(test|test-all|test-rest):.*\n\t(.*)$", makefile, re.MULTILINE)
    chosen = {target: re.findall(r'-m "([^"]+)"', line) for target, line in lines}
    assert chosen == {"test": ["not full"], "test-rest": ["full"], "test-all": []}
    (targets,) = re.findall(r"^for target in (.*); do$", ci, re.MULTILINE)
    assert targets.split() == ["check", "test-all"]
    assert "--known-skips " in ci


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import pytest\n\ndef test_it():\n    pytest.skip('no wish')\n", r"1 failed.*"),
        (f"import pytest\n\ndef test_it():\n    pytest.skip('{KNOWN_REASONS[0]}')\n", r"1 skipped.*"),
    ],
    ids=["skipped", "skipped with a known reason"],
)
@pytest.mark.slow
def test_continuous_integration_fails_a_skip_for_an_unknown_reason(body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(body)
    words = ["-m", "pytest", f"--confcutdir={ROOT}", "-p", "tests.conftest", f"--rootdir={tmp_path}", "--known-skips"]
    done = run(*words, "-o", "addopts=", str(tmp_path))
    assert re.search(said, done.stdout), done.stdout
