"""Checks of what the script gives: a Loop's arguments, its models, a shard's loss, weight and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.batch_norm import SyncChannel, batch_norm_layers
from ddp_loop.data import Batches
from ddp_loop.distributed import each_module, find_modules
from ddp_loop.training.nonfinite import ON_NONFINITE


def check_state(state: object) -> dict[str, object]:
    """The job's state as a dict of its own, if it is a mapping by name.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"state must be a dict of what the job is made of, by name; got {type(state).__name__}: "
            "state=dict(model=model, optimizer=optimizer)"
        )
    for name, value in state.items():
        if isinstance(value, list | tuple | set | Mapping) and _holds_modules(value):
            raise TypeError(
                f"each module and optimizer of state has a name of its own; {name!r} is a {type(value).__name__} of "
                "them: give each a name in state, or modules together as nn.ModuleList(...) or nn.ModuleDict(...)"
            )
    return dict(state)


def _holds_modules(value: object) -> bool:
    """Whether modules or optimizers are in lists and dicts."""
    if isinstance(value, Mapping):
        return any(map(_holds_modules, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_modules, value))
    return isinstance(value, nn.Module | Optimizer)


def check_extent(batches: Batches, epochs: int | None, steps: int | None, bucket_cap_mib: float) -> None:
    """Raise ValueError unless the loop has an end, and its buckets a size."""
    if not bucket_cap_mib > 0:
        raise ValueError(f"bucket_cap_mib must be a size in MiB, more than 0; got {bucket_cap_mib}")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
    if epochs is None and steps is None:
        raise ValueError("a Loop needs an end; give epochs or steps")
    if not batches.ends and steps is None:
        raise ValueError("an epoch of these data never ends; give Batches a length, or Loop its steps")


def check_rule(on_nonfinite: str) -> None:
    """Raise ValueError unless there is such a rule for losses and gradients that are not finite."""
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(f"on_nonfinite must be one of {ON_NONFINITE}; got {on_nonfinite!r}")


def check_interval(check_replicas_every: object) -> None:
    """Raise ValueError unless it is a number of steps, or 0."""
    if isinstance(check_replicas_every, bool) or not isinstance(check_replicas_every, int) or check_replicas_every < 0:
        raise ValueError(
            "check_replicas_every must be a whole number, the steps from one comparison of all ranks to the next, or 0 "
            f"for none; got {check_replicas_every!r}"
        )


def check_synced(batches: Batches, sync_channels: Sequence[SyncChannel]) -> None:
    """Raise ValueError if a rank has several shards under synced batch norm."""
    if sync_channels and batches.shards > batches.world.size:
        raise ValueError(
            "synced batch norm normalises by what all ranks compute at the same time, so that a rank can have one "
            f"shard; got {batches.shards} shards on {batches.world.size} ranks: leave shards= out, or "
            "local_batch_norm(model), whose running statistics are those of the whole mini-batch all the same"
        )


def check_rows(batches: Batches, state: Mapping[str, object]) -> None:
    """Raise ValueError if a shard of one sample would meet BatchNorm1d, which cannot normalise one value."""
    layers = [
        name
        for name, layer in each_module(find_modules(state)).items()
        if isinstance(layer, nn.BatchNorm1d) and layer.training
    ]
    positions = [0] if batches.steps is None else sorted({0, batches.steps - 1})
    for position in positions:
        sizes = batches.sizes(position)
        if layers and 1 in sizes:
            raise ValueError(
                f"batch norm needs more than one value per channel; mini-batch {position + 1} of an epoch has "
                f"{sum(sizes)} samples over {len(sizes)} shards, so that one has a single sample, and {layers[0]} "
                "is BatchNorm1d: take another batch_size or fewer shards, drop_last=True, or "
                "allow_single_sample_shards=True if its inputs have positions, (N, C, L)"
            )


Weight = float | torch.Tensor
Number = float | torch.Tensor
Reduction = Literal["mean", "sum"]
TAKEN_NAMES = frozenset({"loss", "epoch", "iteration", "samples", "elapsed_s"}) | frozenset(
    {"skipped", "learning_rate", "gradient_norm", "samples_per_s"}
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
        ValueError: it is neither. On a GPU the host does not wait for a tensor: a wrong weight makes the step NaN.
    """
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"a shard's weight must be one value; got shape {tuple(weight.shape)}: take its sum")
        weight = weight.detach().reshape(()).to(torch.float64, copy=True)  # float32 would round w / R
        if is_asynchronous(weight):
            return weight.where((weight >= 0) & weight.isfinite(), math.nan)  # the guard finds it one step later
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


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that adds up over the shards of a mini-batch, or over the data in `evaluate`: hits, tokens, pixels.

        step.backward(loss, hits=dl.Sum(logits.argmax(1) == labels))

    It has no weight: what a shard of weight 0 counted is counted too.

    Args:
        value: a shard's sum, shape (), or one value per sample, shape (n,), whose sum is taken.
    """

    value: Number


Value = Number | Sum


def as_metric(name: str, value: Value, samples: int, device: torch.device) -> torch.Tensor:
    """A shard's metric as a float64 tensor of its own, shape (): a mean over its samples, or their sum.

    Args:
        name: of the metric.
        value: one value for the shard or, shape (n,), one per sample.
        samples: n, of the shard.
        device: of the loss.

    Raises:
        ValueError: it has another shape.
    """
    number = value.value if isinstance(value, Sum) else value
    if not isinstance(number, torch.Tensor):
        if not isinstance(number, Real):
            raise ValueError(f"a metric must be a number or a tensor; {name} is {number!r}")
        return torch.full((), float(number), dtype=torch.float64, device=device)
    number = number.detach()
    if number.dim() and number.shape != (samples,):
        what = "sum" if isinstance(value, Sum) else "mean"
        raise ValueError(
            f"a metric must be one value, the shard's {what}, or one per sample, shape ({samples},); "
            f"{name} has shape {tuple(number.shape)}: take its {what}"
        )
    reduced = number.sum(dtype=torch.float64) if isinstance(value, Sum) else number.mean(dtype=torch.float64)
    # The script may write its own tensor again for the next shard.
    return reduced.clone() if number.dim() == 0 else reduced.to(device)


_WRAPPERS = {
    "DistributedDataParallel": "give state the model that it wraps, wrapped.module, and call that one",
    "DataParallel": "give state the model that it wraps, wrapped.module, and call that one",
    "FullyShardedDataParallel": "make the Loop with the model as it was before it was wrapped",
    "FSDPModule": "make the Loop with the model as it was before fully_shard",
    "ReplicateModule": "make the Loop with the model as it was before replicate",
    "SyncBatchNorm": "dl.sync_batch_norm(model, world) turns these layers into its own, on the CPU too",
}
_IN_TRAINING = ("SyncBatchNorm",)


def refuse_wrapped(modules: Mapping[str, nn.Module], *, training: bool = True) -> None:
    """Raise ValueError if torch itself shares the work of `modules`, or of what is below them, between ranks.

    Its wrappers make collectives in forward and backward, or hold a part of each parameter.

    Args:
        training: whether to refuse also what does no harm in evaluation.
    """
    for name, module in each_module(modules).items():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.partition(".")[0] == "torch"]
        wrapper = next((kind for kind in kinds if kind in _WRAPPERS), None)
        if wrapper is not None and (training or wrapper not in _IN_TRAINING):
            raise ValueError(
                f"here the model itself is taken, and shared between ranks by fold and evaluate; {name} is torch's "
                f"{wrapper}, which makes collectives too: {_WRAPPERS[wrapper]}"
            )
        for key, parameter in module._parameters.items():
            if type(parameter).__name__ == "DTensor":
                raise ValueError(
                    f"every rank holds the whole of each parameter; {name}.{key} is a DTensor, of which each has a "
                    "part: make the model without parallelize_module, fully_shard or distribute_tensor"
                )
        if (
            training
            and getattr(module.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs"
            and batch_norm_layers({name: module})
        ):
            raise ValueError(
                f"a CUDA graph moves batch norm's running statistics unseen; {name} was given one by "
                "torch.cuda.make_graphed_callables: leave it as it is, or graph the parts without batch norm"
            )
