"""What NCCL has of its own, on fake GPUs: its sockets tell nothing of a peer, and its watchdog comes last."""

from __future__ import annotations

import select

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop import accelerators
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")


def wait_while_nccl_closes_its_sockets() -> float:
    import fake_cuda_extension as device

    from tests.fake_cuda.cuda import nccl_sockets

    often, accelerators._CHECK_S = accelerators._CHECK_S, 0.01
    device.slow_down(0.1)  # so that the host looks for dead peers while it waits
    try:
        with dl.join_world(device="gpu") as world:
            nccl_sockets.close()
            values = torch.ones(2, device=world.device)
            accelerators.HostCopy(world.sum(values)).wait()
            return float(world.sum(torch.ones(())))
    finally:
        device.slow_down(0)
        accelerators._CHECK_S = often


def test_a_socket_that_nccl_closes_is_no_dead_peer(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, wait_while_nccl_closes_its_sockets) == [2.0, 2.0]


def leave() -> list[bool]:
    from tests.fake_cuda.cuda import nccl_sockets

    nccl_sockets.close()  # those of worlds before
    with dl.join_world(device="gpu") as world:
        world.sum(torch.ones((), device=world.device))
    shut = [bool(select.select([one], [], [], 0)[0]) for one in nccl_sockets.open]  # readable: its end was reached
    nccl_sockets.close()
    return shut


def test_a_rank_that_leaves_shuts_no_socket_of_nccl(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, leave) == [[False, False]] * 2


def log_of_join() -> list[str]:
    import fake_cuda_extension as device

    device.nccl_log()
    with dl.join_world(device="gpu", timeout_s=60):
        return [line for line in device.nccl_log() if line.startswith(("timeout", "connect"))]


def test_the_watchdog_of_nccl_comes_after_the_hosts_own_timeout(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, log_of_join) == [["timeout 90000 ms", "connect"]] * 2


def call_torch_distributed(shards: int | None) -> None:
    """A forward with a collective of the script's own, over NCCL as the sums of the gradients."""
    with dl.join_world(device="gpu", seed=0) as world:
        model = torch.nn.Linear(3, 1).to(world.device)
        batches = dl.Batches(torch.ones(24, 3), 8, world, shards=shards)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows in step:
                dist.all_reduce(rows.amax(0))
                step.backward(model(rows).mean())
            step.fold()


def test_collectives_of_a_script_over_nccl_are_counted_apart_from_the_worlds(on_fake_gpus: OnRanks) -> None:
    on_fake_gpus(2, call_torch_distributed, None)
    with pytest.raises(dl.RankFailed, match=r"must not call torch.distributed .* shards made 1\."):
        on_fake_gpus(2, call_torch_distributed, 4)
