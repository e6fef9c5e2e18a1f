"""Steps on fake GPUs: the host waits for none, streams are in order, and the weights are the CPU's."""

from __future__ import annotations

import pytest

from tests.support.gpu_steps import SCENARIOS, run
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")


def is_same_arithmetic(name: str, ranks: int) -> bool:
    """Whether a GPU adds the same numbers in the same order as the CPU does.

    Synced batch norm has other kernels there. Without fixed shards three ranks' sums may have another order.
    """
    return ranks == 1 or (name != "synced batch norm" and (ranks == 2 or name != "one shard a rank"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_step_makes_the_host_wait_for_a_gpu_and_its_weights_are_those_of_the_cpu(
    on_fake_gpus: OnRanks, name: str, ranks: int
) -> None:
    of_ranks = on_fake_gpus(ranks, run, name)
    assert [one.waits for one in of_ranks] == [{}] * ranks
    assert [one.errors for one in of_ranks] == [[]] * ranks
    assert [one.elsewhere for one in of_ranks] == [0] * ranks
    first = of_ranks[0]
    assert all(one.on_gpu == first.on_gpu for one in of_ranks)
    is_same = is_same_arithmetic(name, ranks)
    assert first.on_gpu == (first.on_cpu if is_same else pytest.approx(first.on_cpu, rel=1e-4, abs=1e-6))
