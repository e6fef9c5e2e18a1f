"""What torch, cuDNN, cuBLAS and NCCL are told for the same bits twice: switched for a block, and put back behind it.

[Note: When a variable counts] The environment is read late, and then kept: NCCL reads its variables when the first
collective of a group starts, NCCL_NVLS_ENABLE once in a process; torch looks at CUBLAS_WORKSPACE_CONFIG at the
process's first matrix product on a GPU. So a block is entered before `join_world`, and before work on a GPU. Whether
a block is active is read from torch and from the environment; nothing of it is kept here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_loop.accelerators import all_gpus
from ddp_loop.determinism.seeding import preserved_streams, seed_everything

# What each is set to, and what else may stand there; large or small letters.
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    "NCCL_PROTO": ("Simple",),
    "NCCL_NVLS_ENABLE": ("0",),
}
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(frozen=True)
class DeterminismSettings:
    """How everything is set that decides whether torch's results are the same twice.

    Attributes:
        algorithms: whether torch takes deterministic algorithms alone.
        warn_only: whether it warns where there is none, instead of raising.
        fill_uninitialized_memory: whether it then fills new tensors that are not initialized.
        inductor: whether torch.compile chooses nothing by measuring.
        cudnn_deterministic: whether cuDNN takes deterministic algorithms alone.
        cudnn_benchmark: whether cuDNN measures which algorithm is the fastest.
        environment: by name, the variables that cuBLAS and NCCL read; None for one that is not set.
    """

    algorithms: bool
    warn_only: bool
    fill_uninitialized_memory: bool
    inductor: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    environment: Mapping[str, str | None]


@contextmanager
def deterministic(seed: int | None = 0) -> Iterator[DeterminismSettings]:
    """Give the same bits twice inside a `with`, on the same hardware with the same number of threads.

        with dl.deterministic(seed=0) as former, dl.join_world(seed=0) as world:
            ...

    torch takes deterministic algorithms alone and fills memory that is not initialized; cuDNN measures nothing;
    CUBLAS_WORKSPACE_CONFIG=:4096:8; NCCL has one algorithm (NCCL_ALGO=Ring, NCCL_PROTO=Simple, NCCL_NVLS_ENABLE=0).
    Python's, NumPy's and torch's streams, on the CPU and on every GPU, start from `seed`. `join_world` seeds anew, from
    a seed of its own. Leaving puts all of it back, also after an exception, also out of a block in a block. On every
    rank alike, and for the whole process: not in one of several threads.

    Args:
        seed: of the random streams; None leaves them alone, and does not put them back either.

    Yields:
        The former state.

    Raises:
        ValueError: an environment variable that contradicts, or a seed that is no whole number of 64 bits.
        RuntimeError: NCCL was started before, with other variables. In the block: an operation that has no
            deterministic form, by its name.
    """
    _check_seed(seed)
    _check_environment()
    _check_started()
    former = _read()
    try:
        with _seeded(seed):
            _apply(_switched(former))
            yield former
    except RuntimeError as error:
        _advise(error)
        raise
    finally:
        _apply(former)


def require_pinned(backends: str) -> None:
    """Refuse NCCL in a block whose variables were changed since it was entered.

    A block is taken for active where torch raises for what is not deterministic, cuBLAS is told to be, and one of
    NCCL's variables is as a block sets it; elsewhere this does nothing.

    Args:
        backends: of a group that starts, such as "cpu:gloo,cuda:nccl".

    Raises:
        RuntimeError: another of NCCL's variables stands otherwise.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    stand = {name: _stands(name) for name in _VARIABLES}
    active = strict and stand.pop("CUBLAS_WORKSPACE_CONFIG") and any(stand.values())
    if active and "nccl" in backends and not all(stand.values()):
        raise RuntimeError(
            f"in a deterministic block NCCL starts with {_assignments()}; got {_found(stand)}: leave these variables "
            "alone inside the block"
        )


# -- what is refused ---------------------------------------------------------------------------------------


def _check_seed(seed: object) -> None:
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of 64 bits, or None for streams that go on; got {seed!r}")


def _check_environment() -> None:
    for name, (wanted, *others) in _VARIABLES.items():
        if os.environ.get(name) and not _stands(name):
            also = "".join(f" or {other}" for other in others)
            raise ValueError(
                f"a deterministic block takes {name}={wanted}{also}; got {name}={os.environ[name]}: unset it, and the "
                "block sets it itself"
            )


def _check_started() -> None:
    if dist.is_available() and dist.is_initialized():
        require_unstarted(str(dist.get_backend_config()))


def require_unstarted(backends: str) -> None:
    """Refuse a block after NCCL was started, unless its variables stood before too.

    Args:
        backends: of the group that was started.

    Raises:
        RuntimeError: one of NCCL's variables stands otherwise.
    """
    stand = {name: _stands(name) for name in _VARIABLES if name.startswith("NCCL")}
    if "nccl" in backends and not all(stand.values()):
        raise RuntimeError(
            f"NCCL is told {_assignments()} before a group starts; this one ({backends}) started with "
            f"{_found(stand)}: enter deterministic() before join_world()"
        )


def _stands(name: str) -> bool:
    """Whether the variable has a value that a block takes."""
    return os.environ.get(name, "").lower() in [value.lower() for value in _VARIABLES[name]]


def _assignments() -> str:
    return ", ".join(f"{name}={values[0]}" for name, values in _VARIABLES.items() if name.startswith("NCCL"))


def _found(stand: Mapping[str, bool]) -> str:
    values = {name: os.environ.get(name) for name, stands in stand.items() if not stands}
    return ", ".join(f"no {name}" if value is None else f"{name}={value}" for name, value in values.items())


def _advise(error: RuntimeError) -> None:
    """Put rule and remedy behind torch's own words about an operation that is not deterministic."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        note = (
            f"a deterministic block takes operations alone that give the same bits twice; {refused[1]} may not: take "
            "another one in its place (torch.use_deterministic_algorithms lists them), or leave the block for it"
        )
    elif "not deterministic because it uses CuBLAS" in text:
        note = (
            "CUBLAS_WORKSPACE_CONFIG is looked at once, in a process's first matrix product on a GPU; here that came "
            "before the deterministic block: enter it earlier, or start with CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    else:
        return
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# -- what is switched --------------------------------------------------------------------------------------


def _read() -> DeterminismSettings:
    from torch._inductor import config  # 1.1 s the first time; `use_deterministic_algorithms` imports it anyway

    return DeterminismSettings(
        algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized_memory=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # a property
        inductor=bool(config.deterministic),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        environment={name: os.environ.get(name) for name in _VARIABLES},
    )


def _switched(former: DeterminismSettings) -> DeterminismSettings:
    environment = {
        name: former.environment[name] if _stands(name) else wanted for name, (wanted, *_) in _VARIABLES.items()
    }
    return DeterminismSettings(
        algorithms=True,
        warn_only=False,
        fill_uninitialized_memory=True,
        inductor=True,
        cudnn_deterministic=True,
        cudnn_benchmark=False,
        environment=environment,
    )


def _apply(switches: DeterminismSettings) -> None:
    from torch._inductor import config

    torch.use_deterministic_algorithms(switches.algorithms, warn_only=switches.warn_only)
    config.deterministic = switches.inductor  # after torch's own, which sets it too
    torch.utils.deterministic.fill_uninitialized_memory = switches.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = switches.cudnn_deterministic
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    for name, value in switches.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Start all streams from the seed, and put them back; do neither for None."""
    if seed is None:
        yield
        return
    states = [(gpu, gpu.random_state()) for gpu in all_gpus()]
    with preserved_streams():
        try:
            seed_everything(seed)
            yield
        finally:
            for gpu, state in states:
                if state is not None:
                    gpu.set_random_state(state)
