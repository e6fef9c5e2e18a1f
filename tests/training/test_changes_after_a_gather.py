"""Buffers and running statistics that change between step.gather and the fold: as in one process, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, same_on_all, state_of
from tests.support.gathering import encoder
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, BOUND, Refused, samples

pytestmark = [pytest.mark.covers("D6"), pytest.mark.on_gpus_too]

SIZE = 12
BAD = 2  # mini-batch, counted from 1, that is not finite where it is to be skipped


class Counted(nn.Module):
    """An encoder that counts its calls, one in each shard."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.encoder(rows)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Subtracts a moving average, into which its rows go afterwards."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = rows - self.center
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * rows.mean(0)
        return result


class OwnNorm(Centred):
    """Passes buffers of its own to F.batch_norm."""

    mean_center: torch.Tensor
    variance_center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance_center", torch.ones(3, dtype=torch.float64))
        self.register_buffer("mean_center", torch.zeros(3, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(rows, self.mean_center, self.variance_center, training=True)


def with_positions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())


HEADS: dict[str, Callable[[], nn.Module]] = {
    "a buffer": Centred,
    "batch norm": lambda: nn.BatchNorm1d(3),
    "batch norm, recomputed": lambda: nn.BatchNorm1d(3),
    "batch norm, synced": lambda: nn.BatchNorm1d(3, momentum=None),
    "batch norm of one's own": OwnNorm,
    "instance norm": with_positions,
}


def parts_of(kind: str) -> tuple[nn.Module, nn.Module]:
    head = nn.Sequential(HEADS[kind](), nn.Linear(3, 2)).double()
    for one in head[1].parameters():
        nn.init.constant_(one, 0.3)
    return Counted(), head


def data_of(skips: bool) -> torch.Tensor:
    rows = samples(48)
    rows[SIZE * BAD - 1] = torch.nan if skips else 0.0
    return rows


def loss_of(head: nn.Module, outputs: torch.Tensor, kind: str) -> torch.Tensor:
    found: torch.Tensor = checkpoint(head, outputs, use_reentrant=False) if "recomputed" in kind else head(outputs)
    return (found + 1).square().mean()


def train(kind: str, shards: int | None, skips: bool) -> Tensors:
    with dl.join_world() as world:
        model, head = parts_of(kind)
        if "synced" in kind and (shards or 1) <= world.size:
            dl.sync_batch_norm(head, world)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        batches = dl.Batches(data_of(skips), SIZE, world, shards=shards, shuffle=False)
        state = {"model": model, "head": head, "optimizer": optimizer}
        for step in dl.Loop(batches, 1, state=state, progress=False, on_nonfinite="skip"):
            for rows in step:
                step.hold(model(rows))
            step.backward(loss_of(head, step.gather(), kind))
            step.fold()
            optimizer.step()
        return state_of(model, dl.local_batch_norm(head))


def train_plainly(kind: str, skips: bool) -> Tensors:
    model, head = parts_of(kind)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for number, rows in enumerate(data_of(skips).split(SIZE), 1):
        if not (skips and number == BAD):
            optimizer.zero_grad()
            loss_of(head, model(rows), kind.partition(",")[0]).backward()
            optimizer.step()
    return state_of(model, head)


@pytest.mark.parametrize(("ranks", "shards", "skips"), [(1, None, True), (1, 3, False), (2, None, False), (3, 2, True)])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.quick_on_gpus
def test_what_changes_after_a_gather_has_the_whole_mini_batch(
    kind: str, ranks: int, shards: int | None, skips: bool, on_ranks: OnRanks
) -> None:
    wanted = train_plainly(kind, skips)
    assert distance(same_on_all(on_ranks(ranks, train, kind, shards, skips)), wanted) < BOUND


TWICE: dict[str, Callable[[], Any]] = {
    "a buffer": Centred,
    "batch norm": lambda: nn.BatchNorm1d(3).double(),
    "batch norm of one's own": OwnNorm,
}


def change_twice(world: dl.World, folder: str, kind: str, shards: int | None) -> None:
    """In a shard, and in a line after the last backward."""
    model = encoder()
    head = TWICE[kind]()
    batches = dl.Batches(samples(24), SIZE, world, shards=shards, shuffle=False)
    state = {"model": model, "head": head}
    rules: Any = {} if kind == "batch norm" else {"head.center": "mean"}
    for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, run_dir=folder, progress=False):
        for rows in step:
            step.hold(head(model(rows)))
        outputs = step.gather()
        step.backward(outputs.square().mean())
        head(outputs.detach())
        step.fold()


@pytest.mark.parametrize(("ranks", "shards"), [(1, 3), (3, 2)])
@pytest.mark.parametrize("kind", TWICE)
def test_what_changes_in_the_shards_and_after_the_gather_is_refused(
    kind: str, ranks: int, shards: int | None, refused: Refused
) -> None:
    said = r"in the shards, or between step\.gather\(\) and step\.fold\(\), not in both"
    refused(ranks, change_twice, kind, shards, by=ALL if ranks < 3 else None, kind="RuntimeError", said=said)
