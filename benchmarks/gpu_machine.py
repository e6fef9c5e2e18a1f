"""A machine whose GPUs are tried by `benchmarks.gpu_parts`, and the sheet on which a part writes its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import ddp_loop as dl
from tests.support.device_modes import ASYNCHRONOUS, device_mode_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sheet:
    """The file for a part's tables; ranks write there too."""

    path: Path

    def line(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\n")

    def head(self, head: str, words: int = 1) -> None:
        """Begin a table, its first columns words and the others numbers."""
        columns = head.split(" | ")
        self.line(f"\n| {head} |\n|{'|'.join(['---'] * words + ['--:'] * (len(columns) - words))}|")

    def row(self, *cells: object) -> None:
        self.line(f"| {' | '.join(str(cell) for cell in cells)} |")


@dataclass(frozen=True)
class Machine:
    """A machine with so many GPUs; with none, the CPU answers late, and sizes are small."""

    gpus: int

    @property
    def device(self) -> str:
        """In `join_world`'s words."""
        return "gpu" if self.gpus else "cpu"

    @property
    def backends(self) -> str:
        """Of a process group of one rank, as `join_world` makes it for ranks with GPUs of their own."""
        return "cpu:gloo,cuda:nccl" if self.gpus else "gloo"

    def run(self, pool: dl.Pool, ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call a function on ranks of this machine."""
        return pool.run(answering, ranks, self.gpus == 0, function, *arguments)


def answering(late: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function where this process's CPU answers late, or as it is."""
    with device_mode_of(ASYNCHRONOUS) if late else nullcontext():
        return function(*arguments)


@contextmanager
def group_of_one(backends: str) -> Iterator[None]:
    """A process group of this process alone, as a script may make it before `join_world`."""
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
