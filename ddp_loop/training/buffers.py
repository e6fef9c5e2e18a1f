"""Buffers other than batch-norm statistics: equal when a shard starts, merged by a rule when the step ends.

[Note: Default rule] A buffer may hold anything: a mean of a batch, a sum, an extreme, a queue. Only the running
statistics of instance norm are known to be means over the samples, so they are averaged. Every other buffer must become
the same in all shards, or have a rule from the user. A wrong value would be silent, and an error is not.

[Note: Silent writes] torch's version counter misses writes through `.data`, by norm layers' kernels, by scripted code.
So a buffer with the same version is compared with its copy, bit by bit: on the CPU always. On a GPU the host would
wait, so there in passes 1, 2, 4, 8, ... alone. What the first pass finds counts as written from then on. What a later
one finds is an error, since earlier passes may have missed writes.

[Note: One shard] A single shard on a single rank leaves its buffers as the whole mini-batch does, so they stay as they
are: nothing is copied, packed or merged. Only a shard without a backward and a step that must move nothing get the
values back that the buffers had when the step opened.

[Note: Few kernels] A network has some hundred buffers, and a GPU's host takes some microseconds for each kernel. So
buffers of one device, dtype and rule are copied, packed and merged together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter, methodcaller
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import assemble_all, columns, decode, each_buffer, encode_all
from ddp_loop.training.payload import weighted_mean

BufferReduction = Literal["mean", "same", "first", "min", "max", "local"]
BUFFER_REDUCTIONS = get_args(BufferReduction)
_STATISTICS = ("running_mean", "running_var")
_holders = methodcaller("_use_count")  # of a tensor: Python, saved tensors of graphs, views
_NAME, _TENSOR, _OPENED, _DTYPE = map(attrgetter, ("name", "tensor", "opened", "opened.dtype"))
_FORM = attrgetter("shape", "dtype", "device")


class Buffer:
    """One buffer: its tensor, its value when the step opened, and its rule.

    The rules are "same" (every shard must change it alike, the default), "mean" (weighted by the shards' samples),
    "first" (the first shard's), "min" and "max" (the extreme of the shards'), and "local" (each rank keeps its own).

    Args:
        name: the first of its names.
        places: the modules that have it, and its key in each.
        tensor: its tensor now.
        policy: the rule.
    """

    def __init__(
        self, name: str, places: Sequence[tuple[nn.Module, str]], tensor: torch.Tensor, policy: BufferReduction
    ) -> None:
        self.name = name
        self.places = places
        self.policy = policy
        self.tensor = tensor
        self.home = tensor  # the script's own, which `tensor` is unless a graph holds it
        self.holders = _holders(tensor)  # how many hold that one without a graph: Python, and views
        self.opened = tensor.detach().clone()
        self.version = tensor._version
        self.late = is_asynchronous(tensor)  # whether reading it makes the host wait
        self.travels = False  # whether it was found written silently
        self.unseen = False  # whether a shard of this pass wrote it past torch's version counter

    @property
    def silent(self) -> bool:
        """Whether its layer writes it past torch's version counter, as norm layers' kernels do."""
        owner = self.places[0][0]
        return self.travels or (isinstance(owner, _NormBase) and owner.training)

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
        is_counted = self.silent or self.now is not self.tensor or self.tensor._version != self.version
        return is_counted or (not self.late and not same_bits(self.tensor, self.opened))

    def stand(self, tensor: torch.Tensor) -> None:
        """Make it the module's buffer, in all its places."""
        for owner, key in self.places:
            owner._buffers[key] = tensor

    @torch.no_grad()
    def open(self) -> bool:
        """Begin a step; returns whether `opened` must become what it holds, since it was written since the last one."""
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
        if _FORM(self.opened) != _FORM(self.tensor):
            self.opened = torch.empty_like(self.tensor)
        self.version = self.tensor._version
        return True

    def value(self) -> torch.Tensor:
        """The tensor in the module now; raises ValueError if its shape or dtype is not that when the step opened."""
        opened = self.opened
        value = self.now
        if value is None or (value.shape, value.dtype) != (opened.shape, opened.dtype):
            now = None if value is None else f"{tuple(value.shape)}, {value.dtype}"
            raise ValueError(
                f"A buffer must keep its shape and dtype in a step. {self.name} had {tuple(opened.shape)}, "
                f'{opened.dtype} and has {now}. Pass Loop buffer_reduction={{"{self.name}": "local"}}.'
            )
        return value


def find_buffers(
    modules: Mapping[str, nn.Module], without: set[nn.Module], buffer_reduction: Mapping[str, BufferReduction]
) -> dict[str, Buffer]:
    """The buffers below `modules`, except those of the modules in `without`, by name, each once.

    Raises:
        ValueError: a rule for an unknown buffer, an unknown rule, or two rules for one buffer.
    """
    found: dict[str, Buffer] = {}  # by all names
    for shared in each_buffer(modules):
        if any(owner in without for owner, _ in shared.places):
            continue
        owner, key = shared.places[0]
        given = {name: buffer_reduction[name] for name in shared.names if name in buffer_reduction}
        if len(set(given.values())) > 1:
            raise ValueError(f"A buffer has one rule. {' and '.join(given)} are one buffer and got {given}. Pass one.")
        default: BufferReduction = "mean" if isinstance(owner, _NormBase) and key in _STATISTICS else "same"
        buffer = Buffer(shared.names[0], shared.places, shared.tensor, next(iter(given.values()), default))
        found.update(dict.fromkeys(shared.names, buffer))
    for name, policy in buffer_reduction.items():
        if policy in ("min", "max") and name in found and found[name].tensor.is_complex():
            raise ValueError(f'"{policy}" needs values with an order. {name} is complex. Pass "mean" or "first".')
        if name not in found or policy not in BUFFER_REDUCTIONS:
            raise ValueError(
                f"buffer_reduction must map a buffer's name to one of {BUFFER_REDUCTIONS}. Got {name!r}: {policy!r}. "
                f"The buffers are {sorted(found)}."
            )
    return {buffer.name: buffer for buffer in found.values() if buffer.policy != "local"}


class Buffers:
    """The `found` buffers of a loop, watched through the shards of a step.

    A buffer travels with every bit, whatever its dtype, see `distributed/encoding`; one that no shard changed does not.

    Args:
        found: by name.
        is_whole: whether a shard is the whole mini-batch, and no other rank takes part. See [Note: One shard].
    """

    def __init__(self, found: Mapping[str, Buffer], *, is_whole: bool = False) -> None:
        self.found = dict(found)
        self.is_whole = is_whole
        self._all = frozenset(found)
        self._grouped = dict[frozenset[str], list[list[Buffer]]]()
        self._doubts: tuple[HostCopy, list[Callable[[], str]]] | None = None  # whether each is one, and its error
        self._passes = 0
        self._held: list[tuple[Buffer, torch.Tensor]] = []  # what a whole mini-batch's forward left, until its fold

    def _groups(self, names: frozenset[str]) -> list[list[Buffer]]:
        """The buffers `names` in the order of a row. See [Note: Few kernels]."""
        if names not in self._grouped:
            ordered = sorted(map(self.found.__getitem__, sorted(names)), key=_kind)
            self._grouped[names] = [list(group) for _, group in groupby(ordered, _kind)]
        return self._grouped[names]

    @torch.no_grad()
    def open(self) -> None:
        """Begin a step: record what each buffer holds, if it was written since the last one.

        Raises:
            ValueError: on a GPU, shards of the last step changed a buffer of the rule "same" differently.
        """
        self.settle()
        self._held = []
        self._passes += 1
        for group in self._groups(self._all):
            is_alike = self.is_whole and group[0].late and _stay(group)  # then all are recorded, without a look at each
            if written := group if is_alike else [buffer for buffer in group if buffer.open()]:
                torch._foreach_copy_(list(map(_OPENED, written)), list(map(_TENSOR, written)))
                if len(set(map(_DTYPE, group))) > 1:  # the script replaced some
                    self._grouped = {}

    @torch.no_grad()
    def take(self, *, graph_goes_on: bool = False, is_done: bool = True) -> dict[str, torch.Tensor]:
        """End a shard: returns what it changed, by name, and restores the buffers; a whole mini-batch's stay.

        Args:
            graph_goes_on: whether its backward comes later. Then the modules get new tensors until the fold, which
                restores their own.
            is_done: whether it had its backward, or gets it later.

        Raises:
            ValueError: a buffer has another shape or dtype now.
        """
        taken: dict[str, torch.Tensor] = {}
        if self.is_whole:
            if graph_goes_on or is_done:
                self._take_whole(graph_goes_on=graph_goes_on)
            else:
                self.restore(self._all)
            return taken
        for group in self._groups(self._all):
            changed = [buffer for buffer in group if buffer.changed or self._finds_silent(buffer)]
            if not changed:
                continue
            values = list(map(Buffer.value, changed))
            for buffer, value in zip(changed, values, strict=True):
                buffer.unseen = value is buffer.tensor and value._version == buffer.version
            taken.update(zip(map(_NAME, changed), _copies(values), strict=True))
            if graph_goes_on:
                _lend_copies(changed)
            else:
                _assign(changed, list(map(_OPENED, changed)))
        return taken

    def _take_whole(self, *, graph_goes_on: bool) -> None:
        """Leave the buffers as they are, or let a later backward find them as the forward did, until `finish`."""
        for group in self._groups(self._all):
            if graph_goes_on or not _stay(group):
                self._held += zip(group, map(Buffer.value, group), strict=True)
            if graph_goes_on:
                _lend_copies(group)
        if not graph_goes_on:
            self._keep_held()

    def _keep_held(self) -> None:
        """Leave what a whole mini-batch's forward left, in the buffers' own tensors."""
        for buffer, value in self._held:
            if value is buffer.tensor:
                buffer.stand(value)
            else:
                _assign([buffer], [value])
        self._held = []

    def changed(self) -> set[str]:
        """The names of the buffers that a shard has changed so far and that travel, as far as torch counts writes."""
        found = () if self.is_whole else self.found.values()
        return {one.name for one in found if (one.changed if one.late else one.tensor._version != one.version)}

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
        """Restore what is changed inside, and only that."""
        before: list[tuple[list[tuple[Buffer, torch.Tensor]], list[torch.Tensor]]] = []
        for group in self._groups(self._all):
            if kept := [(buffer, tensor) for buffer in group if (tensor := buffer.now) is not None]:
                before.append((kept, _copies([tensor for _, tensor in kept])))
        try:
            yield
        finally:
            with torch.no_grad():
                for kept, values in before:
                    _put_back(kept, values)

    def width(self, names: frozenset[str], column: torch.dtype) -> int:
        """The columns, of dtype `column`, of a row with the buffers `names`."""
        return sum(columns(self.found[name].opened, column) for name in names)

    def pack(self, taken: Mapping[str, torch.Tensor], names: frozenset[str], row: torch.Tensor) -> None:
        """Write a shard's buffers into its row; unchanged ones as they were."""
        if names:
            groups = ([taken.get(buffer.name, buffer.opened) for buffer in group] for group in self._groups(names))
            torch.cat([encode_all(values, row.dtype) for values in groups], out=row)

    @torch.no_grad()
    def restore(self, names: frozenset[str]) -> None:
        """Make the buffers `names` what they were when the step opened."""
        for group in self._groups(names):
            _assign(group, list(map(_OPENED, group)))

    @torch.no_grad()
    def finish(self, where: torch.Tensor | bool) -> None:
        """End a whole mini-batch: if `where`, shape (), its buffers become what they were when the step opened."""
        self._keep_held()
        if where is True:
            self.restore(self._all)
        elif where is not False:
            for group in self._groups(self._all):
                opened = list(map(_OPENED, group))
                values = torch.where(where, _decoded(opened), _decoded(list(map(_TENSOR, group))))
                _assign(group, assemble_all(values, opened))

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
        offset = 0
        flags: list[torch.Tensor] = []
        errors: list[Callable[[], str]] = []
        for group in self._groups(names):
            opened = list(map(_OPENED, group))
            for buffer in group:
                buffer.travels |= buffer.late  # what one rank found, all take: a shard may have left the same bits
            length = sum(columns(one, rows.dtype) for one in opened)
            values = decode(rows[:, offset : offset + length], opened[0].dtype)
            offset += length
            if group[0].policy == "same" and len(full) > 1:
                some = _of_shards(values, full)
                some = some if keep is None else torch.where(keep, some[:1], some)
                flags.append(_unlike(some).any())
                errors.append(partial(_unlike_error, group, full, some))
            merged = _merged(values, group, share, full)
            if keep is not None:
                merged = torch.where(keep, _decoded(opened, rows.dtype), merged)
            _assign(group, assemble_all(merged, opened))
            torch._foreach_copy_(opened, list(map(_TENSOR, group)))
        if flags:
            self._doubts = HostCopy(torch.stack(flags)), errors
            if not is_asynchronous(rows):
                self.settle()

    def settle(self) -> None:
        """Check the last step's buffers of the rule "same"; on a GPU the next step does it, and so nothing waits.

        Raises:
            ValueError: shards changed one of them differently.
        """
        if self._doubts is None:
            return
        flags, errors = self._doubts
        self._doubts = None
        for is_unlike, error in zip(flags.wait().tolist(), errors, strict=True):
            if is_unlike:
                raise ValueError(error())


def _kind(buffer: Buffer) -> tuple[str, str, str]:
    """What buffers that are handled together have in common."""
    return buffer.policy, str(buffer.opened.dtype), str(buffer.opened.device)


@torch.no_grad()
def _copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = list(map(torch.empty_like, values))
    torch._foreach_copy_(copies, values)
    return copies


def _stay(group: list[Buffer]) -> bool:
    """Whether all are in their own tensors, of the form when the step opened; 0.8 microseconds a buffer."""
    for buffer in group:
        tensor = buffer.tensor
        if tensor is not buffer.home or _FORM(tensor) != _FORM(buffer.opened):
            return False
        for owner, key in buffer.places:
            if owner._buffers[key] is not tensor:
                return False
    return True


def _lend_copies(buffers: list[Buffer]) -> None:
    """Give the modules new tensors with the values of the step's start, since a graph holds those that they have."""
    for buffer, copied in zip(buffers, _copies(list(map(_OPENED, buffers))), strict=True):
        buffer.stand(copied)


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
        buffer.version = buffer.tensor._version


def _put_back(kept: list[tuple[Buffer, torch.Tensor]], values: list[torch.Tensor]) -> None:
    """Make buffers the tensors that they were, and copy the values again into those that were written since."""
    written: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for (buffer, tensor), value in zip(kept, values, strict=True):
        buffer.stand(tensor)
        if buffer.late or not same_bits(tensor, value):
            written.append(tensor.data)  # a graph may hold the tensor; `.data` leaves the version
            wanted.append(value)
    if written:
        torch._foreach_copy_(written, wanted)


def _decoded(tensors: list[torch.Tensor], column: torch.dtype = torch.float64) -> torch.Tensor:
    """Tensors of one dtype as a row of `decode`, (elements,)."""
    return decode(encode_all(tensors, column).unsqueeze(0), tensors[0].dtype)[0]


def _of_shards(values: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """The rows of these shards; a list as an index would be copied to the device, for which the host waits."""
    return values if len(numbers) == len(values) else torch.stack([values[number] for number in numbers])


def _merged(values: torch.Tensor, group: list[Buffer], share: torch.Tensor, full: list[int]) -> torch.Tensor:
    """What the buffers' rule makes of the values of the shards that have samples, (S, K) to (K,).

    The mean is weighted by their samples, in float64; integers move by its whole part. Values that are equal on all
    shards stay so to the bit, where their mean may be rounded.
    """
    policy = group[0].policy
    first = values[full[0]]
    if len(full) == 1 or policy in ("same", "first"):
        return first
    some = _of_shards(values, full)
    if policy != "mean":
        return some.amin(0) if policy == "min" else some.amax(0)  # exact; NaN where one is
    if values.is_floating_point():
        mean = weighted_mean(values.double(), share).to(values.dtype)
    else:
        opened = _decoded(list(map(_OPENED, group)))
        mean = opened + weighted_mean((values - opened).double(), share).long()
    return torch.where((some == first).all(0), first, mean)


def _unlike(values: torch.Tensor) -> torch.Tensor:
    """Where shards differ from the first one, (S, K) to (S - 1, K); NaN is like NaN."""
    first = values[0]
    others = values[1:]
    differs = others != first
    return differs & ((others == others) | (first == first)) if others.is_floating_point() else differs


def _unlike_error(group: list[Buffer], shards: list[int], values: torch.Tensor) -> str:
    """The first element that differs, in the first shard and in the first other one, (S, K), and the remedy."""
    unlike = _unlike(values)
    place = int(unlike.any(0).nonzero()[0])
    other = 1 + int(unlike[:, place].nonzero()[0])
    opened = list(map(_OPENED, group))
    if opened[0].is_complex():
        place //= 2
    before, after = (torch.cat([one.reshape(-1) for one in assemble_all(row, opened)]) for row in values[[0, other]])
    element = place
    for buffer in group:
        if element < buffer.opened.numel():
            break
        element -= buffer.opened.numel()
    return (
        f'Every shard must change a buffer alike, unless another rule than "same" is given. Element {element} of '
        f"{buffer.name} ({buffer.tensor.dtype}) became {before[place].item()!r} in shard {shards[0]} and "
        f"{after[place].item()!r} in shard {shards[other]}. {_remedy(buffer)}"
    )


def _remedy(buffer: Buffer) -> str:
    """How a buffer that depends on the shard becomes the whole mini-batch's."""
    owner, key = buffer.places[0]
    if key in _STATISTICS and all(one in owner._buffers for one in _STATISTICS):
        rules = {f"{buffer.name.removesuffix(key)}{one}": "mean" for one in _STATISTICS}
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
