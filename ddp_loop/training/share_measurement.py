"""The measurement of the ranks' shares in the first steps of a loop.

[Note: What is measured] The time from the first shard of a step to the end of its last backward, divided by the rank's
samples. It has no wait for other ranks, which comes in the fold, and no optimizer, whose time does not depend on the
samples. On a GPU it is the device's time. The speed of a rank is one over the median of some steps, and its share is
its part of all speeds. All ranks get all times in one collective, inside the fold of the last of these steps, so they
compute the same shares and use them from the next mini-batch on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddp_loop.data import Batches, MiniBatch
from ddp_loop.training.validation import check_rows

WARM_UP = 3  # steps; in the first ones layouts are agreed on and memory is allocated
MEASURED_STEPS = 10
_ALIKE = 1.05  # ranks whose speeds differ by less keep equal shares
_DIGITS = 3


def shares_of(times_s: Sequence[float]) -> tuple[float, ...]:
    """The share of each rank by its seconds per sample; equal ones for ranks that are equally fast."""
    if max(times_s) < _ALIKE * min(times_s):
        return (1.0,) * len(times_s)
    speeds = [min(times_s) / one for one in times_s]
    return tuple(round(speed / sum(speeds), _DIGITS) for speed in speeds)


class ShareMeasurement:
    """Measures a rank's time per sample, and gives the batches shares by it. See [Note: What is measured].

    Args:
        batches: of the loop.

    Attributes:
        is_measuring: whether steps are measured; the same on every rank.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches, self._division, self._world = batches, batches.division, batches.world
        self._checked: Mapping[str, object] = {}
        self.is_measuring, self._has_new = self._division.is_unmeasured, False
        self._steps = 0
        self._since: Any = None
        self._marks: list[tuple[Any, Any, int]] = []

    def check_rows(self, state: Mapping[str, object]) -> None:
        """Raise ValueError if BatchNorm1d would get a shard of one sample, now, and later by measured shares."""
        self._checked = state
        check_rows(self._batches, state)

    @property
    def meter(self) -> ShareMeasurement | None:
        """This, while steps are measured."""
        return self if self.is_measuring else None

    def begin_shards(self) -> None:
        """The shards of a pass begin."""
        self._since = self._world.accelerator.mark()

    def end_shards(self, mini_batch: MiniBatch) -> None:
        """This rank's shards of a step's first pass had their backward."""
        samples = len(mini_batch.own_samples)
        if samples and self._steps >= WARM_UP:
            self._marks.append((self._since, self._world.accelerator.mark(), samples))

    def end_step(self, iteration: int) -> None:
        """Count a folded step; after the last one, measure. Every rank must call this.

        Args:
            iteration: of the step.
        """
        self._steps += 1
        if self._steps < WARM_UP + MEASURED_STEPS:
            return
        self.is_measuring = False
        seconds = self._world.accelerator.seconds
        own = median(seconds(first, last) / samples for first, last, samples in self._marks) if self._marks else None
        self._marks.clear()
        gathered = self._world.gather(own, "the time per sample")
        if without := [rank for rank, one in enumerate(gathered) if one is None]:
            self._world.say(
                f"The shares were not measured: rank {without[0]} had no samples in {MEASURED_STEPS} steps. All ranks "
                "keep equal shares."
            )
            return
        self._give(shares_of([one or 0.0 for one in gathered]), f"measured up to step {iteration}")

    def _give(self, shares: tuple[float, ...], how: str) -> None:
        words = ", ".join(f"{share:g}" for share in shares)
        before = self._division.shares
        self._division.give(shares)
        try:
            check_rows(self._batches, self._checked)
        except ValueError as error:
            self._division.give(before)
            self._world.say(f"The shares {words}, {how}, are not used. All ranks keep equal shares. {error}")
            return
        self._world.say(f"The shares of ranks 0 to {len(shares) - 1} are {words}, {how}. They are fixed from now on.")
        self._has_new = True

    def take(self) -> bool:
        """Whether the batches have got shares since the last call; the same on every rank."""
        has_new, self._has_new = self._has_new, False
        return has_new

    # -- checkpoints: `Stateful` -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[float] | None]:
        """The measured shares; None without any."""
        is_measured = self._division.asked == "measured" and self._division.shares is not None
        return {"shares": list(self._division.shares or ()) if is_measured else None}

    def load_state_dict(self, state: Mapping[str, Sequence[float] | None]) -> None:
        """Go on with measured shares, if they are wanted and belong to as many ranks."""
        if not self.is_measuring or (shares := state["shares"]) is None:
            return
        if len(shares) != self._world.size:
            self._world.say(
                f"The shares were measured on {len(shares)} ranks. They are measured again on {self._world.size}."
            )
            return
        self.is_measuring = False
        self._give(tuple(shares), "measured before the run was resumed")
