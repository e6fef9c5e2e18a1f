"""A mini-batch's loss or gradients that are not finite: all ranks raise, skip or allow the step alike.

[Note: Skipping] A skipped step leaves everything as it was. On the host the gradients become None, which torch's
optimizers leave alone. Reading a GPU's value would hold up the host: there optimizers get `found_inf`, a tensor that
their fused kernels read themselves, as with torch's GradScaler. Where one of them does not know it, or a parameter is
in none of them, the host waits for each step's value, as GradScaler does, and one line says so. With a GradScaler the
gradients of such a step become NaN and the scaler skips it, since it refuses gradients that are all None.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import SGD, Optimizer

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.data import MiniBatch
from ddp_loop.training.gradients import Gradients

OnNonFinite = Literal["raise", "skip", "allow"]
ON_NONFINITE = ("raise", "skip", "allow")
IN_A_ROW = 100  # so many skipped steps end the run: what follows is NaN too
_SHOWN = 8
TOLERATE = 'To tolerate it, pass on_nonfinite="skip" or on_nonfinite="allow".'


@dataclass(frozen=True, slots=True)
class NonFiniteTensors:
    """Names of the job's tensors that are not finite: surely `before` the step's data, or only `by_now`."""

    before: list[str]
    by_now: list[str]


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


class NonFiniteGuard:
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
        state: Mapping[str, object] | None = None,
        blame: Callable[[bool, int], NonFiniteTensors] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        values = list((state or {}).values())
        self.allows = rule == "allow"
        self.skips = rule == "skip"
        self._indices = indices
        self._optimizers = [value for value in values if isinstance(value, Optimizer)]
        self.is_scaled = any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in values)
        self._gradients: Gradients | None = None
        self.bad: torch.Tensor | bool = False
        self.pending: _PendingCheck | None = None
        self._blame = blame
        self._say_once = say
        self._skipped = self._in_a_row = self._last = 0

    @property
    def skipped(self) -> int:
        """The number of skipped steps; waits for a GPU."""
        if self.skips:
            self.check_pending()
        return self._skipped

    def state_dict(self) -> dict[str, int]:
        """The numbers of skipped steps, of those in a row, and the last one; waits for a GPU.

        Raises:
            FloatingPointError: the last step is not finite, so no checkpoint of it must be written.
        """
        self.check_pending()
        return {"skipped": self._skipped, "in_a_row": self._in_a_row, "last": self._last}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue to count."""
        self._skipped = state["skipped"]
        self._in_a_row = state["in_a_row"]
        self._last = state["last"]

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
        if not is_asynchronous(loss):
            self.bad = True
        else:
            looked_at = [loss] if self.is_scaled else [loss, *(one.to(loss) for one in gradients.extremes())]
            self.bad = ~torch.stack(looked_at).isfinite().all()
        if self.skips:
            self._skip(gradients)
            return self.bad
        return self.bad is True

    def _skip(self, gradients: Gradients) -> None:
        if self.is_scaled:
            if self.bad is not False:
                gradients.fill_with_nan(self.bad)
            return
        if isinstance(self.bad, torch.Tensor):
            if _know_found_inf(self._optimizers) and gradients.are_of(self._optimizers):
                found = self.bad.float()
                for optimizer in self._optimizers:
                    optimizer.found_inf = found  # type: ignore[attr-defined]  # of torch's protocol with GradScaler
                return
            self._say_that_it_waits()
            self.bad = bool(self.bad)
        self.release()
        if self.bad:
            gradients.drop()

    def _say_that_it_waits(self) -> None:
        slow = [type(one).__name__ for one in self._optimizers if not _reads_found_inf(one)]
        if slow and self._say_once is not None:
            self._say_once(
                f'ddp_loop: With on_nonfinite="skip" the host waits for the device in each step. {listed_are(slow)} '
                "not fused. Pass fused=True where the optimizer has it."
            )
            self._say_once = None

    def release(self) -> None:
        """Take `found_inf` from the optimizers."""
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("found_inf", None)

    # -- errors --------------------------------------------------------------------------------------------

    def raise_or_count(
        self, iteration: int, mini_batch: MiniBatch, loss: torch.Tensor, losses: torch.Tensor, share: torch.Tensor
    ) -> None:
        """Raise if the judged step is not finite, or count it as skipped.

        Args:
            iteration, mini_batch: of the step.
            loss: the mini-batch's, shape ().
            losses, share: the shards' and their part of it, shape (S,) each.

        Raises:
            FloatingPointError: too many steps in a row were skipped, or none may be.
        """
        self.check_pending()
        bad = self.bad
        self.bad = False
        if bad is False:
            return
        is_bad = torch.as_tensor(bad, device=loss.device).to(loss)
        values = HostCopy(torch.cat([is_bad.reshape(1), loss.reshape(1), losses, share]))
        look = _PendingCheck(iteration, mini_batch, values, late=isinstance(bad, torch.Tensor))
        if look.late:
            self.pending = look
        else:
            self._say(look)

    def check_pending(self) -> None:
        """Check the last step's values, which a GPU had yet to give."""
        pending = self.pending
        self.pending = None
        if pending is not None and pending.values.wait()[0].item():
            self._say(pending)

    def _say(self, look: _PendingCheck) -> None:
        if not self.skips:
            raise FloatingPointError(self._message(look))
        if look.iteration == self._last:  # a further pass of the same step
            return
        self._in_a_row = self._in_a_row + 1 if look.iteration == self._last + 1 else 1
        self._last = look.iteration
        self._skipped = self._skipped + 1
        if self._in_a_row >= IN_A_ROW:
            raise FloatingPointError(
                f'on_nonfinite="skip" skips steps, but not {IN_A_ROW} in a row. Step {look.iteration} is the last of '
                f"as many. {self._message(look)}"
            )

    def _message(self, look: _PendingCheck) -> str:
        _, value, *rest = look.values.wait().tolist()
        blamed = NonFiniteTensors([], []) if self._blame is None else self._blame(look.late, look.iteration)
        if blamed.before:
            return _state_message(look, value, blamed.before)
        if math.isfinite(value):
            return self._gradient_message(look, value)
        shards = len(look.mini_batch.sizes)
        full = [number for number, share in enumerate(rest[shards:]) if share]
        culprits = [number for number in full if not math.isfinite(rest[number])]
        told = culprits[:1] if len(culprits) < len(full) or len(full) == 1 else []  # else it is the whole's
        state = blamed.by_now if len(culprits) == len(full) else []  # by which other shards' losses would be bad too
        said = f"Not finite by now, and perhaps before: {listed(state)}. " if state else ""
        remedy = "Look for NaN in these data and their labels, and at the learning rate."
        if not culprits and any(map(math.isnan, rest[shards:])):
            remedy = "Look at the weights: each must be 0 or more, and all losses of a shard must have the same."
        return (
            f"A mini-batch's loss must be a finite number. The loss of step {look.iteration} is {value}"
            + "".join(self._shard_message(look.mini_batch, number) for number in told)
            + f". {said}{remedy} {TOLERATE}"
        )

    def _gradient_message(self, look: _PendingCheck, loss: float) -> str:
        name = None if self._gradients is None else self._gradients.first_not_finite(written=look.late)
        if look.late:
            found = f" ({name} is the first parameter that is not finite since)" if name else ""
            said = f"In step {look.iteration} one is not{found}"
        else:
            said = f"In step {look.iteration} the gradient of {name or 'a parameter'} is not"
        return (
            f"A mini-batch's gradients must be finite numbers. {said}, though the loss is, {loss:g}. Look for an "
            "operation without a slope there (the root of 0, a norm of zeros, 0 / 0 masked by torch.where), and at the "
            f"learning rate. A GradScaler in Loop's state skips such steps itself. {TOLERATE}"
        )

    def _shard_message(self, mini_batch: MiniBatch, number: int) -> str:
        if mini_batch.announcement is not None:
            place = f"mini-batch {mini_batch.position + 1} of epoch {mini_batch.epoch}"
            return f", from shard {number} of {len(mini_batch.sizes)}, {place} of rank {number}'s own stream"
        start = mini_batch.start + sum(mini_batch.sizes[:number])
        size = mini_batch.sizes[number]
        indices = self._indices(mini_batch.epoch, start, size).tolist()
        more = f" and {size - _SHOWN} more" if size > _SHOWN else ""
        said = ", ".join(str(index) for index in indices[:_SHOWN])
        return f", from shard {number} of {len(mini_batch.sizes)}, samples {said}{more} of the data"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def listed_are(names: Sequence[str]) -> str:
    """Names in a sentence, with "is" or "are"."""
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def _state_message(look: _PendingCheck, value: float, names: list[str]) -> str:
    """The error where the state was bad before: no sample is to blame."""
    if math.isfinite(value):
        rule = f"A mini-batch's gradients must be finite numbers. In step {look.iteration} one is not"
    else:
        rule = f"A mini-batch's loss must be a finite number. The loss of step {look.iteration} is {value}"
    return (
        f"{rule}: {listed(names)} {'was' if len(names) == 1 else 'were'} not finite before the step's data came in. "
        f"Look at what wrote it (the update before, the learning rate, a checkpoint). {TOLERATE}"
    )


def _know_found_inf(optimizers: list[Optimizer]) -> bool:
    """Whether there are optimizers, and the next step of each reads its `found_inf`."""
    return bool(optimizers) and all(map(_knows_found_inf, optimizers))


def _reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether its kernels do; those of the protocol before this one do not."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def _knows_found_inf(optimizer: Optimizer) -> bool:
    if not _reads_found_inf(optimizer):
        return False
    # A skipped first step would leave torch's fused SGD an unwritten momentum.
    return not isinstance(optimizer, SGD) or all(
        not group["momentum"] or parameter.grad is None or "momentum_buffer" in optimizer.state.get(parameter, {})
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
