"""A sweep before it runs: its space, its arguments, checked, and what Optuna makes of them."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ddp_loop.determinism import check_count, stream_key
from ddp_loop.reporting import EVALUATION
from ddp_loop.sweeps.folders import Objective
from ddp_loop.sweeps.jobs import Job, Point, Scalar, nearest
from ddp_loop.sweeps.storage import require_optuna, silent

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

SAMPLERS = ("grid", "random", "tpe")
OBJECT = "an object of "  # a sampler that only the process that made it can use
_TRIED = 12  # trials, and reports of each: with 10 ended ones all of Optuna's samplers do their work
_RANGE = ("low", "high", "log", "step")
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
SamplerOf = Callable[[int], "BaseSampler"]


@dataclass(frozen=True)
class Space:
    """The parameters of a sweep's trials.

    Attributes:
        points: the parameters of every trial, in the order of the trials; None where a sampler chooses them.
        trials: their number.
        distributions: where each parameter's values come from, as Optuna describes them, in the order given.
        sampler: "list", "grid", "random", "tpe", the name of one of Optuna's, or "an object of CLASS".
        facts: the space as JSON.
    """

    points: list[Point] | None
    trials: int
    distributions: dict[str, BaseDistribution]
    sampler: str
    facts: object


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
        facts[name] = check_count(name, facts[name])
    limit_s = facts["time_limit_s"]
    if limit_s is not None and not (isinstance(limit_s, int | float) and limit_s > 0):
        raise ValueError(f"time_limit_s must be positive, or None for no limit. Got {limit_s!r}.")
    facts["seed"] = check_count("seed", facts["seed"], None)
    name = facts["objective"]
    if not isinstance(name, str | None):
        raise ValueError(f'objective must be a text, such as "loss". Got {name!r}.')
    if name is not None and name.startswith("eval "):  # as tables show it
        facts["objective"] = EVALUATION + name.removeprefix("eval ")
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
    return RandomSampler(seed=key) if given in (None, *SAMPLERS) else make_named("sampler", given, key)


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
    made: BasePruner = make_named("pruner", PRUNERS.get(str(given), str(given)))
    return made


def make_named(kind: Literal["sampler", "pruner"], name: str, seed: int = 0) -> Any:
    """Make Optuna's sampler or pruner of a name.

    Args:
        kind: "sampler" or "pruner".
        name: of the class, such as "CmaEsSampler".
        seed: of a class that takes one.

    Raises:
        ValueError: there is none of this name, it needs arguments, or its package is missing.
    """
    import optuna

    module, own = (optuna.samplers, SAMPLERS) if kind == "sampler" else (optuna.pruners, tuple(PRUNERS))
    known = [one for one in module.__all__ if one.endswith(kind.title()) and not one.startswith("Base")]
    if name not in known:
        found = nearest(str(name), (*own, *known))
        raise ValueError(f"{kind} must be one of {', '.join(own)} or one of Optuna's. Got {name!r}. {found}".rstrip())
    made = getattr(module, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return made(seed=seed) if "seed" in inspect.signature(made).parameters else made()
    except (TypeError, ImportError) as error:
        raise ValueError(f"Optuna's {name} cannot be made by its name alone ({error}). Pass an object.") from error


def try_out(sampler: BaseSampler, pruner: BasePruner | None, space: Space) -> None:
    """Raise ValueError unless a sampler and a pruner work on a study in memory.

    Optuna imports the packages that some of them need only when it uses them.

    Args:
        sampler, pruner: copies of them are used.
        space: whose points they choose.
    """
    import optuna

    with silent(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=copy.deepcopy(pruner))
        try:
            for number in range(_TRIED + 1):
                if number == _TRIED:
                    study.sampler = copy.deepcopy(sampler)
                trial = study.ask(space.distributions)
                for step in range(_TRIED):
                    trial.report(float(number + step), step)
                if number == _TRIED:
                    trial.should_prune()
                else:  # a sweep does not call after_trial, which may want to stop the study
                    study.tell(trial, float(number))
        except ImportError as error:
            raise ValueError(
                f"The sampler or the pruner needs the package {error.name}. Run pip install {error.name}, or choose "
                "another one."
            ) from error


def make_space(
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    sampler: str | BaseSampler | None,
    trials: int | None,
    seed: int,
) -> Space:
    """Read a space.

    Args:
        space: a list of points, or of each parameter its values, its range {"low", "high", "log", "step"}, or one of
            Optuna's distributions.
        sampler: "grid", "random", "tpe", or one of Optuna's or its name; None takes the list or the grid.
        trials: the number of trials that are drawn; a list and a grid have their own.
        seed: of random draws; the draws of a trial depend on it and on the trial's number alone.

    Raises:
        ImportError: optuna is missing.
        ValueError: the space is empty, or not one of these.
    """
    if isinstance(sampler, str) and sampler not in SAMPLERS:
        make_named("sampler", sampler)
    if isinstance(space, Mapping):
        return _from_parameters(space, sampler, trials, seed)
    if isinstance(space, str) or not isinstance(space, Sequence):
        raise ValueError(f"The space must be a dict of parameters or a list of points. Got {space!r}.")
    if sampler is not None or trials is not None:
        raise ValueError(
            f"A list has its own {len(space)} trials. Got sampler={sampler!r} and trials={trials}. Leave them out, or "
            "give a dict of parameters."
        )
    return _from_points(space)


def _from_points(points: Sequence[Mapping[str, Any]]) -> Space:
    if not points:
        raise ValueError("The list of points is empty. Give at least one point, a dict of parameters.")
    for point in points:
        if not isinstance(point, Mapping) or not point:
            raise ValueError(f"A point must be a dict of parameters. Got {point!r}.")
        if set(point) != set(points[0]):
            raise ValueError(
                f"All points must have the same parameters. The first has {', '.join(points[0])}, another one "
                f"{', '.join(point)}."
            )
    listed = [{name: _scalar(name, point[name]) for name in points[0]} for point in points]
    distributions = {name: _categorical([point[name] for point in listed]) for name in _named(points[0])}
    return Space(listed, len(listed), distributions, "list", listed)


def _from_parameters(
    space: Mapping[str, Any], sampler: str | BaseSampler | None, trials: int | None, seed: int
) -> Space:
    if not space:
        raise ValueError("The space has no parameter. Give at least one, such as {'rate': [0.1, 0.01]}.")
    choices: dict[str, list[Scalar]] = {}
    for name, given in space.items():
        values = getattr(given, "choices", given)  # of Optuna's CategoricalDistribution
        if isinstance(values, Iterable) and not isinstance(values, Mapping | str):
            choices[name] = [_scalar(name, value) for value in values]
            if not choices[name]:
                raise ValueError(f"The grid is empty: {name} has no value. Give it at least one.")
    distributions = {
        name: _categorical(choices[name]) if name in choices else _distribution(name, space[name])
        for name in _named(space)
    }
    facts = {
        name: choices[name] if name in choices else {part: getattr(one, part) for part in _RANGE}
        for name, one in distributions.items()
    }
    if sampler in (None, "grid"):
        if len(choices) < len(space):
            ranges = ", ".join(name for name in space if name not in choices)
            raise ValueError(
                f"A grid needs the values of each parameter. {ranges} has a range. List its values, or choose "
                'sampler="random" or "tpe" with trials=.'
            )
        points = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
        if trials is not None:
            raise ValueError(f"This grid has {len(points)} trials. Got trials={trials}. Leave trials= out.")
        return Space(points, len(points), distributions, "grid", facts)
    if type(trials) is not int or trials < 1:
        raise ValueError(f"trials must be the number of trials to draw, 1 or more. Got {trials!r}.")
    if sampler == "random":
        draws = [_draw(distributions, random.Random(stream_key(seed, number))) for number in range(trials)]
        return Space(draws, trials, distributions, "random", facts)
    kind = sampler if isinstance(sampler, str) else f"{OBJECT}{type(sampler).__name__}"
    return Space(None, trials, distributions, kind, facts)


def _named(names: Iterable[object]) -> list[str]:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"A parameter's name must be a Python identifier, such as learning_rate. Got {name!r}.")
    return [str(name) for name in names]


def _scalar(name: str, value: Any) -> Scalar:
    """A value that a trial can have, numpy's and torch's numbers as Python's."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(
            f"A value of {name} must be a number, a text, a bool or None. Got {value!r}. Give a name, and look it up "
            "in the job."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"A value of {name} must be finite. Got {value}.")
    return value


def _categorical(values: Sequence[Scalar]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    different = {(type(value), value): value for value in values}
    return CategoricalDistribution(list(different.values()))


def _distribution(name: str, given: object) -> BaseDistribution:
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

    if isinstance(given, BaseDistribution):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{name} must be a list of values, a range such as {{'low': 0.001, 'high': 0.1, 'log': True}}, or one of "
            f"Optuna's distributions. Got {given!r}."
        )
    for key in given:
        if key not in _RANGE:
            raise ValueError(
                f"A range has {', '.join(_RANGE)}. {name} has {key!r}. {nearest(str(key), _RANGE)}".rstrip()
            )
    if not {"low", "high"} <= set(given):
        raise ValueError(f"A range needs low and high. {name} has {', '.join(map(str, given)) or 'none'}.")
    low = given["low"]
    high = given["high"]
    log = bool(given.get("log", False))
    step = given.get("step")
    try:
        if all(type(bound) is int for bound in (low, high)) and type(step) in (int, type(None)):
            return IntDistribution(low, high, log, 1 if step is None else step)
        for bound in (float(low), float(high)):
            _scalar(name, bound)
        return FloatDistribution(float(low), float(high), log, step)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The range of {name} is not possible: {error}") from error


def _draw(distributions: Mapping[str, BaseDistribution], numbers: random.Random) -> Point:
    """A point that depends on the state of `numbers` alone."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    point: Point = {}
    for name, distribution in distributions.items():
        if isinstance(distribution, CategoricalDistribution):
            point[name] = numbers.choice(distribution.choices)
            continue
        whole = isinstance(distribution, IntDistribution)
        low, high, log, step = (getattr(distribution, name) for name in _RANGE)
        if log:
            edge = 0.5 if whole else 0.0
            value = math.exp(numbers.uniform(math.log(low - edge), math.log(high + edge)))
            point[name] = min(high, max(low, round(value) if whole else value))
        elif step is not None:
            # the sum is rounded, and the last one may be above `high`, which Optuna refuses
            point[name] = min(high, low + step * numbers.randint(0, round((high - low) / step)))
        else:
            point[name] = numbers.uniform(low, high)
    return point
