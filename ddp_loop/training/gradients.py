"""Gradients of the whole mini-batch: static buckets, summed over the ranks while backward goes on.

[Note: None stays None] After the fold a parameter's gradient is None exactly if no shard of the mini-batch
gave it one, as in the loop on one device; where only some shards did, the others count as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_loop.distributed import World
from ddp_loop.training.buckets import Bucket, grouped
from ddp_loop.training.ordered_sum import FlatAllReduce, ReductionOrder, finish_all

_FLOAT32_BYTES = 4
_OWN_BACKWARD = (
    "Between a step's first shard and its fold, step.backward alone makes gradients. {} got one from another backward, "
    "which would count once per rank. Call step.backward(loss, more_losses=True) for each further loss of a shard, or "
    "torch.autograd.grad where the gradient is not the parameters'."
)


class Gradients:
    """The gradients of `parameters`, folded over shards and ranks.

    A pass: `open`, then `backward` or `finish_shard` for each shard, `collect`, fill `tail`, `sum_up`, `close`. Nothing
    starts early before `plan` was told the tail's length.

    Args:
        parameters: by name, in an order that is the same on every rank.
        world: from `join_world`.
        bucket_bytes: a bucket's size; a network that fits into one is summed in one collective.
        order: in which shards are added up.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], world: World, bucket_bytes: int, order: ReductionOrder
    ) -> None:
        self.buckets: list[Bucket] = []
        self._later: list[Bucket] = []  # of parameters that were unfrozen since the buckets were planned
        self._world = world
        self._bucket_bytes, self._order = bucket_bytes, order
        self._names: dict[Parameter, str] = {parameter: name for name, parameter in parameters.items()}
        self._asks: list[bool] = []
        self.versions: list[int] = []  # of the parameters, when the pass opened
        self.wanted: tuple[str, ...] = ()  # those that want a gradient, with their shapes
        self._tail = 0
        self._planned: dict[Parameter, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._home: dict[Parameter, Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        self._next = 0  # the first bucket whose sum has not started
        self._in_backward = self._in_last = False
        self._shards = 0  # that ended in this pass
        self._is_pass_open = False
        doubles = any(parameter.dtype == torch.float64 for parameter in self._names)
        # Statistics, losses and metrics travel in it.
        self.slot_dtype = torch.float64 if doubles else torch.float32
        self.known_norm: torch.Tensor | None = None  # of all gradients, where the fold's guard asked for it
        self.overlaps = True  # whether sums may start during backward
        self.ranks_talk = False  # whether there are other collectives in backward
        self.watch: Callable[[int, dict[str, torch.Tensor]], None] | None = None  # is given each shard's gradients

    @property
    def parameters(self) -> Collection[Parameter]:
        """All that are folded, in their order."""
        return self._names.keys()

    def plan(self, tail: int) -> None:
        """Lay the buckets out for the parameters that want a gradient now, with room for `tail` more values."""
        self._tail = tail
        if self.buckets:
            self.buckets[-1].resize(tail)
            return
        wanted = [parameter for parameter in self._names if parameter.requires_grad]
        device, dtype = self._world.device, self.slot_dtype
        groups = grouped(wanted[::-1], self._bucket_bytes)
        if not groups or (groups[-1][0].dtype, groups[-1][0].device) != (dtype, device):
            groups.append([])  # the tail cannot ride with gradients of another type
        for group in groups:
            kind, place = (group[0].dtype, group[0].device) if group else (dtype, device)
            room = tail if group is groups[-1] else 0
            self.buckets.append(Bucket(group, room, kind, place, self._world, self._order))
        self._planned = {parameter: (parameter.dtype, parameter.stride()) for parameter in wanted}
        for bucket in self.buckets[:-1]:
            for parameter in bucket.parameters:
                self._home[parameter] = bucket
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def release(self) -> None:
        """Give the buckets and the hooks up; gradients that were handed out stay."""
        for hook in self._hooks:
            hook.remove()
        self.buckets, self._later, self._hooks, self._home, self._planned = [], [], [], {}, {}

    # -- one pass over the shards --------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a pass: no parameter has a gradient.

        Raises:
            RuntimeError: a parameter's dtype or memory format changed after the first step.
        """
        for parameter, form in self._planned.items():
            if (parameter.dtype, parameter.stride()) != form:
                raise RuntimeError(
                    f"a parameter keeps its dtype and memory format once training has begun; "
                    f"{self._names[parameter]} had {form[0]} with strides {form[1]}, and has {parameter.dtype} with "
                    f"strides {parameter.stride()}: convert the model before the Loop is made"
                )
        asks = []
        self.versions = [parameter._version for parameter in self._names]
        for parameter in self._names:
            parameter.grad = None
            asks.append(parameter.requires_grad)
        if asks != self._asks:
            self._asks = asks
            self.wanted = tuple(f"{name} {tuple(p.shape)}" for p, name in self._names.items() if p.requires_grad)
        if not self.buckets:
            self.plan(0)
        self._next = self._shards = 0
        self._is_pass_open = True
        self.known_norm = None
        self._meet_later()
        for bucket in self._all:
            bucket.open()

    @property
    def _all(self) -> list[Bucket]:
        return [*self.buckets, *self._later]

    def _meet_later(self) -> None:
        """Buckets for the parameters that want a gradient and have no place; what is in them is sent once all agree."""
        later = [parameter for parameter in self._names if parameter.requires_grad and parameter not in self._planned]
        if later != [parameter for bucket in self._later for parameter in bucket.parameters]:
            self._later = [
                Bucket(group, 0, group[0].dtype, group[0].device, self._world, self._order)
                for group in grouped(later, self._bucket_bytes)
            ]

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor, *, last: bool, more: bool = False) -> None:
        """Backpropagate `factor` times the loss of one shard; `last` says that the rank has no further one.

        With `more` the shard has another loss, on the same graph perhaps.

        A factor that is a tensor (a weight known on the device alone) and 0 adds exactly 0, never 0 * nan. A loss in
        bfloat16 or float16 is backpropagated as it is, and its gradients are multiplied: a factor of 1/3 in bfloat16 is
        off by 0.2 %, and 0 or infinite in float16 where weights are large.

        Raises:
            RuntimeError: the gradients of an earlier shard are gone, or a second gradient came too late.
        """
        self._check_kept()
        for bucket in self._open:
            bucket.begin_backward()
        if isinstance(factor, torch.Tensor) or (factor != 1 and loss.dtype.itemsize < _FLOAT32_BYTES):
            self._backward_apart(loss, factor, more)
        else:
            for bucket in self.buckets[:-1]:
                bucket.missing.update(bucket.parameters)
            self._in_backward, self._in_last = True, last and self._tail > 0 and self.overlaps
            try:
                loss.backward(loss.new_full((), factor), retain_graph=more)
            finally:
                self._in_backward = self._in_last = False
        if more:
            for bucket in self._open:
                bucket.end_backward()
        else:
            self.finish_shard()

    def backward_empty(self, loss: torch.Tensor, *, more: bool) -> None:
        """Go back through a loss of no samples, for the collectives in it; no gradient is left."""
        before = {parameter: parameter.grad for parameter in self._names}
        loss.backward(torch.zeros_like(loss), retain_graph=more)
        for parameter, gradient in before.items():
            parameter.grad = gradient

    def pass_by(self) -> None:
        """End a shard that had no backward, since its weight is 0.

        Raises:
            RuntimeError: a backward of the user's own gave it gradients.
        """
        self._check_kept()
        self.finish_shard()

    def finish_shard(self) -> None:
        """End a shard of this rank with the gradients that it has; it may have none."""
        if self.watch is not None:
            fresh = [pair for bucket in self._open for pair in bucket.fresh()]
            self.watch(self._shards, {self._names[parameter]: gradient for parameter, gradient in fresh})
        self._shards += 1
        for bucket in self._open:
            bucket.finish_shard(self._shards)

    @property
    def _open(self) -> list[Bucket]:
        """Those whose sums have not begun."""
        return [*self.buckets[self._next :], *self._later]

    def _check_kept(self) -> None:
        for bucket in self._all:
            if (lost := bucket.tampered()) is not None:
                if not bucket.gave(lost):
                    raise RuntimeError(_OWN_BACKWARD.format(self._names[lost]))
                raise RuntimeError(
                    "Gradients of a step's shards must stay as they are until its fold. That of "
                    f"{self._names[lost]} was taken away or changed. Leave zero_grad() out, since each step begins "
                    "without gradients; clip and scale after step.fold(); and backpropagate a further loss with "
                    "step.backward(loss, more_losses=True) before the last one, not with loss.backward()."
                )

    def _backward_apart(self, loss: torch.Tensor, factor: float | torch.Tensor, more: bool) -> None:
        """Backpropagate beside the gradients of the shards before, and add `factor` times what comes to them."""
        before = {parameter: parameter.grad for parameter in self._names}
        for parameter in self._names:
            parameter.grad = None
        is_low = loss.dtype.itemsize < _FLOAT32_BYTES
        seed = torch.ones_like(loss) if is_low else torch.as_tensor(factor, dtype=loss.dtype, device=loss.device)
        loss.backward(seed.reshape(loss.shape), retain_graph=more)
        for parameter, gradient in before.items():
            if parameter.grad is not None:
                if is_low:
                    _multiply(parameter.grad, factor)
                if isinstance(factor, torch.Tensor):
                    parameter.grad.masked_fill_(self._is_void(parameter.grad, factor), 0.0)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _is_void(self, gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """What of a gradient is to be 0 since the shard's factor is.

        With synced batch norm the other shards' losses depend on this one's values too, and what comes from there
        counts: only what its own loss made of 0 does not.
        """
        void = factor == 0
        return void & ~gradient.isfinite() if self.ranks_talk else void

    def _arrived(self, parameter: Parameter) -> None:
        bucket = self._home[parameter]
        if not self._in_backward:
            if self._is_pass_open and self.buckets.index(bucket) < self._next:
                raise RuntimeError(_OWN_BACKWARD.format(self._names[parameter]))
            return  # a backward of the user's own: found at the next of the step's, if its gradients are still there
        if self.buckets.index(bucket) < self._next:
            raise RuntimeError(
                f"a parameter gets its gradient once in a shard's last backward; {self._names[parameter]} got a "
                "second one after its sum over the ranks had begun (reentrant checkpointing of a shared weight "
                "does this): checkpoint with use_reentrant=False, or give Loop a bucket_cap_mib larger than the network"
            )
        bucket.missing.discard(parameter)
        while self._in_last and self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
            first = self.buckets[self._next]
            self._next += 1
            first.finish_shard(self._shards + 1)
            first.finish_shards()
            first.start()

    def collect(self, tail: int) -> list[bool]:
        """End this rank's shards, with room for `tail` more values.

        Returns:
            For each parameter in bucket order, whether one of the shards gave it a gradient.

        Raises:
            RuntimeError: the gradients of a shard are gone.
            ValueError: a gradient is sparse.
        """
        try:
            self._check_kept()
        finally:  # what is sent has its length also where something is wrong
            if tail != self._tail:
                self.plan(tail)
            for bucket in self._open:
                bucket.finish_shards()
        return [given for bucket in self.buckets for given in bucket.given]

    def outline(self, tail: int) -> list[tuple[FlatAllReduce, int]]:
        """Each sum that the fold has still to start, and how many gradients it carries.

        The last one has room for `tail` more values behind them.
        """
        if tail != self._tail or not self.buckets:
            self.plan(tail)
        return [(bucket.summing, bucket.length) for bucket in self.buckets[self._next :]]

    @property
    def begun(self) -> list[FlatAllReduce]:
        """The sums that began during backward."""
        return [bucket.summing for bucket in self.buckets[: self._next]]

    @property
    def planned(self) -> int:
        """The number of parameters in buckets."""
        return len(self._planned)

    @property
    def tail(self) -> torch.Tensor:
        """Room for the other sums of the step; of `slot_dtype`, shape (the planned length,)."""
        return self.buckets[-1].tail

    def sum_up(self, meanwhile: Callable[[], None]) -> None:
        """Sum what the buckets hold, gradients and tail, over all ranks; `meanwhile` is called once all have begun.

        Every rank must call this.
        """
        for bucket in self.buckets[self._next :]:
            bucket.start()
        finish_all([bucket.summing for bucket in self.buckets], meanwhile)

    def sum_unplanned(self) -> None:
        """Sum the gradients of parameters that want one but are in no bucket yet, since they were unfrozen.

        Every rank must call this.
        """
        for bucket in self._later:
            given = torch.tensor(bucket.given, dtype=torch.int32)
            self._world.sum(given)
            bucket.start()
            finish_all([bucket.summing])
            bucket.assign_grads([count > 0 for count in given.tolist()])

    def close(self, given: list[bool]) -> None:
        """End a pass: hand the sums out as `.grad`, where a shard of any rank gave one (None stays None)."""
        self._next = 0
        self._is_pass_open = False
        given_next = iter(given)
        for bucket in self.buckets:
            bucket.assign_grads([next(given_next) for _ in bucket.parameters])

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by `factor`, shape ()."""
        for bucket in self._all:
            bucket.own.gradients.mul_(factor)

    # -- after the fold ------------------------------------------------------------------------------------

    def extremes(self) -> list[torch.Tensor]:
        """The least and the largest element of each bucket; of `slot_dtype`, shape () each.

        Finite exactly if all gradients are: NaN is carried on, and nothing overflows. What is None is a zero here.
        """
        found = [bucket.extremes() for bucket in self._all if bucket.length]
        dtype = self.slot_dtype if len(found) > 1 else None  # one bucket's are of one
        return [one if dtype is None else one.to(self._world.device, dtype) for pair in found for one in pair]

    def folded_norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients, by one pass over the buckets, once in a fold; shape ()."""
        if self.known_norm is None:
            norms = [bucket.norm() for bucket in self._all if bucket.length]
            if len(norms) != 1:
                norms = [norm.to(self._world.device, torch.float64) for norm in norms]
                norms = [torch.linalg.vector_norm(torch.stack(norms))] if norms else [torch.zeros(())]
            (self.known_norm,) = norms
        return self.known_norm

    def are_finite(self) -> bool:
        """Whether all are; the host waits for the answer. Where the norm is finite they are: it costs half as much."""
        if all(bucket.is_precise for bucket in self._all) and math.isfinite(self.folded_norm().item()):
            return True
        return all(math.isfinite(one.item()) for one in self.extremes())

    @property
    def elements(self) -> int:
        """How many gradients there are."""
        return sum(bucket.length for bucket in self._all)

    def first_not_finite(self, *, written: bool) -> str | None:
        """The name of the first parameter whose gradient is not finite; with `written`, that is not itself."""
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
        for parameter in self._names:
            parameter.grad = None

    def fill_with_nan(self, where: torch.Tensor | bool) -> None:
        """Make all gradients NaN, if `where`, shape ()."""
        for bucket in self._all:
            flat = bucket.own.gradients
            flat.masked_fill_(torch.as_tensor(where, device=flat.device), torch.nan)

    def changed_since_opened(self) -> str | None:
        """The name of a parameter that was written since the pass opened; None without one."""
        pairs = zip(self._names.items(), self.versions, strict=True)
        return next((name for (parameter, name), version in pairs if parameter._version != version), None)

    def named(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by the parameters' names; without those that are None."""
        return {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients as they are now; shape ()."""
        gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)


def _multiply(gradient: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply by a factor that is not rounded to the gradient's dtype first."""
    if isinstance(factor, torch.Tensor):
        gradient.copy_(gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor.to(gradient.device))
    else:
        gradient.mul_(factor)
