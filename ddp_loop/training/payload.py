"""What travels beside the gradients in a step's sum: a row of slots for each shard, and the layout of these rows.

[Note: Slots] Each shard has one row. Its rank fills it in, and all others leave it at -0.0, so the sum over ranks
copies it exactly. Each rank merges the rows in shard order. A row is `weight, loss, metrics |
batch-norm statistics | other buffers`; statistics of many shards travel as `moments` instead. A rank knows the columns
only from its own shards, and without samples it knows none. So the ranks exchange what they have at the first fold, and
again only when the sum itself says that a rank has something new.

[Note: Modes] A shard's modes are the modules that were in evaluation mode when its backward began. They are read there
and not as the pass opens, since scripts call `train()` between the two, which a rank without a shard does not. The
layout has all modes that the ranks agreed on so far. In each pass the control word has the number of a rank's modes
among them, so ranks in different known modes are found without an exchange, and going to and fro costs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import le

import torch

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.batch_norm import Captures
from ddp_loop.data import Shard
from ddp_loop.distributed import sendable
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.validation import RESERVED_NAMES, Sum, Value, Weight, reserved_names

Modes = tuple[str, ...]  # the modules in evaluation mode, by name
_MOST_MODES = 64  # then the agreed ones are forgotten: a script draws them

GATHER_EVERYWHERE = (
    "Every rank must call step.gather, or none. Some ranks fold without it. Call it also where a rank has no shard."
)


@sendable
@dataclass(frozen=True)
class PayloadLayout:
    """The columns of a row, as one rank or all of them know them.

    Attributes:
        metrics: names, sorted; None from a rank without a shard.
        sums: which of "loss" and the metrics add up; None likewise.
        weighted: whether the shards came with weights of their own; None likewise.
        calls: the most calls of each batch-norm layer in a shard.
        buffers: the other buffers that a shard changed.
        parameters: those that want a gradient.
        unplanned: those that got a gradient and had been left out of the plan.
        modes: of a rank's shards, or all that were agreed on; none from a rank without a shard. See [Note: Modes].
    """

    metrics: tuple[str, ...] | None
    sums: frozenset[str] | None
    weighted: bool | None
    calls: tuple[int, ...]
    buffers: frozenset[str]
    parameters: tuple[str, ...]
    unplanned: frozenset[str]
    modes: tuple[Modes, ...]

    def covers(self, seen: PayloadLayout) -> bool:
        """Whether a row of this layout has room for what was `seen`."""
        return (
            seen.metrics in (None, self.metrics)
            and seen.sums in (None, self.sums)
            and seen.weighted in (None, self.weighted)
            and all(map(le, seen.calls, self.calls))
            and seen.buffers <= self.buffers
            and seen.parameters == self.parameters
            and not seen.unplanned
            and all(map(self.modes.__contains__, seen.modes))
        )


def agreed(seen: Sequence[PayloadLayout], former: PayloadLayout | None) -> PayloadLayout:
    """The layout that covers what every rank has seen, and the former layout.

    Raises:
        ValueError: metric names, modes, the parameters that want a gradient, or whether there are weights, differ
            between ranks.
        RuntimeError: other ranks gather where this one folds.
    """
    if not all(isinstance(one, PayloadLayout) for one in seen):
        raise RuntimeError(GATHER_EVERYWHERE)
    for rank, one in enumerate(seen):
        if one.parameters != seen[0].parameters:
            differing = sorted(set(one.parameters) ^ set(seen[0].parameters)) or "their order"
            raise ValueError(
                "The same parameters must want a gradient on every rank. Ranks 0 and "
                f"{rank} differ in {differing}. Freeze, unfreeze and add parameters on all ranks alike."
            )
    with_shards = [(rank, one) for rank, one in enumerate(seen) if one.metrics is not None]
    first, own = with_shards[0] if with_shards else (0, former or seen[0])
    for rank, one in with_shards:
        if one.metrics != own.metrics:
            raise metrics_differ(f"rank {first}", own.metrics or (), f"rank {rank}", one.metrics or ())
        if one.sums != own.sums:
            raise sums_differ(f"rank {first}", own.sums or frozenset(), f"rank {rank}", one.sums or frozenset())
        if one.weighted != own.weighted:
            raise weights_differ(f"rank {first}", f"rank {rank}", is_first=bool(own.weighted))
    require_same_modes(seen)
    all_seen = [*seen] if former is None else [*seen, former]
    modes = tuple(dict.fromkeys(mode for one in reversed(all_seen) for mode in one.modes))
    return PayloadLayout(
        metrics=own.metrics,
        sums=own.sums,
        weighted=own.weighted,
        calls=tuple(max(calls) for calls in zip(*(one.calls for one in all_seen), strict=True)),
        buffers=frozenset().union(*(one.buffers for one in all_seen)),
        parameters=seen[0].parameters,
        unplanned=frozenset().union(*(one.unplanned for one in seen)),
        modes=modes if len(modes) <= _MOST_MODES else modes[-1:],
    )


def require_same_modes(seen: Sequence[PayloadLayout]) -> None:
    """Raise ValueError if ranks with shards had other modes, by what each rank has `seen`."""
    with_shards = [(rank, one.modes[0]) for rank, one in enumerate(seen) if one.modes]
    for rank, modes in with_shards[1:]:
        first, others = with_shards[0]
        if modes != others:
            raise modes_differ(f"rank {first}", others, f"rank {rank}", modes)


def modes_differ(where: str, modes: Modes, elsewhere: str, others: Modes) -> ValueError:
    """The error of two shards whose modules were in different modes."""
    name = min(set(modes) ^ set(others))
    evaluates, trains = (where, elsewhere) if name in modes else (elsewhere, where)
    return ValueError(
        f"Each module must be in the same mode, train() or eval(), in every shard. {name} was in evaluation mode on "
        f"{evaluates}, and in training mode on {trains}. Call model.train() and model.eval() on all ranks alike."
    )


def metrics_differ(where: str, names: tuple[str, ...], elsewhere: str, others: tuple[str, ...]) -> ValueError:
    """The error of two shards that come with different metrics."""
    return ValueError(
        f"Every shard must come with the same metrics. {where} has {list(names)}, {elsewhere} has {list(others)}. "
        "Give step.backward the same keywords for each shard."
    )


def sums_differ(where: str, names: frozenset[str], elsewhere: str, others: frozenset[str]) -> ValueError:
    """The error of two shards where one averages what the other adds up."""
    return ValueError(
        f"Every shard must come with the same reductions. {where} adds up {sorted(names)}, {elsewhere} "
        f"{sorted(others)}, and the rest is averaged. Give step.backward the same reduction=, and the same metrics as "
        "dl.Sum, for each shard."
    )


def weights_differ(where: str, elsewhere: str, *, is_first: bool) -> ValueError:
    """The error of two shards where the first alone has a weight, or the other alone."""
    has, lacks = (where, elsewhere) if is_first else (elsewhere, where)
    return ValueError(
        f"Every shard of a mini-batch must come with a weight, or none. {has} has one, {lacks} has none. Give "
        "step.backward weight= for each shard; by default it is the number of the shard's samples."
    )


def layout_of(
    records: Iterable[ShardRecord], layers: int, parameters: tuple[str, ...], unplanned: frozenset[str] = frozenset()
) -> tuple[PayloadLayout, Exception | None]:
    """The layout that a rank's shards need under so many batch-norm `layers`, and the error where they differ."""
    metrics: tuple[str, ...] | None = None
    sums: frozenset[str] | None = None
    modes: tuple[Modes, ...] = ()
    problem: Exception | None = None
    weighted: bool | None = None
    buffers = frozenset[str]()
    calls = (0,) * layers
    known = dict[str, torch.Tensor]().keys()
    for record in records:
        is_known = record.metrics.keys() == known
        number = record.shard.number
        names = metrics if is_known and metrics is not None else tuple(sorted(record.metrics))
        if metrics is not None and metrics != names and problem is None:
            problem = metrics_differ("an earlier shard", metrics, f"shard {number}", names)
        if sums is not None and sums != record.sums and problem is None:
            problem = sums_differ("an earlier shard", sums, f"shard {number}", record.sums)
        if modes and modes[0] != record.modes and problem is None:
            problem = modes_differ("an earlier shard", modes[0], f"shard {number}", record.modes)
        if weighted is not None and weighted != (record.weight is not None) and problem is None:
            problem = weights_differ("an earlier shard", f"shard {number}", is_first=weighted)
        known = record.metrics.keys()
        metrics = names
        sums = record.sums
        modes = (record.modes,)
        weighted = record.weight is not None
        if record.taken:
            buffers = buffers.union(record.taken)
        if layers:
            calls = tuple(map(max, calls, map(len, record.captures)))
    return PayloadLayout(metrics, sums, weighted, calls, buffers, parameters, unplanned, modes), problem


def shares(weights: torch.Tensor) -> torch.Tensor:
    """w_s / sum(w) for each shard, shape (S,); 0 for all where the sum is 0. One shard's share is exactly 1."""
    total = weights.sum()
    return torch.where(total == 0, torch.zeros_like(weights), weights / total)  # NaN stays NaN


def total_of(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of `values`, (S, K) to (K,), without those of share 0."""
    return torch.where(share.unsqueeze(1) == 0, torch.zeros_like(values), values).sum(0)


def weighted_mean(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """sum_s share_s values_s over the rows of `values`, (S, K) to (K,).

    No matrix product: its order of summation may depend on where the rows lie in memory. A share of 0 adds exactly 0,
    also where its value is nan, as that of a shard whose tokens are all masked.
    """
    column = share.unsqueeze(1)
    products = values * column
    return torch.where(column == 0, torch.zeros_like(products), products).sum(0)


def loss_factor(size: Weight, samples: int, *, alone: bool) -> Weight:
    """What a shard's loss is multiplied by: w_s / R of a mean, 1 of a sum and of an only shard; 0 where w_s is 0."""
    if not isinstance(size, torch.Tensor):
        return 0.0 if size == 0 else 1.0 if alone else size / samples
    factor = torch.ones_like(size) if alone else size / samples  # in the weight's float64
    return torch.where(size > 0, factor, 0.0)


def as_metric(name: str, value: Value, samples: int, device: torch.device) -> torch.Tensor:
    """A shard's metric as a new float64 tensor, shape (): the mean over its samples, or their sum.

    Args:
        name: of the metric.
        value: one value for the shard, or one per sample, shape (n,).
        samples: n, of the shard.
        device: of the loss.

    Raises:
        ValueError: another shape.
    """
    number = value.value if isinstance(value, Sum) else value
    if not isinstance(number, torch.Tensor):
        if not isinstance(number, Real):
            raise ValueError(f"A metric must be a number or a tensor. {name} is {number!r}. Convert it.")
        return torch.full((), float(number), dtype=torch.float64, device=device)
    number = number.detach()
    if number.dim() and number.shape != (samples,):
        what = "sum" if isinstance(value, Sum) else "mean"
        raise ValueError(
            f"A metric must be one value, the shard's {what}, or one per sample, shape ({samples},). "
            f"{name} has shape {tuple(number.shape)}. Take its {what}."
        )
    reduced = number.sum(dtype=torch.float64) if isinstance(value, Sum) else number.mean(dtype=torch.float64)
    if reduced.device != device and not is_asynchronous(reduced):  # a copy from the host would hold it up
        return torch.full((), reduced.item(), dtype=torch.float64, device=device)
    return reduced if reduced.device == device else reduced.to(device)


@dataclass(slots=True)
class ShardRecord:
    """What one shard leaves for the fold, beside its gradients."""

    shard: Shard
    captures: Captures
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()  # which of "loss" and the metrics add up
    weight: Weight | None = None
    taken: dict[str, torch.Tensor] = field(default_factory=dict)  # the buffers that it changed
    done: bool = False  # had its last backward
    failed: bool = False  # a backward raised, perhaps with parts of its gradients made
    held: bool = False  # its outputs wait for a loss of the whole mini-batch
    modes: Modes = ()  # when its backward began

    def add(self, value: torch.Tensor, weight: Weight | None, reduction: str, metrics: dict[str, Value]) -> Weight:
        """Record a loss and its metrics; returns the shard's weight.

        Args:
            value: of the loss, shape (), a tensor of this record's own.
            weight, reduction, metrics: as given to `Step.backward`.

        Raises:
            ValueError: a reserved metric name, or another weight or reduction than the shard's first loss had.
        """
        if not RESERVED_NAMES.isdisjoint(metrics):
            raise reserved_names(metrics)
        if self.losses and isinstance(weight, torch.Tensor) and isinstance(self.weight, torch.Tensor):
            weight = weight.where(weight == self.weight, math.nan)  # the guard finds it one step later
        elif self.losses and not _is_same(weight, self.weight):
            raise ValueError(
                f"All losses of a shard must have the same weight. Got {weight} after {self.weight}. Multiply the loss "
                "itself by a factor."
            )
        sums = self.sums
        samples = self.shard.samples
        if self.losses and ("loss" in self.sums) != (reduction == "sum"):
            raise ValueError(
                f"All losses of a shard must have the same reduction. Got {reduction!r} after another one. Divide the "
                "sum by what it is over, or multiply the mean by it."
            )
        for name, metric in metrics.items():
            self.metrics[name] = as_metric(name, metric, samples, value.device)
            if isinstance(metric, Sum):
                sums |= {name}
            elif name in sums:
                sums -= {name}
        self.losses.append(value)
        self.weight = weight
        self.sums = sums | {"loss"} if reduction == "sum" else sums
        return samples if weight is None else weight


def _is_same(one: Weight | None, other: Weight | None) -> bool:
    return isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor) and one == other


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: values of the whole mini-batch, the same on every rank, still on the device.

    Attributes:
        epoch, iteration: counted from 1; the iteration counts on from epoch to epoch.
        samples: R, of the mini-batch.
        names: of the metrics.
        values: loss and metrics, (1 + metrics,): weighted means, or sums where the shards gave sums.
        total: the sum of the shards' weights, shape (); None where these are their samples.
        losses: of each shard, (S,).
        shares: each shard's part of the means, (S,).
        is_bad: whether the step is not finite and moves nothing; a tensor of shape () where only the device knows.
    """

    epoch: int
    iteration: int
    samples: int
    names: tuple[str, ...]
    values: torch.Tensor
    total: torch.Tensor | None
    losses: torch.Tensor
    shares: torch.Tensor
    is_bad: torch.Tensor | bool
    _gradients: Gradients

    @property
    def loss(self) -> torch.Tensor:
        """The weighted mean of the shards' losses, with `reduction="sum"` their sum; shape ()."""
        return self.values[0]

    @property
    def weight(self) -> torch.Tensor:
        """What the means are over, sum_s(w_s): by default the samples; shape ()."""
        return self.values.new_full((), self.samples) if self.total is None else self.total

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """The weighted mean of each metric by name, a `Sum` added up; shape () each."""
        return dict(zip(self.names, self.values[1:].unbind(), strict=True))

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The Euclidean norm of the gradients at this moment; shape ()."""
        return self._gradients.norm()
