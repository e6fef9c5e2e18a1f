"""`Loop(profile=...)`: what it measures, prints and writes, and what it leaves as it is."""

from __future__ import annotations

import json
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.calls import count
from ddp_loop.profiling import WARM_UP
from ddp_loop.profiling.clock import PHASES
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.profiles import in_planned_time, spend

STEPS = 4
pytestmark = pytest.mark.covers("J11")


def train(run: str | None = None, profile: int | None = STEPS, between_s: float = 0.0) -> dict[str, Any]:
    """A run of 12 steps in 4 epochs, with a pause after each epoch."""
    printed = StringIO()
    with redirect_stdout(printed), dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        batches = dl.Batches(make_data((6,), 48), 16, world, shards=4)
        state = {"model": model, "optimizer": optimizer}
        ends, begins = [], []
        loop = dl.Loop(batches, 4, state=state, run_dir=run, progress=False, profile=profile)
        for epoch in loop.epochs():
            for step in epoch:
                begins.append(time.perf_counter())
                for inputs, labels in step:
                    step.backward(cross_entropy(model(inputs), labels))
                step.fold()
                optimizer.step()
                ends.append(time.perf_counter())
            time.sleep(between_s)
        whole = [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
    return {"printed": printed.getvalue(), "begins": begins, "ends": ends, "weights": whole}


def profile_in(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "profile" / "profile.json").read_text())
    return found


@pytest.mark.on_gpus_too
@pytest.mark.slow
def test_the_table_is_printed_and_written_with_a_trace_of_each_rank(
    late: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, second = on_ranks(2, train, str(tmp_path / "run"))
    found, lines, where = profile_in(tmp_path / "run"), first["printed"].splitlines(), "cuda" if late else "cpu"
    assert lines[0] == f"Profile: {STEPS} steps after {WARM_UP} of warm-up, 2 ranks on {where}. Milliseconds per step:"
    assert [line.split()[0] for line in lines[1:5]] == ["rank", "0", "1", "share"]
    assert second["printed"] == ""
    assert [(one["rank"], one["steps"], one["samples"], one["shards"]) for one in found["ranks"]] == [
        (rank, STEPS, 8.0, 2) for rank in range(2)
    ]
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"trace-rank-{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        phases = {"data", "forward", "backward", "communication", "fold"}
        assert {f"ddp_loop: {phase}" for phase in phases} <= names
        assert "Optimizer.step#Adam.step" in names


def test_the_phases_add_up_to_the_time_of_the_steps_and_leave_out_what_is_between_epochs(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    between_s = 0.3
    (done,) = on_ranks(1, train, str(tmp_path / "run"), between_s=between_s)
    (one,) = profile_in(tmp_path / "run")["ranks"]
    assert one["step_s"] == sum(one["phases"][phase] for phase in PHASES)
    begins, ends, last = done["begins"], done["ends"], WARM_UP + STEPS
    # Steps 6 to 9 are measured; 6 and 9 end an epoch, and the pauses after them do not count.
    inside = sum(end - begin for begin, end in zip(begins[WARM_UP:last], ends[WARM_UP:last], strict=True))
    assert inside <= STEPS * one["step_s"] <= begins[last] - ends[WARM_UP - 1] - 2 * between_s


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_a_profile_changes_no_bit_of_the_result(on_ranks: OnRanks, tmp_path: Path) -> None:
    profiled, plain = (on_ranks(2, train, profile=steps) for steps in (STEPS, None))
    assert plain[0]["printed"] == ""
    for one, other in zip(profiled, plain, strict=True):
        assert all(map(torch.equal, one["weights"], other["weights"]))


def test_without_a_profile_a_step_runs_none_of_its_code() -> None:
    files = set(count(rows=False).files)
    assert not [file for file in files if "profil" in file]


def gathers(run: str) -> None:
    """Steps with held outputs, a gather, and two passes."""
    with dl.join_world(seed=0) as world:
        model = torch.nn.Linear(6, 3).double()
        batches = dl.Batches(make_data((6,), 40), 4, world)
        for step in dl.Loop(batches, 1, state={"model": model}, run_dir=run, progress=False, profile=STEPS):
            for inputs, _ in step:
                step.hold(model(inputs))
            spend(0.01 * world.rank)
            step.backward(step.gather().square().mean())
            step.fold()
            for inputs, _ in step:
                step.backward(model(inputs).mean())
            step.fold()
            spend(0.05 * world.rank)
            time.sleep(0.05 * world.rank)  # its times come after rank 0 has measured its last step


def test_a_gather_is_communication_and_each_pass_of_a_step_counts(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, in_planned_time, tmp_path, gathers, str(tmp_path / "run"))
    found = profile_in(tmp_path / "run")
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["wait_s"] >= 0.01
    assert found["ranks"][1]["phases"]["other"] >= 0.05


def ends_early(run: str, at: int, fails: bool) -> str:
    """What a run prints whose rank 1 fails or stops in a step."""
    printed = StringIO()
    with suppress(LookupError, dl.PeerFailed, dl.Stopped), redirect_stdout(printed), dl.join_world(seed=0) as world:
        model = torch.nn.Linear(6, 3).double()
        batches = dl.Batches(make_data((6,), 80), 4, world)
        loop = dl.Loop(batches, 1, state={"model": model}, run_dir=run, profile=10, progress=False)
        for step in loop:
            for inputs, _ in step:
                step.backward(model(inputs).mean())
            if step.iteration == at and world.rank == 1:
                if fails:
                    raise LookupError("planted")
                loop.stop()
            step.fold()
    return printed.getvalue()


@pytest.mark.parametrize(
    ("at", "fails", "steps"), [(WARM_UP + 3, False, [3, 3]), (2, False, []), (WARM_UP + 4, True, [3, 3])]
)
def test_a_run_that_ends_early_has_the_whole_steps_until_then(
    at: int, fails: bool, steps: list[int], on_ranks: OnRanks, tmp_path: Path
) -> None:
    said, _ = on_ranks(2, ends_early, str(tmp_path / "run"), at, fails)
    assert [one["steps"] for one in profile_in(tmp_path / "run")["ranks"]] == steps
    heading = f"Profile: 3 of 10 steps after {WARM_UP} of warm-up, 2 ranks on cpu. Milliseconds per step:"
    assert (heading in said) == bool(steps)


def train_beside_a_profiler(run: str) -> tuple[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        printed = train(run)["printed"]
    return printed, len(profiler.events())


@pytest.mark.slow
def test_where_the_script_runs_torchs_profiler_there_is_no_second_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    ((said, events),) = on_ranks(1, train_beside_a_profiler, str(tmp_path / "run"))
    assert "ddp_loop: No Chrome trace is written, since the script runs torch's profiler itself.\n" in said
    assert events > 100
    assert profile_in(tmp_path / "run")["ranks"][0]["steps"] == STEPS
