"""Where a loop is: the updates made, the whole epochs, the mini-batches of the one at hand."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_loop.data.batches import Batches
from ddp_loop.data.shards import MiniBatch

_NAMES = ("iteration", "epoch", "position")


class LoopPosition:
    """The counters of a loop over `batches`, up to so many `epochs` or `steps`. The loop sets those of its step.

    A step counts as made from its fold on.

    Attributes:
        iteration: of the step at hand, counted from 1.
        epochs: that were gone through.
        at: how many mini-batches of the epoch at hand were begun.
        resumed_at: the iteration where this process began.
        is_folded: whether the step at hand was.
    """

    def __init__(self, batches: Batches, epochs: int | None, steps: int | None) -> None:
        self._batches, self._most_epochs, self.most_steps = batches, epochs, steps
        self.iteration = self.epochs = self.at = self.resumed_at = 0
        self.is_folded = True

    @property
    def extent(self) -> dict[str, int | None]:
        """How far the loop goes: epochs and steps as they were asked for, and the steps of an epoch."""
        return {"epochs": self._most_epochs, "steps_per_epoch": self._batches.steps, "steps": self.most_steps}

    @property
    def epoch(self) -> int:
        """Of the step at hand, or of the last one, counted from 1; 0 before the first."""
        return self.epochs + (1 if self.at else 0)

    def end_epoch(self) -> None:
        """The epoch was gone through."""
        self.epochs, self.at = self.epochs + 1, 0

    def is_last_of_epoch(self, mini_batch: MiniBatch) -> bool:
        """Whether it is the epoch's last."""
        return mini_batch.is_last or mini_batch.ends_stream

    @property
    def has_made_all(self) -> bool:
        """Whether the steps asked for were begun."""
        return self.most_steps is not None and self.iteration >= self.most_steps

    @property
    def is_done(self) -> bool:
        """Whether no epoch is left either."""
        return self.has_made_all or (self._most_epochs is not None and self.epochs >= self._most_epochs)

    @property
    def has_no_step_left(self) -> bool:
        """Whether no step is left; the script's own end of the last epoch may be."""
        last = self._most_epochs is not None and self.epochs + 1 >= self._most_epochs
        return self.is_done or (last and self.at == self._batches.steps)

    def ends_all(self, mini_batch: MiniBatch) -> bool:
        """Whether the loop ends with it."""
        last = self._most_epochs is not None and mini_batch.epoch + 1 >= self._most_epochs
        return self.has_made_all or (last and self.is_last_of_epoch(mini_batch))

    def state_dict(self) -> dict[str, int]:
        """As plain numbers."""
        open_one = 0 if self.is_folded else 1
        return {"iteration": self.iteration - open_one, "epoch": self.epochs, "position": self.at - open_one}

    def resume_from(self, state: Mapping[str, int]) -> None:
        """Be where another loop over the same batches was."""
        self.iteration, self.epochs, self.at = (state[name] for name in _NAMES)
        self.resumed_at = self.iteration

    def validate(self, state: Mapping[str, int]) -> str | None:
        """Why it cannot be there; None if it can."""
        if set(state) != set(_NAMES):
            return (
                "where a Loop goes on is what its state_dict() gave, iteration, epoch and position; got "
                f"{sorted(state)}: keep that"
            )
        steps, numbers = self._batches.steps, [state[name] for name in _NAMES]
        whole = all(isinstance(number, int) and number >= 0 for number in numbers)
        iteration, epoch, position = numbers
        if not whole or (steps is not None and (position > steps or epoch * steps + position != iteration)):
            said = "an epoch of these has no end" if steps is None else f"an epoch of these has {steps}"
            return (
                "iteration is the mini-batches of the whole epochs and those of the one at hand, position; got "
                f"{dict(state)}, {said}: make Batches with the data and the batch_size that the other loop had"
            )
        return None
