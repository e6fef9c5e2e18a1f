"""The trials of a sweep in an Optuna storage, where any number of workers take them, each trial once.

[Note: Attempts] A trial of a sweep is one or more of Optuna's trials, its attempts: the first, one more each time its
worker died, and one more when it shall run again. Its state is its newest attempt's. An attempt that failed
without an ending was interrupted. Two workers may notice a dead one at the same time, and both add an attempt of the
same number; then the one that Optuna numbered first counts, and whoever takes another one withdraws it. That is
decided after the attempt was taken, when both are in the storage, so no trial runs twice.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, OptunaError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from ddp_loop.sweeps.folders import Ending
from ddp_loop.sweeps.jobs import Point
from ddp_loop.sweeps.plan import SamplerOf, Space
from ddp_loop.sweeps.storage import Patience, StorageUnreachable, open_storage, silent

TRIAL = "trial"
ATTEMPT = "attempt"
WORKER = "worker"
ENDING = "ending"
WITHDRAWN = "withdrawn"
FIXED = "parameters"
REQUEST = "request"  # of an attempt: which request to run again added it
READY = "ready"  # of the study: all its trials are in the storage
State = Literal["waiting", "running", "interrupted", "ended"]


@dataclass(frozen=True)
class Attempt:
    """An attempt at a trial, as the storage has it."""

    trial: int
    attempt: int
    state: State
    worker: str | None
    ending: Ending | None
    parameters: Point
    stored: FrozenTrial


@dataclass(frozen=True)
class Claim:
    """An attempt that this worker has taken, and its parameters."""

    trial: int
    attempt: int
    parameters: Point
    handle: Trial
    key: int  # Optuna's id of it in the storage
    reported: set[int]  # the updates whose values the pruner has


class TrialQueue:
    """A sweep's trials in its storage. Several threads may use it.

    Args:
        url: of the storage, in SQLAlchemy's form.
        name: of the study.
        is_own: whether the storage has no other study, so that its one counts by any name: a folder can be renamed.
        beat_s: seconds between two heartbeats of a running attempt.
        grace_s: seconds without one after which an attempt is interrupted.
        direction: "minimize" or "maximize"; creates the study if it is missing. None demands that it is there.

    Attributes:
        url: of the storage.
        patience: how long failures of the storage are waited out.

    Raises:
        StorageUnreachable: the storage cannot be opened, its driver is missing, or it has no such study.
    """

    def __init__(
        self, url: str, name: str, *, beat_s: int, grace_s: int, direction: str | None = None, is_own: bool = False
    ) -> None:
        self.url = url
        self._grace_s = grace_s
        self._turn = threading.RLock()
        self._stale: list[int] = []  # attempts without heartbeats that this process has just settled
        self.patience = Patience(url)
        self._backend = open_storage(
            url, beat_s, grace_s, lambda study, one: self._stale.append(one._trial_id), self.patience
        )
        self._storage = optuna.storages.get_storage(self._backend)  # reads trials that have ended only once
        try:
            names = optuna.get_all_study_names(self._storage) if is_own else []
            self._name = name if name in names or not names else names[0]
            if direction is not None:
                with suppress(DuplicatedStudyError), silent():
                    self._storage.create_new_study([StudyDirection[direction.upper()]], self._name)
            try:
                self._study_id = self._storage.get_study_id_from_name(self._name)
            except KeyError:
                raise StorageUnreachable(
                    f"The storage has no sweep named {self._name!r}. Start it there first."
                ) from None
            self.study = self._load()
        except BaseException:
            self.close()
            raise
        self._mine: dict[int, Claim] = {}  # by Optuna's id

    def _load(self, sampler: BaseSampler | None = None) -> optuna.Study:
        return optuna.load_study(study_name=self._name, storage=self._storage, sampler=sampler)

    # -- what the study is ---------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """What `describe` stored."""
        return dict(self._storage.get_study_user_attrs(self._study_id))

    @property
    def is_ready(self) -> bool:
        """Whether all trials of the sweep are in the storage."""
        return READY in self.facts

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Store facts of the sweep as JSON beside its trials."""
        for name, value in facts.items():
            self._storage.set_study_user_attr(self._study_id, name, value)

    def add_trials(self, space: Space) -> None:
        """Add the space's trials that the storage does not have yet. One process may call this at a time."""
        known = self.newest()
        for trial in range(space.trials):
            if trial not in known:
                fixed = {} if space.points is None else {FIXED: space.points[trial]}
                self._add(trial, 1, fixed.get(FIXED, {}), space.distributions if fixed else {}, fixed)
        self.describe({READY: True})

    def _add(
        self,
        trial: int,
        attempt: int,
        parameters: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
        values: Mapping[int, float] | None = None,
    ) -> None:
        self._storage.create_new_trial(
            self._study_id,
            optuna.create_trial(
                state=TrialState.WAITING,
                params=dict(parameters),
                distributions=dict(distributions),
                user_attrs={TRIAL: trial, ATTEMPT: attempt, **attributes},
                intermediate_values=dict(values or {}),
            ),
        )

    # -- the attempts --------------------------------------------------------------------------------------

    def _frozen(self, *states: TrialState) -> list[FrozenTrial]:
        found = self._storage.get_all_trials(self._study_id, deepcopy=False, states=states or None)
        return [one for one in found if TRIAL in one.user_attrs]  # others were added by hand

    def newest(self) -> dict[int, Attempt]:
        """Return each trial's newest attempt, in the order of the trials. See [Note: Attempts]."""
        found: dict[int, Attempt] = {}
        attempts = map(_attempt_of, self._frozen())
        for attempt in sorted(attempts, key=lambda one: (one.trial, one.attempt, -one.stored.number)):
            found[attempt.trial] = attempt
        return found

    def is_over(self) -> bool:
        """Whether all trials have ended."""
        return all(one.state == "ended" for one in self.newest().values())

    def claim(self, worker: str, space: Space, sampler: SamplerOf, last: Collection[int] = ()) -> Claim | None:
        """Take the first waiting attempt, and choose its parameters; None if none waits.

        Args:
            worker: the name of this worker.
            space: of the sweep.
            sampler: returns the sampler for a trial of this number.
            last: trials that are taken only if no other one waits.
        """
        with self._turn:
            waits = self._frozen(TrialState.WAITING)
            for waiting in sorted(waits, key=lambda one: (one.user_attrs[TRIAL] in last, one.user_attrs[TRIAL])):
                key = waiting._trial_id
                try:
                    if not self._storage.set_trial_state_values(key, TrialState.RUNNING):
                        continue
                    self._backend.record_heartbeat(key)
                    self._storage.set_trial_user_attr(key, WORKER, worker)  # not before: another may have taken it
                    if self._withdraws(waiting):
                        continue
                except UpdateFinishedTrialError:
                    continue
                taken = _attempt_of(waiting)
                handle = Trial(self._load(sampler(taken.trial)), key)
                parameters = taken.parameters
                if not parameters:
                    for name, one in space.distributions.items():  # some samplers return numpy's numbers
                        parameters[name] = one.to_external_repr(one.to_internal_repr(handle._suggest(name, one)))
                    self._storage.set_trial_user_attr(key, FIXED, parameters)
                reported = set(waiting.intermediate_values)
                claim = Claim(taken.trial, taken.attempt, parameters, handle, key, reported)
                self._mine[key] = claim
                return claim
            return None

    def _withdraws(self, taken: FrozenTrial) -> bool:
        """Withdraw the attempt if another one of its number was added before it. See [Note: Attempts]."""
        if self.newest()[taken.user_attrs[TRIAL]].stored.number == taken.number:
            return False
        self._storage.set_trial_user_attr(taken._trial_id, WITHDRAWN, True)
        self._storage.set_trial_state_values(taken._trial_id, TrialState.FAIL)
        return True

    def should_prune(self, claim: Claim, pruner: BasePruner, step: int, value: float) -> bool:
        """Report a value of the objective after a step, and return whether the attempt is not worth going on."""
        with self._turn:
            if step in claim.reported or claim.key not in self._mine:  # before its worker died; it has just ended
                return False
            claim.reported.add(step)
            try:
                claim.handle.report(value, step)
            except UpdateFinishedTrialError:  # it was given to another worker
                return False
            claim.handle.study.pruner = pruner
            return bool(claim.handle.should_prune())

    def holds(self, claim: Claim) -> bool:
        """Whether an attempt is still this worker's."""
        with self._turn:
            return self._storage.get_trial(claim.key).state == TrialState.RUNNING

    def end(self, claim: Claim, ending: Ending | None, record: Callable[[], None] = lambda: None) -> bool:
        """Store how an attempt ended; None gives it back. Returns False if it was given to another worker meanwhile.

        Args:
            record: writes the ending into the trial's folder, before anyone else can take the trial.
        """
        with self._turn:
            self._mine.pop(claim.key, None)
            try:
                if ending is not None:
                    self._storage.set_trial_user_attr(claim.key, ENDING, vars(ending))
                elif not self.holds(claim):
                    return False
            except UpdateFinishedTrialError:
                return False
            record()
            with suppress(UpdateFinishedTrialError):  # another worker has just settled it, by its ending
                self._settle(claim.key, ending)
            if ending is None:
                self._add_missing()
            return True

    def _settle(self, key: int, ending: Ending | None) -> None:
        """Give an attempt its last state. Its ending is in the storage before, so a kill in between loses nothing."""
        status = None if ending is None else ending.status
        values = None if ending is None or ending.value is None else [ending.value]
        if status == "done" and values is not None:
            self._storage.set_trial_state_values(key, TrialState.COMPLETE, values)
        elif status == "pruned":
            self._storage.set_trial_state_values(key, TrialState.PRUNED, values)
        else:
            self._storage.set_trial_state_values(key, TrialState.FAIL)

    # -- dead workers --------------------------------------------------------------------------------------

    def beat(self) -> list[Claim]:
        """Record a heartbeat of each attempt of this worker; returns those that were given to another worker."""
        file = self._backend.engine.url.database
        if self.url.startswith("sqlite") and file and not Path(file).exists():  # open connections would go on
            raise StorageUnreachable(
                f"The sweep's storage {file} was removed while the sweep ran. Running trials were stopped with "
                "checkpoints. Put it back, or start the sweep again: each trial then begins at its newest checkpoint."
            )
        with self._turn:
            running = {one._trial_id for one in self._frozen(TrialState.RUNNING)}
            self._beat_mine()
            return [claim for key, claim in self._mine.items() if key not in running]

    def _beat_mine(self) -> None:
        for key in self._mine:
            with suppress(OptunaError):
                self._backend.record_heartbeat(key)

    def take_over(
        self,
        worker: str,
        is_dead: Callable[[str], bool | None],
        record: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        """Put the trials of dead workers in line again.

        Args:
            worker: the name of this worker.
            is_dead: whether the worker of this name is known to be dead; None if only its heartbeats can tell.
            record: writes into the trial's folder how an attempt of a dead worker ended, before it is in line again.
        """
        with self._turn:
            self._beat_mine()  # this process may have been stopped for a while
            # After a failure of the storage the heartbeats of all workers are old, until each has sent one.
            is_steady = time.monotonic() - self.patience.failed_at > self._grace_s
            latest = datetime.now() - timedelta(seconds=self._grace_s)
            for one in self._frozen(TrialState.RUNNING):
                attempt = _attempt_of(one)
                if attempt.worker is None:
                    dead = is_steady and one.datetime_start is not None and one.datetime_start < latest
                elif attempt.worker == worker:
                    dead = one._trial_id not in self._mine
                else:
                    dead = is_dead(attempt.worker) is True
                if dead:
                    with suppress(UpdateFinishedTrialError):
                        self._settle(one._trial_id, attempt.ending)
                        record(self._attempt(one._trial_id))
            self._stale.clear()
            if is_steady:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ExperimentalWarning)
                    optuna.storages.fail_stale_trials(self.study)
            for key in self._stale:
                record(self._attempt(key))
            self._add_missing()

    def _attempt(self, key: int) -> Attempt:
        return _attempt_of(self._storage.get_trial(key))

    def _add_missing(self) -> None:
        """Add an attempt for each trial whose newest one was interrupted."""
        for attempt in self.newest().values():
            if attempt.state == "interrupted":
                self._add_again(attempt.stored)

    def again(self, trials: Iterable[int], request: str, record: Callable[[int], None] = lambda trial: None) -> None:
        """Put ended trials in line again, once for each request.

        Args:
            request: its name. One that is read again, since its reader was killed, adds no attempt twice.
            record: writes that into a trial's folder, before the trial can be taken.
        """
        newest = self.newest()
        added = {one.user_attrs[TRIAL] for one in self._frozen() if one.user_attrs.get(REQUEST) == request}
        for trial in sorted(newest.keys() & set(trials) - added):
            if newest[trial].state == "ended":
                record(trial)
                self._add_again(newest[trial].stored, {REQUEST: request})

    def _add_again(self, one: FrozenTrial, facts: Mapping[str, Any] | None = None) -> None:
        known = one.user_attrs
        fixed = {FIXED: known[FIXED]} if FIXED in known else {}
        attributes = {**(facts or {}), **fixed}
        self._add(known[TRIAL], known[ATTEMPT] + 1, one.params, one.distributions, attributes, one.intermediate_values)

    def close(self) -> None:
        """Close the connections to the storage."""
        self._backend.remove_session()
        self._backend.engine.dispose()


def _attempt_of(one: FrozenTrial) -> Attempt:
    known = one.user_attrs
    ending = Ending(**known[ENDING]) if ENDING in known else None
    unended: dict[str, State] = {"WAITING": "waiting", "RUNNING": "running"}
    state = unended.get(one.state.name, "interrupted" if ending is None else "ended")
    return Attempt(known[TRIAL], known[ATTEMPT], state, known.get(WORKER), ending, dict(known.get(FIXED) or {}), one)
