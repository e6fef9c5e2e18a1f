"""The numbers of a rank from its launcher, and the choice of its device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ddp_loop.accelerators import accelerator_of, all_gpus, gpu_visibility

_FORMS = (
    'device must be "auto", "cpu", "gpu", a type of device that torch knows such as "xpu", indices of devices such as '
    '"cuda:2" or "cuda:0,2", or UUIDs such as "GPU-3f1a"'
)


@dataclass(frozen=True)
class RankEnv:
    """A rank's numbers: `rank` of `size` over all machines, `local_rank` of `local_size` on its own.

    Attributes:
        shares_gpu: whether other ranks may have the GPU of this rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    shares_gpu: bool = False

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
    rank = _number(environment, "RANK", 0)
    size = _number(environment, "WORLD_SIZE", 1)
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


def gpu_uuids() -> list[str]:
    """The UUID of each GPU that torch sees, in the order of their indices."""
    return [gpu.uuid() for gpu in all_gpus()]


def choose_device(wish: str, gpus: int, local_rank: int, kind: str = "cuda") -> torch.device:
    """The device of a rank for a wish, on a machine with `gpus` accelerators of one kind, such as "cuda".

    | wish | none | some |
    |---|---|---|
    | auto | cpu | cuda:(local_rank mod gpus) |
    | cpu | cpu | cpu |
    | gpu, cuda | ValueError | cuda:(local_rank mod gpus) |
    | cuda:0,2 | ValueError | the GPU at place local_rank mod 2 of the list |
    | GPU-3f1a,GPU-77c0 | ValueError | likewise; the first letters of a UUID are enough |
    | xpu, xpu:0 | ValueError | ValueError: another kind |

    Ranks beyond the end of a list get a GPU that another rank has. `describe_all` refuses that on every rank.

    Args:
        wish, gpus, local_rank: as above.
        kind: of torch's accelerators.

    Raises:
        ValueError: a device of a kind that is not there, a GPU that is not there, or another word.
    """
    if wish == "cpu" or (wish == "auto" and gpus == 0):
        return torch.device("cpu")
    asked, listed = (kind, []) if wish in ("auto", "gpu") else _listed(wish)
    if gpus == 0 or asked != kind:
        raise ValueError(_none_of(asked, wish, gpus, kind))
    chosen = [_index_of(one, wish, gpus, kind) for one in listed] or list(range(gpus))
    if len(set(chosen)) < len(chosen):
        raise ValueError(f'device must name each GPU once. Got "{wish}". Remove the GPU that is there twice.')
    return torch.device(kind, chosen[local_rank % len(chosen)])


def _listed(wish: str) -> tuple[str, list[str]]:
    """The type of device in a wish, and its indices or UUIDs; ValueError for another word."""
    kind, colon, numbers = wish.partition(":") if isinstance(wish, str) else ("", "", "")
    listed = numbers.split(",") if colon else []
    if _is_known(kind) and all(one.isdecimal() for one in listed):
        return kind, listed
    listed = str(wish).split(",")
    if all(one.startswith(("GPU-", "MIG-")) for one in listed):
        return "cuda", listed
    raise ValueError(f"{_FORMS}. Got {wish!r}.")


def _is_known(kind: str) -> bool:
    """Whether torch knows a type of device other than the CPU."""
    try:
        return torch.device(kind).type == kind != "cpu"
    except RuntimeError:
        return False


def _none_of(asked: str, wish: str, gpus: int, kind: str) -> str:
    """Why there is no device of the type that was asked for."""
    if asked == "cuda":
        return (
            f'device="{wish}" needs a GPU that torch can see. torch.cuda.device_count() is 0. Pass "auto" or "cpu", '
            "or install a CUDA build of torch."
        )
    there = f"{gpus} of type {kind}" if gpus else "none"
    return (
        f'device="{wish}" needs an accelerator of type {asked} that torch can see. torch {torch.__version__} sees '
        f'{there} here. Pass "auto" or "cpu", or install a torch, or its extension, for {asked}.'
    )


def _index_of(one: str, wish: str, gpus: int, kind: str) -> int:
    """The index of a GPU that is given by its index, or by the first letters of its UUID."""
    if one.isdecimal() and int(one) < gpus:
        return int(one)
    there = gpu_uuids()
    found = [] if one.isdecimal() else [at for at, uuid in enumerate(there) if uuid.lower().startswith(one.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{kind}:{index}" + (f" ({uuid})" if uuid else "") for index, uuid in enumerate(there))
    problem = f"{one} names {len(found)} of them" if found else f"{one} is not among them"
    check = gpu_visibility() or "which of them this process may see"
    raise ValueError(
        f'device="{wish}" must name GPUs that torch can see: {known}. {problem[0].upper()}{problem[1:]}. Pass one of '
        f"these, or check {check}."
    )


def describe_devices() -> str:
    """The machine, its devices, one a line, and the command that uses them."""
    gpus = all_gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"torch {torch.__version__}, {cores} core{'s' * (cores > 1)}, {memory:.0f} GiB of memory",
        str(accelerator_of(torch.device("cpu"))),
        *(", ".join(filter(None, [str(gpu), gpu.uuid()])) for gpu in gpus),
    ]
    ranks = len(gpus) or 2
    why = "one rank per GPU" if gpus else "no GPU: ranks on the CPU"
    return "\n".join([*lines, f"ddp_loop run --ranks {ranks} train.py   # {why}"])
