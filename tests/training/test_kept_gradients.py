"""Gradients that a script keeps stay as they are, as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, is_same, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network, samples

pytestmark = [pytest.mark.both_exchanges]

WIDE = 300  # 300 x 300 doubles are more than a small bucket of shared memory
STEPS = 4


def model_of(width: int) -> nn.Sequential:
    if width == 0:
        return network()
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1)).double()


def keep(width: int, shards: int | None, bucket_cap_mib: float, all_steps: bool) -> tuple[list[Tensors], Tensors, int]:
    """The gradients of each step, kept without and with a copy; and the number of flat tensors that were used."""
    with dl.join_world(device="cpu", seed=0) as world:
        model = model_of(width)
        kept, copies, flats = list[Tensors](), list[Tensors](), set[int]()
        found = list[bool]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"run_dir": None, "shards": shards, "bucket_cap_mib": bucket_cap_mib, "epochs": 2}
        loop = loop_over(world, "", model, optimizer, **options)
        for step in loop:
            for _ in range(2):  # passes
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
                flats.update(bucket.memory.first_piece.whole.data_ptr() for bucket in loop.fold.gradients.buckets)
                gradients = [one for p in model.parameters() if (one := p.grad) is not None]
                kept = [*(kept if all_steps else kept[-1:]), gradients]
                copies.append([one.clone() for one in gradients])
                found.append(all(map(is_same, kept, copies[-len(kept) :])))
                gradients = []
            optimizer.step()
        assert all(found), found
        return copies, [p.detach().clone() for p in model.parameters()], len(flats)


def keep_plainly(width: int) -> list[Tensors]:
    model = model_of(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for rows in [*samples(24).split(6)] * 2:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return found


@pytest.mark.covers("D3")
@pytest.mark.parametrize("all_steps", [False, True])
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-5])
@pytest.mark.parametrize("width", [0, WIDE])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (1, 4), (3, 7)])
def test_gradients_that_are_kept_stay_as_they_are(
    ranks: int, shards: int | None, width: int, bucket_cap_mib: float, all_steps: bool, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, keep, width, shards, bucket_cap_mib, all_steps)
    same_on_all([values for _, values, _ in results])
    for found, _, _ in results:
        for one, other in zip(found, keep_plainly(width), strict=True):
            assert is_same(one, other) if (ranks, shards) == (1, None) else distance(one, other) <= 1e-11


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_more_memory_is_used_than_is_kept(ranks: int, on_ranks: OnRanks) -> None:
    for _, _, flats in on_ranks(ranks, keep, WIDE, None, 8.0, False):
        assert flats <= 3  # what the script keeps of two passes, and that of the current pass


def keep_nothing(shards: int | None) -> int:
    """The number of flat tensors of a training in which a parameter has a gradient in every second step."""
    with dl.join_world(device="cpu", seed=0) as world:
        model, flats = network(), set[int]()
        factor = nn.Parameter(next(model.parameters()).new_ones(()))
        model.register_parameter("factor", factor)
        optimizer = torch.optim.Adam(model.parameters())
        loop = loop_over(world, "", model, optimizer, run_dir=None, shards=shards)
        for step in loop:
            for rows in step:
                loss = loss_of(model, rows)
                step.backward(loss * factor if step.iteration % 2 else loss)
            step.fold()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            flats.update(bucket.memory.first_piece.whole.data_ptr() for bucket in loop.fold.gradients.buckets)
        return len(flats)


@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (2, 6)])
def test_a_script_that_keeps_nothing_uses_the_same_memory(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, keep_nothing, shards) == [1] * ranks


def keep_results(shards: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values of each step's result, kept without and with a copy."""
    with dl.join_world(device="cpu", seed=0) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept, copies = list[torch.Tensor](), list[torch.Tensor]()
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=shards, epochs=2):
            for rows in step:
                step.backward(loss_of(model, rows), mean=rows.mean())
            result = step.fold()
            optimizer.step()
            values = [result.loss, result.losses, result.shares, result.weight, *result.metrics.values()]
            kept += values
            copies += [one.clone() for one in values]
        return kept, copies


@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (1, 4), (3, 7)])
def test_results_that_are_kept_stay_as_they_are(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    for kept, copies in on_ranks(ranks, keep_results, shards):
        assert len(kept) > 5
        assert all(map(torch.equal, kept, copies))
