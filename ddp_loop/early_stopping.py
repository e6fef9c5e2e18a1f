"""Early stopping on a validation loss, and the weights of its best value."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ddp_loop.determinism import check_count


class EarlyStopping:
    """Stops after `patience` validation losses in a row without an improvement, and keeps the best weights.

    For example::

        patience = dl.EarlyStopping(model, 5)
        for step in loop:
            ...
            optimizer.step()
            if step.iteration % 20 == 0:
                result = dl.evaluate(model, validation, loss=loss_of_each)
                if patience.should_stop(result["loss"]):
                    break
        patience.restore_best()  # optional; without it the model keeps the last weights

    `evaluate` returns the same numbers on every rank, so all ranks leave the loop at the same step. A rank's own loss
    does not ensure that. If training has fixed shards, another number of ranks stops at the same step too. The copy of
    the weights and buffers is on the model's device and reuses its memory.

    Args:
        model: whose weights and buffers are kept.
        patience: the number of losses in a row without an improvement, 1 or more.

    Attributes:
        losses: the number of losses given.
        best: the number of the best loss, counted from 1; 0 without one.
        best_loss: its value; infinite without one.

    Raises:
        TypeError: `model` is no module.
        ValueError: `patience` is not a whole number, or less than 1.
    """

    def __init__(self, model: nn.Module, patience: int = 5) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"EarlyStopping takes a model, a torch.nn.Module, first. Got {type(model).__name__}.")
        remedy = "1 stops at the first loss that does not improve."
        self.patience = check_count("patience", patience, remedy=remedy)
        self.losses = 0
        self.best = 0
        self.best_loss = math.inf
        self._model = model
        self._kept: dict[str, Any] = {}

    def should_stop(self, loss: float | torch.Tensor) -> bool:
        """Take the next validation loss, keep the weights if it is the lowest, and return whether to stop.

        NaN and plus infinity are not an improvement.

        Args:
            loss: one number or tensor of one value, the same on every rank.

        Raises:
            TypeError: `loss` is not one number; the dict that `evaluate` returns is not.
        """
        try:
            value = float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"A validation loss must be one number. Got {type(loss).__name__} ({error}). Select one by its name, "
                'such as dl.evaluate(...)["loss"].'
            ) from error
        self.losses += 1
        if value < self.best_loss:
            self.best = self.losses
            self.best_loss = value
            self._kept = {name: _copied(one, self._kept.get(name)) for name, one in self._model.state_dict().items()}
        return self.losses - self.best >= self.patience

    def restore_best(self) -> None:
        """Load the weights and buffers of the best loss into the model.

        Raises:
            RuntimeError: no finite loss was given.
        """
        if not self.best:
            raise RuntimeError(
                f"There are no best weights yet. None of the {self.losses} validation losses was finite. Call "
                "should_stop before restore_best."
            )
        self._model.load_state_dict(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """The losses so far and the best weights, for a checkpoint; the weights are not copied."""
        return {"losses": self.losses, "best": self.best, "best_loss": self.best_loss, "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; the weights are copied to the model's device.

        Args:
            state: from `state_dict` of the same model.

        Raises:
            ValueError: the weights belong to another model.
        """
        own = self._model.state_dict()
        given = state["kept"]
        for name in [*own, *given] if given else ():
            here = _form(own.get(name))
            there = _form(given.get(name))
            if here != there:
                raise ValueError(
                    f"The best weights must fit the model. {name} is {there} in the state and {here} in the model. "
                    "Build the same model."
                )
        self.losses = state["losses"]
        self.best = state["best"]
        self.best_loss = state["best_loss"]
        into = {name: torch.empty_like(one) for name, one in own.items() if isinstance(one, torch.Tensor)}
        self._kept = {name: _copied(one, into.get(name)) for name, one in given.items()}


def _copied(value: Any, into: Any) -> Any:
    """A copy of `value`, in the memory of `into` if dtype and shape are the same."""
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
