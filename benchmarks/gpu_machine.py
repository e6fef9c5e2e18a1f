"""A machine whose GPUs are tried by `benchmarks.gpu_parts`, and the sheet on which a part writes its tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

OWN_BACKENDS = "cpu:gloo,cuda:nccl"  # of a process group of one rank, as `join_world` makes it for GPUs of their own
WRONG = "* WRONG: "
_NO_KERNEL = ("empty", "new_empty", "set_", "record_stream", "is_pinned", "_has_compatible_shallow_copy_type")


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

    def judge(self, line: str, problem: str) -> None:
        """Name a line of the tables that is not as it must be; a line without a problem is not."""
        if problem:
            self.line(f"\n{WRONG}{line}: {problem}")


def wrong_lines(tables: str) -> list[str]:
    """What `Sheet.judge` wrote into these tables."""
    return [line.removeprefix(WRONG) for line in tables.splitlines() if line.startswith(WRONG)]


@dataclass(frozen=True)
class Machine:
    """A machine with so many GPUs. In a rehearsal they are fakes, sizes are small, and times are not judged."""

    gpus: int
    rehearsed: bool

    @property
    def ranks(self) -> int:
        """Of what needs several: they share a GPU that is alone."""
        return max(2, self.gpus)

    def sharing(self, ranks: int) -> str:
        """How so many ranks have their GPUs, in words."""
        if ranks == 1:
            return "1 rank"
        return f"{ranks} ranks, NCCL" if ranks <= self.gpus else f"{ranks} ranks on 1 GPU, gloo"


@contextmanager
def seeing(gpus: int) -> Iterator[None]:
    """Processes that start here see the first so many of this machine's GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    numbers = before.split(",") if before else [str(number) for number in range(gpus)]
    os.environ[name] = ",".join(numbers[:gpus])
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def group_of_one(backends: str) -> Iterator[None]:
    """A process group of this process alone, as a script may make it before `join_world`."""
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Operations(TorchDispatchMode):
    """Counts the operations on a GPU inside a block, in its backward too: a fused or a foreach one once, no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        name = function._schema.name.rpartition("::")[2]
        if not function.is_view and not name.startswith(_NO_KERNEL) and _is_on_gpu([*arguments, result]):
            self.count += 1
        return result


def _is_on_gpu(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        return values.is_cuda
    return isinstance(values, list | tuple) and any(map(_is_on_gpu, values))


def count_operations(call: Callable[[], None], times: int) -> float:
    """The operations on a GPU of a call."""
    with Operations() as counted:
        for _ in range(times):
            call()
    return float(counted.count / times)
