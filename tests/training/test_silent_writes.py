"""Buffers and parameters written without torch's version counter: found where the host waits, and where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.training import Buffers, find_buffers
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import Refused, loop_over, loss_of, network
from tests.support.training import sgd

pytestmark = pytest.mark.covers("D6")


def codebook(*, is_late: bool = True) -> tuple[torch.Tensor, Buffers]:
    """A level beside a constant; as on a GPU, where the host would wait for a buffer's bits, if late."""
    model = nn.Module()
    model.register_buffer("level", torch.full((2,), 4.0))
    model.register_buffer("constant", torch.tensor([float("nan"), 0.1]))
    buffers = Buffers(find_buffers({"model": model}, set(), {}))
    for buffer in buffers.found.values():
        buffer.late = is_late
    return model.get_buffer("level"), buffers


@pytest.mark.parametrize("is_late", [False, True])
def test_a_constant_buffer_of_nan_does_not_travel(is_late: bool) -> None:
    _, buffers = codebook(is_late=is_late)
    buffers.open()
    assert buffers.take() == {}


def test_where_the_host_would_wait_the_first_pass_finds_what_every_later_one_takes() -> None:
    level, buffers = codebook()
    for number in range(5):
        level.data.fill_(float(number))  # between the passes
        buffers.open()
        level.data.add_(10.0)
        taken = buffers.take()
        assert taken.keys() == {"model.level"}
        assert taken["model.level"].tolist() == [10.0 + number] * 2
        assert level.tolist() == [number] * 2


def test_where_the_host_would_wait_a_write_that_is_found_later_is_an_error() -> None:
    level, buffers = codebook()
    for number in range(3):
        buffers.open()
        level.data.add_(float(number == 2))
        assert buffers.take() == {}
    buffers.open()  # passes 1, 2, 4, 8, ... look
    level.data.add_(1.0)
    with pytest.raises(RuntimeError, match=r"It did not for model\.level, first seen in pass 4"):
        buffers.take()


@pytest.mark.parametrize("write", [lambda buffer: buffer.data.add_(1), lambda buffer: buffer.add_(1)])
def test_a_recomputation_leaves_buffers_alone_however_they_are_written(write: Callable[[torch.Tensor], object]) -> None:
    level, buffers = codebook(is_late=False)
    with buffers.untouched():
        write(level)
    assert level.tolist() == [4.0, 4.0]


class Followed(nn.Module):
    """A network whose forward writes a parameter through `.data`.

    Args:
        how: an encoder that follows another one, as MoCo writes it, or a bound for the norm of each row.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.network = network()
        self.follower = network().requires_grad_(False)
        nn.init.zeros_(self.follower.get_parameter("0.weight"))
        self.how = how

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        layer = self.network.get_parameter("0.weight")
        if self.how == "bound":
            layer.data = torch.renorm(layer.data, 2, 0, 0.5)
        else:
            follower = self.follower.get_parameter("0.weight")
            follower.data = follower.data * 0.9 + layer.data * 0.1
        with torch.no_grad():
            targets = self.follower(rows)
        output: torch.Tensor = self.network(rows) - targets
        return output


def train_followed(world: dl.World, folder: str | None, how: str, shards: int | None) -> torch.Tensor:
    model = Followed(how)
    optimizer = sgd(model.network)
    for step in loop_over(world, folder, model, optimizer, shards=shards):
        for rows in step:
            if how == "held":
                step.hold(model(rows))
            else:
                step.backward(loss_of(model, rows))
        if how == "held":
            step.backward(step.gather().square().mean())
        step.fold()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize(("ranks", "how", "shards"), [(1, "mean", 2), (2, "mean", 4), (2, "held", 4)])
def test_a_parameter_that_each_shard_writes_is_named(ranks: int, how: str, shards: int, refused: Refused) -> None:
    said = r"model\.follower\.0\.weight was written in between.*a forward through \.data"
    refused(ranks, train_followed, how, shards, kind="RuntimeError", said=said)


@pytest.mark.parametrize(("how", "shards"), [("mean", None), ("bound", 2)])
def test_a_parameter_that_is_written_once_a_step_has_its_plain_meaning(
    how: str, shards: int | None, on_ranks: OnRanks
) -> None:
    (one,) = on_ranks(1, in_world, train_followed, None, how, shards)
    for two in on_ranks(2, in_world, train_followed, None, how, shards):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
