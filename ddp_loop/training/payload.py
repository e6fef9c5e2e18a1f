"""What travels beside the gradients in a step's sum: the control word and a row of slots for each shard.

Whatever ranks must decide together is decided on the sums alone, at the same step on all of them.

[Note: Slots] Every shard has a row of its own, zeros from every rank but its own, so that the sum over ranks
only brings the rows together (adding zeros is exact), and each rank merges them in shard order. A row is
`weight, loss, metrics | batch-norm statistics | other buffers`. What the columns are, a rank sees only from
its own shards; a rank without samples sees nothing. So the ranks exchange what they saw once, at the
first fold, and again only when a rank says, in the sum itself, that it saw something new.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ddp_loop.batch_norm import BatchStatistics
from ddp_loop.data import MiniBatch, Shard
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.validation import Weight

PROBLEM, _NEW, _ENDS, _STOP, _SAVE, _PLACE, _SQUARE, LENGTH = range(8)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """What a rank asks of all.

    Attributes:
        stop: to end the loop after this step.
        save: to write a checkpoint after it.
        problem: what it found wrong; then it raises that, and the others raise PeerFailed.
    """

    stop: bool = False
    save: bool = False
    problem: Exception | None = None


NOTHING = ControlRequest()


def no_requests() -> ControlRequest:
    """Nothing is asked."""
    return NOTHING


def place_of(mini_batch: MiniBatch) -> int:
    """A small number that tells one mini-batch from the next; in float32 its square adds up exactly on 256 ranks."""
    said = mini_batch.epoch, mini_batch.position, mini_batch.samples, mini_batch.digest
    return zlib.crc32(b"%d %d %d %d" % said) & 0xFF


def control_word(mini_batch: MiniBatch, *, problem: bool, new: bool, asked: ControlRequest) -> tuple[int, ...]:
    """What this rank adds.

    Args:
        mini_batch: that it is at.
        problem: whether it found something wrong.
        new: whether it saw something that the layout has no room for.
        asked: what else it asks for.
    """
    place = place_of(mini_batch)
    return problem, new, mini_batch.ends_stream, asked.stop, asked.save, place, place * place


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """What the words of all ranks add up to.

    Attributes:
        problem, new, stop, save: whether some rank says so.
        ends: how many say that a stream ends.
        parted: whether ranks are at different mini-batches: n sum(p^2) = sum(p)^2 exactly if all p are the same.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    parted: bool

    @classmethod
    def of(cls, sums: Sequence[float], ranks: int) -> ControlDecision:
        """Of the first `LENGTH` sums."""
        parted = ranks * sums[_SQUARE] != sums[_PLACE] ** 2
        return cls(
            sums[PROBLEM] > 0, sums[_NEW] > 0, int(sums[_ENDS]), sums[_STOP] > 0, sums[_SAVE] > 0, parted
        )  # fmt: skip


GATHER_EVERYWHERE = (
    "step.gather is called on every rank or on none; some ranks fold without it: call it also where a rank has no shard"
)


@dataclass(frozen=True)
class PayloadLayout:
    """The columns of a row, as one rank or all of them see it.

    Attributes:
        metrics: names, sorted; None from a rank that had no shard and so no opinion.
        sums: which of "loss" and the metrics add up; None likewise.
        weighted: whether a shard came with a weight of the user's own.
        calls: how often a shard called each batch-norm layer at most.
        buffers: the other buffers that a shard changed.
        parameters: those that want a gradient.
    """

    metrics: tuple[str, ...] | None
    sums: frozenset[str] | None
    weighted: bool
    calls: tuple[int, ...]
    buffers: frozenset[str]
    parameters: tuple[str, ...]

    def covers(self, seen: PayloadLayout) -> bool:
        """Whether a row of this layout has room for what was `seen`."""
        return (
            seen.metrics in (None, self.metrics)
            and seen.sums in (None, self.sums)
            and seen.weighted <= self.weighted
            and all(few <= many for few, many in zip(seen.calls, self.calls, strict=True))
            and seen.buffers <= self.buffers
            and seen.parameters == self.parameters
        )


def agreed(seen: Sequence[PayloadLayout], former: PayloadLayout | None) -> PayloadLayout:
    """The layout that covers what every rank has seen, and the former one.

    Raises:
        ValueError: metric names, or the parameters that want a gradient, differ between ranks.
        RuntimeError: other ranks gather where this one folds.
    """
    if not all(isinstance(one, PayloadLayout) for one in seen):
        raise RuntimeError(GATHER_EVERYWHERE)
    for rank, one in enumerate(seen):
        if one.parameters != seen[0].parameters:
            differing = sorted(set(one.parameters) ^ set(seen[0].parameters)) or "their order"
            raise ValueError(
                "the same parameters must want a gradient on every rank; ranks 0 and "
                f"{rank} differ in {differing}: freeze, unfreeze and add parameters on all ranks alike"
            )
    with_shards = [(rank, one) for rank, one in enumerate(seen) if one.metrics is not None]
    first, own = with_shards[0] if with_shards else (0, former or seen[0])
    for rank, one in with_shards:
        if one.metrics != own.metrics:
            raise metrics_differ(f"rank {first}", own.metrics or (), f"rank {rank}", one.metrics or ())
        if one.sums != own.sums:
            raise sums_differ(f"rank {first}", own.sums or frozenset(), f"rank {rank}", one.sums or frozenset())
    all_seen = [*seen] if former is None else [*seen, former]
    return PayloadLayout(
        metrics=own.metrics,
        sums=own.sums,
        weighted=any(one.weighted for one in all_seen),
        calls=tuple(max(calls) for calls in zip(*(one.calls for one in all_seen), strict=True)),
        buffers=frozenset().union(*(one.buffers for one in all_seen)),
        parameters=seen[0].parameters,
    )


def metrics_differ(where: str, names: tuple[str, ...], elsewhere: str, others: tuple[str, ...]) -> ValueError:
    """The error of two shards that come with different metrics."""
    return ValueError(
        f"every shard must come with the same metrics; {where} has {list(names)}, {elsewhere} has {list(others)}: "
        "give step.backward the same keywords for each"
    )


def sums_differ(where: str, names: frozenset[str], elsewhere: str, others: frozenset[str]) -> ValueError:
    """The error of two shards of which one averages what the other one adds up."""
    return ValueError(
        f"Every shard must come with the same reductions. {where} adds up {sorted(names)}, {elsewhere} "
        f"{sorted(others)}, and the rest is averaged. Give step.backward the same reduction=, and the same metrics as "
        "dl.Sum, for each shard."
    )


def columns_of(
    records: Iterable[ShardRecord],
) -> tuple[tuple[str, ...] | None, frozenset[str] | None, Exception | None]:
    """The metrics of a rank's shards, which of the columns are sums, and what is wrong where shards differ in them."""
    metrics: tuple[str, ...] | None = None
    sums: frozenset[str] | None = None
    problem: Exception | None = None
    for record in records:
        names, number = tuple(sorted(record.metrics)), record.shard.number
        if metrics is not None and metrics != names and problem is None:
            problem = metrics_differ("an earlier shard", metrics, f"shard {number}", names)
        if sums is not None and sums != record.sums and problem is None:
            problem = sums_differ("an earlier shard", sums, f"shard {number}", record.sums)
        metrics, sums = names, record.sums
    return metrics, sums, problem


def shares(weights: torch.Tensor) -> torch.Tensor:
    """w_s / sum(w) for each shard, shape (S,); 0 for all where the sum is 0. One shard's share is exactly 1."""
    total = weights.sum()
    return torch.where(total == 0, torch.zeros_like(weights), weights / total)  # NaN stays NaN


def total_of(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of `values`, (S, K) to (K,), without those of share 0."""
    return torch.where(share.unsqueeze(1) > 0, values, torch.zeros_like(values)).sum(0)


def weighted_mean(values: torch.Tensor, share: torch.Tensor, *, guarded: bool) -> torch.Tensor:
    """sum_s share_s values_s over the rows of `values`, (S, K) to (K,).

    No matrix product: its order of summation may depend on where the rows lie in memory. `guarded`: a share of
    0 adds exactly 0, also where its value is nan (of a shard whose tokens are all masked); else all rows of
    share 0 must be zeros.
    """
    column = share.unsqueeze(1)
    products = values * column
    if guarded:
        products = torch.where(column == 0, torch.zeros_like(products), products)
    return products.sum(0)


@dataclass(slots=True)
class ShardRecord:
    """What one shard leaves behind for the fold, beside its gradients."""

    shard: Shard
    captures: list[list[BatchStatistics]]
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()  # which of "loss" and the metrics add up instead of being averaged
    weight: Weight | None = None
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    done: bool = False  # its last backward was made
    failed: bool = False  # a backward raised, and may have left parts of its gradients


@dataclass(frozen=True, slots=True)
class Folded:
    """The whole mini-batch's values, still on the device.

    Attributes:
        metrics: their names.
        values: loss and metrics, (1 + metrics,): weighted means, or sums where the shards gave such.
        weight: the sum of the shards' weights, (); None where these are their samples.
        losses: of each shard, (S,).
        share: each shard's part of the means, (S,).
        bad: whether the step is not finite and moves nothing; a tensor of shape () where the host does not know it.
    """

    metrics: tuple[str, ...]
    values: torch.Tensor
    weight: torch.Tensor | None
    losses: torch.Tensor
    share: torch.Tensor
    bad: torch.Tensor | bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, of the whole mini-batch and the same on every rank; still on the device.

    Attributes:
        epoch, iteration: counted from 1; the iteration goes on from epoch to epoch.
        samples: R, of the mini-batch.
    """

    epoch: int
    iteration: int
    samples: int
    _folded: Folded
    _gradients: Gradients

    @property
    def loss(self) -> torch.Tensor:
        """The weighted mean of the shards' losses, with `reduction="sum"` their sum; shape ()."""
        return self._folded.values[0]

    @property
    def weight(self) -> torch.Tensor:
        """What the means are over, sum_s(w_s): by default the samples; shape ()."""
        weight = self._folded.weight
        return self._folded.values.new_tensor(self.samples) if weight is None else weight

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Likewise each metric, by name, a `Sum` added up; shape () each."""
        return dict(zip(self._folded.metrics, self._folded.values[1:].unbind(), strict=True))

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The Euclidean norm of the gradients as they are when it is asked for; shape ()."""
        return self._gradients.norm()


class ValueSlots:
    """Packs what a shard's backward was given, and merges the rows of all shards.

    Args:
        device: of the step's sums.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shares: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._summed: dict[PayloadLayout, torch.Tensor] = {}

    @staticmethod
    def width(layout: PayloadLayout) -> int:
        """Columns: weight, loss, metrics."""
        return 2 + len(layout.metrics or ())

    @staticmethod
    def pack(record: ShardRecord, layout: PayloadLayout, row: torch.Tensor) -> None:
        """Write a shard's values into its row, (width,)."""
        if layout.weighted:
            row[0] = record.shard.samples if record.weight is None else record.weight
        loss = record.losses[0] if len(record.losses) == 1 else _total(record.losses)
        values = [loss, *(record.metrics[name] for name in layout.metrics or ())]
        torch.stack([one.to(row.dtype) for one in values], out=row[1:])

    def share(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Each shard's part of the samples, (S,), kept for the two sizes that an epoch's mini-batches have."""
        if (sizes, dtype) not in self._shares:
            self._shares[sizes, dtype] = shares(torch.tensor(sizes, dtype=dtype)).to(self._device)
        return self._shares[sizes, dtype]

    def merge(self, rows: torch.Tensor, layout: PayloadLayout, share: torch.Tensor) -> torch.Tensor:
        """Loss and metrics of the mini-batch, (1 + metrics,): weighted means, or sums of what adds up.

        Args:
            rows: (S, width).
            layout: of them.
            share: each shard's part of the means, (S,).
        """
        values = rows[:, 1:]
        means = weighted_mean(values, share, guarded=layout.weighted)
        if not layout.sums:
            return means
        if layout not in self._summed:
            names = ("loss", *(layout.metrics or ()))
            adds_up = torch.tensor([name in (layout.sums or ()) for name in names])
            self._summed = {layout: adds_up.to(self._device)}
        # A shard of weight 0 has no say in the loss, but what it counted is counted.
        totals = torch.cat([total_of(values[:, :1], share), values[:, 1:].sum(0)])
        return torch.where(self._summed[layout], totals, means)


def _total(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in losses]).sum()
