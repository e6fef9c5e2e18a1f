"""Updates by hand, for processes of their own that show no optimizer.

A first optimizer of torch imports torch._dynamo, nearly half of the processor time that a start of a rank takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Momentum:
    """Gradient descent with momentum, whose state is saved and resumed as an optimizer's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: float, momentum: float = 0.9) -> None:
        self._parameters = list(parameters)
        self._rate = rate
        self._momentum = momentum
        self._velocities = [torch.zeros_like(one) for one in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters."""
        for one, velocity in zip(self._parameters, self._velocities, strict=True):
            if one.grad is not None:
                velocity.mul_(self._momentum).add_(one.grad)
                one.sub_(self._rate * velocity)

    def state_dict(self) -> dict[str, Any]:
        """The velocities."""
        return {"velocities": list(self._velocities)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The velocities again."""
        for velocity, given in zip(self._velocities, state["velocities"], strict=True):
            velocity.copy_(given)
