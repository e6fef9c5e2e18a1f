"""All ranks stop after the same step, with a checkpoint, whichever is asked and how; and resume to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.checkpoint import STOP, stop_and_wait
from ddp_loop.cli import main
from ddp_loop.distributed import Pool
from tests.faults import stop_scripts
from tests.faults.stop_anywhere import campaign
from tests.support.harness import FAULT_S, OnRanks, caught
from tests.support.resuming import samples
from tests.support.runs import LONG_S, ask, checkpoints_of, digests, endless, rows_of, status_of

pytestmark = pytest.mark.covers("E5")

EPOCHS, STEPS, BATCH, SHARDS = 2, 5, 24, 6
ALL = list(range(1, EPOCHS * STEPS + 1))
KINDS = ("SIGTERM", "SIGINT", "file", "call")


@dataclass
class Ended:
    """How a rank ended: its steps, the state's digests, evaluations; and two times."""

    made: list[int] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    evaluated: list[dict[str, float]] = field(default_factory=list)
    exit_code: object = None
    asked_at: float = 0.0
    ended_at: float = 0.0


def train(folder: str, kind: str = "", place: str = "forward", at: int = 4, by: int = 1, **keywords: Any) -> Ended:
    """Two epochs of 5 steps with an evaluation after each; rank `by` is asked at a place of step `at`."""
    ended = Ended()
    try:
        with dl.join_world(seed=3) as world:
            train_in(world, ended, folder, kind, place, at, by, **keywords)
    except dl.Stopped as error:
        ended.exit_code = error.code
        assert not multiprocessing.active_children()  # workers end with the loop
    ended.ended_at = time.monotonic()
    return ended


def train_in(
    world: dl.World, ended: Ended, folder: str, kind: str, place: str, at: int, by: int, workers: int = 0,
    **keywords: Any,
) -> None:  # fmt: skip
    world.__dict__["process_of_rank_0"] = world.gather(os.getpid())[0]
    inputs, labels = samples(BATCH * STEPS)
    data: Any = torch.utils.data.TensorDataset(inputs, labels) if workers else (inputs, labels)
    options: dict[str, Any] = {"num_workers": workers} if workers else {}
    batches = dl.Batches(data, BATCH, world, shards=SHARDS, **options)
    held_out = dl.Batches((inputs, labels), 2, world, shuffle=False, shards=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer, notes = torch.optim.Adam(model.parameters(), lr=0.01), dict[str, Any](values=[])
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "notes": notes}
    loop = dl.Loop(batches, EPOCHS, state=state, run_dir=folder or None, progress=False, **keywords)

    def here(now: str) -> None:
        if kind and now == place and loop.iteration == at:
            ended.asked_at = ended.asked_at or time.monotonic()
            if world.rank == by and world.stops.asked is None:
                ask(kind, folder, loop)
            elif now == "evaluate":
                time.sleep(0.1)  # 60 mini-batches: 6 s without the stop

    def hits(output: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        here("evaluate")
        return output.argmax(1) == right

    for epoch in loop.epochs():
        for step in epoch:
            for images, classes in step:
                here("forward")
                step.backward(cross_entropy(model(images), classes))
            step.fold()
            optimizer.step()
            notes["values"].append(float(torch.rand(())))
            ended.made.append(step.iteration)
        ended.evaluated.append(dl.evaluate(model, held_out, hits=hits))
        notes["values"].append(ended.evaluated[-1]["hits"])
    ended.state = digests(state)


def assert_goes_on(on_ranks: OnRanks, run: Path, whole: Ended, at: int) -> None:
    """The run stopped at this step; on two ranks it resumes and ends as the undisturbed run."""
    said = status_of(run)
    assert (said["status"], said["iteration"], said["checkpoint"]) == ("stopped", at, f"step-{at:08d}")
    assert checkpoints_of(run)[-1] == at
    assert rows_of(run) == ALL[:at]
    assert not (run / STOP).exists()
    for ended in on_ranks(2, train, str(run)):
        assert ended.made == ALL[at:]
        assert [name for name, bits in whole.state.items() if ended.state[name] != bits] == []
    assert rows_of(run) == ALL
    assert status_of(run)["status"] == "done"


# -- the same step on all ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.both_exchanges
@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step_and_go_on_to_the_same_bits(
    kind: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    whole = on_ranks(1, train, "")[0]
    why = {"SIGINT": "Ctrl-C at rank 1", "file": "the file stop in its folder"}.get(kind, f"{kind} at rank 1")
    for ended in on_ranks(3, train, str(tmp_path), kind):
        assert (ended.made, ended.exit_code, ended.evaluated) == (ALL[:4], 0, [])
    assert status_of(tmp_path)["why"] == ("loop.stop()" if kind == "call" else why)
    assert_goes_on(on_ranks, tmp_path, whole, 4)


@pytest.mark.parametrize(("kind", "save_every"), [("SIGTERM", None), ("file", 4)])
@pytest.mark.slow
def test_a_stop_in_a_long_evaluation_is_obeyed_at_once(
    kind: str, save_every: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    whole = on_ranks(1, train, "")[0]
    arguments = str(tmp_path), kind, "evaluate", STEPS
    results = on_ranks(3, train, *arguments, save_every=save_every)
    for ended in results:
        assert (ended.made, ended.exit_code, ended.evaluated) == (ALL[:STEPS], 0, [])
        assert ended.ended_at - results[1].asked_at < FAULT_S  # 0.1 to 0.4 s where nothing else runs
    for ended in on_ranks(2, train, *arguments, save_every=save_every):  # and again, in the same one
        assert (ended.made, ended.exit_code) == ([], 0)
    assert status_of(tmp_path)["why"] == ("SIGTERM at rank 1" if kind == "SIGTERM" else "the file stop in its folder")
    assert_goes_on(on_ranks, tmp_path, whole, STEPS)


@pytest.mark.slow
def test_a_signal_to_a_rank_and_its_workers_leaves_these_to_the_step(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(1, train, "")[0]
    at = STEPS + 3  # the workers of the first epoch have ended by then, which is not taken for a request
    for ended in on_ranks(2, train, str(tmp_path), "all processes of rank 0", at=at, workers=1):
        assert (ended.made, ended.exit_code) == (ALL[:at], 0)
    assert status_of(tmp_path)["why"] == "SIGTERM at rank 0"
    assert_goes_on(on_ranks, tmp_path, whole, at)


def predict_until_stopped(folder: str) -> tuple[object, int, list[int]]:
    """Ask rank 0 to stop in a prediction after the second epoch; returns what ends it, and the shards it read."""
    seen: list[int] = []
    try:
        with dl.join_world() as world:
            loop, make = endless(world, run_dir=folder, save_every=3)

            def forward(model: nn.Module, data: Any) -> torch.Tensor:
                seen.append(len(data))
                if world.rank == 0 and epoch.number == 2:
                    ask("SIGTERM", folder, loop)
                return torch.ones(len(data))

            held_out = dl.Batches(torch.ones(40, 3), 4, world, shuffle=False, shards=2)
            for epoch in loop.epochs():
                for step in epoch:
                    make(step)
                dl.predict(nn.Identity(), held_out, forward=forward)
    except dl.Stopped as error:
        return error.code, loop.iteration, seen
    raise AssertionError("it was not stopped")


def test_a_stop_in_a_prediction_is_obeyed_at_once(on_ranks: OnRanks, tmp_path: Path) -> None:
    (code, at, seen), (also, at_too, _) = on_ranks(2, predict_until_stopped, str(tmp_path))
    assert (code, also, at, at_too, len(seen)) == (0, 0, 4, 4, 11)
    assert checkpoints_of(tmp_path) == [3, 4]


def what_follows_a_stop(by_epochs: bool) -> list[str]:
    """What a script can still do after a stop in its second epoch."""
    done: list[str] = []
    with dl.join_world() as world:
        loop, make = endless(world)
        batches = dl.Batches(torch.ones(8, 3), 4, world, shuffle=False)
        with suppress(dl.Stopped):
            for epoch in loop.epochs() if by_epochs else ():
                for step in epoch:
                    make(step)
                    if step.iteration == 2:
                        loop.stop()
                done.append(f"what follows epoch {epoch.number}")
            for step in () if by_epochs else loop:
                make(step)
                if step.iteration == 2:
                    loop.stop()
            done.append("what follows the loop")
        model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
        calls: dict[str, Callable[[], object]] = {
            "evaluate": lambda: dl.evaluate(model, batches, mean=lambda output, rows: output),
            "predict": lambda: dl.predict(model, batches),
            "update_bn": lambda: dl.update_bn(model, batches),
            "the loop": lambda: list(loop),
        }
        for name, call in calls.items():
            kind, _, _ = caught(call)
            done.append(f"{name}: {kind}")
        loop, make = endless(world)
        for step in loop:
            make(step)
            break
        done.append(f"{dl.evaluate(model, batches)['samples']} samples in another loop")
    return done


@pytest.mark.covers("J5")
@pytest.mark.parametrize("by_epochs", [True, False])
def test_nothing_follows_a_stop(by_epochs: bool, on_ranks: OnRanks) -> None:
    refused = [f"{name}: Stopped" for name in ("evaluate", "predict", "update_bn", "the loop")]
    expected = [*(["what follows epoch 1"] if by_epochs else []), *refused, "8 samples in another loop"]
    assert on_ranks(2, what_follows_a_stop, by_epochs) == [expected] * 2


# -- asked from outside ----------------------------------------------------------------------------------------


def stop_by_command(folder: str) -> tuple[int, list[str]]:
    """A thread of rank 1 asks for a stop and waits until the run has ended."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(str(stop_and_wait(Path(folder), LONG_S, said.append))))
    with dl.join_world() as world:
        loop, make = endless(world, run_dir=folder)
        with suppress(dl.Stopped):
            for step in loop:
                if world.rank == 1 and step.iteration == 2:
                    thread.start()
                make(step)
    if world.rank == 1:
        thread.join()
    return loop.iteration, said


def test_the_command_stops_a_run_and_says_where(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (at, _), (also, said) = on_ranks(2, stop_by_command, str(tmp_path))
    assert at == also == status_of(tmp_path)["iteration"]
    assert said[:2] == [
        f"{tmp_path}: stopping after the current step",
        f"{tmp_path}: stopped at step {at}, checkpoint step-{at:08d}",
    ]
    assert said[2].startswith("to go on: cd ")
    assert said[3:] == ["True"]
    for folder, why in ((tmp_path, " (status: stopped)."), (tmp_path / "other", "has no run.json")):
        assert main(["stop", str(folder)]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.covers("J5")
@pytest.mark.parametrize(("times", "dwell_s"), [(2, 0.001), pytest.param(30, 0.004, marks=pytest.mark.slow)])
def test_a_script_ends_at_a_random_stop_and_makes_up_for_it_to_the_same_bits(
    times: int, dwell_s: float, pool: Pool, tmp_path: Path
) -> None:
    counts = stop_scripts.campaign(pool, tmp_path, times, seed=3, dwell_s=dwell_s)
    assert counts.broken == []
    assert (counts.stops, counts.equal) == (times, counts.runs)


@pytest.mark.slow
@pytest.mark.both_exchanges
def test_wherever_the_request_comes_the_run_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    counts = campaign(pool, tmp_path, times=3, by_torchrun=0, seed=7, epochs=2)
    assert counts.broken == []
    assert counts.same == counts.kept == counts.equal == counts.stops >= 3
