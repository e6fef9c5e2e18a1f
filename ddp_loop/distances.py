"""How far two runs' values are apart.

[Note: Units] A difference is measured against the tensor's largest value, or a hundredth of the largest one of its
kind where that is more (the gradient of a bias in front of a batch norm is rounding and nothing else). The tolerance
is what a few steps make of a sum's rounding: 1e-9 in float64, 1e-4 in float32, 2e-2 in narrower types, 0 for whole
numbers. So a gradient that is off by a percent is off by 100 tolerances. "Bits" are the last ones of that largest
value which the difference reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ddp_loop.traces import STAGES, Trace

_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_NARROW = 2e-2
_FLOOR = 1e-2
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


def compare_values(one: Trace, other: Trace) -> tuple[Unequal | None, dict[str, Largest]]:
    """The first value that is off by more than its tolerance, and the largest difference of each kind."""
    first: Unequal | None = None
    largest = {kind: Largest(0.0, 0.0, "", 0) for kind in KINDS}
    for step in one.numbers:
        here, there = _read(one, step), _read(other, step)
        scales = _scales(here)
        if first is None and not _same_observations(one, other, step):
            first = Unequal(step, "data", "observations", math.inf)
        for stage in STAGES:
            for name in dict.fromkeys(key[1] for key in (*here, *there) if key[0] == stage):
                key = (stage, name)
                kind = kind_of(name)
                tolerances, bits = _apart(here.get(key), there.get(key), scales.get(kind, 0.0))
                if tolerances > largest[kind].tolerances:
                    largest[kind] = Largest(tolerances, bits, name, step)
                if tolerances > 1 and (first is None or first.is_worse(step, stage, tolerances)):
                    first = Unequal(step, stage, name, tolerances)
    return first, {kind: one for kind, one in largest.items() if one.name}


def _same_observations(one: Trace, other: Trace, step: int) -> bool:
    key = ("data", "observations")
    return one.steps[0][step].get(key) == other.steps[0][step].get(key)


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


def _scales(values: Values) -> dict[str, float]:
    """The largest value of each kind."""
    scales: dict[str, float] = {}
    for (_, name), tensor in values.items():
        if tensor.numel() and not _is_whole(tensor):
            scales[kind_of(name)] = max(scales.get(kind_of(name), 0.0), _largest(tensor))
    return scales


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(tensor.abs().double(), nan=0.0, posinf=0.0).max()) if tensor.numel() else 0.0


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> tuple[float, float]:
    """How far two values are apart, in tolerances and in bits."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf, math.inf
    if torch.equal(one, other):
        return 0.0, 0.0
    if _is_whole(one):
        return math.inf, math.inf
    if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(one.isinf(), other.isinf()):
        return math.inf, math.inf
    difference = _largest(one - other)
    against = max(_largest(one), _FLOOR * scale)
    if not difference:
        return 0.0, 0.0  # nan or inf in the same places
    if not against:
        return math.inf, math.inf
    relative = difference / against
    return relative / _TOLERANCES.get(one.dtype, _NARROW), math.log2(1 + relative / torch.finfo(one.dtype).eps)
