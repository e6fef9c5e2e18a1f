"""`sweep`: many networks, each an ordinary run, on this machine's GPUs or cores; and how its trials ended."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from ddp_loop.checkpoint import forget_stop, read_json
from ddp_loop.elastic import program_name
from ddp_loop.reporting import TRIAL, has_workers, shown_name, trial_folder
from ddp_loop.sweeps.folders import STUDY, Ending, Objective, begun_folder, end_attempt, write_trial
from ddp_loop.sweeps.jobs import FunctionJob, Point
from ddp_loop.sweeps.plan import SweepPlan, make_plan
from ddp_loop.sweeps.running import Say, SweepWorker, in_words, places_of, shortened
from ddp_loop.sweeps.storage import check_reachable, failures_explained, shown_url, sqlite_url

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from ddp_loop.sweeps.trial_queue import TrialQueue

GRACE = 3  # heartbeats that may be missing
GOOD = ("done", "pruned")  # how a trial ends that need not run again
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
        objective: what the value is of, such as "loss" or "evaluation.loss".
    """

    trial: int
    parameters: Point
    status: str
    value: float | None
    why: str | None
    folder: Path
    objective: str | None = None


def sweep(
    train: Callable[..., object],
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    keywords: Mapping[str, Any] | None = None,
    trials: int | None = None,
    sampler: str | BaseSampler | None = None,
    pruner: str | BasePruner | None = None,
    objective: str | None = None,
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
            The default is the evaluated loss of a trial that evaluates one, and the training loss of the others.
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
    given = locals()  # make_plan takes from it what it checks, by name
    plan = make_plan(FunctionJob(train, dict(keywords or {})), space, given)
    return run_sweep(plan, Path(folder), slots, storage, _say if progress else lambda line: None)


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # one write: several threads print


def run_sweep(plan: SweepPlan, folder: Path, slots: int | None, storage: str | None, say: Say) -> list[TrialResult]:
    """Begin a sweep in a folder, or go on with it, and run its trials here.

    Raises:
        OSError, ValueError: as in `sweep`.
    """
    places = places_of(slots, plan.ranks)
    with begun(plan, folder, storage) as (resumed, queue):
        return _work(resumed, folder.absolute(), queue, places, say)


@contextmanager
def begun(plan: SweepPlan, folder: Path, storage: str | None) -> Iterator[tuple[SweepPlan, TrialQueue]]:
    """Begin a sweep in a folder, or go on with it; the folder is locked meanwhile.

    Raises:
        OSError, ValueError: as in `sweep`.
    """
    folder = folder.absolute()
    url = storage or sqlite_url(folder / STUDY)
    if storage is not None:
        check_reachable(url)
    with begun_folder(folder, {**plan.facts, "storage": shown_url(url)}) as facts:
        plan = replace(plan, objective=plan.objective.of(facts))  # of a version without the usual one
        with closing(_open(plan, url, folder, plan.objective.direction)) as queue:
            known = queue.facts
            if known.get("id", facts["id"]) != facts["id"]:
                raise ValueError(
                    f"The storage has another sweep named {folder.name!r}, of {known.get('folder')}. Choose another "
                    "folder."
                )
            queue.describe({"id": facts["id"], "folder": str(folder), "sweep": facts})
            queue.add_trials(plan.space)
            _write_waiting(plan, folder)
            _write_endings(folder, queue)
            yield plan, queue


def help_sweep(plan: SweepPlan, folder: Path, slots: int | None, url: str, say: Say) -> list[TrialResult]:
    """Help to run the trials of a sweep that was begun elsewhere.

    Raises:
        ValueError: the storage cannot be reached, or does not have the sweep.
    """
    places = places_of(slots, plan.ranks)
    with closing(_open(plan, url, folder)) as queue:
        if not has_workers(folder):
            forget_stop(folder)
        if not queue.is_ready:
            raise ValueError(f"The sweep in {folder} was not begun. Start it first, then its workers.")
        return _work(plan, folder, queue, places, say)


def _open(plan: SweepPlan, url: str, folder: Path, direction: str | None = None) -> TrialQueue:
    from ddp_loop.sweeps.trial_queue import TrialQueue

    beat_s = plan.facts["heartbeat_s"]
    is_own = url == sqlite_url(folder / STUDY)
    return TrialQueue(url, folder.name, is_own=is_own, beat_s=beat_s, grace_s=GRACE * beat_s, direction=direction)


def _write_waiting(plan: SweepPlan, folder: Path) -> None:
    """Write what is known of trials that have not begun, for the tables."""
    for trial, point in enumerate(plan.space.points or ()):
        path = trial_folder(folder, trial)
        if not (path / TRIAL).exists():
            facts = {"objective": plan.objective.name, "direction": plan.objective.direction, "ranks": plan.ranks}
            write_trial(path, trial=trial, parameters=point, status="waiting", value=None, **facts)


def _write_endings(folder: Path, queue: TrialQueue) -> None:
    """Write the endings that a killed process had stored, but not yet written into the trials' folders."""
    for trial, attempt in queue.newest().items():
        path = trial_folder(folder, trial)
        ending = attempt.ending
        if ending is not None and read_json(path / TRIAL).get("status") != ending.status:
            end_attempt(path, attempt.attempt, ending)


def _work(
    plan: SweepPlan, folder: Path, queue: TrialQueue, places: Sequence[Mapping[str, str]], say: Say
) -> list[TrialResult]:
    worker = SweepWorker(plan, folder, queue, places[: plan.space.trials], say)  # no more of them can run at once
    with stopped_by_signals(worker, say), failures_explained(queue.url):
        worker.run()
    if worker.stopped is not None:
        say(f"The sweep was stopped by {worker.stopped}. Start it again to go on.")
    results = results_of(folder, queue)
    say_results(results, folder, plan.objective, say)
    return results


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


def say_results(results: Sequence[TrialResult], folder: Path, objective: Objective, say: Say) -> None:
    """Print what became of the trials, and the best of them."""
    many = "1 trial" if len(results) == 1 else f"{len(results)} trials"
    counts = Counter(one.status for one in results)
    say(f"{many}: {', '.join(f'{number} {status}' for status, number in counts.items())}")
    failed = [one for one in results if has_failed(one)]
    for one in failed:
        say(f"  Trial {one.trial} {one.status}: {shortened(one.why or 'see its output')} ({one.folder})")
    valued = [one for one in results if one.status == "done" and one.value is not None]
    if valued:
        best = objective.best(valued, key=lambda one: one.value)
        name = shown_name(best.objective or objective.name)
        say(f"Best: trial {best.trial} ({in_words(best.parameters)}), {name} {best.value:.6g} ({best.folder})")
    if failed:
        say(f"Run them again: {program_name()} sweep again {folder}")


def results_of(folder: Path, queue: TrialQueue) -> list[TrialResult]:
    """The trials of a sweep in their order."""
    found = []
    for one in queue.newest().values():
        ending = one.ending or Ending("running" if one.state == "running" else "waiting")
        found.append(TrialResult(one.trial, one.parameters, **vars(ending), folder=trial_folder(folder, one.trial)))
    return found
