"""The script's own calls of torch.distributed work between our steps, and the default group is theirs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from tests.support.exchanges import digest, on_machines
from tests.support.harness import OnRanks
from tests.support.training import mean_square, take

pytestmark = pytest.mark.covers("D10")


def train_beside(exchange: str, machines: tuple[int, ...], own_calls: bool) -> tuple[str, int]:
    """A training's digest, and how many collectives of the default group were not the script's."""
    with on_machines(*machines), dl.join_world(exchange=exchange) as world:
        torch.manual_seed(0)
        model, other = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group: Any = dist.distributed_c10d._get_default_group()
        ours = 0
        beside = DistributedDataParallel(other) if own_calls else None
        batches = dl.Batches(torch.arange(48.0).view(12, 4) / 48, 4, world, shards=4)
        made = group._get_sequence_number_for_group()
        for step in dl.Loop(batches, 2, state={"m": model, "o": optimizer}, progress=False):
            take(step, model, mean_square)
            optimizer.step()
            ours = group._get_sequence_number_for_group() - made
            assert ours == 0
            if beside is not None:
                total = torch.tensor(float(world.rank))
                under_way = dist.all_reduce(total, async_op=True)
                world.gather(world.rank)
                under_way.wait()
                assert total.item() == sum(range(world.size))
                words: list[object] = [f"step {step.iteration}" if world.rank == 0 else None]
                dist.broadcast_object_list(words)
                assert words == [f"step {step.iteration}"]
                beside(torch.full((2, 4), float(world.rank))).sum().backward()
                assert len({digest([one]) for one in world.gather(other.weight.grad) if one is not None}) == 1
                dist.barrier()
            made = group._get_sequence_number_for_group()
        dl.evaluate(model, dl.Batches(torch.ones(5, 4), 2, world), mean=lambda output, rows: output.mean())
        assert group._get_sequence_number_for_group() == made
        del beside  # before its group: else its Reducer may destroy the group, and hang
        return digest(model.state_dict().values()), ours


@pytest.mark.parametrize(("exchange", "machines"), [("memory", ()), ("memory", (2, 1)), ("gloo", ())])
@pytest.mark.slow
def test_own_collectives_between_steps_change_nothing(
    exchange: str, machines: tuple[int, ...], on_ranks: OnRanks
) -> None:
    alone = on_ranks(3, train_beside, exchange, machines, own_calls=False)
    assert on_ranks(3, train_beside, exchange, machines, own_calls=True) == alone
    assert len(set(alone)) == 1
