"""The device that a rank takes, and its place according to the launcher's variables."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.accelerators import KINDS, Cpu, accelerator_of
from ddp_loop.distributed import Pool, describe_devices, devices, join, join_world, scale_batch_size, sharing_gpus
from ddp_loop.distributed.devices import RankEnv, choose_device, read_rank_env
from tests.support.exchanges import on_machines
from tests.support.harness import FAULT_S, OnRanks, caught

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


UUIDS = ["GPU-3f1a0000-aaaa", "GPU-3f1a0000-bbbb", "GPU-77c00000-cccc"]


@pytest.mark.covers("B7", "C1", "C3")
@pytest.mark.parametrize(
    ("wish", "gpus", "indices"),
    [
        ("auto", 0, [None, None]),
        ("auto", 4, [0, 1, 2, 3]),
        ("cpu", 0, [None, None]),
        ("cpu", 2, [None, None]),
        ("gpu", 2, [0, 1, 0, 1, 0]),  # ranks that share GPUs
        ("cuda:2", 3, [2]),
        ("cuda:0,2", 3, [0, 2]),
        ("cuda:2,0", 3, [2, 0]),
        (UUIDS[1], 3, [1]),
        ("GPU-77C0", 3, [2]),
        (f"{UUIDS[2]},{UUIDS[0]}", 3, [2, 0]),
    ],
)
def test_a_wish_and_the_gpus_there_are_give_each_local_rank_a_device(
    wish: str, gpus: int, indices: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: UUIDS)
    found = [choose_device(wish, gpus, rank) for rank in range(len(indices))]
    assert found == [CPU if index is None else torch.device("cuda", index) for index in indices]


NO_SUCH_WORD = r'must be "auto", "cpu", "gpu", a type .* or UUIDs .*\. Got '
NOT_THERE = rf"must name GPUs that torch can see.*cuda:1 \({UUIDS[1]}\).*"


@pytest.mark.covers("B7", "C3")
@pytest.mark.parametrize(
    ("gpus", "wishes", "said"),
    [
        (0, ["gpu", "cuda:0", "GPU-3f1a"], r'device="{wish}" needs a GPU.* is 0\. Pass "auto" or "cpu"'),
        *((gpus, ["GPU", "", "cuda:", "cuda:0,", "cuda:-1", "cpu:0", "0", "tpu"], NO_SUCH_WORD) for gpus in (0, 1)),
        (3, ["cuda:1,1", f"{UUIDS[0]},{UUIDS[0]}"], "must name each GPU once"),
        (3, ["cuda:3", "cuda:0,3"], f"{NOT_THERE}3 is not among them"),
        (3, ["GPU-99", "MIG-99"], NOT_THERE + "{wish} is not among them"),
        (3, ["GPU-3f1a"], NOT_THERE + "{wish} names 2 of them"),
    ],
)
def test_a_wish_that_cannot_be_had_is_refused_with_what_can(
    gpus: int, wishes: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: UUIDS)
    for wish in wishes:
        with pytest.raises(ValueError, match=said.replace("{wish}", wish)) as refused:
            choose_device(wish, gpus, 0)
        assert wish in str(refused.value)


@pytest.mark.covers("C1", "C4")
def test_the_launchers_variables_give_the_place() -> None:
    assert read_rank_env({"PATH": "/bin", "LOCAL_RANK": "3"}) == RankEnv(0, 1, 0, 1)  # no launcher
    assert read_rank_env({"RANK": "2", "WORLD_SIZE": "3"}) == RankEnv(2, 3, 2, 3)  # all on this machine
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}  # of two machines
    assert read_rank_env(variables) == RankEnv(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 is set and RANK is not\. Start with torchrun, or unset WORLD_SIZE"),
        ({"RANK": "0"}, r"RANK=0 is set and WORLD_SIZE is not\. Start with torchrun, or unset RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must be in 0 \.\. WORLD_SIZE-1\. Got RANK=2, WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"Got RANK=-1, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"Got RANK=0, WORLD_SIZE=0"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, r"RANK must be a whole number\. Got RANK='zero'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, r"WORLD_SIZE must be a whole number\. Got WORLD_SIZE=''"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, r"Got LOCAL_RANK=0, LOCAL_WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, r"LOCAL_RANK must be in .* Got LOCAL_RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, r"Got .*LOCAL_WORLD_SIZE=4, WORLD_SIZE=2"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_rank_env(variables)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "this process trains alone, though SLURM_STEP_NUM_TASKS is 4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"PMI_SIZE": "3"}, "PMI_SIZE is 3"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, ""),  # the shell of an allocation of four
        ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, ""),  # torchrun on each machine
    ],
)
def test_a_line_says_that_a_task_of_srun_or_mpirun_trains_alone(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with join_world(device="cpu"):
        shown = capsys.readouterr().out
    assert said in shown if said else not shown


@pytest.mark.covers("C2")
def test_gpus_are_each_as_full_as_one_alone_and_cpu_ranks_share_the_mini_batch_of_one() -> None:
    def scaled(batch_size: int, ranks: int, device: torch.device) -> int:
        return scale_batch_size(batch_size, cast(dl.World, SimpleNamespace(size=ranks, device=device)))

    assert scaled(128, 2, GPU) == scaled(64, 4, GPU) == 256
    assert scaled(128, 4, CPU) == 128
    with join_world(device="cpu") as world:
        assert scale_batch_size(128, world) == 128


@pytest.mark.covers("C1")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_the_cpu_is_described_and_two_ranks_are_proposed() -> None:
    machine, cpu, command = describe_devices().splitlines()
    assert machine.startswith(f"torch {torch.__version__}, ")
    threads = torch.get_num_threads()
    assert cpu == ("cpu: 1 thread" if threads == 1 else f"cpu: {threads} threads")
    assert command.split("#")[0].split() == ["ddp_loop", "run", "--ranks", "2", "train.py"]


def require_description(lines: list[str], gpus: int) -> None:
    assert [line.split(":")[:2] for line in lines[2:-1]] == [["cuda", str(number)] for number in range(gpus)]
    assert all(line.rpartition(", ")[2].startswith("GPU-") for line in lines[2:-1])
    assert f"run --ranks {gpus} " in lines[-1]


def describe_all() -> tuple[int, list[str]]:
    return torch.cuda.device_count(), describe_devices().splitlines()


@pytest.mark.covers("C1")
@pytest.mark.slow
def test_with_fake_gpus_each_is_described_and_one_rank_each_is_proposed(on_fake_gpus: OnRanks) -> None:
    gpus, lines = on_fake_gpus(1, describe_all)[0]
    assert gpus > 1
    require_description(lines, gpus)


@pytest.mark.covers("C1")
@pytest.mark.gpu
def test_with_gpus_each_is_described_and_one_rank_each_is_proposed() -> None:
    require_description(describe_devices().splitlines(), torch.cuda.device_count())


# -- the devices of all ranks --------------------------------------------------------------------------------


class Gpu(Cpu):
    """A CPU in place of a GPU, one for each of the numbers in `identities`."""

    identities = ""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kind = "cuda"

    def identity(self) -> str:
        return f"GPU-{self.identities[int(os.environ['RANK'])]}"


@contextmanager
def on_gpus(identities: str) -> Iterator[None]:
    """This rank's device is the GPU of that number; "-" for a rank on the CPU."""
    Gpu.identities = identities
    kind = Cpu if identities[int(os.environ["RANK"])] == "-" else Gpu
    own = mock.patch.object(join, "_sharing", ContextVar("sharing", default=False))  # tests may share real GPUs
    with own, mock.patch.dict(KINDS, cpu=kind):
        accelerator_of.cache_clear()
        yield
    accelerator_of.cache_clear()


@pytest.mark.parametrize(
    ("identities", "group"),
    [
        (["GPU-a"], ("cpu:gloo,cuda:nccl", GPU)),
        (["GPU-a", "GPU-b"], ("cpu:gloo,cuda:nccl", GPU)),  # each rank sees its own GPU alone, as cuda:0
        (["GPU-a", "GPU-b", "GPU-a"], ("gloo", None)),
        (["MIG", "MIG"], ("gloo", None)),
    ],
)
def test_gpus_take_nccl_unless_two_ranks_share_one(
    identities: list[str], group: tuple[str, torch.device | None]
) -> None:
    assert accelerator_of(GPU).process_group(identities) == group


def join_on(identities: str, script_group: bool, shares: int = -1, lacks: int = -1) -> tuple[str, str, float]:
    """What `join_world` raises on this rank, in a process group that the script made or in its own."""
    rank = int(os.environ["RANK"])

    def join() -> None:
        if script_group:
            dist.init_process_group("gloo")
            dist.barrier()  # else a rank that is refused and leaves cuts one that still connects
        device = "cuda:7" if rank == lacks else "cpu"
        with dl.join_world(device=device, timeout_s=20.0, share_gpus=rank == shares):
            pass

    try:
        with on_gpus(identities), mock.patch.object(devices, "all_gpus", list):
            return caught(join)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("script_group", [False, True])
@pytest.mark.parametrize(("identities", "odd_rank"), [("-00", 1), ("00-", 2)])
def test_ranks_on_different_kinds_of_devices_are_refused_on_all(
    identities: str, odd_rank: int, script_group: bool, on_ranks: OnRanks
) -> None:
    for error, said, seconds in on_ranks(3, join_on, identities, script_group):
        assert error == "ValueError"
        assert f"same kind of device. Rank 0 has cpu, rank {odd_rank} has cpu." in said
        assert seconds < FAULT_S


@pytest.mark.covers("C3")
@pytest.mark.parametrize("script_group", [False, True])
@pytest.mark.parametrize(("identities", "shares", "both"), [("010", -1, (0, 2)), ("011", 1, (1, 2))])
def test_two_ranks_with_one_gpu_are_refused_on_all_by_its_uuid(
    identities: str, shares: int, both: tuple[int, int], script_group: bool, on_ranks: OnRanks
) -> None:
    """Whatever each rank's index is: with CUDA_VISIBLE_DEVICES of its own each rank has cuda:0."""
    for error, said, seconds in on_ranks(3, join_on, identities, script_group, shares):
        assert error == "ValueError"
        assert f"a GPU of its own. Ranks {both[0]} and {both[1]} on " in said
        assert f"both have GPU-{identities[both[0]]}. " in said
        assert "share_gpus=True" in said
        assert seconds < FAULT_S


@pytest.mark.covers("C3")
@pytest.mark.parametrize("script_group", [False, True])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_without_a_device_ends_all_ranks(culprit: int, script_group: bool, on_ranks: OnRanks) -> None:
    for rank, (error, said, seconds) in enumerate(on_ranks(3, join_on, "---", script_group, lacks=culprit)):
        assert error == "ValueError"
        assert ("has no device: " in said) == (rank != culprit)
        assert 'device="cuda:7"' in said
        assert seconds < FAULT_S


def share_inside(identities: str) -> tuple[float, tuple[str, str, float]]:
    with on_gpus(identities):
        with sharing_gpus(), dl.join_world(device="cpu") as world:
            total = world.sum(torch.ones(())).item()
        return total, caught(lambda: dl.join_world(device="cpu"))


def test_a_block_lets_the_worlds_inside_share_gpus(on_ranks: OnRanks) -> None:
    for total, (error, said, _) in on_ranks(2, share_inside, "00"):
        assert (total, error) == (2.0, "ValueError")
        assert "share_gpus=True" in said


def contexts() -> list[bool]:
    """Whether this process has a context on each GPU, according to the driver."""
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    assert driver.cuInit(0) == 0
    for number in range(torch.cuda.device_count()):
        gpu, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(gpu), number) == 0
        assert driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(bool(active.value))
    return found


def train_on_last(wish: str) -> tuple[list[bool], str, list[bool]]:
    """The contexts before the world, the device, and the contexts after a little work on it."""
    last = torch.cuda.device_count() - 1
    uuids = devices.gpu_uuids()
    before = contexts()
    chosen = f"cuda:{last}" if wish == "index" else uuids[last]
    with dl.join_world(device=chosen) as world:
        layer = torch.nn.Linear(3, 3).to(world.device)
        layer(torch.ones(2, 3, device=world.device)).sum().backward()
        world.sum(torch.ones((), device=world.device))
        return before, str(world.device), contexts()


@pytest.mark.covers("C3")
@pytest.mark.gpu
@pytest.mark.parametrize("wish", ["index", "uuid"])
def test_the_gpus_that_are_not_chosen_get_no_context(wish: str) -> None:
    last = torch.cuda.device_count() - 1
    with Pool(1) as fresh:  # a process that has used no GPU
        [(before, device, after)] = fresh.run(train_on_last, 1, wish)
    assert before == [False] * (last + 1)
    assert device == f"cuda:{last}"
    assert after == [False] * last + [True]


@pytest.mark.covers("C3")
@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_refused_with_the_uuids_of_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"must name GPUs.*cuda:0 \(GPU-"):
        join_world(device=f"cuda:{torch.cuda.device_count()}")


def groups_on_machines(sizes: list[int], script_group: bool) -> int:
    if script_group:
        dist.init_process_group("gloo")
    try:
        with on_machines(*sizes), dl.join_world(device="cpu", timeout_s=20.0):
            return len(dist.distributed_c10d._world.pg_map)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("sizes", "script_group"), [([2, 1], True), ([2, 2], False)])
def test_torch_knows_no_group_of_the_first_ranks_of_machines(
    sizes: list[int], script_group: bool, on_ranks: OnRanks
) -> None:
    """Where the default group is bound to a GPU, torch has the other ranks split NCCL's group alone."""
    assert on_ranks(sum(sizes), groups_on_machines, sizes, script_group) == [1] * sum(sizes)
