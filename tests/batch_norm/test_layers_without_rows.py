"""A batch-norm layer that is called with no rows, as a branch whose mask selects nothing: torch counts the call alone.

torch on one device leaves the running mean and variance as they are and adds 1 to `num_batches_tracked`.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import samples

pytestmark = pytest.mark.on_gpus_too

ROWS = 12  # of a mini-batch
# Which rows of a mini-batch the branch gets: some of the first ranks' alone, none, all, none again.
SELECTED = (range(4), range(0), range(ROWS), range(0))
# A sum of a few dozen terms, each rounded at 1.1e-16, amplified by 4 steps.
TOLERANCE = 1e-12
WAYS = {  # what the package has to be like, to go each way
    "local": (),
    "local, by moments": (("ddp_loop.training.rows._FEW_BYTES", 0),),
    "synced": (),
    "synced, in one row": (("ddp_loop.batch_norm.synced._MOST_ROWS", 1),),
}
Tensors = dict[str, torch.Tensor]


class Branch(nn.Module):
    """Rows that are selected pass through two norms. A third norm is called only where some are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = nn.BatchNorm1d(4, momentum=None)
        self.skipped = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, is_selected: torch.Tensor) -> torch.Tensor:
        chosen = rows[is_selected]
        if self.skipped is not None and len(chosen):
            self.skipped(chosen)
        branch = self.first(chosen) + self.second(2 * chosen)
        return self.head(rows + torch.zeros_like(rows).index_put((is_selected,), branch))  # type: ignore[no-any-return]


def make(way: str) -> nn.Module:
    torch.manual_seed(4)
    model = Branch().double()
    if way.startswith("synced"):  # all ranks call the same layers
        model.skipped = None  # type: ignore[assignment]
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)  # statistics that would move if torch's 0 and 1 were pooled into them
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    chosen = [row in selected for selected in SELECTED for row in range(ROWS)]
    return samples(len(chosen)), torch.tensor(chosen)


def loss_of(model: nn.Module, rows: torch.Tensor, is_selected: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(rows, is_selected), rows.sum(1, keepdim=True))


def gradients_of(model: nn.Module, step: int) -> Tensors:
    named = {f"{step} {name}": one.grad for name, one in model.named_parameters()}
    return {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


def on_one_device(way: str) -> Tensors:
    """The state after torch's own loop, and the gradients of each step."""
    model = make(way)
    found = Tensors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (rows, is_selected) in enumerate(zip(*(one.split(ROWS) for one in data()), strict=True), 1):
        optimizer.zero_grad()
        loss_of(model, rows, is_selected).backward()
        found |= gradients_of(model, number)
        optimizer.step()
    return found | model.state_dict()


def through_a_loop(way: str, shards: int | None) -> Tensors:
    with ExitStack() as patches:
        for place, value in WAYS[way]:
            patches.enter_context(mock.patch(place, value))
        world = patches.enter_context(dl.join_world())
        model = make(way)
        if way.startswith("synced"):
            dl.sync_batch_norm(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = Tensors()
        batches = dl.Batches(data(), ROWS, world, shuffle=False, shards=shards)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows, is_selected in step:
                step.backward(loss_of(model, rows, is_selected))
            step.fold()
            found |= gradients_of(model, step.iteration)
            optimizer.step()
        return found | dl.local_batch_norm(model).state_dict()


@pytest.mark.covers("D4", "D5")
@pytest.mark.both_exchanges
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_such_calls_leave_what_they_leave_on_one_device(
    ranks: int, is_fixed: bool, way: str, on_ranks: OnRanks
) -> None:
    is_synced = way.startswith("synced")
    expected = on_one_device(way)
    counts = [int(one) for name, one in expected.items() if "num_batches" in name]
    assert counts == [5, 5] if is_synced else [5, 5, 3]
    shards = (ranks if is_synced else 3) if is_fixed else None
    results = on_ranks(ranks, through_a_loop, way, shards)
    for found in results:
        assert list(found) == list(expected)
        assert all(torch.equal(one, results[0][name]) for name, one in found.items())
        for name, one in found.items():
            if is_synced or "running" in name or "num_batches" in name:
                assert torch.allclose(one, expected[name], rtol=0, atol=TOLERANCE), name
