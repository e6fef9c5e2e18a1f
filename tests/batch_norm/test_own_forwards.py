"""Batch norm whose forward is the user's: a subclass that transposes, freezes, reads or writes its running statistics.

Statistics are compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from tests.support.comparing import Tensors, is_close
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.training import train, train_in, train_plainly

pytestmark = pytest.mark.on_gpus_too


class Transposing(nn.BatchNorm1d):
    """Normalises (N, L, C), as transformers hold it."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.transpose(1, 2)).transpose(1, 2)


class Frozen(nn.BatchNorm1d):
    """Normalises by its running statistics, in training too."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        return F.batch_norm(flat, self.running_mean, self.running_var, self.weight, self.bias).view_as(rows)


class Reading(nn.BatchNorm1d):
    """Its output depends on its running variance; it moves its statistics by hand."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    momentum: float

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        output = rows / (self.running_var.clone() + self.eps).sqrt()
        with torch.no_grad():
            self.running_mean += self.momentum * (flat.mean(0) - self.running_mean)
            self.running_var += self.momentum * (flat.var(0) - self.running_var)
        return output


class ByName(nn.Module):
    """Gives a batch norm its input by name."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(input=rows.flatten(0, 1)).view_as(rows)  # type: ignore[no-any-return]


class Untracked(ByName):
    """As virtual adversarial training does: a second forward that moves no statistics."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.norm.track_running_stats = False
        self.norm(rows.flatten(0, 1) * 3 + 2)
        self.norm.track_running_stats = True
        return super().forward(rows)


class UntrackedAtFirst(Untracked):
    """Does not track as its loop begins."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm.track_running_stats = False


class Wavering(ByName):
    """Has another momentum for one call."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.norm.momentum = 0.0
        self.norm(rows.flatten(0, 1))
        self.norm.momentum = 0.1
        return super().forward(rows)


class Hiding(nn.BatchNorm1d):
    """Has a momentum that no attribute tells."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        return F.batch_norm(flat, self.running_mean, self.running_var, training=True, momentum=0.3).view_as(rows)


def network(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), kind(2), nn.Flatten(), nn.Linear(4, 1)).double()
    list(model.buffers())[1].mul_(4)
    return model


def after_a_step(model: nn.Module) -> tuple[Tensors, Tensors]:
    """The statistics, without torch's count of the calls, and the last layer's gradients."""
    statistics = [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]
    return statistics, [torch.as_tensor(one.grad).clone() for one in model.get_submodule("3").parameters()]


def train_on_ranks(kind: type[nn.Module]) -> list[tuple[Tensors, Tensors]]:
    model = network(kind)
    return train(model, shards=4, allow_single_sample_shards=True, after_fold=lambda *_: after_a_step(model))


@pytest.mark.parametrize("kind", [Transposing, Frozen, Reading, ByName, Untracked, UntrackedAtFirst])
@pytest.mark.quick_on_gpus
def test_statistics_are_those_of_the_values_that_the_norm_sees(kind: type[nn.Module], on_ranks: OnRanks) -> None:
    model = network(kind)
    expected = train_plainly(model, after_backward=lambda: after_a_step(model))
    for found in on_ranks(3, train_on_ranks, kind):
        for one, other in zip(found, expected, strict=True):
            assert is_close(one[0], other[0])
            if kind in (Frozen, Reading):  # the others normalise by the shard
                assert is_close(one[1], other[1])


def train_refused(world: dl.World, folder: str, kind: type[nn.Module]) -> None:
    train_in(world, network(kind), run_dir=folder)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Hiding, "gives F.batch_norm 0.3, and its momentum is 0.1"),
        (Wavering, "was called with another momentum than it has now, "),
    ],
)
def test_a_momentum_that_the_layer_does_not_have_is_refused(kind: type[nn.Module], said: str, refused: Refused) -> None:
    refused(2, train_refused, kind, kind="RuntimeError", said=said)
