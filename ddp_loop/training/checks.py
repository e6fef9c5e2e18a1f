"""Checks of a loop's steps: one protocol, and the checks of values, of a step's changes, and of the ranks' shares.

A loss, gradients or state that are not finite make all ranks raise, skip or allow the step. `distributed/replica_check`
compares the ranks' states.

[Note: Skipping] A skipped step leaves everything as it was. On the host the gradients become None, which torch's
optimizers leave alone. Reading a GPU's value would hold up the host: there optimizers get `found_inf`, a tensor that
their fused kernels read themselves, as with torch's GradScaler. Where one of them does not know it, or a parameter is
in none of them, the host waits for each step's value, as GradScaler does, and one line says so. With a GradScaler the
gradients of such a step become NaN and the scaler skips it, since it refuses gradients that are all None.

[Note: Became] A parameter is bad where it is NaN or infinite; a buffer and an optimizer's tensor where they are NaN,
since masks and best scores hold infinity. An element that was bad when the loop began may stay so: masks, rings and
unset values are made so. But the statistics of norm layers are numbers or wrong. The norm of a tensor is NaN exactly if
an element is, so a look costs one norm for each.

[Note: Before the data] When a loss is not finite, a tensor that was bad before the step's data came in explains it, and
the samples are innocent. Right after the fold all tensors are as before the step, but for a rank's own buffers and the
statistics that forward moved. On a GPU the look is one step late, after the bad step's update. Then only tensors that
no update writes were surely bad before, and others are named as bad by now. A tensor that was bad when the loop began
and has a gradient is to blame in the first step only, since a finite step could bear it.

[Note: Left accumulation] Each fold gives the gradient of its own mini-batch. A script that still steps its optimizer
every k-th time, as it did to accumulate, trains on one mini-batch of k. An optimizer writes its parameters in place,
and their version counters show it at no cost. Until they have shown it once, checksums tell an optimizer that writes
past them (`parameter.data`, torch's fused kernels) from one that did not step. So does the optimizer's state of a
parameter, such as its count of steps, where a learning rate of 0 moves nothing.

[Note: What is measured] The time from the first shard of a step to the end of its last backward, divided by the rank's
samples. It has no wait for other ranks, which comes in the fold, and no optimizer, whose time does not depend on the
samples. On a GPU it is the device's time. The speed of a rank is one over the median of some steps, and its share is
its part of all speeds. All ranks get all times in one collective, inside the fold of the last of these steps, so they
compute the same shares and use them from the next mini-batch on.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.data import Batches, MiniBatch
from ddp_loop.determinism import checksum_all
from ddp_loop.distributed import IDENTITY, ReplicaCheck, World, find_modules, listed, named_tensors, under_all_names
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.rows import StepResult
from ddp_loop.training.validation import OnNonFinite, check_rows, enabled_scalers, parts_of, warn

NEVER = math.inf
WARM_UP = 3  # steps; in the first ones layouts are agreed on and memory is allocated
MEASURED_STEPS = 10
_ALIKE = 1.05  # ranks whose speeds differ by less keep equal shares
_DIGITS = 3  # significant ones: a thousand ranks get shares as exact as two ranks do
_MOST_LOOKS = 8  # by checksums, then it is given up
_VERSION = attrgetter("_version")
ACCUMULATION_LEFT = (
    "Two steps were folded, and no parameter moved in between (after step {step}). Each fold gives the gradient of "
    "its own mini-batch and replaces the one before, which is lost. Call optimizer.step() after each fold, and no "
    "zero_grad() between the two. To accumulate, give Batches a larger mini-batch and more shards: Batches(data, 4 * "
    "n, world, shards=4 * world.size)."
)
NO_GRADIENT = (
    "No parameter of state got a gradient in step {step}, so optimizer.step() changes none of them. The loss depends "
    "on other parameters. Was the model made, replaced or copied after the Loop? Pass Loop the model and the optimizer "
    "that it trains: state=dict(model=model, optimizer=optimizer)."
)
WEIGHTLESS = (
    "All weights of a mini-batch are 0 (first in step {step}), so nothing in it counts: its loss is reported as 0, and "
    "its gradients are 0 or None. Pass step.backward a weight above 0 for shards that count, or leave such samples out "
    "of the data."
)
IN_A_ROW = 100  # so many skipped steps end the run: later losses are NaN too
_SHOWN = 8
_FIRST = (1, 10)  # steps after which the state is looked at, and after every hundredth
_EVERY = 100
_PARAMETER = "parameter "
_BUFFER = "buffer "
TOLERATE = 'To tolerate it, pass on_nonfinite="skip" or on_nonfinite="allow".'

Tensors = dict[str, torch.Tensor]
Norms = list[tuple[list[str], HostCopy]]
Blamed = tuple[list[str], list[str]]  # names of bad tensors: surely bad before the step's data, or only by now


class Check(Protocol):
    """Looks at the steps of a loop.

    Attributes:
        due: the next iteration that it looks at; `NEVER` where nothing is left to look at.
    """

    due: float

    def before(self, iteration: int, *, had_gradients: bool) -> None:
        """The first shard of a step is next; `had_gradients`: whether the fold before left any."""
        return

    def after(self, result: StepResult, mini_batch: MiniBatch) -> None:
        """A step's first pass was folded; the guard looks at each pass. Every rank must call this."""


@dataclass(frozen=True, slots=True)
class _PendingCheck:
    """A step's losses, perhaps on their way to the host.

    Attributes:
        values: whether the step is bad, the mini-batch's loss, the shards' losses, then their shares.
        late: whether parameters may have been written since.
    """

    iteration: int
    mini_batch: MiniBatch
    values: HostCopy
    late: bool


class NonFiniteGuard(Check):
    """Judges steps whose loss or gradients are not finite: at once, or late with the next step without waiting.

    Args:
        rule: "raise", "skip", or "allow".
        indices: gives samples `start` .. `start + count - 1` of an epoch, as (epoch, start, count).
        state: of the job; its optimizers skip steps.
        blame: gives the tensors of the job's state that are not finite in a bad step, given whether its update was made
            and its iteration; a collective where all ranks raise.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        rule: OnNonFinite,
        indices: Callable[[int, int, int], torch.Tensor],
        state: Mapping[str, object],
        blame: Callable[[bool, int], Blamed],
        say: Callable[[str], None],
    ) -> None:
        self.allows = rule == "allow"
        self.skips = rule == "skip"
        self._indices = indices
        self._optimizers = parts_of(state, Optimizer)
        self.is_scaled = bool(enabled_scalers(state))
        self._gradients: Gradients  # of the pass that was checked last
        self._bad: torch.Tensor | bool = False
        self._pending: _PendingCheck | None = None
        self.due = NEVER  # or 0, where something is to be judged
        self._blame = blame
        self._say_once: Callable[[str], None] | None = say
        self._counts = {"skipped": 0, "in_a_row": 0, "last": 0}

    @property
    def skipped(self) -> int:
        """The number of skipped steps; waits for a GPU."""
        if self.skips:
            self.check_pending()
        return self._counts["skipped"]

    def state_dict(self) -> dict[str, int]:
        """The numbers of skipped steps, of those in a row, and the last one; waits for a GPU.

        Raises:
            FloatingPointError: the last step is not finite, so no checkpoint of it must be written.
        """
        self.check_pending()
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue to count."""
        self._counts = dict(state)

    # -- the fold ------------------------------------------------------------------------------------------

    def check(self, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor | bool:
        """Apply the rule to a step that is not finite; the same on every rank, since the values are.

        On the CPU, call it only for such a step. On a GPU it also finds out whether the step is one.

        Args:
            loss: the mini-batch's, shape ().
            gradients: the mini-batch's.

        Returns:
            Whether the step moves nothing; a tensor of shape () where only the device knows.
        """
        self._gradients = gradients
        self.due = 0
        bad: torch.Tensor | bool = True
        if is_asynchronous(loss):
            looked_at = [loss] if self.is_scaled else [loss, *(extreme.to(loss) for extreme in gradients.extremes())]
            bad = torch.stack(looked_at).mul_(0).sum() != 0  # 0 times infinity is NaN; `isfinite` takes five kernels
        if self.is_scaled:
            for optimizer in self._optimizers:  # the scaler may skip for a gradient alone
                _prepare_found_inf(optimizer)
        if self.skips and self.is_scaled:
            gradients.fill_with_nan(bad)
        elif self.skips:
            bad = self._skip(bad, gradients)
        self._bad = bad
        return bad if self.skips else bad is True

    def _skip(self, bad: torch.Tensor | bool, gradients: Gradients) -> torch.Tensor | bool:
        """Let the optimizers skip a bad step; returns whether it is one, which the host then knows or need not."""
        if isinstance(bad, torch.Tensor):
            optimizers = self._optimizers
            if optimizers and all(map(_prepare_found_inf, optimizers)) and gradients.are_of(optimizers):
                found = bad.float()
                for optimizer in optimizers:
                    optimizer.found_inf = found  # type: ignore[attr-defined]  # of torch's protocol with GradScaler
                return bad
            slow = [type(optimizer).__name__ for optimizer in optimizers if not _reads_found_inf(optimizer)]
            if slow and self._say_once is not None:
                self._say_once(
                    'ddp_loop: With on_nonfinite="skip" the host waits for the device in each step. '
                    f"{listed_are(slow)} not fused. Pass fused=True where the optimizer has it."
                )
                self._say_once = None
            bad = bool(bad)
        self.release()
        if bad:
            gradients.drop()
        return bad

    def release(self) -> None:
        """Take `found_inf` from the optimizers."""
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("found_inf", None)

    # -- errors --------------------------------------------------------------------------------------------

    def after(self, result: StepResult, mini_batch: MiniBatch) -> None:
        """Raise if the judged pass is not finite, or count its step as skipped.

        Raises:
            FloatingPointError: too many steps in a row were skipped, or none may be.
        """
        self.check_pending()
        bad = self._bad
        self._bad = False
        self.due = NEVER
        if bad is False:
            return
        loss = result.values[:1]
        is_bad = torch.as_tensor(bad, device=loss.device).to(loss).reshape(1)
        values = HostCopy(torch.cat([is_bad, loss, result.losses, result.shares]))
        late = isinstance(bad, torch.Tensor)
        self._pending = _PendingCheck(result.iteration, mini_batch, values, late)
        if late:
            self.due = 0
        else:
            self.check_pending()

    def check_pending(self) -> None:
        """Check the last step's values, which a GPU had yet to give."""
        look = self._pending
        self._pending = None
        if look is None or not look.values.wait()[0].item():
            return
        if not self.skips:
            raise FloatingPointError(self._message(look))
        counts = self._counts
        if look.iteration == counts["last"]:  # a further pass of the same step
            return
        counts["in_a_row"] = counts["in_a_row"] + 1 if look.iteration == counts["last"] + 1 else 1
        counts["last"] = look.iteration
        counts["skipped"] += 1
        if counts["in_a_row"] >= IN_A_ROW:
            raise FloatingPointError(
                f'on_nonfinite="skip" skips steps, but not {IN_A_ROW} in a row. Step {look.iteration} is the last of '
                f"as many. {self._message(look)}"
            )

    def _message(self, look: _PendingCheck) -> str:
        _, value, *rest = look.values.wait().tolist()
        before, by_now = self._blame(look.late, look.iteration)
        fact = f"The loss of step {look.iteration} is {value}"
        if before:  # no sample is to blame
            if math.isfinite(value):
                fact = f"A gradient of step {look.iteration} is not finite"
            return (
                f"{fact}: {listed(before)} "
                f"{'was' if len(before) == 1 else 'were'} not finite before the step's data came in. Look at what "
                f"wrote it (the update before, the learning rate, a checkpoint). {TOLERATE}"
            )
        shards = len(look.mini_batch.sizes)
        is_weight = any(map(math.isnan, rest[shards:]))
        if math.isfinite(value) and not is_weight:
            name = self._gradients.first_not_finite(written=look.late)
            which = "A gradient" if look.late else f"The gradient of {name or 'a parameter'}"
            since = f" ({name} is the first parameter that is not finite since)" if look.late and name else ""
            return (
                f"{which} in step {look.iteration} is not finite{since}, though the loss is, {value:g}. Look for an "
                "operation without a slope there (the root of 0, a norm of zeros, 0 / 0 masked by torch.where), and at "
                f"the learning rate. A GradScaler in Loop's state skips such steps itself. {TOLERATE}"
            )
        full = [number for number, share in enumerate(rest[shards:]) if share]
        culprits = [number for number in full if not math.isfinite(rest[number])]
        if not culprits and not is_weight:  # a sum counts with a weight of 0 too
            culprits = [number for number in range(shards) if not math.isfinite(rest[number])]
        are_all = len(culprits) == len(full)
        if culprits and (not are_all or len(full) == 1):  # else it is the whole's
            fact += self._shard_message(look.mini_batch, culprits[0])
        if are_all and by_now:  # by which other shards' losses would be bad too
            fact += f". Not finite by now, and perhaps before: {listed(by_now)}"
        remedy = "Look for NaN in its data and their labels, and at the learning rate."
        if not culprits and is_weight:
            remedy = "Look at the weights: each must be 0 or more, and all losses of a shard must have the same."
        return f"{fact}. {remedy} {TOLERATE}"

    def _shard_message(self, mini_batch: MiniBatch, number: int) -> str:
        sizes = mini_batch.sizes
        shard = f", from shard {number} of {len(sizes)}"
        if mini_batch.announcement is not None:
            place = f"mini-batch {mini_batch.position + 1} of epoch {mini_batch.epoch}"
            return f"{shard}, {place} of rank {number}'s own stream"
        indices = self._indices(mini_batch.epoch, mini_batch.start + sum(sizes[:number]), sizes[number]).tolist()
        more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
        return f"{shard}, samples {', '.join(map(str, indices[:_SHOWN]))}{more} of the data"


def listed_are(names: Sequence[str]) -> str:
    """Names in a sentence, with "is" or "are"."""
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def _reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether its kernels read `found_inf`; kernels of torch's earlier protocol do not."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def _prepare_found_inf(optimizer: Optimizer) -> bool:
    """Prepare an optimizer for `found_inf`; returns whether its next step reads it.

    A skipped first step would leave torch's fused SGD an unwritten momentum. So that begins with -0.0, to which the
    first gradient is added without a change; torch dampens only later ones.
    """
    if not _reads_found_inf(optimizer):
        return False
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None:
                if group["dampening"]:
                    return False
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.grad, IDENTITY)
    return True


def kept_numbers(state: Mapping[str, object]) -> Tensors:
    """The floating-point tensors among a job's parameters, buffers and optimizer states, by name."""
    kept = {name: part for name, part in state.items() if isinstance(part, nn.Module | Optimizer)}
    return {
        name: tensor
        for name, tensor in named_tensors(kept).items()
        if tensor.layout is torch.strided
        and not tensor.is_meta
        and (tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1))
    }


def statistics(state: Mapping[str, object]) -> dict[str, bool]:
    """For each of the norm layers' statistics, by name, whether forward moves it."""
    return {
        f"{_BUFFER}{path}.{name}" if path else f"{_BUFFER}{name}": layer.training
        for prefix, module in find_modules(state).items()
        for path, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, _NormBase)
        for name in ("running_mean", "running_var")
    }


@torch.no_grad()
def _norms(tensors: Tensors) -> Norms:
    """The norms of all tensors, by device and dtype, (T,) each, perhaps on their way to the host.

    A norm is NaN exactly where an element is.
    """
    groups: dict[tuple[torch.device, torch.dtype], Tensors] = defaultdict(dict)
    for name, tensor in tensors.items():
        groups[tensor.device, tensor.dtype][name] = tensor
    return [
        (list(group), HostCopy(torch.stack(torch._foreach_norm(list(group.values()))))) for group in groups.values()
    ]


def _suspects(norms: Norms) -> list[str]:
    """The names of tensors whose norm is not finite."""
    return [name for names, there in norms for name in compress(names, (~there.wait().isfinite()).tolist())]


def _where_bad(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isfinite() if name.startswith(_PARAMETER) else tensor.isnan()


def _one_of_each_kind(names: Collection[str]) -> list[str]:
    """The first parameter, the first buffer, and the first tensor of an optimizer."""
    kinds: dict[tuple[bool, bool], str] = {}
    for name in names:
        kinds.setdefault((name.startswith(_PARAMETER), name.startswith(_BUFFER)), name)
    return list(kinds.values())


class NonFiniteStateCheck(Check):
    """Finds tensors of a job that became NaN: at intervals, before a checkpoint, at the end, and when a step is bad.

    Args:
        state: of the job.
        world: from `join_world`.
        rule: "raise", or "skip" and "allow" to print it once.
        local: the names of buffers that are each rank's own.

    Attributes:
        found: the error of an earlier look, which a later fold raises.
    """

    def __init__(
        self, state: Mapping[str, object], world: World, rule: OnNonFinite, local: Collection[str] = ()
    ) -> None:
        self._state = state
        self._world = world
        self._rule = rule
        self._local = {f"{_BUFFER}{name}" for name in local}
        self._before: Tensors | None = None  # where elements were bad when the loop began
        self._pending: tuple[int, Norms] | None = None
        self.found: FloatingPointError | None = None
        self._told = False
        self.due = 0
        self._began = 0

    def begin(self, iteration: int) -> None:
        """Record the elements that are not finite when the loop begins, after this step; later calls do nothing."""
        if self._before is None:
            self._began = iteration
            tensors = kept_numbers(self._state)
            suspects = _suspects(_norms(tensors))
            self._before = {name: bad for name in suspects if (bad := _where_bad(name, tensors[name])).any()}

    # -- at intervals --------------------------------------------------------------------------------------

    def after(self, result: StepResult, mini_batch: MiniBatch) -> None:
        """Look at the state after the fold, if it is time."""
        iteration = result.iteration
        self._check_pending()
        if iteration in _FIRST or iteration % _EVERY == 0:
            self._pending = iteration, _norms(kept_numbers(self._state))
            if not self._world.accelerator.is_asynchronous:
                self._check_pending()
        next_looks = (*_FIRST, iteration // _EVERY * _EVERY + _EVERY)
        self.due = iteration + 1 if self._pending else min(look for look in next_looks if look > iteration)

    def _check_pending(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            self.found = self.found or self._judge(pending[1], pending[0])

    def check(self, iteration: int) -> FloatingPointError | None:
        """The error of the state after this step, before a checkpoint of it; the host waits."""
        found = self._judge(_norms(kept_numbers(self._state)), iteration)
        return None if found is None else FloatingPointError(f"{found} No checkpoint of it is written.")

    def finish(self, iteration: int) -> None:
        """Look after the last step. Every rank must call this.

        Raises:
            FloatingPointError: something became NaN.
        """
        self._check_pending()
        self._world.raise_if_any_failed(self.found or self._judge(_norms(kept_numbers(self._state)), iteration))

    def _judge(self, norms: Norms, iteration: int) -> FloatingPointError | None:
        """The error of tensors that are bad by these norms, after this step, and were not when the loop began."""
        if not (suspects := _suspects(norms)):
            return None
        tensors = kept_numbers(self._state)
        never = statistics(self._state)
        names = [name for name in suspects if name in tensors and self._is_new(name, tensors[name], never)]
        if not names:
            return None
        told = listed_are(_one_of_each_kind(names))
        if self._rule == "raise":
            return FloatingPointError(
                f"Parameters, buffers and optimizer states must not become NaN. After step {iteration} {told}. Look at "
                f"what writes it (the learning rate, 0 / 0 in a statistic, an average of a bad step). {TOLERATE}"
            )
        if not self._told:
            self._told = True
            self._world.say(f'{told} NaN after step {iteration}; training continues with on_nonfinite="{self._rule}"')
        return None

    def _is_new(self, name: str, tensor: torch.Tensor, never: Collection[str]) -> bool:
        """Whether a tensor is bad where it was not when the loop began; of `never`, whether it is bad at all."""
        where = _where_bad(name, tensor)
        there = (self._before or {}).get(name)
        if there is not None and there.shape == where.shape and name not in never:
            where = where & ~there.to(where.device)
        return bool(where.any())

    # -- a step that is not finite -------------------------------------------------------------------------

    def blame(self, late: bool, iteration: int) -> Blamed:
        """The bad tensors of a bad step, see [Note: Before the data]. Every rank must call this if it raises.

        Args:
            late: whether the step's update has been made.
            iteration: of the step.

        Returns:
            Names, with their ranks where these differ; only this rank's own where the rule does not raise.
        """
        tensors = kept_numbers(self._state)
        moves = statistics(self._state)
        is_first = iteration - self._began <= 1  # else a step was finite in spite of what was bad when the loop began
        sure: list[str] = []
        new: list[str] = []
        others: list[str] = []
        for name in _suspects(_norms(tensors)):
            tensor = tensors[name]
            if moves.get(name) or not _where_bad(name, tensor).any():  # moved statistics are no part of a loss
                continue
            is_used = is_first and tensor.is_leaf and tensor.grad is not None  # it is no placeholder
            is_new = is_used or self._is_new(name, tensor, moves)
            is_frozen = name in moves or (name.startswith(_PARAMETER) and not tensor.requires_grad)
            is_written = name in self._local or (late and not is_frozen)
            if is_new and not is_written:
                sure.append(name)
            elif is_new:
                new.append(name)
            else:
                others.append(name)
        own_names = _one_of_each_kind(sure), _one_of_each_kind(new or others)
        if self._rule != "raise":
            return own_names
        before, by_now = zip(*self._world.gather(own_names, "what is not finite"), strict=True)
        return _of_ranks(before), _of_ranks(by_now)


def _of_ranks(named: Sequence[Sequence[str]]) -> list[str]:
    """The names that ranks gave, each with its ranks unless all gave it."""
    lines = []
    for name in dict.fromkeys(chain.from_iterable(named)):
        ranks = [str(rank) for rank, names in enumerate(named) if name in names]
        where = f" (on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} of {len(named)})"
        lines.append(name if len(ranks) == len(named) else f"{name}{where}")
    return lines


class NoEffectCheck(Check):
    """Warns once each, on rank 0: no parameter moved, or got a gradient, or a mini-batch has no weight.

    See [Note: Left accumulation].

    Args:
        state: of the job. A step that a scaler skips moves nothing, nor does one of an optimizer of learning rate 0.
        world: from `join_world`.
    """

    def __init__(self, state: Mapping[str, object], world: World) -> None:
        self._scalers = enabled_scalers(state)
        self._optimizers = parts_of(state, Optimizer)
        self._reads_weights = not world.accelerator.is_asynchronous  # on the host reading them costs nothing
        self._awaits_gradients = True  # until a step without an error
        self.due = NEVER if world.rank else 0
        self.begin(())

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin with other parameters of the state."""
        self._parameters = list(parameters)
        self._before: tuple[list[int], list[object]] | None = None
        self._sums: torch.Tensor | None = None
        self._counts_writes = False
        self._looks = 0

    def before(self, iteration: int, *, had_gradients: bool) -> None:
        """Compare the parameters with their values when the last step opened."""
        if self._looks == _MOST_LOOKS:
            return
        versions = list(map(_VERSION, self._parameters))
        states: list[object] = []  # of each optimizer's first parameter: a step changes them
        for scaler in self._scalers:  # a job gives each its scale when it begins
            versions += map(_VERSION, (scaler._scale, scaler._growth_tracker))
        for optimizer in self._optimizers:
            kept = next(iter(optimizer.state.values()), None)
            for value in kept.values() if isinstance(kept, dict) else ():
                if isinstance(value, torch.Tensor | int):
                    states.append(getattr(value, "_version", value))
        before = self._before
        self._before = versions, states
        if before is None or before[0] != versions:
            self._counts_writes = before is not None
            self._sums = None
        elif before[1] != states:
            # The next look compares with these; a job that steps each time has had no look yet.
            self._sums = self._checksums() if self._looks else None
        elif had_gradients and not self._has_moved():
            self._looks = _MOST_LOOKS
            warn(ACCUMULATION_LEFT.format(step=iteration - 1))

    def _has_moved(self) -> bool:
        """Whether checksums show it, where version counters do not; True at the first look."""
        if self._counts_writes:
            return False
        before = self._sums
        sums = self._sums = self._checksums()
        return before is None or not torch.equal(before, sums)

    def _checksums(self) -> torch.Tensor:
        self._looks += 1
        return checksum_all([parameter.detach() for parameter in self._parameters])

    def after(self, result: StepResult, mini_batch: MiniBatch) -> None:
        """Look at a step's sum of weights and its loss; a sum of losses need not be 0 with them."""
        total = result.total
        if total is not None and self._reads_weights and total.item() == 0 and result.loss.item() == 0:
            self._reads_weights = False
            warn(WEIGHTLESS.format(step=result.iteration))
        elif self._awaits_gradients and result.is_bad is not True:
            self._awaits_gradients = False
            if all(parameter.grad is None for parameter in self._parameters):
                warn(NO_GRADIENT.format(step=result.iteration))


def shares_of(times_s: Sequence[float]) -> tuple[float, ...]:
    """The share of each rank by its seconds per sample; equal ones for ranks that are equally fast."""
    if max(times_s) < _ALIKE * min(times_s):
        return (1.0,) * len(times_s)
    speeds = [min(times_s) / time_s for time_s in times_s]
    return tuple(float(f"{speed / sum(speeds):.{_DIGITS}g}") for speed in speeds)


class ShareMeasurement(Check):
    """Measures a rank's time per sample, and gives the batches shares by it. See [Note: What is measured].

    Args:
        batches: of the loop.

    Attributes:
        division: of the batches.
        found: the shares that were measured and are not used yet; None without any.
        used: those by which the loop reads and folds; another loop over the same batches may have given them others.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._world = batches.world
        self._checked: Mapping[str, object] = {}
        self.division = batches.division
        self.due = 0 if self.division.is_unmeasured else NEVER
        self.used = self.division.shares
        self.found: tuple[float, ...] | None = None
        self._steps = 0
        self._since: Any = None
        self._marks: list[tuple[Any, Any, int]] = []

    def check_rows(self, state: Mapping[str, object]) -> None:
        """Raise ValueError if BatchNorm1d would get a shard of one sample, now, and later by measured shares."""
        self._checked = state
        check_rows(self._batches, state)

    def before(self, iteration: int, *, had_gradients: bool) -> None:
        """The time of this rank's shards begins."""
        self._since = self._world.accelerator.mark()

    def end_shards(self, mini_batch: MiniBatch) -> None:
        """This rank's shards of a step's first pass had their backward."""
        samples = sum(shard.samples for shard in mini_batch.shards)
        if samples and self._steps >= WARM_UP:
            self._marks.append((self._since, self._world.accelerator.mark(), samples))

    def after(self, result: StepResult, mini_batch: MiniBatch) -> None:
        """Count the step; after the last one, measure."""
        self._steps += 1
        if self._steps < WARM_UP + MEASURED_STEPS:
            return
        self.due = NEVER
        if not self.division.is_unmeasured:  # another loop over the same batches measured them
            return
        seconds = self._world.accelerator.seconds
        each = [seconds(first, last) / samples for first, last, samples in self._marks]
        time_per_sample = median(each) if each else None
        gathered = self._world.gather(time_per_sample, "the time per sample")
        if None in gathered:
            self._world.say(
                f"The shares were not measured: rank {gathered.index(None)} had no samples in {MEASURED_STEPS} steps. "
                "All ranks keep equal shares."
            )
            return
        self._find(shares_of([time_s or 0.0 for time_s in gathered]), f"measured up to step {result.iteration}")

    def _find(self, shares: tuple[float, ...], how: str) -> None:
        words = ", ".join(f"{share:g}" for share in shares)
        before = self.division.shares
        self.division.give(shares)
        try:
            check_rows(self._batches, self._checked)
        except ValueError as error:
            self._world.say(f"The shares {words}, {how}, are not used. All ranks keep equal shares. {error}")
            return
        finally:
            self.division.give(before)  # until the step has ended
        self._world.say(f"The shares of ranks 0 to {len(shares) - 1} are {words}, {how}. They are fixed from now on.")
        self.found = shares

    # -- checkpoints: `Stateful` -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[float] | None]:
        """The measured shares; None without any."""
        shares = self.found or (self.division.shares if self.division.asked == "measured" else None)
        return {"shares": None if shares is None else list(shares)}

    def load_state_dict(self, state: Mapping[str, Sequence[float] | None]) -> None:
        """Go on with measured shares, if they are wanted and belong to as many ranks."""
        if self.due == NEVER or (shares := state["shares"]) is None:
            return
        if len(shares) != self._world.size:
            self._world.say(
                f"The shares were measured on {len(shares)} ranks. They are measured again on {self._world.size}."
            )
            return
        self.due = NEVER
        self._find(tuple(shares), "measured before the run was resumed")


class StepChecks:
    """The checks of a loop's steps, in their order.

    Args:
        state: of the job.
        batches: of the loop.
        rules: for single buffers, by name.
        rule: for values that are not finite.
        interval: the number of steps between two comparisons of the ranks; 0 for none.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        batches: Batches,
        rules: Mapping[str, BufferReduction] | None,
        rule: OnNonFinite,
        interval: int,
    ) -> None:
        world = batches.world
        rules = under_all_names(find_modules(state), rules or {})
        self.local = [name for name, rule in rules.items() if rule == "local"]  # buffers
        self.state = NonFiniteStateCheck(state, world, rule, self.local)
        self.guard = NonFiniteGuard(rule, batches.indices, state, self.state.blame, world.print)
        self.no_effect = NoEffectCheck(state, world)
        self.replicas = ReplicaCheck(state, world, interval, rules)
        self.shares = ShareMeasurement(batches)
        self.each: tuple[Check, ...] = (self.guard, self.no_effect, self.state, self.replicas, self.shares)
