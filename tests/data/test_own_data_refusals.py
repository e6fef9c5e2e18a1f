"""Parts and own data that are refused on every rank, and errors of one rank's stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.own_data import Own, made_steps, own_stream
from tests.support.refusals import ALL, Refused, does_it, network, samples
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A11", "A12")


Options = dict[str, Any]
CASES: list[tuple[int, Options, Options, str]] = [  # who passes the first options, and what the other rank passes
    (1, {"epochs": 2}, {}, r"must be the same on every rank\. Rank 0 has .*1.*, rank 1 has .*2"),
    (1, {"until": "first"}, {}, r"until.* must be the same on every rank\. .*'all'.*'first'"),
    (1, {"partition": "own"}, {}, r"partition.* must be the same on every rank\. .*'local'.*'own'"),
    (1, {"sized": "global"}, {"sized": "local"}, r"must be the same on every rank\. .*'local'.*'global'"),
    (0, {"sized": "own"}, {"partition": "own"}, r"kind of data.* of Batches must be the same on every rank"),
    (ALL, {"partition": "mine"}, {}, r"partition must be one of \('global', 'local', 'own'\)\. Got 'mine'"),
    (ALL, {"until": "last"}, {}, r"until must be one of"),
    (ALL, {"partition": "global", "until": "first"}, {}, r'until="first" is for data in parts'),
    (ALL, {"shards": 3}, {}, r"Got shards=3 on 2 ranks\. Remove shards="),
    (ALL, {"sized": "own", "shards": 4}, {}, r"Got shards=4 on 2 ranks\. Remove shards="),
    (ALL, {"shards": 2, "shares": (3, 1)}, {}, r"they follow no shares\. Got shares=\(3\.0, 1\.0\)\. Remove"),
    (ALL, {"shards": 2, "shares": "measured"}, {}, r"they follow no shares\. Got shares='measured'"),
    (ALL, {"sized": "own", "shards": 2, "shares": (0, 1)}, {}, r"own data, so they follow no shares"),
    (ALL, {"size": 1}, {}, r"Got batch_size=1 for 2 parts"),
    (ALL, {"size": None}, {}, r"Got batch_size=None for data without a length"),
    (1, {"sized": "own", "size": None}, {"sized": "own"}, r"batch_size.* must be the same"),
    (ALL, {"sized": "local", "size": 3, "shards": 4}, {}, r"Got batch_size=3 for 4 parts"),
    (ALL, {"counts": [0, 0]}, {}, r"None of them does"),
    (ALL, {"counts": [5, 0], "until": "first"}, {}, r'That of rank 1 does not.*until="all"'),
    (ALL, {"sized": "local", "counts": [6, 5]}, {}, r"the length is 6 samples on rank 0, but 5 samples on rank 1"),
    (ALL, {"sized": "own", "counts": [0, 0]}, {}, r"at least one sample"),
    (ALL, {"sized": "own", "counts": [5, 0], "until": "first"}, {}, r"Parts of \[5, 0\] samples"),
    (ALL, {"until": "first", "use": dl.evaluate}, {}, r'until="all"'),
    (ALL, {"sized": "local", "until": "first", "use": dl.predict}, {}, r'until="all"'),
]


def train(
    world: dl.World, counts: tuple[int, ...] = (6, 6), sized: str = "", size: int | None = 4, epochs: int = 1,
    use: Any = None, partition: str = "local", **options: Any,
) -> None:  # fmt: skip
    data: Any = samples(counts[world.rank]) if sized else own_stream(world, list(counts))
    model, batches = network(), dl.Batches(data, size, world, partition=sized or partition, **options)
    if use is dl.predict:
        dl.predict(model, batches)
    if use is dl.evaluate:
        dl.evaluate(model, batches, loss=lambda output, *rest: output.mean())
    list(made_steps(batches, model, epochs))


def disagree(world: dl.World, folder: str, culprit: int, options: Options, others: Options) -> None:
    train(world, **(options if does_it(world, culprit) else others))


def test_ranks_that_disagree_and_parts_that_give_nothing_are_refused(refused: Refused) -> None:
    for culprit, options, others, said in CASES:
        refused(2, disagree, culprit, options, others, kind="ValueError", said=said)


class Broken(Own):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from list(super().__iter__())[:3]
        raise OSError("the disk is gone")


def over_a_broken_stream(world: dl.World, folder: str, size: int) -> None:
    data = (Broken if world.rank == 1 else Own)(10 * world.rank, 10)
    list(made_steps(dl.Batches(data, size, world, partition="local"), network()))


@pytest.mark.parametrize("size", [2, 6])  # the error comes in the first read, or while reading ahead
def test_an_error_of_one_own_stream_ends_all_ranks(size: int, refused: Refused) -> None:
    refused(2, over_a_broken_stream, size, kind="OSError", said="the disk is gone", by=1)


def over_a_stream_with_nan(world: dl.World, folder: str) -> None:
    model, batches = network(), dl.Batches(own_stream(world, [12, 8]), 4, world, partition="local")
    for step in loop_on(batches, model):
        for _, rows in step:
            is_bad = world.rank == 1 and step.iteration == 3
            step.backward(model(rows).square().mean() * (float("nan") if is_bad else 1))
        step.fold()


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_an_own_stream_with_nan_is_named_by_its_rank(refused: Refused) -> None:
    said = r"from shard 1 of 2, mini-batch 3 of epoch 1 of rank 1's own stream\. Look for NaN"
    refused(2, over_a_stream_with_nan, kind="FloatingPointError", said=said)


def without_samples_beside_synced(world: dl.World, folder: str) -> None:
    model = dl.sync_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(4)).double(), world)
    data: list[torch.Tensor] = list(samples(5)) if world.rank == 0 else []
    list(made_steps(dl.Batches(data, 4, world, partition="own"), model))


def test_a_data_set_without_samples_from_which_no_rows_can_be_made_is_named(refused: Refused) -> None:
    errors = refused(2, without_samples_beside_synced, kind="IndexError", said="list index out of range", by=1)
    assert "A rank without samples needs data without rows. Pass a collate_fn that makes them from []" in errors[1].text
