"""The same bits on any number of ranks: the tree over fixed shards, and streams that follow them.

All that a script keeps has them; `tests/checkpoint/test_resume.py` changes the ranks and their exchange in mid-run.
"""

from __future__ import annotations

import pytest

from tests.support.both_exchanges import GLOO, MEMORY, exchange_of
from tests.support.harness import OnRanks
from tests.support.resuming import BUILDS, Ended, different, train

# torch does not see the steps of an optimizer that a scaler makes.
pytestmark = [pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"), pytest.mark.on_gpus_too]

SAMPLES = 98  # of the last mini-batch's two some shards are empty


def of_all(results: list[Ended]) -> Ended:
    """The end of a run, which all ranks have alike."""
    assert [different(results[0], other) for other in results] == [[]] * len(results)
    return results[0]


@pytest.mark.covers("H7", "C5", "B10")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "bucket_cap_mib"), [((1, 2, 3, 4, 8), 8.0), ((1, 5), 0.002), ((1, 7), 1e-4)])
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


@pytest.mark.covers("H7")
@pytest.mark.one_device("cpu", "GPUs add up over NCCL, whose order is its own")
@pytest.mark.parametrize("ranks", [3, 4])
def test_in_memory_a_sum_has_the_trees_order_also_with_a_shard_per_rank(ranks: int, on_ranks: OnRanks) -> None:
    (fixed,) = on_ranks(1, train, "", shards=ranks)
    with exchange_of(MEMORY):
        assert different(of_all(on_ranks(ranks, train, "", shards=None)), fixed) == []
