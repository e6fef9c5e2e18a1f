"""The position of a loop: steps made, epochs completed, mini-batches of the current epoch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from ddp_loop.data.batches import Batches
from ddp_loop.data.shards import MiniBatch

_NAMES = ("iteration", "epoch", "position")


class LoopPosition:
    """The counters of a loop over `batches`, up to `epochs` or `steps`. The loop sets the counters of its step.

    A step counts as made once it is folded.

    Attributes:
        iteration: number of the current step, counted from 1.
        epochs: number of completed epochs.
        at: number of mini-batches begun in the current epoch.
        resumed_at: the iteration at which this process began.
        is_folded: whether the current step is folded.
        loop: the number of its random streams, 0 for a script's first loop.
    """

    def __init__(self, batches: Batches, epochs: int | None, steps: int | None) -> None:
        # Not the batches themselves: a report that is kept longer than its loop has the position, and not the data.
        self._steps = batches.steps
        self._most_epochs, self.most_steps = (one if isinstance(one, int) else None for one in (epochs, steps))
        self.iteration = self.epochs = self.at = self.resumed_at = 0
        self.is_folded = True
        self.loop = 0

    @property
    def extent(self) -> dict[str, int | None]:
        """The epochs and steps asked for, and the steps of an epoch."""
        return {"epochs": self._most_epochs, "steps_per_epoch": self._steps, "steps": self.most_steps}

    @property
    def length(self) -> int | None:
        """The number of steps of the whole run; None if it is unknown."""
        bounds = [] if self.most_steps is None else [self.most_steps]
        if self._most_epochs is not None and self._steps is not None:
            bounds.append(self._most_epochs * self._steps)
        return min(bounds, default=None)

    def known_length(self) -> int:
        """`length`; raises TypeError if it is unknown."""
        if (number := self.length) is None:
            raise TypeError(
                "len() is not defined for a Loop over a stream: the length of its epochs is unknown. Pass Loop steps=."
            )
        return number

    @property
    def epoch(self) -> int:
        """The epoch of the current or last step, counted from 1; 0 before the first step."""
        return self.epochs + (1 if self.at else 0)

    def end_epoch(self) -> None:
        """Count the current epoch as completed."""
        self.epochs += 1
        self.at = 0

    def is_last_of_epoch(self, mini_batch: MiniBatch) -> bool:
        """Whether an epoch ends with this mini-batch."""
        return mini_batch.is_last or mini_batch.ends_stream

    @property
    def has_made_all(self) -> bool:
        """Whether all steps asked for were begun."""
        return self.most_steps is not None and self.iteration >= self.most_steps

    @property
    def is_done(self) -> bool:
        """Whether all steps or all epochs asked for are done."""
        return self.has_made_all or (self._most_epochs is not None and self.epochs >= self._most_epochs)

    @property
    def has_no_step_left(self) -> bool:
        """Whether no step is left. The script's code after the last epoch may still run."""
        last = self._most_epochs is not None and self.epochs + 1 >= self._most_epochs
        return self.is_done or (last and self.at == self._steps)

    def has_no_step_left_at(self, state: Mapping[str, int]) -> bool:
        """Whether none would be left at the position of another loop over the same batches."""
        there = copy(self)
        there.resume_from(state)
        return there.has_no_step_left

    def ends_all(self, mini_batch: MiniBatch) -> bool:
        """Whether the loop ends with this mini-batch, the last of an epoch."""
        return self._most_epochs is not None and mini_batch.epoch >= self._most_epochs

    def state_dict(self) -> dict[str, int]:
        """The position after the last folded step, as plain numbers."""
        open_one = 0 if self.is_folded else 1
        found = {"iteration": self.iteration - open_one, "epoch": self.epochs, "position": self.at - open_one}
        return found | ({"loop": self.loop} if self.loop else {})

    def resume_from(self, state: Mapping[str, int]) -> None:
        """Take the position of another loop over the same batches."""
        self.iteration, self.epochs, self.at = (state[name] for name in _NAMES)
        self.resumed_at = self.iteration
        self.loop = state.get("loop", 0)

    def problem_of(self, state: Mapping[str, int], *, has_begun: bool) -> Exception | None:
        """Why a loop, which may have begun, cannot resume at `state`; None if it can."""
        if has_begun:
            return RuntimeError(
                "A Loop's position must be loaded before its first step. This one has begun. Create a new Loop."
            )
        if set(state) - {"loop"} != set(_NAMES):
            return ValueError(
                "The state of a Loop has iteration, epoch and position, as its state_dict() returns. Got "
                f"{sorted(state)}. Pass that dict."
            )
        iteration, epoch, position = (state[name] for name in _NAMES)
        whole = all(isinstance(number, int) and number >= 0 for number in state.values())
        steps = self._steps
        if not whole or (steps is not None and (position > steps or epoch * steps + position != iteration)):
            extent = "never ends" if steps is None else f"has {steps} mini-batches"
            return ValueError(
                "iteration must count the mini-batches of all completed epochs plus position, in the current one. "
                f"Got {dict(state)} where an epoch {extent}. Use the data and the batch_size of the other loop."
            )
        return None

    def out_of_turn(self, begun: str | None, *, is_over: bool) -> RuntimeError:
        """The error of a loop that is iterated again, or in another order.

        Args:
            begun: where it was left; None if it was not.
            is_over: whether it has ended.
        """
        made = f"has made its {self.iteration} steps" if is_over else f"is before epoch {self.epochs + 1}"
        return RuntimeError(
            "A Loop can be iterated once, and each epoch must run to its end. This one "
            f"{f'stopped {begun}' if begun else made}. Create a new Loop. For a short look "
            "pass steps=N to the Loop, or leave both loops."
        )
