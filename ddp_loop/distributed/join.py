"""How a process joins the ranks that a launcher started, or is a world of one."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import isfinite
from numbers import Real
from types import TracebackType

import torch

from ddp_loop.accelerators import accelerator_of, current_kind, device_count, gpu_count
from ddp_loop.determinism import check_count, check_seed
from ddp_loop.distributed.devices import RankEnv, choose_device, read_rank_env
from ddp_loop.distributed.failures import PeerFailed
from ddp_loop.distributed.process_group import raise_on_all
from ddp_loop.distributed.processes import LineHook, follow_launcher, has_line, set_line
from ddp_loop.distributed.world import World
from ddp_loop.elastic import begin_at_script, is_reported, open_missing_streams

EXCHANGES = ("auto", "memory", "gloo")
_EXCHANGE = "DDP_LOOP_EXCHANGE"
_REFUSAL_S = 10.0  # how long a rank without a device waits for the others
_MOST_S = 2e6  # TCP counts milliseconds in a C int
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun; a batch script has none
_sharing = ContextVar("sharing", default=False)

# torch's 170,000 objects live to the end, and each collection would look at them. An interactive process may have
# others by now, which are to be freed.
if not hasattr(sys, "ps1"):
    gc.freeze()


def join_world(
    *,
    device: str = "auto",
    share_gpus: bool = False,
    seed: int = 0,
    threads: int = 1,
    timeout_s: float = 60.0,
    exchange: str = "auto",
    keep_memory: bool = False,
) -> World:
    """Join the ranks that torchrun or `launch` started; without a launcher, a world of one. Every rank must call this.

    Use it in a `with`: an exception inside ends the other ranks too, and leaving cleans up. Without a `with` the same
    happens when the interpreter ends.

        with dl.join_world(seed=0) as world:
            model = Network().to(world.device)

    Args:
        device: "auto" (a GPU if there is one), "cpu" or "gpu"; a type of torch's accelerators ("xpu"); or some of the
            machine's GPUs, by index ("cuda:2", "xpu:0,2") or by UUID ("GPU-3f1a...", or its first letters). Each local
            rank gets one of them, in their order. The process leaves the others untouched.
        share_gpus: let several ranks have one CUDA GPU, where there are more ranks than GPUs. Sums then go over gloo,
            since NCCL needs a GPU for each rank. By default ranks with the same GPU are refused.
        seed: of Python's, NumPy's and torch's generators, and of every random stream of a loop.
        threads: CPU threads of torch on each rank. Fixed, since 1 and 2 threads give different bits: torchrun sets
            1, and plain Python takes all cores.
        timeout_s: how long a collective waits for the slowest rank, in seconds; at most 23 days.
        exchange: how the ranks exchange values in the host's memory. "auto": in shared memory where all ranks are on
            one machine and can share it, otherwise over gloo; "memory": the former, or an error; "gloo". With fixed
            shards a step's sums have the same bits both ways. Where it is "auto", the environment variable
            DDP_LOOP_EXCHANGE replaces it.
        keep_memory: whether a process on the CPU keeps the memory of freed tensors for the next ones until it ends,
            instead of giving it back to the system (with glibc). Steps took 12 to 46 % less time, at a peak memory
            that was up to 37 % higher.

    Raises:
        ValueError: only one of RANK and WORLD_SIZE, no such device, two ranks with one GPU, or ranks that disagree.
        PeerFailed: not all ranks joined within the timeout.
    """
    open_missing_streams()
    seed = check_seed(seed)
    threads = check_count("threads", threads)
    timeout_s = _check_timeout(timeout_s)
    if exchange == "auto":
        exchange = os.environ.get(_EXCHANGE) or exchange
    if exchange not in EXCHANGES:
        every = ", ".join(map(repr, EXCHANGES))
        raise ValueError(f"exchange, and {_EXCHANGE} in the environment, must be one of {every}. Got {exchange!r}.")
    place = replace(read_rank_env(os.environ), shares_gpu=share_gpus or _sharing.get())
    follow_launcher()
    chosen = _device_of(place, device, timeout_s)
    accelerator_of(chosen).activate()
    if keep_memory:
        accelerator_of(chosen).keep_memory()
    world = World(place, chosen, seed=seed, threads=threads, timeout_s=timeout_s, exchange=exchange)
    _leave_at_exit(world)
    _say_if_alone(world)
    return world


def _check_timeout(timeout_s: float) -> float:
    if not (isinstance(timeout_s, Real) and isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a finite number of seconds above 0. Got {timeout_s=}.")
    return min(timeout_s, _MOST_S)


def _say_if_alone(world: World) -> None:
    """Say that tasks of srun or mpirun, without torchrun, each train alone."""
    named = [name for name in _TASKS if os.environ.get(name, "1") != "1"]
    if named and "RANK" not in os.environ:
        world.say(
            f"ddp_loop: this process trains alone, though {named[0]} is {os.environ[named[0]]}: srun and mpirun start "
            "no ranks. To train with all tasks, start them with torchrun, as launch/slurm.sbatch does."
        )


@contextmanager
def sharing_gpus() -> Iterator[None]:
    """Inside the block every world that is joined has `share_gpus=True`."""
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def _device_of(place: RankEnv, wish: str, timeout_s: float) -> torch.device:
    """The device of this rank; without one raises on all ranks."""
    try:
        count = gpu_count() if wish == "auto" else device_count()
        chosen = choose_device(wish, count, place.local_rank, kind=current_kind() or "cuda")
        accelerator_of(chosen).require_backend(place.size)
        return chosen
    except ValueError as error:
        problem = error
    return raise_on_all(problem, place, min(timeout_s, _REFUSAL_S))  # outside of the block, whose error it repeats


_open: list[World] = []  # joined, and not left


def _leave_at_exit(world: World) -> None:
    """Leave when the interpreter ends, unless it was left before; an uncaught exception ends all ranks."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = begin_at_script(error)
        if not world.is_left:
            world.__exit__(kind, error, trace)
        if not is_reported(error):
            LineHook(usual)(kind, error, trace)

    def end() -> None:
        if not world.is_left:
            world.__exit__(None, None, None)

    def forget() -> None:
        atexit.unregister(end)
        _open.remove(world)
        error = world.ended_by  # it is not caught yet
        if isinstance(error, PeerFailed):
            set_line(error, f"ddp_loop: rank {world.rank} was ended{world.where}: {error.summary}")
        if sys.excepthook is tell:
            sys.excepthook = usual
            if error is not None and has_line(error) and not is_reported(error):
                sys.excepthook = LineHook(usual)

    sys.excepthook = tell
    atexit.register(end)
    _open.append(world)
    world.on_leaving(forget)


def leave_open_worlds(error: BaseException | None) -> None:
    """Leave the worlds that a task of a pool joined and did not leave, as at the end of a script.

    Args:
        error: by which the task ended.
    """
    for world in reversed(_open[:]):
        world.__exit__(None, error, None)
    if isinstance(sys.excepthook, LineHook):  # the pool has caught the error
        sys.excepthook = sys.excepthook.usual
