"""Gradients of the whole mini-batch: added up shard by shard, summed over the ranks while backward still runs.

[Note: None stays None] After the fold a parameter's gradient is None exactly if no shard of the mini-batch gave it one,
as in the loop on one device. Where only some shards did, the others count as zeros.

[Note: Left out] A copy of the model, such as a moving average, gets no gradient. In the plan it would double the bytes
of the sums, and no bucket would be complete before backward ends. So after the first fold, the plan leaves out
parameters that no shard of any rank gave a gradient. When a shard gives such a parameter one, the control word says so.
All ranks then agree on these parameters, sum them apart in that step, and plan them from the next one on. The same
holds for parameters that are frozen as the pass opens and unfrozen in a shard. A rank without a shard does not see
that, so a plan depends on the parameters that want a gradient as a pass opens, and on the agreed ones. The parameters
of an `AveragedModel` that no optimizer has stay out: a gradient that they get updates nothing, and becomes None.

[Note: Shard by shard] In a tree order each shard's gradients are taken out of the parameters after its backward: copied
for a left half, added for a right half. So k shards on a rank need at most log2(k) more flat tensors, and the
gradients that autograd makes for the current shard.

[Note: One after another] Where a rank's shards follow one after another, autograd adds each to those before, in the
bucket. It may write a gradient several times in a shard then, and on a GPU it adds without a copy; the other orders
allow neither.

[Note: Added by autograd] Once each parameter has a gradient in this pass, autograd itself adds a right half to its left
half, or a small left half to -0.0: the same additions, without work in Python for each parameter. The count of writes
shows afterwards that each gradient came once. If one was ever written twice in a shard, by a hook or by reentrant
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

[Note: Spare memory] The sums of shards that are still apart are flat tensors of their own, the pieces that a rank
sends. The first piece is kept, with the gradients of the whole mini-batch. The host keeps the others for the next pass,
since new memory costs page faults. A GPU's allocator keeps freed memory itself, so there they are dropped at the end of
a pass, and others can use their memory meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, compress, count, filterfalse, islice, repeat
from operator import and_, attrgetter, is_not, methodcaller, ne, not_, or_
from sys import getrefcount
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import HostCopy, accelerator_of, is_asynchronous
from ddp_loop.determinism import checksum_all
from ddp_loop.distributed import as_real, fill_identity, merge
from ddp_loop.training.buckets import (
    Bucketing,
    FlatAllReduce,
    FlatBuffer,
    FlatMemory,
    dtype_of_sums,
    finish_all,
    grouped,
)
from ddp_loop.training.parameter_checks import AFTER_HOOKS, HOOKS, ArrivalHook, Arrivals, OutsideParameters, find_hook

_FLOAT32_BYTES = 4
_LOOK_EACH = 64  # passes; a walk over the graph of a loss takes half a microsecond for each operation
_NORM_EACH = 2**20  # gradients that a step's norm may read
_LARGE_BYTES = 2**17  # of a gradient that is copied at once
_SMALL_BYTES = 2**18  # of a left half that starts from -0.0; a copy reads and writes less memory
_ALONE = sum(map(getrefcount, [object()]))  # the count of an object that a list alone holds
_PRECISE = {torch.float32, torch.float64}  # sums over gradients can have their dtype
_GRAD, _IS_SPARSE, _VERSION = map(attrgetter, ("grad", "is_sparse", "_version"))
_DTYPE, _REQUIRES_GRAD = map(attrgetter, ("dtype", "requires_grad"))
_HAS_GRADIENT, _RESULT = map(attrgetter, ("accumulation.has_gradient", "memory.result.gradients"))
_STRIDES = methodcaller("stride")
_OTHER_BACKWARD = (
    "Between a step's first shard and its fold, step.backward alone makes gradients. {} got one from another backward, "
    "which would count once per rank. Call step.backward(loss, more_losses=True) for each further loss of a shard, or "
    "torch.autograd.grad where the gradient is not the parameters'."
)


def set_grads(parameters: Iterable[Parameter], gradients: Iterable[torch.Tensor | None]) -> None:
    """Assign each parameter's `.grad`; a loop in Python takes three times as long."""
    deque(map(setattr, parameters, repeat("grad"), gradients), maxlen=0)


def is_held(flat: FlatBuffer) -> bool:
    """Whether somebody else holds a view, none of which is a `.grad` now."""
    return sum(map(getrefcount, flat.views)) > _ALONE * len(flat.views)


class Bucket:
    """Neighbouring parameters' gradients in one flat tensor, followed by `extras` elements for other sums.

    Args:
        parameters: of one dtype and device; without any it has the extras alone.
        bucketing: with the order in which shards are added up.
        extras: the number of other values.

    Attributes:
        memory: its flat tensors.
        length: the number of gradients.
        accumulation: of the current pass.
        arrived: in the current backward; see [Note: Arrivals].
        sent: so many had arrived when the sum began.
        in_place: whether autograd adds all shards up. See [Note: One after another].
        comes_once: whether no gradient was ever written twice in a shard: [Note: Added by autograd].
    """

    accumulation: Accumulation

    def __init__(self, parameters: list[Parameter], bucketing: Bucketing, extras: int = 0) -> None:
        self.parameters = parameters
        self.memory = FlatMemory(parameters, bucketing, extras)
        self.order = bucketing.order
        self.length = self.memory.length
        accelerator = accelerator_of(self.memory.summing.device)
        self.is_host = accelerator.is_host
        self.in_place = self.order.in_place and not self.memory.rounds
        # A GPU adds many in one kernel.
        self.comes_once = not (self.in_place or accelerator.is_gpu or not parameters)
        at_once = self.in_place and self.is_host
        self._large = [
            place for place, parameter in enumerate(parameters) if at_once and parameter.nbytes >= _LARGE_BYTES
        ]
        self.arrived = Arrivals()
        self.sent = 0
        self._is_steady = True  # whether the same gradient came last each time, as far as known
        self._last: int | None = None  # the place of the gradient that comes last, once it is known
        self._kept_by_script: list[FlatBuffer] = []  # to a script that keeps gradients
        self.accumulation = Accumulation(self)

    def resize(self, extras: int) -> None:
        """Make room for `extras` other values; collected gradients stay."""
        self.memory.resize(extras)
        self._kept_by_script = []
        self.accumulation.move()

    def open(self) -> None:
        """Begin a pass over the shards. See [Note: Kept gradients]."""
        self.arrived.clear()
        del self.accumulation  # its notes of the last pass are references to views too
        if is_held(self.memory.result):
            flats = [*self._kept_by_script, self.memory.result]
            free = next(filterfalse(is_held, flats), None)
            self._kept_by_script = [flat for flat in flats if flat is not free]
            self.memory.renew(free)
        self.accumulation = Accumulation(self)

    def is_counted(self, place: int) -> bool:
        """Whether the arrival of a gradient only counts, so that its hook may be `arrived.append`."""
        return self._is_steady and self._last not in (None, place) and place not in self._large

    def arrive(self, place: int) -> bool:
        """Note a gradient that has just been made; returns whether others need other hooks from now on.

        A large one on the CPU is copied into the flat tensor while it is in the cache. Autograd then uses its memory
        again for the next one. Small ones are copied together, in fewer calls.
        """
        parameter = self.parameters[place]
        self.arrived.append(parameter)
        if place in self._large:
            gradient = parameter.grad
            view = self.memory.first_piece.views[place]
            if gradient is not None and gradient is not view and not gradient.is_sparse:
                parameter.grad = view.copy_(gradient)
        if self._last is None and self.is_complete():
            self._last = place
            return True
        if self._is_steady and place == self._last and not self.is_complete():
            self._is_steady = False
            return True
        return False

    def is_complete(self) -> bool:
        """Whether the current backward has made each gradient."""
        least = len(self.parameters)  # one may come twice, as with reentrant checkpointing of a shared weight
        return len(self.arrived) >= least and len(set(map(id, self.arrived))) == least


class Accumulation:
    """One pass of a bucket: the gradients of the rank's shards, added up in their order. See [Note: Shard by shard].

    Attributes:
        has_gradient: for each parameter whether a shard gave it one.
        grad_buffer: the flat tensor that the parameters' `.grad` are views of.
        kept: the gradients of a shard that has another loss, with their versions.
        partial_sums: of the shards so far, the first in the bucket's own memory; another is None without a gradient.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._parameters = bucket.parameters
        self._memory = bucket.memory
        self.has_gradient = [False] * len(bucket.parameters)
        self.partial_sums: list[FlatBuffer | None] = []
        self._shards = 0  # finished
        self._adds = False  # whether autograd adds the current shard's gradients
        self.kept: list[tuple[torch.Tensor | None, int]] = []
        self._lost: int | None = None  # the place of a gradient that the script took away meanwhile
        self.grad_buffer = bucket.memory.first_piece
        self._version = self.grad_buffer.whole._version
        # Left in `.grad` by the step's backwards.
        self._expected_grads: Sequence[torch.Tensor | None] = [None] * len(bucket.parameters)

    def move(self) -> None:
        """Bring the sums into the bucket's new memory, the first one into its own."""
        for place, flat in enumerate(self.partial_sums):
            if flat is not None:
                self.partial_sums[place] = new = self._memory.take() if place else self._memory.first_piece
                new.gradients.copy_(flat.gradients)

    def begin_backward(self, *, apart: bool) -> None:
        """Let autograd make the next shard's gradients apart from those before, or add them.

        Args:
            apart: whether they are needed apart.
        """
        bucket = self._bucket
        if bucket.in_place or self.kept:
            return
        flat = self.grad_buffer
        is_right_half = bucket.order.merges[self._shards] > 0 and self.partial_sums[-1] is flat
        is_small = is_right_half or flat.gradients.nbytes <= _SMALL_BYTES
        if apart or not (is_small and bucket.comes_once and self._expected_grads is flat.views):
            set_grads(self._parameters, repeat(None))
            return
        self._adds = True
        if not is_right_half:
            self.grad_buffer = flat = self._memory.take()
            self._expected_grads = flat.views
            fill_identity(flat.gradients)
            set_grads(self._parameters, self._expected_grads)
        self._version = flat.whole._version

    def end_backward(self) -> None:
        """Keep the gradients of a shard that has another loss."""
        found = [parameter.grad for parameter in self._parameters]
        self.kept = [(gradient, 0 if gradient is None else gradient._version) for gradient in found]

    def finish_shard(self, factor: float | torch.Tensor | None = None) -> None:
        """Take the gradients of this rank's next shard.

        Args:
            factor: by which gradients that are rounded later are still to be multiplied; shape ().
        """
        if self._adds:
            self._count_added()
            return
        found = list(map(_GRAD, self._parameters))
        is_made = list(map(is_not, found, repeat(None)))
        is_fresh = list(map(and_, is_made, map(is_not, found, self.grad_buffer.views)))  # made elsewhere
        gradients = list(compress(found, is_fresh))
        for gradient in filter(_IS_SPARSE, gradients):
            raise ValueError(
                f"The fold takes dense gradients. A parameter of shape {tuple(gradient.shape)} got a sparse one. "
                "Make the embedding with sparse=False; for SparseAdam set p.grad = p.grad.to_sparse(1) after the fold."
            )
        self._bucket.comes_once &= bool(self.kept) or not any(map(_VERSION, gradients))
        self.kept = []
        if factor is not None and self._memory.rounds:
            dtype = self.grad_buffer.whole.dtype
            gradients = [gradient.to(dtype).mul_(_on(factor, gradient)) for gradient in gradients]
        self.has_gradient = list(map(or_, self.has_gradient, is_made))
        flat = self.partial_sums[-1] if self.partial_sums else None
        is_added = flat is not None
        write: Callable[..., Any] = torch._foreach_copy_
        if self._bucket.in_place:  # autograd has added up the others
            flat = self._memory.first_piece
            for view in compress(flat.views, map(not_, self.has_gradient)):
                fill_identity(view)
        elif not gradients:
            self._end_shard(None)
            return
        elif flat is not None and self._bucket.order.merges[self._shards]:
            write = torch._foreach_add_
        else:
            is_added = False
            flat = self._memory.take() if self.partial_sums else self._memory.first_piece
            if not all(is_fresh):
                fill_identity(flat.gradients)
        if gradients:
            write(list(compress(flat.views, is_fresh)), gradients)
        self._end_shard(flat, is_added=is_added, is_shown=not gradients)

    def _count_added(self) -> None:
        """Take the gradients of a shard that autograd has added; see [Note: Added by autograd]."""
        self._adds = False
        flat = self.grad_buffer
        is_added = self.partial_sums[-1] is flat
        writes = flat.whole._version - self._version
        if writes > len(self._parameters):
            self._bucket.comes_once = False
            if is_added:
                raise RuntimeError(
                    "A parameter's gradient must be written as often in each shard's backward. One was written once in "
                    "the step's first shards and then several times, by a hook or by reentrant checkpointing of a "
                    "shared weight. Checkpoint with use_reentrant=False, and change gradients after step.fold()."
                )
        if writes < len(self._parameters):  # the shard has none for one of them, or it is elsewhere
            self._lost = next(compress(count(), map(is_not, map(_GRAD, self._parameters), self._expected_grads)), None)
        self._end_shard(flat, is_added=is_added, is_shown=True)

    def _end_shard(self, flat: FlatBuffer | None, *, is_added: bool = False, is_shown: bool = False) -> None:
        """Add one more shard's sum to the others, in the tree's order, and show the last sum in `.grad`.

        Args:
            flat: with its gradients; None without any.
            is_added: whether it is the last sum, to which they were added.
            is_shown: whether the parameters' gradients are there already.
        """
        merges = self._bucket.order.merges
        merges_left = merges[self._shards] if merges else 0
        if is_added:  # that was the first of them
            merges_left -= 1
        self._shards += 1
        if flat is None and not self.partial_sums:
            flat = self._memory.first_piece
            fill_identity(flat.gradients)
        if not is_added:
            self.partial_sums.append(flat)
        if merges_left:
            self._memory.spare += merge(
                self.partial_sums, merges_left, lambda left, right: left.gradients.add_(right.gradients)
            )
        self.grad_buffer = flat = self.partial_sums[-1] or self.grad_buffer
        self._version = flat.whole._version
        has_gradient = [False] * len(self.has_gradient) if self._memory.rounds else self.has_gradient
        self._expected_grads = flat.views if all(has_gradient) else _where(flat.views, has_gradient)
        if merges_left or not is_shown:
            set_grads(self._parameters, self._expected_grads)

    def add_empty_shards(self) -> None:
        """Finish the pass: the rank's empty shards, which had no backward, add nothing."""
        while self._shards < max(1, len(self._bucket.order.merges)):
            self._end_shard(None)

    def pieces(self) -> list[torch.Tensor]:
        """The tensors that the rank sends."""
        return [(partial or self._memory.make()).whole for partial in self.partial_sums]

    def assign_grads(self, has_gradient: list[bool]) -> None:
        """Make the sum each parameter's `.grad`, where any rank `has_gradient`. See [Note: Spare memory]."""
        views = self._memory.result.views
        if has_gradient != self.has_gradient or self.grad_buffer is not self._memory.result:
            # Otherwise `.grad` is a view of the summed memory already, as usual.
            set_grads(self._parameters, views if all(has_gradient) else _where(views, has_gradient))
        self._memory.spare = [*self._memory.spare, *filter(None, self.partial_sums[1:])] if self._bucket.is_host else []
        self.partial_sums = self.partial_sums[:1]
        self.grad_buffer = self._memory.first_piece
        self._expected_grads = ()  # views of another sum would keep its memory

    def tampered(self) -> int | None:
        """The place of a gradient that is not as the step's backwards left it; None without one.

        It was removed or changed, or comes from another backward.
        """
        if self._lost is not None:
            return self._lost
        for place, (gradient, version) in enumerate(self.kept):
            found = self._parameters[place].grad
            if found is not gradient or (gradient is not None and gradient._version != version):
                return place
        if self.kept:
            return None
        for place in compress(count(), map(is_not, map(_GRAD, self._parameters), self._expected_grads)):
            return place
        changed = self._memory.summing.flat is None and self.grad_buffer.whole._version != self._version
        return 0 if changed and self._parameters else None


def _where(views: Sequence[torch.Tensor], has_gradient: Sequence[bool]) -> list[torch.Tensor | None]:
    """The views, or None where no gradient was given."""
    return [view if flag else None for view, flag in zip(views, has_gradient, strict=True)]


def _on(factor: float | torch.Tensor, gradient: torch.Tensor) -> float | torch.Tensor:
    return factor.to(gradient.device) if isinstance(factor, torch.Tensor) else factor


@dataclass(slots=True)
class GradientPass:
    """One pass over a mini-batch's shards; a new object for each.

    Attributes:
        number: counted from 1.
        looks: whether it looks for parameters outside of the state.
        versions: of the parameters, when it opened.
        sums: of the parameters' bits after the rank's first shard, where it has several and the pass looks.
        moved: for each parameter whether the second shard changed them, on its way to a GPU's host.
        written: a parameter whose bits it changed, by name; on a GPU in the pass before.
        buckets: the planned ones, and the others.
        next: the first of them whose sum has not started.
        shards: finished in it.
        goes_on: whether the current shard has had a loss, and has another one.
        in_backward, in_last: whether a backward of the step runs, and whether it is the rank's last one and sums may
            start.
        has_new_hooks: whether the next pass needs other hooks.
        folded: the sums that are assigned, flat, while the buckets hold them.
        norm: of all gradients, once it was computed.
    """

    number: int = 0
    looks: bool = False
    versions: list[int] = field(default_factory=list)
    sums: torch.Tensor | None = None
    moved: HostCopy | None = None
    written: str | None = None
    buckets: list[Bucket] = field(default_factory=list)
    next: int = 0
    shards: int = 0
    goes_on: bool = False
    in_backward: bool = False
    in_last: bool = False
    has_new_hooks: bool = False
    folded: list[torch.Tensor] = field(default_factory=list)
    norm: torch.Tensor | None = None


class UnplannedGradients:
    """The buckets of a pass that are not planned; see [Note: Left out].

    Args:
        names: of all parameters.
        averaged: those that stay left out.
        bucketing: makes buckets.

    Attributes:
        is_chosen: whether the plan is without the parameters that the first fold gave nothing.
        names: of the left-out parameters that this rank's shards gave a gradient in this pass.
        wanting: the parameters that wanted a gradient as this pass opened.
        averaged, awaited: the parameters that the next plan is without; the awaited ones may still get a gradient, as
            all ranks know alike.
        waiting: the awaited ones, and the unplanned ones that were frozen as this pass opened.
    """

    def __init__(self, names: Mapping[Parameter, str], averaged: Collection[Parameter], bucketing: Bucketing) -> None:
        self._names = names
        self.averaged = averaged
        self._bucketing = bucketing
        self.is_chosen = False
        self.names: frozenset[str] = frozenset()
        self._unfrozen: list[Bucket] = []
        self._found: dict[Parameter, Bucket] = {}  # of one left-out parameter each
        self.wanting: list[Parameter] = []
        self.awaited: list[Parameter] = []
        self.waiting: list[Parameter] = []
        self._agreed: set[Parameter] = set()  # that were waiting, and got a gradient

    def open(self, planned: Collection[Parameter]) -> list[Bucket]:
        """Begin a pass; returns buckets for unfrozen parameters, which are sent once all ranks agree."""
        self.names = frozenset()
        self._found = {}
        known = {*planned, *self.averaged, *self.awaited}
        unfrozen = [parameter for parameter in self.wanting if parameter not in known]
        known |= {*unfrozen}
        self.waiting = [*self.awaited, *(parameter for parameter in self._names if parameter not in known)]
        self._unfrozen = [Bucket(group, self._bucketing) for group in grouped(unfrozen, self._bucketing.sizes)]
        return self._unfrozen

    def adopt(self, shards: int) -> list[Bucket]:
        """Make a bucket for each left-out parameter that the backward of shard `shards`, counted from 0, gave one."""
        found = self.foreign()
        for parameter in found:
            gradient = parameter.grad
            parameter.grad = None
            self._found[parameter] = bucket = Bucket([parameter], self._bucketing)
            for _ in range(shards):
                bucket.accumulation.finish_shard()
            parameter.grad = gradient
            self.names |= {self._names[parameter]}
        return list(map(self._found.__getitem__, found))

    def foreign(self) -> list[Parameter]:
        """The waiting parameters that have a gradient and no bucket."""
        made = compress(self.waiting, map(is_not, map(_GRAD, self.waiting), repeat(None)))
        return [parameter for parameter in made if parameter not in self._found]

    def sum(self, names: Collection[str]) -> list[Bucket]:
        """Sum the gradients of unfrozen parameters, and of left-out ones with these names. Every rank must call this.

        Args:
            names: those with a gradient on any rank.

        Returns:
            Their buckets.
        """
        world = self._bucketing.world
        buckets = [*self._unfrozen]
        for parameter, name in self._names.items():
            if name in names:
                self._agreed.add(parameter)
                buckets.append(self._found.get(parameter) or Bucket([parameter], self._bucketing))
        for bucket in buckets:
            bucket.accumulation.add_empty_shards()
            has_gradient = world.sum(torch.tensor(bucket.accumulation.has_gradient, dtype=torch.int32, device="cpu"))
            if world.size > 1:
                bucket.memory.summing.start(bucket.accumulation.pieces())
                finish_all([bucket.memory.summing], world)
            bucket.accumulation.assign_grads(list(map(bool, has_gradient.tolist())))
        return buckets

    def leave_out(self, planned: Collection[Parameter]) -> bool:
        """Leave parameters that no fold gave a gradient out of the next plan; returns whether there are any."""
        if all(parameter.grad is None for parameter in self._names):
            return False  # the mini-batch had no weight
        known = {*self.averaged, *(planned if self.is_chosen else ())}
        self.is_chosen = True
        self.awaited = [parameter for parameter in self.wanting if parameter.grad is None and parameter not in known]
        return bool(self.awaited)

    def choice(self) -> list[Parameter]:
        """The parameters to plan, as all ranks know alike."""
        left_out = {*self.averaged, *self.awaited}
        chosen = {*self.wanting, *self._agreed} - left_out
        return [parameter for parameter in self._names if parameter in chosen]


class Gradients:
    """The gradients of `parameters`, folded over shards and ranks.

    A pass is `open`, `backward` or `finish_shard` for each shard, `collect`, `start_sums`, `finish_sums`,
    `assign`, then `scale` and `round`. No sum starts during backward before `plan` knows how many extras there are.

    Args:
        parameters: by name, in the same order on every rank.
        bucketing: makes the buckets; a network that fits into the first one is summed in one collective.
        averaged: parameters that never need one; see [Note: Left out].
        synced: whether backward contains other collectives, as with synced batch norm.
        takes_hooks: whether the script may have hooks on parameters.
        watch: called with each shard's number on this rank and its gradients by name; then no sum starts early.

    Attributes:
        bucketing: as given.
        buckets: that are planned; the last one has the extras.
        current: the pass that is open, or the last one.
        unplanned: the other gradients.
        trainable: the parameters that want a gradient, with their shapes.
        rounds: whether sums are rounded after the fold.

    Raises:
        ValueError: a parameter has a hook.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        bucketing: Bucketing,
        *,
        averaged: Collection[Parameter] = (),
        synced: bool = False,
        takes_hooks: bool = False,
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
    ) -> None:
        self._names: dict[Parameter, str] = {parameter: name for name, parameter in parameters.items()}
        self.bucketing = bucketing
        self._synced = synced
        self._watch = watch
        self._takes_hooks = takes_hooks
        if not takes_hooks and (hooked := find_hook(self._names)) is not None:
            raise ValueError(hooked)
        self._outside = OutsideParameters(self._names)
        self.buckets: list[Bucket] = []
        self._forms: dict[Parameter, tuple[torch.dtype, tuple[int, ...]]] = {}  # of the planned parameters
        self._hooks: list[RemovableHandle] = []
        self.unplanned = UnplannedGradients(self._names, averaged, bucketing)
        self._requires_grad: list[bool] = []  # whether each parameter wants a gradient, in this pass
        self.trainable: tuple[str, ...] = ()
        self.rounds = bucketing.reduce_dtype is not None
        self.current = GradientPass()

    def plan(self, room: int = 0, room_each: int = 0) -> None:
        """Make the buckets for the parameters that want a gradient now, unless they exist, and resize the extras.

        Args:
            room, room_each: for so many values, and so many for each planned parameter.
        """
        if not self.buckets:
            self._forms = {parameter: (parameter.dtype, parameter.stride()) for parameter in self.unplanned.choice()}
        extras = room + room_each * len(self._forms)
        if not self.buckets:
            *groups, last = self.bucketing.groups(list(self._forms)[::-1])
            self.buckets = [*(Bucket(group, self.bucketing) for group in groups), Bucket(last, self.bucketing, extras)]
            self._set_hooks()
        elif extras != len(self.buckets[-1].memory.extras):
            self.buckets[-1].resize(extras)

    def _set_hooks(self) -> None:
        """Give the parameters the hooks that they need. See [Note: Arrivals]."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.current.has_new_hooks = False
        for number, bucket in enumerate(self.buckets[:-1]):
            for place, parameter in enumerate(bucket.parameters):
                counts = bucket.is_counted(place)
                arrived = bucket.arrived.append if counts else ArrivalHook(self._arrived, number, place)
                if parameter.requires_grad:  # else frozen since, and torch takes no hook on it
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def release(self) -> None:
        """Drop the buckets and the hooks; assigned gradients stay."""
        for bucket in {*self.buckets, *self.current.buckets}:
            del bucket.accumulation  # it refers to the bucket, so both would wait for the garbage collector
        self.buckets = []
        self._set_hooks()
        self.current.buckets = []
        self.current.folded = []

    @property
    def planned(self) -> int:
        """The number of parameters in planned buckets, or in those that `plan` would make."""
        return len(self._forms if self.buckets else self.unplanned.choice())

    # -- one pass over the shards --------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a pass without gradients.

        Raises:
            RuntimeError: a parameter's dtype or memory format changed after the first step, it has a hook, or it is
                trained and in no part of the state.
        """
        former = self.current
        number = former.number + 1
        looks = not number & (number - 1) or number % _LOOK_EACH == 0
        if looks or former.looks:
            self._outside.open(again=looks)
        if not self._takes_hooks:  # 0.15 microseconds a parameter
            after = sum(map(len, filter(None, map(AFTER_HOOKS, self._names))))
            is_hooked = after != len(self._hooks) or any(map(HOOKS, self._names))
            if is_hooked and (hooked := find_hook(self._names)) is not None:
                raise RuntimeError(hooked)
        planned = self._forms if self.buckets else {}
        forms = zip(map(_DTYPE, planned), map(_STRIDES, planned), strict=True)
        for parameter in compress(planned, map(ne, forms, planned.values())):
            dtype, strides = planned[parameter]
            raise RuntimeError(
                "A parameter's dtype and memory format must not change during training. "
                f"{self._names[parameter]} had {dtype} with strides {strides} and now has {parameter.dtype} with "
                f"strides {parameter.stride()}. Convert the model before the Loop is created."
            )
        requires_grad = list(map(_REQUIRES_GRAD, self._names))
        if has_new_wants := requires_grad != self._requires_grad:
            self._requires_grad = requires_grad
            self.unplanned.wanting = wanting = list(compress(self._names, requires_grad))
            self.trainable = tuple(f"{self._names[parameter]} {tuple(parameter.shape)}" for parameter in wanting)
        written = None if former.moved is None else self._first_moved(former.moved)
        self.current = GradientPass(number, looks, list(map(_VERSION, self._names)), written=written)
        set_grads(self._names, repeat(None))
        if not self.buckets:
            self.plan()
        elif former.has_new_hooks:
            self._set_hooks()
        unfrozen = []
        if has_new_wants or former.buckets != self.buckets:
            unfrozen = self.unplanned.open(self._forms)
        self.current.buckets = [*self.buckets, *unfrozen]
        for bucket in self.current.buckets:
            bucket.open()

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor, *, last: bool, more: bool = False) -> None:
        """Backpropagate `factor` times the loss of one shard.

        A tensor factor of 0, a weight that only the device knows, adds exactly 0, never 0 * nan. A loss in bfloat16 or
        float16 is backpropagated unscaled and its gradients are multiplied: in bfloat16 a factor of 1/3 is off by
        0.2 %, and in float16 a large weight makes it 0 or infinite. With `reduce_dtype` they are multiplied in that
        dtype, but for gradients of several losses, which autograd adds up in the parameters' dtype.

        Args:
            loss: shape ().
            factor: the shard's share.
            last: whether the rank has no further shard, and sums may begin.
            more: whether the shard has another loss, perhaps on the same graph.

        Raises:
            RuntimeError: the gradients of an earlier shard are gone, or a second gradient came too late.
        """
        current = self.current
        if (error := self._find_tampered()) is not None:
            raise error
        if current.looks and not current.shards:
            self._outside.look(loss)
        if current.shards:
            for bucket in current.buckets:
                bucket.accumulation.begin_backward(apart=more or self._watch is not None)
        # The backward of synced batch norm adds up the parts of other ranks' losses, each with its own factor.
        is_low = loss.dtype.itemsize < _FLOAT32_BYTES and not self._synced
        factor_later = None
        if isinstance(factor, torch.Tensor) or (factor != 1 and is_low):
            wider = self.bucketing.reduce_dtype if is_low and not (more or current.goes_on) else None
            self._backpropagate_apart(loss, factor, is_low=is_low, wider=wider, retain_graph=more)
            factor_later = None if wider is None else factor
        else:
            self._backpropagate(loss, factor, last=last, retain_graph=more)
        if self.unplanned.waiting:
            current.buckets += self.unplanned.adopt(current.shards)
        current.goes_on = more
        if not more:
            self.finish_shard(factor=factor_later)
            return
        for bucket in current.buckets:
            bucket.accumulation.end_backward()

    def _backpropagate(self, loss: torch.Tensor, factor: float, *, last: bool, retain_graph: bool) -> None:
        """A backward during which sums may start, and whose gradients are added to those before.

        It is `loss.backward` without checks of dtype and shape, which take a shard 8 to 30 microseconds.
        """
        current = self.current
        for bucket in self.buckets[:-1]:
            bucket.arrived.clear()
        seed = loss.new_full((), factor)
        has_extras = len(self.buckets[-1].memory.extras) > 0
        current.in_backward = True
        current.in_last = last and has_extras and not self._synced and self._watch is None
        try:
            if type(loss) is torch.Tensor:
                run = torch.autograd.Variable._execution_engine.run_backward
                run((loss,), (seed,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
            else:  # its class may do more
                loss.backward(seed, retain_graph=retain_graph)
        finally:
            current.in_backward = False
            current.in_last = False
        if current.next and (late := self._written_late()):
            raise self._second(late[0])

    def _backpropagate_apart(
        self,
        loss: torch.Tensor,
        factor: float | torch.Tensor,
        *,
        is_low: bool,
        wider: torch.dtype | None,
        retain_graph: bool,
    ) -> None:
        """Backpropagate apart from the gradients of the shards before, and add `factor` times the new ones to them.

        Args:
            loss: shape ().
            factor: the shard's share; a tensor of shape () if only the device knows it.
            is_low: whether the factor would be rounded in the loss's dtype, so that it is backpropagated unscaled.
            wider: gradients that are added up in this dtype, and not in their own, are multiplied by the factor there.
            retain_graph: whether another loss of the same graph follows.
        """
        before = {parameter: parameter.grad for parameter in self._names}
        set_grads(before, repeat(None))
        seed = torch.ones_like(loss) if is_low else torch.as_tensor(factor, dtype=loss.dtype, device=loss.device)
        loss.backward(seed.reshape(loss.shape), retain_graph=retain_graph)
        for parameter, gradient in before.items():
            made = parameter.grad
            if made is None:
                parameter.grad = gradient
                continue
            if is_low and dtype_of_sums(made.dtype, wider) == made.dtype:  # the factor itself is not rounded to it
                made.copy_(made.to(torch.promote_types(made.dtype, torch.float32)) * _on(factor, made))
            if isinstance(factor, torch.Tensor):
                void = factor == 0
                # With synced batch norm the other shards' losses depend on this one's values too, and their part
                # counts. Only NaN and infinity that its own loss made of 0 do not.
                made.masked_fill_(void & ~made.isfinite() if self._synced else void, 0.0)
            if gradient is not None:
                parameter.grad = gradient.add_(made)

    def backward_empty(self, loss: torch.Tensor, *, more: bool) -> None:
        """Backpropagate the loss of no samples for the collectives in it; its gradients are discarded."""
        before = list(map(_GRAD, self._names))
        loss.backward(torch.zeros_like(loss), retain_graph=more)
        set_grads(self._names, before)

    def finish_shard(self, *, factor: float | torch.Tensor | None = None) -> None:
        """Finish a shard with the gradients that it has.

        Args:
            factor: by which gradients that are rounded after the fold are still to be multiplied.
        """
        current = self.current
        buckets = current.buckets[current.next :]
        shown: dict[str, torch.Tensor] = {}
        for bucket in buckets if self._watch is not None else ():
            for parameter, view in zip(bucket.parameters, bucket.accumulation.grad_buffer.views, strict=True):
                gradient = parameter.grad
                # In the first shard the bucket's own views may be gradients too: large ones, and an earlier loss's.
                if gradient is not None and (gradient is not view or not current.shards):
                    shown[self._names[parameter]] = gradient
        for bucket in buckets:
            bucket.accumulation.finish_shard(factor)
        if self._watch is not None:
            self._watch(current.shards, shown)
        current.shards += 1

    def _find_tampered(self) -> RuntimeError | None:
        """The error of a gradient that is not as the step's backwards left it."""
        foreign = self.unplanned.foreign() if self.unplanned.waiting else []
        if self.current.next:
            foreign += self._written_late()
        for parameter in foreign:
            return RuntimeError(_OTHER_BACKWARD.format(self._names[parameter]))
        for bucket in self.current.buckets:
            if (place := bucket.accumulation.tampered()) is None:
                continue
            name = self._names[bucket.parameters[place]]
            if not (bucket.accumulation.has_gradient[place] or bucket.accumulation.kept):
                return RuntimeError(_OTHER_BACKWARD.format(name))
            return RuntimeError(
                "Gradients of a step's shards must stay as they are until its fold. That of "
                f"{name} was taken away or changed. Leave zero_grad() out, since each step begins "
                "without gradients; clip and scale after step.fold(); and backpropagate a further loss with "
                "step.backward(loss, more_losses=True) before the last one, not with loss.backward(). Take gradients "
                "of anything else, such as inputs, by torch.autograd.grad."
            )
        return None

    def _arrived(self, number: int, place: int, parameter: Parameter) -> None:
        current = self.current
        if number < current.next:
            error = RuntimeError(_OTHER_BACKWARD.format(self._names[parameter]))
            raise self._second(parameter) if current.in_backward else error
        if not current.in_backward:
            return  # a backward of the script's own; the step's next one finds its gradients
        current.has_new_hooks |= self.buckets[number].arrive(place)
        while current.in_last and current.next < len(self.buckets) - 1 and self.buckets[current.next].is_complete():
            first = self.buckets[current.next].accumulation
            first.finish_shard()
            first.add_empty_shards()
            self._start_next()

    def _written_late(self) -> list[Parameter]:
        """The parameters whose gradients were written after their sum had begun."""
        return list(chain(*(bucket.arrived[bucket.sent :] for bucket in self.buckets[: self.current.next])))

    def _second(self, parameter: Parameter) -> RuntimeError:
        return RuntimeError(
            f"A parameter gets its gradient once in a shard's last backward. {self._names[parameter]} got a second one "
            "after its sum over the ranks had begun, as with reentrant checkpointing of a shared weight. Checkpoint "
            "with use_reentrant=False, or give Loop a bucket_cap_mib larger than the network."
        )

    def collect(self, room: int, room_each: int) -> tuple[list[bool], torch.Tensor, RuntimeError | None]:
        """Finish this rank's shards; args as for `plan`.

        Returns:
            For each parameter in bucket order, whether one of the shards gave it a gradient; the extras of the last
            bucket; and an error if the gradients of a shard are gone. The length of the sums is the same then.
        """
        problem = self._find_tampered()
        if room + room_each * len(self._forms) != len(self.buckets[-1].memory.extras):
            self.plan(room, room_each)
        for bucket in self.buckets[self.current.next :]:
            bucket.accumulation.add_empty_shards()
        if self.unplanned.averaged:
            set_grads(self.unplanned.averaged, repeat(None))  # their values are dropped
        has_gradient = (
            [False] * len(self._forms) if problem is not None else list(chain(*map(_HAS_GRADIENT, self.buckets)))
        )
        return has_gradient, self.buckets[-1].memory.extras, problem

    def leaving(
        self, room: int, room_each: int, others: Sequence[FlatAllReduce]
    ) -> Callable[[int | None, AbstractContextManager[object]], None]:
        """The pass's sums that have not begun, and `others`, as a collective that adds nothing, also after `release`.

        Args:
            room, room_each: as for `plan`.
            others: sums that are started after them.

        Returns:
            To be called with the place in the extras where this rank adds 1, or None, and with a context
            manager that is entered after all buckets have begun, and left after their sums.
        """
        self.plan(room, room_each)
        world = self.bucketing.world
        pieces_each = max(1, self.bucketing.order.pieces[world.rank])
        planned = len(self.buckets)
        sums = [*(bucket.memory.summing for bucket in self.buckets), *others]
        first = self.current.next
        length = self.buckets[-1].length

        def send(mark: int | None, beside: AbstractContextManager[object]) -> None:
            for number, summing in enumerate(sums[first:], first):
                pieces = [fill_identity(summing.empty()) for _ in range(pieces_each)]  # assigned gradients stay
                if mark is not None and number == planned - 1:
                    pieces[0][length + mark] = 1
                summing.start(pieces, sums[number - 1] if 0 < number < planned else None)
            with beside:
                finish_all(sums, world)

        return send

    def start_sums(self) -> None:
        """Start the sums of gradients and extras over all ranks that have not begun. Every rank must call this."""
        for _ in range(self.current.next, len(self.buckets)):
            self._start_next()

    def _start_next(self) -> None:
        """Start the next bucket's sum after the one before; one rank has it already."""
        current = self.current
        bucket = self.buckets[current.next]
        bucket.sent = len(bucket.arrived)
        if self.bucketing.world.size > 1:
            before = self.buckets[current.next - 1].memory.summing if current.next else None
            bucket.memory.summing.start(bucket.accumulation.pieces(), before)
        current.next += 1

    def finish_sums(self, others: Sequence[FlatAllReduce] = ()) -> None:
        """Wait for all sums, and others that were started after them. Every rank must call this."""
        finish_all([*(bucket.memory.summing for bucket in self.buckets), *others], self.bucketing.world)

    def assign(self, has_gradient: list[bool], unplanned: Collection[str] | None) -> bool:
        """End a pass: assign the sums to `.grad`. See [Note: None stays None]. Every rank must call this.

        Args:
            has_gradient: for each parameter in bucket order whether a shard of any rank gave it a gradient.
            unplanned: the names of others that got one, where the ranks have agreed on them.

        Returns:
            Whether the next pass needs another plan.
        """
        self.current.next = 0
        flags = iter(has_gradient)
        for bucket in self.buckets:
            bucket.accumulation.assign_grads(list(islice(flags, len(bucket.parameters))))
        is_new = unplanned is not None
        if unplanned is not None:
            self.current.buckets = [*self.buckets, *self.unplanned.sum(unplanned)]
        self.current.folded = list(filter(torch.Tensor.numel, map(_RESULT, self.current.buckets)))
        if not is_new and self.unplanned.is_chosen:
            return False
        has_left_out = self.unplanned.leave_out(self._forms)
        return has_left_out or is_new

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the sums of all gradients by `factor`, shape ()."""
        for bucket in self.current.buckets:
            bucket.memory.first_piece.gradients.mul_(factor)

    def round(self) -> None:
        """Round the sums to the parameters' dtypes. See [Note: Rounded once] in `buckets`."""
        for bucket in self.current.buckets:
            if bucket.memory.rounds:
                bucket.memory.result.gradients.copy_(bucket.memory.first_piece.gradients)

    # -- after the fold ------------------------------------------------------------------------------------

    def extremes(self) -> list[torch.Tensor]:
        """The least and the largest element of each bucket, shape () each.

        Finite exactly if all gradients are: NaN propagates, and nothing overflows. None counts as zeros.
        `vector_norm(..., inf)` gives one value and takes 13 times as long on the CPU.
        """
        return list(chain(*map(torch.aminmax, map(as_real, self.current.folded))))

    def folded_norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients, shape (); computed once in a fold, from the buckets while they are."""
        if self.current.norm is None:
            norms = list(map(_norm, self.current.folded))
            if len(norms) > 1:
                norms = [norm.to(self.bucketing.world.device, torch.float64) for norm in norms]
                norms = [torch.linalg.vector_norm(torch.stack(norms))]
            self.current.norm = norms[0] if norms else self.norm()
        return self.current.norm

    def norm_if_due(self, iteration: int, *, thinned: bool) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, shape (); None in steps that leave it out.

        Unless this pass has computed it, it reads each gradient once more, 0.3 ms per million on a CPU. So k million
        gradients are read in every k-th step.
        """
        if thinned and self.current.norm is None and (iteration - 1) % max(1, self.elements // _NORM_EACH):
            return None
        return self.folded_norm()

    def are_finite(self) -> bool:
        """Whether all gradients are; the host waits. A finite norm proves it in half the time that `extremes` takes."""
        if _PRECISE.issuperset(map(_DTYPE, self.current.folded)) and math.isfinite(self.folded_norm().item()):
            return True
        return all(math.isfinite(extreme.item()) for extreme in self.extremes())

    @property
    def elements(self) -> int:
        """The number of gradients."""
        return sum(bucket.length for bucket in self.current.buckets)

    def first_not_finite(self, *, written: bool) -> str | None:
        """The first parameter whose gradient is not finite, by name; with `written`, the first not finite itself."""
        for parameter, name in self._names.items():
            value = parameter if written else parameter.grad
            if value is not None and not bool(value.detach().isfinite().all()):
                return name
        return None

    def are_of(self, optimizers: list[Optimizer]) -> bool:
        """Whether each parameter with a gradient is in one of these."""
        known = {
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        }
        return all(parameter in known for parameter in self._names if parameter.grad is not None)

    def drop(self) -> None:
        """Make all gradients None."""
        set_grads(self._names, repeat(None))

    def fill_with_nan(self, where: torch.Tensor | bool) -> None:
        """Make all gradients NaN, if `where`, shape ()."""
        for flat in self.current.folded:
            flat.masked_fill_(torch.as_tensor(where, device=flat.device), torch.nan)

    def look_at_values(self) -> None:
        """Find a parameter that the rank's second shard wrote, in a pass that looks; on a GPU for the next fold.

        Writes through `.data` have no new version. They count shards, as in a momentum encoder that its forward moves.
        One that leaves a written parameter as it is, such as a bound for its norm, has its plain meaning.
        """
        current = self.current
        if len(self.bucketing.order.mine) < 2:
            return
        sums = checksum_all(list(map(torch.Tensor.detach, self._names)))
        if current.sums is not None:
            current.moved = HostCopy(sums != current.sums)
            current.written = None if is_asynchronous(sums) else self._first_moved(current.moved)
        current.sums = sums

    def _first_moved(self, moved: HostCopy) -> str | None:
        return next(compress(self._names.values(), moved.wait().tolist()), None)

    def changed_since_opened(self) -> str | None:
        """A parameter that was written since the pass opened, by name; None without one."""
        changed = map(ne, map(_VERSION, self._names), self.current.versions)
        return next(compress(self._names.values(), changed), self.current.written)

    def named(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by parameter name, without those that are None."""
        return {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients as they are now; shape ()."""
        if gradients := list(self.named().values()):
            return torch.nn.utils.get_total_norm(gradients)
        return torch.zeros((), dtype=self.bucketing.extras_dtype, device=self.bucketing.world.device)


def _norm(flat: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of flat gradients, shape (), float32 or float64; None counts as zeros."""
    if flat.dtype in _PRECISE:
        square = flat.dot(flat)  # half the time of aminmax, and 40 times as precise as vector_norm
        is_double = flat.dtype == torch.float64
        if is_double or accelerator_of(flat.device).is_asynchronous or 0 < square.item() < math.inf:
            return square.sqrt()
    # Squares of another range.
    whole: torch.Tensor = torch.linalg.vector_norm(as_real(flat), dtype=torch.float64)
    return whole if flat.dtype == torch.float64 else whole.float()
