"""Ask a job to stop at chosen moments, again and again.   python -m tests.faults.stop_anywhere --times 100

SIGTERM and Ctrl-C go to one rank or to torchrun, the file `stop` into the run folder, `loop.stop()` is called on one
rank, `python -m ddp_loop stop` is run. After each: all ranks ended after the same step, a valid checkpoint of it is
there, no process is left. The job goes on from there on another number of ranks, until it is done; then it must have
the bits of a job that was never stopped, and rows.jsonl each step once and in order.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint import STATUS, STOP, ask_to_stop, read_json
from ddp_loop.checkpoint.atomic_files import SAVING
from ddp_loop.cli import list_checkpoints
from ddp_loop.distributed import Pool, RankFailed
from tests.faults.job import FINAL, Job, Mark
from tests.faults.kill_workers import end_problem, make_job, rows_problem
from tests.faults.launched import hear_ctrl_c, left_below, left_of, start_torchrun, variables
from tests.support.both_exchanges import add_exchange, use_exchange

RANK, TORCHRUN, RUN = "one rank", "torchrun", "the run folder"
COMMAND, FILE, CALL = "`python -m ddp_loop stop`", "the file `stop`", "`loop.stop()`"
IN_POOL = (("SIGTERM", RANK), ("SIGINT", RANK), (FILE, RUN), (CALL, RANK))
UNDER_TORCHRUN = (("SIGTERM", TORCHRUN), ("SIGINT", TORCHRUN), (COMMAND, RUN), ("SIGTERM", RANK), ("SIGINT", RANK))
AIMS = ("", "evaluate", "data", "save", "forward", "", "backward", "optimizer", "save", "evaluate", "fold", "writing")
RANKS, EPOCHS, STEPS = 4, 8, 10  # of an epoch
_EVALUATE_S = 1.6  # on one rank
_DELAY_S = 0.45  # at most, from the first step to the request
_LOOK_S, _PATIENCE_S = 0.0002, 120.0


@dataclass(frozen=True)
class Moment:
    """When a request was made.

    Attributes:
        kind, target: of the request.
        stage, iteration: of the target then; of rank 0 where it is not a rank.
        at: on the clock.
        why: how the run must say it afterwards, or begin to.
        while_writing: whether a checkpoint was being written.
        command: that was run; None where none was.
    """

    kind: str
    target: str
    stage: str
    iteration: int
    at: float
    why: str
    while_writing: bool
    command: subprocess.Popen[str] | None = None


@dataclass
class Counts:
    """What was seen."""

    stages: Counter[str] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    later: list[int] = field(default_factory=list)  # steps from the request to the stop
    took: list[float] = field(default_factory=list)  # seconds from the request to the last process's end
    late: Counter[str] = field(default_factory=Counter)
    same: int = 0
    kept: int = 0
    equal: int = 0
    orphans: int = 0
    while_writing: int = 0
    with_workers: int = 0
    in_evaluation: int = 0
    of_run: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def stops(self) -> int:
        """All of them."""
        return self.stages.total()


@dataclass(frozen=True)
class Asker:
    """Asks one attempt of a job to stop.

    Attributes:
        job: that is asked.
        ranks: of it.
        chance: where moments come from.
    """

    job: Job
    ranks: int
    chance: random.Random

    @property
    def marks(self) -> list[Mark]:
        """Of its ranks."""
        return [Mark(Path(self.job.marks), rank) for rank in range(self.ranks)]

    def ask(self, kind: str, target: str, aim: str, launcher: int, is_over: Callable[[], bool]) -> Moment | None:
        """Wait for the moment, and ask; None if the job ended before."""
        marks, last = self.marks, self.job.epochs * STEPS
        rank = self.chance.randrange(self.ranks) if target == RANK else 0
        mark, deadline = marks[rank], time.monotonic() + _PATIENCE_S
        not_before: float | None = None
        at_end = False  # it does the end of the last epoch again
        while time.monotonic() < deadline and not is_over():
            if not_before is None:
                if all(one["attempt"] and (one["first"] or one.at == "evaluate") for one in marks):
                    not_before = time.monotonic() + self.chance.uniform(0, _DELAY_S)
                    at_end = read_json(Path(self.job.run, STATUS)).get("iteration", 0) >= last
            elif (
                at_end
                or mark["ended"]
                or (mark["iteration"] >= last and mark.at not in ("data", "forward", "backward"))
            ):
                return None
            elif time.monotonic() > not_before and self._is_time(aim, mark):
                return self._send(kind, target, rank, launcher)
            time.sleep(_LOOK_S)
        return None

    def _is_time(self, aim: str, mark: Mark) -> bool:
        if aim == "writing":
            return any(path.name.startswith(SAVING) for path in Path(self.job.run, "checkpoints").glob("*"))
        return bool(mark.at) and aim in ("", mark.at)

    def _send(self, kind: str, target: str, rank: int, launcher: int) -> Moment:
        run, mark = Path(self.job.run), self.marks[rank]
        command = None
        if kind == COMMAND:
            command = subprocess.Popen(
                [sys.executable, "-m", "ddp_loop", "stop", str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True, preexec_fn=hear_ctrl_c, env=variables("a command"),
            )  # fmt: skip
            while not (run / STOP).exists() and command.poll() is None:
                time.sleep(_LOOK_S)
        signal_name = "Ctrl-C" if kind == "SIGINT" else kind
        why = {FILE: "the campaign", CALL: "loop.stop()", COMMAND: "python -m ddp_loop stop"}.get(
            kind, f"{signal_name} at rank {'' if target == TORCHRUN else rank}"
        )
        now, writing = time.monotonic(), self._is_time("writing", mark)
        moment = Moment(kind, target, mark.at, mark["iteration"], now, why, writing, command)
        if kind == FILE:
            ask_to_stop(run, "the campaign")
        elif kind == CALL:
            mark["asked"] = 1
        elif kind != COMMAND:
            os.kill(launcher if target == TORCHRUN else mark["process"], getattr(signal, kind))
        return moment


# -- one attempt -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        moment: of the request; None if none was made.
        results: of the ranks, where they are known.
        at: on the clock.
        problem: what went wrong.
    """

    moment: Moment | None
    results: list[tuple[int, str] | None]
    at: float
    problem: str | None = None


def quietly(job: Job) -> tuple[int, str]:
    """The job without its words: what changed since the last attempt, and that it stops."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return job()


def in_the_pool(pool: Pool, asker: Asker, request: tuple[str, str, str] | None) -> Ended:
    """An attempt on the first ranks of a pool."""
    over, moments = threading.Event(), list[Moment | None]()
    results: list[Any] = []
    problem = None

    def disturb() -> None:
        if request is not None:
            moments.append(asker.ask(*request, 0, over.is_set))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        results = pool.run(quietly, asker.ranks, asker.job, timeout_s=_PATIENCE_S)
    except RankFailed as error:
        problem = str(error)
    finally:
        ended = time.monotonic()
        over.set()
        thread.join()
    if left := left_below(pool.process_ids):
        problem = problem or f"orphans: {left}"
    return Ended(next(iter(moments), None), results, ended, problem)


def under_torchrun(asker: Asker, request: tuple[str, str, str], log: Path) -> Ended:
    """An attempt under torchrun."""
    log.write_text("")
    launcher = start_torchrun(asker.job, asker.ranks, log)
    problem = None
    try:
        moment = asker.ask(*request, launcher.pid, lambda: launcher.poll() is not None)
        code = launcher.wait(timeout=_PATIENCE_S)
        ended = time.monotonic()
        if (code != 0) != (moment is not None and moment.target == TORCHRUN):
            problem = f"torchrun ended with {code}: {log.read_text(errors='replace')[-3000:]}"
        if moment is not None and moment.command is not None:
            said = moment.command.communicate(timeout=_PATIENCE_S)[0]
            if moment.command.returncode != 0 or ": stopped at step " not in said:
                problem = f"the command ended with {moment.command.returncode}: {said}"
    finally:
        launcher.kill()
        launcher.wait()
    if left := left_of(asker.job.marks):
        problem = problem or f"orphans: {left}"
    return Ended(moment, [], ended, problem)


# -- what must be true -----------------------------------------------------------------------------------------


def judge_stop(asker: Asker, ended: Ended, counts: Counts) -> None:
    """Hold what an attempt left against what it must be."""
    run, moment = Path(asker.job.run), ended.moment
    said = read_json(run / STATUS)
    if moment is not None and said.get("status") == "done" and not (ended.problem or "").startswith("orphans"):
        counts.late[f"{moment.kind} to {moment.target}, in {moment.stage}"] += 1  # a signal is a usual one again
        return
    if ended.problem is not None or moment is None:
        counts.orphans += (ended.problem or "").startswith("orphans")
        if ended.problem is not None or said.get("status") != "done":
            counts.broken.append(f"{moment}: {ended.problem}; the status is {said}")
        return
    step = said.get("iteration", -1)
    counts.stages[moment.stage] += 1
    counts.kinds[moment.kind, moment.target] += 1
    counts.ranks[asker.ranks] += 1
    counts.of_run += 1
    counts.later.append(step - max(moment.iteration, 0) if moment.iteration else 0)
    counts.took.append(ended.at - moment.at)
    counts.while_writing += moment.while_writing
    counts.with_workers += asker.job.workers > 0
    counts.in_evaluation += not any(mark["ended"] for mark in asker.marks)
    at = {mark["iteration"] for mark in asker.marks} | {one[0] for one in ended.results if one is not None}
    digests = {one[1] for one in ended.results if one is not None}
    alike = len({mark["ended"] for mark in asker.marks}) == 1
    if said.get("status") == "stopped" and at in ({step}, {0}) and len(digests) <= 1 and alike:
        counts.same += 1
    else:
        counts.broken.append(f"{moment}: ranks ended after {at}, with {len(digests)} states; the status is {said}")
    valid, lines = list_checkpoints(run)
    rows = rows_problem(run, whole=True) or len((run / "rows.jsonl").read_text().splitlines()) != step
    if valid and lines[1].startswith(said.get("checkpoint") or "?") and lines[1].startswith(f"step-{step:08d}"):
        counts.kept += 1
    else:
        counts.broken.append(f"{moment}: the checkpoints are {lines}; the status is {said}")
    if rows or not said.get("why", "").startswith(moment.why) or said.get("ranks") != asker.ranks:
        counts.broken.append(f"{moment}: the rows are {rows}; the status is {said}")


def judge_end(job: Job, expected: str, counts: Counts) -> None:
    """Hold the end of a run against what it must be."""
    if (problem := end_problem(job, expected)) is None:
        counts.equal += counts.of_run
    else:
        counts.broken.append(problem)
    counts.of_run = 0


# -- all of it -------------------------------------------------------------------------------------------------


def go_through(pool: Pool, job: Job, times: int, by_torchrun: int, chance: random.Random, counts: Counts) -> None:
    """One job: stopped, and started again, until it is done."""
    launched = sum(counts.ways[way] for way in counts.ways if "torchrun" in way)
    for attempt in range(1, STEPS * job.epochs):
        ranks = chance.choice((4, 3, 3, 2, 2, 1))
        number = counts.stops + counts.late.total()
        for rank in range(RANKS):
            Mark(Path(job.marks), rank).clear()
        asker = Asker(replace(job, attempt=attempt, workers=chance.choice((0, 0, 1))), ranks, chance)
        before = counts.stops
        by_launcher = launched < by_torchrun and attempt % 2 == 1 and counts.stops < times
        if by_launcher:
            request = (*UNDER_TORCHRUN[launched % len(UNDER_TORCHRUN)], AIMS[number % len(AIMS)])
            if request[0] == COMMAND:
                request = (*request[:2], "")  # it needs seconds to begin
            ended = under_torchrun(asker, request, Path(job.marks).parent / "log")
        else:
            kind = IN_POOL[(number + number // len(IN_POOL)) % len(IN_POOL)]
            ended = in_the_pool(pool, asker, (*kind, AIMS[number % len(AIMS)]) if counts.stops < times else None)
        judge_stop(asker, ended, counts)
        if counts.stops > before:
            counts.ways[f"under torchrun, on {ranks}" if by_launcher else f"in a pool, on {ranks}"] += 1
            launched += by_launcher
        if counts.broken or (Path(job.run) / FINAL).exists():
            return


def campaign(pool: Pool, place: Path, times: int, by_torchrun: int, seed: int, epochs: int = EPOCHS) -> Counts:
    """Stop `times` times, `by_torchrun` of them under torchrun, and judge each run."""
    counts, chance = Counts(), random.Random(seed)
    keywords = {"epochs": epochs, "evaluate_s": _EVALUATE_S}
    (_, expected), *_ = pool.run(make_job(place, "undisturbed", **keywords), RANKS, timeout_s=_PATIENCE_S)
    number = 0
    while counts.stops < times and not counts.broken:
        number += 1
        job = make_job(place, f"run-{number}", **keywords)
        go_through(pool, job, times, by_torchrun, chance, counts)
        judge_end(job, expected, counts)
        if number > 2 * times:
            raise RuntimeError("the job must run for long enough to be stopped; it does not")
    return counts


def report(counts: Counts) -> list[str]:
    """As Markdown."""
    lines = ["| the target was in | stops |", "|---|--:|"]
    lines += [f"| {stage or 'nothing'} | {stops} |" for stage, stops in counts.stages.most_common()]
    lines += [f"| (the ranks left an evaluation for it) | {counts.in_evaluation} |"]
    lines += [f"| (a checkpoint was being written) | {counts.while_writing} |"]
    lines += [f"| (with a worker of a DataLoader) | {counts.with_workers} |"]
    lines += ["", "| request | to | stops |", "|---|---|--:|"]
    lines += [f"| {kind} | {target} | {stops} |" for (kind, target), stops in sorted(counts.kinds.items())]
    lines += ["", "| how many ranks | stops |", "|---|--:|"]
    lines += [f"| {way} | {stops} |" for way, stops in sorted(counts.ways.items())]
    n = counts.stops
    took, later = sorted(counts.took), sorted(counts.later)
    if n:
        lines += [
            "",
            f"Steps from the request to the stop: {later[n // 2]} (median), {later[-1]} (most); seconds until the last "
            f"process had ended, with its checkpoint: {took[n // 2]:.2f} (median), {took[-1]:.2f} (most).",
        ]
    lines += [
        f"{counts.same} of {n}: all ranks ended after the same step, with the same state.",
        f"{counts.kept} of {n}: a valid checkpoint of that step is there, and `status.json` names it.",
        f"{counts.equal} of {n} end bit-equal to the run that was never stopped.",
        f"Orphans: {counts.orphans}. Requests after the last step, which ended as done: {counts.late.total()}.",
    ]
    return lines + [f"* broken: {line}" for line in counts.broken]


def main() -> int:
    """Print the report; 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description="requests to stop")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--torchrun", type=int, default=None, help="how many of them under torchrun; an eighth")
    parser.add_argument("--seed", type=int, default=0)
    add_exchange(parser)
    said = parser.parse_args()
    use_exchange(said)
    by_torchrun = said.times // 8 if said.torchrun is None else said.torchrun
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, Pool(RANKS) as pool:
        counts = campaign(pool, Path(place), said.times, by_torchrun, said.seed)
    print(f"`python -m tests.faults.stop_anywhere {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n")  # fmt: skip
    print("\n".join(report(counts)))
    right = counts.same == counts.kept == counts.equal == counts.stops >= said.times
    return int(bool(counts.broken) or counts.orphans > 0 or not right)


if __name__ == "__main__":
    sys.exit(main())
