"""What a shard is given with: its loss, its weight, its metrics; taken or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch

Weight = float | torch.Tensor
Value = float | torch.Tensor
TAKEN_NAMES = frozenset({"loss", "epoch", "iteration", "observations", "elapsed_s"}) | frozenset(
    {"skipped", "learning_rate", "gradient_norm", "observations_per_s"}
    | {"retain_graph", "create_graph", "inputs", "gradient"}
)


def check_loss(loss: object) -> torch.Tensor:
    """The loss, if it can be backpropagated.

    Raises:
        ValueError: it is no tensor of shape (), or needs no gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"a loss must be a tensor of shape (), one value for the shard; got {what}: take its mean (or its sum, "
            'with reduction="sum")'
        )
    if not loss.requires_grad:
        raise ValueError(
            "a loss must need a gradient; this one does not: compute it from the model's output, outside of "
            "torch.no_grad() and without detach()"
        )
    return loss


def check_weight(weight: Weight | None) -> Weight | None:
    """The weight of a shard, if it is a finite number that is not negative or a tensor of one value.

    Raises:
        ValueError: it is neither. Of a tensor on a GPU the value is not asked for: that would hold the host up.
    """
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"a shard's weight must be one value; got shape {tuple(weight.shape)}: take its sum")
        weight = weight.detach().reshape(()).double()  # float32 would round w / R
        if weight.device.type != "cpu":
            return weight
    elif not isinstance(weight, Real):
        raise ValueError(f"a shard's weight must be a number or a tensor of one value; got {weight!r}")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a shard's weight must be a finite number, 0 or more; got {float(weight)}")
    return weight


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for metrics that bear a name with a meaning of its own."""
    if taken := sorted(TAKEN_NAMES.intersection(names)):
        raise ValueError(
            f"a metric's name must not have another meaning; got {taken}: the first ones are columns of every row, the "
            f"others options of torch's backward, which the step sets itself ({sorted(TAKEN_NAMES)})"
        )


def as_mean(name: str, value: Value, observations: int, like: torch.Tensor) -> torch.Tensor:
    """A metric of a shard as a tensor of shape (): itself, or the mean of one value per observation.

    Raises:
        ValueError: it has another shape.
    """
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Real):
            raise ValueError(f"a metric must be a number or a tensor; {name} is {value!r}")
        return like.new_full((), float(value))
    value = value.detach()
    if value.dim() == 0:
        return value
    if value.shape != (observations,):
        raise ValueError(
            f"a metric must be one value, the shard's mean, or one per observation, shape ({observations},); "
            f"{name} has shape {tuple(value.shape)}: take its mean"
        )
    return value.to(like.dtype if value.dtype == torch.bool else torch.promote_types(value.dtype, like.dtype)).mean()
