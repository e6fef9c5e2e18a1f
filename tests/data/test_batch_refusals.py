"""Bad arguments of Batches and unreadable data, which are refused on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import ddp_loop as dl
from tests.support.harness import FAULT_S, OnRanks
from tests.support.refusals import Refused
from tests.support.sources import Drawn, numbers, places, squares


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "mini-batch 0": (numbers(5), 0, {}, ValueError, "batch_size must be a whole number, 1 or more. Got 0"),
    "mini-batch negative": (numbers(5), -2, {}, ValueError, "Got -2"),
    "mini-batch a fraction": (numbers(5), 2.0, {}, ValueError, "Got 2.0"),
    "mini-batch a truth value": (numbers(5), True, {}, ValueError, "Got True"),
    "mini-batch a text": (numbers(5), "8", {}, ValueError, "Got '8'"),
    "mini-batch nothing": (numbers(5), None, {}, ValueError, "Got None"),
    "an order in words": (
        numbers(5),
        2,
        {"shuffle": "False"},
        ValueError,
        "shuffle must be True or False. Got 'False'",
    ),
    "an end in words": (numbers(5), 2, {"drop_last": "no"}, ValueError, "drop_last must be True or False. Got 'no'"),
    "shards 0": (numbers(5), 2, {"shards": 0}, ValueError, "shards must be a whole number, 1 or more. Got 0"),
    "shards a fraction": (numbers(5), 2, {"shards": 1.5}, ValueError, "Got 1.5"),
    "seed a fraction": (numbers(5), 2, {"seed": 0.5}, ValueError, "seed must be a whole number. Got 0.5"),
    "length 0": (squares, 2, {"length": 0}, ValueError, "length must be a whole number, 1 or more. Got 0"),
    "length negative": (squares, 2, {"length": -1}, ValueError, "Got -1"),
    "length a fraction": (squares, 2, {"length": 2.5}, ValueError, "Got 2.5"),
    "length of data with one": (numbers(5), 2, {"length": 5}, ValueError, "length= is for data without a length"),
    "length of a data set with one": (Drawn(), 2, {"length": 5}, ValueError, "These have 23 samples. Got 5"),
    "no samples": (torch.zeros(0, 3), 2, {}, ValueError, "at least one sample"),
    "an empty list": ([], 2, {}, ValueError, "at least one sample"),
    "an empty tuple": ((), 2, {}, ValueError, "at least one sample"),
    "an empty dict": ({}, 2, {}, TypeError, "must all be tensors or arrays"),
    "unequal lengths": ((numbers(5), numbers(4)), 2, {}, ValueError, r"same first dimension.*\(5,\), \(4,\)"),
    "unequal arrays": ({"a": np.zeros(5), "b": np.zeros(4)}, 2, {}, ValueError, "same first dimension"),
    "no first dimension": (torch.tensor(1.0), 2, {}, ValueError, r"same first dimension.*\(\)"),
    "no first dimension beside one": ((numbers(5), torch.tensor(1)), 2, {}, ValueError, "same first dimension"),
    "a list beside a tensor": ((numbers(2), [0, 1]), 2, {}, TypeError, r"Got \['Tensor', 'list'\].*as_tensor"),
    "a list in a dict": ({"x": numbers(2), "y": [0, 1]}, 2, {}, TypeError, "must all be tensors or arrays"),
    "a number": (7, 2, {}, TypeError, "data must be tensors.*Got int"),
    "a path": ("data/train", 2, {}, TypeError, "samples, not text. Got 'data/train'. Read the file first"),
    "bytes": (b"text", 2, {}, TypeError, "samples, not text. Got b'text'"),
    "an array of words": (np.array(["a", "b"]), 2, {}, TypeError, "must hold numbers. Got <U1. Turn text and objects"),
    "an array of objects": (np.array([{}, None]), 2, {}, TypeError, "must hold numbers. Got object"),
    "a sparse tensor": (torch.eye(4).to_sparse(), 2, {}, TypeError, r"Got torch\.sparse_coo\. Convert it by to_dense"),
    "a sparse label": ((numbers(4), torch.eye(4).to_sparse()), 2, {}, TypeError, "must be dense"),
    "a nested tensor": (
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        2,
        {},
        TypeError,
        r"Got a nested tensor\. Convert it by to_dense\(\) or to_padded_tensor",
    ),
    "nothing": (None, 2, {}, TypeError, "Got NoneType"),
    "a set": ({1, 2}, 2, {}, TypeError, "Got set"),
    "an iterator": (iter([1, 2]), 2, {}, TypeError, "Got list_iterator"),
    "a stream with a length": (Endless(), 2, {"length": 4}, ValueError, "ends with the stream. Got length=4"),
    "a DataLoader": (torch.utils.data.DataLoader(Drawn()), 2, {}, TypeError, "Got DataLoader"),
    "shuffling without a length": (squares, 2, {"shuffle": True}, ValueError, "shuffle needs data with a length"),
    "shuffling with a given length": (
        WithoutLength(),
        2,
        {"shuffle": True, "length": 4},
        ValueError,
        "shuffle needs data with a length",
    ),
    "nothing left": (numbers(3), 4, {"drop_last": True}, ValueError, "3 samples with batch_size=4"),
    "an unknown option": (Drawn(), 2, {"processes": 2}, TypeError, r"Got \['processes'\]"),
    "a misspelt argument": (numbers(5), 2, {"shard": 4}, TypeError, "no argument 'shard'. Did you mean 'shards'?"),
    "half an option": (Drawn(), 2, {"workers": 2}, TypeError, "no argument 'workers'. Did you mean 'num_workers'?"),
    "a misspelt argument of a stream": (Endless(), 2, {"droplast": True}, TypeError, "Did you mean 'drop_last'?"),
    "a DataLoader's sampler": (
        Drawn(),
        2,
        {"sampler": [0]},
        TypeError,
        "pass a data set without a length .*migrate.md",
    ),
    "a DataLoader's batch_sampler": (Drawn(), 2, {"batch_sampler": []}, TypeError, "Batches itself makes"),
    "out of order": (Drawn(), 2, {"in_order": False, "num_workers": 2}, TypeError, r"Got \['in_order'\]"),
    "workers negative": (Drawn(), 2, {"num_workers": -1}, ValueError, "num_workers"),
    "persistent workers without workers": (Drawn(), 2, {"persistent_workers": True}, ValueError, "persistent_workers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused(what: str) -> None:
    data, batch_size, options, kind, words = REFUSED[what]
    with dl.join_world() as world, pytest.raises(kind, match=words):
        dl.Batches(data, batch_size, world, **options)


@pytest.mark.parametrize("batch_size", [np.int64(4), np.uint8(4), torch.tensor(4)], ids=["int64", "uint8", "torch"])
def test_integers_of_numpy_and_torch_are_accepted(batch_size: Any) -> None:
    with dl.join_world() as world:
        batches = dl.Batches(numbers(10), batch_size, world, shards=np.int64(2), seed=np.int64(5))  # type: ignore[arg-type]
        assert [len(indices) for indices in places(batches, 1).values()] == [2, 2, 2, 2, 1, 1]
        assert type(batches.batch_size) is int


def refusal(sizes: list[Any]) -> tuple[str, str, float]:
    """The error of Batches for data that differ between ranks, and its time in seconds."""
    with dl.join_world() as world:
        start = time.monotonic()
        try:
            dl.Batches(sizes[world.rank], 4, world)
        except (ValueError, TypeError, dl.PeerFailed) as error:
            seconds = time.monotonic() - start
            assert world.sum(torch.ones(())) == world.size  # the ranks are still in step
            return type(error).__name__, str(error), seconds
        return "nothing", "", 0.0


def test_data_of_different_sizes_are_refused_on_every_rank(on_ranks: OnRanks) -> None:
    for kind, text, seconds in on_ranks(3, refusal, [numbers(10), numbers(10), numbers(9)]):
        assert kind == "ValueError"
        assert "the length is 10 samples on rank 0, but 9 samples on rank 2" in text
        assert seconds < FAULT_S


@pytest.mark.parametrize(
    ("bad", "kind"), [((numbers(10), numbers(9)), "ValueError"), (5, "TypeError")], ids=["lengths", "a number"]
)
def test_bad_data_on_one_rank_end_all_ranks_and_the_others_name_it(bad: Any, kind: str, on_ranks: OnRanks) -> None:
    good, own, other = on_ranks(3, refusal, [(numbers(10), numbers(10)), bad, (numbers(10), numbers(10))])
    assert own[0] == kind
    for failed, text, seconds in (good, other):
        assert failed == "PeerFailed"
        assert text.startswith(f"rank 1 failed: {kind}: ")
        assert seconds < FAULT_S


class Broken(Dataset[Any]):
    """Ten samples, one of which cannot be read."""

    def __init__(self, bad: int, kind: type[Exception] = ValueError) -> None:
        self.bad, self.kind = bad, kind

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            self.fail()
        return index

    def fail(self) -> NoReturn:
        raise self.kind("the file is torn")


class Unlucky(Exception):
    """Its constructor takes more than a text, so DataLoader cannot raise it again."""

    def __init__(self, left: str, right: str = "") -> None:
        if not right and left.startswith("Caught"):
            raise TypeError("two texts")
        super().__init__(left, right)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [ValueError, KeyError, IndexError, StopIteration, Unlucky])
def test_a_sample_that_cannot_be_read_is_named(kind: type[Exception], workers: int) -> None:
    with dl.join_world() as world:
        batches = dl.Batches(Broken(7, kind), 4, world, num_workers=workers, shuffle=False)
        position = -1

        def read() -> None:
            nonlocal position
            for loaded in batches.epoch(1):
                loaded.data(0)
                position = loaded.mini_batch.position

        expected = RuntimeError if kind is StopIteration or (kind is Unlucky and workers) else kind
        with pytest.raises(expected) as caught:
            read()
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
        place = "Sample 7 of epoch 1 raised" if kind is StopIteration else "sample 7 of epoch 1 was read"
        assert place in said
        assert position == 0  # the mini-batches before it were read


def read_all(data: Any, workers: int) -> None:
    with dl.join_world(seed=0) as world:
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options["multiprocessing_context"] = "fork"  # a spawned worker imports torch first: 3 s on two cores
        for loaded in dl.Batches(data, 4, world, shuffle=False, **options).epoch(1):
            total = sum(loaded.data(number).sum() for number, _ in enumerate(loaded.mini_batch.shards))
            world.sum(torch.as_tensor(total))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_on_one_rank_ends_all_ranks(workers: int, on_ranks: OnRanks) -> None:
    start = time.monotonic()
    with pytest.raises(dl.RankFailed, match="the file is torn") as caught:
        on_ranks(3, read_all, Broken(6), workers)
    # 0..3, 4..7 over 3 ranks: 4 and 5 to rank 0, 6 to rank 1, 7 to rank 2.
    assert caught.value.rank == 1
    assert "sample 6 of epoch 1 was read" in caught.value.traceback
    assert time.monotonic() - start < FAULT_S  # includes joining and the start of workers


class Unmounted(Drawn):
    """Its files do not exist."""

    def __len__(self) -> int:
        raise OSError("the disk is not there")


def refusal_of_the_unmounted(bad: int) -> str:
    with dl.join_world() as world:
        with pytest.raises((OSError, dl.PeerFailed)) as caught:
            dl.Batches(Unmounted() if world.rank == bad else Drawn(), 4, world)
        return f"{caught.typename}: {caught.value}"


def test_a_length_that_raises_on_one_rank_ends_all_ranks(on_ranks: OnRanks) -> None:
    own = "OSError: the disk is not there"
    assert on_ranks(2, refusal_of_the_unmounted, 1) == [f"PeerFailed: rank 1 failed: {own}", own]


class Ragged(Dataset[torch.Tensor]):
    """Sample 5 is longer than the others."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4 if index == 5 else 3)


def read_ragged(world: dl.World, folder: str, data: Any) -> None:
    for loaded in dl.Batches(data, 6, world, shuffle=False).epoch(1):
        loaded.finish_reading()
    world.raise_if_any_failed(None)


class RaggedStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Ragged()[index] for index in range(12))


@pytest.mark.covers("D10")
@pytest.mark.parametrize("data", [Ragged(), RaggedStream()], ids=["a data set", "a stream"])
def test_samples_of_unequal_sizes_are_refused_with_the_remedy(data: Any, refused: Refused) -> None:
    results = refused(2, read_ragged, data, kind="RuntimeError", said="equal size", by=1)
    assert "Pass a collate_fn that pads samples of unequal sizes" in results[0].text  # a peer gets the notes too
