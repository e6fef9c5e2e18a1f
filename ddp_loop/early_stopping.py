"""Early stopping: when the validation loss has not improved for long enough, and the weights of its best value."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class EarlyStopping:
    """Says when a validation loss has not improved `patience` times in a row, and keeps the best weights.

        patience = dl.EarlyStopping(model, 5)
        for step in loop:
            ...
            optimizer.step()
            if step.iteration % 20 == 0:
                result = dl.evaluate(model, validation, loss=loss_of_each)
                if patience.should_stop(result["loss"]):
                    break
        patience.restore_best()  # or not: then the model keeps the last weights

    `evaluate` gives the same numbers on every rank, so all ranks decide alike, and leave the loop at the same step; a
    loss of one rank's own would not do. The copy of the weights and buffers lies on the model's device, in the same
    memory each time.

    Args:
        model: whose weights are kept.
        patience: how many losses in a row may be no better than the best one.

    Attributes:
        losses: how many losses were given.
        best: which of them was the best, counted from 1; 0 before there is one.
        best_loss: its value; infinite before there is one.

    Raises:
        ValueError: a patience that is no whole number, 1 or more.
    """

    def __init__(self, model: nn.Module, patience: int = 5) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(
                f"patience must be a whole number, 1 or more; got {patience!r}: 1 stops at the first loss that is no "
                "better"
            )
        self.patience = patience
        self.losses, self.best, self.best_loss = 0, 0, math.inf
        self._model = model
        self._kept: dict[str, Any] = {}

    def should_stop(self, loss: float | torch.Tensor) -> bool:
        """Take the next validation loss, keep the weights if it is the lowest, and say whether to stop.

        NaN and infinity are no improvement.

        Args:
            loss: one number, the same on every rank.

        Raises:
            TypeError: something else, such as all that `evaluate` returns.
        """
        try:
            value = float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"a validation loss is one number; got {type(loss).__name__} ({error}): take one by name, such as "
                'dl.evaluate(...)["loss"]'
            ) from error
        self.losses += 1
        if value < self.best_loss:
            self.best, self.best_loss = self.losses, value
            self._kept = {name: _copied(one, self._kept.get(name)) for name, one in self._model.state_dict().items()}
        return self.losses - self.best >= self.patience

    def restore_best(self) -> None:
        """Give the model the weights and buffers of the best loss.

        Raises:
            RuntimeError: there is no best loss.
        """
        if not self.best:
            raise RuntimeError(
                f"the best weights are those of the lowest validation loss; {self.losses} were given, and none was "
                "finite: call should_stop at least once before restore_best"
            )
        self._model.load_state_dict(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """What was seen and kept, for a checkpoint; the weights are those kept here, not copies."""
        return {"losses": self.losses, "best": self.best, "best_loss": self.best_loss, "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the weights are copied to the model's device.

        Raises:
            ValueError: weights of another model.
        """
        own, given = self._model.state_dict(), state["kept"]
        for name in [*own, *given] if given else ():
            here, there = _form(own.get(name)), _form(given.get(name))
            if here != there:
                raise ValueError(
                    f"the kept weights must be those of the same model; {name} is {there} among them and {here} in the "
                    "model: build the model as it was"
                )
        self.losses, self.best, self.best_loss = state["losses"], state["best"], state["best_loss"]
        into = {name: torch.empty_like(one) for name, one in own.items() if isinstance(one, torch.Tensor)}
        self._kept = {name: _copied(one, into.get(name)) for name, one in given.items()}


def _copied(value: Any, into: Any) -> Any:
    """A copy of `value`: in the memory of `into` where that has its form."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if isinstance(into, torch.Tensor) and _form(into) == _form(value):
        return into.copy_(value)
    return value.clone()


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "nothing" if value is None else type(value).__name__
