"""Data that belong to a rank: rows that follow from their numbers, as a stream or as tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import ddp_loop as dl


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


def of_rows(model: nn.Module, data: Any) -> torch.Tensor:
    return model(data[1])  # type: ignore[no-any-return]
