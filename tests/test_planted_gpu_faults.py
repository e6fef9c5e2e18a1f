"""Faults planted in the package on fake GPUs: of streams and of late copies, and those that the package once had.

Each is found. Without one the test that finds it passes, here and in the file that it is from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop import accelerators
from ddp_loop.data import readers
from ddp_loop.distributed import torch_backend
from tests import test_gpu_launches, test_gpu_paths, test_gpu_sums, test_npu_paths
from tests.checkpoint import test_gpu_checkpoints, test_staging
from tests.data import test_gpu_placement
from tests.distributed import test_devices, test_nccl
from tests.support.gpu_faults import FAULTS, run_with_fault
from tests.support.gpu_steps import network, plain
from tests.support.harness import OnRanks
from tests.training import test_reduce_dtype

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

    def pinned(rows: torch.Tensor, gpu: accelerators.Accelerator | None) -> torch.Tensor:
        return kept.setdefault((rows.shape, rows.dtype), torch.empty_like(rows, pin_memory=True)).copy_(rows)

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(readers, "move_if_fits", lambda parts, device: parts))
        if reuses:
            patched.enter_context(mock.patch.object(readers, "pinned", pinned))
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
        "The loss of step 1 is nan",
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


PATHS = test_gpu_paths.test_no_step_makes_the_host_wait_for_a_gpu_and_its_weights_are_those_of_the_cpu
# By the numbers of `tests.support.gpu_faults`.
TESTS: dict[int, Callable[..., None]] = {
    1: test_gpu_checkpoints.test_a_gpu_and_the_cpu_have_one_checksum,
    2: partial(PATHS, name="synced batch norm", ranks=2),
    3: partial(PATHS, name="numbers as weights", ranks=1),
    4: test_nccl.test_a_socket_that_nccl_closes_is_no_dead_peer,
    5: test_nccl.test_the_watchdog_of_nccl_comes_after_the_hosts_own_timeout,
    6: partial(
        test_gpu_launches.test_a_step_launches_hardly_more_than_the_plain_loop, norm="batch norm", ranks=1, shards=1
    ),
    7: partial(test_gpu_paths.test_no_shard_of_an_evaluation_makes_the_host_wait, ranks=1),
    8: test_nccl.test_a_rank_that_leaves_shuts_no_socket_of_nccl,
    9: test_gpu_placement.test_data_that_do_not_fit_beside_a_step_stay_on_the_host,
    10: test_staging.test_every_byte_of_a_gpus_state_comes_through_a_few_pinned_blocks,
    11: partial(
        test_gpu_sums.test_buckets_are_added_up_and_gathered_while_backward_goes_on, ranks=2, dtype=torch.float32
    ),
    13: test_npu_paths.test_ranks_take_such_devices_by_every_name,
    14: partial(
        test_reduce_dtype.test_a_sum_in_float32_is_rounded_once, "bfloat16", is_low=False, weighted=False, ranks=2
    ),
    15: test_devices.test_with_fake_gpus_each_is_described_and_one_rank_each_is_proposed,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_was_there_once_fails_a_test_on_fake_devices(request: pytest.FixtureRequest, fault: int) -> None:
    test = TESTS[fault]
    (name,) = {"on_fake_gpus", "on_fake_npus", "on_ranks"} & set(signature(test).parameters)
    run: OnRanks = request.getfixturevalue("on_gpus" if name == "on_ranks" else name)

    def with_fault(ranks: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        return run(ranks, run_with_fault, fault, function, *arguments, **keywords)

    test(**{name: run})
    with pytest.raises((AssertionError, dl.RankFailed)):
        test(**{name: with_fault})
