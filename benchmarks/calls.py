"""How much of the package one step of `Loop` runs: Python calls, functions, files, and changes of file between calls.

    python -m benchmarks calls

One rank with two shards, a small network with batch norm, loss and accuracy. A warm step is counted, in which no
checkpoint, comparison of replicas or batch of rows is due. Only calls inside `ddp_loop/` count, and each resumption of
a generator is one. So the counts do not depend on the machine. "Bare" has no run folder; "run folder" also makes rows
and decides about checkpoints.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import ddp_loop as dl
from benchmarks.measuring import print_table
from benchmarks.steps import steps_of

PACKAGE = str(Path(dl.__file__).parent)
WARM_UP = 12  # steps; in the first ones layouts are agreed on and values are checked


@dataclass
class Calls:
    """The calls of one step inside the package, in order."""

    codes: list[CodeType] = field(default_factory=list)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function for `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.codes.append(frame.f_code)

    @property
    def files(self) -> list[str]:
        """The file of each call, relative to the package."""
        return [code.co_filename.removeprefix(PACKAGE).lstrip("/") for code in self.codes]

    @property
    def changes(self) -> int:
        """How often a call is in another file than the call before."""
        return sum(one != other for one, other in pairwise(self.files))


def count(*, rows: bool) -> Calls:
    """The calls of one warm step; with `rows` it has a run folder."""
    with tempfile.TemporaryDirectory() as folder, dl.join_world(device="cpu", seed=0) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = torch.randn(640, 8), torch.randint(10, (640,))
        batches, state = dl.Batches(data, 32, world, shards=2), {"model": model, "optimizer": optimizer}
        run_dir = folder if rows else None
        loop = dl.Loop(batches, steps=100, state=state, run_dir=run_dir, progress=False)
        step, calls = steps_of(loop, model, optimizer), Calls()
        for _ in range(WARM_UP):
            step()
        gc.collect()  # the end of a generator that is freed inside the step would count as a call
        gc.disable()
        sys.setprofile(calls.note)
        try:
            step()
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls


def report(parts: Iterable[str]) -> None:
    """Print the table; it has no parts."""
    found = {"bare": count(rows=False), "run folder": count(rows=True)}
    rows = (
        (name, len(calls.codes), len(set(calls.codes)), len(set(calls.files)), calls.changes)
        for name, calls in found.items()
    )
    print_table("step | Python calls | functions | files | changes of file", rows)
