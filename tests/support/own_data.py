"""Data that belong to a rank: rows that follow from their numbers, as a stream or as tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from tests.support.refusals import network


class Own:
    """A rank's own stream: the rows number `begin` .. `begin + count - 1`, a different order in each epoch."""

    def __init__(self, begin: int, count: int) -> None:
        self.numbers = list(range(begin, begin + count))

    def set_epoch(self, epoch: int) -> None:
        self.numbers.sort()
        random.Random(epoch).shuffle(self.numbers)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((number, row_of(number)) for number in self.numbers)


def row_of(number: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def rows_of(numbers: list[int]) -> torch.Tensor:
    return torch.stack([row_of(number) for number in numbers]) if numbers else torch.empty(0, 4, dtype=torch.float64)


def own_stream(world: dl.World, counts: list[int]) -> Own:
    return Own(sum(counts[: world.rank]), counts[world.rank])


def network_after_a_norm() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network())


def of_rows(model: nn.Module, data: Any) -> torch.Tensor:
    return model(data[1])  # type: ignore[no-any-return]


def made_steps(
    batches: dl.Batches, model: nn.Module, epochs: int = 1, optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Iterator[dl.Step]:  # fmt: skip
    """Make the steps of a loop, on the mean square of the outputs for the rows; yields each after its update."""
    state: dict[str, object] = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, epochs, state=state, progress=False, **options):
        for data in step:
            rows = data[1] if isinstance(data, list | tuple) else data
            step.backward(model(rows).square().mean())
        step.fold()
        if optimizer is not None:
            optimizer.step()
        yield step
