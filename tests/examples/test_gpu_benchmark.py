"""What `make gpu` does on a machine with GPUs, as far as a CPU can show it: the plan, the limits, the rehearsal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_reads import count_reads, said
from benchmarks.gpu_worlds import Training, plan_worlds, seeing, verdict
from tests.support.device_modes import ASYNCHRONOUS, device_mode_of
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.scripts import run
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
        (0, [(1, 0, False), (2, 0, False)]),
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
    assert not any(one.has_failed for one in outcomes.values())
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


@pytest.mark.parametrize("state", ["done", "failed, exit code 2", "cut off after 5 s"])
def test_without_a_gpu_one_line_says_so_and_the_report_is_that_of_a_rehearsal(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[str], Path, str]] = []

    def run_all(commands: dict[str, list[str]], target: Path, heading: str) -> dict[str, gpu.Outcome]:
        asked.append((list(commands), target, heading))
        assert all(command[-2:] == ["0", name] for name, command in commands.items())
        return {"reads": gpu.Outcome(state)}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_all", run_all)
    code = 0
    try:
        gpu.report(["reads"])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == (state.startswith("failed"))
    assert capsys.readouterr().out == "No GPU is there: a rehearsal, into build/gpu-rehearsal.md.\n"
    ((names, target, heading),) = asked
    assert (names, target) == (["reads"], ROOT / "build" / "gpu-rehearsal.md")
    assert heading.startswith("# A rehearsal of what needs a GPU\n\nNo GPU was there")


def test_make_takes_a_python_that_has_what_is_needed_without_setting_anything_up(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "ran: $*"\n')
    fake.chmod(0o755)
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={fake}", "ARGS=reads steps"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=outside)
    assert (done.returncode, done.stdout) == (0, "ran: -m benchmarks gpu reads steps\n"), done.stderr


# -- what the parts find -----------------------------------------------------------------------------------


@pytest.mark.covers("J18")
def test_each_read_of_a_value_is_counted_at_its_line() -> None:
    value = torch.ones(())

    def step() -> None:
        value.item()
        float(value)

    with device_mode_of(ASYNCHRONOUS):
        places = count_reads(step, 5, value.device)
    first = step.__code__.co_firstlineno
    name = Path(__file__).relative_to(ROOT)
    assert places == {f"{name}:{first + 1}": 5, f"{name}:{first + 2}": 5}
    assert said(places, 5) == ("2", f"`{name}:{first + 1}` 1, `{name}:{first + 2}` 1")


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


ROWS = {
    "tests": ["skipped: Skipped: needs a GPU"],
    "worlds": ["| 1 rank, rehearsed |", "| 2 ranks, rehearsed |", "the same bits"],
    "steps": ["1 rank: ours / plain loop", "2 ranks: ours / tuned DDP", "2 ranks: DDP / DDP"],
    "reads": [
        "| ours: as it is | 0 |  |",
        "| ours: synced batch norm | 0 |",
        "| ours: a script that reads its loss | 1 |",
    ],
    "surface": ["| 1,024 |"],
    "determinism": ["deterministic / not", "not / not"],
}


@pytest.mark.slow
@pytest.mark.covers("J18")
@pytest.mark.parametrize(
    "part", [pytest.param("determinism", marks=pytest.mark.covers("H5")), *sorted(ROWS.keys() - {"determinism"})]
)
def test_every_part_can_be_rehearsed(part: str, tmp_path: Path) -> None:
    sheet = tmp_path / "tables.md"
    done = run("-m", "benchmarks.gpu_parts", "0", part, str(sheet), folder=ROOT)
    assert done.returncode == 0, done.stderr
    tables = sheet.read_text()
    assert [row for row in ROWS[part] if row not in tables] == []
