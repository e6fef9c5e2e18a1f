"""A batch-norm layer that is called with no rows, as a branch whose mask selects nothing: torch counts the call alone.

torch on one device leaves the running mean and variance as they are and adds 1 to `num_batches_tracked`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.devices import CPU
from tests.support.harness import OnRanks, caught

pytestmark = pytest.mark.on_gpus_too

ROWS = 12  # of a mini-batch
# Which rows of a mini-batch the branch gets: some of the first ranks' alone, none, all, none again.
SELECTED = (range(4), range(0), range(ROWS), range(0))
# A sum of a few dozen terms, each rounded at 1.1e-16, amplified by 4 steps.
TOLERANCE = 1e-12
Tensors = dict[str, torch.Tensor]


class Branch(nn.Module):
    """Rows that are selected pass through two norms. A third norm is called only where some are."""

    def __init__(self, *, has_skipped: bool) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)
        self.skipped = nn.BatchNorm1d(3) if has_skipped else None
        self.head = nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor, is_selected: torch.Tensor) -> torch.Tensor:
        chosen = rows[is_selected]
        if self.skipped is not None and len(chosen):
            self.skipped(chosen)
        branch = self.first(chosen) + self.second(2 * chosen)
        return self.head(rows + torch.zeros_like(rows).index_put((is_selected,), branch))  # type: ignore[no-any-return]


def make(*, has_skipped: bool) -> Branch:
    torch.manual_seed(4)
    model = Branch(has_skipped=has_skipped).double()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)  # statistics that would move if torch's 0 and 1 were pooled into them
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(ROWS * len(SELECTED), 3, generator=generator, dtype=torch.float64)
    return rows, torch.tensor([row in selected for selected in SELECTED for row in range(ROWS)])


def loss_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (output - rows.sum(1, keepdim=True)).square().mean()


def on_one_device(*, has_skipped: bool) -> Tensors:
    """The state after torch's own loop, and the gradients of each step."""
    model, found = make(has_skipped=has_skipped), Tensors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (rows, is_selected) in enumerate(zip(*(one.split(ROWS) for one in data()), strict=True)):
        optimizer.zero_grad()
        loss_of(model(rows, is_selected), rows).backward()
        found |= {
            f"{number} {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }
        optimizer.step()
    return found | model.state_dict()


def through_a_loop(shards: int | None, *, synced: bool, most_rows: int = 8, moments: bool = False) -> Tensors:
    patches: list[AbstractContextManager[object]] = [
        mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", most_rows),
        mock.patch("ddp_loop.training.rows._FEW_BYTES", 0) if moments else nullcontext(),
    ]
    with patches[0], patches[1], dl.join_world(seed=0) as world:
        model: nn.Module = make(has_skipped=not synced)
        if synced:
            dl.sync_batch_norm(model, world)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), Tensors()
        batches = dl.Batches(data(), ROWS, world, shuffle=False, shards=shards)
        loop = dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False)
        for step in loop:
            for rows, is_selected in step:
                step.backward(loss_of(model(rows, is_selected), rows))
            step.fold()
            number = step.iteration - 1
            found |= {
                f"{number} {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
            }
            optimizer.step()
        return found | dl.local_batch_norm(model).state_dict()


def distance(found: Tensors, expected: Tensors) -> float:
    assert list(found) == list(expected)
    return max(float((found[name].double() - one.double()).abs().max()) for name, one in expected.items())


def buffers_of(found: Tensors) -> Tensors:
    return {name: one for name, one in found.items() if "running" in name or "num_batches" in name}


@pytest.mark.covers("D4")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("shards", [None, 3, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_local_layer_s_running_statistics_are_those_of_one_device(
    ranks: int, shards: int | None, moments: bool, on_ranks: OnRanks
) -> None:
    expected = on_one_device(has_skipped=True)
    assert [int(expected[f"{one}.num_batches_tracked"]) for one in ("first", "second", "skipped")] == [5, 5, 3]
    results = on_ranks(ranks, through_a_loop, shards, synced=False, moments=moments)
    for found in results:
        assert distance(buffers_of(found), buffers_of(expected)) < TOLERANCE
        assert all(torch.equal(one, results[0][name]) for name, one in found.items())


@pytest.mark.covers("D5")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("most_rows", [8, 1])
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_synced_layer_is_one_device_where_no_rank_has_rows(
    ranks: int, is_fixed: bool, most_rows: int, on_ranks: OnRanks
) -> None:
    expected = on_one_device(has_skipped=False)
    shards = ranks if is_fixed else None
    for found in on_ranks(ranks, through_a_loop, shards, synced=True, most_rows=most_rows):
        assert distance(found, expected) < TOLERANCE


@pytest.mark.both_exchanges
@pytest.mark.one_device(CPU, "GPUs have an exchange of their own")
@pytest.mark.parametrize("synced", [False, True])
def test_either_exchange_counts_such_calls(synced: bool, on_ranks: OnRanks) -> None:
    expected = buffers_of(on_one_device(has_skipped=not synced))
    for found in on_ranks(2, through_a_loop, None, synced=synced):
        assert distance(buffers_of(found), expected) < TOLERANCE


def call_with(rows: list[int], most_rows: int) -> tuple[str, str, float]:
    """A synced layer called with so many rows on each rank."""
    with mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", most_rows), dl.join_world() as world:
        model = dl.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3)), world)
        refused = caught(call_once, model, torch.randn(rows[world.rank], 3))
        world.gather(world.rank)
        return refused


def call_once(model: nn.Module, rows: torch.Tensor) -> None:
    model(rows)
    layer = model.get_submodule("0")
    assert int(layer.get_buffer("num_batches_tracked")) == 1


@pytest.mark.covers("D5")
@pytest.mark.one_device(CPU, "on a GPU the hosts compare their calls at the end of a pass")
@pytest.mark.parametrize("most_rows", [8, 1])
@pytest.mark.parametrize(
    ("rows", "said"), [([0, 1, 0], "more than 1 value per channel"), ([0, 0, 0], ""), ([0, 1, 1], "")]
)
def test_a_single_value_over_all_ranks_still_is_refused(
    rows: list[int], said: str, most_rows: int, on_ranks: OnRanks
) -> None:
    for kind, text, _ in on_ranks(3, call_with, rows, most_rows):
        assert kind == ("ValueError" if said else "")
        assert said in text
