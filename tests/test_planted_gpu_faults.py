"""Faults of streams and of late copies, planted in the package on fake GPUs: each is found, and nothing else is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop import accelerators
from ddp_loop.data import placement, readers
from ddp_loop.distributed import torch_backend
from tests.support.gpu_steps import network, plain
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")

STEPS = 6
Plant = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def copying_on_a_side_stream(*, waits: bool = True, records: bool = True) -> Iterator[None]:
    """Copies to the host on a stream of their own, as they could be made beside the steps."""
    made: list[torch.cuda.Stream] = []

    def start(
        self: accelerators.Cuda, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]
    ) -> accelerators.Event:
        side = made[0] if made else torch.cuda.Stream()
        made[:] = [side]
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch._foreach_copy_(here, there, non_blocking=True)  # type: ignore[arg-type]
        if records:
            for one in there:
                one.record_stream(side)
        event: accelerators.Event = side.record_event()
        return event

    with mock.patch.object(accelerators.Cuda, "start_copies", start):
        yield


@contextlib.contextmanager
def reading_from_the_host(*, reuses: bool = False) -> Iterator[None]:
    """Data that do not fit on the GPU go there shard by shard, from pinned memory; it may be written again at once."""
    kept: dict[Any, torch.Tensor] = {}

    def pinned(self: readers.TensorReader, rows: torch.Tensor) -> torch.Tensor:
        return kept.setdefault((rows.shape, rows.dtype), torch.empty_like(rows, pin_memory=True)).copy_(rows)

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(placement, "fits", return_value=False))
        if reuses:
            patched.enter_context(mock.patch.object(readers.TensorReader, "_pinned", pinned))
        yield


def not_waiting_for_nccl() -> AbstractContextManager[object]:
    return mock.patch.object(torch_backend.TorchBackend, "wait", return_value=None)


def not_waiting_for_copies() -> AbstractContextManager[object]:
    return mock.patch.object(accelerators, "wait_for", return_value=None)


PLANTED: dict[str, tuple[Plant, str]] = {
    "nothing": (nullcontext, ""),
    "a side stream in order": (copying_on_a_side_stream, ""),
    "a side stream without a wait": (
        lambda: copying_on_a_side_stream(waits=False),
        "copy to the host .* reads memory that .* writes, and does not wait for it",
    ),
    "a side stream without record_stream": (
        lambda: copying_on_a_side_stream(records=False),
        "memory is given back to stream 0 while copy to the host .* record_stream or a wait is missing",
    ),
    "data on the host": (reading_from_the_host, ""),
    "pinned memory written too early": (
        lambda: reading_from_the_host(reuses=True),
        "pinned memory was written before the copy to the device that reads it was done",
    ),
    "NCCL's sum without a wait": (
        not_waiting_for_nccl,
        "reads memory that NCCL .* writes, and does not wait for it",
    ),
    "a copy read before it arrived": (
        not_waiting_for_copies,
        "loss must be a finite number. The loss of step 1 is nan",
    ),
}


def train_with(name: str) -> list[str]:
    """What the fake device finds in some steps with such a fault, and what ends them."""
    import fake_cuda_extension as device

    device.errors()
    device.check_order(True)
    said = []
    try:
        with PLANTED[name][0](), dl.join_world(device="gpu", seed=0) as world:
            steps = plain(world, network(world), shards=None)
            for _ in range(STEPS):
                next(steps)
            steps.close()
    except Exception as error:
        said.append(str(error))
    finally:
        device.check_order(False)
    return [*device.errors(), *said]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_of_streams_or_late_copies_is_found(on_fake_gpus: OnRanks, name: str) -> None:
    _, said = PLANTED[name]
    for found in on_fake_gpus(2, train_with, name):
        assert bool(found) == bool(said), found
        assert not said or any(re.search(said, one) for one in found), found
