"""The use of processor, memory and GPU by each rank, as the page draws it."""

from __future__ import annotations

import os
import re
import time
from array import array
from contextlib import suppress
from math import isnan, nan
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import USAGE, opened
from ddp_loop.monitor.run_state import finite
from ddp_loop.monitor.series import updates
from ddp_loop.reporting import JsonlTail

MEASURES = ("processor_percent", "memory_mib", "gpu_percent", "gpu_memory_mib")
READ_S = 0.5  # for the files of all ranks in one look
MOST_POINTS = 1000
MOST_RANKS = 64
USAGE_FILE = re.compile(r"rank-(\d{1,6})\.jsonl", re.ASCII)


class UsageSeries:
    """What one rank has used. When it has too many points, each two become one: their mean, at the later time.

    Attributes:
        elapsed: seconds since the run began, rising.
        values: by measure; NaN where a line has none.
    """

    def __init__(self) -> None:
        self.elapsed = array("d")
        self._lines = 0
        self._every = 1
        self.values = {name: array("d") for name in MEASURES}
        self._open: list[list[float]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; one without a time is left out, and later ones are removed."""
        elapsed = finite(line.get("elapsed_s"))
        if elapsed is None:
            return
        while self.elapsed and self.elapsed[-1] >= elapsed:
            self.elapsed.pop()
            for column in self.values.values():
                column.pop()
        self._open.append([nan if (value := finite(line.get(name))) is None else value for name in MEASURES])
        if len(self._open) < self._every:
            return
        self.elapsed.append(elapsed)
        for place, column in enumerate(self.values.values()):
            column.append(_mean([one[place] for one in self._open]))
        self._open = []
        if len(self.elapsed) >= MOST_POINTS:
            self._every *= 2
            self.elapsed = self.elapsed[1::2]
            self.values = {
                name: array("d", [_mean(list(column[at : at + 2])) for at in range(0, len(column) - 1, 2)])
                for name, column in self.values.items()
            }

    def shown(self) -> dict[str, Any]:
        """Return the points as JSON values; a measure that no line has is left out."""
        return {
            "elapsed_s": self.elapsed.tolist(),
            **{
                name: [None if isnan(one) else round(one, 1) for one in column]
                for name, column in self.values.items()
                if not all(map(isnan, column))
            },
        }


def _mean(values: list[float]) -> float:
    there = [one for one in values if not isnan(one)]
    return sum(there) / len(there) if there else nan


class UsageView:
    """The files of a run's ranks, read as they grow.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / USAGE
        self._ranks: dict[int, tuple[JsonlTail, UsageSeries]] = {}

    def ranks(self) -> list[int]:
        """Return the ranks that have a file, the first MOST_RANKS."""
        found = []
        with suppress(OSError), opened(self._folder) as folder, os.scandir(folder) as entries:
            for entry in entries:
                if (name := USAGE_FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    found.append(int(name[1]))
        return sorted(set(found))[:MOST_RANKS]

    def look(self) -> dict[str, Any]:
        """Return the points of all ranks, as JSON values."""
        deadline = time.monotonic() + READ_S
        is_behind = False
        there = self.ranks()
        self._ranks = {rank: known for rank, known in self._ranks.items() if rank in there}
        for rank in there:
            path = self._folder / f"rank-{rank}.jsonl"
            tail, series = self._ranks.get(rank) or (JsonlTail(path, follow=False), UsageSeries())
            for update in updates(tail, deadline):
                if update.anew:
                    series = UsageSeries()
                for line in update.rows:
                    series.add(line)
            is_behind |= update.more
            self._ranks[rank] = (tail, series)
        return {
            "is_behind": is_behind,
            "ranks": [{"rank": rank, **self._ranks[rank][1].shown()} for rank in there],
        }
