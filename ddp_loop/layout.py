"""What travels beside the gradients in a step's one sum: agreed by all ranks before it is sent.

[Note: Slots] Every shard has a row of its own, zeros from every rank but its own, so that the sum over ranks
only brings the rows together (adding zeros is exact), and each rank merges them in shard order. A row is
`weight, loss, metrics | batch-norm statistics | other buffers`. What the columns are, a rank sees only from
its own shards; a rank without observations sees nothing. So the ranks exchange what they saw once, at the
first fold, and again only when a rank says, in the sum itself, that it saw something new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GATHER_EVERYWHERE = (
    "step.gather is called on every rank or on none; some ranks fold without it: call it also where a rank has no shard"
)


@dataclass(frozen=True)
class Layout:
    """The columns of a row, as one rank or all of them see it.

    Attributes:
        metrics: names, sorted; None from a rank that had no shard and so no opinion.
        weighted: whether a shard came with a weight of the user's own.
        calls: how often a shard called each batch-norm layer at most.
        buffers: the other buffers that a shard changed.
        parameters: those that want a gradient.
    """

    metrics: tuple[str, ...] | None
    weighted: bool
    calls: tuple[int, ...]
    buffers: frozenset[str]
    parameters: tuple[str, ...]

    def covers(self, seen: Layout) -> bool:
        """Whether a row of this layout has room for what was `seen`."""
        return (
            seen.metrics in (None, self.metrics)
            and seen.weighted <= self.weighted
            and all(few <= many for few, many in zip(seen.calls, self.calls, strict=True))
            and seen.buffers <= self.buffers
            and seen.parameters == self.parameters
        )


def agreed(seen: Sequence[Layout], former: Layout | None) -> Layout:
    """The layout that covers what every rank has seen, and the former one.

    Raises:
        ValueError: metric names, or the parameters that want a gradient, differ between ranks.
        RuntimeError: other ranks gather where this one folds.
    """
    if not all(isinstance(one, Layout) for one in seen):
        raise RuntimeError(GATHER_EVERYWHERE)
    for rank, one in enumerate(seen):
        if one.parameters != seen[0].parameters:
            differing = sorted(set(one.parameters) ^ set(seen[0].parameters)) or "their order"
            raise ValueError(
                "the same parameters must want a gradient on every rank; ranks 0 and "
                f"{rank} differ in {differing}: freeze, unfreeze and add parameters on all ranks alike"
            )
    with_shards = [(rank, one.metrics) for rank, one in enumerate(seen) if one.metrics is not None]
    for rank, metrics in with_shards:
        if metrics != with_shards[0][1]:
            first, names = with_shards[0]
            raise metrics_differ(f"rank {first}", names, f"rank {rank}", metrics)
    all_seen = [*seen] if former is None else [*seen, former]
    return Layout(
        metrics=with_shards[0][1] if with_shards else former.metrics if former else None,
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


def shares(weights: torch.Tensor) -> torch.Tensor:
    """w_s / sum(w) for each shard, shape (S,); 0 for all where the sum is 0. One shard's share is exactly 1."""
    total = weights.sum()
    return torch.where(total > 0, weights / total, torch.zeros_like(weights))


def weighted_mean(values: torch.Tensor, share: torch.Tensor, *, guarded: bool) -> torch.Tensor:
    """sum_s share_s values_s over the rows of `values`, (S, K) to (K,).

    No matrix product: its order of summation may depend on where the rows lie in memory. `guarded`: a share of
    0 adds exactly 0, also where its value is nan (of a shard whose tokens are all masked); else all rows of
    share 0 must be zeros.
    """
    column = share.unsqueeze(1)
    products = values * column
    if guarded:
        products = torch.where(column > 0, products, torch.zeros_like(products))
    return products.sum(0)
