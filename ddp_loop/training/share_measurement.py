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
_DIGITS = 3  # significant ones, so that the shares of a thousand ranks are as exact as those of two


def shares_of(times_s: Sequence[float]) -> tuple[float, ...]:
    """The share of each rank by its seconds per sample; equal ones for ranks that are equally fast."""
    if max(times_s) < _ALIKE * min(times_s):
        return (1.0,) * len(times_s)
    speeds = [min(times_s) / one for one in times_s]
    return tuple(float(f"{speed / sum(speeds):.{_DIGITS}g}") for speed in speeds)


class ShareMeasurement:
    """Measures a rank's time per sample, and gives the batches shares by it. See [Note: What is measured].

    Args:
        batches: of the loop.

    Attributes:
        is_measuring: whether steps are measured; the same on every rank.
        found: the shares that were measured and are not used yet; None without any.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._division = batches.division
        self._world = batches.world
        self._checked: Mapping[str, object] = {}
        self.is_measuring = self._division.is_unmeasured
        self._used = self._division.shares
        self.found: tuple[float, ...] | None = None
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
        if not self._division.is_unmeasured:  # another loop over the same batches measured them
            return
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
        self._find(shares_of([one or 0.0 for one in gathered]), f"measured up to step {iteration}")

    def _find(self, shares: tuple[float, ...], how: str) -> None:
        words = ", ".join(f"{share:g}" for share in shares)
        before = self._division.shares
        self._division.give(shares)
        try:
            check_rows(self._batches, self._checked)
        except ValueError as error:
            self._world.say(f"The shares {words}, {how}, are not used. All ranks keep equal shares. {error}")
            return
        finally:
            self._division.give(before)  # until the step has ended
        self._world.say(f"The shares of ranks 0 to {len(shares) - 1} are {words}, {how}. They are fixed from now on.")
        self.found = shares

    def take(self) -> bool:
        """Use the shares that were found, and whether the last call had others; the same on every rank.

        Another loop over the same batches may have given them shares.
        """
        if self.found is not None:
            self._division.give(self.found)
            self.found = None
        before = self._used
        self._used = self._division.shares
        return before != self._used

    # -- checkpoints: `Stateful` -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[float] | None]:
        """The measured shares; None without any."""
        shares = self.found or (self._division.shares if self._division.asked == "measured" else None)
        return {"shares": None if shares is None else list(shares)}

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
        self._find(tuple(shares), "measured before the run was resumed")
