"""Buffers that are no batch-norm statistics: alike when a shard starts, pooled by a rule when the step ends.

[Note: Silent writes] torch's version counter does not see what is written through `.data`, by norm layers' kernels, by
scripted code. So a buffer whose version is what it was is compared with its copy, bit by bit: on the CPU always. On a
GPU the host would wait for that: there in passes 1, 2, 4, 8, ... alone. What the first one finds counts as written in
every later one; what a later one finds is an error, since the passes before it may have missed some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_loop.determinism import same_bits
from ddp_loop.distributed import assemble, columns, decode, each_buffer, encode
from ddp_loop.training.payload import weighted_mean

BufferReduction = Literal["mean", "same", "first", "local"]
BUFFER_REDUCTIONS = ("mean", "same", "first", "local")


@dataclass(slots=True)
class Buffer:
    """One buffer: where it lives, its tensor, what it held when the step opened, and the rule for it.

    A rule is "mean" (weighted by the shards' samples; the default of floating buffers),
    "same" (every shard must change it alike; the default of the others), "first" (the first shard's), or
    "local" (left alone, each rank its own).
    """

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor
    policy: BufferReduction
    others: list[tuple[nn.Module, str]] = field(default_factory=list)  # other places of the same tensor
    given: bool = True  # its rule, by the user
    opened: torch.Tensor = field(init=False)
    version: int = field(init=False)
    late: bool = field(init=False)  # whether the host would wait for its bits
    travels: bool = False  # was then found to be written silently

    def __post_init__(self) -> None:
        self.opened = self.tensor.detach().clone()
        self.version = self.tensor._version
        self.late = self.tensor.device.type != "cpu"

    @property
    def silent(self) -> bool:
        """Whether its layer writes it without torch's version counter seeing that, as norm layers' kernels do."""
        return self.travels or (isinstance(self.owner, _NormBase) and self.owner.training)

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor that stands in the module now, which is another one if forward assigned it."""
        tensor = self.owner._buffers[self.key]
        if tensor is self.tensor and self.others:
            there = (owner._buffers[key] for owner, key in self.others)
            return next((one for one in there if one is not self.tensor), tensor)
        return tensor

    @property
    def changed(self) -> bool:
        """Whether it was written since it was last alike on all ranks; on a GPU, as far as torch counts that."""
        if self.silent or self.now is not self.tensor or self.tensor._version != self.version:
            return True
        return not self.late and self.is_rewritten

    @property
    def is_rewritten(self) -> bool:
        """Whether its tensor has other bits than when the step opened: [Note: Silent writes]. A GPU is waited for."""
        return not same_bits(self.tensor, self.opened)

    @property
    def is_understated(self) -> bool:
        """Whether it is a running variance that was moved silently, so that its mean would be too small."""
        if self.key != "running_var" or self.given or isinstance(self.owner, _NormBase):
            return False
        return self.now is self.tensor and self.tensor._version == self.version

    def _stand(self, tensor: torch.Tensor) -> None:
        self.owner._buffers[self.key] = tensor
        for owner, key in self.others:
            owner._buffers[key] = tensor

    def replace(self) -> None:
        """Make it what it was when the step opened, in another tensor: a graph goes on to hold the one it used."""
        self._stand(self.opened.clone())

    @torch.no_grad()
    def restore(self, value: torch.Tensor) -> None:
        """Make it `value`, in its own tensor."""
        self._stand(self.tensor)
        self.tensor.copy_(value)
        self.version = self.tensor._version


def find_buffers(
    modules: Mapping[str, nn.Module], without: set[nn.Module], buffer_reduction: Mapping[str, BufferReduction]
) -> dict[str, Buffer]:
    """The buffers below `modules`, but those of the modules in `without`, by name, each once.

    Raises:
        ValueError: a policy for a buffer that is not there, or a word that is no policy.
    """
    found: list[Buffer] = []
    names: dict[str, Buffer] = {}
    for shared in each_buffer(modules):
        if any(owner in without for owner, _ in shared.places):
            continue
        default: BufferReduction = "mean" if shared.tensor.is_floating_point() or shared.tensor.is_complex() else "same"
        (owner, key), *others = shared.places
        given = {name: buffer_reduction[name] for name in shared.names if name in buffer_reduction}
        if len(set(given.values())) > 1:
            raise ValueError(f"a buffer has one rule; {' and '.join(given)} are one buffer, and got {given}: give one")
        policy = next(iter(given.values()), default)
        found.append(Buffer(shared.names[0], owner, key, shared.tensor, policy, others, bool(given)))
        names.update(dict.fromkeys(shared.names, found[-1]))
    for name, policy in buffer_reduction.items():
        if name not in names or policy not in BUFFER_REDUCTIONS:
            raise ValueError(
                f"buffer_reduction must map a buffer's name to one of {BUFFER_REDUCTIONS}; got "
                f"{name!r}: {policy!r}; there are {sorted(names)}"
            )
    return {buffer.name: buffer for buffer in found if buffer.policy != "local"}


class Buffers:
    """The `found` buffers of a loop, watched through the shards of a step.

    A buffer travels with every bit, whatever its dtype: see `distributed/encoding`. Buffers that no shard
    changed are left alone and do not travel.
    """

    def __init__(self, found: Mapping[str, Buffer], shards: int = 1) -> None:
        self.found, self._shards = dict(found), shards
        self._doubts: list[tuple[Buffer, torch.Tensor, torch.Tensor]] = []
        self._passes = 0

    def open(self) -> None:
        """Begin a step: note what each buffer holds, if it was written since the last one.

        Raises:
            ValueError: on a GPU, shards of the last step changed a buffer of the rule "same" differently; asking
                in that step itself would have held the host up.
        """
        self._settle()
        for buffer in self.found.values():
            if buffer.changed:
                tensor = buffer.now
                if tensor is not None and tensor is not buffer.tensor:
                    buffer.tensor = tensor
                buffer.opened = buffer.tensor.detach().clone()
                buffer.version = buffer.tensor._version
        if late := [buffer for buffer in self.found.values() if buffer.late]:
            with torch.no_grad():  # what was written silently since; a few launches
                torch._foreach_copy_([one.opened for one in late], [one.tensor for one in late])
        self._passes += 1

    @torch.no_grad()
    def take(self, *, graph_goes_on: bool = False) -> dict[str, torch.Tensor]:
        """End a shard: what it changed, by name; the buffers are put back as they stood when the step opened.

        Where its backward comes later, in other tensors: until the fold, which puts the modules' own back.
        """
        taken: dict[str, torch.Tensor] = {}
        for buffer in self.found.values():
            if not buffer.changed and not self._finds_silent(buffer):
                continue
            value = buffer.now
            opened = buffer.opened
            if value is None or (value.shape, value.dtype) != (opened.shape, opened.dtype):
                now = None if value is None else f"{tuple(value.shape)}, {value.dtype}"
                raise ValueError(
                    f"a buffer keeps its shape and dtype in a step; {buffer.name} had {tuple(opened.shape)}, "
                    f'{opened.dtype} and has {now}: give Loop buffer_reduction={{"{buffer.name}": "local"}}'
                )
            if self._shards > 1 and buffer.is_understated:
                raise ValueError(
                    "batch norm's running statistics are those of the whole mini-batch where its layers are called in "
                    f"Python; {buffer.name} was moved out of sight (in a scripted layer, in compiled code, or through "
                    ".data), and the mean of the shards' variances is less than the variance of all: make it an "
                    "nn.BatchNorm, or F.batch_norm in its forward, or give Loop "
                    f'buffer_reduction={{"{buffer.name}": "mean"}}'
                )
            taken[buffer.name] = value.detach().clone()
            if graph_goes_on:
                buffer.replace()
            else:
                buffer.restore(buffer.opened)
        return taken

    def _finds_silent(self, buffer: Buffer) -> bool:
        """Whether a look at a GPU, where one is due, finds a buffer written silently."""
        if not buffer.late or self._passes & (self._passes - 1) or not buffer.is_rewritten:
            return False
        if self._passes > 1:
            raise RuntimeError(
                f"a buffer on a GPU is written so that torch counts it; {buffer.name} was not, which was seen in pass "
                f"{self._passes} alone: write it under torch.no_grad() instead of through .data, or give Loop "
                f'buffer_reduction={{"{buffer.name}": "local"}}'
            )
        buffer.travels = True
        return True

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Put back what is changed inside, and only that."""
        before = [(buffer, tensor, tensor.clone(), tensor._version) for buffer in self.found.values()
                  if (tensor := buffer.now) is not None]  # fmt: skip
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, tensor, value, version in before:
                    written = buffer.silent or tensor._version != version
                    if not written and not buffer.late:
                        written = not same_bits(tensor, value)
                    if buffer.now is not tensor or written:
                        buffer._stand(tensor)
                        tensor.copy_(value)

    def width(self, names: frozenset[str], column: torch.dtype) -> int:
        """Columns, of the dtype `column`, of a row that carries the buffers `names`."""
        return sum(columns(self.found[name].opened, column) for name in names)

    def pack(self, taken: Mapping[str, torch.Tensor], names: frozenset[str], row: torch.Tensor) -> None:
        """Write what a shard took into its row, in the order of names; what it left alone, as it was."""
        if names:
            values = (taken.get(name, self.found[name].opened) for name in sorted(names))
            torch.cat([encode(value, row.dtype) for value in values], out=row)

    def restore(self, names: frozenset[str]) -> None:
        """Make the buffers `names` what they were when the step opened."""
        for name in names:
            self.found[name].restore(self.found[name].opened)

    @torch.no_grad()
    def apply(
        self,
        rows: torch.Tensor,
        names: frozenset[str],
        share: torch.Tensor,
        full: list[int],
        keep: torch.Tensor | None = None,
    ) -> None:
        """Give the buffers `names` the value that the rule makes of the shards' rows, (S, width).

        Args:
            share: each shard's part of the samples, (S,), float64.
            full: the numbers of the shards that have samples.
            keep: whether they stay as they were, shape (), bool.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        offset = 0
        for name in sorted(names):
            buffer = self.found[name]
            length = columns(buffer.opened, rows.dtype)
            values = decode(rows[:, offset : offset + length], buffer.opened.dtype)
            offset += length
            if buffer.policy == "same" and len(full) > 1:
                doubts = values[full]
                doubts = doubts if keep is None else torch.where(keep, doubts[:1], doubts)
                self._doubts.append((buffer, doubts, buffer.opened.clone()))
            mixes = buffer.policy == "mean" and len(full) > 1
            merged = _mean_of(values, buffer, share, full) if mixes else values[full[0]]
            merged = assemble(merged, buffer.opened)
            buffer.restore(merged if keep is None else torch.where(keep, buffer.opened, merged))
            buffer.opened.copy_(buffer.tensor)
        if rows.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Raise ValueError if shards changed a buffer of the rule "same" differently."""
        doubts, self._doubts = self._doubts, []
        for buffer, values, opened in doubts:
            unlike = (values != values[0]) & ((values == values) | (values[0] == values[0]))  # NaN is like NaN
            if bool(unlike.any()):
                raise ValueError(_differs(buffer, values, opened, int(unlike.any(0).nonzero()[0])))


def _mean_of(values: torch.Tensor, buffer: Buffer, share: torch.Tensor, full: list[int]) -> torch.Tensor:
    """The mean over the shards, (S, K) to (K,), weighted by their samples, in float64; integers move by its whole part.

    What all shards agree on stays as it is, to the bit: a mean of equal values may be rounded.
    """
    if values.is_floating_point():
        mean = weighted_mean(values.double(), share).to(values.dtype)
    else:
        opened = decode(encode(buffer.opened, torch.float64).unsqueeze(0), buffer.opened.dtype)
        mean = opened[0] + weighted_mean((values - opened).double(), share).long()
    first = values[full[0]]
    return torch.where((values[full] == first).all(0), first, mean)


def _differs(buffer: Buffer, values: torch.Tensor, opened: torch.Tensor, place: int) -> str:
    if values.is_floating_point():
        said = "became " + ", ".join(f"{float(value):g}" for value in values[:, place])
    else:
        before = decode(encode(opened, torch.float64).unsqueeze(0), opened.dtype)[0, place]
        said = "was changed by " + ", ".join(f"{int(value - before)}" for value in values[:, place])
    return (
        f'a buffer of the rule "same" must be changed alike by every shard; element {place} of {buffer.name} '
        f"({buffer.tensor.dtype}) {said}: keep it a function of the step alone, or "
        f'give Loop buffer_reduction={{"{buffer.name}": "first"}} (or "mean" for a floating one, or "local")'
    )
