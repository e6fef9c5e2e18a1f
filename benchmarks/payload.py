"""Bytes that one rank hands to the collectives in a step, for ResNet-50's layers, by the number of shards.

    python -m benchmarks payload [--ranks N] [--exchange NAME] [PART ...]

"pooled": running statistics of the whole mini-batch, pooled once a step: as rows of all shards, as moments, and as the
rule chooses. "time": a step with moments over one with rows, interleaved A B B A. "synced": batch norm synced in every
forward, with one shard per rank: a row for each rank, and one row to which all add.

The network has ResNet-50's batch-norm layers and one parameter in place of its convolutions, so a step is quick and its
sums are ResNet-50's. Bytes are counted where the collectives begin, in the second step, when all ranks know the layout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, compare, joined, print_table
from benchmarks.models import mlp
from benchmarks.steps import Job, make, make_data, steps_of

PARAMETERS = 25_557_032  # of ResNet-50
SHARDS = (2, 8, 64, 1024)
SYNCED = (2, 3, 4)  # ranks
TIME_S = 5.0  # for a row
WAYS = (False, True)  # as rows, as moments
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # a block's width, and the number of blocks


def channels_of_resnet50() -> list[int]:
    """The channels of its 53 batch-norm layers."""
    blocks = [[width, width, 4 * width] * number + [4 * width] for width, number in STAGES]
    return [64, *(channels for stage in blocks for channels in stage)]


class Layers(nn.Module):
    """ResNet-50's batch-norm layers side by side, and a parameter of the size of all its others."""

    def __init__(self, channels: Iterable[int] = (), parameters: int = PARAMETERS) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(each) for each in channels or channels_of_resnet50())
        norms = sum(parameter.numel() for parameter in self.norms.parameters())
        self.others = nn.Parameter(torch.zeros(parameters - norms))

    def forward(self, rows: torch.Tensor, has_all: bool) -> torch.Tensor:
        """A loss of rows, (n, the most channels); the large parameter takes part in the first shard alone."""
        loss = torch.stack([norm(rows[:, : norm.num_features]).square().mean() for norm in self.norms]).sum()
        return loss + self.others[0] if has_all else loss


Handed = list[list[int]]  # for each collective, the bytes of each tensor that was handed to it


class CountedSum:
    """A flat sum that notes the bytes of the rows that it is handed."""

    def __init__(self, whole: Any, handed: Handed) -> None:
        self._whole, self._handed = whole, handed

    def arrive(self, rows: Sequence[torch.Tensor]) -> Any:
        self._handed.append([row.nbytes for row in rows])
        return self._whole.arrive(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class CountedBackend:
    """A backend that notes the bytes that this rank hands to it."""

    def __init__(self, backend: Any, handed: Handed) -> None:
        self._backend, self._handed = backend, handed

    def start_sum(self, tensor: torch.Tensor, what: str) -> Any:
        self._handed.append([tensor.nbytes])
        return self._backend.start_sum(tensor, what)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Any:
        self._handed.append([part.nbytes])
        return self._backend.start_gather(whole, part, what)

    def flat_sum(self, *arguments: Any) -> CountedSum:
        return CountedSum(self._backend.flat_sum(*arguments), self._handed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@contextmanager
def counted(world: dl.World) -> Iterator[Handed]:
    """Note what this rank hands to the world's collectives."""
    collectives, handed = world._collectives, list[list[int]]()
    before = collectives._backends
    if before is None:
        raise ValueError("A world of one hands nothing to collectives. Count on two ranks or more.")
    proxies = {id(one): CountedBackend(one, handed) for one in before.each()}
    of: dict[str, Any] = {name: proxies[id(getattr(before, name))] for name in ("host", "device", "others")}
    collectives._backends = replace(before, **of)
    try:
        yield handed
    finally:
        collectives._backends = before


@dataclass(frozen=True)
class Payload:
    """The bytes of a step that one rank handed over: gradients, and all others."""

    gradients: int
    others: int

    @property
    def share(self) -> float:
        """The others' bytes over those of the gradients."""
        return self.others / self.gradients


def measure(
    shards: int | None,
    *,
    moments: bool | None = None,
    synced: bool = False,
    exchange: str | None = None,
    parameters: int = PARAMETERS,
) -> Payload:
    """Count the second step of `Layers`, on every rank; run by `launch`.

    Args:
        shards: S; None for one per rank.
        moments: whether statistics travel as moments; None as the rules choose.
        synced: whether the layers are synced.
        exchange: between the ranks.
        parameters: of the network; with fewer than ResNet-50's a step of many shards takes less, and what it hands over
            beside the gradients is the same. The gradients' bytes are those of ResNet-50.
    """
    with joined(exchange) as world, counted(world) as handed, travelling(moments=moments):
        model, many = Layers(parameters=parameters), shards or world.size
        if synced:
            dl.sync_batch_norm(model, world)
        data = torch.randn(4 * many, 2048), torch.arange(4 * many) % (2 * many) == 0
        batches = dl.Batches(data, 2 * many, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            handed.clear()
            for rows, is_first in step:
                loss = model(rows.requires_grad_(synced), bool(is_first[0]))  # a layer's input, so backward sends too
                step.backward(loss, metric=rows.detach().sum(1))
            step.fold()
            sums = list(map(sum, handed))  # before the loop ends
        pieces = len(max(handed, key=sum))  # of the largest sum, that of the gradients
        return Payload(pieces * 4 * PARAMETERS, sum(sums) - pieces * 4 * parameters)


@contextmanager
def travelling(*, moments: bool | None) -> Iterator[None]:
    """Have statistics travel as moments or as rows in what begins inside; None: as the rules choose."""
    with ExitStack() as ending:
        if moments is not None:
            ending.enter_context(mock.patch("ddp_loop.training.step.use_moments", return_value=moments))
            ending.enter_context(mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", 0 if moments else 10**9))
        yield


TIMED = {  # width and number of layers, shards
    "3 layers of 64": (64, 3, (8, 128)),
    "30 layers of 256": (256, 30, (2, 4, 8, 32)),
    "10 layers of 512": (512, 10, (8, 32, 128)),
}


def measure_time(width: int, layers: int, shards: int, exchange: str | None) -> Ratio:
    """A step with moments over one with rows, on every rank; run by `launch`."""
    with ExitStack() as ending, joined(exchange) as world:
        ways = []
        for moments in (True, False):
            torch.manual_seed(0)
            job = Job(lambda: mlp(width, layers, 784, batch_norm=True), (784,), 0, 0, 0.0)
            model, optimizer = make(job, world.device)
            batches = dl.Batches(make_data(job), max(256, 2 * shards), world, shards=shards)
            folder = ending.enter_context(tempfile.TemporaryDirectory())
            with travelling(moments=moments):
                state = {"model": model, "optimizer": optimizer}
                loop = dl.Loop(batches, 10**6, state=state, run_dir=folder, save_every=10**9, progress=False)
                ways.append(steps_of(loop, model, optimizer))
                ways[-1]()
        return compare(*ways, pairs=100, steps=5, within_s=TIME_S)


def report_time(ranks: int, exchange: str | None) -> None:
    rows = (
        (name, str(shards), *dl.launch(measure_time, ranks, width, layers, shards, exchange)[0].columns())
        for name, (width, layers, of_shards) in TIMED.items()
        for shards in of_shards
    )
    print_table("network | shards | moments / rows | quartiles | ms | pairs", rows, words=1)


def in_words(payload: Payload) -> tuple[str, str]:
    """Its bytes in MB, and its share."""
    return f"{payload.others / 1e6:.3f}", f"{payload.share:.2%}"


def report_pooled(ranks: int, exchange: str | None) -> None:
    def rows() -> Iterator[tuple[str, ...]]:
        for shards in SHARDS:
            ways = [dl.launch(measure, ranks, shards, moments=one, exchange=exchange)[0] for one in (*WAYS, None)]
            yield str(shards), *(word for way in ways for word in in_words(way))

    print_table("shards | rows, MB | of gradients | moments, MB | of gradients | chosen, MB | of gradients", rows(), 0)


def report_synced(ranks: int, exchange: str | None) -> None:
    def rows() -> Iterator[tuple[str, ...]]:
        for number in SYNCED:
            ways = [dl.launch(measure, number, None, synced=True, moments=one, exchange=exchange)[0] for one in WAYS]
            yield str(number), *(word for way in ways for word in in_words(way))

    print_table("ranks | rows, MB | of gradients | one row, MB | of gradients", rows(), 0)


PARTS = {"pooled": report_pooled, "time": report_time, "synced": report_synced}


def report(parts: Collection[str] = (), ranks: int = RANKS, exchange: str | None = None) -> None:
    """Print a table for each part."""
    print(f"Gradients: {4 * PARAMETERS / 1e6:.1f} MB.\n")
    for name in parts or PARTS:
        print(f"## {name}\n")
        PARTS[name](ranks, exchange)
