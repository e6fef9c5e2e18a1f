"""One data set cut into a part for each shard: the same bits on any number of ranks, resuming included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.own_data import made_steps, network_after_a_norm, of_rows, row_of, rows_of
from tests.support.refusals import Refused, network
from tests.support.sources import Mapped, shards_of
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A11", "A12")


def parts_of(shards: int | None, epochs: int, **options: Any) -> list[list[tuple[int, int, list[int]]]]:
    """For each epoch (position, shard, sample numbers) of this rank."""
    with dl.join_world(seed=5) as world:
        batches = dl.Batches(torch.arange(10), 3, world, shards=shards, partition="local", **options)
        return [
            [
                (mini_batch.position, shard.number, data.tolist())
                for mini_batch, shard, data in shards_of(batches, epoch + 1)
            ]
            for epoch in range(epochs)
        ]


@pytest.mark.parametrize(("ranks", "shards"), [(2, 3), (3, None)])
def test_ten_samples_over_three_shards_are_parts_of_4_3_3_shuffled_inside(
    ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    orders = []
    for epoch in zip(*on_ranks(ranks, parts_of, shards, 3), strict=True):
        whole = sorted(one for of_rank in epoch for one in of_rank)
        order = [[number for _, shard, numbers in whole if shard == part for number in numbers] for part in range(3)]
        assert [sorted(part) for part in order] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert [position for position, _, _ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def numbered(index: int) -> tuple[int, torch.Tensor]:
    return index, row_of(index) + torch.rand(())


def trained(folder: str, shards: int | None, *, as_tensors: bool = True, stop_at: int = 0) -> tuple[Tensors, list[Any]]:
    """The weights, the losses of an evaluation, and the steps that were made."""
    with dl.join_world(seed=2) as world:
        model = nn.Sequential(*network_after_a_norm(), nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data: Any = (torch.arange(17), rows_of(list(range(17)))) if as_tensors else Mapped(17, numbered)
        batches = dl.Batches(data, 9, world, shards=shards, partition="local")
        options = {"run_dir": folder or None, "allow_single_sample_shards": True, "save_every": stop_at or None}
        made = []
        for step in made_steps(batches, model, 3, optimizer, **options):
            made.append(step.iteration)
            if stop_at and step.iteration == stop_at + 1:
                break
        losses = dl.evaluate(model, batches, forward=of_rows, loss=lambda output, *_: output.square().mean(1))
        return values_of(model), [losses, made]


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("as_tensors", [True, False])
def test_with_fixed_shards_parts_give_the_same_bits_on_any_number_of_ranks(as_tensors: bool, on_ranks: OnRanks) -> None:
    expected, said = on_ranks(1, trained, "", 3, as_tensors=as_tensors)[0]
    for ranks in (2, 3):
        results = on_ranks(ranks, trained, "", 3, as_tensors=as_tensors)
        assert is_same(same_on_all([tensors for tensors, _ in results]), expected)
        assert all(told == said for _, told in results)


def test_a_run_on_parts_resumes_inside_an_epoch_on_another_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected, _ = on_ranks(2, trained, "", 3)[0]
    on_ranks(2, trained, str(tmp_path), 3, stop_at=3)
    results = on_ranks(3, trained, str(tmp_path), 3)
    assert is_same(same_on_all([tensors for tensors, _ in results]), expected)
    assert [made for _, (_, made) in results] == [[4, 5, 6]] * 3


def resumed(world: dl.World, folder: str, run: str) -> None:
    data = torch.arange(17), rows_of(list(range(17)))
    batches = dl.Batches(data, 9, world, partition="local")
    loop_on(batches, network(), epochs=3, run_dir=run)


def test_a_run_with_other_parts_is_refused(on_ranks: OnRanks, refused: Refused, tmp_path: Path) -> None:
    on_ranks(2, trained, str(tmp_path), None, stop_at=1)
    refused(3, resumed, str(tmp_path), kind="ValueError", said=r"parts: was 2, is 3", by=None)
