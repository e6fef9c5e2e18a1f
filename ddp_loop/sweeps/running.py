"""A worker of a sweep: it takes trials, runs each on a slot of one or more ranks, and records how they end.

[Note: Slots] A slot is a GPU, or a rank on the CPU. k slots make a place, and a thread of the worker runs one trial
after the other there, so no two trials share a slot. Another thread watches all places: it sends heartbeats, reads the
objective as it streams into the run folders, asks the pruner, keeps time limits, and asks runs to stop. Trials stop as
any run does, with a checkpoint; one that does not obey is killed after a while.

[Note: Warm] A function's trials run in the same processes, which have imported torch. A script has new processes for
each trial, since it may leave anything behind. Both end with the worker, however that ends.

[Note: Signals] Slurm, and a terminal, send a signal to all processes at once. Ranks take it as a request to stop, or
die of it, before the worker's own handler has run. So the worker waits a moment when an attempt ended in such a way: if
the worker is asked to stop too, the attempt was interrupted.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ddp_loop.accelerators import gpu_count, gpu_visibility
from ddp_loop.checkpoint import ask_to_stop, asked_to_stop, is_running
from ddp_loop.determinism import check_count
from ddp_loop.distributed import Pool, RankFailed
from ddp_loop.reporting import as_clock, shown_name, trial_folder
from ddp_loop.sweeps.folders import (
    Ending,
    ObjectiveReader,
    answer_requests,
    begin_attempt,
    end_attempt,
    has_requests,
    is_dead,
    status_of,
    worker_name,
    write_trial,
)
from ddp_loop.sweeps.jobs import Point, code_of, run_trial
from ddp_loop.sweeps.plan import SweepPlan

if TYPE_CHECKING:
    from ddp_loop.sweeps.trial_queue import Attempt, Claim, TrialQueue

LOOK_S = 0.1  # between two looks at the running trials
IDLE_S = 0.3  # until a place looks for a trial again
OBEY_S = 30.0  # for a checkpoint, before a run that was asked to stop is killed
LIMIT_OBEY_S = 5.0  # the same for one that took too long
HELD_S = 60.0  # for the former process of a run to leave its folder
TIMED_OUT = "timed out"
PRUNED = "pruned"  # why a worker asks a trial to stop, besides a stop of its own
SIGNAL_S = 1.0  # for a signal to reach the worker too
LOST = "given to another worker"
MOST_WHY = 90  # letters
_CHECK_S = 2.0  # between two looks for dead workers and requests, at least

Say = Callable[[str], None]


@dataclass
class Running:
    """A trial that runs here.

    Attributes:
        asked: why this worker asks it to stop; None if it does not.
        deadline: when it is killed, since it did not obey.
        killed: whether its processes cannot be used again.
    """

    claim: Claim
    folder: Path
    pool: Pool
    reader: ObjectiveReader
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    asked: str | None = None
    deadline: float = float("inf")
    killed: bool = False

    def ask(self, why: str, within_s: float) -> None:
        if self.asked is None:
            self.asked = why
            self.deadline = time.monotonic() + within_s

    def kill(self) -> None:
        self.killed = True
        for process in self.pool.process_ids:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class SweepWorker:
    """Runs trials of a sweep on this machine's slots until none is left, or a stop.

    Args:
        plan: what to run.
        folder: of the sweep.
        queue: where the trials are.
        places: the environment of each place, from `places_of`.
        say: prints a line.

    Attributes:
        stopped: why the worker was stopped; None if it was not.
    """

    def __init__(
        self, plan: SweepPlan, folder: Path, queue: TrialQueue, places: Sequence[Mapping[str, str]], say: Say
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._queue = queue
        self._places = places
        self._say = say
        self._name = ""
        self._running: dict[int, Running] = {}  # by place
        self._not_free: set[int] = set()  # trials in whose folders another process still trains
        self._took_s: list[float] = []  # trials that ended here
        queue.patience.say = say
        queue.patience.ends = lambda: self.stopped is not None
        self._looking = threading.Lock()  # what has ended is neither looked at nor asked
        self.stopped: str | None = None
        self._ended = threading.Event()
        self._signalled = threading.Event()
        self._failure: BaseException | None = None

    def stop(self, why: str) -> None:
        """Ask all running trials to stop with a checkpoint, and take no more; a second call kills them."""
        if self.stopped is not None:
            for running in list(self._running.values()):
                running.ask(self.stopped, 0.0)
                running.kill()
        self.stopped = self.stopped or why
        self._signalled.set()

    def run(self) -> None:
        """Run trials until all of the sweep have ended, or the worker is stopped.

        Raises:
            Exception: what a place raised, such as an error of the storage; its trials go back in line.
        """
        threads = [
            threading.Thread(target=self._guarded, args=(self._serve, place), name=f"place {place}")
            for place in range(len(self._places))
        ]
        watch = threading.Thread(target=self._guarded, args=(self._watch,), name="ddp_loop sweep")
        with worker_name(self._folder) as self._name:
            try:
                self._look_around()  # requests to run trials again come before the look whether all have ended
                for thread in (*threads, watch):
                    thread.start()
                for thread in threads:
                    while thread.is_alive():  # a signal's handler runs between two waits
                        thread.join(0.2)
            finally:
                self._ended.set()
                if watch.is_alive():
                    watch.join()
        if self._failure is not None:
            raise self._failure

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            self._failure = self._failure or error
            self.stopped = self.stopped or f"an error: {error}"

    # -- a place -------------------------------------------------------------------------------------------

    def _serve(self, place: int) -> None:
        pool: Pool | None = None
        try:
            while self.stopped is None:
                claim = self._queue.claim(self._name, self._plan.space, self._plan.sampler, self._not_free)
                if claim is None:
                    if not has_requests(self._folder) and self._queue.is_over():
                        return
                    time.sleep(IDLE_S)  # others run, and may be interrupted
                    continue
                pool = pool or Pool(self._plan.ranks, self._places[place])
                if not self._run(place, claim, pool) or not self._plan.job.is_warm:
                    pool.close()
                    pool = None
        finally:
            if pool is not None:
                pool.close()

    def _run(self, place: int, claim: Claim, pool: Pool) -> bool:
        """Run an attempt; returns whether the pool can be used again."""
        folder = trial_folder(self._folder, claim.trial)
        ending: Ending | None = None
        begun = False

        def record() -> None:
            if begun:
                why = self.stopped or "an error of its worker"
                end_attempt(folder, claim.attempt, ending or Ending("interrupted", None, why))

        try:
            if not self._is_ready(pool) or not self._is_free(claim, folder) or not self._queue.holds(claim):
                time.sleep(IDLE_S)
                return True
            begun = True
            self._begin(place, claim, folder)
            running = Running(claim, folder, pool, ObjectiveReader(folder, self._plan.objective))
            ending = self._outcome(place, running)
            return not running.killed
        finally:
            if self._queue.end(claim, ending, record) and ending is not None:
                self._took_s.append(time.monotonic() - running.began)
                self._say(f"{line_of(claim, ending)}. {self._progress()}")

    def _is_ready(self, pool: Pool) -> bool:
        """Start the pool's processes if they are missing: their start counts for no trial's time limit."""
        try:
            pool.run(os.getpid, self._plan.ranks)
        except RankFailed:  # a process died while it waited; the pool replaces it
            return False
        except RuntimeError:
            if self.stopped is None:
                raise
        return self.stopped is None

    def _is_free(self, claim: Claim, folder: Path) -> bool:
        """Whether no process trains in the folder; one whose worker lost the trial is asked to leave it."""
        deadline = time.monotonic() + HELD_S
        while is_running(folder) and self.stopped is None and time.monotonic() < deadline:
            if not self._queue.holds(claim):
                return False
            with suppress(ValueError, OSError):
                ask_to_stop(folder, "the sweep: another worker has this trial")
            time.sleep(LOOK_S)
        if is_running(folder):
            self._not_free.add(claim.trial)
            return False
        self._not_free.discard(claim.trial)
        return True

    def _begin(self, place: int, claim: Claim, folder: Path) -> None:
        plan = self._plan
        attempt = {"number": claim.attempt, "host": os.uname().nodename, "process": os.getpid(), "slot": place}
        begin_attempt(
            folder,
            attempt,
            trial=claim.trial,
            parameters=claim.parameters,
            objective=plan.objective.name,
            **{name: plan.facts[name] for name in ("direction", "ranks", "seed")},
            code=code_of(plan.job.file),
            arguments=plan.job.arguments(claim.parameters, str(folder)),
        )

    def _outcome(self, place: int, running: Running) -> Ending | None:
        """Run an attempt to its end; None if it was interrupted, and shall go on later."""
        plan = self._plan
        parameters = dict(running.claim.parameters)
        result: dict[str, float] | float | None = None
        problem: RankFailed | None = None
        self._running[place] = running
        try:
            result = running.pool.run(run_trial, plan.ranks, plan.job, parameters, str(running.folder))[0]
        except RankFailed as error:
            problem = error
        finally:
            with self._looking:
                del self._running[place]
        status, why = status_of(running.folder, running.began_at)
        may_be_signal = running.asked is None and (status == "stopped" or (problem is not None and problem.died))
        if may_be_signal and self._signalled.wait(SIGNAL_S) and self.stopped is not None:  # see [Note: Signals]
            running.ask(self.stopped, OBEY_S)
        if running.asked is not None and (problem is not None or status == "stopped"):
            return self._asked(running)
        if problem is not None:
            headline = str(problem).partition("\n")[0]
            if problem.died:
                return Ending("killed", None, headline)
            status = "not finite" if isinstance(problem.__cause__, FloatingPointError) else "failed"
            return Ending(status, None, headline)
        if status == "stopped":
            return Ending("stopped", None, why)
        return self._valued(running, result)

    def _asked(self, running: Running) -> Ending | None:
        """The ending of an attempt that this worker asked to stop."""
        if running.asked == TIMED_OUT:
            return Ending("timed out", None, f"took more than {self._plan.facts['time_limit_s']:g} s")
        if running.asked == PRUNED:
            found = self._plan.objective.ending(running.folder, running.reader)
            value = found.value if found.value is not None and isfinite(found.value) else None
            return Ending("pruned", value, "the pruner: worse than the other trials here", found.objective)
        return None

    def _valued(self, running: Running, result: dict[str, float] | float | None) -> Ending:
        objective = self._plan.objective
        value = result.get(objective.name) if isinstance(result, dict) else result
        found = Ending("done", value, None, objective.name)
        if value is None:
            found = objective.ending(running.folder, running.reader)
        if found.value is not None and not isfinite(found.value):
            return Ending("not finite", None, f"{shown_name(found.objective or objective.name)} is {found.value}")
        return found

    def _progress(self) -> str:
        """How many trials have ended, and how long the others take."""
        states = [one.state for one in self._queue.newest().values()]
        left = len(states) - states.count("ended")
        ended = f"{len(states) - left} of {len(states)}"
        if not left:
            return ended
        now = time.monotonic()
        gone_s = [now - one.began for one in list(self._running.values())]
        at_once = min(left, states.count("running") + 1)  # this place takes a trial now
        return f"{ended}, {as_clock(left_s(self._took_s, gone_s, left, at_once))} left"

    # -- all places ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beat_at = 0.0
        look_at = 0.0
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            with self._looking:
                if self._failure is None:
                    self._guarded(self._follow, now > beat_at, now > look_at)
                for running in list(self._running.values()):  # also after an error, so that each is asked to stop
                    self._look_at(running, time.monotonic())
            beat_at = now + self._plan.facts["heartbeat_s"] / 2 if now > beat_at else beat_at
            look_at = now + _CHECK_S if now > look_at else look_at

    def _follow(self, beats: bool, looks: bool) -> None:
        """Send heartbeats, look around, and hand objectives on to the pruner."""
        lost = self._queue.beat() if beats else []
        if looks:
            self._look_around()
        for running in list(self._running.values()):
            if running.claim in lost:  # its folder is another worker's, so no request is written there
                running.asked = LOST
                running.deadline = 0.0
            values = running.reader.poll()
            pruner = self._plan.pruner
            if pruner is None or running.asked is not None:
                continue
            if any(self._queue.should_prune(running.claim, pruner, step, value) for step, value in values):
                running.ask(PRUNED, OBEY_S)

    def _look_around(self) -> None:
        """Follow the requests in the sweep's folder, and put the trials of dead workers in line again."""
        folder = self._folder
        self.stopped = self.stopped or asked_to_stop(folder)
        answer_requests(folder, lambda trials, name: self._queue.again(trials, name, self._record_waiting))
        self._queue.take_over(self._name, lambda name: is_dead(folder, name), self._record_dead)

    def _record_waiting(self, trial: int) -> None:
        write_trial(trial_folder(self._folder, trial), status="waiting")

    def _record_dead(self, attempt: Attempt) -> None:
        ending = attempt.ending or Ending("interrupted", None, "its worker died")
        end_attempt(trial_folder(self._folder, attempt.trial), attempt.attempt, ending)

    def _look_at(self, running: Running, now: float) -> None:
        limit_s = self._plan.facts["time_limit_s"]
        if self.stopped is not None:
            running.ask(self.stopped, OBEY_S)
        if limit_s is not None and now - running.began > limit_s:
            running.ask(TIMED_OUT, LIMIT_OBEY_S)
        if running.asked not in (None, LOST):
            with suppress(ValueError, OSError):  # its loop has not begun, or has just ended
                ask_to_stop(running.folder, f"the sweep: {running.asked}")
        if now > running.deadline:
            running.kill()


def left_s(took_s: Sequence[float], gone_s: Sequence[float], trials: int, at_once: int) -> float:
    """The seconds until all trials of a sweep have ended, if each takes as long as those before it.

    Args:
        took_s: by trials that ended, on average so long.
        gone_s: since the beginning of trials that run.
        trials: the number of trials that have not ended.
        at_once: how many of them run at a time.
    """
    mean_s = fmean(took_s)
    return (mean_s * trials - sum(min(one, mean_s) for one in gone_s)) / at_once


def line_of(claim: Claim, ending: Ending) -> str:
    """How a trial ended, for a line of a terminal."""
    value = "" if ending.value is None else f", {shown_name(ending.objective or 'value')} {ending.value:.6g}"
    why = f": {shortened(ending.why)}" if ending.why and ending.status not in ("pruned", "done") else ""
    return f"Trial {claim.trial} ({in_words(claim.parameters)}) {ending.status}{value}{why}"


def in_words(parameters: Point) -> str:
    """The parameters of a trial in a line of a terminal."""
    return ", ".join(
        f"{name}={one:.4g}" if isinstance(one, float) else f"{name}={one}" for name, one in parameters.items()
    )


def shortened(why: str) -> str:
    """The first sentence of a reason, for a line of a terminal; trial.json has all of it."""
    first = why.partition("\n")[0].partition(". ")[0].rstrip(".")
    return first if len(first) <= MOST_WHY else f"{first[: MOST_WHY - 1]}\u2026"


def places_of(slots: int | None, ranks: int) -> list[dict[str, str]]:
    """The environment of each place: k GPUs each, or nothing special on the CPU. See [Note: Slots].

    Args:
        slots: their number; by default the GPUs of this machine, or its cores.
        ranks: of each trial, k.

    Raises:
        ValueError: a trial has more ranks than there are slots.
    """
    gpus = gpu_count()
    visibility = gpu_visibility()
    known = [one for one in os.environ.get(visibility, "").split(",") if one] or list(map(str, range(gpus)))
    usual = gpus or len(os.sched_getaffinity(0))
    if gpus and not visibility:
        usual = ranks  # no variable gives a trial GPUs of its own: one trial at a time
    slots = check_count("slots", usual if slots is None else slots)
    if ranks > slots:
        raise ValueError(
            f"A trial has {ranks} ranks, but there {'is 1 slot' if slots == 1 else f'are {slots} slots'} here. Give "
            "fewer ranks, or more slots."
        )
    if gpus and slots > len(known):
        raise ValueError(f"A slot is a GPU. Got slots={slots}, and this machine has {len(known)}. Give fewer.")
    if gpus and not visibility and slots >= 2 * ranks:
        raise ValueError(
            f"Trials run at the same time on CUDA GPUs alone. Got slots={slots} for trials of {ranks} ranks. Pass "
            f"slots={ranks}: one trial at a time."
        )
    places = [range(first, first + ranks) for first in range(0, slots - ranks + 1, ranks)]
    if gpus:
        return [{visibility: ",".join(known[one] for one in place)} if visibility else {} for place in places]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # several trials share the cores
    return [{"OMP_NUM_THREADS": threads} for _ in places]
