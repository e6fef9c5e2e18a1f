"""A small training script with a place for a planted fault, and its profile on the pool's ranks.

[Note: Planned time] A machine that is busy is slow anywhere, so the profile's clock shows a planned time here. It
passes where the script calls `spend`, and a little between any two phases. A rank that has waited has the time of the
last rank that began the wait.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ddp_loop.accelerators import KINDS
from ddp_loop.profiling import profile
from ddp_loop.profiling.clock import COMMUNICATION, PhaseClock
from tests.support.harness import OnRanks, until

TICK_S = 1e-4
_TIME = struct.Struct("d")

SCRIPT = """
import os
import sys

import torch

import ddp_loop as dl
from tests.support.profiles import spend


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        pass  # READ
        return torch.full((30,), float(index))


def main():
    with dl.join_world(seed=0) as world:
        model = torch.nn.Linear(30, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batches, state = dl.Batches(Rows(), 12, world), {"model": model, "optimizer": optimizer}
        pass  # BEFORE
        for step in dl.Loop(batches, 1, state=state, progress=False):
            for rows in step:
                loss = model(rows).mean()
                pass  # FORWARD
                step.backward(loss)
            result = step.fold()
            optimizer.step()
            pass  # AFTER


main()
"""


class PlannedTime:
    """The time of one rank, in seconds. See [Note: Planned time].

    Args:
        folder: in which the ranks write when they begin each wait.
    """

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self._files = [folder / f"waits-of-rank-{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
        self._own = self._files[int(os.environ["RANK"])]
        self._own.write_bytes(b"")

    def mark(self) -> float:
        self.now += TICK_S
        return self.now

    def begin_wait(self) -> None:
        with self._own.open("ab") as file:
            file.write(_TIME.pack(self.now))

    def end_wait(self) -> None:
        last = self._own.stat().st_size - _TIME.size
        for file in self._files:
            until(partial(_is_longer, file, last), "the other ranks begin the wait")
            self.now = max(self.now, *_TIME.unpack_from(file.read_bytes(), last))


def _is_longer(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size > size


_times: list[PlannedTime] = []  # of this rank, while a task runs in planned time


def spend(seconds: float) -> None:
    """Let planned time pass."""
    for one in _times:
        one.now += seconds


@contextmanager
def planned_time(folder: Path) -> Iterator[None]:
    """Have a profile on this rank show planned time."""
    one = PlannedTime(folder)
    usual = PhaseClock.cut

    def cut(clock: PhaseClock, phase: str | None) -> None:
        if clock._phase == COMMUNICATION:
            one.end_wait()
        usual(clock, phase)
        if phase == COMMUNICATION:
            one.begin_wait()

    _times.append(one)
    try:
        with ExitStack() as patched:
            for kind in KINDS.values():
                patched.enter_context(mock.patch.object(kind, "mark", one.mark))
                patched.enter_context(mock.patch.object(kind, "seconds", lambda accelerator, first, last: last - first))
            patched.enter_context(mock.patch.object(PhaseClock, "cut", cut))
            yield
    finally:
        _times.remove(one)


def in_planned_time(folder: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a part of a profile on a rank."""
    with planned_time(folder):
        return function(*arguments)


def planted(folder: Path, place: str = "", line: str = "") -> Path:
    """The script with a line at one of its places."""
    text = SCRIPT
    if place:
        assert f"pass  # {place}\n" in text
        text = text.replace(f"pass  # {place}\n", f"{line}  # {place}\n")
    path = folder / "train.py"
    path.write_text(text)
    return path


def line_of(script: Path, place: str) -> int:
    """The number of the line of a place."""
    return next(number for number, line in enumerate(script.read_text().splitlines(), 1) if f"# {place}" in line)


def profiled(
    on_ranks: OnRanks, script: Path, said: list[str] | None = None, *, ranks: int = 2, **job: Any
) -> list[str]:
    """The lines that `profile` reports of a script on the pool's ranks; its parts are appended to `said`."""
    said = [] if said is None else said

    def start(function: Any, number: int, *arguments: Any) -> list[None]:
        return on_ranks(number, in_planned_time, script.parent, function, *arguments)

    profile(script, ranks, [], said.append, start=start, **{"steps": 5, **job})
    return "\n".join(said).splitlines()
