"""The numbers of a rank from its launcher, and the choice of its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ddp_loop.accelerators import accelerator_of, gpu_count


@dataclass(frozen=True)
class RankEnv:
    """A rank's numbers: `rank` of `size` over all machines, `local_rank` of `local_size` on its own."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def node(self) -> range:
        """The ranks that this rank's launcher started."""
        start = self.rank - self.local_rank
        return range(start, start + self.local_size)


def read_rank_env(environment: Mapping[str, str]) -> RankEnv:
    """The numbers that torchrun or `launch` set in the environment; a world of one without them.

    Raises:
        ValueError: only one of RANK and WORLD_SIZE is set, or they contradict each other.
    """
    names = ("RANK", "WORLD_SIZE")
    there = [name for name in names if name in environment]
    if not there:
        return RankEnv()
    if len(there) == 1:
        missing = names[1 - names.index(there[0])]
        raise ValueError(
            f"RANK and WORLD_SIZE must both be set, or neither. {there[0]}={environment[there[0]]} is set and "
            f"{missing} is not. Start with torchrun, or unset {there[0]}."
        )
    rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK must be in 0 .. WORLD_SIZE-1. Got RANK={rank}, WORLD_SIZE={size}. Start with torchrun or unset both."
        )
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    local_rank = _number(environment, "LOCAL_RANK", rank % max(local_size, 1))
    if not 0 <= local_rank < local_size <= size:
        raise ValueError(
            "LOCAL_RANK must be in 0 .. LOCAL_WORLD_SIZE-1, and LOCAL_WORLD_SIZE at most WORLD_SIZE. Got "
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}, WORLD_SIZE={size}. Start with torchrun."
        )
    return RankEnv(rank, size, local_rank, local_size)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number. Got {name}={text!r}. Start with torchrun.") from None


def choose_device(wish: str, gpus: int, local_rank: int) -> torch.device:
    """The device for a wish: "auto" (a GPU if there is one), "cpu" or "gpu", on a machine with `gpus` GPUs.

    | wish | no GPU | GPUs |
    |---|---|---|
    | auto | cpu | cuda:(local_rank mod gpus) |
    | cpu | cpu | cpu |
    | gpu | ValueError | cuda:(local_rank mod gpus) |

    Raises:
        ValueError: "gpu" without a GPU, or another word.
    """
    if wish not in ("auto", "cpu", "gpu"):
        raise ValueError(f'device must be "auto", "cpu" or "gpu". Got {wish!r}.')
    if wish == "gpu" and gpus == 0:
        raise ValueError(
            'device="gpu" needs a GPU that torch can see. torch.cuda.device_count() is 0. Pass "auto" or "cpu", '
            "or install a CUDA build of torch."
        )
    if wish == "cpu" or gpus == 0:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % gpus)


def describe_devices() -> str:
    """The devices of this machine, one a line, and the torchrun command that uses them."""
    gpus = gpu_count()
    devices = [torch.device("cpu"), *(torch.device("cuda", number) for number in range(gpus))]
    lines = [str(accelerator_of(device)) for device in devices]
    ranks = gpus or 2
    why = "one rank per GPU" if gpus else "no GPU: ranks on the CPU"
    return "\n".join([*lines, f"torchrun --nproc_per_node={ranks} train.py   # {why}"])


class HasRanks(Protocol):
    """The number of ranks, and the device of this one."""

    size: int
    device: torch.device


def scale_batch_size(batch_size: int, world: HasRanks) -> int:
    """The mini-batch for all ranks from one rank's: times the number of ranks on GPUs, unchanged on CPUs.

    128 on 2 GPUs is 256 and 64 on 4 is 256: each GPU stays as full as one alone. On CPUs the ranks share the
    machine's cores, so the mini-batch that suits one process suits all together.

    Args:
        batch_size: of one rank, in samples.
        world: from `join_world`.

    Returns:
        The number of samples in a mini-batch over all ranks.
    """
    return batch_size if accelerator_of(world.device).is_host else batch_size * world.size
