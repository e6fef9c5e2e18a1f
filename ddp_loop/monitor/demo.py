"""Two made-up runs for a look at the page: one that ended, and one that goes on until it is done or stopped."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from pathlib import Path
from typing import Any, Self

from ddp_loop.checkpoint import RunFolder

EPOCHS, STEPS_PER_EPOCH = 20, 150
RANKS, SAMPLES = 4, 128
STEP_S = 0.05


class FakeRuns:
    """Writes two run folders below `folder`, in a thread of its own, until it is closed.

    Attributes:
        runs: the folders.
    """

    def __init__(self, folder: Path, step_s: float = STEP_S) -> None:
        self.runs = [folder / "tuesday", folder / "wednesday"]
        self._step_s = step_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="demo", daemon=True)

    def __enter__(self) -> Self:
        first = FakeRun(self.runs[0], seed=1, rate=0.02, at=time.time() - 3600)
        for _ in range(EPOCHS * STEPS_PER_EPOCH):
            first.step(self._step_s)
        first.end("done")
        self._second = FakeRun(self.runs[1], seed=2, rate=0.05, at=time.time())
        for _ in range(6 * STEPS_PER_EPOCH + 40):
            self._second.step(self._step_s)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()

    def _go_on(self) -> None:
        run = self._second
        while run.iteration < EPOCHS * STEPS_PER_EPOCH:
            if self._closing.wait(self._step_s):
                return run.end("left")
            run.step(self._step_s)
            if run.folder.asked_to_stop():
                return run.end("stopped")
        return run.end("done")


class FakeRun:
    """A run that was never trained: its rows follow a formula."""

    def __init__(self, folder: Path, seed: int, rate: float, at: float) -> None:
        self.folder = RunFolder(folder, {"note": "made up"}, None)
        self._random = random.Random(seed)
        self._rate, self._began = rate, at
        self.iteration = 0
        self._files = {name: (folder / f"{name}.jsonl").open("a") for name in ("rows", "evaluations", "ranks")}
        self._write_status("running")

    def _write_status(self, status: str, **facts: object) -> None:
        extent = {"epochs": EPOCHS, "steps_per_epoch": STEPS_PER_EPOCH, "steps": None}
        kept = self.iteration // STEPS_PER_EPOCH * STEPS_PER_EPOCH if status == "running" else self.iteration
        checkpoint = f"step-{kept:08d}" if kept else None
        began = {"command": ["train.py", "--run-dir", self.folder.folder.name], "directory": None}
        where = {"ranks": RANKS, "device": "cpu", "checkpoint": checkpoint, "iteration": kept}
        self.folder.write_status(status, **began, **where, **extent, **facts)

    def step(self, step_s: float) -> None:
        """Make a row, and what comes with it."""
        self.iteration += 1
        at, draw = self.iteration / STEPS_PER_EPOCH, self._random.gauss
        loss = 0.02 + 2.2 * math.exp(-at * 18 * self._rate) * (1 + 0.12 * draw(0, 1)) + 0.01 * abs(draw(0, 1))
        epoch = (self.iteration - 1) // STEPS_PER_EPOCH + 1
        rate = self._rate * 0.5 * (1 + math.cos(math.pi * at / EPOCHS))
        row = {"epoch": epoch, "iteration": self.iteration, "samples": SAMPLES, "loss": abs(loss)}
        row |= {"accuracy": min(1.0, max(0.0, 0.99 - 0.4 * abs(loss) + 0.02 * draw(0, 1)))}
        row |= {"learning_rate": rate, "gradient_norm": 0.3 + 1.5 * abs(loss) * (1 + 0.2 * draw(0, 1))}
        self._write("rows", row | {"elapsed_s": round(self.iteration * step_s, 4)})
        if self.iteration % STEPS_PER_EPOCH == 0:
            held_out = {"loss": 0.05 + abs(loss) * 1.05, "accuracy": max(0.0, 0.975 - 0.4 * abs(loss))}
            where = {"epoch": epoch, "iteration": self.iteration}
            self._write("evaluations", where | held_out | {"samples": 1000, "elapsed_s": self.iteration * step_s})
        if self.iteration % 20 == 0:
            waits = [step_s * (0.28 - 0.07 * rank + 0.03 * self._random.random()) for rank in range(RANKS)]
            ranks = [
                {"rank": rank, "step_s": step_s, "wait_s": wait, "memory_mib": 310.0 + 4 * rank}
                for rank, wait in enumerate(waits)
            ]
            self._write("ranks", {"iteration": self.iteration, "elapsed_s": self.iteration * step_s, "ranks": ranks})

    def _write(self, name: str, row: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(row) + "\n")
        self._files[name].flush()

    def end(self, status: str) -> None:
        """Say how it ended."""
        for file in self._files.values():
            file.close()
        self._write_status(status, **({"why": "the page"} if status == "stopped" else {}))
        self.folder.forget_stop()
        self.folder.close()
