"""Bad arguments of Batches and unreadable data, which are refused on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

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


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "mini-batch 0": (numbers(5), {"batch_size": 0}, ValueError, "batch_size must be a whole number, 1 or more. Got 0"),
    "mini-batch a truth value": (numbers(5), {"batch_size": True}, ValueError, "Got True"),
    "mini-batch a text": (numbers(5), {"batch_size": "8"}, ValueError, "Got '8'"),
    "an order in words": (
        numbers(5),
        {"shuffle": "False"},
        ValueError,
        "shuffle must be True or False. Got 'False'",
    ),
    "an end in words": (numbers(5), {"drop_last": "no"}, ValueError, "drop_last must be True or False. Got 'no'"),
    "shards 0": (numbers(5), {"shards": 0}, ValueError, "shards must be a whole number, 1 or more. Got 0"),
    "seed a fraction": (numbers(5), {"seed": 0.5}, ValueError, "seed must be a whole number. Got 0.5"),
    "length 0": (squares, {"length": 0}, ValueError, "length must be a whole number, 1 or more. Got 0"),
    "length of data with one": (numbers(5), {"length": 5}, ValueError, "length= is for data without a length"),
    "no samples": (torch.zeros(0, 3), {}, ValueError, "at least one sample"),
    "an empty list": ([], {}, ValueError, "at least one sample"),
    "an empty dict": ({}, {}, TypeError, "must all be tensors or arrays"),
    "unequal lengths": ((numbers(5), numbers(4)), {}, ValueError, r"same first dimension.*\(5,\), \(4,\)"),
    "unequal arrays": ({"a": np.zeros(5), "b": np.zeros(4)}, {}, ValueError, "same first dimension"),
    "no first dimension": (torch.tensor(1.0), {}, ValueError, r"same first dimension.*\(\)"),
    "a list beside a tensor": ((numbers(2), [0, 1]), {}, TypeError, r"Got \['Tensor', 'list'\].*as_tensor"),
    "a number": (7, {}, TypeError, "data must be tensors.*Got int"),
    "a path": ("data/train", {}, TypeError, "samples, not text. Got 'data/train'. Read the file first"),
    "an array of words": (np.array(["a", "b"]), {}, TypeError, "must hold numbers. Got <U1. Turn text and objects"),
    "a sparse tensor": (torch.eye(4).to_sparse(), {}, TypeError, r"Got torch\.sparse_coo\. Convert it by to_dense"),
    "nothing": (None, {}, TypeError, "Got NoneType"),
    "a set": ({1, 2}, {}, TypeError, "Got set"),
    "a stream with a length": (Endless(), {"length": 4}, ValueError, "ends with the stream. Got length=4"),
    "workers of a stream": (
        Endless(),
        {"num_workers": 2},
        TypeError,
        r"in this process .* only collate_fn .*num_workers",
    ),
    "a sampler of a stream": (Endless(), {"sampler": [0]}, TypeError, r"takes only collate_fn .*\. Got \['sampler'\]"),
    "a stream that is shuffled": (
        Endless(),
        {"shuffle": True},
        ValueError,
        "shuffle needs data with a length. These have none. Pass shuffle=False",
    ),
    "a generator": (
        (i for i in "a"),
        {},
        TypeError,
        "must restart in every epoch. Got generator, .* __iter__ returns it",
    ),
    "a DataLoader": (DataLoader(Drawn()), {}, TypeError, "data must be .* Got DataLoader. Pass its dataset"),
    "shuffling with a given length": (
        WithoutLength(),
        {"shuffle": True, "length": 4},
        ValueError,
        "shuffle needs data with a length",
    ),
    "nothing left": (numbers(3), {"batch_size": 4, "drop_last": True}, ValueError, "3 samples with batch_size=4"),
    "an unknown option": (Drawn(), {"processes": 2}, TypeError, r"Got \['processes'\]"),
    "a misspelt argument": (numbers(5), {"shard": 4}, TypeError, "no argument 'shard'. Did you mean 'shards'?"),
    "half an option": (Drawn(), {"workers": 2}, TypeError, "no argument 'workers'. Did you mean 'num_workers'?"),
    "a DataLoader's sampler": (
        Drawn(),
        {"sampler": [0]},
        TypeError,
        "pass a data set without a length .*migrate.md",
    ),
    "a DataLoader's batch_sampler": (Drawn(), {"batch_sampler": []}, TypeError, "Batches itself makes"),
    "out of order": (Drawn(), {"in_order": False, "num_workers": 2}, TypeError, r"Got \['in_order'\]"),
    "workers negative": (Drawn(), {"num_workers": -1}, ValueError, "num_workers"),
    "persistent workers without workers": (Drawn(), {"persistent_workers": True}, ValueError, "persistent_workers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused(what: str) -> None:
    data, options, kind, words = REFUSED[what]
    with dl.join_world() as world, pytest.raises(kind, match=words):
        dl.Batches(data, world=world, **{"batch_size": 2, **options})


def test_a_nested_tensor_is_refused() -> None:
    data = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)  # imports torch._dynamo
    with (
        dl.join_world() as world,
        pytest.raises(TypeError, match=r"Got a nested tensor\. Convert it by to_dense\(\) or"),
    ):
        dl.Batches(data, 2, world)


@pytest.mark.parametrize("batch_size", [np.int64(4), np.uint8(4), torch.tensor(4)], ids=["int64", "uint8", "torch"])
def test_integers_of_numpy_and_torch_are_accepted(batch_size: Any) -> None:
    with dl.join_world() as world:
        batches = dl.Batches(numbers(10), batch_size, world, shards=np.int64(2), seed=np.int64(5))  # type: ignore[arg-type]
        assert [len(indices) for indices in places(batches, 1).values()] == [2, 2, 2, 2, 1, 1]
        assert type(batches.batch_size) is int


class Unmounted(Drawn):
    """Its files do not exist."""

    def __len__(self) -> int:
        raise OSError("the disk is not there")


def refusals(cases: list[list[Any]]) -> list[tuple[str, str]]:
    """The errors of Batches for data that differ between ranks."""
    found = []
    with dl.join_world() as world:
        for data in cases:
            start = time.monotonic()
            with pytest.raises((ValueError, TypeError, OSError, dl.PeerFailed)) as refused:
                dl.Batches(data[world.rank], 4, world)
            assert time.monotonic() - start < FAULT_S
            assert world.sum(torch.ones(())) == world.size  # the ranks are still in step
            found.append((refused.typename, str(refused.value)))
    return found


def test_data_that_are_bad_or_other_ones_on_one_rank_are_refused_on_all(on_ranks: OnRanks) -> None:
    good, fewer, others = (numbers(10), numbers(10)), numbers(9), numbers(10) + 1
    bad = {"ValueError": (numbers(10), fewer), "TypeError": 5, "OSError": Unmounted()}
    cases = [[good, data, good] for data in bad.values()]
    cases += [[numbers(10), numbers(10), fewer], [numbers(10), numbers(10), others]]
    first, own, last = on_ranks(3, refusals, cases)
    assert [kind for kind, _ in own] == [*bad, "ValueError", "ValueError"]
    for found in (first, last):
        for (kind, said), (failed, text) in zip(own[:3], found[:3], strict=True):
            assert (failed, text) == ("PeerFailed", f"rank 1 failed: {kind}: {said}")
        assert found[3:] == own[3:]
    assert "the length is 10 samples on rank 0, but 9 samples on rank 2" in own[3][1]
    assert "different values on rank 2 than on rank 0" in own[4][1]


class Broken(Dataset[Any]):
    """Ten samples, one of which cannot be read."""

    def __init__(self, bad: int, kind: type[Exception] = ValueError) -> None:
        self.bad, self.kind = bad, kind

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise self.kind("the file is torn")
        return index


class Unlucky(Exception):
    """Its constructor takes more than a text, so DataLoader cannot raise it again."""

    def __init__(self, left: str, right: str = "") -> None:
        if not right and left.startswith("Caught"):
            raise TypeError("two texts")
        super().__init__(left, right)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(IndexError, 0), (StopIteration, 0), (Unlucky, 0), (KeyError, 2), (StopIteration, 2), (Unlucky, 2)],
)
def test_a_sample_that_cannot_be_read_is_named(kind: type[Exception], workers: int) -> None:
    with dl.join_world() as world:
        batches = dl.Batches(Broken(7, kind), 4, world, num_workers=workers, shuffle=False)
        epoch = batches.epoch(1)
        next(epoch).data(0)  # the mini-batch before it is read
        expected = RuntimeError if kind is StopIteration or (kind is Unlucky and workers) else kind
        with pytest.raises(expected) as caught:
            next(epoch).data(0)
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
        place = "Sample 7 of epoch 1 raised" if kind is StopIteration else "sample 7 of epoch 1 was read"
        assert place in said


def drained(samples: list[Any]) -> Any:
    return next(iter(()))


@pytest.mark.parametrize(("data", "options"), [(range(9), {}), (range(9), {"num_workers": 1}), (Endless(), {})])
def test_a_collate_fn_that_runs_out_is_named(data: Any, options: dict[str, Any]) -> None:
    with dl.join_world() as world:
        batches = dl.Batches(data, 4, world, collate_fn=drained, shuffle=False, **options)
        with pytest.raises(RuntimeError, match="drained raised StopIteration for 4 samples"):
            next(batches.epoch(1)).data(0)


class TogetherOnly(Dataset[Any]):
    """torch's DataLoader reads it, by __getitems__."""

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class PaddedTogether(TogetherOnly):
    """As a data set of Hugging Face whose `set_transform` pads what is read together."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 + index)


class WithoutBase:
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


ONE_BY_ONE = "one by one, by __getitem__.*__getitems__ is not called.*padding, belongs in collate_fn"


@pytest.mark.parametrize("is_subset", [False, True])
@pytest.mark.parametrize(
    ("kind", "error"), [(TogetherOnly, NotImplementedError), (PaddedTogether, RuntimeError)], ids=["alone", "padded"]
)
def test_an_error_names_getitems_which_only_torch_calls(
    kind: type[TogetherOnly], error: type[Exception], is_subset: bool
) -> None:
    data: Any = Subset(kind(), range(4)) if is_subset else kind()
    with dl.join_world() as world:
        batches = dl.Batches(data, 4, world, shuffle=False)
        with pytest.raises(error) as caught:
            next(batches.epoch(1)).data(0)
        assert re.search(ONE_BY_ONE, caught.value.__notes__[-1])
        with pytest.raises(TypeError, match=f"Got WithoutBase.*{ONE_BY_ONE}"):
            dl.Batches(WithoutBase(), 4, world)


def test_an_error_in_a_subset_does_not_name_the_getitems_of_torchs_subset() -> None:
    with dl.join_world() as world:
        batches = dl.Batches(Subset(Broken(0, KeyError), range(4)), 4, world, shuffle=False)
        with pytest.raises(KeyError) as caught:
            next(batches.epoch(1)).data(0)
        assert caught.value.__notes__ == ["while sample 0 of epoch 1 was read"]


def read_all(world: dl.World, folder: str, data: Any, size: int, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers} if workers else {}
    if workers:
        options["multiprocessing_context"] = "fork"  # a spawned worker imports torch first: 3 s on two cores
    for loaded in dl.Batches(data, size, world, shuffle=False, **options).epoch(1):
        loaded.finish_reading()
    world.raise_if_any_failed(None)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_on_one_rank_ends_all_ranks(workers: int, refused: Refused) -> None:
    # 0..3, 4..7 over 3 ranks: 4 and 5 to rank 0, 6 to rank 1, 7 to rank 2.
    said = "the file is torn.*sample 6 of epoch 1 was read"
    refused(3, read_all, Broken(6), 4, workers, kind="ValueError", said=said, by=1)


class Ragged(Dataset[torch.Tensor]):
    """Sample 5 is longer than the others."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4 if index == 5 else 3)


class RaggedStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Ragged()[index] for index in range(12))


class Holes(Dataset[Any]):
    """Its samples are of no kind that torch can stack."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, None]:
        return torch.ones(3), None


@pytest.mark.covers("D10")
def test_samples_of_a_kind_that_cannot_be_stacked_are_refused_with_their_remedy(refused: Refused) -> None:
    results = refused(1, read_all, Holes(), 6, 0, kind="TypeError", said="found <class 'NoneType'>")
    assert "Let each sample have tensors, arrays or numbers, or pass a collate_fn" in results[0].text
    assert "unequal sizes" not in results[0].text


@pytest.mark.covers("D10")
@pytest.mark.parametrize("data", [Ragged(), RaggedStream()], ids=["a data set", "a stream"])
def test_samples_of_unequal_sizes_are_refused_with_the_remedy(data: Any, refused: Refused) -> None:
    results = refused(2, read_all, data, 6, 0, kind="RuntimeError", said="equal size", by=1)
    assert "Pass a collate_fn that pads samples of unequal sizes" in results[0].text  # a peer gets the notes too


def without_the_key(samples: list[dict[str, Any]]) -> Any:
    return samples[0]["images"]


@pytest.mark.covers("D10")
def test_an_error_of_a_collate_fn_that_is_not_about_sizes_does_not_advise_padding() -> None:
    with dl.join_world() as world, pytest.raises(KeyError) as caught:
        list(dl.Batches([{}] * 4, 2, world, shuffle=False, collate_fn=without_the_key))
    assert caught.value.__notes__ == ["while without_the_key combined the 2 samples of a shard."]
