"""A mini-batch's loss that is not a finite number: every rank finds it alike, and names the observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ddp_loop.shards import MiniBatch

NotFinite = Literal["raise", "allow"]
NOT_FINITE = ("raise", "allow")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Look:
    """A step's losses on their way to the host: the mini-batch's, then each shard's, then each one's share of it."""

    iteration: int
    mini_batch: MiniBatch
    values: torch.Tensor
    event: torch.cuda.Event | None


class Guard:
    """Looks at each step's loss: on the CPU at once, on a GPU when the next step's is looked at, so that nobody waits.

    Args:
        rule: "raise", or "allow" to look at nothing.
        indices: which observations of the data are number `start` .. `start + count - 1` of an epoch.
    """

    def __init__(self, rule: NotFinite, indices: Callable[[int, int, int], torch.Tensor]) -> None:
        self._allows, self._indices = rule == "allow", indices
        self._late: _Look | None = None

    def look(
        self, iteration: int, mini_batch: MiniBatch, loss: torch.Tensor, losses: torch.Tensor, share: torch.Tensor
    ) -> None:
        """Raise FloatingPointError if a step's loss is not finite.

        Every rank gives the same values, since they come out of the fold, so all raise or none.

        Args:
            iteration: of the step.
            mini_batch: its observations.
            loss: the mini-batch's, shape ().
            losses, share: the shards' and their part of it, shape (S,) each.
        """
        if self._allows:
            return
        if loss.device.type == "cpu":
            if not math.isfinite(loss.item()):
                self._refuse(_Look(iteration, mini_batch, torch.cat([loss.reshape(1), losses, share]), None))
            return
        self.settle()
        values = torch.cat([loss.reshape(1), losses, share])
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._late = _Look(iteration, mini_batch, host, event)

    def settle(self) -> None:
        """Look at what a GPU was still to say."""
        late, self._late = self._late, None
        if late is not None and late.event is not None:
            late.event.synchronize()
            if not math.isfinite(late.values[0].item()):
                self._refuse(late)

    def _refuse(self, look: _Look) -> None:
        value, *rest = look.values.tolist()
        shards = len(look.mini_batch.sizes)
        full = [number for number, share in enumerate(rest[shards:]) if share]
        culprits = [number for number in full if not math.isfinite(rest[number])]
        told = culprits[:1] if len(culprits) < len(full) or len(full) == 1 else []  # else it is the whole's
        raise FloatingPointError(
            f"a mini-batch's loss must be a finite number; that of step {look.iteration} is {value}"
            + "".join(self._said(look.mini_batch, number) for number in told)
            + ": look for NaN among these data and their labels, and at the learning rate; a loop that can bear it is "
            'given not_finite="allow"'
        )

    def _said(self, mini_batch: MiniBatch, number: int) -> str:
        start, size = mini_batch.start + sum(mini_batch.sizes[:number]), mini_batch.sizes[number]
        indices = self._indices(mini_batch.epoch, start, size).tolist()
        more = f" and {size - _SHOWN} more" if size > _SHOWN else ""
        said = ", ".join(str(index) for index in indices[:_SHOWN])
        return f", from shard {number} of {len(mini_batch.sizes)}, observations {said}{more} of the data"
