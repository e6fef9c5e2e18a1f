"""Gradients of the whole mini-batch: static buckets, summed over the ranks while backward still runs.

[Note: None stays None] After the fold a parameter's gradient is None exactly if no shard of the mini-batch gave it one,
as in the loop on one device. Where only some shards did, the others count as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, methodcaller, ne

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_loop.distributed import World
from ddp_loop.training.backpropagation import backpropagate_apart
from ddp_loop.training.buckets import Arrivals, Bucket, BucketSizes, dtype_of_sums, grouped, set_grads
from ddp_loop.training.flat_all_reduce import FlatAllReduce, finish_all
from ddp_loop.training.ordered_sum import ReductionOrder
from ddp_loop.training.parameter_checks import AFTER_HOOKS, HOOKS, Hook, OutsideParameters, find_hook
from ddp_loop.training.unplanned import UnplannedGradients

_FLOAT32_BYTES = 4
_NORM_EACH = 2**20  # gradients that a step's norm may read
_VERSION, _WANTS, _GIVEN, _PRECISE = map(attrgetter, ("_version", "requires_grad", "given", "is_precise"))
_DTYPE = attrgetter("dtype")
_STRIDES = methodcaller("stride")
_OWN_BACKWARD = (
    "Between a step's first shard and its fold, step.backward alone makes gradients. {} got one from another backward, "
    "which would count once per rank. Call step.backward(loss, more_losses=True) for each further loss of a shard, or "
    "torch.autograd.grad where the gradient is not the parameters'."
)


class Gradients:
    """The gradients of `parameters`, folded over shards and ranks.

    A pass is `open`, `backward` or `finish_shard` for each shard, `collect`, `start_sums`, `finish_sums`, `close`. No
    sum starts during backward before `plan` knows the tail's length.

    Args:
        parameters: by name, in the same order on every rank.
        world: from `join_world`.
        sizes: of the buckets; a network that fits into the first one is summed in one collective.
        order: in which shards are added up.
        averaged: parameters that never need one; see [Note: Left out] in `unplanned`.
        synced: whether backward contains other collectives, those of synced batch norm.
        takes_hooks: whether the script may have hooks on parameters.
        watch: called with each shard's number on this rank and its gradients by name; then no sum starts early.
        reduce_dtype: in which gradients of a lower precision are added up; None for their own.

    Raises:
        ValueError: a parameter has a hook.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        world: World,
        sizes: BucketSizes,
        order: ReductionOrder,
        *,
        averaged: Collection[Parameter] = (),
        synced: bool = False,
        takes_hooks: bool = False,
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self._world = world
        self._sizes = sizes
        self._order = order
        self._reduce_dtype = reduce_dtype
        self._names: dict[Parameter, str] = {parameter: name for name, parameter in parameters.items()}
        self.unplanned = UnplannedGradients(self._names, averaged, sizes, self._bucket_of)
        self.is_chosen = False  # whether the plan is without what the first fold gave nothing
        self._asks: list[bool] = []  # whether each parameter wants a gradient, in this pass
        self._planned_asks: list[bool] = []  # and when the buckets were planned
        self._versions: list[int] = []  # of the parameters, when the pass opened
        self.wanted: tuple[str, ...] = ()  # the parameters that want a gradient, with their shapes
        self._tail = 0
        self.tail = torch.empty(0, device="cpu")  # room for other sums, of `slot_dtype`, shape (the planned length,)
        self._planned: dict[Parameter, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._hooks: list[RemovableHandle] = []
        self._has_new_hooks = False  # from the next pass on
        self._next = 0  # the first bucket whose sum has not started
        self._in_backward = self._in_last = False
        self._shards = 0  # finished in this pass
        self._goes_on = False  # whether the current shard has had a loss, and has another one
        self._is_pass_open = self._holds_sums = False  # the latter: the buckets hold the last fold's sums
        doubles = any(parameter.dtype == torch.float64 for parameter in self._names)
        self.slot_dtype = torch.float64 if doubles else torch.float32  # of statistics, losses and metrics
        self.rounds = reduce_dtype is not None  # whether sums are rounded after the fold
        self.known_norm: torch.Tensor | None = None  # of all gradients, once this pass has computed it
        self._takes_hooks = takes_hooks
        if not takes_hooks and (hooked := find_hook(self._names, _is_own)) is not None:
            raise ValueError(hooked)
        self._outside = OutsideParameters(self._names)
        self._passes = 0
        self._looks = False  # whether this pass looks for parameters outside of the state
        self._synced = synced
        self._watch = watch
        self._overlaps = not synced and watch is None  # whether sums may start during backward

    def plan(self, tail: int) -> None:
        """Lay out the buckets for the parameters that want a gradient now, with room for `tail` more values."""
        self._tail = tail
        if self.buckets:
            self.buckets[-1].resize(tail)
            self.tail = self.buckets[-1].tail
            return
        self._planned_asks = list(map(_WANTS, self._names))
        wanted = self._choice()
        device = self._world.device
        dtype = self.slot_dtype
        groups = grouped(wanted[::-1], self._sizes, self._reduce_dtype)
        last = groups[-1][0] if groups else None
        if last is None or (dtype_of_sums(last.dtype, self._reduce_dtype), last.device) != (dtype, device):
            groups.append([])  # the tail cannot ride with gradients of another type
        for group in groups:
            room = tail if group is groups[-1] else 0
            self.buckets.append(self._bucket_of(group, room))
        self.tail = self.buckets[-1].tail
        self._planned = {parameter: (parameter.dtype, parameter.stride()) for parameter in wanted}
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Give the parameters the hooks that they need. See [Note: Arrivals] in `buckets`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._has_new_hooks = False
        for number, bucket in enumerate(self.buckets[:-1]):
            for place, parameter in enumerate(bucket.parameters):
                if not parameter.requires_grad:  # frozen since, and torch takes no hook on it
                    continue
                arrived = bucket.arrived.append if bucket.is_counted(place) else partial(self._arrived, number, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def release(self) -> None:
        """Drop the buckets and the hooks; assigned gradients stay."""
        for hook in self._hooks:
            hook.remove()
        self.buckets = []
        self._hooks = []
        self._planned = {}
        self.unplanned.release()
        self._holds_sums = False

    def _choice(self) -> list[Parameter]:
        """The parameters to plan."""
        return [one for one in self._names if one.requires_grad and one not in self.unplanned.left_out]

    def _bucket_of(self, group: list[Parameter], tail: int = 0) -> Bucket:
        """A bucket of parameters of one dtype and device; without any it has the tail alone."""
        dtype, device = (group[0].dtype, group[0].device) if group else (self.slot_dtype, self._world.device)
        sums = dtype_of_sums(dtype, self._reduce_dtype) if group else dtype
        return Bucket(group, tail, dtype, device, self._world, self._order, sums)

    # -- one pass over the shards --------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a pass without gradients.

        Raises:
            RuntimeError: a parameter's dtype or memory format changed after the first step, it has a hook, or it is
                trained and in no part of the state.
        """
        self._passes = self._passes + 1
        looked = self._looks
        self._looks = not self._passes & (self._passes - 1)
        if self._looks or looked:
            self._outside.open(again=self._looks)
        if not self._takes_hooks:  # 0.15 microseconds a parameter
            after = sum(map(len, filter(None, map(AFTER_HOOKS, self._names))))
            is_hooked = after != len(self._hooks) or any(map(HOOKS, self._names))
            if is_hooked and (hooked := find_hook(self._names, _is_own)) is not None:
                raise RuntimeError(hooked)
        forms = list(zip(map(_DTYPE, self._planned), map(_STRIDES, self._planned), strict=True))
        if forms != list(self._planned.values()):
            self._refuse_new_form()
        asks = list(map(_WANTS, self._names))
        self._versions = list(map(_VERSION, self._names))
        set_grads(self._names, repeat(None))
        if not self.buckets:
            self.plan(0)
        elif self._has_new_hooks:
            self._set_hooks()
        if asks != self._asks:
            self._asks = asks
            self.wanted = tuple(f"{name} {tuple(p.shape)}" for p, name in self._names.items() if p.requires_grad)
        if self.unplanned.buckets or asks != self._planned_asks:
            self.unplanned.open(self._planned)
        self._next = self._shards = 0
        self._is_pass_open = True
        self._goes_on = False
        self.known_norm = None
        for bucket in (*self.buckets, *self.unplanned.buckets):
            bucket.open()
        self.tail = self.buckets[-1].tail

    def _refuse_new_form(self) -> None:
        for parameter, form in self._planned.items():
            if (parameter.dtype, parameter.stride()) != form:
                raise RuntimeError(
                    "A parameter's dtype and memory format must not change during training. "
                    f"{self._names[parameter]} had {form[0]} with strides {form[1]} and now has {parameter.dtype} with "
                    f"strides {parameter.stride()}. Convert the model before the Loop is created."
                )

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor, *, last: bool, more: bool = False) -> None:
        """Backpropagate `factor` times the loss of one shard.

        A tensor factor of 0, a weight that only the device knows, adds exactly 0, never 0 * nan. A loss in bfloat16 or
        float16 is backpropagated unscaled and its gradients are multiplied: in bfloat16 a factor of 1/3 is off by
        0.2 %, and in float16 a large weight makes it 0 or infinite. With `reduce_dtype` they are multiplied in that
        dtype, but for those of several losses, which autograd adds up in the parameters' dtype.

        Args:
            loss: shape ().
            factor: the shard's share.
            last: whether the rank has no further shard.
            more: whether the shard has another loss, perhaps on the same graph.

        Raises:
            RuntimeError: the gradients of an earlier shard are gone, or a second gradient came too late.
        """
        apart = more or self._watch is not None
        self._check_kept(adds=not apart)
        if self._looks and not self._shards:
            self._outside.look(loss)
        for bucket in (*self.buckets[self._next :], *self.unplanned.buckets):
            bucket.begin_backward(apart=apart)
        is_low = loss.dtype.itemsize < _FLOAT32_BYTES
        later = None
        if isinstance(factor, torch.Tensor) or (factor != 1 and is_low):
            wider = self._reduce_dtype if is_low and not (more or self._goes_on) else None
            how = {"is_low": is_low, "retain_graph": more, "synced": self._synced}
            backpropagate_apart(self._names, loss, factor, **how, wider=wider)
            later = None if wider is None else factor
        else:
            for bucket in self.buckets[:-1]:
                bucket.arrived.clear()
            self._in_backward = True
            self._in_last = last and self._tail > 0 and self._overlaps
            try:
                _backpropagate(loss, loss.new_full((), factor), retain_graph=more)
            finally:
                self._in_backward = self._in_last = False
            if self._next and (late := self._late()):
                raise self._second(late[0])
        if self.unplanned.left_out:
            self.unplanned.adopt(self._shards)
        if self._watch is not None and not more:
            self._show(self._watch)
        self._shards = self._shards + (not more)
        self._goes_on = more
        for bucket in (*self.buckets[self._next :], *self.unplanned.buckets):
            bucket.end_backward() if more else bucket.finish_shard(self._shards, later)

    def backward_empty(self, loss: torch.Tensor, *, more: bool) -> None:
        """Backpropagate the loss of no samples for the collectives in it; its gradients are discarded."""
        before = {parameter: parameter.grad for parameter in self._names}
        loss.backward(torch.zeros_like(loss), retain_graph=more)
        set_grads(before, before.values())

    def finish_shard(self, *, skipped: bool = False) -> None:
        """Finish a shard with the gradients that it has; raises where a `skipped` one has any of the script's own."""
        if skipped:
            self._check_kept()
        if self._watch is not None:
            self._show(self._watch)
        self._shards += 1
        for bucket in (*self.buckets[self._next :], *self.unplanned.buckets):
            bucket.finish_shard(self._shards)

    def _show(self, watch: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        fresh: dict[str, torch.Tensor] = {}
        for bucket in (*self.buckets[self._next :], *self.unplanned.buckets):
            for place, gradient in zip(*bucket.fresh(), strict=True):
                fresh[self._names[bucket.parameters[place]]] = gradient
            if not self._shards:  # the bucket may have gradients of this shard's earlier loss
                made = ((self._names[one], one.grad) for one in bucket.parameters)
                fresh |= {name: gradient for name, gradient in made if gradient is not None}
        watch(self._shards, fresh)

    def _check_kept(self, *, adds: bool = False) -> None:
        for parameter in self.unplanned.foreign() if self.unplanned.left_out else ():
            raise RuntimeError(_OWN_BACKWARD.format(self._names[parameter]))
        if self._next and (late := self._late()):
            raise RuntimeError(_OWN_BACKWARD.format(self._names[late[0]]))
        for bucket in (*self.buckets, *self.unplanned.buckets):
            if (lost := bucket.tampered(adds=adds)) is not None:
                if not bucket.gave(lost):
                    raise RuntimeError(_OWN_BACKWARD.format(self._names[lost]))
                raise RuntimeError(
                    "Gradients of a step's shards must stay as they are until its fold. That of "
                    f"{self._names[lost]} was taken away or changed. Leave zero_grad() out, since each step begins "
                    "without gradients; clip and scale after step.fold(); and backpropagate a further loss with "
                    "step.backward(loss, more_losses=True) before the last one, not with loss.backward()."
                )

    def _arrived(self, number: int, place: int, parameter: Parameter) -> None:
        if not self._in_backward:
            if self._is_pass_open and number < self._next:
                raise RuntimeError(_OWN_BACKWARD.format(self._names[parameter]))
            return  # a backward of the script's own; the step's next one finds its gradients
        if number < self._next:
            raise self._second(parameter)
        self._has_new_hooks |= self.buckets[number].arrive(place)
        while self._in_last and self._next < len(self.buckets) - 1 and self.buckets[self._next].is_complete():
            first = self.buckets[self._next]
            self._next += 1
            first.finish_shard(self._shards + 1)
            first.finish_shards()
            self._start(self._next - 1)

    def _late(self) -> list[Parameter]:
        """The parameters whose gradients were written after their sum had begun."""
        return list(chain.from_iterable(map(Bucket.late, self.buckets[: self._next])))

    def _second(self, parameter: Parameter) -> RuntimeError:
        return RuntimeError(
            f"A parameter gets its gradient once in a shard's last backward. {self._names[parameter]} got a second one "
            "after its sum over the ranks had begun, as with reentrant checkpointing of a shared weight. Checkpoint "
            "with use_reentrant=False, or give Loop a bucket_cap_mib larger than the network."
        )

    def collect(self, tail: int) -> list[bool]:
        """Finish this rank's shards, with room for `tail` more values.

        Returns:
            For each parameter in bucket order, whether one of the shards gave it a gradient.

        Raises:
            RuntimeError: the gradients of a shard are gone.
            ValueError: a gradient is sparse.
        """
        try:
            self._check_kept()
        finally:  # the length of the sums is the same where something is wrong
            if tail != self._tail:
                self.plan(tail)
            for bucket in self.buckets[self._next :]:
                bucket.finish_shards()
            if self.unplanned.buckets or self.unplanned.left_out:
                self.unplanned.finish_shards()
        return list(chain.from_iterable(map(_GIVEN, self.buckets)))

    def leaving(
        self, tail: int, others: Sequence[FlatAllReduce]
    ) -> Callable[[int | None, AbstractContextManager[object]], None]:
        """The pass's sums that have not begun, and `others`, as a collective that adds nothing, also after `release`.

        Returns:
            To be called with the place in the tail, of length `tail`, where this rank adds 1, or None, and with what is
            entered after all buckets have begun, and left after their sums.
        """
        if tail != self._tail or not self.buckets:
            self.plan(tail)
        planned = len(self.buckets)
        sums = [*(bucket.summing for bucket in self.buckets), *others]
        first = self._next
        with_tail = self.buckets[-1].summing
        length = self.buckets[-1].length

        def send(mark: int | None, beside: AbstractContextManager[object]) -> None:
            for number, summing in enumerate(sums[first:], first):
                rows = summing.empty_rows()  # assigned gradients stay as they are
                if mark is not None and summing is with_tail:
                    rows[0][length + mark] = 1
                summing.start(rows, sums[number - 1] if 0 < number < planned else None)
            with beside:
                finish_all(sums, self._world)

        return send

    @property
    def planned(self) -> int:
        """The number of parameters in planned buckets, or in those that `plan` would make."""
        return len(self._planned) if self.buckets else len(self._choice())

    def start_sums(self) -> None:
        """Start the sums of gradients and tail over all ranks that have not begun. Every rank must call this."""
        for number in range(self._next, len(self.buckets)):
            self._start(number)

    def _start(self, number: int) -> None:
        self.buckets[number].start(self.buckets[number - 1].summing if number else None)

    def finish_sums(self, others: Sequence[FlatAllReduce] = ()) -> None:
        """Wait for all sums, and others that were started after them. Every rank must call this."""
        finish_all([*(bucket.summing for bucket in self.buckets), *others], self._world)

    def leave_out(self) -> bool:
        """Leave what no fold gave a gradient out of the next plan; returns whether there is such a parameter."""
        if all(parameter.grad is None for parameter in self._names):
            return False  # the mini-batch had no weight
        planned = self._planned if self.is_chosen else ()
        self.is_chosen = True
        return self.unplanned.leave_out(planned)

    def close(self, given: list[bool]) -> None:
        """End a pass: assign the sums to `.grad`. See [Note: None stays None]."""
        self._next = start = 0
        self._is_pass_open = False
        self._holds_sums = True
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            bucket.assign_grads(given[start:end])
            start = end

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the sums of all gradients by `factor`, shape ()."""
        for bucket in (*self.buckets, *self.unplanned.buckets):
            bucket.own.gradients.mul_(factor)

    def round(self) -> None:
        """Round the sums to the parameters' dtypes."""
        for bucket in (*self.buckets, *self.unplanned.buckets):
            bucket.round()

    # -- after the fold ------------------------------------------------------------------------------------

    def extremes(self) -> list[torch.Tensor]:
        """The least and the largest element of each bucket, shape () each, in one dtype.

        Finite exactly if all gradients are: NaN propagates, and nothing overflows. None counts as zeros.
        """
        found = [bucket.extremes() for bucket in (*self.buckets, *self.unplanned.buckets) if bucket.length]
        dtype = self.slot_dtype if len(found) > 1 else None
        return [one if dtype is None else one.to(self._world.device, dtype) for pair in found for one in pair]

    def folded_norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients, shape (); computed from the buckets once in a fold."""
        if self.known_norm is None:
            norms = [bucket.norm() for bucket in (*self.buckets, *self.unplanned.buckets) if bucket.length]
            if len(norms) != 1:
                norms = [norm.to(self._world.device, torch.float64) for norm in norms]
                norms = [torch.linalg.vector_norm(torch.stack(norms)) if norms else self.tail.new_zeros(())]
            (self.known_norm,) = norms
        return self.known_norm

    def norm_if_due(self, iteration: int, *, thinned: bool) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, shape (); None in steps that leave it out.

        Unless this pass has computed it, it reads each gradient once more, 0.3 ms per million on a CPU. So k million
        gradients are read in every k-th step.
        """
        if self.known_norm is None:
            if thinned and (iteration - 1) % max(1, self.elements // _NORM_EACH):
                return None
            return self.folded_norm() if self._holds_sums else self.norm()
        return self.known_norm

    def are_finite(self) -> bool:
        """Whether all gradients are; the host waits. A finite norm proves it in half the time that `extremes` takes."""
        if all(map(_PRECISE, (*self.buckets, *self.unplanned.buckets))) and math.isfinite(self.folded_norm().item()):
            return True
        return all(math.isfinite(one.item()) for one in self.extremes())

    @property
    def elements(self) -> int:
        """The number of gradients."""
        return sum(bucket.length for bucket in (*self.buckets, *self.unplanned.buckets))

    def first_not_finite(self, *, written: bool) -> str | None:
        """The first parameter whose gradient is not finite, by name; with `written`, the first not finite itself."""
        for parameter, name in self._names.items():
            value = parameter if written else parameter.grad
            if value is not None and not bool(value.detach().isfinite().all()):
                return name
        return None

    def are_of(self, optimizers: list[Optimizer]) -> bool:
        """Whether each parameter with a gradient is in one of these."""
        known = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        return all(parameter in known for parameter in self._names if parameter.grad is not None)

    def drop(self) -> None:
        """Make all gradients None."""
        set_grads(self._names, repeat(None))

    def fill_with_nan(self, where: torch.Tensor | bool) -> None:
        """Make all gradients NaN, if `where`, shape ()."""
        for bucket in (*self.buckets, *self.unplanned.buckets):
            flat = bucket.result.gradients
            flat.masked_fill_(torch.as_tensor(where, device=flat.device), torch.nan)

    def changed_since_opened(self) -> str | None:
        """A parameter that was written since the pass opened, by name; None without one."""
        now = list(map(_VERSION, self._names))
        if now == self._versions:
            return None
        changed = map(ne, now, self._versions)
        return next(compress(self._names.values(), changed))

    def named(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by parameter name, without those that are None."""
        return {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients as they are now; shape ()."""
        gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else self.tail.new_zeros(())


def _is_own(hook: Hook) -> bool:
    """Whether a post-accumulate hook is of this class, perhaps of another loop."""
    if isinstance(hook, partial):
        return getattr(hook.func, "__func__", None) is Gradients._arrived
    return isinstance(getattr(hook, "__self__", None), Arrivals)


def _backpropagate(loss: torch.Tensor, seed: torch.Tensor, *, retain_graph: bool) -> None:
    """`loss.backward(seed)` without its checks of dtype and shape, which take a shard 8 to 30 microseconds."""
    if type(loss) is not torch.Tensor:  # its class may do more
        loss.backward(seed, retain_graph=retain_graph)
        return
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (seed,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
