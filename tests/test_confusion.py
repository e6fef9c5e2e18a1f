"""The confusion matrix: exact counts on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.images import images, network
from tests.support.refusals import Refused

SIZE = 100


def counts_of_one_process(size: int) -> list[list[int]]:
    model, (inputs, labels) = network().eval(), images(size)
    counts = [[0] * 3 for _ in range(3)]
    with torch.no_grad():
        for truth, predicted in zip(labels.tolist(), model(inputs).argmax(1).tolist(), strict=True):
            counts[truth][predicted] += 1
    return counts


def counted(size: int, batch_size: int, shards: int | None = None, dtype: Any = torch.int64) -> list[list[int]]:
    with dl.join_world() as world:
        inputs, labels = images(size)
        model = network().train()
        batches = dl.Batches((inputs, labels.to(dtype)), batch_size, world, shards=shards)
        counts = dl.confusion_matrix(model, batches, 3)
        assert (counts.dtype, counts.device, model.training) == (torch.int64, world.device, True)
        found: list[list[int]] = counts.tolist()
        return found


@pytest.mark.covers("G4", "B8")
@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("size", "batch_size", "shards", "dtype"),
    [(SIZE, 7, None, torch.int64), (1, 8, None, torch.uint8), (10, 4, 5, torch.int32)],
)
def test_the_counts_are_those_of_one_process(
    ranks: int, size: int, batch_size: int, shards: int | None, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    expected = counts_of_one_process(size)
    assert sum(map(sum, expected)) == size
    assert on_ranks(ranks, counted, size, batch_size, shards, dtype) == [expected] * ranks


class Named(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": super().forward(inputs)}  # type: ignore[no-untyped-call]


def count(world: dl.World, folder: str, case: str) -> None:
    inputs, labels = images(SIZE)
    other_data: dict[str, Any] = {
        "float": (inputs, labels.float()),
        "a column": (inputs, labels[:, None]),
        "alone": inputs,
        "one part": (inputs,),
    }
    data = other_data.get(case, (inputs, labels))
    classes: Any = 3
    model = network()
    match case:
        case "too large":
            labels[SIZE - 1] = 3  # of the last shard, so of one rank
        case "negative":
            labels[0] = labels[1] = -1
        case "no classes":
            classes = 0
        case "a dict":
            model = Named(model)
        case "more classes":
            classes = 4
        case "different classes":
            classes = 3 + world.rank
    dl.confusion_matrix(model, dl.Batches(data, SIZE, world, shuffle=False, shards=world.size), classes)


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("too large", "Labels must be from 0 to 2, with classes=3. 1 of the labels are not. Pass classes= their"),
        ("negative", "2 of the labels are not"),
        ("float", r"Labels must be integers, one per sample.*Got torch.float32 of shape \(50,\)"),
        ("a column", r"Got torch.int64 of shape \(50, 1\)"),
        ("alone", "Got Tensor without a second part"),
        ("one part", "Got tuple without a second part"),
        ("no classes", "classes must be a whole number, 1 or more. Got 0"),
        ("a dict", r"Got dict. Pass classes= .* If the model returns anything else, pass forward="),
        ("more classes", r"one value per sample and class, shape \(50, 4\). Got shape \(50, 3\)"),
        ("different classes", "classes must be the same on every rank. Rank 0 has 3, rank 1 has 4"),
    ],
)
def test_what_cannot_be_counted_is_refused_on_every_rank(case: str, said: str, refused: Refused) -> None:
    refused(2, count, case, kind="ValueError", said=said)


def test_equal_outputs_count_as_the_first_and_forward_is_used(world: dl.World) -> None:
    batches = dl.Batches((torch.ones(4, 2), torch.tensor([0, 1, 2, 2])), 4, world)
    model = nn.Linear(2, 3)
    counts = dl.confusion_matrix(model, batches, 3, forward=lambda model, data: torch.zeros(len(data[1]), 3))
    assert counts.tolist() == [[1, 0, 0], [1, 0, 0], [2, 0, 0]]
