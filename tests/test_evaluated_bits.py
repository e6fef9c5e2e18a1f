"""Evaluation on any number of ranks: the same bits, although no shards are fixed, in no more memory than before."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.sources import Mapped, Streamed
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("B8")

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


def row_of(data: tuple[torch.Tensor, ...], index: int) -> Any:
    return tuple(part[index] for part in data)


def losses(logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels, reduction="none")


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels)


def weighted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> dl.Sum:
    return dl.Sum((losses(logits, labels) * weights).sum())


def weight(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> dl.Sum:
    return dl.Sum(weights)


def metrics_of_torch() -> dict[str, Any]:
    """Without the weights; here, since each process that collects the tests would wait 4 s for torchmetrics."""
    from torchmetrics import CatMetric, MeanMetric
    from torchmetrics.classification import MulticlassF1Score

    class F1(MulticlassF1Score):
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

    return {"f1": F1(CLASSES), "mean_loss": MeanLoss(), "variance": Losses()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(size: int, batch_size: int, kind: str, dtype: torch.dtype) -> str:
    """Of all results of an evaluation."""
    with dl.join_world(seed=4, device="cpu") as world:
        data: Any = rows(size, dtype)
        more: dict[str, Any] = {"shuffle": False}
        if kind == "shuffled":
            more = {"shuffle": True}
        elif kind == "stream":
            data, more = Streamed(partial(zip, *data)), {}
        elif kind == "workers":
            data, more["num_workers"] = Mapped(size, partial(row_of, data)), 1
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
        found = dl.evaluate(model, batches, metrics=metrics_of_torch(), **functions)
        assert found["samples"] == size
        matrix = dl.confusion_matrix(model, batches, CLASSES)
        predicted = torch.zeros(0) if kind == "stream" else dl.predict(model, batches)
        # The digest alone, not the outputs: a failure is then short.
        return hashlib.sha256(repr(found).encode() + bytes_of(matrix) + bytes_of(predicted)).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "shuffled", "stream", "workers", "local", "own", "shares", "drawing"])
@pytest.mark.parametrize(
    ("size", "batch_size", "dtype"),
    [
        *((501, 100, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((33, 8, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((size, 5, torch.float32) for size in (17, 5, 2)),
        *((size, batch_size, torch.float32) for size, batch_size in ((501, 1000), (250, 64), (1, 8))),
    ],
)
def test_evaluation_has_the_same_bits_on_any_number_of_ranks(
    size: int, batch_size: int, kind: str, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    found = {ranks: set(on_ranks(ranks, digest, size, batch_size, kind, dtype)) for ranks in RANKS}
    assert len(set().union(*found.values())) == 1, found


def stopped_early() -> tuple[list[float], int, str]:
    """The losses up to the stop, the number of the best one, and a digest of its weights."""
    with dl.join_world(seed=4, device="cpu") as world:
        model = Network(draws=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # losses differ in their last bits
        train = dl.Batches(rows(48)[:2], 12, world, shards=6)
        held_out = dl.Batches(rows(501)[:2], 100, world, shuffle=False)
        patience, found = dl.EarlyStopping(model, 2), []
        loop = loop_on(train, model, optimizer, epochs=30)
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, labels in step:
                    step.backward(cross_entropy(model(inputs), labels))
                step.fold()
                optimizer.step()
            model.draws = False
            found.append(dl.evaluate(model, held_out, loss=mean_loss)["loss"])
            model.draws = True
            if patience.should_stop(found[-1]):
                break
        patience.restore_best()
        weights = b"".join(bytes_of(one) for one in model.state_dict().values())
        return found, patience.best, hashlib.sha256(weights).hexdigest()


@pytest.mark.covers("B5")
@pytest.mark.slow
def test_early_stopping_ends_at_the_same_epoch_with_the_same_weights_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    [alone] = on_ranks(1, stopped_early)
    assert len(alone[0]) < 30
    for ranks in (2, 3):
        assert on_ranks(ranks, stopped_early) == [alone] * ranks


def sequences_evaluated(lanes: int) -> str:
    with dl.join_world(seed=4, device="cpu") as world:
        torch.manual_seed(3)
        network, head = nn.LSTM(FEATURES, 16, batch_first=True), nn.Linear(16, CLASSES)
        lengths = [7 + 5 * number % 11 for number in range(23)]
        data = [rows(sum(lengths))[0][sum(lengths[:number]) :][:length] for number, length in enumerate(lengths)]
        batches = dl.SequenceBatches(data, lanes, 4, world, shuffle=False)

        def forward(_: nn.Module, chunk: dl.SequenceChunk) -> torch.Tensor:
            outputs, chunk.hidden = network(chunk.data, chunk.hidden)
            return chunk.unpad(head(outputs))

        found = dl.evaluate(head, batches, forward=forward, mean=lambda output, chunk: output.square().mean(1))
        assert found["samples"] == sum(lengths)
        predicted = dl.predict(head, batches, forward=forward)
        return hashlib.sha256(repr(found).encode() + bytes_of(predicted)).hexdigest()


@pytest.mark.parametrize("lanes", [3, 13])
@pytest.mark.slow
def test_sequences_too(lanes: int, on_ranks: OnRanks) -> None:
    assert len({one for ranks in RANKS for one in on_ranks(ranks, sequences_evaluated, lanes)}) == 1


def pieces(size: int, batch_size: int, shares: list[float] | None) -> list[int]:
    """The sizes of the batches that the model gets on this rank."""
    with dl.join_world(device="cpu") as world:
        found: list[int] = []

        def forward(_: nn.Module, data: torch.Tensor) -> torch.Tensor:
            found.append(len(data))
            return data

        batches = dl.Batches(torch.zeros(size, 1), batch_size, world, shuffle=False, shares=shares)
        dl.predict(nn.Identity(), batches, forward=forward)
        return found


@pytest.mark.parametrize(("size", "batch_size"), [(501, 100), (1000, 96), (100, 100), (64, 4), (5, 8)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.slow
def test_a_rank_needs_no_more_memory_than_for_a_shard_of_its_own_and_no_rank_waits_for_more_than_a_piece(
    ranks: int, size: int, batch_size: int, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, pieces, size, batch_size, None)
    assert max(one for found in results for one in found) <= dl.split_sizes(min(size, batch_size), ranks)[0]
    work = [len(found) for found in results]
    assert max(work) - min(work) <= 2
    assert sum(map(sum, results)) == size


def test_a_share_is_a_rank_s_part_of_the_pieces(on_ranks: OnRanks) -> None:
    results = on_ranks(3, pieces, 1000, 100, [0.41, 0.0, 0.59])
    assert [len(found) for found in results] == [32, 0, 48]  # of 80; 32.8 and 47.2 would be exact
