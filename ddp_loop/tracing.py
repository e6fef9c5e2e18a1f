"""A trace: what each step of a run computed, as digests, so that two runs can be held against each other.

[Note: Stages] A step goes through stages, in this order: `data` (which observations, what each shard was handed),
`forward` (each shard's loss and metrics), `backward` (each shard's gradients), `fold` (the mini-batch's loss,
metrics, gradients and buffers), `optimizer` (parameters, buffers and everything else in the state, when the step is
over). Step 0 has the stage `start`. The first digest that differs between two runs says where they part. What is of a
shard stands in the file of the rank that had it; what is of the whole mini-batch in every rank's, and is the same in
all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_loop.batches import Batches
from ddp_loop.digests import Leaf, digest
from ddp_loop.places import tensors_in
from ddp_loop.records import Folded
from ddp_loop.replicas import find_parameters, find_tensors
from ddp_loop.replication import kept_by
from ddp_loop.shards import MiniBatch
from ddp_loop.traces import VERSION


@dataclass
class Watch:
    """What every Loop of this process leaves a trace in, whatever its arguments.

    Attributes:
        folder: where; each Loop has a folder of its own in it, in the order in which they are made.
        steps: a Loop ends after so many.
        loops: how many there were.
    """

    folder: Path
    steps: int
    loops: int = field(default=0)


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Have every Loop that is made inside leave a trace with values, and end early."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def current_watch() -> Watch | None:
    """What this process is watched by, if it is."""
    return _WATCH.get()


def _is_long(value: torch.Tensor | float) -> bool:
    """Whether a whole number fits no tensor; such a one is compared as a word."""
    return isinstance(value, int) and abs(value) >= 2**63


class Tracer:
    """Writes the trace of one rank of one loop.

    Args:
        folder: where rank-K.jsonl is written.
        batches, state: of the loop.
        ordered: whether the loop's fold is.
        values: whether rank 0 also keeps what is of the whole mini-batch itself, not just digests.
    """

    def __init__(
        self,
        folder: Path,
        batches: Batches,
        state: Mapping[str, object],
        *,
        ordered: bool,
        values: bool,
    ) -> None:
        world = batches.world
        self._state, self._indices = state, batches.indices
        self._values = folder if values and world.rank == 0 else None
        floating = [one.dtype for one in find_parameters(state).values()]
        self._dtype = torch.float64 if set(floating) == {torch.float64} else torch.float32
        self._kept: dict[str, torch.Tensor] = {}
        self._entries: list[tuple[str, str, str]] = []
        self._mini_batch: MiniBatch | None = None
        self._pass = ""
        self.is_new = True  # nothing was written
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{world.rank}.jsonl").open("w", encoding="utf-8")
        tensors = {name: [str(one.dtype), list(one.shape)] for name, one in find_tensors(state).items()}
        head = {
            "version": VERSION,
            "ranks": world.size,
            "rank": world.rank,
            "shards": batches.shards,
            "ordered": ordered,
            "tensors": tensors,
        }
        self._file.write(json.dumps(head) + "\n")

    def _note(self, stage: str, name: str, value: Leaf, *, keep: bool = False) -> None:
        self._entries.append((stage, f"{self._pass}{name}", digest(value)))
        if keep and self._values is not None and not isinstance(value, str | bytes | None) and not _is_long(value):
            there = (
                value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self._number(value))
            )
            self._kept[f"{stage}: {self._pass}{name}"] = there.to("cpu").contiguous().clone()

    def _number(self, value: float) -> torch.dtype:
        """A number of the state came out of the job's own arithmetic, and is as exact as that."""
        return self._dtype if isinstance(value, float) else torch.int64

    # -- stages --------------------------------------------------------------------------------------------

    def start(self, iteration: int) -> None:
        """What the loop begins with, after `iteration` steps."""
        self.is_new = False
        self._note_state("start")
        self._write(iteration)

    def begin(self, mini_batch: MiniBatch, number: int) -> None:
        """Pass number `number` over a mini-batch."""
        self._mini_batch = mini_batch
        self._pass = "" if number == 0 else f"pass {number + 1}, "
        self._note("data", "observations", self._indices(mini_batch.epoch, mini_batch.start, mini_batch.observations))

    def data(self, shard: int, data: Any) -> None:
        """What a shard was handed."""
        for number, tensor in enumerate(tensors_in(data)):
            self._note("data", f"shard {shard}, part {number}", tensor)

    def forward(self, shard: int, values: Mapping[str, Leaf]) -> None:
        """A shard's loss, metrics, weight, or outputs."""
        for name, value in values.items():
            self._note("forward", f"shard {shard}, {name}", value)

    def backward(self, number: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """The gradients of this rank's shard number `number`, counted from 0."""
        if self._mini_batch is not None:
            shard = self._mini_batch.shards[number].number
            for name, gradient in gradients.items():
                self._note("backward", f"shard {shard}, gradient of {name}", gradient)

    def folded(self, folded: Folded, gradients: Mapping[str, torch.Tensor]) -> None:
        """The mini-batch's loss, metrics and gradients, and the buffers."""
        for name, value in zip(("loss", *folded.metrics), folded.values, strict=True):
            self._note("fold", name, value, keep=True)
        for name, gradient in gradients.items():
            self._note("fold", f"gradient of {name}", gradient, keep=True)
        for name, buffer in self._buffers():
            self._note("fold", f"buffer {name}", buffer, keep=True)

    def end(self, iteration: int) -> None:
        """A step is over."""
        self._pass = ""
        self._note_state("optimizer")
        self._write(iteration)

    # -- the state -----------------------------------------------------------------------------------------

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, value in self._state.items():
            if isinstance(value, nn.Module):
                yield from value.named_buffers(prefix=prefix)

    def _note_state(self, stage: str) -> None:
        names: dict[torch.Tensor, str] = {one: name for name, one in find_parameters(self._state).items()}
        for prefix, value in self._state.items():  # before the parameters, which follow from them
            for name, leaf in kept_by(prefix, value, names):
                self._note(stage, name, leaf, keep=True)
        for parameter, name in names.items():
            self._note(stage, f"parameter {name}", parameter, keep=True)
        for name, buffer in self._buffers():
            self._note(stage, f"buffer {name}", buffer, keep=True)

    # -- files ---------------------------------------------------------------------------------------------

    def _write(self, iteration: int) -> None:
        line = {"step": iteration, "entries": self._entries}
        self._file.write(json.dumps(line) + "\n")
        self._entries = []
        if self._values is not None:
            from safetensors.torch import save_file

            save_file(self._kept, self._values / f"step-{iteration}.safetensors")
            self._kept = {}

    def close(self) -> None:
        """Close the file."""
        self._file.close()
