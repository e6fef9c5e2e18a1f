"""torch.compile of the model and of the loss: what equals what under it.

Code that is compiled for each size, `dynamic=False`, gives a shard the same bits on every rank and in every run. By
default torch compiles a second size for all sizes, so a shard's last bits depend on what the process met before.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.cases import CLASSES, make_data
from tests.support.comparing import Tensors, distance, is_same, same_on_all, state_of
from tests.support.compiling import compiling
from tests.support.harness import OnRanks
from tests.support.training import loop_on, sgd

HAS_COMPILER = shutil.which("g++") is not None
pytestmark = [
    pytest.mark.slow,  # each process compiles for some seconds
    pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs g++ on a CPU"),
    pytest.mark.covers("J3", "J12"),
]

SAMPLES, BATCH, SHARDS, EPOCHS = 28, 10, 4, 2  # shards of 3, 3, 2, 2 and, in the last mini-batch, of 2
COMPILING_S = 200.0
TOLERANCE = 1e-10  # float64: a step's rounding, amplified by 6 steps


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


def train(
    shards: int | None,
    compiled: tuple[str, ...] = ("model", "loss"),
    *,
    dynamic: bool | None = False,
    dropout: float = 0.0,
    synced: bool = False,
    folder: str = "",
    stop_at: int | None = None,
) -> Tensors:
    """The state, the losses, and an evaluation. A tiny bucket, so that there are hooks on the parameters."""
    with compiling(), dl.join_world(seed=3) as world:
        model = network(dropout)
        if synced:
            dl.sync_batch_norm(model, world)
        optimizer = sgd(model, 0.9)
        call: Any = torch.compile(model, dynamic=dynamic) if "model" in compiled else model
        loss: Any = torch.compile(cross_entropy, dynamic=dynamic) if "loss" in compiled else cross_entropy
        data = make_data((2, 4), SAMPLES)
        options: dict[str, Any] = {"run_dir": folder or None, "progress": False, "bucket_cap_mib": 0.0002}
        loop = loop_on(dl.Batches(data, BATCH, world, shards=shards), model, optimizer, epochs=EPOCHS, **options)
        losses = []
        with suppress(dl.Stopped):
            for step in loop:
                for inputs, labels in step:
                    step.backward(loss(call(inputs), labels))
                losses.append(step.fold().loss.clone())
                optimizer.step()
                if step.iteration == stop_at:
                    loop.stop()
            found = dl.evaluate(call, dl.Batches(data, BATCH, world, shards=SHARDS, shuffle=False), loss=each_loss)
            losses.append(torch.tensor(found["loss"], dtype=torch.float64))
        return [*state_of(model), torch.stack(losses[-2:])]


def each_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize(("dynamic", "compiled"), [(None, ("model", "loss")), (True, ("model",)), (False, ("loss",))])
def test_compiled_in_any_way_they_equal_eager_ones_up_to_rounding(
    dynamic: bool | None, compiled: tuple[str, ...], on_ranks: OnRanks
) -> None:
    expected = on_ranks(1, train, SHARDS, ())[0]
    found = on_ranks(2, train, SHARDS, compiled, dynamic=dynamic, timeout_s=COMPILING_S)
    assert distance(same_on_all(found), expected) < TOLERANCE


@pytest.mark.covers("F4")
def test_a_compiled_run_that_was_stopped_resumes_with_the_same_bits(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(1, train, SHARDS, dropout=0.1, timeout_s=COMPILING_S)[0]
    for stop_at, ranks in ((1, 2), (None, 1)):
        options: dict[str, Any] = {"dropout": 0.1, "folder": str(tmp_path), "stop_at": stop_at}
        found = on_ranks(ranks, train, SHARDS, **options, timeout_s=COMPILING_S)
    assert is_same(same_on_all(found), whole)


def test_compiled_synced_layers_are_one_device_on_the_whole_mini_batch(on_ranks: OnRanks) -> None:
    expected = on_ranks(1, train, None, (), synced=True)[0]
    found = same_on_all(on_ranks(3, train, None, synced=True, timeout_s=COMPILING_S))
    assert distance(found, expected) < TOLERANCE
