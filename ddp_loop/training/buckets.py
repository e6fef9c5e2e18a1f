"""Buckets: neighbouring parameters' gradients in one flat tensor, so that one sum over the ranks carries them all.

[Note: Buckets] A bucket is one flat tensor. A parameter's gradient is a view into it with the parameter's own strides
(contiguous views under channels_last and a fused optimizer gave silently wrong weights). Buckets are in the reverse
order of the parameters, roughly the order in which backward finishes them. They stay the same while the set of
parameters that want a gradient does: torch's DDP rebuilds its own after the first step, and a resumed run differs. Sums
start strictly in bucket order, the same on every rank.

[Note: In turn] A sum in tree order has two collectives, with this rank's additions between them. Where its waits hold
up the device alone, as with NCCL, the start of the next sum makes the additions and starts the second collective. So
all but the last sums are nearly done when backward ends. The order of collectives follows from the order of starts,
which is the same on every rank, never from arrivals. Before the next start rather than after it: so a GPU holds
the pieces of one bucket at a time. Where a wait holds up the host, it would hold up backward, and all additions follow
it. A sum of one collective has nothing to start, so backward does not wait for it.

[Note: Rounded once] With `reduce_dtype` the flat tensors have that dtype. Each shard's gradients are added to them and
leave `.grad`, which has the parameters' dtype. The sum is rounded into a tensor of its own, to which `.grad` then
points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import Parameter

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed import Work, World, as_real, fill_identity, padded
from ddp_loop.training.ordered_sum import ReductionOrder

_CPU_MIB = 8.0


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
    before = None
    for parameter in parameters:
        form = parameter.dtype, parameter.device
        size = parameter.numel() * dtype_of_sums(parameter.dtype, reduce_dtype).itemsize
        if form != before or filled + size > (sizes.first if len(groups) == 1 else sizes.further):
            groups.append([])
            filled = 0
            before = form
        groups[-1].append(parameter)
        filled += size
    return groups


@dataclass(frozen=True, slots=True)
class Bucketing:
    """How gradients are put into buckets.

    Attributes:
        world: from `join_world`.
        order: in which shards are added up.
        sizes: of the buckets.
        extras_dtype: of the extras of the last one.
        reduce_dtype: in which gradients of a lower precision are added up; None for their own.
    """

    world: World
    order: ReductionOrder
    sizes: BucketSizes
    extras_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None

    def groups(self, parameters: list[Parameter]) -> list[list[Parameter]]:
        """The parameters of each bucket; the last bucket, perhaps without any, has room for extras."""
        groups = grouped(parameters, self.sizes, self.reduce_dtype)
        last = groups[-1][0] if groups else None
        extras_kind = self.extras_dtype, self.world.device
        if last is None or (dtype_of_sums(last.dtype, self.reduce_dtype), last.device) != extras_kind:
            groups.append([])  # the extras cannot ride with gradients of another type
        return groups


class FlatAllReduce:
    """The sum of one flat tensor, of `length` values and padding, over the ranks: `start`, `reduce`, `finish_all`.

    Attributes:
        empty: makes new memory for a piece, from which the sum is quickest; with any values.
        flat: where the sum will be, from `start` to `finish_all`.
    """

    def __init__(
        self, world: World, order: ReductionOrder, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._world = world
        self.device = device
        real = dtype.to_real()  # no backend adds complex numbers
        count = padded(length, order) * dtype.itemsize // real.itemsize
        self._sum = world.flat_sum(order, count, real, device)
        plain = partial(torch.empty, count, dtype=real, device=device)
        empty = plain if self._sum is None else self._sum.empty
        self.empty: Callable[[], torch.Tensor] = lambda: empty().view(dtype)
        self._work: Work | None = None
        self._is_reduced = False
        self.flat: torch.Tensor | None = None

    def start(self, pieces: Sequence[torch.Tensor], before: FlatAllReduce | None = None) -> None:
        """Send this rank's pieces; the sum comes into the first of them. Every rank must call this.

        Args:
            pieces: of one length.
            before: the sum that was started before it in this pass. See [Note: In turn].
        """
        if before is not None and before._sum is not None and before._sum.reduces_early:
            before.reduce()
        flat = [as_real(piece).reshape(-1) for piece in pieces]
        self.flat = flat[0]
        self._is_reduced = False
        if (whole := self._sum) is not None:
            self._work = self._world.start(lambda _: whole.arrive(flat), self.device)

    def reduce(self) -> None:
        """Add up this rank's part of all pieces, and send it to all ranks, once. Every rank must call this."""
        if (whole := self._sum) is not None and not self._is_reduced:
            self._world.finish(self._work)
            self._is_reduced = True
            self._work = self._world.start(lambda _: whole.reduce(), self.device)


def finish_all(sums: Sequence[FlatAllReduce], world: World) -> None:
    """Reduce sums that have all been started, and wait until they have come. Every rank must call this."""
    for each in sums:
        each.reduce()
    for each in sums:
        if each._sum is not None:
            world.finish(each._work)
            each._sum.collect()
        each._work = each.flat = None
    for device in dict.fromkeys(each.device for each in sums):
        world.finish(world.start(lambda backend: backend.start_settling(), device))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its storage without gaps or overlaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # torch keeps no others


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """A flat tensor, its part for gradients, and each parameter's view into that part."""

    whole: torch.Tensor
    gradients: torch.Tensor
    views: list[torch.Tensor]


class FlatMemory:
    """The flat tensors of a bucket: its parameters' gradients, followed by extras, other values.

    Args:
        parameters: of one dtype and device; without any it has the extras alone.
        bucketing: with the order of the sums, and their dtype. See [Note: Rounded once].
        extras: the number of other values.

    Attributes:
        length: the number of gradients.
        rounds: whether the sums have more bits than the parameters.
        summing: the sum over the ranks.
        first_piece: which the sum comes into; its `extras`.
        result: the same, or its gradients rounded to the parameters' dtype; `.grad` points there after the fold.
        spare: free flat tensors.
    """

    first_piece: FlatBuffer
    result: FlatBuffer
    summing: FlatAllReduce
    extras: torch.Tensor
    spare: list[FlatBuffer]

    def __init__(self, parameters: list[Parameter], bucketing: Bucketing, extras: int) -> None:
        world = bucketing.world
        like = parameters[0] if parameters else torch.empty(0, dtype=bucketing.extras_dtype, device=world.device)
        sum_dtype = dtype_of_sums(like.dtype, bucketing.reduce_dtype if parameters else None)
        *starts, self.length = accumulate(map(torch.Tensor.numel, parameters), initial=0)
        contiguous = [
            parameter if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
            for parameter in parameters
        ]
        self._forms = [
            (start, parameter.shape, parameter.stride()) for start, parameter in zip(starts, contiguous, strict=True)
        ]
        self._make_sum = partial(FlatAllReduce, world, bucketing.order, dtype=sum_dtype, device=like.device)
        self.rounds = sum_dtype != like.dtype
        if self.rounds:
            self.result = self._flat(torch.empty(self.length, dtype=like.dtype, device=like.device))
        self.resize(extras)

    def resize(self, extras: int) -> None:
        """Take new memory, with room for `extras` other values."""
        self.summing = self._make_sum(self.length + extras)
        self.spare = []
        self._use(self._flat(self.summing.empty()), extras)

    def renew(self, free: FlatBuffer | None) -> None:
        """Leave the result to a script that keeps it, and take one that is `free` again, or new memory."""
        if self.rounds:
            self.result = free or self._flat(torch.empty_like(self.result.whole))
        else:
            self._use(free or self._flat(self.summing.empty()), len(self.extras))

    def _use(self, flat: FlatBuffer, extras: int) -> None:
        self.first_piece = flat
        self.extras = flat.whole[self.length : self.length + extras]
        if not self.rounds:
            self.result = flat

    def _flat(self, whole: torch.Tensor) -> FlatBuffer:
        gradients = fill_identity(whole)[: self.length]
        views = [gradients[start:].as_strided(shape, strides) for start, shape, strides in self._forms]
        return FlatBuffer(whole, gradients, views)

    def make(self) -> FlatBuffer:
        """A new flat tensor of -0.0."""
        return self._flat(torch.empty_like(self.first_piece.whole))

    def take(self) -> FlatBuffer:
        """A flat tensor that is free, with any values."""
        return self.spare.pop() if self.spare else self.make()
