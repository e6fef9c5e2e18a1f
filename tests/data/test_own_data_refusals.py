"""Parts and own data that are refused on every rank, and errors of one rank's stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.own_data import Own, own_stream
from tests.support.refusals import ALL, Refused, network, samples

pytestmark = pytest.mark.covers("A11", "A12")


def refused(world: dl.World, folder: str, culprit: int, options: dict[str, Any], others: dict[str, Any]) -> None:
    chosen = options if culprit in (ALL, world.rank) else others
    keywords = {"partition": "local", **chosen}
    epochs, counts = keywords.pop("epochs", 1), keywords.pop("counts", [6, 6])
    data: Any = own_stream(world, counts)
    if keywords.pop("sized", False):
        data = samples(counts[world.rank])
    batches = dl.Batches(data, keywords.pop("size", 4), world, **keywords)
    model = network()
    if keywords.pop("predicts", None):
        dl.predict(model, batches)
    for step in dl.Loop(batches, epochs, state={"model": model}, progress=False):
        for shard in step:
            rows = shard[1] if isinstance(shard, list | tuple) else shard
            step.backward(model(rows).square().mean())
        step.fold()


SIZED = {"sized": True}


@pytest.mark.parametrize(
    ("culprit", "options", "others", "said"),
    [
        (1, {"epochs": 2}, {}, r"must be the same on every rank\. Rank 0 has .*1.*, rank 1 has .*2"),
        (1, {"until": "first"}, {}, r"until.* must be the same on every rank\. .*'all'.*'first'"),
        (1, {"partition": "own"}, {}, r"partition.* must be the same on every rank\. .*'local'.*'own'"),
        (1, {**SIZED, "partition": "global"}, {**SIZED}, r"must be the same on every rank\. .*'local'.*'global'"),
        (
            0,
            {**SIZED, "partition": "own"},
            {"partition": "own"},
            r"kind of data.* of Batches must be the same on every rank",
        ),
        (ALL, {"partition": "mine"}, {}, r"partition must be one of \('global', 'local', 'own'\)\. Got 'mine'"),
        (ALL, {"until": "last"}, {}, r"until must be one of"),
        (ALL, {"partition": "global", "until": "first"}, {}, r'until="first" is for data in parts'),
        (ALL, {"shards": 3}, {}, r"Got shards=3 on 2 ranks\. Remove shards="),
        (ALL, {**SIZED, "partition": "own", "shards": 4}, {}, r"Got shards=4 on 2 ranks\. Remove shards="),
        (ALL, {"shards": 2, "shares": (3, 1)}, {}, r"they follow no shares\. Got shares=\(3\.0, 1\.0\)\. Remove"),
        (ALL, {"shards": 2, "shares": "measured"}, {}, r"they follow no shares\. Got shares='measured'"),
        (ALL, {**SIZED, "partition": "own", "shards": 2, "shares": (0, 1)}, {}, r"own data, so they follow no shares"),
        (ALL, {"size": 1}, {}, r"Got batch_size=1 for 2 parts"),
        (ALL, {"size": None}, {}, r"Got batch_size=None for data without a length"),
        (
            1,
            {**SIZED, "partition": "own", "size": None},
            {**SIZED, "partition": "own"},
            r"batch_size.* must be the same",
        ),
        (ALL, {**SIZED, "size": 3, "shards": 4}, {}, r"Got batch_size=3 for 4 parts"),
        (ALL, {"counts": [0, 0]}, {}, r"None of them does"),
        (ALL, {"counts": [5, 0], "until": "first"}, {}, r'That of rank 1 does not.*until="all"'),
        (ALL, {**SIZED, "counts": [6, 5]}, {}, r"the length is 6 samples on rank 0, but 5 samples on rank 1"),
        (ALL, {**SIZED, "partition": "own", "counts": [0, 0]}, {}, r"at least one sample"),
        (ALL, {**SIZED, "partition": "own", "counts": [5, 0], "until": "first"}, {}, r"Parts of \[5, 0\] samples"),
    ],
)
def test_ranks_that_disagree_and_parts_that_give_nothing_are_refused(
    culprit: int, options: dict[str, Any], others: dict[str, Any], said: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    Refused(on_ranks, tmp_path)(2, refused, culprit, options, others, kind="ValueError", said=said, by=ALL)


def evaluated_until_first(world: dl.World, folder: str, predicts: bool) -> None:
    data: Any = samples(6) if predicts else own_stream(world, [6, 6])
    batches = dl.Batches(data, 4, world, partition="local", until="first", shuffle=False)
    if predicts:
        dl.predict(network(), batches)
    dl.evaluate(network(), batches, loss=lambda output, *rest: output.mean())


@pytest.mark.parametrize("predicts", [False, True])
def test_an_evaluation_of_some_of_the_samples_is_refused(predicts: bool, on_ranks: OnRanks, tmp_path: Path) -> None:
    said = 'until="all"'
    Refused(on_ranks, tmp_path)(2, evaluated_until_first, predicts, kind="ValueError", said=said)


class Broken(Own):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from list(super().__iter__())[:3]
        raise OSError("the disk is gone")


def over_a_broken_stream(world: dl.World, folder: str, size: int) -> None:
    data = (Broken if world.rank == 1 else Own)(10 * world.rank, 10)
    model = network()
    batches = dl.Batches(data, size, world, partition="local")
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
        for _, rows in step:
            step.backward(model(rows).square().mean())
        step.fold()


@pytest.mark.parametrize("size", [2, 6])  # the error comes in the first read, or while reading ahead
def test_an_error_of_one_own_stream_ends_all_ranks(size: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    Refused(on_ranks, tmp_path)(2, over_a_broken_stream, size, kind="OSError", said="the disk is gone", by=1)


def over_a_stream_with_nan(world: dl.World, folder: str) -> None:
    model, batches = network(), dl.Batches(own_stream(world, [12, 8]), 4, world, partition="local")
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
        for _, rows in step:
            is_bad = world.rank == 1 and step.iteration == 3
            step.backward(model(rows).square().mean() * (float("nan") if is_bad else 1))
        step.fold()


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_an_own_stream_with_nan_is_named_by_its_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = r"from shard 1 of 2, mini-batch 3 of epoch 1 of rank 1's own stream\. Look for NaN"
    Refused(on_ranks, tmp_path)(2, over_a_stream_with_nan, kind="FloatingPointError", said=said, by=ALL)
