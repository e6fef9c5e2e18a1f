"""How fast samples are read: ours over torch's `DataLoader`, in one process, on the CPU.

    python -m benchmarks reading [PART ...]

Epochs of 9,000 samples in mini-batches of 128, nothing done with them. "rows" (32 floats each), "digits" (images of 784
floats, which Batches stores as uint8) and "digits, uint8" (the same images, uint8 in the step too): tensors, against a
default DataLoader of a TensorDataset, against one whose sampler gives whole mini-batches, and against the bare copy
that is the least there can be. "data set": a map-style data set with 2 workers, against DataLoader itself with the
same workers: one that only indexes, and one that works for some 50 microseconds on each sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import ddp_loop as dl
from benchmarks.measuring import Ratio, Step, compare, print_table
from ddp_loop import datasets

MINI_BATCH = 128
WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


class Digits(Dataset[Any]):
    """The digits one by one; with `work` some of it is done for each."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, work: bool) -> None:
        self.images, self.labels, self.work = images, labels, work

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        for _ in range(8 if self.work else 0):
            image = image.sort(dim=-1).values
        return image, self.labels[index]


def epochs_of(batches: dl.Batches) -> Step:
    """An epoch each time, through what a Loop reads."""
    state = {"epoch": 1}

    def epoch() -> None:
        for loaded in batches.epoch(state["epoch"]):
            for number in range(len(loaded.mini_batch.shards)):
                loaded.data(number)
        state["epoch"] += 1

    return epoch


def passes_of(loader: Iterable[Any]) -> Step:
    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def copies_of(tensors: tuple[torch.Tensor, ...]) -> Step:
    def epoch() -> None:
        for indices in torch.randperm(len(tensors[0])).split(MINI_BATCH):
            for tensor in tensors:
                tensor.index_select(0, indices)

    return epoch


def measure_tensors(world: dl.World, data: Any, tensors: tuple[torch.Tensor, ...]) -> dict[str, Ratio]:
    """`data` read by Batches over `tensors`, the same samples, read by a DataLoader."""
    rows = TensorDataset(*tensors)
    whole = BatchSampler(RandomSampler(rows), MINI_BATCH, drop_last=False)
    ours = epochs_of(dl.Batches(data, MINI_BATCH, world))
    default, by_sampler = DataLoader(rows, MINI_BATCH, shuffle=True), DataLoader(rows, sampler=whole, batch_size=None)
    return {
        "ours / default DataLoader": compare(ours, passes_of(default), pairs=40, steps=3),
        "ours / by a batch sampler": compare(ours, passes_of(by_sampler), pairs=60, steps=3),
        "ours / bare copy": compare(ours, copies_of(tensors), pairs=60, steps=3),
    }


def measure_data_sets(world: dl.World, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Ratio]:
    found = {}
    for what, work in (("only indexes", False), ("works", True)):
        source = Digits(images, labels, work)
        ours = epochs_of(dl.Batches(source, MINI_BATCH, world, **WORKERS))
        loaders = [DataLoader(source, MINI_BATCH, shuffle=True, **WORKERS) for _ in range(2)]
        found[f"ours / DataLoader, {what}"] = compare(ours, passes_of(loaders[0]), pairs=40, steps=1)
        found[f"DataLoader / DataLoader, {what}"] = compare(*map(passes_of, loaders), pairs=40, steps=1)
    return found


def measure(part: str) -> dict[str, Ratio]:
    """Seconds of an epoch of ours over one of a DataLoader; run by `launch`."""
    digits = datasets.digits(seed=0).split(0.9)[0]
    with dl.join_world(device="cpu") as world:
        if part == "data set":
            return measure_data_sets(world, *digits.tensors)
        if part == "digits":
            return measure_tensors(world, digits, digits.tensors)
        rows = digits.images if part == "digits, uint8" else torch.randn(len(digits), 32)
        return measure_tensors(world, (rows, digits.labels), (rows, digits.labels))


PARTS = ("rows", "digits", "digits, uint8", "data set")


def _rows(part: str) -> Iterator[tuple[object, ...]]:
    for what, ratio in dl.launch(measure, 1, part)[0].items():
        yield part, what, *ratio.columns(), f"{1 / ratio.median:.2f}"


def report(names: Iterable[str]) -> None:
    """Print the table of these parts, by default of all."""
    head = "data | what | time: median | quartiles | ms an epoch | pairs | samples/s: ratio"
    print_table(head, (row for part in names or PARTS for row in _rows(part)), words=2)
