"""`sweep`: many networks, each an ordinary run, on this machine's GPUs or cores; and workers that help."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from ddp_loop.checkpoint import read_json
from ddp_loop.determinism import stream_key
from ddp_loop.reporting import SWEEP, TRIAL, has_workers, trial_folder
from ddp_loop.sweeps.jobs import FunctionJob, Job
from ddp_loop.sweeps.places import places_of
from ddp_loop.sweeps.running import Say, Sweep, SweepWorker, plainly, shortened
from ddp_loop.sweeps.space import SAMPLERS, Point, make_named, make_space, try_out
from ddp_loop.sweeps.storage import check_reachable, failures_explained, require_optuna, shown_url
from ddp_loop.sweeps.sweep_folder import STUDY, SweepFolder, forget_stop
from ddp_loop.sweeps.trial_folder import Objective, end_attempt, write_trial
from ddp_loop.sweeps.trial_queue import READY, TrialQueue

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

PRUNERS = ("median", "halving", "hyperband")
GRACE = 3  # heartbeats that may be missing
FIRST = 4  # trials that end before the median pruner compares
GOOD = ("done", "pruned")  # how a trial ends that need not run again
DIRECTIONS = ("minimize", "maximize")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the last one before a time limit


@dataclass(frozen=True)
class TrialResult:
    """How a trial of a sweep ended.

    Attributes:
        trial: its number, in the order of the parameters.
        parameters: by name.
        status: "done", "pruned", "failed", "killed", "not finite", "timed out" or "stopped"; "waiting" if the sweep was
            stopped before.
        value: of the objective; None without one.
        why: the reason in words, if it is not done.
        folder: the run folder.
    """

    trial: int
    parameters: Point
    status: str
    value: float | None
    why: str | None
    folder: Path


def sweep(
    train: Callable[..., object],
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    keywords: Mapping[str, Any] | None = None,
    trials: int | None = None,
    sampler: str | BaseSampler | None = None,
    pruner: str | BasePruner | None = None,
    objective: str = "loss",
    direction: Literal["minimize", "maximize"] = "minimize",
    report_every: int = 50,
    ranks: int = 1,
    slots: int | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    storage: str | None = None,
    heartbeat_s: int = 5,
    progress: bool = True,
) -> list[TrialResult]:
    """Train a network for each point of a space, several at a time; returns the results in the points' order.

        def train(rate, width, run_dir):
            ...  # dl.Loop(..., run_dir=run_dir)

        results = dl.sweep(train, {"rate": [0.1, 0.01], "width": [32, 64]}, "runs/sweep")

    Each trial is an ordinary run, with the bits of the same call alone. Repeat the same call to resume a sweep that was
    stopped or killed: ended trials stay, interrupted trials resume from their checkpoints. Ctrl-C stops trials with
    checkpoints. `ddp_loop sweep work FOLDER` adds the slots of a machine that sees the folder.

    Args:
        train: called on each rank of a trial, with the trial's parameters and `run_dir` as keywords. It may return the
            objective, or numbers by name. New processes import it, so begin sweeps under `if __name__ == "__main__":`.
        space: for each parameter its values, a range such as {"low": 1e-4, "high": 0.1, "log": True}, or one of
            Optuna's distributions; or a list of points.
        folder: of the sweep, with the run folders below `trials`.
        keywords: further keywords of `train`.
        trials, sampler: their number, which a grid has itself; "grid", "random", "tpe", or one of Optuna's samplers or
            the name of its class, such as "CmaEsSampler".
        pruner: stops trials that are worse than others: "median", "halving", "hyperband", or one of Optuna's or its
            name, such as "SuccessiveHalvingPruner".
        objective, direction: a column of the rows, or "evaluation.NAME" of the result of `evaluate`; small or large.
        report_every: the updates over which the pruner's values are means.
        ranks, time_limit_s: of each trial; its seconds.
        slots: ranks at once on this machine (default: its GPUs, or cores).
        seed: of random draws and TPE.
        storage: the URL of one of Optuna's storages (default: SQLite in the folder).
        heartbeat_s: seconds between signs of life of a trial. After three without one another worker gets it.
        progress: whether to print how each trial ended.

    Raises:
        ImportError, OSError, TypeError, ValueError: optuna is missing; the folder cannot be written; ranks cannot get
            `train`; an argument does not fit, the folder has another sweep, or the storage cannot be reached.
    """
    job = FunctionJob(train, dict(keywords or {}))
    plan = SweepPlan(
        job, space, trials, sampler, pruner, objective, direction, report_every, ranks, time_limit_s, seed, heartbeat_s
    )
    return plan.run(Path(folder), slots, storage, _say if progress else lambda line: None)


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # one write: several threads print


class SweepPlan:
    """The arguments of a sweep, checked: nothing is written before `run`.

    Args:
        job: what runs in each trial; the other arguments are those of `sweep`.

    Raises:
        ImportError: optuna is missing.
        ValueError: an argument does not fit.
    """

    def __init__(
        self,
        job: Job,
        space: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        trials: int | None,
        sampler: str | BaseSampler | None,
        pruner: str | BasePruner | None,
        objective: str,
        direction: str,
        report_every: int,
        ranks: int,
        time_limit_s: float | None,
        seed: int,
        heartbeat_s: int,
    ) -> None:
        require_optuna()
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be {' or '.join(DIRECTIONS)}. Got {direction!r}.")
        for name, value in {"ranks": ranks, "report_every": report_every, "heartbeat_s": heartbeat_s}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more. Got {value!r}.")
        if time_limit_s is not None and not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, or None for no limit. Got {time_limit_s!r}.")
        self.job = job
        self.space = make_space(space, sampler, trials, seed)
        job.check(self.space.names)
        self.objective = Objective(objective, direction, report_every)
        self.ranks = ranks
        self.seed = seed
        self.time_limit_s = time_limit_s
        self.beat_s = heartbeat_s
        self._sampler = sampler
        self._pruner = make_pruner(pruner)
        if sampler not in (None, *SAMPLERS) or pruner not in (None, *PRUNERS):
            try_out(make_sampler(sampler, seed, 0), self._pruner, self.space)
        self._facts = {
            "job": job.facts,
            "space": self.space.facts,
            "sampler": self.space.sampler,
            "pruner": pruner if isinstance(pruner, str | None) else type(pruner).__name__,
            "objective": objective,
            "direction": direction,
            "report_every": report_every,
            "ranks": ranks,
            "trials": self.space.trials,
            "seed": seed,
            "time_limit_s": time_limit_s,
            "heartbeat_s": heartbeat_s,
        }

    def run(self, folder: Path, slots: int | None, storage: str | None, say: Say) -> list[TrialResult]:
        """Begin the sweep in a folder, or go on with it, and run its trials here.

        Raises:
            OSError, ValueError: as in `sweep`.
        """
        places = places_of(slots, self.ranks)
        folder = folder.absolute()
        with self.begun(folder, storage) as queue:
            self._work(folder, queue, storage or f"sqlite:///{folder / STUDY}", places, say)
            return self._results(folder, queue, say)

    @contextmanager
    def begun(self, folder: Path, storage: str | None) -> Iterator[TrialQueue]:
        """Begin the sweep in a folder, or go on with it, and hold the folder's lock while this is open.

        Raises:
            OSError, ValueError: as in `sweep`.
        """
        folder = folder.absolute()
        url = storage or f"sqlite:///{folder / STUDY}"
        if storage is not None:
            shown_url(url)
            check_reachable(url)
        with closing(SweepFolder(folder, {**self._facts, "storage": shown_url(url)})) as opened_folder:
            queue = self._open(url, folder, self.objective.direction)
            try:
                self._claim_study(queue, opened_folder)
                self._write_waiting(folder)
                self._write_endings(folder, queue)
                yield queue
            finally:
                queue.close()

    def work(self, folder: Path, slots: int | None, url: str, say: Say) -> list[TrialResult]:
        """Help to run the trials of a sweep that was begun elsewhere.

        Raises:
            ValueError: the storage cannot be reached, or does not have the sweep.
        """
        places = places_of(slots, self.ranks)
        queue = self._open(url, folder)
        try:
            if not has_workers(folder):
                forget_stop(folder)
            if not queue.facts.get(READY):
                raise ValueError(f"The sweep in {folder} was not begun. Start it first, then its workers.")
            self._work(folder, queue, url, places, say)
            return self._results(folder, queue, say)
        finally:
            queue.close()

    def _results(self, folder: Path, queue: TrialQueue, say: Say) -> list[TrialResult]:
        results = results_of(folder, queue)
        say_results(results, folder, say)
        return results

    def _open(self, url: str, folder: Path, direction: str | None = None) -> TrialQueue:
        return TrialQueue(url, study_name(folder), beat_s=self.beat_s, grace_s=GRACE * self.beat_s, direction=direction)

    def _claim_study(self, queue: TrialQueue, folder: SweepFolder) -> None:
        """Raise ValueError if the storage has a sweep of this name from another folder; else add the trials."""
        known = queue.facts.get("id")
        if known not in (None, folder.facts["id"]):
            raise ValueError(
                f"The storage has another sweep named {study_name(folder.folder)!r}, of {queue.facts.get('folder')}. "
                "Choose another folder."
            )
        queue.describe({"id": folder.facts["id"], "folder": str(folder.folder), "sweep": folder.facts})
        queue.add_trials(self.space)

    def _write_waiting(self, folder: Path) -> None:
        """Write what is known of trials that have not begun, for the tables."""
        for trial, point in enumerate(self.space.points or ()):
            path = trial_folder(folder, trial)
            if not (path / TRIAL).exists():
                facts = {"objective": self.objective.name, "direction": self.objective.direction, "ranks": self.ranks}
                write_trial(path, trial=trial, parameters=point, status="waiting", value=None, **facts)

    def _write_endings(self, folder: Path, queue: TrialQueue) -> None:
        """Write the endings that a killed process had stored, but not yet written into the trials' folders."""
        for trial, attempt in queue.newest().items():
            path = trial_folder(folder, trial)
            ending = attempt.ending
            if ending is not None and (read_json(path / TRIAL) or {}).get("status") != ending.status:
                end_attempt(path, attempt.attempt, ending.status, ending.value, ending.why)

    def _work(self, folder: Path, queue: TrialQueue, url: str, places: Sequence[Mapping[str, str]], say: Say) -> None:
        one = Sweep(
            folder,
            self.job,
            self.space,
            self.objective,
            self.ranks,
            self.seed,
            lambda trial: make_sampler(self._sampler, self.seed, trial),
            self._pruner,
            self.time_limit_s,
            self.beat_s,
        )
        worker = SweepWorker(one, queue, places[: self.space.trials], say)  # no more of them can run at once
        with stopped_by_signals(worker, say), failures_explained(url):
            worker.run()
        if worker.stopped is not None:
            say(f"The sweep was stopped by {worker.stopped}. Start it again to go on.")


def study_name(folder: Path) -> str:
    """The name of a sweep's study in its storage."""
    return folder.absolute().name


@contextmanager
def stopped_by_signals(worker: SweepWorker, say: Say) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 stop the worker while this is open."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if worker.stopped is None:
            say(f"{name}: running trials save a checkpoint and stop. Once more kills them.")
        worker.stop(name)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_failed(one: TrialResult) -> bool:
    """Whether a trial ended without what it was for."""
    return one.status not in (*GOOD, "waiting", "running")


def say_results(results: Sequence[TrialResult], folder: Path, say: Say) -> None:
    """Print what became of the trials."""
    counts: dict[str, int] = {}
    for one in results:
        counts[one.status] = counts.get(one.status, 0) + 1
    many = "1 trial" if len(results) == 1 else f"{len(results)} trials"
    say(f"{many}: {', '.join(f'{number} {status}' for status, number in counts.items())}")
    for one in filter(has_failed, results):
        say(f"  Trial {one.trial} {one.status}: {shortened(one.why or 'see its output')} ({one.folder})")
    sweep = read_json(folder / SWEEP) or {}
    valued = [one for one in results if one.status == "done" and one.value is not None]
    if valued and sweep.get("objective"):
        turn = -1 if sweep.get("direction") == "maximize" else 1
        best = min(valued, key=lambda one: turn * (one.value or 0.0))
        parameters = ", ".join(f"{name}={plainly(value)}" for name, value in best.parameters.items())
        say(f"Best: trial {best.trial} ({parameters}), {sweep['objective']} {best.value:.6g} ({best.folder})")
    if any(map(has_failed, results)):
        say(f"Run them again: python -m ddp_loop sweep again {folder}")


def results_of(folder: Path, queue: TrialQueue) -> list[TrialResult]:
    """The trials of a sweep in their order."""
    return [
        TrialResult(
            one.trial,
            one.parameters,
            one.ending.status if one.ending is not None else "running" if one.state == "running" else "waiting",
            None if one.ending is None else one.ending.value,
            None if one.ending is None else one.ending.why,
            trial_folder(folder, one.trial),
        )
        for one in queue.newest().values()
    ]


# -- Optuna's ----------------------------------------------------------------------------------------------


def make_sampler(given: str | BaseSampler | None, seed: int, trial: int) -> BaseSampler:
    """The sampler of a trial. Its draws depend on the seed, the trial's number and the trials that ended before."""
    from optuna.samplers import BaseSampler, RandomSampler, TPESampler

    if isinstance(given, BaseSampler):
        return given
    key = stream_key(seed, trial) & 0xFFFFFFFF
    if given == "tpe":
        return TPESampler(seed=key, constant_liar=True)
    return RandomSampler(seed=key) if given in (None, *SAMPLERS) else make_named("sampler", given, SAMPLERS, key)


def make_pruner(given: str | BasePruner | None) -> BasePruner | None:
    """A pruner by its name.

    Raises:
        ValueError: there is none of this name.
    """
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner

    if given is None or isinstance(given, BasePruner):
        return given
    if given == "median":
        return MedianPruner(n_startup_trials=FIRST)
    if given == "halving":
        return SuccessiveHalvingPruner()
    if given == "hyperband":
        return HyperbandPruner()
    made: BasePruner = make_named("pruner", str(given), PRUNERS)
    return made
