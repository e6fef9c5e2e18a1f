"""Bad arguments of Batches and unreadable data, which are refused on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import ddp_loop as dl
from tests.support.refusals import Refused
from tests.support.sources import FORKED, Drawn, Mapped, Streamed, numbers, squares

VALUES: list[tuple[Any, dict[str, Any], str]] = [  # data, options of Batches, what a ValueError says
    (numbers(5), {"batch_size": 0}, "batch_size must be a whole number, 1 or more. Got 0"),
    (numbers(5), {"batch_size": True}, "Got True"),
    (numbers(5), {"batch_size": "8"}, "Got '8'"),
    (numbers(5), {"shuffle": "False"}, "shuffle must be True or False. Got 'False'"),
    (numbers(5), {"drop_last": "no"}, "drop_last must be True or False. Got 'no'"),
    (numbers(5), {"shards": 0}, "shards must be a whole number, 1 or more. Got 0"),
    (numbers(5), {"seed": 0.5}, "seed must be a whole number. Got 0.5"),
    (squares, {"length": 0}, "length must be a whole number, 1 or more. Got 0"),
    (numbers(5), {"length": 5}, "length= is for data without a length"),
    (torch.zeros(0, 3), {}, "at least one sample"),
    ([], {}, "at least one sample"),
    ((numbers(5), numbers(4)), {}, r"same first dimension.*\(5,\), \(4,\)"),
    ({"a": np.zeros(5), "b": np.zeros(4)}, {}, "same first dimension"),
    (torch.tensor(1.0), {}, r"same first dimension.*\(\)"),
    (Streamed(count), {"length": 4}, "ends with the stream. Got length=4"),
    (Streamed(count), {"shuffle": True}, "shuffle needs data with a length. These have none. Pass shuffle=False"),
    (squares, {"shuffle": True, "length": 4}, "shuffle needs data with a length"),
    (numbers(3), {"batch_size": 4, "drop_last": True}, "3 samples with batch_size=4"),
    (Drawn(), {"num_workers": -1}, "num_workers"),
    (Drawn(), {"persistent_workers": True}, "persistent_workers"),
]
KINDS: list[tuple[Any, dict[str, Any], str]] = [  # data, options of Batches, what a TypeError says
    ({}, {}, "must all be tensors or arrays"),
    ((numbers(2), [0, 1]), {}, r"Got \['Tensor', 'list'\].*as_tensor"),
    (7, {}, "data must be tensors.*Got int"),
    ("data/train", {}, "samples, not text. Got 'data/train'. Read the file first"),
    (np.array(["a", "b"]), {}, "must hold numbers. Got <U1. Turn text and objects"),
    ((np.ma.masked_equal([1.0, 9.0, 2.0], 9.0), numbers(3)), {}, r"Got 1 of 3\. Pass array\.filled.* ~array\.mask"),
    (torch.eye(4).to_sparse(), {}, r"Got torch\.sparse_coo\. Convert it by to_dense"),
    (None, {}, "Got NoneType"),
    ({1, 2}, {}, "Got set"),
    (Streamed(count), {"num_workers": 2}, r"in this process .* only collate_fn .*num_workers"),
    (Streamed(count), {"sampler": [0]}, r"takes only collate_fn .*\. Got \['sampler'\]"),
    ((i for i in "a"), {}, "must restart in every epoch. Got generator, .* __iter__ returns it"),
    (DataLoader(Drawn()), {}, "data must be .* Got DataLoader. Pass its dataset"),
    (Drawn(), {"processes": 2}, r"Got \['processes'\]"),
    (numbers(5), {"shard": 4}, "no argument 'shard'. Did you mean 'shards'?"),
    (Drawn(), {"workers": 2}, "no argument 'workers'. Did you mean 'num_workers'?"),
    (Drawn(), {"sampler": [0]}, "pass a data set without a length .*migrate.md"),
    (Drawn(), {"batch_sampler": []}, "Batches itself makes"),
    (Drawn(), {"in_order": False, "num_workers": 2}, r"Got \['in_order'\]"),
]


@pytest.mark.parametrize(("kind", "cases"), [(ValueError, VALUES), (TypeError, KINDS)])
def test_bad_input_is_refused(
    kind: type[Exception], cases: list[tuple[Any, dict[str, Any], str]], world: dl.World
) -> None:
    for data, options, said in cases:
        with pytest.raises(kind, match=said):
            dl.Batches(data, world=world, **{"batch_size": 2, **options})


def test_a_nested_tensor_is_refused(world: dl.World) -> None:
    data = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)  # imports torch._dynamo
    with pytest.raises(TypeError, match=r"Got a nested tensor\. Convert it by to_dense\(\) or"):
        dl.Batches(data, 2, world)


class Unmounted(Drawn):
    """Its files do not exist."""

    def __len__(self) -> int:
        raise OSError("the disk is not there")


def give_rank_1(world: dl.World, folder: str, data: Any) -> None:
    try:
        dl.Batches(data if world.rank == 1 else (numbers(10), numbers(10)), 4, world)
    finally:
        assert world.sum(torch.ones(())) == world.size  # the ranks are still in step


def test_data_that_are_bad_on_one_rank_are_refused_on_all(refused: Refused) -> None:
    unequal = numbers(10), numbers(9)
    refused(3, give_rank_1, unequal, kind="ValueError", said="same first dimension", by=1)
    refused(3, give_rank_1, 5, kind="TypeError", said="data must be tensors", by=1)
    refused(3, give_rank_1, Unmounted(), kind="OSError", said="the disk is not there", by=1)


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
def test_a_sample_that_cannot_be_read_is_named(kind: type[Exception], workers: int, world: dl.World) -> None:
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


@pytest.mark.parametrize(("data", "options"), [(range(9), {}), (range(9), {"num_workers": 1}), (Streamed(count), {})])
def test_a_collate_fn_that_runs_out_is_named(data: Any, options: dict[str, Any], world: dl.World) -> None:
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
    kind: type[TogetherOnly], error: type[Exception], is_subset: bool, world: dl.World
) -> None:
    data: Any = Subset(kind(), range(4)) if is_subset else kind()
    batches = dl.Batches(data, 4, world, shuffle=False)
    with pytest.raises(error) as caught:
        next(batches.epoch(1)).data(0)
    assert re.search(ONE_BY_ONE, caught.value.__notes__[-1])
    with pytest.raises(TypeError, match=f"Got WithoutBase.*{ONE_BY_ONE}"):
        dl.Batches(WithoutBase(), 4, world)


def test_an_error_in_a_subset_does_not_name_the_getitems_of_torchs_subset(world: dl.World) -> None:
    batches = dl.Batches(Subset(Broken(0, KeyError), range(4)), 4, world, shuffle=False)
    with pytest.raises(KeyError) as caught:
        next(batches.epoch(1)).data(0)
    assert caught.value.__notes__ == ["while sample 0 of epoch 1 was read"]


def read_all(world: dl.World, folder: str, data: Any, size: int, options: Mapping[str, Any]) -> None:
    for loaded in dl.Batches(data, size, world, shuffle=False, **options).epoch(1):
        loaded.finish_reading()
    world.raise_if_any_failed(None)


@pytest.mark.parametrize("options", [{}, FORKED])
def test_a_sample_that_cannot_be_read_on_one_rank_ends_all_ranks(options: dict[str, Any], refused: Refused) -> None:
    # 0..3, 4..7 over 3 ranks: 4 and 5 to rank 0, 6 to rank 1, 7 to rank 2.
    said = "the file is torn.*sample 6 of epoch 1 was read"
    refused(3, read_all, Broken(6), 4, options, kind="ValueError", said=said, by=1)


def ragged(index: int) -> torch.Tensor:
    """Sample 5 is longer than the others."""
    return torch.ones(4 if index == 5 else 3)


def all_ragged() -> Iterator[torch.Tensor]:
    return map(ragged, range(12))


@pytest.mark.covers("D10")
@pytest.mark.parametrize("sample", [None, 1], ids=["None alone", "None after a number"])
def test_samples_of_a_kind_that_cannot_be_stacked_are_refused_with_their_remedy(sample: Any, world: dl.World) -> None:
    with pytest.raises((TypeError, RuntimeError), match="NoneType") as caught:
        read_all(world, "", [(torch.ones(3), sample), (torch.ones(3), None)] * 6, 6, {})
    assert "Let each sample have tensors, arrays or numbers, or pass a collate_fn" in caught.value.__notes__[-1]
    assert "unequal sizes" not in "".join(caught.value.__notes__)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("data", [Mapped(12, ragged), Streamed(all_ragged)])
def test_samples_of_unequal_sizes_are_refused_with_the_remedy(data: Any, refused: Refused) -> None:
    results = refused(2, read_all, data, 6, {}, kind="RuntimeError", said="equal size", by=1)
    assert "Pass a collate_fn that pads samples of unequal sizes" in results[0].text  # a peer gets the notes too


def without_the_key(samples: list[dict[str, Any]]) -> Any:
    return samples[0]["images"]


@pytest.mark.covers("D10")
def test_an_error_of_a_collate_fn_that_is_not_about_sizes_does_not_advise_padding(world: dl.World) -> None:
    with pytest.raises(KeyError) as caught:
        list(dl.Batches([{}] * 4, 2, world, shuffle=False, collate_fn=without_the_key))
    assert caught.value.__notes__ == ["while without_the_key combined the 2 samples of a shard."]
