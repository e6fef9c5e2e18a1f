"""Which device a rank takes, and what the launcher's variables say of its place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ddp_loop.distributed import describe_devices, join_world, scale_batch_size
from ddp_loop.distributed.devices import RankEnv, choose_device, read_rank_env

CPU = torch.device("cpu")


@dataclass
class SomeRanks:
    size: int
    device: torch.device


@pytest.mark.covers("B7")
@pytest.mark.parametrize(
    ("wish", "gpus", "device"),
    [
        ("auto", 0, CPU),
        ("auto", 2, torch.device("cuda", 1)),
        ("cpu", 0, CPU),
        ("cpu", 2, CPU),
        ("gpu", 2, torch.device("cuda", 1)),
    ],
)
def test_a_wish_and_the_gpus_there_are_give_a_device(wish: str, gpus: int, device: torch.device) -> None:
    assert choose_device(wish, gpus, local_rank=1) == device


@pytest.mark.covers("B7")
def test_a_gpu_wished_for_where_there_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r'device="gpu" needs a GPU.* is 0\. Pass "auto" or "cpu"'):
        choose_device("gpu", 0, local_rank=1)


@pytest.mark.covers("B7")
@pytest.mark.parametrize("wish", ["cuda", "GPU", "", "cuda:0", "tpu"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_another_word_is_refused_with_the_three_that_there_are(wish: str, gpus: int) -> None:
    with pytest.raises(ValueError, match=rf'must be "auto", "cpu" or "gpu"\. Got {wish!r}'):
        choose_device(wish, gpus, local_rank=0)


@pytest.mark.covers("B7")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_joining_with_a_gpu_that_is_not_there_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(ValueError, match='device="gpu" needs a GPU'):
        join_world(device="gpu")


@pytest.mark.covers("C1")
def test_each_local_rank_takes_its_own_gpu() -> None:
    assert [choose_device("auto", 4, rank).index for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.covers("C1")
def test_more_ranks_than_gpus_share_them() -> None:
    assert [choose_device("gpu", 2, rank).index for rank in range(5)] == [0, 1, 0, 1, 0]


@pytest.mark.covers("C1")
def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_rank_env({"PATH": "/bin", "LOCAL_RANK": "3"}) == RankEnv(0, 1, 0, 1)


@pytest.mark.covers("C1", "C4")  # rank 5 of two machines with four each
def test_the_launchers_variables_give_the_place() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_rank_env(variables) == RankEnv(5, 8, 1, 4)


def test_without_local_variables_all_ranks_are_on_this_machine() -> None:
    assert read_rank_env({"RANK": "2", "WORLD_SIZE": "3"}) == RankEnv(2, 3, 2, 3)


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


@pytest.mark.covers("C2")
@pytest.mark.parametrize(("batch_size", "ranks"), [(128, 2), (64, 4)])
def test_gpus_are_each_as_full_as_one_alone(batch_size: int, ranks: int) -> None:
    assert scale_batch_size(batch_size, SomeRanks(ranks, torch.device("cuda", 0))) == 256


@pytest.mark.covers("C2")
def test_cpu_ranks_share_the_mini_batch_of_one() -> None:
    assert scale_batch_size(128, SomeRanks(4, CPU)) == 128


@pytest.mark.covers("C2")
def test_a_world_is_what_scale_batch_size_takes() -> None:
    with join_world(device="cpu") as world:
        assert scale_batch_size(128, world) == 128


@pytest.mark.covers("C1")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_the_cpu_is_described_and_two_ranks_are_proposed() -> None:
    cpu, command = describe_devices().splitlines()
    assert cpu == f"cpu: {torch.get_num_threads()} threads"
    assert command.split("#")[0].split() == ["torchrun", "--nproc_per_node=2", "train.py"]


@pytest.mark.covers("C1")
@pytest.mark.gpu
def test_with_gpus_each_is_described_and_one_rank_each_is_proposed() -> None:
    gpus = torch.cuda.device_count()
    lines = describe_devices().splitlines()
    assert [line.split(":")[:2] for line in lines[1:-1]] == [["cuda", str(number)] for number in range(gpus)]
    assert f"--nproc_per_node={gpus} " in lines[-1]
