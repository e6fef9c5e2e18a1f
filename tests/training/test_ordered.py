"""The same bits on any number of ranks: the tree over fixed shards, and streams that follow them.

All that a script keeps has them; `tests/checkpoint/test_resume.py` changes the ranks and their exchange in mid-run.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support import training
from tests.support.both_exchanges import GLOO, MEMORY, exchange_of
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network
from tests.support.resuming import BUILDS, Ended, different, train
from tests.support.training import sgd

# torch does not see the steps of an optimizer that a scaler makes.
pytestmark = [
    pytest.mark.covers("H7"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.on_gpus_too,
]

SAMPLES = 98  # of the last mini-batch's two some shards are empty


def of_all(results: list[Ended]) -> Ended:
    """The end of a run, which all ranks have alike."""
    assert [different(results[0], other) for other in results] == [[]] * len(results)
    return results[0]


@pytest.mark.covers("C5", "B10")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "bucket_cap_mib"), [((1, 2, 3, 4), 8.0), ((1, 7), 1e-4)])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.both_exchanges
def test_the_bits_are_the_same_on_any_number_of_ranks(
    build: str, ranks: tuple[int, ...], bucket_cap_mib: float, on_ranks: OnRanks
) -> None:
    first, *others = [
        of_all(on_ranks(number, train, "", build=build, number=SAMPLES, bucket_cap_mib=bucket_cap_mib))
        for number in ranks
    ]
    assert [different(first, other) for other in others] == [[]] * len(others)


@pytest.mark.quick_on_gpus
def test_a_plain_sum_gives_other_bits(on_ranks: OnRanks) -> None:
    # Else the other tests would prove nothing.
    with exchange_of(GLOO):
        one, three = (on_ranks(ranks, train, "", ordered=False)[0] for ranks in (1, 3))
    assert different(one, three)


@pytest.mark.one_device("cpu", "GPUs add up over NCCL, whose order is its own")
def test_in_memory_a_sum_has_the_trees_order_also_with_a_shard_per_rank(on_ranks: OnRanks) -> None:
    """Of three ranks both orders are one."""
    (fixed,) = on_ranks(1, train, "", shards=4)
    with exchange_of(MEMORY):
        assert different(of_all(on_ranks(4, train, "", shards=None)), fixed) == []


def momentum_of_negative_zeros(samples: int) -> str:
    """Gradients of -0.0, which a sum with zeros would make 0.0."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = sgd(model, 0.9)
    data = torch.ones(samples, 2)
    training.train(model, lambda model, rows: model.weight.sum() * -0.0, data, samples, optimizer=optimizer, shards=4)
    return digest(optimizer.state[model.weight]["momentum_buffer"])


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.slow
def test_an_empty_shard_leaves_the_sign_of_a_zero_alone(samples: int, on_ranks: OnRanks) -> None:
    digests = {one for ranks in (1, 5) for one in on_ranks(ranks, momentum_of_negative_zeros, samples)}
    assert digests == {digest(torch.full((1, 2), -0.0))}


def spare_buffers() -> list[int]:
    with dl.join_world() as world:
        model = network()
        kept = []
        loop = loop_over(world, "", model, shards=8, epochs=2)
        for step in loop:
            for number, rows in enumerate(step):
                step.backward(loss_of(model, rows), weight=len(rows) if number else 0)
            step.fold()
            kept.append(sum(len(bucket.memory.spare) for bucket in loop.fold.gradients.buckets))
        return kept


@pytest.mark.quick_on_gpus
def test_no_step_leaves_more_memory_behind_than_the_one_before(on_ranks: OnRanks) -> None:
    for kept in on_ranks(3, spare_buffers):
        assert kept[2:] == kept[2:3] * 6
