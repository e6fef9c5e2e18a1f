"""Buffers other than batch-norm statistics: equal when a shard starts, merged by a rule when the step ends.

[Note: Default rule] A buffer may hold anything: a mean of a batch, a sum, an extreme, a queue. Only the running
statistics of instance norm are known to be means over the samples, so they are averaged. Every other buffer must become
the same in all shards, or have a rule from the user. A wrong value would be silent, and an error is not.

[Note: Silent writes] torch's version counter misses writes through `.data`, by norm layers' kernels, by scripted code.
So a buffer with the same version is compared with its copy, bit by bit: on the CPU always. On a GPU the host would
wait, so there in passes 1, 2, 4, 8, ... alone. What the first pass finds counts as written from then on. What a later
one finds is an error, since earlier passes may have missed writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import assemble, columns, decode, each_buffer, encode
from ddp_loop.training.payload import weighted_mean

BufferReduction = Literal["mean", "same", "first", "min", "max", "local"]
_holders = methodcaller("_use_count")  # of a tensor: Python, saved tensors of graphs, views
BUFFER_REDUCTIONS = ("mean", "same", "first", "min", "max", "local")
_STATISTICS = ("running_mean", "running_var")


@dataclass(slots=True)
class Buffer:
    """One buffer: its owner, its tensor, its value when the step opened, and its rule.

    The rules are "same" (every shard must change it alike, the default), "mean" (weighted by the shards' samples),
    "first" (the first shard's), "min" and "max" (the extreme of the shards'), and "local" (each rank keeps its own).
    """

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor
    policy: BufferReduction
    others: list[tuple[nn.Module, str]] = field(default_factory=list)  # other places of the same tensor
    opened: torch.Tensor = field(init=False)
    version: int = field(init=False)
    late: bool = field(init=False)  # whether reading it makes the host wait
    travels: bool = False  # whether it was found written silently
    unseen: bool = False  # whether a shard of this pass wrote it past torch's version counter
    home: torch.Tensor = field(init=False)  # the script's own, which `tensor` is unless a graph holds it
    holders: int = field(init=False)  # how many hold that one without a graph: Python, and views

    def __post_init__(self) -> None:
        self.opened = self.tensor.detach().clone()
        self.version = self.tensor._version
        self.late = is_asynchronous(self.tensor)
        self.home, self.holders = self.tensor, _holders(self.tensor)

    @property
    def silent(self) -> bool:
        """Whether its layer writes it past torch's version counter, as norm layers' kernels do."""
        return self.travels or (isinstance(self.owner, _NormBase) and self.owner.training)

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor in the module now, a new one if forward assigned it."""
        tensor = self.owner._buffers[self.key]
        if tensor is self.tensor and self.others:
            there = (owner._buffers[key] for owner, key in self.others)
            return next((one for one in there if one is not self.tensor), tensor)
        return tensor

    @property
    def changed(self) -> bool:
        """Whether it was written since it was last equal on all ranks; on a GPU, as far as torch counts writes."""
        if self.silent or self.now is not self.tensor or self.tensor._version != self.version:
            return True
        return not self.late and self.is_rewritten

    @property
    def is_rewritten(self) -> bool:
        """Whether its bits differ from those when the step opened, see [Note: Silent writes]; waits for a GPU."""
        return not same_bits(self.tensor, self.opened)

    def _stand(self, tensor: torch.Tensor) -> None:
        self.owner._buffers[self.key] = tensor
        for owner, key in self.others:
            owner._buffers[key] = tensor

    def replace(self) -> None:
        """Make it what it was when the step opened, in a new tensor, since a graph holds the old one."""
        self._stand(self.opened.clone())

    @torch.no_grad()
    def restore(self, value: torch.Tensor) -> None:
        """Make it `value`, in its own tensor unless a graph holds that one. See [Note: Graphs]."""
        if self.unseen:
            self.tensor.data.copy_(value)
        elif _holders(self.tensor) > self.holders:
            self.tensor = value.clone()
        else:
            self.tensor.copy_(value)
        self._stand(self.tensor)
        self.version = self.tensor._version

    @torch.no_grad()
    def open(self) -> None:
        """Begin a step: record what it holds, if it was written since the last one."""
        self.unseen = False
        if self.tensor is not self.home and self.now is self.tensor and _holders(self.home) <= self.holders:
            self._stand(self.home.copy_(self.tensor))
        if self.changed:
            if (tensor := self.now) is not None and tensor is not self.tensor:
                self.tensor = tensor
                if tensor is not self.home:  # the script replaced it
                    self.home, self.holders = tensor, _holders(tensor)
            self.opened = self.tensor.detach().clone()
            self.version = self.tensor._version


def find_buffers(
    modules: Mapping[str, nn.Module], without: set[nn.Module], buffer_reduction: Mapping[str, BufferReduction]
) -> dict[str, Buffer]:
    """The buffers below `modules`, except those of the modules in `without`, by name, each once.

    Raises:
        ValueError: a rule for an unknown buffer, an unknown rule, or two rules for one buffer.
    """
    found: list[Buffer] = []
    names: dict[str, Buffer] = {}
    for shared in each_buffer(modules):
        if any(owner in without for owner, _ in shared.places):
            continue
        (owner, key), *others = shared.places
        given = {name: buffer_reduction[name] for name in shared.names if name in buffer_reduction}
        if len(set(given.values())) > 1:
            raise ValueError(f"A buffer has one rule. {' and '.join(given)} are one buffer and got {given}. Pass one.")
        default: BufferReduction = "mean" if isinstance(owner, _NormBase) and key in _STATISTICS else "same"
        policy = next(iter(given.values()), default)
        found.append(Buffer(shared.names[0], owner, key, shared.tensor, policy, others))
        names.update(dict.fromkeys(shared.names, found[-1]))
    for name, policy in buffer_reduction.items():
        is_ordered = name not in names or not names[name].tensor.is_complex()
        if policy in ("min", "max") and not is_ordered:
            raise ValueError(f'"{policy}" needs values with an order. {name} is complex. Pass "mean" or "first".')
        if name not in names or policy not in BUFFER_REDUCTIONS:
            raise ValueError(
                f"buffer_reduction must map a buffer's name to one of {BUFFER_REDUCTIONS}. Got {name!r}: {policy!r}. "
                f"The buffers are {sorted(names)}."
            )
    return {buffer.name: buffer for buffer in found if buffer.policy != "local"}


class Buffers:
    """The `found` buffers of a loop, watched through the shards of a step.

    A buffer travels with every bit, whatever its dtype, see `distributed/encoding`; one that no shard changed does not.
    """

    def __init__(self, found: Mapping[str, Buffer]) -> None:
        self.found = dict(found)
        self._doubts: tuple[HostCopy, list[_Doubt]] | None = None
        self._passes = 0

    def open(self) -> None:
        """Begin a step: record what each buffer holds, if it was written since the last one.

        Raises:
            ValueError: on a GPU, shards of the last step changed a buffer of the rule "same" differently.
        """
        self.settle()
        for buffer in self.found.values():
            buffer.open()
        if late := [buffer for buffer in self.found.values() if buffer.late]:
            with torch.no_grad():  # also catches silent writes; costs a few kernel launches
                torch._foreach_copy_([one.opened for one in late], [one.tensor for one in late])
        self._passes += 1

    @torch.no_grad()
    def take(self, *, graph_goes_on: bool = False) -> dict[str, torch.Tensor]:
        """End a shard: returns what it changed, by name, and restores the buffers.

        Where its backward comes later, they are new tensors until the fold, which restores the modules' own.
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
                    f"A buffer must keep its shape and dtype in a step. {buffer.name} had {tuple(opened.shape)}, "
                    f'{opened.dtype} and has {now}. Pass Loop buffer_reduction={{"{buffer.name}": "local"}}.'
                )
            taken[buffer.name] = value.detach().clone()
            buffer.unseen = value is buffer.tensor and value._version == buffer.version
            if graph_goes_on:
                buffer.replace()
            else:
                buffer.restore(buffer.opened)
        return taken

    def changed(self) -> set[str]:
        """The names of the buffers that a shard has changed so far, as far as torch counts writes."""
        found = self.found.values()
        return {one.name for one in found if (one.changed if one.late else one.tensor._version != one.version)}

    def _finds_silent(self, buffer: Buffer) -> bool:
        """Whether a comparison on a GPU, where one is due, finds a buffer written silently."""
        if not buffer.late or self._passes & (self._passes - 1) or not buffer.is_rewritten:
            return False
        if self._passes > 1:
            raise RuntimeError(
                f"torch must count the writes of a buffer on a GPU. It did not for {buffer.name}, first seen in pass "
                f"{self._passes}. Write it under torch.no_grad() instead of through .data, or pass Loop "
                f'buffer_reduction={{"{buffer.name}": "local"}}.'
            )
        buffer.travels = True
        return True

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore what is changed inside, and only that."""
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
                    elif buffer.late:  # perhaps written silently; `.data` leaves the version, which is no write's
                        tensor.data.copy_(value)

    def width(self, names: frozenset[str], column: torch.dtype) -> int:
        """The columns, of dtype `column`, of a row with the buffers `names`."""
        return sum(columns(self.found[name].opened, column) for name in names)

    def pack(self, taken: Mapping[str, torch.Tensor], names: frozenset[str], row: torch.Tensor) -> None:
        """Write a shard's buffers into its row, in the order of names; unchanged ones as they were."""
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
        """Give the buffers `names` the value that their rules make of the shards' rows, (S, width).

        Args:
            share: each shard's part of the samples, (S,), float64.
            full: the numbers of the shards that have samples.
            keep: whether they stay as they were, shape (), bool.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        offset, doubts = 0, list[_Doubt]()
        for name in sorted(names):
            buffer = self.found[name]
            buffer.travels |= buffer.late  # what one rank found, all take: a shard may have left the same bits
            length = columns(buffer.opened, rows.dtype)
            values = decode(rows[:, offset : offset + length], buffer.opened.dtype)
            offset += length
            if buffer.policy == "same" and len(full) > 1:
                some = _of_shards(values, full)
                doubts.append(_Doubt(buffer, full, some if keep is None else torch.where(keep, some[:1], some)))
            merged = assemble(_merged(values, buffer, share, full), buffer.opened)
            buffer.restore(merged if keep is None else torch.where(keep, buffer.opened, merged))
            buffer.opened.copy_(buffer.tensor)
        if doubts:
            self._doubts = HostCopy(torch.stack([one.unlike.any() for one in doubts])), doubts
            if not is_asynchronous(rows):
                self.settle()

    def settle(self) -> None:
        """Check the last step's buffers of the rule "same"; on a GPU the next step does it, and so nothing waits.

        Raises:
            ValueError: shards changed one of them differently.
        """
        if self._doubts is None:
            return
        (flags, doubts), self._doubts = self._doubts, None
        for doubt, is_unlike in zip(doubts, flags.wait().tolist(), strict=True):
            if is_unlike:
                raise ValueError(doubt.text())


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A buffer that all shards must have changed alike, with the values of those that have samples, (S, K)."""

    buffer: Buffer
    shards: list[int]
    values: torch.Tensor

    @property
    def unlike(self) -> torch.Tensor:
        """Where shards differ from the first one, (S - 1, K); NaN is like NaN."""
        first, others = self.values[0], self.values[1:]
        differs = others != first
        return differs & ((others == others) | (first == first)) if others.is_floating_point() else differs

    def text(self) -> str:
        """The error: the first element that differs, in the first shard and in the first other one, and the remedy."""
        buffer = self.buffer
        column = int(self.unlike.any(0).nonzero()[0])
        other = 1 + int(self.unlike[:, column].nonzero()[0])
        place = column // 2 if buffer.opened.is_complex() else column
        before, after = (assemble(self.values[row], buffer.opened).reshape(-1)[place].item() for row in (0, other))
        return (
            f'Every shard must change a buffer alike, unless another rule than "same" is given. Element {place} of '
            f"{buffer.name} ({buffer.tensor.dtype}) became {before!r} in shard {self.shards[0]} and {after!r} in shard "
            f"{self.shards[other]}. {_remedy(buffer)}"
        )


def _remedy(buffer: Buffer) -> str:
    """How a buffer that depends on the shard becomes the whole mini-batch's."""
    if buffer.key in _STATISTICS and all(key in buffer.owner._buffers for key in _STATISTICS):
        rules = {f"{buffer.name.removesuffix(buffer.key)}{key}": "mean" for key in _STATISTICS}
        return (
            "Call F.batch_norm in the layer's forward, from Python and not from scripted code, and its statistics are "
            f"the whole mini-batch's. Or pass Loop buffer_reduction={rules}; the mean of the shards' variances is less "
            "than the variance of all."
        )
    extremes = "" if buffer.opened.is_complex() else '"min", "max", '
    return (
        "Compute it from the whole mini-batch, after step.gather (docs/buffers.md). Or pass Loop "
        f'buffer_reduction={{"{buffer.name}": "mean"}} if its change is a mean over the samples, or another rule: '
        f'{extremes}"first" or "local".'
    )


def _merged(values: torch.Tensor, buffer: Buffer, share: torch.Tensor, full: list[int]) -> torch.Tensor:
    """What a buffer's rule makes of the values of the shards that have samples, (S, K) to (K,)."""
    if buffer.policy in ("min", "max"):
        some = _of_shards(values, full)
        return some.amin(0) if buffer.policy == "min" else some.amax(0)  # exact; NaN where one is
    return _mean_of(values, buffer, share, full) if buffer.policy == "mean" and len(full) > 1 else values[full[0]]


def _mean_of(values: torch.Tensor, buffer: Buffer, share: torch.Tensor, full: list[int]) -> torch.Tensor:
    """The mean over the shards, (S, K) to (K,), weighted by their samples, in float64; integers move by its whole part.

    Values that are equal on all shards stay so to the bit, where their mean may be rounded.
    """
    if values.is_floating_point():
        mean = weighted_mean(values.double(), share).to(values.dtype)
    else:
        opened = decode(encode(buffer.opened, torch.float64).unsqueeze(0), buffer.opened.dtype)
        mean = opened[0] + weighted_mean((values - opened).double(), share).long()
    first = values[full[0]]
    return torch.where((_of_shards(values, full) == first).all(0), first, mean)


def _of_shards(values: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """The rows of these shards; a list as an index would be copied to the device, for which the host waits."""
    return values if len(numbers) == len(values) else torch.stack([values[number] for number in numbers])
