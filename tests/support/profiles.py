"""A small training script with a place for a planted fault, and its profile on the pool's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_loop.profiling import ProfileJob, profile
from tests.support.harness import OnRanks

SCRIPT = """
import os
import sys
import time

import torch

import ddp_loop as dl


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

    def start(function: Any, number: int, *arguments: Any, timeout_s: float | None) -> list[None]:
        return on_ranks(number, function, *arguments)

    profile(ProfileJob(script, ranks, start=start, **{"steps": 5, **job}), said.append)
    return "\n".join(said).splitlines()
