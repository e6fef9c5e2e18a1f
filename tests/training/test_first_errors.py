"""What a first script meets: lengths, numbers of NumPy, notices and warnings; see also test_step_refusals.py."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, loss_of, network, samples
from tests.support.sources import Streamed
from tests.support.training import loop_on, sgd, take, train


def test_a_loop_and_its_batches_have_lengths(world: dl.World) -> None:
    batches = dl.Batches(samples(10), 4, world)
    endless = dl.Batches(lambda index: torch.ones(1), 4, world)
    options: dict[str, Any] = {"state": {"model": network()}, "progress": False}
    assert (batches.length, len(batches)) == (10, 3)
    assert dl.Loop(batches, 2, **options).batches is batches
    for epochs, steps, length in ((2, None, 6), (2, 5, 5), (2, 50, 6), (None, 7, 7)):
        assert len(dl.Loop(batches, epochs, steps=steps, **options)) == length
    assert len(dl.Loop(endless, steps=9, **options)) == 9
    with pytest.raises(TypeError, match="len\\(\\) is not defined"):
        len(dl.Loop(dl.Batches(Streamed(lambda: samples(3)), 4, world), 1, **options))


def last_iteration(folder: str, stop_at: int | None) -> tuple[int, int]:
    with dl.join_world() as world:
        loop = loop_over(world, folder, model := network(), epochs=2)
        with suppress(dl.Stopped):
            for step in loop:
                for rows in step:
                    step.backward(loss_of(model, rows))
                if step.iteration == stop_at:
                    loop.stop()
                step.fold()
        return loop.iteration, len(loop)


def test_the_length_of_a_resumed_loop_is_that_of_the_whole_run(tmp_path: Path) -> None:
    assert last_iteration(str(tmp_path), 3) == (3, 8)
    assert last_iteration(str(tmp_path), None) == (8, 8)


def run_with_numpys_numbers(folder: str) -> list[int]:
    one: Any = np.int64
    with dl.join_world(seed=one(1), threads=one(1)) as world:
        model = network()
        batches = dl.Batches(samples(24), one(6), world, shards=one(2), seed=one(1))
        assert type(batches.batch_size) is int
        keywords: Any = {"steps": one(3), "save_every": one(2), "keep_last": one(2), "check_replicas_every": one(2)}
        loop = loop_on(batches, model, epochs=one(2), run_dir=folder, **keywords)
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows), weight=one(3))
            step.fold()
        return [loop.iteration, len(loop), dl.EarlyStopping(model, one(3)).patience, dl.split_sizes(one(4), one(3))[0]]


def test_integers_of_numpy_are_whole_numbers(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, run_with_numpys_numbers, str(tmp_path)) == [[3, 3, 3, 2]] * 2
    with dl.deterministic(seed=np.int64(3)):  # type: ignore[arg-type]
        pass


NOTICES = (
    "state has no optimizer, so checkpoints keep none",
    "The scheduler of 'optimizer' is not in state, so",
    "'optimizer' trains parameters that no module in state has.",
)


class Holder:
    """A part of a state that is no module, and has one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.state_dict = model.state_dict
        self.load_state_dict = model.load_state_dict


@pytest.mark.parametrize(
    ("keys", "keeps", "told"),
    [
        ("model", True, [1, 0, 0]),
        ("model schedule", True, [1, 0, 0]),
        ("model head optimizer", True, [0, 1, 0]),
        ("model head optimizer schedule", True, [0, 0, 0]),
        ("both optimizer schedule", True, [0, 0, 0]),
        ("model holder optimizer schedule", True, [0, 0, 0]),
        ("model optimizer schedule", True, [0, 0, 1]),
        ("optimizer schedule", True, [0, 0, 1]),
        ("model", False, [0, 0, 0]),
        ("model optimizer", False, [0, 0, 0]),
    ],
)
def test_a_run_whose_state_lacks_what_is_trained_gets_one_notice(
    keys: str, keeps: bool, told: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with dl.join_world() as world:
        model = network()
        head = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
        parts = {
            "model": model, "head": head, "both": torch.nn.Sequential(model, head), "holder": Holder(head),
            "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }  # fmt: skip
        state = {key: parts[key] for key in keys.split()}
        folder = tmp_path if keeps else None
        for step in dl.Loop(dl.Batches(samples(24), 24, world), 1, state=state, run_dir=folder, progress=False):
            for rows in step:
                step.backward(loss_of(model, rows) + head.weight.sum())
            step.fold()
    said = capfd.readouterr().out
    assert [said.count(notice) for notice in NOTICES] == told


class Foreign(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the script's own, which does not say what it drives."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(("more", "times"), [({}, 1), ({"foreign": Foreign()}, 0)], ids=["none", "foreign"])
def test_a_scheduler_made_after_the_loop_is_missed_also_beside_one_in_state(
    more: dict[str, object], times: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with dl.join_world() as world:
        model = network()
        first = sgd(model)
        second = sgd(model)
        schedule = torch.optim.lr_scheduler.StepLR(first, 1)
        state = {"model": model, "first": first, "second": second, "schedule": schedule, **more}
        loop = dl.Loop(dl.Batches(samples(24), 24, world), 2, state=state, run_dir=tmp_path, progress=False)
        torch.optim.lr_scheduler.LinearLR(second, total_iters=len(loop))
        for step in loop:
            take(step, model)
            second.step()
    said = capfd.readouterr().out
    assert said.count("The scheduler of 'second' is not in state, so a resumed run would start it again.") == times


@pytest.mark.covers("E5")
def test_a_resumed_run_says_once_that_a_scheduler_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for epochs in (1, 2):  # the second run repeats the first's epoch without a step
        with dl.join_world() as world:
            model = network()
            optimizer = sgd(model)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            batches = dl.Batches(samples(24), 24, world)
            for epoch in loop_on(batches, model, optimizer, epochs=epochs, run_dir=tmp_path).epochs():
                for step in epoch:
                    take(step, model)
                    optimizer.step()
                schedule.step()
        assert capfd.readouterr().out.count("The scheduler of 'optimizer' is not in state") == 1


def fold_weights(weight: Any, factor: float = 1.0) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(
            network(), lambda model, rows: factor * loss_of(model, rows), shards=2,
            weight=lambda step: weight if step.iteration in (2, 3) else 1.0,
        )  # fmt: skip
    return [str(one.message) for one in told if "weights of a mini-batch" in str(one.message)]


@pytest.mark.parametrize("weight", [0, torch.tensor(0.0)])
def test_a_mini_batch_whose_weights_are_all_0_is_warned_about_once(weight: Any) -> None:
    (told,) = fold_weights(weight)
    assert "first in step 2" in told
    assert "Pass step.backward a weight above 0" in told


def test_a_loss_of_exactly_0_is_not_taken_for_one_without_weights() -> None:
    assert fold_weights(2.0, factor=0.0) == fold_weights(1.0) == []


def skip_with_an_unknown_scaler(world: dl.World, folder: str) -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = sgd(model)
    for step in loop_over(world, folder, model, optimizer, on_nonfinite="skip"):
        for rows in step:
            step.backward(scaler.scale(loss_of(model, rows) * float("inf")))
        step.fold()
        scaler.step(optimizer)


def test_skipping_with_a_scaler_outside_of_the_state_names_it(refused: Refused) -> None:
    said = r"No inf checks were recorded .* Pass Loop state=dict\(.*scaler=scaler\)"
    refused(2, skip_with_an_unknown_scaler, kind="AssertionError", said=said)


def run_out_of_memory(world: dl.World, folder: str, kind: type[Exception]) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        for rows in step:
            if world.rank == 1 and step.iteration == 2:
                if kind is RuntimeError:
                    torch.empty(2**50, dtype=torch.uint8, device="cpu")  # torch's own words
                raise kind("2 GiB are not to be had.")
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_names_more_shards(kind: type[Exception], refused: Refused) -> None:
    lacking = "can't allocate memory" if kind is RuntimeError else "2 GiB are not to be had"
    said = rf"{lacking}.*More shards need less memory: Batches\(\.\.\., shards=8\)"
    refused(2, run_out_of_memory, kind, kind=kind.__name__, said=said, by=1)
