"""Stop a script with epochs, validation, patience and a schedule at random moments.

    python -m tests.faults.stop_scripts --times 30

The script is written as `docs/faults.md` shows it and knows nothing of stops. A signal to one rank, or the file `stop`,
comes at a random moment. The script must end within 3 s, and after the stop no line of it may run: nothing is
evaluated, scheduled or saved. It is started again on another number of ranks until it is done. Then it must have the
bits of the script that was never stopped, and each of its evaluations once.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.checkpoint import EVALUATIONS, STATUS, ask_to_stop, read_json
from ddp_loop.distributed import Pool, RankFailed
from tests.faults.job import FINAL, final_digest
from tests.support.harness import FAULT_S
from tests.support.runs import lines_of

EPOCHS, STEPS, SHARDS, RANKS = 6, 5, 6, 3
FILE = "the file `stop`"
AFTER_EPOCH = ["evaluates", "schedules", "saves"]  # what the script does after each epoch
KINDS = ("SIGTERM", "SIGINT", FILE)
_LOOK_S, _PATIENCE_S = 0.0005, 120.0


def script(run: str, log: str, dwell_s: float) -> None:
    """Train with epochs, a validation after each, patience and a schedule; each line of `log` is what it did."""
    with dl.join_world(seed=5) as world, Path(log, f"rank-{world.rank}").open("w", buffering=1) as lines:
        generator = torch.Generator().manual_seed(8)
        inputs, labels = torch.randn(8 * STEPS * SHARDS, 6, generator=generator), torch.arange(8 * STEPS * SHARDS) % 3
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        patience = dl.EarlyStopping(model, 2)
        batches = dl.Batches((inputs, labels), 8 * SHARDS, world, shards=SHARDS)
        validation = dl.Batches((inputs.flip(0), labels), 60, world, shuffle=False, shards=SHARDS)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "patience": patience}
        loop = dl.Loop(batches, EPOCHS, state=state, run_dir=run, resume=True, save_every=3, progress=False)

        def loss_of(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            time.sleep(dwell_s)
            return cross_entropy(logits, classes, reduction="none")

        lines.write(f"process {os.getpid()}\n")
        for epoch in loop.epochs():
            for step in epoch:
                lines.write(f"step {step.iteration}\n")
                for images, classes in step:
                    time.sleep(dwell_s)
                    step.backward(cross_entropy(model(images), classes))
                step.fold()
                optimizer.step()
            lines.write("evaluates\n")
            loss = dl.evaluate(model, validation, loss=loss_of)["loss"]
            lines.write("schedules\n")
            schedule.step()
            lines.write("saves\n")
            loop.save(loss)
            if patience.should_stop(loss):
                break
        lines.write("has ended its loop\n")
        patience.restore_best()
        if world.rank == 0:
            Path(run, FINAL).write_text(json.dumps(final_digest(state)))


def quietly(run: str, log: str, dwell_s: float) -> None:
    """The script without its words, in a process that outlives a signal that comes after the loop."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            script(run, log, dwell_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Counts:
    """What was seen."""

    kinds: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)  # what the rank did when it was asked
    ranks: Counter[int] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)  # seconds from the request to the last rank's end
    late: int = 0
    runs: int = 0
    equal: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def stops(self) -> int:
        """All of them."""
        return self.kinds.total()


@dataclass
class Request:
    """A request at a random moment, made from outside the ranks.

    Attributes:
        kind: of the request.
        doing: what the rank that is asked did last; empty before the request.
        at: on the clock.
    """

    kind: str
    run: Path
    log: Path
    rank: int
    delay_s: float
    over: threading.Event = field(default_factory=threading.Event)
    doing: str = ""
    at: float = 0.0

    def make(self) -> None:
        """Wait for the moment, and ask; not if the script has ended its loop."""
        file = self.log / f"rank-{self.rank}"
        while not (began := len(said(file)) > 1) and not self.over.is_set():
            time.sleep(_LOOK_S)
        if not began or self.over.wait(self.delay_s) or "has ended its loop" in said(file):
            return
        process, *lines = said(file)
        self.doing, self.at = lines[-1].split()[0], time.monotonic()
        if self.kind == FILE:
            ask_to_stop(self.run, "the campaign")
        else:
            os.kill(int(process.split()[1]), getattr(signal, self.kind))


def said(file: Path) -> list[str]:
    """The whole lines of a rank's log."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def judge(request: Request, ranks: int, ended: float, counts: Counts) -> None:
    """Hold what a stop left against what it must be."""
    status = read_json(request.run / STATUS)
    if status.get("status") in ("done", "left"):
        counts.late += 1
        return
    counts.kinds[request.kind] += 1
    counts.moments[request.doing] += 1
    counts.ranks[ranks] += 1
    counts.took.append(ended - request.at)
    if status.get("status") != "stopped" or counts.took[-1] > FAULT_S:
        counts.broken.append(f"{request}: {status} after {counts.took[-1]:.2f} s")
    for rank in range(ranks):
        made = said(request.log / f"rank-{rank}")[1:]
        last = max((n for n, line in enumerate(made) if line.startswith("step")), default=-1)
        after = made[last + 1 :]
        # The run was stopped in its last step, in the evaluation that follows it, or at the end of the whole loop.
        ends = [[], ["evaluates"], *([AFTER_EPOCH] if status.get("iteration") == EPOCHS * STEPS else [])]
        if after not in ends or (last >= 0 and made[last] != f"step {status.get('iteration')}"):
            counts.broken.append(f"{request}: rank {rank} made {made[last:]} although {status}")


def go_through(pool: Pool, place: Path, times: int, chance: random.Random, dwell_s: float, counts: Counts) -> str:
    """One script: stopped and started again until it is done; its digest."""
    run, log, began = place / "run", place / "log", time.monotonic()
    log.mkdir(parents=True)
    while not (run / FINAL).exists() and not counts.broken and time.monotonic() < began + _PATIENCE_S:
        ranks = chance.randint(1, RANKS)
        for file in log.iterdir():
            file.unlink()
        number = counts.stops + counts.late
        delay_s = chance.uniform(0, 0.7 * EPOCHS * (2 * STEPS + 2) * SHARDS * dwell_s / ranks)
        request = Request(KINDS[number % len(KINDS)], run, log, chance.randrange(ranks), delay_s)
        asks = threading.Thread(target=request.make)
        if counts.stops < times:
            asks.start()
        try:
            pool.run(quietly, ranks, str(run), str(log), dwell_s, timeout_s=_PATIENCE_S)
        except RankFailed as error:
            counts.broken.append(f"{request}: {error}")
        ended = time.monotonic()
        request.over.set()
        if asks.ident is not None:
            asks.join()
        if request.doing:
            judge(request, ranks, ended, counts)
    return (run / FINAL).read_text() if (run / FINAL).exists() else ""


def campaign(pool: Pool, place: Path, times: int, seed: int, dwell_s: float = 0.004) -> Counts:
    """Stop scripts `times` times, and judge each of them at its end."""
    counts, chance = Counts(), random.Random(seed)
    expected = go_through(pool, place / "undisturbed", 0, chance, dwell_s, counts)
    evaluated = lines_of(place / "undisturbed" / "run" / EVALUATIONS)
    while counts.stops < times and not counts.broken:
        counts.runs += 1
        here = place / f"run-{counts.runs}"
        found = go_through(pool, here, times, chance, dwell_s, counts)
        made, whole = ([(one["iteration"], one["loss"]) for one in lines] for lines in (
            lines_of(here / "run" / EVALUATIONS), evaluated))  # fmt: skip
        if found and (found, made) == (expected, whole):
            counts.equal += 1
        else:
            counts.broken.append(f"run {counts.runs} ended as {found} with {made}, it must be {expected} with {whole}")
    return counts


def report(counts: Counts) -> list[str]:
    """As Markdown."""
    lines = ["| request | stops |", "|---|--:|"]
    lines += [f"| {kind} | {number} |" for kind, number in sorted(counts.kinds.items())]
    lines += [f"| (while the rank was in: {what}) | {number} |" for what, number in counts.moments.most_common()]
    lines += [f"| (on {ranks} ranks) | {number} |" for ranks, number in sorted(counts.ranks.items())]
    took = sorted(counts.took) or [0.0]
    return [
        *lines, "",
        f"Seconds until the last rank had ended: {took[len(took) // 2]:.2f} (median), {took[-1]:.2f} (most).",
        f"{counts.equal} of {counts.runs} scripts end bit-equal to the one that was never stopped, with each "
        f"evaluation once. Requests after the loop's end: {counts.late}.",
        *(f"* broken: {line}" for line in counts.broken),
    ]  # fmt: skip


def main() -> int:
    """Print the report; 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description="stops of a script")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, Pool(RANKS) as pool:
        counts = campaign(pool, Path(place), arguments.times, arguments.seed)
    print(f"`python -m tests.faults.stop_scripts {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n")  # fmt: skip
    print("\n".join(report(counts)))
    return int(bool(counts.broken) or counts.stops < arguments.times)


if __name__ == "__main__":
    sys.exit(main())
