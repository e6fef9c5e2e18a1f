"""A kind of device that only an extension of torch has: it trains, saves and resumes as a GPU does.

The device is the fake one, registered as "npu" through torch's own interface for extensions (PrivateUse1), with a
backend "hccl" that torch.distributed has for it. ddp_loop has no word of either.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.accelerators import HostCopy, all_gpus, gpu_count
from ddp_loop.distributed import describe_devices
from tests.support.gpu_runs import train
from tests.support.gpu_steps import SCENARIOS, require_like_the_cpu, run
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_step_makes_the_host_wait_and_the_weights_are_those_of_the_cpu(
    on_fake_npus: OnRanks, name: str, ranks: int
) -> None:
    # Three ranks' sums may have another order, without fixed shards and in synced batch norm.
    is_same = ranks < 3 or name not in ("one shard a rank", "synced batch norm")
    require_like_the_cpu(on_fake_npus(ranks, run, name), is_same)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (3, 2)])
@pytest.mark.slow
def test_a_run_resumes_with_the_same_bits(on_fake_npus: OnRanks, tmp_path: Path, before: int, after: int) -> None:
    whole = on_fake_npus(1, train, str(tmp_path / "whole"), 8, "npu")[0]
    on_fake_npus(before, train, str(tmp_path / "parts"), 4, "npu")
    assert on_fake_npus(after, train, str(tmp_path / "parts"), 8, "npu") == [whole] * after


def evaluate(device: str) -> tuple[str, dict[str, float], list[float]]:
    with dl.join_world(device=device, seed=0) as world:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(70, 8, generator=generator), torch.randint(4, (70,), generator=generator)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(world.device)
        result = dl.evaluate(model, dl.Batches(data, 10, world, shards=4, shuffle=False), loss=cross_entropy)
        return str(world.device), dict(result), torch.rand(3, device=world.device).tolist()


def test_an_evaluation_has_the_values_of_the_cpu(on_fake_npus: OnRanks) -> None:
    on_npus = on_fake_npus(2, evaluate, "npu")
    assert [device for device, _, _ in on_npus] == ["npu:0", "npu:1"]
    on_cpu = on_fake_npus(1, evaluate, "cpu")[0][1]
    assert [result for _, result, _ in on_npus] == [on_cpu] * 2


def devices_of_wishes() -> list[str]:
    found = []
    for wish in ("auto", "gpu", "npu", "npu:3,1"):
        with dl.join_world(device=wish) as world:
            found.append(str(world.device))
    return found


def test_ranks_take_such_devices_by_every_name(on_fake_npus: OnRanks) -> None:
    assert on_fake_npus(2, devices_of_wishes) == [["npu:0", "npu:0", "npu:0", "npu:3"], ["npu:1"] * 4]


def describe() -> tuple[int, list[str], float, float, list[float], list[float]]:
    first = all_gpus()[0]
    values = torch.arange(4.0, device=first.device)
    copy = HostCopy(values)
    values.zero_()
    state = first.random_state()
    assert state is not None
    drawn = torch.rand(3, device=first.device).tolist()
    first.set_random_state(state)
    again = torch.rand(3, device=first.device).tolist()
    assert drawn == again
    assert first.seconds(first.mark(), first.mark()) >= 0
    return (
        gpu_count(),
        describe_devices().splitlines(),
        first.memory_held(),
        first.memory_free(),
        drawn,
        copy.wait().tolist(),
    )


def test_such_a_device_is_described_and_what_it_does_not_count_is_0(on_fake_npus: OnRanks) -> None:
    count, lines, held, free, _, copied = on_fake_npus(1, describe)[0]
    assert count == 4
    assert lines[2:6] == [f"npu:{index}: npu" for index in range(4)]
    assert "run --ranks 4 " in lines[-1]
    assert (held, free) == (0.0, 0.0)
    assert copied == [0.0, 1.0, 2.0, 3.0]
