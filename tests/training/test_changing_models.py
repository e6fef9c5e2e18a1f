"""Buffers that a model changes while it trains, and embeddings that a fold does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, does_it, loop_over, loss_of, network
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too


def embed(world: dl.World, folder: str, options: dict[str, Any], culprit: int) -> None:
    model = nn.Embedding(8, 3, **(options if does_it(world, culprit) else {}))
    batches = dl.Batches(torch.arange(16) % 8, 8, world)
    for step in dl.Loop(batches, 1, state={"table": model}, run_dir=folder, progress=False):
        for rows in step:
            step.backward(model(rows).square().mean())
        step.fold()


@pytest.mark.one_device("cpu", "the fake GPU has no sparse tensors")
@pytest.mark.parametrize("culprit", [ALL, 1])
def test_sparse_gradients_are_refused_with_the_remedy(culprit: int, refused: Refused) -> None:
    said = "The fold takes dense gradients. .* Make the embedding with sparse=False"
    refused(2, embed, {"sparse": True}, culprit, kind="ValueError", said=said, by=culprit)


def test_a_forward_that_changes_parameters_is_refused(refused: Refused) -> None:
    said = "table.weight was written .* max_norm"
    refused(2, embed, {"max_norm": 0.5}, ALL, kind="RuntimeError", said=said, by=None)


class Counting(nn.Module):
    """Counts in an integer buffer: its forwards, or the samples that it has seen."""

    seen: torch.Tensor

    def __init__(self, samples: bool) -> None:
        super().__init__()
        self.layer = network()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self._samples = samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x) if self._samples else 1
        return self.layer(x)  # type: ignore[no-any-return]


def count(world: dl.World, folder: str) -> None:
    for step in loop_over(world, folder, model := Counting(samples=True), count=23, shards=4):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D6")
@pytest.mark.quick_on_gpus
def test_an_integer_buffer_that_shards_change_differently_is_refused_by_name(refused: Refused) -> None:
    said = r"must change a buffer alike, .* model\.seen .* became 2 in shard 0 and 1 in shard 2\. Compute it from"
    refused(3, count, kind="ValueError", said=said, by=ALL)


def count_alike(samples: bool, shards: int | None) -> int:
    train(model := Counting(samples), shards=shards, buffer_reduction={"model.seen": "first"} if samples else {})
    return int(model.seen)


@pytest.mark.covers("D6", "C6")
@pytest.mark.parametrize(("samples", "shards", "expected"), [(False, None, 4), (True, None, 8), (False, 9, 4)])
def test_an_integer_buffer_is_the_same_on_all_ranks_whatever_shards_are_empty(
    samples: bool, shards: int | None, expected: int, on_ranks: OnRanks
) -> None:
    assert on_ranks(3, count_alike, samples, shards) == [expected] * 3


class Awaking(nn.Module):
    """Buffers that begin to change in mid-run, one in the shard of sample 9, one in every shard; and a replaced one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("one", torch.full((2,), 4.0))
        self.register_buffer("each", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.full((2,), 4.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if 9.0 in rows:
            self.get_buffer("one").add_(8.0)
        if float(rows.min()) >= 6.0:
            self.get_buffer("each").add_(1)
        self.level: torch.Tensor = self.level / 2 + rows.mean().detach()
        return self.weight * rows.mean()


def awake() -> tuple[list[list[float]], bool]:
    model = Awaking()
    level = model.level

    def look(step: dl.Step, result: dl.StepResult) -> list[float]:
        return [number for buffer in model.buffers() for number in buffer.reshape(-1).tolist()]

    rules: dict[str, Any] = {"model.one": "mean", "model.level": "mean"}
    found = train(model, Awaking.__call__, torch.arange(12.0), 3, buffer_reduction=rules, after_fold=look)
    return found, model.level is level


@pytest.mark.covers("D6")
def test_buffers_that_begin_to_change_in_mid_run_or_are_replaced_follow_their_rules(on_ranks: OnRanks) -> None:
    # Mini-batches of 3 over 2 shards of 2 and 1: sample 9 is in the first shard of the fourth one. The level is halved,
    # and the mean of the samples is added.
    ones = [4.0, 4.0, 4.0, 4.0 + 8.0 * 2 / 3]
    levels = [3.0, 5.5, 9.75, 14.875]
    for found, is_in_its_own_tensor in on_ranks(2, awake):
        for numbers, one, each, level in zip(found, ones, (0, 0, 1, 2), levels, strict=True):
            assert numbers == pytest.approx([one, one, each, level, level], rel=1e-6)
        assert is_in_its_own_tensor
