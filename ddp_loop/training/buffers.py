"""Buffers other than batch-norm statistics: equal when a shard starts, merged by a rule when the step ends.

[Note: Default rule] A buffer may hold anything: a mean of a batch, a sum, an extreme, a queue. Only the running
statistics of instance norm are known to be means over the samples, so they are averaged. Every other buffer must become
the same in all shards, or have a rule from the user. A wrong value would be silent, and an error is not.

[Note: Silent writes] torch's version counter misses writes through `.data`, by norm layers' kernels, by scripted code.
So a buffer with the same version is compared with its copy, bit by bit: on the CPU always. On a GPU the host would
wait, so there in passes 1, 2, 4, 8, ... alone. A buffer that the first pass finds counts as written from then on. In a
later pass a find is an error, since earlier passes may have missed writes.

[Note: One shard] A single shard on a single rank leaves its buffers as the whole mini-batch does, so they stay as they
are: nothing is copied, packed or merged. Only a shard without a backward and a step that must move nothing get the
values back that the buffers had when the step opened.

[Note: After a gather] Between `step.gather` and the fold all ranks have the whole mini-batch, so changes of buffers
there stay. Graphs hold the buffers that the shards changed, and the modules are lent copies. A copy that is written is
a second change, whose order the fold does not know: an error. A norm layer counts as changed only
where it was called, since another one may be called after the gather.

[Note: Few kernels] A network has some hundred buffers, and a GPU's host takes some microseconds for each kernel. So
buffers of one device, dtype and rule are copied, packed and merged together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress, groupby
from operator import attrgetter, methodcaller
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_loop.accelerators import HostCopy, copies_of, is_asynchronous, sent
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import assemble_all, columns, decode, each_buffer, encode_all, version_of

BufferReduction = Literal["mean", "same", "first", "min", "max", "local"]
BUFFER_REDUCTIONS = get_args(BufferReduction)
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"
_holders = methodcaller("_use_count")  # of a tensor: Python, saved tensors of graphs, views
_FORM = attrgetter("shape", "dtype", "device")
_WRITTEN, _CHANGED = map(attrgetter, ("written", "changed"))
_KIND = attrgetter("reduction", "opened.dtype", "opened.device")


@dataclass(eq=False, repr=False)
class Buffer:
    """One buffer: its tensor, its value when the step opened, and its rule.

    The rules are "same" (every shard must change it alike, the default), "mean" (weighted by the shards' samples),
    "first" (the first shard's), "min" and "max" (the extreme of the shards'), and "local" (each rank keeps its own).

    Args:
        name: the first of its names.
        places: the modules that have it, and its key in each.
        tensor: its tensor now.
        reduction: the rule.
    """

    name: str
    places: Sequence[tuple[nn.Module, str]]
    tensor: torch.Tensor
    reduction: BufferReduction

    def __post_init__(self) -> None:
        tensor = self.tensor
        self.home = tensor  # the script's own, which `tensor` is unless a graph holds it
        self.holders = _holders(tensor)  # how many hold that one without a graph: Python, and views
        self.opened = tensor.detach().clone()
        self.form = _FORM(tensor)  # of `opened`
        self.version = version_of(tensor)
        self.late = is_asynchronous(tensor)  # whether reading it makes the host wait
        self.travels = False  # whether it was found written silently
        self.unseen = False  # whether a shard of this pass wrote it past torch's version counter
        self.counter: Buffer | None = None  # of the calls of the norm layer that it belongs to

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor in the module now, a new one if forward assigned it."""
        for owner, key in self.places:
            if (tensor := owner._buffers[key]) is not self.tensor:
                return tensor
        return self.tensor

    @property
    def changed(self) -> bool:
        """Whether it was written since it was last equal on all ranks; on a GPU, as far as torch counts writes."""
        return self._is_trained_norm or self.written  # norm layers' kernels write past the counter

    @property
    def written(self) -> bool:
        """As `changed`, but of a norm layer only if it was called."""
        if self.travels or self._is_counted or (self.counter is not None and self.counter._is_counted):
            return True
        if self.late:
            return self._is_trained_norm and self.counter is None
        return not same_bits(self.tensor, self.opened)

    @property
    def _is_trained_norm(self) -> bool:
        owner = self.places[0][0]
        return isinstance(owner, _NormBase) and owner.training

    @property
    def _is_counted(self) -> bool:
        return self.now is not self.tensor or version_of(self.tensor) != self.version

    def stand(self, tensor: torch.Tensor) -> None:
        """Make it the module's buffer, in all its places."""
        for owner, key in self.places:
            owner._buffers[key] = tensor

    @torch.no_grad()
    def open(self) -> bool:
        """Begin a step; returns whether `opened` must take its value, since it was written since the last one."""
        self.unseen = False
        if self.tensor is not self.home and self.now is self.tensor and _holders(self.home) <= self.holders:
            self.stand(self.home.copy_(self.tensor))
        if not self.changed:
            return self.late  # also catches silent writes
        if (tensor := self.now) is not None and tensor is not self.tensor:
            self.tensor = tensor
            if tensor is not self.home:  # the script replaced it
                self.home = tensor
                self.holders = _holders(tensor)
        if _FORM(self.tensor) != self.form:
            self.opened = torch.empty_like(self.tensor)
            self.form = _FORM(self.opened)
        self.version = version_of(self.tensor)
        return True

    def value(self) -> torch.Tensor:
        """The tensor in the module now; raises ValueError if its shape or dtype is not that when the step opened."""
        opened = self.opened
        value = self.now
        if value is None or (value.shape, value.dtype) != (opened.shape, opened.dtype):
            now = None if value is None else f"{tuple(value.shape)}, {value.dtype}"
            raise ValueError(
                f"A buffer must keep its shape and dtype in a step. {self.name} had {tuple(opened.shape)}, "
                f"{opened.dtype} and has {now}. If the first forward makes it, run the model on a sample before the "
                f'Loop. If ranks may have different ones, pass Loop buffer_reduction={{"{self.name}": "local"}}.'
            )
        return value


def find_buffers(
    modules: Mapping[str, nn.Module], without: set[nn.Module], buffer_reduction: Mapping[str, BufferReduction]
) -> dict[str, Buffer]:
    """The buffers below `modules`, except in the modules of `without`, by name, each once.

    Raises:
        ValueError: a rule for an unknown buffer, an unknown rule, or two rules for one buffer.
    """
    found: dict[str, Buffer] = {}  # by all names
    for shared in each_buffer(modules):
        if any(owner in without for owner, _ in shared.places):
            continue
        owner, key = shared.places[0]
        rules = {name: buffer_reduction[name] for name in shared.names if name in buffer_reduction}
        if len(set(rules.values())) > 1:
            raise ValueError(f"A buffer has one rule. {' and '.join(rules)} are one buffer and got {rules}. Pass one.")
        default: BufferReduction = "mean" if isinstance(owner, _NormBase) and key in _STATISTICS else "same"
        buffer = Buffer(shared.names[0], shared.places, shared.tensor, next(iter(rules.values()), default))
        found.update(dict.fromkeys(shared.names, buffer))
    counters = {buffer.places[0]: buffer for buffer in found.values()}
    for buffer in found.values():
        owner, _ = buffer.places[0]
        buffer.counter = counters.get((owner, _COUNTER)) if isinstance(owner, _NormBase) else None
    for name, reduction in buffer_reduction.items():
        if name not in found or reduction not in BUFFER_REDUCTIONS:
            raise ValueError(
                f"buffer_reduction must map a buffer's name to one of {BUFFER_REDUCTIONS}. Got {name!r}: "
                f"{reduction!r}. The buffers are {sorted(found)}."
            )
        if reduction in ("min", "max") and found[name].tensor.is_complex():
            raise ValueError(f'"{reduction}" needs values with an order. {name} is complex. Pass "mean" or "first".')
    return {buffer.name: buffer for buffer in found.values() if buffer.reduction != "local"}


_Doubt = tuple[list[Buffer], list[int], torch.Tensor]  # arguments of `_unlike_error`


class Buffers:
    """The `found` buffers of a loop, watched through the shards of a step.

    A buffer travels with every bit, whatever its dtype, see `distributed/encoding`; one that no shard changed does not.

    Args:
        found: by name.
        is_whole: whether a shard is the whole mini-batch, and no other rank takes part. See [Note: One shard].
    """

    def __init__(self, found: Mapping[str, Buffer], *, is_whole: bool = False) -> None:
        self.found = found
        self.is_whole = is_whole
        self._all = frozenset(found)
        self._groups = lru_cache(maxsize=None)(partial(_grouped, found))
        self._doubts: tuple[HostCopy, list[_Doubt]] | None = None  # whether each is one, and its details
        self._passes = 0
        self._held: list[tuple[Buffer, torch.Tensor]] = []  # left by a whole mini-batch's forward, until its fold
        # In whose place modules have copies in this pass; each with its version.
        self._lent: dict[Buffer, tuple[torch.Tensor, int]] = {}
        self._goes_on = False  # whether a shard's backward comes later

    @torch.no_grad()
    def open(self) -> None:
        """Begin a step: record each buffer's value, if it was written since the last one.

        Raises:
            ValueError: on a GPU, shards of the last step changed a buffer of the rule "same" differently.
        """
        self.settle()
        self._held = []
        self._lent = {}
        self._goes_on = False
        self._passes += 1
        for group in self._groups(self._all):
            is_alike = self.is_whole and group[0].late and _stay(group)  # then all are recorded, without a look at each
            if written := group if is_alike else [buffer for buffer in group if buffer.open()]:
                for buffer in written if is_alike else ():
                    buffer.version = version_of(buffer.tensor)
                torch._foreach_copy_(_opened(written), _tensors(written))
                if len({buffer.opened.dtype for buffer in group}) > 1:  # the script replaced some
                    self._groups.cache_clear()

    @torch.no_grad()
    def take(self, *, graph_goes_on: bool = False, is_done: bool = True) -> dict[str, torch.Tensor]:
        """End a shard: returns its changed values by name, and restores the buffers; a whole mini-batch's stay.

        Args:
            graph_goes_on: whether its backward comes later. Then the modules get new tensors until the fold, which
                restores their own.
            is_done: whether it had its backward, or gets it later.

        Raises:
            ValueError: a buffer has another shape or dtype now.
        """
        changed_values: dict[str, torch.Tensor] = {}
        self._goes_on |= graph_goes_on
        if self.is_whole:
            if not graph_goes_on and not is_done:
                self.restore(self._all)
            for group in self._groups(self._all):
                if graph_goes_on:
                    changed = list(filter(_WRITTEN, group))
                else:
                    changed = [] if _stay(group) else group
                self._held += zip(changed, map(Buffer.value, changed), strict=True)
                if graph_goes_on and changed:
                    self._lend_copies(changed)
            return changed_values
        is_changed = _WRITTEN if graph_goes_on else _CHANGED
        for group in self._groups(self._all):
            changed = [buffer for buffer in group if is_changed(buffer) or self._finds_silent(buffer)]
            if not changed:
                continue
            values = list(map(Buffer.value, changed))
            for buffer, value in zip(changed, values, strict=True):
                buffer.unseen = value is buffer.tensor and version_of(value) == buffer.version
            changed_values.update(zip([buffer.name for buffer in changed], copies_of(values), strict=True))
            if graph_goes_on:
                self._lend_copies(changed)
            else:
                _assign(changed, _opened(changed))
        return changed_values

    def _lend_copies(self, buffers: list[Buffer]) -> None:
        """Give the modules new tensors with the values of the step's start: a graph holds those that they have."""
        for buffer, copied in zip(buffers, copies_of(_opened(buffers)), strict=True):
            buffer.stand(copied)
            self._lent[buffer] = copied, version_of(copied)

    def changed_twice(self) -> str | None:
        """A buffer that a shard changed, and then something after it, by name. See [Note: After a gather]."""
        for buffer, (copied, version) in self._lent.items():
            is_counted = buffer.now is not copied or version_of(copied) != version
            if is_counted or not (buffer.late or same_bits(copied, buffer.opened)):
                return buffer.name
        return None

    def changed(self) -> set[str]:
        """The names of the buffers that a shard has changed so far and that travel, as far as torch counts writes."""
        return {name for name, buffer in self.found.items() if buffer.changed}

    def _finds_silent(self, buffer: Buffer) -> bool:
        """Whether a comparison on a GPU, where one is due, finds a buffer written silently."""
        if not buffer.late or self._passes & (self._passes - 1) or same_bits(buffer.tensor, buffer.opened):
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
        """Restore the buffers that are changed inside, and only these."""
        before: list[tuple[list[tuple[Buffer, torch.Tensor]], list[torch.Tensor]]] = []
        unwritten = [one for one, (copied, version) in self._lent.items() if version_of(copied) == version]
        for group in self._groups(self._all):
            if kept := [(buffer, tensor) for buffer in group if (tensor := buffer.now) is not None]:
                before.append((kept, copies_of([tensor for _, tensor in kept])))
        try:
            yield
        finally:
            for kept, values in before:
                written: list[torch.Tensor] = []
                wanted: list[torch.Tensor] = []
                for (buffer, tensor), value in zip(kept, values, strict=True):
                    buffer.stand(tensor)
                    if buffer.late or not same_bits(tensor, value):
                        written.append(tensor.data)  # a graph may hold the tensor; `.data` leaves the version
                        wanted.append(value)
                if written:
                    torch._foreach_copy_(written, wanted)
            self._lent.update((one, (self._lent[one][0], version_of(self._lent[one][0]))) for one in unwritten)

    def width(self, names: frozenset[str], column: torch.dtype) -> int:
        """The columns, of dtype `column`, of a row with the buffers `names`."""
        return sum(self._widths(names, column))

    def _widths(self, names: frozenset[str], column: torch.dtype) -> list[int]:
        return [sum(columns(buffer.opened, column) for buffer in group) for group in self._groups(names)]

    def pack(self, changed: Mapping[str, torch.Tensor], names: frozenset[str], row: torch.Tensor) -> None:
        """Write a shard's buffers `names`, one or more, into its row; unchanged ones as they were."""
        groups = ([changed.get(buffer.name, buffer.opened) for buffer in group] for group in self._groups(names))
        torch.cat([sent(encode_all(values, row.dtype), row.device) for values in groups], out=row)

    @torch.no_grad()
    def restore(self, names: frozenset[str]) -> None:
        """Give the buffers `names` the values that they had when the step opened."""
        for group in self._groups(names):
            _assign(group, _opened(group))

    @torch.no_grad()
    def finish(self, is_bad: torch.Tensor | bool) -> None:
        """End a whole mini-batch: its buffers' own tensors take the values that its forward left.

        Args:
            is_bad: whether the step moves nothing, so that they get back the values from when it opened; shape ().
        """
        for buffer, value in self._held:
            if value is buffer.tensor:
                buffer.stand(value)
            else:
                _assign([buffer], [value])
        self._held = []
        self._reset(self._all, is_bad)

    def undo(self, is_bad: torch.Tensor | bool, besides: frozenset[str]) -> None:
        """Give buffers that changed after a gather their values of the step's start, where it `is_bad`, as in `finish`.

        Args:
            besides: the buffers that the shards changed.
        """
        if not self.is_whole:
            names = (name for name, buffer in self.found.items() if name not in besides and buffer.written)
            self._reset(frozenset(names), is_bad)

    @torch.no_grad()
    def _reset(self, names: frozenset[str], is_bad: torch.Tensor | bool) -> None:
        if is_bad is True:
            self.restore(names)
        elif is_bad is not False:
            for group in self._groups(names):
                opened = _opened(group)
                is_late = self._goes_on or not self.is_whole
                now = list(map(Buffer.value, group)) if is_late else _tensors(group)
                values = torch.where(is_bad.to(opened[0].device), _decoded(opened), _decoded(now))
                _assign(group, assemble_all(values, opened))

    @torch.no_grad()
    def apply(
        self,
        rows: torch.Tensor,
        names: frozenset[str],
        share: torch.Tensor,
        full: list[int],
        is_bad: torch.Tensor | None = None,
    ) -> None:
        """Give the buffers `names` the value that their rules make of the shards' rows, (S, width).

        Args:
            share: each shard's part of the samples, (S,), float64.
            full: the numbers of the shards that have samples.
            is_bad: whether the step moves nothing, shape (), bool.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        flags: list[torch.Tensor] = []
        doubts: list[_Doubt] = []
        parts = rows.split_with_sizes(self._widths(names, rows.dtype), dim=1)
        for group, part in zip(self._groups(names), parts, strict=True):
            opened = _opened(group)
            for buffer in group:
                buffer.travels |= buffer.late  # all take one rank's find: a shard may have left the same bits
            there = opened[0].device  # for a buffer on the host beside a GPU's the host waits
            values = decode(part.to(there), opened[0].dtype)
            # A list as an index would be copied to the device, for which the host waits.
            with_samples = values if len(full) == len(values) else torch.stack([values[number] for number in full])
            if group[0].reduction == "same" and len(full) > 1:
                flags.append(_unlike(with_samples).any().to(rows.device))
                doubts.append((group, full, with_samples))
            merged = _merged(values, with_samples, group, share.to(there))
            if is_bad is not None:
                merged = torch.where(is_bad.to(there), _decoded(opened, rows.dtype), merged)
            _assign(group, assemble_all(merged, opened))
            torch._foreach_copy_(opened, _tensors(group))
        if flags:
            are_unlike = torch.stack(flags)
            self._doubts = HostCopy(are_unlike if is_bad is None else are_unlike & ~is_bad), doubts
            if not is_asynchronous(rows):
                self.settle()

    def settle(self) -> None:
        """Check the last step's buffers of the rule "same"; on a GPU the next step does it, and so nothing waits.

        Raises:
            ValueError: shards changed one of them differently.
        """
        if self._doubts is None:
            return
        flags, doubts = self._doubts
        self._doubts = None
        for doubt in compress(doubts, flags.wait().tolist()):
            raise ValueError(_unlike_error(*doubt))


def _grouped(found: Mapping[str, Buffer], names: frozenset[str]) -> list[list[Buffer]]:
    """The buffers `names` in the order of a row. See [Note: Few kernels]."""
    members = sorted(map(found.__getitem__, names), key=lambda buffer: (str(_KIND(buffer)), buffer.name))
    return [list(group) for _, group in groupby(members, _KIND)]


def _opened(buffers: list[Buffer]) -> list[torch.Tensor]:
    return [buffer.opened for buffer in buffers]


def _tensors(buffers: list[Buffer]) -> list[torch.Tensor]:
    return [buffer.tensor for buffer in buffers]


def _stay(group: list[Buffer]) -> bool:
    """Whether all are in their own tensors, of the form when the step opened; 0.8 microseconds a buffer."""
    for buffer in group:
        tensor = buffer.tensor
        if tensor is not buffer.home or _FORM(tensor) != buffer.form:
            return False
        for owner, key in buffer.places:
            if owner._buffers[key] is not tensor:
                return False
    return True


def _assign(buffers: Sequence[Buffer], values: list[torch.Tensor]) -> None:
    """Make each buffer its value, in its own tensor, or in a new one if a graph holds that one."""
    places: list[torch.Tensor] = []
    for buffer, value in zip(buffers, values, strict=True):
        if not buffer.unseen and _holders(buffer.tensor) > buffer.holders:
            buffer.tensor = torch.empty_like(value)
        buffer.stand(buffer.tensor)
        places.append(buffer.tensor.data if buffer.unseen else buffer.tensor)
    torch._foreach_copy_(places, values)
    for buffer in buffers:
        buffer.version = version_of(buffer.tensor)


def _decoded(tensors: list[torch.Tensor], column: torch.dtype = torch.float64) -> torch.Tensor:
    """Tensors of one dtype as a row of `decode`, (elements,)."""
    return decode(encode_all(tensors, column).unsqueeze(0), tensors[0].dtype)[0]


def _merged(values: torch.Tensor, with_samples: torch.Tensor, group: list[Buffer], share: torch.Tensor) -> torch.Tensor:
    """The result of the buffers' rule for the values of the shards that have samples, (S, K) to (K,).

    The mean is weighted by their samples, in float64; integers move by its whole part. Values that are equal on all
    shards stay so to the bit, where their mean may be rounded.
    """
    reduction = group[0].reduction
    first = with_samples[0]
    if len(with_samples) == 1 or reduction in ("same", "first"):
        return first
    if reduction == "min":
        return with_samples.amin(0)  # exact; NaN where one is
    if reduction == "max":
        return with_samples.amax(0)
    if values.is_floating_point():
        mean = weighted_mean(values.double(), share).to(values.dtype)
    else:
        opened = _decoded(_opened(group))
        mean = opened + weighted_mean((values - opened).double(), share).long()
    return torch.where((with_samples == first).all(0), first, mean)


def weighted_mean(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """sum_s share_s values_s over the rows of `values`, (S, K) to (K,).

    No matrix product: its order of summation may depend on where the rows lie in memory. A share of 0 adds exactly 0,
    also where its value is nan, as where all tokens of a shard are masked.
    """
    column = share.unsqueeze(1)
    return torch.where(column == 0, 0.0, values * column).sum(0)


def _unlike(values: torch.Tensor) -> torch.Tensor:
    """Where shards differ from the first one, (S, K) to (S - 1, K); NaN is like NaN."""
    return ~torch.isclose(values[1:], values[:1], rtol=0.0, atol=0.0, equal_nan=True)


def _unlike_error(group: list[Buffer], shards: list[int], values: torch.Tensor) -> str:
    """The first element that differs, in the first shard and in the first other one, (S, K), and the remedy."""
    unlike = _unlike(values)
    place, other = unlike.T.nonzero()[0].tolist()
    opened = _opened(group)
    if opened[0].is_complex():
        place //= 2
    for buffer, before, after in zip(group, *(assemble_all(values[n], opened) for n in (0, 1 + other)), strict=True):
        if place < before.numel():
            changes = (
                f"Element {place} of {buffer.name} ({buffer.tensor.dtype}) became {before.reshape(-1)[place].item()!r} "
                f"in shard {shards[0]} and {after.reshape(-1)[place].item()!r} in shard {shards[1 + other]}."
            )
            break
        place -= before.numel()
    owner, key = buffer.places[0]
    if key in _STATISTICS and all(statistic in owner._buffers for statistic in _STATISTICS):
        rules = {f"{buffer.name.removesuffix(key)}{statistic}": "mean" for statistic in _STATISTICS}
        remedy = (
            "Call F.batch_norm in the layer's forward, from Python and not from scripted code, and its statistics are "
            f"the whole mini-batch's. Or pass Loop buffer_reduction={rules}; the mean of the shards' variances is less "
            "than the variance of all."
        )
    else:
        extremes = "" if opened[0].is_complex() else '"min", "max", '
        remedy = (
            "Compute it from the whole mini-batch, after step.gather (docs/buffers.md). Or pass Loop "
            f'buffer_reduction={{"{buffer.name}": "mean"}} if its change is a mean over the samples, or another rule: '
            f'{extremes}"first" or "local".'
        )
    return f'Every shard must change a buffer alike, unless another rule than "same" is given. {changes} {remedy}'
