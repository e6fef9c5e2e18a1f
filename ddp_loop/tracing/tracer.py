"""Writing of traces: digests of the values in each step, for a comparison of two runs.

[Note: Stages] A step has these stages, in order: `data` (the samples, and each shard's data), `forward` (each shard's
loss and metrics), `backward` (each shard's gradients), `fold` (the mini-batch's loss, metrics, gradients and buffers),
`optimizer` (parameters, buffers and everything else in the state, at the end of the step). Step 0 has the stage
`start`. The first digest that differs shows where two runs diverge. The values of a shard are in the file of its rank;
those of the whole mini-batch are in every rank's file, and are the same in all.

[Note: Followed gradients] Some gradients consist of rounding errors only (of a bias before a batch norm, of a key's
bias in attention). Adam makes a full step of them, and two correct runs diverge. So a run can follow another: after
each fold, every gradient element that equals the other run's up to rounding is replaced by the other run's. The same
gradients must give the same state, in every element of every tensor. Elements within ten tolerances are replaced. That
hides nothing: the trace has the gradients before the replacement, and they are compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_loop.data import Batches, Cut, MiniBatch, tensors_in
from ddp_loop.determinism import Leaf, digest
from ddp_loop.distributed import find_parameters, find_tensors, kept_by
from ddp_loop.tracing.compare import gradient_scale, largest_of
from ddp_loop.tracing.diagnosis import sparse_part
from ddp_loop.tracing.sample_sums import sums_of_samples
from ddp_loop.tracing.trace import EVALUATIONS, VERSION, lines_up_to, load_values

_OF_WHOLE = ("start", "fold", "optimizer")  # stages with values of the whole mini-batch
_AMPLE = 10  # tolerances within which an element of a gradient is replaced


@dataclass
class TraceRequest:
    """A request that every Loop of this process writes a trace with values, or measures its steps.

    A Loop under a request has no run folder and no sinks, whatever its arguments.

    Attributes:
        folder: of what the Loops write; they are numbered in the order of creation.
        steps: after which a Loop ends.
        followed: the folder of another run, whose gradients are used. See [Note: Followed gradients].
        rounding: the relative difference up to which two gradients are the same.
        profile: the number of steps that a profile measures; None for a trace.
        traces: the folder of Chrome traces, which a profile writes; None for none.
        cut: "halves" for each shard cut into two, "whole" for mini-batches in one shard, "singles" for shards of one
            sample, each where that is possible; None for the script's shards. See [Note: Halved shards] in
            `diagnosis`.
        loops: the number of Loops so far.
    """

    folder: Path
    steps: int
    followed: Path | None = None
    rounding: float = 0.0
    profile: int | None = None
    traces: Path | None = None
    cut: Cut | None = None
    loops: int = 0


_REQUEST: ContextVar[TraceRequest | None] = ContextVar("trace request", default=None)


@contextmanager
def tracing(request: TraceRequest) -> Iterator[None]:
    """Apply the request to every Loop that is made inside the block."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def trace_request_of(batches: Batches) -> TraceRequest | None:
    """The request that applies to a Loop over these batches, if any; cuts their shards as it asks."""
    request = _REQUEST.get()
    if request is not None and request.cut is not None and batches.can_cut_otherwise:
        batches.cut_otherwise(request.cut)
    return request


class Tracer:
    """Writes the trace of one rank of one loop.

    Args:
        folder: of rank-K.jsonl.
        batches: of the loop.
        state: of the loop.
        ordered: whether the loop's fold has a fixed order.
        request: for values beside the digests: rank 0 keeps the mini-batch's, each rank its shards'. None for digests
            alone.
    """

    def __init__(
        self,
        folder: Path,
        batches: Batches,
        state: Mapping[str, object],
        *,
        ordered: bool,
        request: TraceRequest | None,
    ) -> None:
        world = batches.world
        self._state = state
        self._batches = batches
        self._folder = folder
        self._request = request
        self._step = 0
        self._largest = 0.0
        self._kept: dict[str, torch.Tensor] = {}
        self._kept_of_shards: dict[str, torch.Tensor] = {}
        self._entries: list[tuple[str, str, str]] = []
        self._mini_batch: MiniBatch
        self._pass = ""
        self.is_new = True  # nothing is written yet
        self._file: BufferedWriter | None = None
        tensors = {name: [str(one.dtype), list(one.shape)] for name, one in find_tensors(state).items()}
        self._head = {
            "version": VERSION,
            "ranks": world.size,
            "rank": world.rank,
            "shards": batches.shards,
            "fixed": batches.fixed_shards,
            "can_cut_otherwise": batches.can_cut_otherwise,
            "ordered": ordered,
            "tensors": tensors,
        }

    def open(self, iteration: int) -> None:
        """Open the file; its lines up to this step stay, see [Note: Resumed] in `trace`.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._batches.world.rank}.jsonl"
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            file.write(json.dumps(self._head).encode() + b"\n")
            if iteration:
                file.writelines(lines_up_to(path, iteration))
        temporary.replace(path)
        self._file = path.open("ab")

    @property
    def _has_values(self) -> bool:
        return self._request is not None

    def _record(self, stage: str, name: str, value: Leaf) -> None:
        self._entries.append((stage, f"{self._pass}{name}", digest(value)))
        is_kept = stage in _OF_WHOLE and self._has_values and self._batches.world.rank == 0
        if not is_kept or isinstance(value, str | bytes | None):
            return
        if isinstance(value, torch.Tensor):
            here = value.detach()
        elif isinstance(value, float):  # as precise as the parameters
            dtypes = {one.dtype for one in find_parameters(self._state).values()}
            precise = torch.float64 if dtypes == {torch.float64} else torch.float32
            here = torch.tensor(value, dtype=precise, device="cpu")
        elif abs(value) < 2**63:
            here = torch.tensor(value, dtype=torch.int64, device="cpu")
        else:
            return  # only its digest is compared
        self._kept[f"{stage}: {self._pass}{name}"] = here.to("cpu").contiguous().clone()

    def _keep(self, stage: str, shard: int, name: str, value: torch.Tensor) -> None:
        if self._has_values:
            self._kept_of_shards[f"{stage}: {self._pass}shard {shard}, {name}"] = value

    # -- stages --------------------------------------------------------------------------------------------

    def start(self, iteration: int) -> None:
        """Record the initial state of the loop, after `iteration` steps."""
        self.is_new = False
        self._step = iteration
        if self._has_values and self._batches.world.rank == 0:
            self._record_evaluations()
        self._record_state("start")
        self._write(iteration)

    def begin(self, mini_batch: MiniBatch, number: int) -> None:
        """Begin pass number `number`, counted from 0, over a mini-batch."""
        self._mini_batch = mini_batch
        self._step += number == 0
        self._pass = "" if number == 0 else f"pass {number + 1}, "
        indices = self._batches.indices(mini_batch.epoch, mini_batch.start, mini_batch.samples)
        self._record("data", "samples", indices)

    def data(self, shard: int, data: Any) -> None:
        """Record a shard's data."""
        for number, tensor in enumerate(tensors_in(data)):
            self._record("data", f"shard {shard}, part {number}", tensor)
        if self._has_values:
            count = next(one.samples for one in self._mini_batch.shards if one.number == shard)
            self._keep("forward", shard, "samples", torch.tensor(count, device="cpu"))
            for name, rows in sums_of_samples(data, count).items():
                self._keep("data", shard, name, rows)

    def forward(self, shard: int, values: Mapping[str, Leaf], sums: Collection[str] = ()) -> None:
        """Record a shard's loss, metrics, weight or outputs; `sums` are those that add up over the shards."""
        for name, value in values.items():
            self._record("forward", f"shard {shard}, {name}", value)
        if isinstance(weight := values.get("weight"), float):
            self._keep("forward", shard, "weight", torch.tensor(weight, device="cpu"))
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    of = f"{'sum' if name in sums else 'mean'} of {name}"
                    number = value.detach().to("cpu", torch.float64, copy=True)
                    if name == "loss":  # several with more_losses=
                        number += self._kept_of_shards.get(f"forward: {self._pass}shard {shard}, {of}", 0.0)
                    self._keep("forward", shard, of, number)

    def backward(self, number: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record the gradients of this rank's shard number `number`, counted from 0."""
        shard = self._mini_batch.shards[number].number
        for name, gradient in gradients.items():
            self._record("backward", f"shard {shard}, gradient of {name}", gradient)
            if self._has_values:
                self._keep("backward", shard, f"gradient of {name}", sparse_part(gradient))

    def folded(self, metrics: Sequence[str], values: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record the mini-batch's loss and metrics, (1 + metrics,), its gradients, and the buffers."""
        for name, value in zip(("loss", *metrics), values, strict=True):
            self._record("fold", name, value)
        for name, gradient in gradients.items():
            self._record("fold", f"gradient of {name}", gradient)
        self._record_buffers("fold")
        if self._request is not None and self._request.followed is not None:
            path = self._request.followed / self._folder.name / f"step-{self._step}.safetensors"
            self._follow(path, _AMPLE * self._request.rounding, gradients)

    def _follow(self, path: Path, tolerance: float, gradients: Mapping[str, torch.Tensor]) -> None:
        """Use the other run's gradients where they are equal up to rounding. See [Note: Followed gradients]."""
        if not path.exists():
            return
        self._largest = max([self._largest, *map(largest_of, gradients.values())])
        others = load_values(path)
        with torch.no_grad():
            for name, gradient in gradients.items():
                other = others.get(("fold", f"{self._pass}gradient of {name}"))
                if other is not None and other.shape == gradient.shape and other.dtype == gradient.dtype:
                    other = other.to(gradient.device)
                    bound = tolerance * gradient_scale(gradient, self._largest)
                    gradient.copy_(torch.where((gradient - other).abs() <= bound, other, gradient))

    def _record_evaluations(self) -> None:
        path = self._folder / EVALUATIONS
        world = self._batches.world
        before = world.on_evaluated

        def note(result: dict[str, float]) -> None:
            before(result)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")

        world.on_evaluated = note

    def end(self, iteration: int) -> None:
        """Record the state at the end of a step."""
        self._pass = ""
        self._record_state("optimizer")
        self._write(iteration)

    # -- the state -----------------------------------------------------------------------------------------

    def _record_buffers(self, stage: str) -> None:
        for prefix, value in self._state.items():
            if isinstance(value, nn.Module):
                for name, buffer in value.named_buffers(prefix=prefix):
                    self._record(stage, f"buffer {name}", buffer)

    def _record_state(self, stage: str) -> None:
        names: dict[torch.Tensor, str] = {one: name for name, one in find_parameters(self._state).items()}
        for prefix, value in self._state.items():  # before the parameters, which depend on it
            for name, leaf in kept_by(prefix, value, names):
                self._record(stage, name, leaf)
        for parameter, name in names.items():
            self._record(stage, f"parameter {name}", parameter)
        self._record_buffers(stage)

    # -- files ---------------------------------------------------------------------------------------------

    def _write(self, iteration: int) -> None:
        form = {"ranks": self._head["ranks"], "shards": self._head["shards"]}
        if self._file is not None:
            self._file.write(json.dumps({"step": iteration, **form, "entries": self._entries}).encode() + b"\n")
            self._file.flush()  # a killed run has its last step
        self._entries = []
        if self._has_values:
            from safetensors.torch import save_file

            rank = self._batches.world.rank
            if rank == 0:
                save_file(self._kept, self._folder / f"step-{iteration}.safetensors")
            save_file(self._kept_of_shards, self._folder / f"shards-{rank}-{iteration}.safetensors")
            self._kept = {}
            self._kept_of_shards = {}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
