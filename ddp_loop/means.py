"""Means over several rows, weighted as the steps' own means are; and which of a row's names are metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import nan
from typing import Any

NORM, RATE = "gradient_norm", "learning_rate"
_BESIDE = frozenset(
    {"epoch", "iteration", "observations", "weight", "skipped", NORM, "observations_per_s", "elapsed_s", "loss"}
)


def is_metric(name: str) -> bool:
    """Whether a row's value of this name is one that the script gave beside the loss."""
    return name not in _BESIDE and not name.startswith(RATE)


def is_averaged(name: str) -> bool:
    """Whether it is one of a mini-batch that has a mean over several: the loss, a metric."""
    return name == "loss" or is_metric(name)


@lru_cache(maxsize=256)
def _averaged(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_averaged, names))


class Means:
    """sum_i(w_i value_i) / sum_i(w_i) over rows, w_i a row's weight; steps that were skipped do not count.

    Attributes:
        rows: how many were added.
        observations: theirs.
        skipped: how many of them were of a step that was skipped.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self.rows = self.observations = self.skipped = 0

    def add(self, observations: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows += 1
        self.observations += observations
        if values.get("skipped"):
            self.skipped += 1
            return
        weight = values.get("weight", observations)
        sums = self._sums
        for name in _averaged(tuple(values)):
            sums[name] = sums.get(name, 0.0) + weight * values[name]
        self._weight += weight

    def add_all(self, other: Means) -> None:
        """Add another one's rows."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._weight += other._weight
        self.rows += other.rows
        self.observations += other.observations
        self.skipped += other.skipped

    def means(self) -> dict[str, float]:
        """By name; NaN where all weights are 0."""
        return {name: total / self._weight if self._weight else nan for name, total in self._sums.items()}


class EpochMeans:
    """The means over one epoch's rows: of the one that came last.

    Attributes:
        means: so far.
    """

    def __init__(self) -> None:
        self.means, self._epoch = Means(), 0

    def turn_to(self, epoch: int) -> None:
        """Rows of this epoch come now."""
        if epoch != self._epoch:
            self.means, self._epoch = Means(), epoch

    def recall(self, row: Mapping[str, Any]) -> None:
        """A row that was written before this process went on."""
        self.turn_to(row["epoch"])
        self.means.add(row["observations"], {name: nan if one is None else one for name, one in row.items()})
