"""Whether the script steps its optimizer, and what a GradScaler did to its losses.

[Note: Left accumulation] Each fold gives the gradient of its own mini-batch. A script that still steps its optimizer
every k-th time, as it did to accumulate, trains on one mini-batch of k. An optimizer writes its parameters in place,
and their version counters show it at no cost. Until they have shown it once, checksums tell an optimizer that writes
past them (`parameter.data`, torch's fused kernels) from one that did not step; and so does what it keeps of a
parameter, its count of steps say, where a learning rate of 0 moves nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ddp_loop.determinism import checksum_all

_MOST_LOOKS = 8  # by checksums, then it is given up
ACCUMULATION_LEFT = (
    "Two steps were folded, and no parameter moved in between (after step {step}). Each fold gives the gradient of "
    "its own mini-batch and replaces the one before, which is lost. Call optimizer.step() after each fold. To "
    "accumulate, give Batches a larger mini-batch and more shards: Batches(data, 4 * n, world, shards=4 * world.size)."
)


class UnmovedParametersCheck:
    """Warns once when no parameter was written from one step's fold to the next step.

    Args:
        scalers: a step that one of them skips moves nothing, and is none of the script's doing.
        optimizers: a step of theirs moves nothing either where the learning rate is 0.
    """

    def __init__(self, scalers: Sequence[GradScaler], optimizers: Sequence[Optimizer] = ()) -> None:
        self._scalers, self._optimizers = scalers, optimizers
        self._made: list[object] = []
        self._versions: list[int] = []
        self._sums: torch.Tensor | None = None
        self._counts_writes = self._is_over = False
        self._looks = 0
        self.had_gradients = False  # whether the last fold gave any, and no rule took them away

    def check(self, parameters: Collection[torch.Tensor], versions: list[int], step: int) -> None:
        """Compare the parameters with what they were when the last step opened; call this when one opens.

        Args:
            parameters: of the job.
            versions: of them.
            step: its iteration.
        """
        if self._is_over:
            return
        now = versions + [one._version for scaler in self._scalers for one in _state_of(scaler)]
        before, self._versions = self._versions, now
        made_before, self._made = self._made, [one for optimizer in self._optimizers for one in _made_by(optimizer)]
        if before != now:
            self._counts_writes, self._sums = bool(before), None
        elif made_before != self._made:
            self._sums = None
        elif self.had_gradients:
            self._suspect(parameters, step)

    def _suspect(self, parameters: Collection[torch.Tensor], step: int) -> None:
        if not self._counts_writes:
            before, self._sums = self._sums, checksum_all([parameter.detach() for parameter in parameters])
            self._looks += 1
            if before is None or not torch.equal(before, self._sums):
                self._is_over = self._looks == _MOST_LOOKS
                return
        self._is_over = True
        warnings.warn(ACCUMULATION_LEFT.format(step=step - 1), stacklevel=2)


def _state_of(scaler: GradScaler) -> list[torch.Tensor]:
    return [one for one in (scaler._scale, scaler._growth_tracker) if one is not None]


def _made_by(optimizer: Optimizer) -> list[object]:
    """What its steps change in the first parameter's state, as versions and numbers."""
    state: object = next(iter(optimizer.state.values()), None)
    kept = [one for one in state.values() if isinstance(one, torch.Tensor | int)] if isinstance(state, dict) else []
    return [one._version if isinstance(one, torch.Tensor) else one for one in kept]


_MOST_NODES = 64  # scaled losses are added, divided, cast: the product lies a few operations below the loss


def find_scale(loss: torch.Tensor, scalers: Sequence[GradScaler]) -> torch.Tensor | None:
    """The scale that one of the scalers multiplied a loss by, shape (); None if none did.

    It is found in the loss's graph, where the product keeps the scaler's own tensor, so that a loss which was not
    scaled stays as it is. The last operations alone are looked at, and no value is asked for.

    Args:
        loss: before its backward, shape ().
        scalers: of the job.
    """
    scales = {scaler._scale.data_ptr(): scaler._scale for scaler in scalers if scaler._scale is not None}
    nodes = [loss.grad_fn] if scales else []
    for node in nodes:  # grows while it is looked at
        if node is None:
            continue
        if node.name() == "MulBackward0":
            for factor in (node._saved_other, node._saved_self):  # type: ignore[attr-defined]
                if factor is not None and factor.data_ptr() in scales:
                    return scales[factor.data_ptr()]
        nodes += [below for below, _ in node.next_functions[: _MOST_NODES - len(nodes)]]
    return None
