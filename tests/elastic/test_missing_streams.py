"""A script that is started without standard streams, as some daemons start theirs, trains as any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.covers("J6")]

WITHOUT = 'exec "$0" "$@" <&- >&- 2>&-'
# The update is by hand: a process's first optimizer of torch imports its compiler, half of what a rank's start takes.
SCRIPT = """
import os
import torch
import ddp_loop as dl

with dl.join_world(device="cpu") as world:
    model = torch.nn.Linear(2, 1)
    state = {"model": model}
    for step in dl.Loop(dl.Batches(torch.ones(8, 2), 4, world), 1, state=state, run_dir="run"):
        for rows in step:
            step.backward(model(rows).square().mean())
        step.fold()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
        print("a word")
        os.write(2, b"of a library")
    with open(f"streams-{world.rank}", "w") as file:
        print(*(os.readlink(f"/proc/self/fd/{number}") for number in range(3)), file=file)
"""


@pytest.mark.parametrize(("launcher", "ranks"), [((), 1), (("-m", "ddp_loop", "run", "--ranks", "2"), 2)])
def test_it_trains_and_no_file_takes_a_streams_place(launcher: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        ["sh", "-c", WITHOUT, sys.executable, *launcher, "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "run" / "rows.jsonl").read_text().count("\n") == 2
    streams = [(tmp_path / f"streams-{rank}").read_text().split() for rank in range(ranks)]
    assert streams == [["/dev/null"] * 3] * ranks
