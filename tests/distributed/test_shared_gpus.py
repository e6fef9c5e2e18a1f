"""Ranks that share a GPU, slices of a GPU, and devices that a rank cannot have, on fake devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed import join
from tests.support.gpu_steps import SCENARIOS, weights_of
from tests.support.harness import FAULT_S, OnRanks, caught

pytestmark = pytest.mark.covers("B7", "C3", "J18")

SLICE = "Fake H100 MIG 1g.10gb"
Caught = tuple[str, str, float]


@contextmanager
def seeing(visible: Sequence[str], name: str = "") -> Iterator[None]:
    """CUDA_VISIBLE_DEVICES of each rank, the name of the GPUs, and gloo as a CUDA build of torch has it."""
    variables = {"CUDA_VISIBLE_DEVICES": visible[int(os.environ["RANK"])], "FAKE_CUDA_SHARED": "1"}
    if name:
        variables["FAKE_CUDA_NAME"] = name
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(join, "_sharing", ContextVar("sharing", default=False)),
    ):
        yield


def train(visible: Sequence[str], scenario: str, name: str = "", **options: Any) -> tuple[str, str, bool]:
    """The device, the backends, and whether the weights are those of the CPU."""
    with seeing(visible, name):
        with dl.join_world(device="gpu", seed=0, **options) as world:
            device, backends = str(world.device), str(dist.get_backend_config())
            on_gpu = weights_of(SCENARIOS[scenario], world)
        with dl.join_world(device="cpu", seed=0) as world:
            return device, backends, on_gpu == weights_of(SCENARIOS[scenario], world)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [(3, "4 shards"), (2, "4 shards, batch norm"), (3, "buffers"), (2, "weights on the device")],
)
def test_ranks_that_share_a_gpu_sum_over_gloo_and_have_the_weights_of_the_cpu(
    on_fake_gpus: OnRanks, ranks: int, scenario: str
) -> None:
    for device, backends, is_same in on_fake_gpus(ranks, train, ["0"] * ranks, scenario, share_gpus=True):
        assert (device, is_same) == ("cuda:0", True)
        assert "nccl" not in backends


def test_two_slices_of_a_gpu_are_two_devices_that_sum_over_gloo(on_fake_gpus: OnRanks) -> None:
    """Each rank sees its own slice, as CUDA has it. They have one place on the bus, where NCCL refuses two ranks."""
    for device, backends, is_same in on_fake_gpus(2, train, ["0", "1"], "4 shards", SLICE):
        assert (device, is_same) == ("cuda:0", True)
        assert "nccl" not in backends


def join_seeing(visible: Sequence[str], *wishes: str) -> list[Caught]:
    """What joining raises with each of the wishes."""

    def join_and_leave(device: str) -> None:
        with dl.join_world(device=device, timeout_s=20.0):
            pass

    with seeing(visible):
        return [caught(join_and_leave, device) for device in wishes]


def require_on_all(found: list[list[Caught]], *said: Sequence[str]) -> None:
    """Every rank raises one clear line at once, with each wish."""
    for one in found:
        for (error, text, seconds), words in zip(one, said, strict=True):
            assert error == "ValueError", text
            assert all(word in text for word in words), text
            assert "\n" not in text
            assert seconds < FAULT_S


@pytest.mark.parametrize(
    ("visible", "both"),
    [
        (["0,1", "1,0"], (0, 1)),  # cuda:0 of rank 0 is cuda:1 of rank 1
        (["2", "1", "2"], (0, 2)),
        (["0,1"] * 3, (0, 2)),  # more ranks than GPUs
    ],
)
def test_ranks_with_one_gpu_are_refused_on_all_however_each_addresses_it(
    on_fake_gpus: OnRanks, visible: list[str], both: tuple[int, int]
) -> None:
    found = on_fake_gpus(len(visible), join_seeing, visible, "gpu")
    require_on_all(found, (f"Ranks {both[0]} and {both[1]} on ", " both have GPU-fake-", "share_gpus=True"))


def test_ranks_whose_gpus_differ_take_nccl(on_fake_gpus: OnRanks) -> None:
    for _, backends, is_same in on_fake_gpus(2, train, ["1", "0"], "4 shards"):
        assert is_same
        assert "cuda:nccl" in backends


def test_a_device_that_is_not_there_is_refused_on_all_ranks(on_fake_gpus: OnRanks) -> None:
    said = {
        "cuda:9": "9 is not among them. Pass one of these, or check CUDA_VISIBLE_DEVICES.",
        "GPU-none": "GPU-none is not among them",
        "tpu": 'a type of device that torch knows such as "xpu"',
        "xpu": "needs an accelerator of type xpu that torch can see. torch ",
        "xpu:0": "sees 2 of type cuda here.",
    }
    require_on_all(on_fake_gpus(2, join_seeing, ["0,1"] * 2, *said), *said.items())


def test_a_kind_of_device_that_a_build_for_the_cpu_lacks_is_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    said = {"xpu": "sees none here. Pass", "mps:0": "of type mps", "cuda": "a GPU", "gpu": "a GPU"}
    found = on_ranks(2, join_seeing, [""] * 2, *said)
    require_on_all(found, *((f'device="{wish}" needs', words) for wish, words in said.items()))


# -- devices of an extension -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_device_of_an_extension_that_a_rank_cannot_have_is_refused_on_all(on_fake_npus: OnRanks) -> None:
    said = [
        ("npu:3. 9 is not among them. Pass one of these, or check which of them this process may see.",),
        ("needs a GPU that torch can see. torch.cuda.device_count() is 0",),
        (" both have npu:1 on host ", "Ranks cannot share npu devices: gloo takes no such tensors."),
    ]
    require_on_all(on_fake_npus(2, join_seeing, [""] * 2, "npu:9", "cuda", "npu:1"), *said)


def join_without(backend: str) -> tuple[list[Caught], str]:
    """What joining raises where torch has that backend for the device, and the device of a world that asks for none."""
    known = dist.Backend.default_device_backend_map
    with mock.patch.dict(known, {"npu": backend}):
        if not backend:
            del known["npu"]
        accelerator_of.cache_clear()
        try:
            refused = join_seeing([""] * 2, "npu")
            with dl.join_world() as world:
                return refused, str(world.device)
        finally:
            accelerator_of.cache_clear()


@pytest.mark.parametrize(("backend", "said"), [("", "torch has none"), ("gloo", "torch has gloo, which takes no such")])
def test_ranks_on_devices_that_torch_cannot_sum_between_are_refused_and_auto_is_the_cpu(
    on_fake_npus: OnRanks, backend: str, said: str
) -> None:
    found = on_fake_npus(2, join_without, backend)
    words = said, "Ranks on npu devices need a backend of torch.distributed"
    require_on_all([refused for refused, _ in found], words)
    assert [device for _, device in found] == ["cpu", "cpu"]


def test_a_group_of_the_script_without_the_devices_backend_is_refused_with_one_that_has_it(
    on_fake_npus: OnRanks,
) -> None:
    found = on_fake_npus(2, join_in_gloo)
    require_on_all(found, ("needs a backend for the npu too", 'init_process_group("cpu:gloo,npu:hccl")'))


def join_in_gloo() -> list[Caught]:
    dist.init_process_group("gloo")
    dist.barrier()  # else a rank that is refused and leaves cuts one that still connects
    try:
        return join_seeing([""] * 2, "npu")
    finally:
        dist.destroy_process_group()
