"""A module, a buffer, a parameter counts once, whatever the paths from `state` to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples
from tests.support.training import train

pytestmark = [pytest.mark.covers("D4", "J4"), pytest.mark.on_gpus_too]


class Level(nn.Module):
    """A floating buffer, and an integer one, that each forward changes."""

    def __init__(self, level: torch.Tensor, count: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("level", level)
        self.register_buffer("count", count)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("level").mul_(0.5).add_(rows.mean())
        self.get_buffer("count").add_(len(rows))
        return self.weight * rows.mean()


def train_levels(rules: dict[str, Any]) -> list[float]:
    """Two modules with the same buffers, one of them under two names."""
    with dl.join_world() as world:
        level = torch.full((), 4.0, dtype=torch.float64)
        count = torch.zeros((), dtype=torch.int64)
        one = Level(level, count)
        other = Level(level, count)
        state = {"one": one, "both": nn.ModuleList([one, other])}
        batches = dl.Batches(torch.arange(6.0, dtype=torch.float64), 3, world, shuffle=False)
        for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False, check_replicas_every=1):
            for rows in step:
                step.backward(one(rows) + other(rows))
            step.fold()
        assert one.get_buffer("level") is other.get_buffer("level") is level
        return [float(level), float(count)]


@pytest.mark.covers("D6")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(
    ("rules", "counts"),
    [
        *(({f"{name}.count": "first", f"{name}.level": "mean"}, (8, 8)) for name in ("one", "both.0", "both.1")),
        ({"both.0.count": "local", "one.level": "mean"}, (8, 4)),
    ],
)
def test_a_shared_buffer_has_the_rule_of_each_of_its_names(
    rules: dict[str, str], counts: tuple[int, int], on_ranks: OnRanks
) -> None:
    # Shards of 0, 1 and of 2, then of 3, 4 and of 5; each calls both modules: level / 4 + 1.5 mean.
    level = pytest.approx((4 / 4 + 1.5) / 4 + 1.5 * 4, rel=1e-12)
    assert on_ranks(2, train_levels, rules) == [[level, count] for count in counts]


def share_statistics(shards: int) -> Tensors:
    """Two batch-norm layers on the same running statistics, with a linear map between, in the order of their calls."""
    one = nn.BatchNorm1d(4).double()
    between = nn.Linear(4, 4).double()
    with torch.no_grad():
        between.weight.copy_(torch.eye(4) * 2)
        between.bias.fill_(1.0)
    other = nn.BatchNorm1d(4).double()
    other._buffers = one._buffers
    train(nn.Sequential(one, between, other, *network()), loss_of, samples(24), 12, shards=shards)
    return [buffer.clone() for buffer in one.buffers()]


def test_layers_that_share_their_running_statistics_move_them_in_turn(on_ranks: OnRanks) -> None:
    mean = torch.zeros(4, dtype=torch.float64)
    for rows in samples(24).split(12):  # the second layer sees mean 1 in each shard
        mean = 0.9 * (0.9 * mean + 0.1 * rows.mean(0)) + 0.1
    for found in on_ranks(2, share_statistics, 4):
        assert int(found[2]) == 4
        assert torch.allclose(found[0], mean, rtol=1e-12)
