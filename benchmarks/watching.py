"""What it costs that a run is watched: a step with everything on over one with everything off.

    python -m benchmarks watching [NETWORK ...]

By the clock, and by the processor time of rank 0's thread that trains, without what it waits for others.

On: a run folder with rows, gradient norms and the ranks' paces; a live display in a terminal of its own; CSV and
TensorBoard. Off: no folder, no display, no receiver of rows. Both are whole steps of `Loop` in one process group. No
checkpoint falls into the time that is measured; the goals are 1.01 for the digit network, 1.03 for the small one.
"""

from __future__ import annotations

import os
import pty
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, Step, block, compare, print_table
from benchmarks.models import mlp
from benchmarks.steps import Job, steps_of
from ddp_loop import networks
from ddp_loop.monitor import start_page
from ddp_loop.monitor.app import TOKEN_HEADER
from ddp_loop.monitor.server import HERE
from ddp_loop.reporting.sink_calls import OnRow
from ddp_loop.sinks import csv_sink, tensorboard_sink

MINI_BATCH = 128
CLIENTS, CLIENT_PAIRS, CLIENTS_S, SETTLE_S = 200, 20, 1.5, 1.0
WAYS = ("everything", "rows alone", "display alone", "CSV and TensorBoard alone", "nothing")


@dataclass(frozen=True)
class Watched(Job):
    """A network, the shape of its inputs, how long to measure it, the goal; the steps of an epoch, a step's time."""

    epoch: int
    step_s: float


JOBS = {
    "32-wide MLP": Watched(lambda: mlp(32, 2), (32,), 400, 40, 1.03, 500, 0.002),
    "digit network": Watched(networks.digit_classifier, (1, 28, 28), 100, 2, 1.01, 70, 0.08),
}


@contextmanager
def terminal() -> Iterator[None]:
    """A terminal of 80 columns as stdout, that somebody reads."""
    near, far = pty.openpty()
    reader = threading.Thread(target=_read_all, args=(near,), daemon=True)
    reader.start()
    before, kept = sys.stdout, {name: os.environ.get(name) for name in ("TERM", "COLUMNS", "LINES")}
    os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="40")
    with os.fdopen(far, "w") as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = before
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    reader.join()
    os.close(near)


def _read_all(near: int) -> None:
    try:
        while os.read(near, 65536):
            pass
    except OSError:
        pass  # no process writes any more


def step_of(job: Watched, world: dl.World, way: str, folder: str, *, logs: bool = False) -> Step:
    torch.manual_seed(0)
    model = job.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    samples = job.epoch * MINI_BATCH
    data = torch.randn(samples, *job.shape), torch.randint(10, (samples,))
    sinks: list[OnRow] = []
    if way in ("everything", "CSV and TensorBoard alone"):
        sinks = [csv_sink(f"{folder}/rows.csv"), tensorboard_sink(f"{folder}/board")]
    loop = dl.Loop(
        dl.Batches(data, MINI_BATCH, world),
        10**6,
        state={"model": model, "optimizer": optimizer},
        run_dir=f"{folder}/run" if way in ("everything", "rows alone") else None,
        save_every=10**9,
        save_every_s=1e9,
        on_row=sinks,
        progress=way in ("everything", "display alone"),
    )
    step, value = steps_of(loop, model, optimizer), 0.0

    def step_and_log() -> None:
        nonlocal value
        step()
        value += 0.5
        loop.log(value=value)

    return step_and_log if logs else step


def measure_log(name: str) -> dict[str, Ratio]:
    """A step whose script logs a number over one that does not, both with a run folder, on this rank."""
    job = JOBS[name]
    with ExitStack() as ending, dl.join_world(seed=0) as world:
        folders = [ending.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        folders = world.gather(folders)[0]
        logged = step_of(job, world, "rows alone", folders[0], logs=True)
        plain = step_of(job, world, "rows alone", folders[1])
        ratio = compare(logged, plain, pairs=job.pairs, steps=job.steps)
        lines = (Path(folders[0]) / "run" / "logged.jsonl").read_text().count("\n") if world.rank == 0 else 0
        world.print(f"{lines} lines of logged values were written while it was measured")
    return {"a logged number / none": ratio}


def measure(name: str) -> dict[str, Ratio]:
    """Each way against nothing, on this rank."""
    job, ratios = JOBS[name], {}
    for way in WAYS:
        with terminal(), ExitStack() as ending, dl.join_world(seed=0) as world:
            folders = [ending.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
            folders = world.gather(folders)[0]  # of rank 0
            watched = step_of(job, world, way, folders[0])
            unwatched = step_of(job, world, "nothing", folders[1])
            if way in ("everything", "nothing"):
                ratios[f"{way} / nothing"] = compare(watched, unwatched, pairs=job.pairs, steps=job.steps)
            own = compare(watched, unwatched, pairs=job.pairs // 4, steps=job.steps, clock=time.thread_time)
            ratios[f"{way} / nothing, processor time"] = own
    return ratios


class SlowClients:
    """A page beside the run, on rank 0, and clients that connect to it and never read, or never say what they want."""

    def __init__(self, run: str) -> None:
        lines: list[str] = []
        self._process = start_page(Path(run), lines.append)
        parts = urlsplit(lines[0].removeprefix("Page: "))
        self._place, token = (HERE, parts.port or 0), parts.fragment.removeprefix("token=")
        self._asks = f"GET /api/stream HTTP/1.1\r\nhost: {parts.netloc}\r\n{TOKEN_HEADER}: {token}\r\n\r\n".encode()
        self._open: list[socket.socket] = []

    def connect(self) -> None:
        """Let them all come."""
        for number in range(CLIENTS):
            one = socket.create_connection(self._place, timeout=10)
            one.sendall(self._asks if number % 2 else self._asks[:20])
            self._open.append(one)

    def leave(self) -> None:
        """Let them all go."""
        for one in self._open:
            one.close()
        self._open = []

    def close(self) -> None:
        """End the page."""
        self.leave()
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)


def measure_clients(name: str) -> dict[str, Ratio]:
    """A step with slow clients at the run's page over one with the page alone, on this rank."""
    job = JOBS[name]
    steps = int(CLIENTS_S / job.step_s)
    with terminal(), ExitStack() as ending, dl.join_world(seed=0) as world:
        folder = world.gather(ending.enter_context(tempfile.TemporaryDirectory()))[0]
        step = step_of(job, world, "rows alone", folder)
        block(step, steps, time.perf_counter)
        clients = SlowClients(f"{folder}/run") if world.rank == 0 else None
        ones, others = list[float](), list[float]()
        for number in range(CLIENT_PAIRS):
            for times in (ones, others)[:: 1 if number % 2 == 0 else -1]:
                if clients is not None and times is ones:
                    clients.connect()
                time.sleep(SETTLE_S)  # who comes and who goes is work too, once
                times.append(block(step, steps, time.perf_counter))
                if clients is not None:
                    clients.leave()
        if clients is not None:
            clients.close()
    return {f"page, {CLIENTS} slow clients / page": Ratio.of(ones, others)}


def report(names: Iterable[str]) -> None:
    """Print the table of these networks, by default of all."""
    rows = (
        (name, what, *ratio.columns(), f"{JOBS[name].goal:.2f}" if what.startswith("everything") else "")
        for name in list(names) or JOBS
        for function in (measure, measure_log, measure_clients)
        for what, ratio in dl.launch(function, RANKS, name)[0].items()
    )
    print_table("network | what | median | quartiles | ms | pairs | goal", rows, words=2)
