"""Made-up runs to try the page: a dozen, of which two continue until they are done or stopped."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddp_loop.checkpoint import (
    EVALUATIONS,
    RANKS,
    ROWS,
    RUN,
    RunFolder,
    asked_to_stop,
    forget_stop,
    read_json,
    write_atomic,
)

EPOCHS = 20
STEPS_PER_EPOCH = 150
SIZE = 4
STEP_S = 0.05
RUNNING = 2


@contextmanager
def fake_runs(folder: Path) -> Iterator[list[Path]]:
    """Write run folders below `folder`, which is yielded; a thread adds to the last ones until the block ends."""
    grid = list(itertools.product((0.01, 0.02, 0.05, 0.1), (16, 32, 64)))
    runs = [FakeRun(folder / f"trials/{at:04d}", at, rate, width) for at, (rate, width) in enumerate(grid)]
    closing = threading.Event()
    for at, run in enumerate(runs[:-RUNNING]):
        run.run(EPOCHS * STEPS_PER_EPOCH if at not in (3, 7) else 5 * STEPS_PER_EPOCH + 70 * at)
        if at == 3:
            run.end("failed", rank=1, step=run.iteration, stage="backward", why="RuntimeError: made up")
        elif at == 7:
            run.end("stopped", why="the page")
        else:
            run.end("done")
    for at, run in enumerate(runs[-RUNNING:]):
        run.run((6 - 2 * at) * STEPS_PER_EPOCH + 40)
    thread = threading.Thread(target=_run_on, args=(runs[-RUNNING:], closing), name="demo", daemon=True)
    thread.start()
    try:
        yield [folder]
    finally:
        closing.set()
        thread.join()


def _run_on(runs: list[FakeRun], closing: threading.Event) -> None:
    """Make steps in turn until each run is done or stopped, or all are left."""
    while runs:
        if closing.wait(STEP_S):
            for run in runs:
                run.end("left")
            return
        runs = [run for run in runs if run.goes_on()]


class FakeRun:
    """A run whose rows follow a formula."""

    def __init__(self, folder: Path, seed: int, rate: float, width: int) -> None:
        folder.mkdir(parents=True)
        self.folder = RunFolder(folder, {"note": "made up"}, None)
        about = read_json(folder / RUN)
        write_atomic(folder / RUN, {**about, "config": {"rate": rate, "width": width, "momentum": 0.9}})
        self._random = random.Random(seed)
        self._rate = rate
        self._width = width
        self.iteration = 0
        self._lines: dict[str, list[str]] = {}
        self._write_status("running")

    def _write_status(self, status: str, **facts: object) -> None:
        at = self.iteration // STEPS_PER_EPOCH * STEPS_PER_EPOCH if status == "running" else self.iteration
        facts |= {"ranks": SIZE, "device": "cpu", "checkpoint": f"step-{at:08d}" if at else None, "iteration": at}
        facts |= {"command": ["train.py", "--run-dir", self.folder.folder.name], "directory": None}
        self.folder.write_status(status, epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH, steps=None, **facts)

    def run(self, steps: int) -> None:
        """Make steps at once."""
        for _ in range(steps):
            self._step()
        for name, lines in self._lines.items():
            with (self.folder.folder / name).open("a") as file:
                file.writelines(lines)
        self._lines = {}

    def goes_on(self) -> bool:
        """Make a step; whether the run goes on."""
        self.run(1)
        if asked_to_stop(self.folder.folder):
            self.end("stopped", why="the page")
            return False
        if self.iteration >= EPOCHS * STEPS_PER_EPOCH:
            self.end("done")
            return False
        return True

    def _step(self) -> None:
        self.iteration += 1
        at = self.iteration / STEPS_PER_EPOCH
        draw = self._random.gauss
        falls = 2.2 * math.exp(-at * 18 * self._rate) * (1 + 0.12 * draw(0, 1))
        loss = abs(0.02 + 0.5 / self._width + falls + 0.01 * abs(draw(0, 1)))
        place: dict[str, float] = {"epoch": math.ceil(at), "iteration": self.iteration}
        row = {"samples": 128, "loss": loss, "accuracy": min(1.0, max(0.0, 0.99 - 0.4 * loss + 0.02 * draw(0, 1)))}
        row |= {"learning_rate": self._rate * 0.5 * (1 + math.cos(math.pi * at / EPOCHS))}
        self._write(ROWS, place | row | {"gradient_norm": 0.3 + 1.5 * loss * (1 + 0.2 * draw(0, 1))})
        if self.iteration % STEPS_PER_EPOCH == 0:
            held_out = {"loss": 0.05 + loss * 1.05, "accuracy": max(0.0, 0.975 - 0.4 * loss), "samples": 1000}
            self._write(EVALUATIONS, place | held_out)
        if self.iteration % 20 == 0:
            waits = [STEP_S * (0.28 - 0.07 * rank + 0.03 * self._random.random()) for rank in range(SIZE)]
            ranks = [
                {"rank": rank, "step_s": STEP_S, "wait_s": wait, "memory_mib": 310.0 + 4 * rank}
                for rank, wait in enumerate(waits)
            ]
            self._write(RANKS, {"iteration": self.iteration, "ranks": ranks})

    def _write(self, name: str, row: Mapping[str, object]) -> None:
        line = json.dumps({**row, "elapsed_s": round(self.iteration * STEP_S, 4)})
        self._lines.setdefault(name, []).append(line + "\n")

    def end(self, status: str, **facts: object) -> None:
        """Write how the run ended, and release its folder."""
        self._write_status(status, **facts)
        forget_stop(self.folder.folder)
        self.folder.close()
