"""Rows of a run: their values by name, their lines in the file, and means over several rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

NORM = "gradient_norm"
RATE = "learning_rate"
UNUSED = "unused_samples"
UNUSED_AT_LEAST = "unused_samples_at_least"  # of an epoch, in its last row
_BESIDE = frozenset({"epoch", "iteration", "samples", "weight", "skipped", NORM, "samples_per_s", "elapsed_s", "loss"})
_BESIDE |= {UNUSED, UNUSED_AT_LEAST}


def is_metric(name: str) -> bool:
    """Whether a row's value of this name is a metric of the script."""
    return name not in _BESIDE and not name.startswith(RATE)


def is_averaged(name: str) -> bool:
    """Whether a row's value of this name, the loss or a metric, is averaged over rows."""
    return name == "loss" or is_metric(name)


@lru_cache(maxsize=256)
def _averaged(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_averaged, names))


class WeightedMeans:
    """Means over rows, sum_i(w_i value_i) / sum_i(w_i) with row weights w_i; skipped steps do not count.

    Attributes:
        rows: the number of rows.
        samples: the number of their samples.
        skipped: the number of rows of skipped steps.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self.rows = self.samples = self.skipped = 0

    def add(self, samples: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows += 1
        self.samples += samples
        if values.get("skipped"):
            self.skipped += 1
            return
        weight = values.get("weight", samples)
        sums = self._sums
        for name in _averaged(tuple(values)):
            sums[name] = sums.get(name, 0.0) + weight * values[name]
        self._weight += weight

    def add_all(self, other: WeightedMeans) -> None:
        """Add the rows of other means."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._weight += other._weight
        self.rows += other.rows
        self.samples += other.samples
        self.skipped += other.skipped

    def means(self) -> dict[str, float]:
        """Return the means by name; NaN if all weights are 0."""
        return {name: total / self._weight if self._weight else nan for name, total in self._sums.items()}


class EpochMeans:
    """The means over the rows of the current epoch.

    Attributes:
        means: so far.
    """

    def __init__(self) -> None:
        self.means = WeightedMeans()
        self._epoch = 0

    def turn_to(self, epoch: int) -> None:
        """Start over if this is another epoch."""
        if epoch != self._epoch:
            self.means = WeightedMeans()
            self._epoch = epoch

    def begin(self) -> Callable[[Mapping[str, Any]], None]:
        """Start over; returns `recall`, for all rows from the first one on."""
        self.turn_to(0)
        return self.recall

    def recall(self, row: Mapping[str, Any]) -> None:
        """Add a row that was written before this process resumed the run."""
        self.turn_to(row["epoch"])
        self.means.add(row["samples"], {name: nan if one is None else one for name, one in row.items()})


class RowMeta(NamedTuple):
    """A row's place and time; epoch and iteration are counted from 1."""

    epoch: int
    iteration: int
    samples: int
    elapsed_s: float
    is_last_of_epoch: bool

    @property
    def place(self) -> dict[str, int]:
        """Where it is in the run, as files and sinks have it."""
        return {"epoch": self.epoch, "iteration": self.iteration, "samples": self.samples}
