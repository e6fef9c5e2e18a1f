"""Buffers that are written without torch's version counter: found where the host waits, and where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddp_loop.training import Buffers, find_buffers

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
