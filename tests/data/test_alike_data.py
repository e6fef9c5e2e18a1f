"""The comparison of the data between ranks: data that were split by hand are refused."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

import ddp_loop as dl
from ddp_loop.data.fingerprints import difference, of
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.sources import FORKED, Mapped
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("D10")

SIZE = 24
REMEDY = "Give every rank all data, in the same order; Batches splits them"


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SIZE, 4, generator=generator), torch.arange(SIZE) % 3


class Pairs(Dataset[Any]):
    """The tensors as samples, with noise if given."""

    def __init__(self, noise: Callable[[], float] | None = None) -> None:
        self.inputs, self.labels = tensors()
        self.noise, self.read = noise, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        rows = self.inputs[index] if self.noise is None else self.inputs[index] + self.noise()
        return rows, int(self.labels[index])


class Stream(IterableDataset[Any]):
    """The samples first, first + every, ... as a stream."""

    def __init__(self, first: int, every: int, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.first, self.every, self.noise = first, every, noise

    def __iter__(self) -> Iterator[Any]:
        inputs, labels = tensors()
        for row, label in islice(zip(inputs, labels, strict=True), self.first, None, self.every):
            yield row + self.noise(), int(label)


class Later(Stream):
    """The same on all ranks up to its fourth mini-batch."""

    def __init__(self, rank: int) -> None:
        super().__init__(0, 1)
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for number, (row, label) in enumerate(super().__iter__()):
            yield row + (self.rank if number >= 18 else 0), label


def other_labels(rank: int) -> Any:
    inputs, labels = tensors()
    return inputs, labels + rank * (labels == 2)


def labels_changed(rank: int) -> Pairs:
    data = Pairs()
    data.labels = data.labels + rank
    return data


UNALIKE: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensors split by hand": (
        lambda rank: tuple(one[rank::2] for one in tensors()),
        r"data\[0\], float32 \(12, 4\), has different values on rank 1 than on rank 0",
    ),
    "tensors of unequal lengths": (
        lambda rank: tuple(one[rank:] for one in tensors()),
        "the length is 24 samples on rank 0, but 23 samples on rank 1",
    ),
    "a Subset": (
        lambda rank: Subset(Pairs(), range(rank, SIZE, 2)),
        "the indices of the Subset, 12 numbers, has different values on rank 1",
    ),
    "a Subset of a Subset": (
        lambda rank: Subset(Subset(Pairs(), list(range(rank, SIZE, 2))), range(12)),
        "the indices of the Subset, 12 numbers, has different values on rank 1",
    ),
    "a data set that splits itself": (
        lambda rank: Subset(Pairs(), range(rank, SIZE, 2)).__getitem__,
        r"sample 0\[0\], float32 \(4,\), has different values on rank 1",
    ),
    "another dtype of an array": (
        lambda rank: {"x": tensors()[0].numpy().astype(("f4", "f8")[rank])},
        r"data\['x'\] is float32 \(24, 4\) on rank 0, but float64 \(24, 4\) on rank 1",
    ),
    "other labels": (other_labels, r"data\[1\], int64 \(24,\), has different values on rank 1"),
    "other labels of a Subset of tensors": (
        lambda rank: Subset(TensorDataset(*other_labels(rank)), range(SIZE)),
        r"data\[1\], int64 \(24,\), has different values on rank 1",
    ),
    "other labels of a data set": (labels_changed, r"sample 0\[1\], int, has different values on rank 1"),
    "read by workers": (labels_changed, r"sample 0\[1\], int, has different values on rank 1 than on rank 0"),
    "a stream that splits itself": (
        lambda rank: Stream(rank, 2),
        r"the first sample of mini-batch 1\[0\], float32 \(4,\), has different values on rank 1",
    ),
    "a stream that differs late": (
        lambda rank: Later(rank),
        r"the first sample of mini-batch 4\[0\], float32 \(4,\), has different values on rank 1",
    ),
}


def train(data: Any, world: dl.World, steps: int | None = None, **options: Any) -> None:
    """Train for some steps, or for one epoch."""
    batches, model = dl.Batches(data, 6, world, **options), nn.Linear(4, 1)
    epochs = 1 if steps is None else None
    for step in loop_on(batches, model, epochs=epochs, steps=steps):
        for part in step:
            rows = part["x"] if isinstance(part, dict) else part[0]
            step.backward(model(rows.float()).mean())
        step.fold()


OPTIONS: dict[str, dict[str, Any]] = {
    "a data set that splits itself": {"length": 12},
    "read by workers": FORKED,
}
SOME = ["tensors split by hand", "a Subset", "a stream that splits itself"]


def train_on(world: dl.World, folder: str, kind: str) -> None:
    train(UNALIKE[kind][0](world.rank), world, **OPTIONS.get(kind, {}))


def evaluate_on(world: dl.World, folder: str, kind: str) -> None:
    data = UNALIKE[kind][0](world.rank)
    batches = dl.Batches(data, 6, world, shuffle=None if isinstance(data, Stream) else False)
    dl.evaluate(nn.Identity(), batches, sums=lambda rows, labels: rows.sum(1))


@pytest.mark.parametrize(("use", "kinds"), [(train_on, [*UNALIKE]), (evaluate_on, SOME)])
def test_ranks_with_different_data_get_an_error_that_names_the_difference(
    use: Callable[..., None], kinds: list[str], refused: Refused
) -> None:
    for kind in kinds:
        said = rf"Every rank must be given the same data; {UNALIKE[kind][1]}.*\. {REMEDY}"
        refused(2, use, kind, kind="ValueError", said=said)


def train_unchecked() -> None:
    for kind in SOME:
        with dl.join_world() as world:
            train(UNALIKE[kind][0](world.rank), world, check_data=False)


def test_data_are_not_compared_without_check_data(on_ranks: OnRanks) -> None:
    on_ranks(2, train_unchecked)


# -- what is sound passes --------------------------------------------------------------------------------------


class Picture:
    """An image like pillow's, which is not a tensor but can become an array."""

    def __init__(self, index: int) -> None:
        self.kept = np.full((3, 3), index, dtype=np.uint8)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.kept


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove such tensors
        found: torch.Tensor = torch.quantize_per_tensor(tensor, 0.5, 10, torch.quint8)
        return found


def everything(index: int) -> dict[str, Any]:
    """A sample with everything that it may have."""
    return {
        "picture": Picture(index),
        "words": ["a", str(index)],
        "nothing": None,
        "bytes": b"x",
        "set": {1, index},
        "nan": float("nan"),
        "coordinates": torch.eye(2).to_sparse(),
        "quantized": quantized(torch.eye(2)),
    }


class InAWorker(Pairs):
    """Can only be read in a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is None:
            raise OSError("the file is opened by a worker")
        return super().__getitem__(index)


class ByKey(Pairs):
    def __getitem__(self, key: Any) -> tuple[torch.Tensor, int]:
        return super().__getitem__(int(key[0]))


def train_on_sound(folder: Path) -> int:
    large = torch.arange(20 * 2**20, dtype=torch.float32)
    with dl.join_world(seed=1) as world:
        path = folder / "data.npy"
        with world.rank_zero_first():
            if world.rank == 0:
                np.save(path, tensors()[0].numpy())
        of_this_rank = np.random.default_rng(world.rank)  # as without a seed: different on each rank
        sound: dict[str, Any] = {
            "tensors": tensors(),
            "draws by random": Pairs(random.random),
            "draws by numpy": Pairs(lambda: float(np.random.rand())),
            "draws by torch": Pairs(lambda: float(torch.rand(()))),
            "draws by its own generator": Pairs(of_this_rank.random),
            "draws by the system": Pairs(lambda: float(os.urandom(1)[0])),
            "a stream that draws": Stream(0, 1, random.random),
            "a Subset": Subset(Pairs(), range(3, SIZE)),
            "a Subset of what cannot be listed": Subset(Pairs(), Mapped(200_000, lambda at: at % SIZE)),  # type: ignore[arg-type]
            "a Subset of pairs as keys": Subset(ByKey(), [(number, "a") for number in range(6)]),  # type: ignore[misc]
            "a Subset of words as keys": Subset(ByKey(), ["0a", "1b", "2c"]),  # type: ignore[list-item]
            "what a worker reads": InAWorker(),
            "large": (large.view(-1, 4).expand(5 * 2**20, 4),),
            "turned": (large.view(4, -1).t(),),
            "a file in memory": (np.load(path, mmap_mode="r"),),
        }
        for kind, data in sound.items():
            train(data, world, steps=2, **(FORKED if "worker" in kind else {}))
        return len(sound)


@pytest.mark.slow
def test_the_same_data_on_every_rank_are_accepted(tmp_path: Path, on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_on_sound, tmp_path) == [15, 15]


def test_samples_of_any_kind_are_compared_as_far_as_they_can_be() -> None:
    names = of("sample", everything(1))
    assert difference([names, of("sample", everything(1))]) is None
    assert names["sample['picture']"][0] == "uint8 (3, 3)"
    assert names["sample['picture']"] != of("sample", everything(2))["sample['picture']"]
    assert names["sample['words'][1]"] != of("sample", everything(2))["sample['words'][1]"]


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "turned"])
def test_a_part_of_the_bytes_distinguishes_large_tensors_that_were_split_by_hand(turned: bool) -> None:
    whole = torch.arange(36 * 2**20, dtype=torch.float32)
    whole = whole.view(2, -1).t() if turned else whole.view(-1, 2)
    halves = [whole[rank::2] if turned else whole[rank::2].contiguous() for rank in (0, 1)]
    assert min(half.nbytes for half in halves) > 64 * 2**20
    assert difference([of("data", half) for half in halves]) is not None
    assert difference([of("data", halves[0])] * 2) is None


def samples_read() -> list[tuple[int, int]]:
    found = []
    with dl.join_world() as world:
        for check_data in (True, False):
            data = Pairs()
            batches = dl.Batches(data, 6, world, check_data=check_data)
            made = data.read
            for epoch in (1, 2):
                for loaded in batches.epoch(epoch):
                    loaded.finish_reading()
            found.append((made, data.read - made))
    return found


def test_three_samples_are_read_once_and_none_without_check_data(on_ranks: OnRanks) -> None:
    assert on_ranks(2, samples_read) == [[(3, SIZE), (0, SIZE)]] * 2
    assert on_ranks(1, samples_read) == [[(0, 2 * SIZE)] * 2]


def where_the_streams_are() -> str:
    with dl.join_world(seed=4) as world:
        dl.Batches(Pairs(lambda: random.random() + np.random.rand() + float(torch.rand(()))), 6, world)
        return f"{random.random()} {np.random.rand()} {torch.rand(())}"


def test_the_comparison_leaves_the_random_state_of_the_process(on_ranks: OnRanks) -> None:
    assert on_ranks(2, where_the_streams_are) == on_ranks(1, where_the_streams_are) * 2


class Rows(IterableDataset[Any]):
    """Samples with everything that a stream may give, some of it on this rank only."""

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(tensors()[0]):
            things = np.empty(2, dtype=object)
            things[:] = Picture, object()
            tree: dict[str, Any] = {"number": number}
            tree["child"] = {"parent": tree}
            yield {
                "row": row.clone(),
                "label": number,
                "things": things,
                "tree": tree,
                "of another machine": row.numpy().astype(">f4"),
                "long": np.ones(2, np.longdouble),
                "nested": torch.nested.nested_tensor([row, row[:2]], layout=torch.jagged),
                "turned": torch.complex(row, row).conj(),
                "quantized": quantized(row),
                "day": np.datetime64("2020-02-02"),
            }


def take_apart(samples: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Removes and overwrites parts of the samples, as a collate_fn may."""
    labels = [sample.pop("label") for sample in samples]
    return [torch.stack([sample["row"].div_(2) for sample in samples]), torch.tensor(labels)]


def go_through_rows() -> int:
    with dl.join_world(seed=1) as world:
        if world.rank:
            torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)  # numbered in each process
        train(Rows(), world, collate_fn=take_apart)
        batches = dl.Batches(Rows(), 6, world, collate_fn=take_apart)
        return int(dl.evaluate(nn.Identity(), batches, sums=lambda rows, labels: rows.sum(1))["samples"])


def test_a_streams_samples_may_be_of_any_kind_and_changed_by_collate_fn(on_ranks: OnRanks) -> None:
    assert on_ranks(2, go_through_rows) == [SIZE] * 2
