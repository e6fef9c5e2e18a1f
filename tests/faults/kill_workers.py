"""Kill ranks of a job at chosen moments, again and again.   python -m tests.faults.kill_workers --times 50

Each kill (SIGKILL, of one rank, by its process id) is aimed at a stage of the victim, as its mark says. The job is
started again from its checkpoints: by torchrun itself (--max-restarts), or on another number of ranks by a pool. At
its end it must have the bits of a job that was never disturbed, and rows.jsonl each step once and in order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ddp_loop.checkpoint.atomic_files import SAVING
from ddp_loop.distributed import Pool, RankFailed
from tests.faults.job import FINAL, Job, Mark
from tests.faults.launched import start_torchrun
from tests.support.both_exchanges import add_exchange, use_exchange

AIMS = ("data", "forward", "backward", "optimizer", "save", "peers", "backward", "data", "forward", "peers")
RANKS = 4
_LOOK_S, _AIM_S = 0.0002, 90.0  # a start of four processes takes 20 s on two cores
_DELAY_S = 0.25  # at most, from the first step to the kill


@dataclass
class Counts:
    """What was seen."""

    stages: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    peers_blocked: int = 0
    while_writing: int = 0
    lost: list[int] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    kills_of_run: int = 0
    equal: int = 0

    @property
    def kills(self) -> int:
        """All of them."""
        return self.stages.total()


@dataclass(frozen=True)
class Killer:
    """Kills one rank of an attempt of a job.

    Attributes:
        job: that is disturbed.
        ranks: of it.
        chance: where moments come from.
        counts: what was seen.
        once_saved: whether it waits for a checkpoint, so that the next attempt has one to resume from.
    """

    job: Job
    ranks: int
    chance: random.Random
    counts: Counts
    once_saved: bool = False

    def kill(self, attempt: int, aim: str, is_over: Callable[[], bool], may_kill: Callable[[int], bool]) -> bool:
        """Wait for the moment, and kill; False if the job ended before."""
        marks = [Mark(Path(self.job.marks), rank) for rank in range(self.ranks)]
        rank = 0 if aim == "save" else self.chance.randrange(self.ranks)
        victim, deadline = marks[rank], time.monotonic() + _AIM_S
        not_before: float | None = None
        while time.monotonic() < deadline and not is_over():
            if not_before is None:
                is_ready = not self.once_saved or any(Path(self.job.run).glob("checkpoints/step-*"))
                if is_ready and all(mark["attempt"] == attempt and mark["first"] for mark in marks):
                    not_before = time.monotonic() + self.chance.uniform(0, _DELAY_S)
            elif time.monotonic() > not_before and self._is_time(aim, victim, marks):
                process = victim["process"]
                if victim["ended"] or not may_kill(process):
                    return False
                os.kill(process, signal.SIGKILL)
                self._note(rank, marks)
                return True
            time.sleep(_LOOK_S)
        return False

    def _is_time(self, aim: str, victim: Mark, marks: list[Mark]) -> bool:
        if aim != "peers":
            return victim.at == aim
        others = [mark for mark in marks if mark is not victim]
        return victim.at not in ("fold", "save", "") and bool(others) and all(mark.at == "fold" for mark in others)

    def _note(self, rank: int, marks: list[Mark]) -> None:
        at = [mark.at for mark in marks]  # the victim's cannot change any more
        run = Path(self.job.run)
        there = [path.name for path in (run / "checkpoints").glob("*")]
        newest = max((int(name[5:13]) for name in there if name.startswith("step-")), default=0)
        counts = self.counts
        counts.stages[at[rank]] += 1
        counts.kills_of_run += 1
        counts.while_writing += any(name.startswith(SAVING) for name in there)
        others = at[:rank] + at[rank + 1 :]
        counts.peers_blocked += bool(others) and all(one == "fold" for one in others) and at[rank] != "fold"
        made = marks[rank]["iteration"] - (at[rank] not in ("optimizer", "save"))
        lost = max(0, made - newest)
        counts.lost.append(lost)
        if lost > 2 * self.job.save_every:  # one may be under way while the next is due
            counts.broken.append(f"{lost} steps lost, with a checkpoint every {self.job.save_every}")
        if (problem := rows_problem(run, whole=False)) is not None:
            counts.broken.append(problem)

    def check_first(self, attempt: int) -> None:
        """Check that an attempt resumed after a checkpoint that is in the rows."""
        mark = Mark(Path(self.job.marks), 0)
        if mark["attempt"] == attempt and mark["first"] % self.job.save_every not in (0, 1) and mark["first"]:
            self.counts.broken.append(f"resumed at {mark['first']}, with a checkpoint every {self.job.save_every}")


def rows_problem(run: Path, *, whole: bool) -> str | None:
    """What is wrong with the rows: gaps, doubles; with `whole` also a half line or too few of them."""
    if not (run / "rows.jsonl").exists():
        return "no rows" if whole else None
    lines = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    if lines and not whole and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        numbers = [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]
    except ValueError:
        return "a line in the middle of the rows is not whole"
    if len(numbers) != len(lines) or numbers != list(range(1, len(numbers) + 1)):
        return f"rows must be 1, 2, 3, ...; they are {numbers}"
    return None


def parent_of(process: int) -> int:
    """A process's parent; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def under_torchrun(
    job: Job,
    kills: int,
    first: int,
    chance: random.Random,
    counts: Counts,
    log: Path,
    *,
    ranks: int = RANKS,
    once_saved: bool = False,
) -> None:
    """One job that torchrun restarts after each kill."""
    launcher = start_torchrun(job, ranks, log, f"--max-restarts={kills + 1}")
    killer, done = Killer(job, ranks, chance, counts, once_saved), 0
    try:
        while done < kills:
            aim = AIMS[(first + done) % len(AIMS)]
            over = lambda: launcher.poll() is not None  # noqa: E731
            if not killer.kill(done + 1, aim, over, lambda pid: parent_of(pid) == launcher.pid):
                break
            killer.check_first(done + 1)
            done += 1
            counts.ways[f"torchrun restarted all, on {ranks} ranks"] += 1
        if launcher.wait(timeout=_AIM_S) != 0:
            counts.broken.append(f"torchrun ended with {launcher.returncode}")
    finally:
        launcher.kill()
        launcher.wait()


def disturb_once(pool: Pool, job: Job, killer: Killer, aim: str | None) -> bool:
    """Start the job in the pool, and kill a rank at that stage; False if it came to its end, by itself or unaimed."""
    over, killed = threading.Event(), threading.Event()

    def disturb() -> None:
        if aim and killer.kill(job.attempt, aim, over.is_set, lambda process: process in pool.process_ids):
            killed.set()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        pool.run(job, killer.ranks, timeout_s=_AIM_S)
    except RankFailed as error:
        thread.join()
        if not killed.is_set():
            raise
        if "SIGKILL" not in str(error).splitlines()[0]:
            killer.counts.broken.append(f"the pool did not name the killed rank: {str(error).splitlines()[0]}")
    finally:
        over.set()
        thread.join()
    return killed.is_set()


def in_the_pool(
    pool: Pool, job: Job, kills: int, first: int, chance: random.Random, counts: Counts, *, once_saved: bool = False
) -> None:
    """One job that is started again after each kill, on another number of ranks."""
    for attempt in itertools.count(1):
        ranks = chance.choice((4, 3, 3, 2, 2, 1))
        aim = AIMS[(first + attempt - 1) % len(AIMS)] if attempt <= kills else None
        if ranks == 1 and aim == "peers":
            aim = "forward"
        for rank in range(RANKS):
            Mark(Path(job.marks), rank).clear()
        killer = Killer(job, ranks, chance, counts, once_saved)
        killed = disturb_once(pool, replace(job, attempt=attempt), killer, aim)
        killer.check_first(attempt)
        if not killed:
            return
        counts.ways[f"killed on {ranks} ranks, started again in a pool"] += 1


def end_problem(job: Job, expected: str) -> str | None:
    """What is wrong with the end of a run."""
    run, steps = Path(job.run), 10 * job.epochs
    found = json.loads((run / FINAL).read_text()) if (run / FINAL).exists() else {}
    if (problem := rows_problem(run, whole=True)) is not None:
        return problem
    if len((run / "rows.jsonl").read_text().splitlines()) != steps:
        return "rows are missing at the end"
    return None if found == {"iteration": steps, "digest": expected} else f"the end is {found}, it must be {expected}"


def judge(job: Job, expected: str, counts: Counts) -> None:
    """Hold the end of a run against what it must be."""
    if (problem := end_problem(job, expected)) is None:
        counts.equal += counts.kills_of_run
    else:
        counts.broken.append(problem)
    counts.kills_of_run = 0


def make_job(place: Path, name: str, **keywords: float) -> Job:
    """A job with folders of its own."""
    (place / name / "marks").mkdir(parents=True)
    return Job(str(place / name / "run"), str(place / name / "marks"), **keywords)  # type: ignore[arg-type]


def campaign(pool: Pool, place: Path, times: int, by_torchrun: int, seed: int) -> Counts:
    """Kill `times` ranks, `by_torchrun` of them under torchrun, and judge each run."""
    counts, chance = Counts(), random.Random(seed)
    (_, expected), *_ = pool.run(make_job(place, "undisturbed"), RANKS, timeout_s=_AIM_S)
    number = 0
    while counts.kills < times:
        number += 1
        job = make_job(place, f"run-{number}")
        if counts.kills < by_torchrun:
            under_torchrun(job, by_torchrun - counts.kills, counts.kills, chance, counts, place / "log")
        else:
            in_the_pool(pool, job, times - counts.kills, counts.kills, chance, counts)
        judge(job, expected, counts)
        if number > 2 * times:
            raise RuntimeError("the job must run for long enough to be killed; it does not")
    return counts


def main() -> int:
    """Print the report; 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description="kill -9 of ranks")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--torchrun", type=int, default=None, help="how many of them under torchrun; a third")
    parser.add_argument("--seed", type=int, default=0)
    add_exchange(parser)
    said = parser.parse_args()
    use_exchange(said)
    by_torchrun = said.times // 3 if said.torchrun is None else said.torchrun
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, Pool(RANKS) as pool:
        counts = campaign(pool, Path(place), said.times, by_torchrun, said.seed)
        log = Path(place, "log").read_text(errors="replace")[-6000:] if counts.broken and by_torchrun else ""
    print(f"`python -m tests.faults.kill_workers {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n")  # fmt: skip
    print("| the victim was in | kills |\n|---|--:|")
    for stage, kills in counts.stages.most_common():
        print(f"| {stage} | {kills} |")
    print(f"| (all its peers were blocked in the fold) | {counts.peers_blocked} |")
    print(f"| (a checkpoint was being written) | {counts.while_writing} |\n\n| how | kills |\n|---|--:|")
    for way, kills in sorted(counts.ways.items()):
        print(f"| {way} | {kills} |")
    print(f"\nSteps lost by a kill: {sum(counts.lost) / len(counts.lost):.1f} in the mean, {max(counts.lost)} at most.")
    print(f"{counts.equal} of {counts.kills} end bit-equal to the run that was never disturbed.")
    for line in counts.broken:
        print(f"* broken: {line}")
    print(log)
    return int(bool(counts.broken) or counts.equal != counts.kills)


if __name__ == "__main__":
    sys.exit(main())
