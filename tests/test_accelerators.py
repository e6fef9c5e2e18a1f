"""What a device is and can do, and asynchronous copies to the host."""

from __future__ import annotations

import ctypes
import platform
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_loop.accelerators import Cuda, HostCopy, TorchAccelerator, accelerator_of, all_gpus, gpu_count, is_asynchronous
from tests.support.scripts import run


def test_a_copy_holds_what_the_tensor_held_when_it_was_made() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = HostCopy(tensor)
    with torch.no_grad():
        tensor.zero_()
    assert copy.wait().tolist() == [1.0, 2.0]
    assert copy.ready()
    assert not copy.wait().requires_grad


def test_the_cpu_has_no_generator_of_its_own_and_does_not_count_its_memory() -> None:
    cpu = accelerator_of(torch.device("cpu"))
    assert (cpu.kind, cpu.is_host, cpu.is_gpu, cpu.is_asynchronous) == ("cpu", True, False, False)
    assert not is_asynchronous(torch.ones(()))
    assert cpu.random_state() is None
    assert cpu.memory_free() == float("inf")
    assert cpu.memory_held() >= 0
    assert cpu.process_group([cpu.identity()] * 2) == ("gloo", None)


FAULTS = """
import resource
import torch
from ddp_loop import join_world

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(6_000_000)  # 24 MB, 5,900 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with join_world(device="cpu"):
    returned = faults()
with join_world(device="cpu", keep_memory=True):
    faults()
    print(returned, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept with glibc only")
def test_memory_that_a_process_keeps_is_not_cleared_again(tmp_path: Path) -> None:
    done = run("-c", FAULTS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    returned, kept = map(int, done.stdout.split())
    assert returned > 10_000
    assert kept < returned / 100  # what else the process does


@pytest.mark.parametrize("largest", [2**30, 2**25])
def test_memory_is_kept_by_the_thresholds_that_the_c_library_accepts(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: dict[int, int] = {}

    def mallopt(parameter: int, value: int) -> int:
        if parameter == -3 and value > largest:
            return 0
        accepted[parameter] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    accelerator_of(torch.device("cpu")).keep_memory()
    assert accepted == {-1: 2**31 - 1, -3: largest}


def test_nothing_is_kept_where_the_c_library_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    accelerator_of(torch.device("cpu")).keep_memory()
    accelerator_of(torch.device("meta")).keep_memory()


def test_a_device_of_an_unknown_kind_is_never_asked_for_values() -> None:
    meta = accelerator_of(torch.device("meta"))
    assert (meta.kind, meta.is_host, meta.is_gpu, meta.is_asynchronous) == ("meta", False, False, True)


def test_a_backend_without_a_timeout_of_its_own_is_taken() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # torch's own, which has none
    try:
        group = dist.distributed_c10d._get_default_group()
        TorchAccelerator(torch.device("cpu")).connect(group, timedelta(seconds=1))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_gpu_copies_beside_the_host_and_puts_its_generator_back() -> None:
    assert len(all_gpus()) == gpu_count()
    gpu = all_gpus()[0]
    assert (gpu.kind, gpu.is_host, gpu.is_gpu, gpu.is_asynchronous) == ("cuda", False, True, True)
    values = torch.arange(1e6, device=gpu.device)
    copy = HostCopy(values)
    values.zero_()
    assert copy.wait().is_pinned()
    assert copy.wait()[-1].item() == 1e6 - 1
    state = gpu.random_state()
    assert state is not None
    drawn = torch.rand(3, device=gpu.device).tolist()
    gpu.set_random_state(state)
    assert torch.rand(3, device=gpu.device).tolist() == drawn
    assert gpu.memory_held() >= values.nbytes
    assert gpu.memory_free() > 0
    identities = [one.identity() for one in all_gpus()]
    assert len(set(identities)) == gpu_count()
    assert gpu.process_group(identities) == ("cpu:gloo,cuda:nccl", gpu.device)
    assert gpu.process_group([*identities, identities[0]]) == ("gloo", None)


@pytest.mark.covers("J11")
def test_host_reads_are_noted_at_their_line_and_other_warnings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    noted: list[tuple[str, int]] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with Cuda(torch.device("cuda")).host_reads(lambda file, line: noted.append((file, line))):
            for _ in range(2):  # torch's warning, as CUDAFunctions.cpp words it
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
            warnings.warn("another one", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert [Path(file).name for file, _ in noted] == [Path(__file__).name] * 2
    assert noted[0] == noted[1]
    assert [str(one.message) for one in shown] == ["another one", "called a synchronizing CUDA operation"]
    assert modes == ["warn", 0]
