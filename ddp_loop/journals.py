"""Lines of JSON that lie beside a run's rows: what was evaluated, how the ranks keep up.

[Note: Again] What a script does behind an epoch's end is done again by a run that goes on from there. So an evaluation
that says what another one of the same iteration has said is not written a second time.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from ddp_loop.durable import identity
from ddp_loop.lines import Lines, append_whole
from ddp_loop.runs import EVALUATIONS
from ddp_loop.tailing import read_lines

_REDONE = 1e-6  # float32's own rounding; sums on another number of ranks differ by that


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """A value that is not finite is None, since JSON has no word for it."""
    return {name: value if isfinite(value) else None for name, value in values.items()}


class Journal:
    """A file of lines that a run appends to; while it cannot be written they are left out, and training goes on.

    Args:
        path: of the file.
        after: the iteration that the run goes on from; lines of later ones are taken out.
        warn: called with a line when the file cannot be written.
    """

    def __init__(self, path: Path, after: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        self._folder = identity(path.parent)
        if path.exists():
            Lines(path, after).close()  # takes them out

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, at once, unless another run's folder stands there by now."""
        try:
            if identity(self._path.parent) != self._folder:
                raise FileNotFoundError(errno.ENOENT, "another folder stands in its place")
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, (json.dumps(line) + "\n").encode(), file.tell())
        except OSError as error:
            if not self._warned:
                self._warn(f"{self._path} cannot be written, training goes on without it: {error}")
            self._warned = True


class Evaluations:
    """The evaluations of a run: {epoch, iteration, <metrics>, observations, elapsed_s} each; see [Note: Again].

    Args:
        run: the run folder.
        after: the iteration that the run goes on from.
        warn: called with a line when the file cannot be written.
    """

    def __init__(self, run: Path, after: int, warn: Callable[[str], None]) -> None:
        path = run / EVALUATIONS
        self._journal = Journal(path, after, warn)
        self._said = [line for line in read_lines(path) if line["iteration"] == after]  # of the last iteration

    def note(self, epoch: int, iteration: int, result: Mapping[str, float], elapsed_s: float) -> None:
        """An evaluation was made, after this iteration."""
        place = {"epoch": epoch, "iteration": iteration}
        line = place | finite(result) | place | {"elapsed_s": round(elapsed_s, 4)}  # whatever a metric is named
        self._said = [one for one in self._said if one["iteration"] == iteration]
        if not any(_says_the_same(one, line) for one in self._said):
            self._said.append(line)
            self._journal.append(line)


def _says_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all but the time is the same, up to rounding on another number of ranks."""
    return tuple(one) == tuple(other) and all(
        name == "elapsed_s" or one[name] == other[name] or _is_close(one[name], other[name]) for name in one
    )


def _is_close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)
