"""Gradients and results that a script keeps stay as they are, as in a plain loop."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of

pytestmark = pytest.mark.both_exchanges

WIDE = 300  # 300 x 300 doubles are more than a small bucket of shared memory
ALL = 16  # passes


class Scaled(nn.Sequential):
    """With a factor that has a gradient in every second step."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1))
        self.factor = nn.Parameter(torch.ones(()))


def keep(passes: int, width: int, shards: int | None, bucket_cap_mib: float = 8.0) -> tuple[Tensors, bool, int]:
    """Keep what the last passes gave.

    Returns:
        The parameters; whether what was kept stayed as it was; the number of flat tensors that were used.
    """
    with dl.join_world(device="cpu", seed=0) as world:
        torch.manual_seed(3)
        model = Scaled(width).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        kept: deque[tuple[Tensors, Tensors]] = deque(maxlen=passes)
        stays = []
        flats = set[int]()
        options: dict[str, Any] = {"bucket_cap_mib": bucket_cap_mib, "epochs": 2}
        loop = loop_over(world, "", model, optimizer, shards=shards, **options)
        for step in loop:
            for _ in range(2):
                for rows in step:
                    loss = loss_of(model, rows)
                    step.backward(loss * model.factor if step.iteration % 2 else loss, mean=rows.mean())
                result = step.fold()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                flats.update(bucket.memory.first_piece.whole.data_ptr() for bucket in loop.fold.gradients.buckets)
                values = [p.grad for p in model.parameters() if p.grad is not None]
                values += [result.loss, result.losses, result.shares, result.weight, *result.metrics.values()]
                kept.append((values, [one.clone() for one in values]))
                stays += [is_same(*pair) for pair in kept]
                values = []
            optimizer.step()
        return values_of(model), all(stays), len(flats)


@pytest.mark.slow
@pytest.mark.covers("D3")
@pytest.mark.parametrize("passes", [2, ALL])
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-5])
@pytest.mark.parametrize("width", [6, WIDE])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (1, 4), (3, 7)])
def test_what_is_kept_stays_as_it_is_and_changes_nothing(
    ranks: int, shards: int | None, width: int, bucket_cap_mib: float, passes: int, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, keep, passes, width, shards, bucket_cap_mib)
    assert all(stays for _, stays, _ in results)
    wanted, *_ = on_ranks(ranks, keep, 0, width, shards, bucket_cap_mib)
    assert is_same(same_on_all([values for values, _, _ in results]), wanted[0])


@pytest.mark.parametrize(("passes", "most"), [(0, 1), (1, 3)])  # the kept ones, and that of the current pass
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, 6)])
def test_no_more_memory_is_used_than_is_kept(
    ranks: int, shards: int | None, passes: int, most: int, on_ranks: OnRanks
) -> None:
    for _, _, flats in on_ranks(ranks, keep, passes, WIDE, shards):
        assert flats <= most
