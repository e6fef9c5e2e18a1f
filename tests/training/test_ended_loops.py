"""A Loop that has ended is freed, with its model, optimizer and data, while the world goes on."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples

pytestmark = pytest.mark.both_modes

WAYS = ("plain", "run folder", "rows", "evaluation", "trace", "stop", "break", "nothing left", "refused", "skip")


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = samples(12)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def size_of(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return outputs.abs().mean(1)


def options_of(way: str, folder: str) -> dict[str, object]:
    options: dict[str, dict[str, object]] = {
        "run folder": {"run_dir": folder, "save_every": 1, "progress": True},
        "rows": {"on_row": [lambda row: None], "progress": True},
        "evaluation": {"run_dir": folder},
        "trace": {"run_dir": folder, "trace": True},
        "nothing left": {"run_dir": folder},
        "refused": {"steps": -1},
        "skip": {"on_nonfinite": "skip"},
    }
    return options.get(way, {})


def train_once(world: dl.World, way: str, folder: str, *, in_memory: bool) -> dict[str, weakref.ref[object]]:
    model, data = network(), samples(12) if in_memory else Rows()
    model.add_module("norm", torch.nn.BatchNorm1d(1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = dl.Batches(data, 6, world, shuffle=False)
    state = {"model": model, "optimizer": optimizer}
    known: dict[str, object] = {"model": model, "weight": model[0].weight, "optimizer": optimizer, "data": data}
    options = {"epochs": None if way == "refused" else 2, "progress": False, **options_of(way, folder)}
    try:
        loop = dl.Loop(batches, state=state, **options)  # type: ignore[arg-type]
    except ValueError:
        assert way == "refused"
        return {name: weakref.ref(one) for name, one in known.items()}
    with suppress(dl.Stopped):
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
            if way == "stop":
                loop.stop()
            if way == "break":
                break
    if way == "evaluation":
        dl.evaluate(model, batches, size=size_of)
    known |= {"loop": loop, "fold": loop.fold}
    return {name: weakref.ref(one) for name, one in known.items()}


def living(way: str, folder: str, *, in_memory: bool) -> list[set[str]]:
    found = []
    with dl.join_world() as world:
        for number in range(3):
            place = folder if way == "nothing left" else f"{folder}/{number}"
            kept = train_once(world, way, place, in_memory=in_memory)
            world.gather(number)  # what a loop left deferred runs before a collective
            gc.collect()
            found.append({name for name, one in kept.items() if one() is not None})
    return found


@pytest.mark.quick_in_both_modes
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way == "run folder" else []) for way in WAYS]
)
def test_an_ended_loop_is_freed_with_model_optimizer_and_data(
    way: str, ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    for found in on_ranks(ranks, living, way, str(tmp_path / "run"), in_memory=way != "rows"):
        assert found == [set()] * 3
