"""The benchmark of the cost of the same bits runs, and its table exists."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks import order
from benchmarks.measuring import Ratio
from tests.support.harness import OnRanks
from tests.support.paths import DOCS

TINY = order.Job(
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 10)), (1, 4, 4), 4, 1
)


def measure_all() -> dict[str, Ratio]:
    order.JOBS["tiny"] = TINY
    try:
        return {**order.fold("tiny", 2), **order.accumulate("tiny"), **order.deterministic("tiny"),
                **order.synced("tiny", 2)}  # fmt: skip
    finally:
        del order.JOBS["tiny"]


@pytest.mark.covers("H5")
def test_every_cost_is_measured_and_in_the_table(on_ranks: OnRanks) -> None:
    table = (DOCS / "benchmarks" / "order.md").read_text()
    for what, ratio in on_ranks(2, measure_all)[0].items():
        assert min(ratio.median, ratio.one_ms, ratio.other_ms) > 0  # quartiles of two pairs mean nothing
        assert f" | {what} | " in table
