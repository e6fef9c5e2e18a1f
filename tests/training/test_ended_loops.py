"""A Loop that has ended is freed, with its model, optimizer and data, while the world goes on.

It is freed at once: Python looks for rings of objects by their number, not by the gigabytes of a GPU that they keep.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from ddp_loop.checkpoint import is_running
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, network, samples
from tests.support.runs import checkpoints_of, status_of
from tests.support.sources import Mapped
from tests.support.training import loop_on, sgd, take

pytestmark = pytest.mark.on_gpus_too

HAVE_RINGS = ("rows", "refused")  # a DataLoader's sampler and its Batches; an error and its frames


def size_of(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return outputs.abs().mean(1)


WAYS: dict[str, dict[str, Any]] = {  # options of Loop
    "plain": {},
    "run folder": {"run_dir": "run", "save_every": 1, "progress": True},
    "rows": {"on_row": [lambda row: None], "progress": True},
    "evaluation": {"run_dir": "run"},
    "trace": {"run_dir": "run", "trace": True},
    "stop": {},
    "break": {},
    "nothing left": {"run_dir": "run"},
    "refused": {"steps": -1, "epochs": None},
    "skip": {"on_nonfinite": "skip"},
    "break in a run folder": {"run_dir": "run", "save_every": 1, "on_row": [lambda row: None]},
    "break between epochs": {"run_dir": "run", "save_every": 3},
}


def train_once(world: dl.World, way: str, folder: str) -> dict[str, weakref.ref[object]]:
    model, data = network(), Mapped(12, samples(12).__getitem__) if way == "rows" else samples(12)
    model.add_module("norm", torch.nn.BatchNorm1d(1, dtype=torch.float64))
    optimizer = sgd(model, 0.9)
    batches = dl.Batches(data, 6, world, shuffle=False)
    known: dict[str, object] = {"model": model, "weight": model[0].weight, "optimizer": optimizer, "data": data}
    known["norm"] = model.norm
    options = {"epochs": 2, "progress": False, **WAYS[way]}
    options["run_dir"] = folder if "run_dir" in options else None
    try:
        loop = loop_on(batches, model, optimizer, **options)
    except ValueError:
        assert way == "refused"
        return {name: weakref.ref(one) for name, one in known.items()}
    with suppress(dl.Stopped):
        for epoch in loop.epochs():
            for step in epoch:
                take(step, model)
                optimizer.step()
                if way == "stop":
                    loop.stop()
                if way in ("break", "break in a run folder"):
                    break
            if "break" in way:
                break
    if way == "evaluation":
        dl.evaluate(model, batches, size=size_of)
    known |= {"loop": loop, "fold": loop.fold}
    if (held := loop._recorder._held) is not None and held.copied is not None:
        known |= {f"copy of {name}": one for name, one in held.copied.tensors.items()}
    return {name: weakref.ref(one) for name, one in known.items()}


def living(way: str, folder: str) -> list[set[str]]:
    """What is left of each loop, where Python does not look for rings meanwhile."""
    found = []
    with dl.join_world() as world:
        train_once(world, way, f"{folder}/first")  # torch's first optimizer leaves some
        gc.collect()
        gc.disable()
        try:
            for number in range(3):
                place = folder if way == "nothing left" else f"{folder}/{number}"
                kept = train_once(world, way, place)
                world.gather(number)  # what a loop left deferred runs before a collective
                if way in HAVE_RINGS:
                    gc.collect()
                found.append({name for name, one in kept.items() if one() is not None})
        finally:
            gc.enable()
    return found


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way == "run folder" else []) for way in WAYS]
)
def test_an_ended_loop_is_freed_with_model_optimizer_and_data(way: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, living, way, str(tmp_path / "run")) == [[set()] * 3] * 2


def leave_by_an_error(world: dl.World) -> dict[str, weakref.ref[object]]:
    model = network()
    optimizer = sgd(model, 0.9)
    loop = loop_on(dl.Batches(samples(12), 6, world), model, optimizer, epochs=2, progress=False)
    known = {"model": model, "weight": model[0].weight, "optimizer": optimizer, "loop": loop, "fold": loop.fold}
    with suppress(ZeroDivisionError):
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean() * (1 / (step.iteration < 2)))
            step.fold()
            optimizer.step()
    return {name: weakref.ref(one) for name, one in known.items()}


def living_after_an_error() -> list[str]:
    """What is left of a loop that an error of the script left inside a step, before a collective follows."""
    with dl.join_world() as world:
        leave_by_an_error(world)  # torch's first optimizer leaves some
        known = leave_by_an_error(world)
        gc.collect()
        return [name for name, one in known.items() if one() is not None]


def test_a_loop_that_an_error_left_is_freed_before_the_next_collective(on_ranks: OnRanks) -> None:
    assert on_ranks(2, living_after_an_error) == [[], []]


def leave_between_epochs(folder: str, ends: str) -> list[str]:
    """The statuses when the loop was left, when it was freed, and when the world was left."""
    found = []
    with suppress(ZeroDivisionError), dl.join_world() as world:
        model = network()
        optimizer = sgd(model)
        loop = loop_over(world, folder, model, optimizer, count=12, epochs=3, save_every=3)
        for epoch in loop.epochs():
            for step in epoch:
                take(step, model)
            break
        found.append(status_of(Path(folder))["status"])
        loop.save(0.5)
        del loop, model, optimizer, step, epoch
        gc.collect()
        assert world.gather(is_running(Path(folder))) == [True] * world.size
        found.append(status_of(Path(folder))["status"])
        if ends == "an error":
            1 / 0  # noqa: B018
    return [*found, status_of(Path(folder))["status"]]


@pytest.mark.parametrize(("ends", "status"), [("its end", "left"), ("an error", "failed")])
@pytest.mark.slow
def test_a_run_whose_loop_was_left_ends_with_the_world_and_saves_what_was_asked_for(
    ends: str, status: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, *_ = on_ranks(2, leave_between_epochs, str(tmp_path), ends)
    assert first == ["running", "running", status]
    assert checkpoints_of(tmp_path) == [2]
    assert not is_running(tmp_path)
