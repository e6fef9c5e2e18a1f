"""Synced batch norm on many ranks: one row for all of them, whose bytes do not grow with their number."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from benchmarks.payload import counted
from ddp_loop.batch_norm import sync_batch_norm
from tests.batch_norm.test_synced_batchnorm import Case, Trained, assert_equal, train_on_ranks
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("D5", "J13"), pytest.mark.both_modes, pytest.mark.both_exchanges]

CASES = [
    Case((4, 0, 3)),
    Case((1, 2, 0), kind="1d", places=()),
    Case((3, 1, 2), options={"momentum": None}),
    Case((3, 1, 2), options={"track_running_stats": False}),
    Case((3, 1, 2), form="channels last"),
]


def most_rows(number: int) -> Any:
    """Have messages of more ranks than this one row."""
    return mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", number)


def train_with_one_row(cases: list[Case]) -> list[Trained]:
    with most_rows(1):
        return train_on_ranks(cases)


@pytest.mark.quick_in_both_modes
def test_one_row_gives_what_one_process_computes(on_ranks: OnRanks) -> None:
    for case, *results in zip(CASES, *on_ranks(3, train_with_one_row, CASES), strict=True):
        assert_equal(results, case)


def test_a_mean_a_thousand_deviations_from_0_keeps_nine_digits(on_ranks: OnRanks) -> None:
    case = Case((40, 30, 20), mean=1000.0)
    assert_equal([one for one, in on_ranks(3, train_with_one_row, [case])], case, 1e-8)  # fmt: skip


def bytes_of_a_layer(rows: int) -> int:
    with most_rows(rows), dl.join_world() as world, counted(world) as handed:
        layer = sync_batch_norm(nn.BatchNorm1d(100), world)
        handed.clear()
        layer(torch.randn(4, 100, requires_grad=True)).sum().backward()
        return sum(map(sum, handed))


def test_its_bytes_do_not_grow_with_the_ranks(on_ranks: OnRanks) -> None:
    on_two, on_four = (on_ranks(ranks, bytes_of_a_layer, 1)[0] for ranks in (2, 4))
    assert on_two == on_four == 2 * 8 * (3 + 2 * 100)  # forward and backward
    assert on_ranks(4, bytes_of_a_layer, 8)[0] == 4 * on_four


def call_differently(how: str) -> str:
    with most_rows(1):
        try:
            with dl.join_world() as world:
                first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
                model: Any = sync_batch_norm(nn.ModuleList([first, second]), world)
                rows = torch.randn(0 if how == "no values" else 4, 3)
                model[world.rank == 1 if how == "another layer" else 0](rows)
                model[0]._channel.send_control()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.one_mode("synchronous", "on a GPU the hosts compare digests, whatever the messages are")
@pytest.mark.parametrize(
    ("how", "said"), [("another layer", "rank 1 at the forward of layer `1`"), ("no values", "more than 1 value")]
)
def test_ranks_that_call_other_layers_or_have_no_values_all_raise(how: str, said: str, on_ranks: OnRanks) -> None:
    assert [one for one in on_ranks(3, call_differently, how) if said not in one] == []
