"""What `make gpu` does on a machine with GPUs, as far as fake ones can show it: plan, limits, rehearsal, faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from benchmarks import gpu, gpu_parts
from benchmarks.gpu_endings import FAILURES
from benchmarks.gpu_machine import Machine, Sheet, count_operations, seeing, wrong_lines
from benchmarks.gpu_memory import limit_of
from benchmarks.gpu_reads import count_reads, said
from benchmarks.gpu_worlds import Training, plan_worlds, verdict
from tests.fake_cuda.build import NoFakeCuda, environment
from tests.support.gpu_faults import FAULTS, Edit, named
from tests.support.harness import OnRanks, until
from tests.support.paths import ROOT
from tests.support.tiers import ALL_ITEMS

WRITE = "import sys; file = open(sys.argv[-1], 'a'); print('| row |', file=file, flush=True); "
HANG = (
    WRITE
    + "import subprocess; one = subprocess.Popen(['sleep', '300']); print(one.pid, file=file, flush=True); one.wait()"
)
PARTS = {name: gpu.Part(f"Part {name}", 20.0, f"What {name} shows.") for name in ("fine", "bad", "last")}


def python(source: str) -> Sequence[str]:
    return [sys.executable, "-c", source]


# -- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.covers("J18")
@pytest.mark.parametrize(
    ("gpus", "worlds"),
    [
        (1, [(1, 1, True), (2, 1, False), (3, 1, False)]),
        (2, [(1, 1, True), (2, 1, False), (3, 1, False), (2, 2, True)]),
        (8, [(1, 1, True), (2, 1, False), (3, 1, False), (2, 2, True), (8, 8, True)]),
    ],
)
def test_worlds_follow_from_the_number_of_gpus(gpus: int, worlds: list[tuple[int, int, bool]]) -> None:
    assert [(plan.ranks, plan.visible, plan.nccl) for plan in plan_worlds(gpus)] == worlds


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_ranks_share_a_gpu_only_where_they_see_no_other_one_and_nccl_sums_nothing(gpus: int) -> None:
    assert all(plan.nccl == (plan.ranks <= plan.visible) for plan in plan_worlds(gpus))


@pytest.mark.parametrize(("before", "after"), [(None, "0,1"), ("3,5,7", "3,5"), ("GPU-a", "GPU-a")])
def test_ranks_see_the_first_of_the_gpus_that_the_machine_shows(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with seeing(2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_the_limits_of_all_parts_are_within_eight_minutes() -> None:
    assert gpu.PARTS.keys() == gpu_parts.PARTS.keys()
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= gpu.TOTAL_S == 8 * 60


def test_the_files_of_all_tests_that_need_a_gpu_are_run(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[ALL_ITEMS]
    needing = {item.path for item in items if item.get_closest_marker("gpu")}
    assert needing - set(gpu_parts.gpu_files()) == set()


# -- the run -----------------------------------------------------------------------------------------------


@pytest.mark.covers("J18")
def test_a_part_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    commands = {"fine": python(WRITE), "bad": python(WRITE + "raise ValueError('a bad part')"), "last": python(WRITE)}
    outcomes = gpu.run_all(commands, tmp_path / "folder" / "report.md", "# A heading", PARTS)
    assert {name: one.state for name, one in outcomes.items()} == {
        "fine": "done",
        "bad": "failed, exit code 1",
        "last": "done",
    }
    report = (tmp_path / "folder" / "report.md").read_text()
    assert report.startswith("# A heading\n")
    assert "| Part bad | failed, exit code 1 |" in report
    assert report.splitlines().count("| row |") == 3
    assert report.count("ValueError: a bad part") == 1


def test_a_part_past_its_limit_is_ended_with_its_processes_and_what_it_wrote_stays(tmp_path: Path) -> None:
    parts = PARTS | {"bad": gpu.Part("Part bad", 1.0, "What bad shows.")}
    outcomes = gpu.run_all({"bad": python(HANG), "last": python(WRITE)}, tmp_path / "report.md", "", parts)
    assert [one.state for one in outcomes.values()] == ["cut off after 1 s", "done"]
    assert [one.has_failed for one in outcomes.values()] == [True, False]
    row, child = outcomes["bad"].tables.splitlines()
    assert row == "| row |"
    until(lambda: "sleep" not in _command_line(child), "the end of the part's own process")
    assert "Cut off after 1 s." in (tmp_path / "report.md").read_text()


def _command_line(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_what_no_time_is_left_for_is_left_out(tmp_path: Path) -> None:
    outcomes = gpu.run_all({"fine": python(WRITE), "last": python(WRITE)}, tmp_path / "report.md", "", PARTS, 0.0)
    assert [one.state for one in outcomes.values()] == ["left out: the 0 s were over"] * 2
    assert "| Part last | left out: the 0 s were over | 0 |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_a_line_that_is_not_as_it_must_be_is_named_in_the_report_and_in_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = (
        "import sys; from pathlib import Path; from benchmarks.gpu_machine import Sheet; "
        "sheet = Sheet(Path(sys.argv[-1])); sheet.row('a', 1); sheet.judge('a', ''); sheet.judge('b', 'it has 2')"
    )
    outcomes = gpu.run_all({"fine": python(write)}, tmp_path / "report.md", "", PARTS)
    assert wrong_lines(outcomes["fine"].tables) == ["b: it has 2"]
    assert "\n* WRONG: b: it has 2\n" in (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.splitlines()[1:] == ["  wrong: b: it has 2"]


@pytest.mark.parametrize("state", ["done", "failed, exit code 1", "cut off after 5 s"])
def test_without_a_gpu_all_is_rehearsed_on_two_fake_gpus_and_on_one(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[list[str]], Path, str]] = []

    def fakes(gpus: int, **settings: str) -> dict[str, str]:
        return {"FAKE_CUDA_DEVICES": str(gpus), **settings}

    def run_all(
        commands: dict[str, list[str]], target: Path, heading: str, parts: object, total_s: float, variables: object
    ) -> dict[str, gpu.Outcome]:
        asked.append(([command[-3:] for command in commands.values()], target, heading))
        assert variables == {
            "reads, 2 fake GPUs": fakes(2, shared="1", idle_s="0.5"),
            "reads, 1 fake GPU": fakes(1, shared="1", idle_s="0.5"),
        }
        return {"reads, 1 fake GPU": gpu.Outcome(state)}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_all", run_all)
    monkeypatch.setattr(gpu, "environment", fakes)
    code = 0
    try:
        gpu.report(["reads"])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == (state != "done")
    assert capsys.readouterr().out == "No GPU is there: a rehearsal, into build/gpu-rehearsal.md.\n"
    ((commands, target, heading),) = asked
    assert commands == [["2", "rehearse", "reads"], ["1", "rehearse", "reads"]]
    assert target == ROOT / "build" / "gpu-rehearsal.md"
    assert heading.startswith("# A rehearsal of what needs a GPU\n\nNo GPU was there")


@pytest.mark.parametrize(("names", "limit_s"), [([], 40.0), (["reads"], gpu.TOTAL_S), (["reads", "saves"], 192.0)])
def test_a_few_parts_share_the_time_that_all_may_take(
    names: list[str], limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def run_all(commands: object, target: object, heading: object, parts: dict[str, gpu.Part]) -> dict[str, Any]:
        asked.append(parts["reads"].limit_s)
        assert sum(part.limit_s for part in parts.values()) == pytest.approx(gpu.TOTAL_S)
        return {}

    monkeypatch.setattr(gpu, "run_all", run_all)
    monkeypatch.setattr(gpu, "heading_of", lambda gpus, names: "")
    gpu.measure(names, gpus=1)
    assert asked == [pytest.approx(limit_s)]


def test_without_a_compiler_one_line_says_why_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpus: int, **settings: str) -> dict[str, str]:
        raise NoFakeCuda("the fake GPU needs a C++ compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "environment", refuse)
    with pytest.raises(SystemExit, match=r"^No rehearsal: the fake GPU needs a C\+\+ compiler\.$"):
        gpu.report([])


def test_make_takes_a_python_that_has_what_is_needed_without_setting_anything_up(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "ran: $*"\n')
    fake.chmod(0o755)
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={fake}", "ARGS=reads steps"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=outside)
    assert (done.returncode, done.stdout) == (0, "ran: -m benchmarks gpu reads steps\n"), done.stderr


# -- what the parts find -----------------------------------------------------------------------------------


def count_two_reads() -> tuple[int, dict[str, int]]:
    """The first line of a step that makes the host wait twice, and the places that were counted."""
    value = torch.ones((), device="cuda")

    def step() -> None:
        value.item()
        value.fill_(1.0)
        value[()] = 2.0

    return step.__code__.co_firstlineno, dict(count_reads(step, 5, value.device))


@pytest.mark.covers("J18")
def test_each_wait_for_a_gpu_is_counted_at_its_line(on_fake_gpus: OnRanks) -> None:
    ((first, places),) = on_fake_gpus(1, count_two_reads)
    name = Path(__file__).relative_to(ROOT)
    assert places == {f"{name}:{first + 1}": 5, f"{name}:{first + 3}": 5}
    assert said(Counter(places), 5) == ("2", f"`{name}:{first + 1}` 1, `{name}:{first + 3}` 1")


@pytest.mark.parametrize(
    ("bound", "found", "words", "is_equal"),
    [
        (0.0, [1.0, 2.0], "the same bits", True),
        (0.0, [1.0, 2.5], "OTHER BITS, 2.5e-01", False),
        (1e-12, [1.0, 2.0 + 4e-13], "2.0e-13", True),
        (1e-12, [1.0, 2.0 + 4e-12], "2.0e-12, ABOVE 1e-12", False),
    ],
)
def test_weights_are_equal_within_a_bound_or_in_every_bit(
    bound: float, found: list[float], words: str, is_equal: bool
) -> None:
    training = Training(lambda: torch.nn.Identity(), torch.float64, bound)
    assert verdict(training, found, [1.0, 2.0]) == (words, is_equal)


def count_steps() -> tuple[float, float]:
    """The operations on a GPU of a forward with a backward, and of a fused step of an optimizer with two tensors."""
    model = torch.nn.Linear(3, 2, device="cuda")
    rows = torch.ones(4, 3, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).sum().backward()

    step()
    return count_operations(step, 3), count_operations(optimizer.step, 3)


def test_operations_on_a_gpu_are_counted_in_a_backward_too_and_fused_ones_once(on_fake_gpus: OnRanks) -> None:
    # addmm and sum; ones_like, mm for the weights, sum for the bias
    assert on_fake_gpus(1, count_steps) == [(5.0, 1.0)]


def test_more_than_two_ranks_may_keep_all_pieces() -> None:
    assert (limit_of(1, 0), limit_of(2, 4), limit_of(3, 4)) == (13.0, 21.0, 25.0)


ROWS = {
    "saves": ["| the same bits |", "| resumed |"],
    "worlds": ["the same bits"],
    "reads": ["| ours: as it is | 0 |  |", "| ours: synced batch norm | 0 |", "| ours: predict | 0 |"],
    "endings": ["rank 1 failed in forward of step 3", "was killed by SIGKILL", "Rank 1 is still in forward"],
    "memory": ["| one shard a rank |", "| DDP |"],
    "steps": ["| 30 batch norms of 256 |", "1 rank: ours / plain loop", "1 rank: ours / tuned DDP"],
    "surface": ["| 1,024 |"],
    "determinism": ["deterministic / not", "not / not"],
}
OF_TWO = {"worlds": "| 2 ranks, NCCL |", "steps": "2 ranks: ours / tuned DDP, 64 MiB"}
# Each part on the number of GPUs that asks more of it: on ranks that are there, unless its ranks share a GPU or are
# started by a command. "reads" is in a process of its own, as `make gpu` has all parts; "tests" below, with a fault.
STARTING = {1: ("reads",), 2: ("worlds", "endings")}
ON_RANKS = {1: ("determinism",), 2: ("saves", "memory", "steps")}
SETTINGS = {"shared": "1", "idle_s": str(gpu.IDLE_S)}


def rehearse(part: str, gpus: int, sheet: Path, variables: dict[str, str]) -> tuple[int, str, str]:
    """The exit code of a part, its tables, and the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_parts", str(gpus), "rehearse", part, str(sheet)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, sheet.read_text() if sheet.exists() else "", done.stderr[-3000:]


def fake_gpus(gpus: int) -> dict[str, str]:
    try:
        return environment(gpus, **SETTINGS)
    except NoFakeCuda as why:
        pytest.skip(str(why))


@pytest.mark.slow
@pytest.mark.covers("J18", "H5")
@pytest.mark.parametrize("rehearsal", [(part, gpus) for gpus, parts in STARTING.items() for part in parts])
def test_a_part_is_rehearsed_on_fake_gpus_and_nothing_is_wrong(
    rehearsal: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, gpus = rehearsal
    sheet = tmp_path / "tables.md"
    if part == "reads":
        code, _, output = rehearse(part, gpus, sheet, fake_gpus(gpus))
        assert code == 0, output
    else:
        for name, value in fake_gpus(gpus).items():
            monkeypatch.setenv(name, value)  # of the ranks that the part starts
        report_here(part, gpus, str(sheet))
    check_tables(part, gpus, sheet.read_text())


@pytest.mark.slow
@pytest.mark.covers("J18", "H5")
@pytest.mark.parametrize("rehearsal", [(part, gpus) for gpus, parts in ON_RANKS.items() for part in parts])
def test_a_part_is_rehearsed_on_ranks_that_are_there_and_nothing_is_wrong(
    rehearsal: tuple[str, int], on_fake_gpus: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process imports torch for 3 s, and a part has up to six."""
    part, gpus = rehearsal

    class Lent(AbstractContextManager["Lent"]):
        def __init__(self, ranks: int) -> None:
            assert ranks <= gpus

        def run(self, function: Callable[..., Any], ranks: int, *arguments: Any, **keywords: Any) -> list[Any]:
            return on_fake_gpus(ranks, function, *arguments, **keywords)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(dl, "Pool", Lent)
    for name, value in fake_gpus(gpus).items():
        monkeypatch.setenv(name, value)  # of the job that "saves" starts
    report_here(part, gpus, str(tmp_path / "tables.md"))
    check_tables(part, gpus, (tmp_path / "tables.md").read_text())


@pytest.mark.slow
@pytest.mark.covers("J18")
def test_the_surface_is_rehearsed_on_a_rank_and_nothing_is_wrong(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    on_fake_gpus(1, report_here, "surface", 1, str(tmp_path / "tables.md"))
    check_tables("surface", 1, (tmp_path / "tables.md").read_text())


def report_here(part: str, gpus: int, sheet: str) -> None:
    gpu_parts.PARTS[part](Machine(gpus, rehearsed=True), Sheet(Path(sheet)))


def check_tables(part: str, gpus: int, tables: str) -> None:
    """Nothing is wrong, and the rows of a part are there."""
    assert wrong_lines(tables) == []
    for row in [*ROWS[part], *([OF_TWO[part]] if gpus == 2 and part in OF_TWO else [])]:
        assert row in tables


def check_lines(wrong: list[str], lines: Sequence[str]) -> None:
    """Each of these lines is named, and no other one."""
    assert all(any(one.startswith(line) for one in wrong) for line in lines), wrong
    assert all(one.startswith(tuple(lines)) for one in wrong), wrong


@pytest.mark.slow
@pytest.mark.covers("J18")
@pytest.mark.parametrize(
    ("part", "gpus", "faults", "without", "lines"),
    [
        ("saves", 1, [1], {"kill_and_resume": lambda *_: ""}, ["save and resume, a tensor of 160 KB, 1"]),
        (
            "reads",
            2,
            [2, 3, 7],
            {},
            ["ours: 4 shards, a number as weight", "ours: synced", "ours: evaluate", "ours: predict"],
        ),
        (
            "endings",
            2,
            [4],
            {"FAILURES": []},
            ["steps of more than 1 s and a pause of 2 s: exit code 1", "NCCL_DEBUG=WARN"],
        ),
        (
            "endings",
            2,
            [5, 8],
            {"FAILURES": [one for one in FAILURES if one.how == "hang"]},
            ["hang: no line names rank 1", "NCCL_DEBUG=WARN: NCCL WARN"],
        ),
        ("steps", 1, [6], {"NETWORKS": ()}, ["operations of 30 batch norms of 256"]),
    ],
)
def test_a_fault_that_was_there_once_is_found_and_its_line_is_named(
    part: str,
    gpus: int,
    faults: list[int],
    without: dict[str, Any],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without what the fault does not touch; `rehearse` runs the parts whole."""
    for name, value in {**fake_gpus(gpus), **named(faults)}.items():
        monkeypatch.setenv(name, value)  # of the ranks that the part starts
    report = gpu_parts.PARTS[part]
    for name, value in without.items():
        monkeypatch.setitem(report.__globals__, name, value)
    report(Machine(gpus, rehearsed=True), Sheet(tmp_path / "tables.md"))
    check_lines(wrong_lines((tmp_path / "tables.md").read_text()), lines)


@pytest.mark.slow
@pytest.mark.covers("J18")
def test_a_test_for_gpus_that_wants_other_words_is_named_and_its_part_fails(tmp_path: Path) -> None:
    code, tables, output = rehearse("tests", 2, tmp_path / "tables.md", {**fake_gpus(2), **named([15])})
    assert code == 1, output
    check_lines(wrong_lines(tables), ["`tests/distributed/test_devices.py::test_with_gpus_each_is_described"])


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_has_its_place_in_the_code(number: int) -> None:
    for edit in FAULTS[number]:
        compile(edit.source(), edit.place, "exec")  # raises where the piece is not there once, or does not fit


def test_a_fault_is_put_into_a_function_and_keeps_its_lines() -> None:
    first = said.__code__.co_firstlineno
    before = said.__code__
    try:
        undo = Edit("benchmarks.gpu_reads:said", "number / steps_:g", "number:g").apply()
        assert said.__code__.co_firstlineno == first
        assert "4" in said(Counter({"a": 4}), 2)[1]
        undo()
        assert said.__code__ is before
    finally:
        said.__code__ = before
    with pytest.raises(ValueError, match=r"benchmarks.gpu_reads:said has 'nothing' 0 times: mend"):
        Edit("benchmarks.gpu_reads:said", "nothing", "").apply()
