"""Rows of a run: their values by name, their lines in the file, and means over several rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

NORM = "gradient_norm"
RATE = "learning_rate"
UNUSED = "unused_samples"
UNUSED_AT_LEAST = "unused_samples_at_least"  # of an epoch, in its last row
PLACE = frozenset({"epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"})  # of a line: no values
_BESIDE = PLACE | {NORM, "samples_per_s", "loss", UNUSED, UNUSED_AT_LEAST}


def is_metric(name: str) -> bool:
    """Whether a row's value of this name is a metric of the script."""
    return name not in _BESIDE and not name.startswith(RATE)


def is_averaged(name: str) -> bool:
    """Whether a row's value of this name, the loss or a metric, is averaged over rows."""
    return name == "loss" or is_metric(name)


def pass_weights(names: tuple[str, ...]) -> dict[str, str]:
    """The columns with a further pass's own weight, by the column of its loss: `loss_2_weight` right before `loss_2`.

    Args:
        names: a row's columns, in order.
    """
    return {loss: name for name, loss in pairwise(names) if name == f"{loss}_weight"}


@lru_cache(maxsize=256)
def weighing_columns(names: tuple[str, ...]) -> dict[str, str]:
    """The columns that are averaged over rows, each with the column of its weight.

    Args:
        names: a row's columns, in order; a pass's metrics follow its loss.
    """
    own = pass_weights(names)
    by = "weight" if "weight" in names else "samples"
    found: dict[str, str] = {}
    for name in names:
        by = own.get(name, by)
        if is_averaged(name) and name not in own.values():
            found[name] = by
    return found


def sums_in(status: Mapping[str, Any]) -> frozenset[str]:
    """The columns of a run that are sums, by its status.json; an older version wrote none."""
    found = status.get("sums")
    return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


class WeightedMeans:
    """Means over the rows that have a value, sum_i(w_i value_i) / sum_i(w_i) with weights w_i; without skipped steps.

    Attributes:
        rows: the number of rows.
        samples: the number of their samples.
        skipped: the number of rows of skipped steps.
    """

    def __init__(self) -> None:
        self._sums = defaultdict[str, float](float)
        self._weights = defaultdict[str, float](float)  # by name: not every row has all
        self._totals = defaultdict[str, float](float)
        self.rows = self.samples = self.skipped = 0

    def add(self, samples: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows += 1
        self.samples += samples
        if values.get("skipped"):
            self.skipped += 1
            return
        for name, by in weighing_columns(tuple(values)).items():
            weight = values.get(by, samples)
            self._sums[name] += weight * values[name]
            self._weights[name] += weight
            self._totals[name] += values[name]

    def add_all(self, other: WeightedMeans) -> None:
        """Add the rows of other means."""
        for name, total in other._sums.items():
            self._sums[name] += total
            self._weights[name] += other._weights[name]
            self._totals[name] += other._totals[name]
        self.rows += other.rows
        self.samples += other.samples
        self.skipped += other.skipped

    def means(self, sums: Collection[str] = ()) -> dict[str, float]:
        """Return the means by name, each NaN if all of its weights are 0; the totals of `sums`."""
        weights = self._weights
        means = {name: total / weights[name] if weights[name] else nan for name, total in self._sums.items()}
        return {name: self._totals[name] if name in sums else mean for name, mean in means.items()}


class EpochMeans:
    """The means over the rows of the current epoch.

    Attributes:
        means: so far.
        sums: the columns that are sums, which add up over an epoch.
    """

    def __init__(self) -> None:
        self.means = WeightedMeans()
        self.sums = set[str]()
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
