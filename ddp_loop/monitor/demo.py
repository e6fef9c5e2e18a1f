"""Two made-up runs to try the page: one has ended, the other continues until it is done or stopped."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddp_loop.checkpoint import EVALUATIONS, RANKS, ROWS, RunFolder

EPOCHS, STEPS_PER_EPOCH, SIZE, STEP_S = 20, 150, 4, 0.05


@contextmanager
def fake_runs(folder: Path) -> Iterator[list[Path]]:
    """Write two run folders below `folder`; a thread adds to the second one until the block ends."""
    first, second = FakeRun(folder / "tuesday", seed=1, rate=0.02), FakeRun(folder / "wednesday", seed=2, rate=0.05)
    closing = threading.Event()
    first.run(EPOCHS * STEPS_PER_EPOCH)
    first.end("done")
    second.run(6 * STEPS_PER_EPOCH + 40)
    thread = threading.Thread(target=second.run_on, args=(closing,), name="demo", daemon=True)
    thread.start()
    try:
        yield [first.folder.folder, second.folder.folder]
    finally:
        closing.set()
        thread.join()


class FakeRun:
    """A run whose rows follow a formula."""

    def __init__(self, folder: Path, seed: int, rate: float) -> None:
        self.folder = RunFolder(folder, {"note": "made up"}, None)
        self._random, self._rate, self._iteration = random.Random(seed), rate, 0
        self._write_status("running")

    def _write_status(self, status: str, **facts: object) -> None:
        at = self._iteration // STEPS_PER_EPOCH * STEPS_PER_EPOCH if status == "running" else self._iteration
        facts |= {"ranks": SIZE, "device": "cpu", "checkpoint": f"step-{at:08d}" if at else None, "iteration": at}
        facts |= {"command": ["train.py", "--run-dir", self.folder.folder.name], "directory": None}
        self.folder.write_status(status, epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH, steps=None, **facts)

    def run(self, steps: int) -> None:
        """Make steps at once."""
        for _ in range(steps):
            self._step()

    def run_on(self, closing: threading.Event) -> None:
        """Make steps until the run is done, stopped or left."""
        while self._iteration < EPOCHS * STEPS_PER_EPOCH:
            if closing.wait(STEP_S):
                return self.end("left")
            self._step()
            if self.folder.asked_to_stop():
                return self.end("stopped", why="the page")
        return self.end("done")

    def _step(self) -> None:
        self._iteration += 1
        at, draw = self._iteration / STEPS_PER_EPOCH, self._random.gauss
        loss = abs(0.02 + 2.2 * math.exp(-at * 18 * self._rate) * (1 + 0.12 * draw(0, 1)) + 0.01 * abs(draw(0, 1)))
        place: dict[str, float] = {"epoch": math.ceil(at), "iteration": self._iteration}
        row = {"samples": 128, "loss": loss, "accuracy": min(1.0, max(0.0, 0.99 - 0.4 * loss + 0.02 * draw(0, 1)))}
        row |= {"learning_rate": self._rate * 0.5 * (1 + math.cos(math.pi * at / EPOCHS))}
        self._write(ROWS, place | row | {"gradient_norm": 0.3 + 1.5 * loss * (1 + 0.2 * draw(0, 1))})
        if self._iteration % STEPS_PER_EPOCH == 0:
            held_out = {"loss": 0.05 + loss * 1.05, "accuracy": max(0.0, 0.975 - 0.4 * loss), "samples": 1000}
            self._write(EVALUATIONS, place | held_out)
        if self._iteration % 20 == 0:
            waits = [STEP_S * (0.28 - 0.07 * rank + 0.03 * self._random.random()) for rank in range(SIZE)]
            ranks = [
                {"rank": rank, "step_s": STEP_S, "wait_s": wait, "memory_mib": 310.0 + 4 * rank}
                for rank, wait in enumerate(waits)
            ]
            self._write(RANKS, {"iteration": self._iteration, "ranks": ranks})

    def _write(self, name: str, row: Mapping[str, object]) -> None:
        with (self.folder.folder / name).open("a") as file:
            file.write(json.dumps({**row, "elapsed_s": round(self._iteration * STEP_S, 4)}) + "\n")

    def end(self, status: str, **facts: object) -> None:
        """Write how the run ended, and release its folder."""
        self._write_status(status, **facts)
        self.folder.forget_stop()
        self.folder.close()
