"""Evaluation on any number of ranks: the same bits, although no shards are fixed, in no more memory than before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import IterableDataset
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassF1Score

import ddp_loop as dl
from tests.support.harness import OnRanks

FEATURES, CLASSES = 37, 5
RANKS = (1, 2, 3, 5)


def rows(size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels, and how many times a row counts."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs.to(dtype), labels, torch.rand(size, generator=generator)


class Network(nn.Module):
    """With batch norm, and noise if asked for. Its outputs depend on the shape of the batch in their last bits."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.draws, self.norm = draws, nn.BatchNorm1d(64)
        self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.randn(64))  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        logits: torch.Tensor = self.last(dropout(hidden, 0.3, training=True) if self.draws else hidden)
        return logits


class Stream(IterableDataset[Any]):
    def __init__(self, data: tuple[torch.Tensor, ...]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.data, strict=True)


class Rows:
    """Read one by one."""

    def __init__(self, data: tuple[torch.Tensor, ...]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in self.data)


def losses(logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels, reduction="none")


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels)


def weighted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> dl.Sum:
    return dl.Sum((losses(logits, labels) * weights).sum())


def weight(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> dl.Sum:
    return dl.Sum(weights)


class F1(MulticlassF1Score):
    """Without the weights."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> None:
        super().update(logits, labels)


class MeanLoss(MeanMetric):
    def update(self, logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> None:  # type: ignore[override]
        super().update(losses(logits, labels))


class Losses(CatMetric):
    """All losses, and their variance at the end."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> None:  # type: ignore[override]
        super().update(losses(logits, labels))

    def compute(self) -> torch.Tensor:
        return super().compute().var(correction=0)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def digest(size: int, batch_size: int, kind: str, dtype: torch.dtype) -> str:
    """Of all results of an evaluation."""
    with dl.join_world(seed=4, device="cpu") as world:
        data: Any = rows(size, dtype)
        more: dict[str, Any] = {"shuffle": False}
        if kind == "shuffled":
            more = {"shuffle": True}
        elif kind == "stream":
            data, more = Stream(data), {}
        elif kind == "workers":
            data, more["num_workers"] = Rows(data), 1
        elif kind == "local":
            more["partition"] = "local"
        elif kind == "own":  # each rank has whole pieces
            pieces = torch.arange(size).split(-(-batch_size // 8))
            mine = dl.split_range(len(pieces), world.size, world.rank)
            own = torch.cat([torch.zeros(0, dtype=torch.int64), *(pieces[number] for number in mine)])
            data, more["partition"] = tuple(part[own] for part in data), "own"
        elif kind == "shares":
            more["shares"] = [1 + 2 * (rank % 2) for rank in range(world.size)]
        batches = dl.Batches(data, batch_size, world, **more)
        model = Network(draws=kind == "drawing").to(dtype)
        functions: dict[str, Any] = {"loss": losses, "mean": mean_loss, "weighted": weighted, "weight": weight}
        metrics = {"f1": F1(CLASSES), "mean_loss": MeanLoss(), "variance": Losses()}
        found = dl.evaluate(model, batches, metrics=metrics, **functions)
        assert found["samples"] == size
        matrix = dl.confusion_matrix(model, batches, CLASSES)
        predicted = torch.zeros(0) if kind == "stream" else dl.predict(model, batches)
        # The digest alone, not the outputs: a failure is then short.
        return hashlib.sha256(repr(found).encode() + bytes_of(matrix) + bytes_of(predicted)).hexdigest()


@pytest.mark.covers("B8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tensors", "shuffled", "stream", "workers", "local", "own", "shares", "drawing"])
@pytest.mark.parametrize(
    ("size", "batch_size"),
    [(501, 100), (501, 501), (501, 1000), (250, 64), (33, 8), (17, 5), (9, 20), (6, 6), (5, 5), (2, 5), (1, 8)],
)
def test_evaluation_has_the_same_bits_on_any_number_of_ranks(
    size: int, batch_size: int, kind: str, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    found = {ranks: set(on_ranks(ranks, digest, size, batch_size, kind, dtype)) for ranks in RANKS}
    assert len(set().union(*found.values())) == 1, found
