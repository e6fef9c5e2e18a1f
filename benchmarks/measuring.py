"""Ratios of two ways to do the same, timed side by side: A B B A in one process group, median and quartiles.

The machine's speed drifts by more than what is measured, so no time is compared with one of another run: each
pair of blocks lies within a second, and the order is turned round so that drift cancels.
"""

from __future__ import annotations

import gc
import inspect
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl

Step = Callable[[], None]
Clock = Callable[[], float]
RANKS = 2
LEAST_PAIRS = 10


@dataclass(frozen=True)
class Ratio:
    """How long one way takes over another: median and quartiles of the pairs' ratios; medians in ms beside it."""

    median: float
    lower: float
    upper: float
    one_ms: float
    other_ms: float
    pairs: int

    @classmethod
    def of(cls, ones: list[float], others: list[float]) -> Ratio:
        """Of times in seconds, pair by pair."""
        lower, median, upper = statistics.quantiles([a / b for a, b in zip(ones, others, strict=True)], n=4)
        return cls(median, lower, upper, 1e3 * statistics.median(ones), 1e3 * statistics.median(others), len(ones))

    def columns(self) -> tuple[str, ...]:
        """Median, quartiles, both times in ms, and the number of pairs, for a table."""
        digits = 3 if self.other_ms < 100 else 0
        times = f"{self.one_ms:.{digits}f} / {self.other_ms:.{digits}f}"
        return f"{self.median:.3f}", f"{self.lower:.3f} to {self.upper:.3f}", times, str(self.pairs)


def exchanges() -> tuple[str, ...]:
    """The exchanges between the ranks of one machine that this version's `join_world` has."""
    return ("memory", "gloo") if "exchange" in inspect.signature(dl.join_world).parameters else ("gloo",)


@contextmanager
def joined(exchange: str | None = None, device: str = "cpu") -> Iterator[dl.World]:
    """A world, and a default process group of gloo for DDP, made here if the world has made none.

    Args:
        exchange: one of `exchanges()`; None is `join_world`'s default.
        device: as in `join_world`. Ranks on GPUs have a default group of NCCL.
    """
    options = {"exchange": exchange} if exchange is not None and len(exchanges()) > 1 else {}
    with dl.join_world(device=device, seed=0, **options) as world:  # type: ignore[arg-type]
        makes = world.size > 1 and not dist.is_initialized()
        if makes:
            dist.init_process_group("gloo")
        try:
            yield world
        finally:
            drop_reducers()
            if makes:
                dist.destroy_process_group()


def drop_reducers() -> None:
    """Let DDP's wrappers go of their process group, before it is destroyed.

    A Reducer that holds the last reference destroys the group with the GIL held, and waits for threads of gloo that may
    wait for the GIL: the process hangs for ever.
    """
    for wrapper in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
        vars(wrapper).pop("reducer", None)  # a second time there is none
        vars(wrapper).pop("logger", None)


def nothing() -> None:
    """A host's work is done when the call returns."""


def synchronized(device: torch.device) -> Callable[[], None]:
    """Waits until the device has done its work."""
    return nothing if device.type == "cpu" else lambda: torch.cuda.synchronize(device)


def block(step: Step, steps: int, clock: Clock, wait: Callable[[], None] = nothing) -> float:
    """Seconds for each of `steps` steps after all ranks have met, `wait` included."""
    if dist.is_initialized():
        dist.barrier()
    wait()
    began = clock()
    for _ in range(steps):
        step()
    wait()
    return (clock() - began) / steps


def compare(
    one: Step,
    other: Step,
    *,
    pairs: int,
    steps: int,
    clock: Clock = time.perf_counter,
    within_s: float | None = None,
    wait: Callable[[], None] = nothing,
) -> Ratio:
    """Time `one` against `other` over pairs of blocks of steps, ordered A B B A. Every rank must call this.

    Args:
        one, other: a step of each.
        pairs: the number of pairs of blocks.
        steps: the number of steps of a block.
        clock: `time.thread_time` gives the processor time of the thread that trains, without what it waits for others.
        within_s: where all would take longer than so many seconds, make blocks shorter, down to a step, then pairs
            fewer, down to LEAST_PAIRS.
        wait: ends when the device has done a block's work; `synchronized` makes it.
    """
    for step in (one, other):
        block(step, steps, clock, wait)
    step_s = sum(block(step, steps, time.perf_counter, wait) for step in (one, other))
    if within_s is not None:
        fitting = _of_rank_zero(int(within_s / step_s))
        steps = min(steps, max(1, fitting // pairs))
        pairs = min(pairs, max(LEAST_PAIRS, fitting // steps))
    ones: list[float] = []
    others: list[float] = []
    for number in range(pairs):
        for step, times in ((one, ones), (other, others))[:: 1 if number % 2 == 0 else -1]:
            times.append(block(step, steps, clock, wait))
    return Ratio.of(ones, others)


def _of_rank_zero(number: int) -> int:
    """Rank 0's number, on every rank."""
    told = torch.tensor(number)
    if dist.is_initialized():
        dist.broadcast(told, 0)
    return int(told)


def print_table(head: str, rows: Iterable[Iterable[object]], words: int = 1) -> None:
    """Print `table_lines`, line by line as they come."""
    for line in table_lines(head, rows, words):
        print(line, flush=True)
    print()


def table_lines(head: str, rows: Iterable[Iterable[object]], words: int = 1) -> Iterator[str]:
    """A Markdown table, its first columns words and the others numbers."""
    columns = head.split(" | ")
    yield f"| {head} |"
    yield f"|{'|'.join(['---'] * words + ['--:'] * (len(columns) - words))}|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def ms(seconds: float) -> str:
    """Milliseconds in three digits or more."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def hardware() -> str:
    """The processor and the versions, in a line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    cores = len([line for line in lines if line.startswith("processor")])
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    name = ", ".join(sorted(names)) or platform.processor() or platform.machine()
    return f"{cores} cores of {name}{gpu}; torch {torch.__version__}, Python {platform.python_version()}"
