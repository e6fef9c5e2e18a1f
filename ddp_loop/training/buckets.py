"""Buckets: neighbouring parameters' gradients in one flat tensor, so that one sum carries them all.

[Note: Buckets] A bucket is one flat tensor. A parameter's gradient is a view into it with the parameter's own strides
(contiguous views under channels_last and a fused optimizer gave silently wrong weights). Buckets are in the reverse
order of the parameters, roughly the order in which backward finishes them. They stay the same while the set of
parameters that want a gradient does: torch's DDP rebuilds its own after the first step, and a resumed run differs. Sums
start strictly in bucket order, the same on every rank.

[Note: Shard by shard] In a tree order each shard's gradients are taken out of the parameters after its backward: copied
for a left half, added for a right half. So k shards on a rank need at most log2(k) more buffers, and what autograd
makes for the current shard.

[Note: In place] Once each parameter has a gradient in this pass, autograd itself adds a right half to its left half, or
a small left half to -0.0: the same additions, without work in Python for each parameter. The count of writes shows
afterwards that each gradient came once. If one was ever written twice in a shard, by a hook or by reentrant
checkpointing, the bucket does without, since (a + b) + c is not a + (b + c).

[Note: Arrivals] A hook on each parameter shows when a bucket is complete. A hook in Python takes a microsecond, for
each parameter and shard; `append` of a list takes 0.1. Backward comes to the gradients in the same order each time, so
once a bucket was complete, only the parameter whose gradient came last has a hook in Python. If another one is the last
afterwards, the bucket's sum begins after backward, and all its parameters have hooks in Python again.

[Note: Kept gradients] A script may keep a step's gradients, `before = parameter.grad`, and in a plain loop they stay as
they are. So where somebody holds a view as a pass opens, the flat tensor is his, and the bucket takes another one. It
takes a flat tensor back once it is free, so there are never more than the script keeps: a segment of shared memory
stays mapped on all ranks. Python's count of references shows who holds a view, at 0.02 microseconds a parameter. It
does not show a tensor that only shares the memory, such as `parameter.grad.view(-1)`.

[Note: Rounded once] With `reduce_dtype` the rows have that dtype. Each shard's gradients are added to them and leave
`.grad`, which has the parameters' dtype. The sum is rounded into a tensor of its own, to which `.grad` then points.

[Note: Rows] The sums of shards that are still apart are rows of a bucket. The first row is kept, with the gradients of
the whole mini-batch. The host keeps the others for the next pass, since new memory costs page faults. A GPU's allocator
keeps freed memory itself, so there they are dropped at the end of a pass, and others can use their memory meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, is_, is_not, not_
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed import World, fill_identity, merge, padded
from ddp_loop.training.flat_all_reduce import FlatAllReduce
from ddp_loop.training.ordered_sum import ReductionOrder

_CPU_MIB = 8.0
_LARGE_BYTES = 2**17  # of a gradient that is copied at once
_SMALL_BYTES = 2**18  # of a left half that starts from -0.0; a copy reads and writes less memory
_ALONE = sum(map(getrefcount, [object()]))  # the count of what a list alone holds
_GRAD, _IS_SPARSE, _VERSION = map(attrgetter, ("grad", "is_sparse", "_version"))


def dtype_of_sums(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype gradients are added up: `reduce_dtype`, or their own one where that is more precise."""
    return dtype if reduce_dtype is None else torch.promote_types(dtype, reduce_dtype)


class BucketSizes(NamedTuple):
    """The most bytes of a step's first bucket, and of each further one."""

    first: int
    further: int


def bucket_sizes(cap_mib: float | None, device: torch.device) -> BucketSizes:
    """The sizes that a script asked for, or by default 8 MiB on the CPU and DDP's own on a GPU.

    DDP's first bucket is small, so that the first sum begins early in backward.
    """
    if cap_mib is None and not accelerator_of(device).is_host:
        return BucketSizes(2**20, 25 * 2**20)
    size = int((_CPU_MIB if cap_mib is None else cap_mib) * 2**20)
    return BucketSizes(size, size)


def grouped(
    parameters: list[Parameter], sizes: BucketSizes, reduce_dtype: torch.dtype | None = None
) -> list[list[Parameter]]:
    """Neighbours of one dtype and device in groups of up to these sizes; a larger one is a group of its own."""
    groups: list[list[Parameter]] = []
    filled = 0
    for parameter in parameters:
        last = groups[-1][0] if groups else None
        same = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        size = parameter.numel() * dtype_of_sums(parameter.dtype, reduce_dtype).itemsize
        if not same or filled + size > (sizes.first if len(groups) == 1 else sizes.further):
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return groups


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its storage without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def set_grads(parameters: Iterable[Parameter], gradients: Iterable[torch.Tensor | None]) -> None:
    """Assign each parameter's `.grad`; a loop in Python takes three times as long."""
    deque(map(setattr, parameters, repeat("grad"), gradients), maxlen=0)


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """A flat tensor, its part for gradients, and each parameter's view into that part."""

    whole: torch.Tensor
    gradients: torch.Tensor
    views: list[torch.Tensor]

    def is_held(self) -> bool:
        """Whether somebody else holds a view, none of which is a `.grad` now. See [Note: Kept gradients]."""
        return sum(map(getrefcount, self.views)) > _ALONE * len(self.views)


class Arrivals(list[Parameter]):
    """Parameters in the order in which backward has made their gradients. See [Note: Arrivals]."""


class Bucket:
    """Neighbouring parameters' gradients in one flat tensor, followed by `tail` elements for other sums.

    Args:
        parameters: of one dtype and device.
        tail: the number of other values.
        dtype, device: of the parameters.
        world: from `join_world`.
        order: in which shards are added up.
        sums: the dtype in which they are added up. See [Note: Rounded once].

    Attributes:
        own: the first row, which the sum comes into.
        result: the same, or its gradients rounded to the parameters' dtype; `.grad` points there after the fold.
    """

    own: FlatBuffer
    result: FlatBuffer

    def __init__(
        self,
        parameters: list[Parameter],
        tail: int,
        dtype: torch.dtype,
        device: torch.device,
        world: World,
        order: ReductionOrder,
        sums: torch.dtype,
    ) -> None:
        self.parameters = parameters
        self.given = [False] * len(parameters)
        self._nothing = [None] * len(parameters)
        self._left: Sequence[torch.Tensor | None] = self._nothing  # by the step's backwards, in each `.grad`
        self.arrived = Arrivals()  # in the current backward; see [Note: Arrivals]
        self._sent = 0  # so many had arrived when the sum began
        self._last: int | None = None  # the place of the gradient that comes last, once it is known
        self.is_steady = True  # as far as known
        self.length = sum(parameter.numel() for parameter in parameters)
        self.is_precise = dtype in (torch.float32, torch.float64)  # so sums over gradients can have their dtype
        self._dtype = sums
        self._device = device
        self._world = world
        self._order = order
        self._rounds = sums != dtype
        self._in_place = order.in_place and sums == dtype
        self._forms = [
            (parameter.numel(), parameter.shape, parameter.stride() if is_dense(parameter) else None)
            for parameter in parameters
        ]
        self._keeps_rows = accelerator_of(device).is_host  # from pass to pass: [Note: Rows]
        self._sums: list[FlatBuffer | None] = []  # of the pass's shards so far; None without a gradient
        self._shards = 0  # finished in this pass
        self._spare: list[FlatBuffer] = []
        self._given_away: list[FlatBuffer] = []  # to a script that keeps gradients
        self._is_collected = False  # whether the parameters' gradients are in the flat tensor
        self._kept: list[tuple[torch.Tensor | None, int]] = []  # of a shard that has another loss
        # Whether no gradient was ever written twice in a shard: [Note: In place]. A GPU adds many in one kernel.
        self._comes_once = not accelerator_of(device).is_gpu
        self._is_host = accelerator_of(device).is_host
        self._adds = False  # whether autograd adds the current shard's gradients
        self._lost: Parameter | None = None  # whose gradient the script took away meanwhile
        if self._rounds:
            self.result = self._flat(torch.empty(self.length, dtype=dtype, device=device))
        self.resize(tail)

    def resize(self, tail: int) -> None:
        """Make room for `tail` other values; collected gradients stay."""
        length = padded(self.length + tail, self._order)
        self._is_collected = False
        self.summing = FlatAllReduce(self._world, self._order, length, self._dtype, self._device)
        self._length = length
        self._spare = []
        self._given_away = []
        own = self._flat(self.summing.empty())
        first = next((one for one in self._sums if one is not None), None)
        if first is not None:
            own.gradients.copy_(first.gradients)
        self._sums = [own if one is first and one else one and self._moved(one) for one in self._sums]
        self.own = own
        if not self._rounds:
            self.result = own
        self.tail = self.own.whole[self.length : self.length + tail]
        self._show(self.own)

    def _make(self) -> FlatBuffer:
        return self._flat(torch.empty(self._length, dtype=self._dtype, device=self._device))

    def _flat(self, whole: torch.Tensor) -> FlatBuffer:
        gradients = fill_identity(whole)[: self.length]
        return FlatBuffer(whole, gradients, list(self._views(gradients)))

    def _moved(self, flat: FlatBuffer) -> FlatBuffer:
        new = self._spare.pop() if self._spare else self._make()
        new.gradients.copy_(flat.gradients)
        return new

    def _views(self, gradients: torch.Tensor) -> Iterator[torch.Tensor]:
        offset = 0
        for count, shape, strides in self._forms:
            piece = gradients[offset : offset + count]
            yield piece.view(shape) if strides is None else piece.as_strided(shape, strides)
            offset += count

    def open(self) -> None:
        """Begin a pass over the shards."""
        self.given = [False] * len(self.parameters)
        self._is_collected = False
        self.arrived.clear()
        for one in self._sums:
            if one is not None and one is not self.own:
                self._spare.append(one)
        self._sums = []
        self._shards = 0
        self._kept = []
        self._adds = False
        self._lost = None
        self._left = self._nothing
        if sum(map(getrefcount, self.result.views)) > _ALONE * len(self.parameters):
            self._give_away()
        self._show(self.own)

    def _give_away(self) -> None:
        """Leave the flat tensor to the script that keeps gradients in it. See [Note: Kept gradients]."""
        flats = [*self._given_away, self.result]
        free = next((flat for flat in flats if not flat.is_held()), None)
        self._given_away = [flat for flat in flats if flat is not free]
        if self._rounds:
            self.result = free or self._flat(torch.empty_like(self.result.whole))
            return
        tail = len(self.tail)
        self.own = self.result = free or self._flat(self.summing.empty())
        self.tail = self.own.whole[self.length : self.length + tail]

    # -- a shard's gradients -------------------------------------------------------------------------------

    def _show(self, flat: FlatBuffer) -> None:
        """Note which tensor holds the parameters' gradients now, for `tampered`."""
        self._shown = flat
        self._version = flat.whole._version
        shows = not self._rounds and any(self.given)
        self._left = _where(flat.views, self.given) if shows else self._nothing

    def begin_backward(self, *, apart: bool = True) -> None:
        """Let autograd make the next shard's gradients apart from those before, or add them. See [Note: In place].

        Args:
            apart: whether they are needed apart.
        """
        self._is_collected = False
        if not self._shards or self._kept or self._in_place:
            return
        if not apart and self._may_add():
            self._adds = True
            if not self._is_right_half():
                self._shown = self._spare.pop() if self._spare else self._make()
                self._left = self._shown.views
                fill_identity(self._shown.gradients)
                set_grads(self.parameters, self._left)
            self._version = self._shown.whole._version
        else:
            set_grads(self.parameters, repeat(None))

    def _may_add(self) -> bool:
        """Whether autograd may add the next shard's gradients to `.grad`."""
        if not self._comes_once or self._left is not self._shown.views:
            return False
        return self._is_right_half() or self.own.gradients.nbytes <= _SMALL_BYTES

    def _is_right_half(self) -> bool:
        """Whether the next shard's gradients are added to those that are in `.grad`."""
        merges = self._order.merges
        done = self._shards
        return 0 < done < len(merges) and bool(merges[done]) and self._sums[-1] is self._shown

    def is_counted(self, place: int) -> bool:
        """Whether the arrival of a gradient only counts, so that its hook may be `arrived.append`."""
        return self._last is not None and self.is_steady and place != self._last and not self._is_large(place)

    def _is_large(self, place: int) -> bool:
        return self._in_place and self._is_host and self.parameters[place].nbytes >= _LARGE_BYTES

    def arrive(self, place: int) -> bool:
        """Note a gradient that has just been made; returns whether others need other hooks from now on.

        A large one on the CPU is copied into the flat tensor while it is in the cache. Autograd then uses its memory
        again for the next one. Small ones are copied together, in fewer calls.
        """
        parameter = self.parameters[place]
        self.arrived.append(parameter)
        if self._is_large(place):
            gradient = parameter.grad
            view = self.own.views[place]
            if gradient is not None and gradient is not view and not gradient.is_sparse:
                parameter.grad = view.copy_(gradient)
        if not self.is_steady:
            return False
        if self._last is None and self.is_complete():
            self._last = place
            return True
        if place == self._last and not self.is_complete():
            self.is_steady = False
            return True
        return False

    def is_complete(self) -> bool:
        """Whether the current backward has made each gradient."""
        least = len(self.parameters)  # one may come twice, as with reentrant checkpointing of a shared weight
        return len(self.arrived) >= least and len(set(map(id, self.arrived))) == least

    def late(self) -> list[Parameter]:
        """The parameters whose gradients were written after the sum had begun."""
        return self.arrived[self._sent :]

    def end_backward(self) -> None:
        """Keep the gradients of a shard that has another loss."""
        if self._in_place:
            self._collect()
        else:
            found = [parameter.grad for parameter in self.parameters]
            self._kept = [(gradient, 0 if gradient is None else gradient._version) for gradient in found]

    def finish_shard(self, number: int, factor: float | torch.Tensor | None = None) -> None:
        """Take the gradients of this rank's shard `number`, counted from 1, unless that was done.

        Args:
            number: of the shard.
            factor: by which gradients that are rounded later are still to be multiplied; shape ().
        """
        if self._in_place:
            self._collect()
        elif self._shards < number:
            if self._adds:
                self._count_added()
                return
            places, gradients = self.fresh()
            self._comes_once = self._comes_once and (bool(self._kept) or not any(map(_VERSION, gradients)))
            self._kept = []
            if factor is not None and self._rounds:
                gradients = [gradient.to(self._dtype).mul_(_on(factor, gradient)) for gradient in gradients]
            for place in places:
                self.given[place] = True
            self._add(places, gradients)
            self._show(self._sums[-1] or self._shown)
            set_grads(self.parameters, self._left)

    def _count_added(self) -> None:
        """Take the gradients of a shard that autograd has added; see [Note: In place]."""
        self._adds = False
        flat = self._shown
        merges = self._order.merges[self._shards]
        writes = flat.whole._version - self._version
        self._version = flat.whole._version
        if writes > len(self.parameters):
            self._comes_once = False
            if self._sums[-1] is flat:
                raise RuntimeError(
                    "A parameter's gradient must be written as often in each shard's backward. One was written once in "
                    "the step's first shards and then several times, by a hook or by reentrant checkpointing of a "
                    "shared weight. Checkpoint with use_reentrant=False, and change gradients after step.fold()."
                )
        if writes < len(self.parameters):  # the shard has none for one of them, or it is elsewhere
            self._lost = self._differing()
        self._shards += 1
        if self._sums[-1] is flat:
            merges -= 1  # autograd has made it
        else:
            self._sums.append(flat)
        if merges:
            self._merge(merges)
            self._show(self._sums[-1] or flat)
            set_grads(self.parameters, self._left)

    def fresh(self, flat: FlatBuffer | None = None) -> tuple[Sequence[int], list[torch.Tensor]]:
        """The gradients that autograd made apart from those of the shards before, with their parameters' places."""
        found: list[Any] = list(map(_GRAD, self.parameters))
        places: Sequence[int] = range(len(found))
        views = (flat or self._shown).views
        if any(map(is_, found, repeat(None))) or any(map(is_, found, views)):
            places = [place for place in places if found[place] is not None and found[place] is not views[place]]
        gradients = list(map(found.__getitem__, places))
        if any(map(_IS_SPARSE, gradients)):
            raise _sparse(next(filter(_IS_SPARSE, gradients)))
        return places, gradients

    def _add(self, places: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Add one more shard's gradients, in the tree's order."""
        merges = self._order.merges[self._shards]
        self._shards += 1
        last = self._sums[-1] if self._sums else None
        if not places:
            self._sums.append(None)
        elif merges and last is not None:
            torch._foreach_add_(list(map(last.views.__getitem__, places)), gradients)
            merges -= 1
        else:
            self._sums.append(self._filled(places, gradients))
        if merges:
            self._merge(merges)

    def _merge(self, merges: int) -> None:
        self._spare += merge(self._sums, merges, lambda left, right: left.gradients.add_(right.gradients))

    def _filled(self, places: Sequence[int], gradients: list[torch.Tensor]) -> FlatBuffer:
        if not any(self._sums):
            flat = self.own
        else:
            flat = self._spare.pop() if self._spare else self._make()
        if len(places) < len(self.parameters):
            fill_identity(flat.gradients)
        torch._foreach_copy_(list(map(flat.views.__getitem__, places)), gradients)
        return flat

    def _collect(self) -> None:
        """Copy the gradients that autograd made elsewhere into the flat tensor, all in one call."""
        self._is_collected = True
        views = self.own.views
        self.given = list(map(is_not, map(_GRAD, self.parameters), repeat(None)))
        for view in compress(views, map(not_, self.given)):
            fill_identity(view)
        places, gradients = self.fresh(self.own)
        if gradients:
            torch._foreach_copy_(list(map(views.__getitem__, places)), gradients)
        self._show(self.own)
        if gradients:
            set_grads(self.parameters, self._left)

    def finish_shards(self) -> None:
        """Finish the rank's shards; empty ones, which had no backward, add nothing."""
        if self._in_place:
            if not self._is_collected:
                self._collect()
            return
        while self._shards < len(self._order.merges):
            self._add([], [])
        if not any(self._sums):
            fill_identity(self.own.gradients)
            self._sums[:1] = [self.own]
        elif self._sums[0] is None:  # the sum comes into the first one
            place = self._sums.index(self.own)
            self._sums[place] = self._moved(self.own)
            fill_identity(self.own.gradients)
            self._sums[0] = self.own

    def start(self, before: FlatAllReduce | None = None) -> None:
        """Start the sum over the ranks, after that of `before`; one rank has it already. Every rank must call this."""
        self._sent = len(self.arrived)
        if self._world.size > 1:
            rows = [self.own] if self._in_place else [one or self._make() for one in self._sums]
            self.summing.start([row.whole for row in rows], before)

    def assign_grads(self, given: list[bool]) -> None:
        """Make the sum each parameter's `.grad`; None where no shard of any rank gave one."""
        if not self._in_place or given != self.given:  # else they are there since they were collected
            set_grads(self.parameters, _where(self.result.views, given))
        if not (self._keeps_rows or self._in_place):
            self._sums = self._sums[:1]
            self._spare = []
            self._show(self.own)

    def round(self) -> None:
        """Round the sum, where it has more bits than the parameters. See [Note: Rounded once]."""
        if self._rounds:
            self.result.gradients.copy_(self.own.gradients)

    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest gradient, shape () each; one is NaN if a gradient is.

        `vector_norm(..., inf)` gives one value and takes 13 times as long on the CPU.
        """
        flat = self.result.gradients
        return torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of the gradients, shape (), float32 or float64; None counts as zeros."""
        flat = self.result.gradients
        if self.is_precise:
            square = flat.dot(flat)  # half the time of aminmax, and 40 times as precise as vector_norm
            if (
                accelerator_of(flat.device).is_asynchronous
                or flat.dtype == torch.float64
                or 0 < square.item() < math.inf
            ):
                return square.sqrt()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        whole: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)  # squares of another range
        return whole if flat.dtype == torch.float64 else whole.float()

    def gave(self, parameter: Parameter) -> bool:
        """Whether a backward of this pass gave the parameter a gradient."""
        return bool(self._kept) or any(map(is_, compress(self.parameters, self.given), repeat(parameter)))

    def tampered(self, *, adds: bool = False) -> Parameter | None:
        """A parameter whose gradient is not what the step's backwards left; None without one.

        It was removed or changed, or comes from another backward.

        Args:
            adds: whether a backward follows that may add to the gradients. A removed one is then found after it.
        """
        if self._lost is not None:
            return self._lost
        for parameter, (gradient, version) in zip(self.parameters, self._kept, strict=False):
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                return parameter
        if self._kept:
            return None
        if not (adds and self._is_right_half() and self._may_add()) and (found := self._differing()) is not None:
            return found
        changed = self.summing.flat is None and self._shown.whole._version != self._version
        return self.parameters[0] if changed and self.parameters else None

    def _differing(self) -> Parameter | None:
        """The first parameter whose `.grad` is not the tensor that was left there."""
        if any(differs := list(map(is_not, map(_GRAD, self.parameters), self._left))):
            return next(compress(self.parameters, differs))
        return None


def _where(views: Sequence[torch.Tensor], given: Sequence[bool]) -> Sequence[torch.Tensor | None]:
    """The views, or None where no gradient was given."""
    return views if all(given) else [view if is_given else None for view, is_given in zip(views, given, strict=True)]


def _on(factor: float | torch.Tensor, gradient: torch.Tensor) -> float | torch.Tensor:
    return factor.to(gradient.device) if isinstance(factor, torch.Tensor) else factor


def _sparse(gradient: torch.Tensor) -> ValueError:
    return ValueError(
        f"The fold takes dense gradients. A parameter of shape {tuple(gradient.shape)} got a sparse one. "
        "Make the embedding with sparse=False."
    )
