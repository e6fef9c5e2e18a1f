"""The distance between two runs' values, and the first step, stage and tensor in which they differ.

[Note: Units] A difference is relative to the largest value of its tensor; for rows and numbers of the state, to the
largest value in all steps. A tensor may consist of rounding errors only, so a hundredth of the largest value of its
companions is used if that is more. The companions of a gradient are all gradients. An optimizer's state of a
parameter has its states of the same name for the other parameters. A buffer has the buffers of the same module
and shape. For parameters, the median of their largest values is used. The tolerance is the rounding of a sum after a
few steps: 1e-9 in float64, 1e-4 in float32, 2e-2 in narrower types, 0 for integers. So an error of one percent in a
float32 gradient is 100 tolerances.

[Note: Untouched elements] An element whose gradient was exactly 0 in every fold of both runs (a row of an embedding
that no sample used) got the same update in both. Only a common factor can be rounded there, so the tolerance is 16
units in the last place. A decay by a wrong factor shows in such elements first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from ddp_loop.tracing.trace import MEANING, STAGES, Difference, Trace, Values, check_comparable, differences, read_trace

_SHOWN = 5


def compare_runs(one: Path, other: Path) -> tuple[bool, list[str]]:
    """Compare the traces of two runs, bit by bit, in the steps that both have.

    Args:
        one: the folder of a run with `Loop(run_dir=..., trace=True)`.
        other: the folder of another.

    Returns:
        Whether all bits are the same, and lines of text with the first difference.

    Raises:
        ValueError: a run has no trace, or the runs have different tensors or no common step.
    """
    traces = read_trace(one), read_trace(other)
    check_comparable(*traces)
    found = list(differences(*traces))
    lines = [
        f"{run.folder}: {counted(run.head['ranks'], 'rank')}, {counted(run.head['shards'], 'shard')}, {run.extent}"
        for run in traces
    ]
    alike = all(traces[0].forms[step][1] == traces[1].forms[step][1] for step, _ in found)
    if not alike:
        lines.append("Their mini-batches have different shards, so only values of the whole mini-batch are compared.")
    parting = [difference for _, difference in found if difference is not None]
    if not parting:
        return True, [*lines, f"The same bits in all {len(found)} steps that both have."]
    first = parting[0]
    last = parting[-1].step
    before = [step for step, _ in found if step < first.step]
    if before:
        lines.append(f"The same bits from step {before[0]} to step {before[-1]}.")
    lines.append(describe(first, alike))
    after = [step for step, _ in found if step > last]
    if after:
        lines.append(f"The same bits again from step {after[0]} on.")
    elif last > first.step:
        lines.append(f"They differ to the end, step {last}.")
    return False, lines


def counted(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def describe(difference: Difference, same_shards: bool = True) -> str:
    """A first difference and its meaning, as text."""
    others = ""
    if difference.others:
        shown = ", ".join(f"`{name}`" for name in difference.others[:_SHOWN])
        more = len(difference.others) - _SHOWN
        others = f" (in the same stage also {shown}{f' and {more} more' if more > 0 else ''})"
    if difference.stage == "start":
        when = f"After step {difference.step}, where a run resumed" if difference.step else "Before the first step"
        meaning = "the restored state differs" if difference.step else MEANING["start"]
        return f"{when}: `{difference.name}` differs first{others}: {meaning}."
    verb = "is the first difference, in one run only" if difference.is_missing else "differs first"
    where = f"Step {difference.step}, {difference.stage}: `{difference.name}` {verb}{others}."
    return f"{where}\nEverything before it is the same: {_meaning(difference, same_shards)}."


def _meaning(difference: Difference, same_shards: bool) -> str:
    if difference.is_missing:
        return "one run computes a value that the other does not"
    if difference.stage == "fold" and not same_shards:
        return "the same samples, parameters and buffers gave another result in other shards"
    names = (difference.name, *difference.others)
    if difference.stage == "forward" and not any(name.endswith((", loss", "output 0")) for name in names):
        return "the losses are the same, too, but not the metrics or outputs beside them"
    return MEANING[difference.stage]


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of real dtypes, and complex ones made of them
_NARROW = 2e-2
_FLOOR = 1e-2
_UNTOUCHED = 16.0  # units in the last place
_SMALL = 1e-3  # the least scale of a row
KINDS = {  # of entries, in words
    "row": "the losses and metrics",
    "gradient": "the gradients",
    "parameter": "the parameters",
    "buffer": "the buffers",
    "state": "the optimizer's and other state",
}


@dataclass(frozen=True)
class Mismatch:
    """The difference of a value between two runs.

    Attributes:
        name: of the tensor.
        step, stage: in which it occurs.
        tolerances: the difference in units of the tolerance.
    """

    name: str
    step: int
    stage: str
    tolerances: float = math.inf

    @property
    def place(self) -> tuple[int, int]:
        """The step, and the number of the stage in it."""
        return self.step, STAGES.index(self.stage)


def rounding_of(trace: Trace) -> float:
    """The tolerance of a job's results: the one of its parameters' narrowest dtype."""
    names = [name for _, name in trace.common(trace.numbers[0]) if kind_of(name) == "parameter"]
    forms = [trace.head["tensors"][name.removeprefix("parameter ")][0] for name in names]
    return max((_tolerance_of(getattr(torch, form.removeprefix("torch."))) for form in forms), default=0.0)


def compare_values(
    one: Trace, other: Trace, tolerance: float | None = None
) -> tuple[Mismatch | None, dict[str, Mismatch]]:
    """The worst value in the first step and stage with a difference above the tolerance, and the worst of each kind.

    Args:
        one: a trace with values.
        other: another.
        tolerance: for all values; by default the larger one of a value's dtype and of the parameters' dtypes.
    """
    meter = DifferenceMeter(tolerance or rounding_of(one), tolerance is not None)
    found: list[Mismatch] = []
    for step in one.numbers:
        here = one.values(step)
        there = other.values(step)
        words = one.common(step), other.common(step)
        meter.add(here, there)
        for key in words[0] | words[1]:
            if key in here or key in there:
                tolerances = meter.measure(key[1], here.get(key), there.get(key))
            else:
                tolerances = 0.0 if words[0].get(key) == words[1].get(key) else math.inf
            if tolerances:
                found.append(Mismatch(key[1], step, key[0], tolerances))
    above = [each for each in found if each.tolerances > 1]
    first = min(above, key=lambda each: (*each.place, -each.tolerances), default=None)
    kinds = {kind: [each for each in found if kind_of(each.name) == kind] for kind in KINDS}
    return first, {kind: max(same, key=lambda each: each.tolerances) for kind, same in kinds.items() if same}


def is_close(one: float, other: float, tolerance: float) -> bool:
    """Whether two numbers are equal up to the relative tolerance."""
    is_near = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * _SMALL)
    return is_near or (math.isnan(one) and math.isnan(other))


@dataclass
class DifferenceMeter:
    """Measures the values of one step after another. See [Note: Units] and [Note: Untouched elements].

    Args:
        rounding: the tolerance, or the least one.
        is_given: whether it counts for all values.
    """

    rounding: float
    is_given: bool
    largest: dict[str, float] = field(default_factory=dict)  # by name
    companions: dict[str, float] = field(default_factory=dict)
    untouched: dict[str, torch.Tensor] = field(default_factory=dict)  # by the parameter's name

    def add(self, here: Values, there: Values) -> None:
        """Add the values of a step."""
        for (_, name), tensor in [*here.items(), *there.items()]:
            if not is_whole(tensor):
                self.largest[name] = max(self.largest.get(name, 0.0), largest_of(tensor))
                key = _companions(name, tensor)
                self.companions[key] = max(self.companions.get(key, 0.0), self.largest[name])
        sizes = [largest for name, largest in self.largest.items() if kind_of(name) == "parameter"]
        self.companions["parameter"] = median(sizes) if sizes else 0.0
        for (stage, name), gradient in here.items():
            if kind_of(name) == "gradient" and stage == "fold" and (stage, name) in there:
                owner = name.partition("gradient of ")[2]
                untouched = (gradient == 0) & (there[stage, name] == 0)
                self.untouched[owner] = untouched & self.untouched.get(owner, torch.ones_like(untouched))

    def _tolerance(self, tensor: torch.Tensor) -> float:
        own = _tolerance_of(tensor.dtype)
        return own and (self.rounding if self.is_given else max(self.rounding, own))

    def measure(self, name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> float:
        """The difference of two values in tolerances."""
        if one is None or other is None:
            return math.inf
        kind = kind_of(name)
        scale = _FLOOR * self.companions.get(_companions(name, one), 0.0)
        if kind in ("row", "state"):
            scale = max(scale, self.largest.get(name, 0.0), _SMALL if kind == "row" else 0.0)
        relative = apart(one, other, scale)
        tolerance = self._tolerance(one)
        tolerances = relative / tolerance if tolerance else (math.inf if relative else 0.0)
        if kind == "parameter" and 0 < relative < math.inf:
            tolerances = max(tolerances, self._of_untouched(name.removeprefix("parameter "), one, other))
        return tolerances

    def _of_untouched(self, owner: str, one: torch.Tensor, other: torch.Tensor) -> float:
        untouched = self.untouched.get(owner)
        if self.is_given or untouched is None or untouched.shape != one.shape or not bool(untouched.any()):
            return 0.0
        relative = apart(one[untouched], other[untouched], largest_of(one))
        return relative / min(_UNTOUCHED * torch.finfo(one.dtype).eps, self._tolerance(one))


def _companions(name: str, tensor: torch.Tensor) -> str:
    """The key of a tensor's group of companions. See [Note: Units]."""
    kind = kind_of(name)
    if kind == "buffer":
        return f"{name.rpartition('.')[0]} {tuple(tensor.shape)}"
    if kind == "state":
        return name.rpartition(" of ")[0] or name
    return kind if kind != "row" else name


def kind_of(name: str) -> str:
    """The kind of an entry, one of KINDS."""
    name = name.partition(", ")[2] if name.startswith("pass ") else name
    for beginning in ("gradient of ", "parameter ", "buffer "):
        if name.startswith(beginning):
            return beginning.split()[0]
    return "state" if "." in name or ", " in name else "row"


def _tolerance_of(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCES.get(dtype.to_real(), _NARROW)


def gradient_scale(gradient: torch.Tensor, largest: float) -> float:
    """The scale of a gradient's differences; `largest` is the largest value of all gradients. See [Note: Units]."""
    return max(largest_of(gradient), _FLOOR * largest)


def largest_of(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    wide = widened(tensor).abs()
    return float(torch.nan_to_num(wide, nan=0.0, posinf=0.0).max()) if tensor.numel() else 0.0


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has whole numbers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def apart(one: torch.Tensor, other: torch.Tensor, scale: float) -> float:
    """The difference of two values, relative to the larger of their size and `scale`."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    here = widened(one)
    there = widened(other)
    odd = ~(here.isfinite() & there.isfinite())
    if is_whole(one) or not torch.equal(here[odd].nan_to_num(nan=7.0), there[odd].nan_to_num(nan=7.0)):
        return math.inf
    difference = largest_of(here[~odd] - there[~odd])
    if not difference:
        return 0.0  # NaN or infinite in the same places
    against = max(largest_of(one), scale)
    return difference / against if against else math.inf
