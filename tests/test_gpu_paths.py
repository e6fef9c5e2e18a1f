"""The paths of a GPU, on a simulated one: no step makes the host wait, and the weights are those of the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import run


def found(ranks: int) -> Any:
    done = run("-m", "tests.support.gpu_steps", str(ranks), folder=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.covers("J18")
@pytest.mark.parametrize("ranks", [1, 3])
def test_no_step_makes_the_host_wait_for_a_gpu_and_its_weights_are_those_of_the_cpu(ranks: int) -> None:
    of_ranks = found(ranks)
    assert len(of_ranks) == ranks
    waits = {name: places for one in of_ranks for name, (places, _, _) in one.items() if places}
    assert waits == {}
    for name in of_ranks[0]:
        of_rank_0, on_cpu = of_ranks[0][name][1:]
        assert all(one[name][1] == of_rank_0 for one in of_ranks), name
        # Without fixed shards three ranks' sums may have another order on the CPU, in memory: some units in the last.
        assert of_rank_0 == (on_cpu if ranks < 3 else pytest.approx(on_cpu, rel=1e-4, abs=1e-6)), name


@pytest.mark.slow
def test_the_simulation_notes_each_wait_and_refuses_two_devices() -> None:
    results = found(0)
    refused = {name: results.pop(name) for name in ("two devices", "stacked from two devices")}
    assert all("Expected all tensors to be on the same device" in str(said) for said in refused.values())
    free = ("not blocking", "filled", "by a number")
    assert results == {name: int(name not in free) for name in results}
