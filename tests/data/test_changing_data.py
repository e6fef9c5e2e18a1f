"""What a script changes between two steps shows in the next step's data, as in a loop for one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import RankFailed
from tests.support.harness import OnRanks
from tests.support.own_data import made_steps
from tests.support.sources import Mapped, Streamed

SIZE, EPOCHS = 8, 2
ROWS = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def opposed(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The rows moved to where the loss of the current weights is larger."""
    with torch.enable_grad():
        moved = rows.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).square().sum(), moved)
    return rows + 0.1 * slope


def jobs(model: nn.Module) -> dict[str, tuple[Any, dict[str, Any], Callable[[], object]]]:
    """By name: the data, the options of `Batches`, and what the script does after each step."""
    level = [0.0]
    kept = ROWS.clone()

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        return opposed(model, torch.stack(rows))

    def rise() -> None:
        level[0] += 0.1

    def nothing() -> None:
        pass

    return {
        "a transform": (ROWS, {"transform": lambda rows, draws: opposed(model, rows)}, nothing),
        "a collate_fn": (list(ROWS), {"collate_fn": collate}, nothing),
        "a stream": (Streamed(lambda: ROWS), {"collate_fn": collate}, nothing),
        "a data set": (Mapped(len(ROWS), lambda index: ROWS[index] * (1 + level[0])), {}, rise),
        "tensors": (kept, {}, lambda: kept.mul_(1.1)),
    }


def plain(name: str) -> list[float]:
    """The weights after the loop for one device, of whole mini-batches."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    factor = 1.0
    for start in [*range(0, len(ROWS), SIZE)] * EPOCHS:
        rows = ROWS[start : start + SIZE]
        if name in ("a transform", "a collate_fn", "a stream"):
            rows = opposed(model, rows)
        sgd.zero_grad()
        model(rows * factor).square().mean().backward()
        sgd.step()
        factor = {"a data set": factor + 0.1, "tensors": factor * 1.1}.get(name, 1.0)
    return model.weight.flatten().tolist()


def network() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def train() -> dict[str, list[float]]:
    """The weights of each job in the end."""
    found = {}
    for name in jobs(network()):
        with dl.join_world(seed=0) as world:
            model = network()
            data, options, change = jobs(model)[name]
            shuffle = None if name == "a stream" else False
            batches = dl.Batches(data, SIZE, world, shards=4, shuffle=shuffle, **options)
            for _ in made_steps(batches, model, EPOCHS, torch.optim.SGD(model.parameters(), 0.5)):
                change()
            found[name] = model.weight.flatten().tolist()
    return found


@pytest.mark.covers("B1")
def test_what_a_script_changes_between_steps_is_read_in_the_next_step(on_ranks: OnRanks) -> None:
    (alone,) = on_ranks(1, train)
    assert len(alone) == 5
    for name, weights in alone.items():
        assert weights == pytest.approx(plain(name), rel=1e-12, abs=1e-12), name
    for ranks in (2, 3):
        assert on_ranks(ranks, train) == [alone] * ranks


def train_on_growing_data(by: int) -> None:
    with dl.join_world() as world:
        data = list(ROWS[:10])
        for step in made_steps(dl.Batches(data, 4, world), network(), 3):
            if step.is_last_of_epoch:
                data[min(10, 10 + by) :] = [ROWS[10]] * by


@pytest.mark.parametrize(("by", "now"), [(5, 15), (-2, 8)])
def test_a_data_set_whose_length_changes_is_refused_at_the_next_epoch(by: int, now: int, on_ranks: OnRanks) -> None:
    said = rf"The data set had 10 samples when the Batches were made, and has {now} now. Make new Batches"
    with pytest.raises(RankFailed, match=said):
        on_ranks(2, train_on_growing_data, by)
