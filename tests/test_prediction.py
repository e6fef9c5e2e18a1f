"""Prediction on ranks: a row for every sample, in the data's order, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import Refused

pytestmark = pytest.mark.covers("B8")


class Marked(nn.Module):
    """Outputs that tell the sample, of several kinds; -0.0, nan and infinity among them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.kind == "float":
            rows = torch.stack([numbers.double() / 7, -torch.zeros(len(numbers), dtype=torch.float64)], 1)
            rows[numbers == 3, 0] = math.nan
            rows[numbers == 4, 0] = -math.inf
            return rows
        kinds = {
            "bool": numbers % 3 == 0,
            "int": numbers - 5,
            "int16": (numbers - 5).short(),
            "bfloat16": (numbers / 7).bfloat16(),
            "complex": torch.complex(numbers / 7, -numbers / 3),
            "image": numbers[:, None, None].expand(-1, 2, 3).float(),
            "no columns": numbers.new_zeros(len(numbers), 0),
        }
        return kinds[self.kind]


def as_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def predicted(kind: str, size: int, batch_size: int, shuffle: bool, shards: int | None = None) -> tuple[Any, ...]:
    with dl.join_world(seed=4) as world:
        batches = dl.Batches(torch.arange(size), batch_size, world, shuffle=shuffle, shards=shards)
        return as_bytes(dl.predict(Marked(kind), batches))


@pytest.mark.covers("B11")
@pytest.mark.parametrize("kind", ["float", "bool", "int", "int16", "bfloat16", "complex", "image", "no columns"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_predictions_come_in_the_order_of_the_data_bit_by_bit(ranks: int, kind: str, on_ranks: OnRanks) -> None:
    expected = as_bytes(Marked(kind)(torch.arange(20)))
    assert on_ranks(ranks, predicted, kind, 20, 7, True) == [expected] * ranks
    assert on_ranks(ranks, predicted, kind, 20, 7, False) == [expected] * ranks


@pytest.mark.covers("B11", "C6")
@pytest.mark.parametrize(("size", "batch_size", "shards"), [(1, 8, None), (2, 8, 5), (10, 8, 1)])
def test_predictions_reach_a_rank_without_samples(
    size: int, batch_size: int, shards: int | None, on_ranks: OnRanks
) -> None:
    for kind in ("float", "bool"):
        expected = as_bytes(Marked(kind)(torch.arange(size)))
        assert on_ranks(3, predicted, kind, size, batch_size, True, shards) == [expected] * 3


def predictions_of_a_source() -> list[float]:
    with dl.join_world() as world:
        return dl.predict(nn.Identity(), dl.Batches(float, 2, world, length=5)).tolist()


def test_a_source_with_a_given_length_is_predicted_in_its_order(on_ranks: OnRanks) -> None:
    assert on_ranks(2, predictions_of_a_source) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


class OneBuffer(nn.Module):
    """Gives the same buffer, refilled, at each call, as a captured graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.zeros(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.output.copy_(inputs)


def test_outputs_are_kept_although_the_model_uses_their_buffer_again(world: dl.World) -> None:
    found = dl.predict(OneBuffer(), dl.Batches(torch.arange(6.0), 3, world, shards=1))
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_predictions_of_tensors_are_not_the_tensors_themselves(world: dl.World) -> None:
    data = torch.arange(6.0)
    dl.predict(nn.Identity(), dl.Batches(data, 6, world, shuffle=False)).zero_()
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def wider_with_each_number(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    return numbers.new_zeros(len(numbers), int(numbers.max()))


def predict_wider(world: dl.World, folder: str, batch_size: int) -> None:
    batches = dl.Batches(torch.arange(6), batch_size, world, shuffle=False)
    dl.predict(nn.Identity(), batches, forward=wider_with_each_number)


@pytest.mark.parametrize("batch_size", [2, 6])
def test_rows_of_different_shapes_are_refused_on_every_rank(batch_size: int, refused: Refused) -> None:
    # For example sequences padded by shard. With 6, each rank has one shard, so only all together find the difference.
    said = "rows of one shape and dtype for all shards.*Pad them to one shape"
    first, second = refused(2, predict_wider, batch_size, kind="ValueError", said=said)
    assert first.text == second.text
