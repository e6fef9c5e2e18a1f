"""A sweep before it runs: its arguments, checked, and what Optuna makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_loop.determinism import stream_key
from ddp_loop.sweeps.jobs import Job
from ddp_loop.sweeps.space import SAMPLERS, Space, make_named, make_space, try_out
from ddp_loop.sweeps.storage import require_optuna
from ddp_loop.sweeps.trial_folder import Objective
from ddp_loop.sweeps.trial_queue import SamplerOf

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

PRUNERS = {"median": "MedianPruner", "halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner"}
FIRST = 4  # trials that end before the median pruner compares
DIRECTIONS = ("minimize", "maximize")
USUAL: dict[str, Any] = {
    "sampler": None,
    "trials": None,
    "pruner": None,
    "objective": None,
    "direction": "minimize",
    "report_every": 50,
    "ranks": 1,
    "time_limit_s": None,
    "seed": 0,
    "heartbeat_s": 5,
}


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs.

    Attributes:
        job, space, objective: its trials, over which parameters, compared by what.
        sampler: returns the sampler for the trial of a number.
        pruner: None lets every trial end.
        facts: the arguments of `sweep` by name, as JSON.
    """

    job: Job
    space: Space
    objective: Objective
    sampler: SamplerOf
    pruner: BasePruner | None
    facts: dict[str, Any]

    @property
    def ranks(self) -> int:
        """The ranks of each trial."""
        return int(self.facts["ranks"])


def make_plan(job: Job, space: Any, given: Mapping[str, Any]) -> SweepPlan:
    """Check the arguments of a sweep; nothing is written.

    Args:
        job, space: what runs, over which parameters.
        given: the other arguments of `sweep` by name; those that are missing have their usual values.

    Raises:
        ImportError: optuna is missing.
        ValueError: an argument does not fit.
    """
    require_optuna()
    facts = {name: given.get(name, usual) for name, usual in USUAL.items()}
    if facts["direction"] not in DIRECTIONS:
        raise ValueError(f"direction must be {' or '.join(DIRECTIONS)}. Got {facts['direction']!r}.")
    for name in ("ranks", "report_every", "heartbeat_s"):
        if type(facts[name]) is not int or facts[name] < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more. Got {facts[name]!r}.")
    limit_s = facts["time_limit_s"]
    if limit_s is not None and not limit_s > 0:
        raise ValueError(f"time_limit_s must be positive, or None for no limit. Got {limit_s!r}.")
    sampler = facts["sampler"]
    points = make_space(space, sampler, facts["trials"], facts["seed"])
    job.check(list(points.distributions))
    sampler_of = partial(make_sampler, sampler, facts["seed"])
    pruner = make_pruner(facts["pruner"])
    if sampler not in (None, *SAMPLERS) or facts["pruner"] not in (None, *PRUNERS):
        try_out(sampler_of(0), pruner, points)
    objective = Objective.of(facts)
    facts |= {"job": job.facts, "space": points.facts, "sampler": points.sampler, "trials": points.trials}
    if not isinstance(facts["pruner"], str | None):
        facts["pruner"] = type(pruner).__name__
    return SweepPlan(job, points, objective, sampler_of, pruner, facts)


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
    from optuna.pruners import BasePruner, MedianPruner

    if given is None or isinstance(given, BasePruner):
        return given
    if given == "median":
        return MedianPruner(n_startup_trials=FIRST)
    made: BasePruner = make_named("pruner", PRUNERS.get(str(given), str(given)), list(PRUNERS))
    return made
