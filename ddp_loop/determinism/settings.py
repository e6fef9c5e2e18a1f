"""The settings of torch, cuDNN, cuBLAS and NCCL that give the same bits twice, set for a block and then restored.

[Note: When a variable counts] Each library reads the environment late, and only once. NCCL reads its variables at the
first collective of a group, and NCCL_NVLS_ENABLE once per process. torch reads CUBLAS_WORKSPACE_CONFIG at the process's
first matrix product on a GPU. So enter a block before `join_world` and before work on a GPU. Whether a block is active
is read from torch and from the environment. This module keeps only the numbers of the open blocks that seed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_loop.accelerators import all_gpus
from ddp_loop.determinism.checks import check_seed
from ddp_loop.determinism.seeding import preserved_streams, seed_everything

# The value that a block sets, and other values that it accepts, in any case.
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    "NCCL_PROTO": ("Simple",),
    "NCCL_NVLS_ENABLE": ("0",),
}
_OF_NCCL = [name for name in _VARIABLES if name.startswith("NCCL")]
_ASSIGNMENTS = ", ".join(f"{name}={_VARIABLES[name][0]}" for name in _OF_NCCL)
_NUMBERS = itertools.count(1)
_blocks = [0]  # the numbers of the seeded blocks that are open, the innermost last
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(frozen=True)
class DeterminismSettings:
    """The settings that decide whether torch gives the same bits twice.

    Attributes:
        algorithms: whether torch uses deterministic algorithms only.
        warn_only: whether torch warns, instead of raising, where it has no deterministic algorithm.
        fill_uninitialized_memory: whether torch then fills new tensors that are not initialized.
        inductor: whether torch.compile avoids choices by measurement.
        cudnn_deterministic: whether cuDNN uses deterministic algorithms only.
        cudnn_benchmark: whether cuDNN measures which algorithm is the fastest.
        environment: the variables of cuBLAS and NCCL by name; None for one that is not set.
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
    """Make two runs of a block give the same bits, on the same hardware and with the same number of threads.

    For example::

        with dl.deterministic(seed=0) as former, dl.join_world(seed=0) as world:
            ...

    torch uses deterministic algorithms only and fills uninitialized memory. cuDNN chooses nothing by measurement.
    CUBLAS_WORKSPACE_CONFIG is :4096:8, and NCCL has one algorithm (NCCL_ALGO=Ring, NCCL_PROTO=Simple,
    NCCL_NVLS_ENABLE=0). The generators of Python, NumPy and torch (on the CPU and every GPU) are seeded; `join_world`
    seeds them again with its own seed. The end of the block restores all settings, even after an exception and in a
    block inside a block. Use the block on every rank alike, and not in one of several threads: it applies to the whole
    process.

    Args:
        seed: of the generators, 64 bits. None neither seeds nor restores them.

    Yields:
        DeterminismSettings: the settings before the block.

    Raises:
        ValueError: an environment variable contradicts the block, or `seed` is not a whole number of 64 bits.
        RuntimeError: NCCL was started before the block with other variables. Inside the block: an operation has no
            deterministic form; the message names it.
    """
    seed = None if seed is None else check_seed(seed)
    _check_environment()
    if dist.is_available() and dist.is_initialized():
        require_unstarted(str(dist.get_backend_config()))
    former = _read()
    try:
        with _seeded(seed):
            _apply(_strict(former))
            yield former
    except RuntimeError as error:
        _advise(error)
        raise
    finally:
        _apply(former)


def seeded_block() -> int:
    """The number of the innermost `deterministic(seed)` that is open, which no other one has; 0 outside of all."""
    return _blocks[-1]


def require_pinned(backends: str) -> None:
    """Refuse to start NCCL in a block whose variables were changed after it was entered.

    A block is active if torch raises for operations that are not deterministic, and cuBLAS and at least one variable of
    NCCL are set as a block sets them. Outside of a block this does nothing.

    Args:
        backends: of the group that starts, such as "cpu:gloo,cuda:nccl".

    Raises:
        RuntimeError: another variable of NCCL has another value.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    active = strict and _is_set("CUBLAS_WORKSPACE_CONFIG") and any(map(_is_set, _OF_NCCL))
    if active and "nccl" in backends and (found := _deviations()):
        raise RuntimeError(
            f"In a deterministic block NCCL starts with {_ASSIGNMENTS}. Got {found}. Do not change these variables "
            "inside the block."
        )


# -- checks ------------------------------------------------------------------------------------------------


def _check_environment() -> None:
    for name, (wanted, *others) in _VARIABLES.items():
        if os.environ.get(name) and not _is_set(name):
            also = "".join(f" or {other}" for other in others)
            raise ValueError(
                f"A deterministic block needs {name}={wanted}{also}. Got {name}={os.environ[name]}. Unset it: the "
                "block sets it."
            )


def require_unstarted(backends: str) -> None:
    """Refuse a block after NCCL was started with other variables.

    Args:
        backends: of the group that was started.

    Raises:
        RuntimeError: a variable of NCCL has another value than a block sets.
    """
    if "nccl" in backends and (found := _deviations()):
        raise RuntimeError(
            f"NCCL needs {_ASSIGNMENTS} before a group starts. This group ({backends}) started with {found}. Enter "
            "deterministic() before join_world()."
        )


def _is_set(name: str) -> bool:
    """Whether the variable has a value that a block accepts."""
    return os.environ.get(name, "").lower() in [value.lower() for value in _VARIABLES[name]]


def _deviations() -> str:
    """NCCL's variables with values that a block does not accept, as text; empty without one."""
    values = {name: os.environ.get(name) for name in _OF_NCCL if not _is_set(name)}
    return ", ".join(f"no {name}" if value is None else f"{name}={value}" for name, value in values.items())


def _advise(error: RuntimeError) -> None:
    """Add the rule and a remedy to torch's own error about an operation that is not deterministic."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        note = (
            f"A deterministic block allows only operations that give the same bits twice; {refused[1]} may not. Use "
            "another operation (torch.use_deterministic_algorithms lists them), or call it outside of the block."
        )
    elif "not deterministic because it uses CuBLAS" in text:
        note = (
            "torch reads CUBLAS_WORKSPACE_CONFIG once, at a process's first matrix product on a GPU; here that came "
            "before the deterministic block. Enter the block earlier, or start with CUBLAS_WORKSPACE_CONFIG=:4096:8."
        )
    else:
        return
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# -- settings ----------------------------------------------------------------------------------------------


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


def _strict(former: DeterminismSettings) -> DeterminismSettings:
    environment = {
        name: former.environment[name] if _is_set(name) else wanted for name, (wanted, *_) in _VARIABLES.items()
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


def _apply(settings: DeterminismSettings) -> None:
    from torch._inductor import config

    torch.use_deterministic_algorithms(settings.algorithms, warn_only=settings.warn_only)
    config.deterministic = settings.inductor  # after torch's function, which sets it too
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    for name, value in settings.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed all generators, and restore them at the end; do neither for None."""
    if seed is None:
        yield
        return
    states = [(gpu, gpu.random_state()) for gpu in all_gpus()]
    with preserved_streams():
        try:
            _blocks.append(next(_NUMBERS))
            seed_everything(seed)
            yield
        finally:
            _blocks.pop()
            for gpu, state in states:
                if state is not None:
                    gpu.set_random_state(state)
