"""How far two runs' values are apart.

[Note: Units] A difference is measured against the largest value of its tensor, in all steps for rows and numbers of
the state. Of gradients, parameters and buffers it is a hundredth of the largest one of its kind where that is more.
The tolerance is what a few steps make of a sum's rounding: 1e-9 in float64, 1e-4 in float32, 2e-2 in narrower types,
0 for whole numbers. So a gradient that is off by a percent is off by 100 tolerances. "Bits" are the last ones of that
largest value which the difference reaches.

[Note: Void gradients] The gradient of a bias in front of a batch norm is rounding and nothing else, and Adam makes a
whole step of it. So elements of a parameter whose gradient was within the tolerance of 0 in every step do not count,
nor do they in what an optimizer keeps of them; and where there are such, running statistics do not, as long as all
rows and gradients agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ddp_loop.traces import STAGES, Trace

_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_NARROW = 2e-2
_FLOOR = 1e-2
_FLOORED = ("gradient", "parameter", "buffer")
_SMALL = 1e-3  # rows below it are not told from 0 by their own size
KINDS = ("row", "gradient", "parameter", "buffer", "state")


@dataclass(frozen=True)
class Largest:
    """The largest difference of one kind of values.

    Attributes:
        tolerances: in units of the tolerance.
        bits: how many of the last ones.
        name, step: of the tensor.
    """

    tolerances: float
    bits: float
    name: str
    step: int


@dataclass(frozen=True)
class Unequal:
    """Of the first step and stage in which a value is off by more than the tolerance, the one that is off the most."""

    step: int
    stage: str
    name: str
    tolerances: float

    def is_worse(self, step: int, stage: str, tolerances: float) -> bool:
        """Whether another value of the same stage is off by more."""
        return (step, stage) == (self.step, self.stage) and tolerances > self.tolerances


Values = dict[tuple[str, str], torch.Tensor]


def compare_values(
    one: Trace, other: Trace, tolerance: float | None = None
) -> tuple[Unequal | None, dict[str, Largest]]:
    """The first value that is off by more than its tolerance, and the largest difference of each kind.

    Args:
        tolerance: for all values; by default that of the widest rounding among a value's type and the parameters'.
    """
    rounding = tolerance or max(
        (_tolerance_of(getattr(torch, form[0].removeprefix("torch."))) for form in one.head["tensors"].values()),
        default=0.0,
    )
    measure = _Measure(rounding, tolerance is not None)
    first: Unequal | None = None
    largest = {kind: Largest(0.0, 0.0, "", 0) for kind in KINDS}
    for step in one.numbers:
        here, there = _read(one, step), _read(other, step)
        words = one.common(step), other.common(step)
        measure.meet(here, there)
        for stage in STAGES:
            for name in dict.fromkeys(name for entries in words for at, name in entries if at == stage):
                key = (stage, name)
                kind = kind_of(name)
                if key in here or key in there:
                    tolerances, bits = measure(name, here.get(key), there.get(key))
                else:
                    tolerances, bits = (0.0, 0.0) if words[0].get(key) == words[1].get(key) else (math.inf, math.inf)
                if tolerances > largest[kind].tolerances:
                    largest[kind] = Largest(tolerances, bits, name, step)
                if tolerances > 1 and (first is None or first.is_worse(step, stage, tolerances)):
                    first = Unequal(step, stage, name, tolerances)
    return first, {kind: one for kind, one in largest.items() if one.name}


class _Measure:
    """Measures values step after step. See [Note: Units] and [Note: Void gradients]."""

    def __init__(self, rounding: float, is_given: bool) -> None:
        self._rounding, self._is_given = rounding, is_given
        self._scales: dict[str, float] = {}  # the largest value, by kind or by name
        self._void: dict[str, torch.Tensor] = {}
        self._agree = True  # all rows and gradients so far

    def meet(self, here: Values, there: Values) -> None:
        """Take a step's values in."""
        for values in (here, there):
            for (_, name), tensor in values.items():
                if not _is_whole(tensor):
                    key = kind_of(name) if kind_of(name) in _FLOORED else name
                    self._scales[key] = max(self._scales.get(key, 0.0), _largest(tensor))
        for (stage, name), gradient in here.items():
            if kind_of(name) == "gradient" and stage == "fold" and (stage, name) in there:
                owner = name.partition("gradient of ")[2]
                bound = self._tolerance(gradient.dtype) * max(_largest(gradient), _FLOOR * self._scales["gradient"])
                void = (gradient.abs() <= bound) & (there[stage, name].abs() <= bound)
                self._void[owner] = void & self._void.get(owner, torch.ones_like(void))

    def _tolerance(self, dtype: torch.dtype) -> float:
        return self._rounding if self._is_given else max(self._rounding, _tolerance_of(dtype))

    def __call__(self, name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> tuple[float, float]:
        """How far two values are apart, in tolerances and in bits."""
        kind = kind_of(name)
        if one is not None and other is not None and one.shape == other.shape:
            void = self._void.get(name.removeprefix("parameter ").rpartition(" of ")[2])
            if kind in ("parameter", "state") and void is not None and void.shape == one.shape:
                one, other = one[~void], other[~void]
            elif kind == "buffer" and self._agree and any(bool(void.any()) for void in self._void.values()):
                return 0.0, 0.0
        scale = _FLOOR * self._scales.get(kind, 0.0) if kind in _FLOORED else self._scales.get(name, 0.0)
        if kind == "row":
            scale = max(scale, _SMALL)
        relative, bits = apart(one, other, scale)
        tolerance = 0.0 if one is None or _is_whole(one) else self._tolerance(one.dtype)
        tolerances = relative / tolerance if tolerance else (math.inf if relative else 0.0)
        if kind in ("row", "gradient") and tolerances > 1:
            self._agree = False
        return tolerances, bits


def kind_of(name: str) -> str:
    """Row, gradient, parameter, buffer, or other state."""
    name = name.partition(", ")[2] if name.startswith("pass ") else name
    for kind, beginning in (("gradient", "gradient of "), ("parameter", "parameter "), ("buffer", "buffer ")):
        if name.startswith(beginning):
            return kind
    return "state" if "." in name or ", " in name else "row"


def _read(trace: Trace, step: int) -> Values:
    from safetensors.torch import load_file

    path = trace.folder / f"step-{step}.safetensors"
    return {(key.partition(": ")[0], key.partition(": ")[2]): tensor for key, tensor in load_file(path).items()}


def _tolerance_of(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCES.get(dtype, _NARROW)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    wide = _wide(tensor).abs()
    return float(torch.nan_to_num(wide, nan=0.0, posinf=0.0).max()) if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> tuple[float, float]:
    """How far two values are apart, relative to the larger of their size and `scale`, and in bits of that."""
    nowhere = math.inf, math.inf
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return nowhere
    if torch.equal(one, other):
        return 0.0, 0.0
    here, there = _wide(one), _wide(other)
    odd = ~(here.isfinite() & there.isfinite())
    if _is_whole(one) or not torch.equal(here[odd].nan_to_num(nan=7.0), there[odd].nan_to_num(nan=7.0)):
        return nowhere
    difference = _largest(here[~odd] - there[~odd])
    if not difference:
        return 0.0, 0.0  # nan or infinite in the same places
    against = max(_largest(one), scale)
    relative = difference / against if against else math.inf
    return relative, math.log2(1 + relative / torch.finfo(one.dtype).eps)
