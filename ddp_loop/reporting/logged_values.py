"""What a script logs beside the rows of a run: evaluations, numbers, texts, images, tables; in its folder, in sinks.

[Note: Once] The script of a resumed run repeats what follows the checkpoint's step, and logs it again. Lines of later
steps are cut off, and of the checkpoint's own step a value is left out that the file has already. An evaluation with
the results of an earlier one of its iteration is not written again either.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.checkpoint import EVALUATIONS, IMAGE_FOLDER, IMAGES, LOGGED, TEXTS
from ddp_loop.reporting.images import Pixels, png
from ddp_loop.reporting.jsonl import CHUNK, JsonlWriter, RunFiles, is_number, line_of
from ddp_loop.reporting.sink_calls import SinkCalls
from ddp_loop.reporting.tables import tables_of

_REDONE = 1e-6  # the rounding of float32, by which sums on different numbers of ranks differ
MOST_TEXT = 65_536  # letters of a logged text
_OF_TABLES = ("name", "iteration", "rows", "columns", "values")
Logged = float | HostCopy


@dataclass(slots=True)
class _Line:
    """The values that were logged in one step."""

    place: dict[str, int]
    elapsed_s: float
    values: dict[str, Logged]

    def is_ready(self) -> bool:
        return all(isinstance(one, float) or one.ready() for one in self.values.values())

    def texts(self, values: dict[str, float]) -> Iterator[str]:
        """A line of the file with these values; several where it would be longer than readers take."""
        text = line_of(self.place, values, self.elapsed_s)
        if len(text) <= CHUNK or len(values) == 1:
            yield text
            return
        items = list(values.items())
        middle = len(items) // 2
        yield from self.texts(dict(items[:middle]))
        yield from self.texts(dict(items[middle:]))


class LoggedValues:
    """Takes what the script logs, on rank 0; values of a device are written when they have arrived.

    Args:
        run: opens the files.
        sinks: get everything, too.
        began: when the run began, by the monotonic clock.
        show: called with the values of a line, and the epoch that they belong to.

    Raises:
        OSError: the file of evaluations cannot be read or written.

    Attributes:
        run: of the arguments.
        files: what is written, by name.
    """

    def __init__(
        self,
        run: RunFiles,
        sinks: SinkCalls,
        began: float,
        show: Callable[[Mapping[str, float], int], None] | None = None,
    ) -> None:
        self.run = run
        self._sinks = sinks
        self._began = began
        self._show = show
        self._waiting: deque[_Line] = deque()
        self._is_open = False  # whether the last one may get more values
        self._has_shared = False  # whether two evaluations of a step shared a metric's name, which is said once
        self.files = {EVALUATIONS: run.open(EVALUATIONS, "drop")}
        self.files |= {name: _opened(run, name) for name in (LOGGED, TEXTS, IMAGES)}
        self._tables: list[dict[str, Any]] = []  # of the checkpoint's step, by an earlier process
        if run.folder is not None:
            _remove_later_images(run.folder / IMAGE_FOLDER, run.after)
            self._tables = tables_of(run.folder, run.after)

    def add(self, epoch: int, iteration: int, values: dict[str, Logged]) -> None:
        """Add values of a step; a later value of the same name and step replaces the earlier one."""
        place = {"epoch": epoch, "iteration": iteration}
        if self._is_open and self._waiting[-1].place == place:
            self._waiting[-1].values.update(values)
            return
        self._waiting.append(_Line(place, time.monotonic() - self._began, values))
        self._is_open = True

    def end_line(self, iteration: int | None = None) -> None:
        """Take the line of the current step as complete; given an iteration, only a line of an earlier one."""
        if iteration is None or not self._waiting or self._waiting[-1].place["iteration"] < iteration:
            self._is_open = False

    def flush_ready(self) -> None:
        """Hand on the lines of earlier steps whose values have arrived."""
        while len(self._waiting) > self._is_open and self._waiting[0].is_ready():
            self._hand_on(self._waiting.popleft())

    def flush_all(self) -> None:
        """Wait for all values, hand them on and write them."""
        self.end_line()
        while self._waiting:
            self._hand_on(self._waiting.popleft())
        self.write()

    def write(self) -> None:
        """Write the lines that were handed on."""
        for file in self.files.values():
            file.flush()

    def close(self) -> None:
        """Write all, and close the files."""
        self.flush_all()
        for file in self.files.values():
            file.close()

    def _hand_on(self, line: _Line) -> None:
        values = {
            name: one if isinstance(one, float) else float(one.wait().item()) for name, one in line.values.items()
        }
        if line.place["iteration"] == self.run.after:  # see [Note: Once]
            known = {name: one for before in self.files[LOGGED].known for name, one in before.items()}
            values = {
                name: one
                for name, one in values.items()
                if name not in known or not _is_same(one if isfinite(one) else None, known[name])
            }
            if not values:
                return
        for text in line.texts(values):
            self.files[LOGGED].add(text)
        if self._sinks:
            self.write()  # before a sink has it: what a killed run gave to sinks is known when it resumes
            self._sinks.call("logged", line.place | values | {"elapsed_s": round(line.elapsed_s, 4)})
        if self._show is not None:
            self._show(values, line.place["epoch"])

    # -- evaluations, texts, images, tables --------------------------------------------------------------------

    def add_evaluation(self, epoch: int, iteration: int, result: Mapping[str, float]) -> None:
        """Write an evaluation that was made after this iteration: {epoch, iteration, <metrics>, samples, elapsed_s}."""
        place = {"epoch": epoch, "iteration": iteration}
        values = {name: value if isfinite(value) else None for name, value in result.items()}
        elapsed_s = round(time.monotonic() - self._began, 4)
        line = place | values | place | {"elapsed_s": elapsed_s}  # metrics cannot replace the place
        known = self.files[EVALUATIONS].known
        known[:] = [one for one in known if one["iteration"] == iteration]
        if any(_is_repeated(one, line) for one in known):
            return
        shared = [name for name in result if name != "samples" and any(name in one for one in known)]
        if shared and not self._has_shared:
            self._has_shared = True
            self.run.warn(
                f"Several evaluations of step {iteration} have a metric {shared[0]}. Tables, the page and sweeps take "
                f"the last one's. Give the others names of their own, as evaluate(..., train_{shared[0]}=...)."
            )
        known.append(line)
        self._write_line(EVALUATIONS, line)
        self._sinks.call("evaluated", line)

    def add_text(self, epoch: int, iteration: int, name: str, text: str) -> None:
        """Write a text; a long one is cut, with a warning."""
        if len(text) > MOST_TEXT:
            self.run.warn(f"The text {name} has {len(text):,} characters and is cut after {MOST_TEXT:,}.")
            text = f"{text[:MOST_TEXT]}\n[cut: {len(text):,} characters]"
        text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no letter for others
        self._add_once(TEXTS, epoch, iteration, {"name": name, "text": text}, "log_text", name, text, iteration)

    def add_image(self, epoch: int, iteration: int, name: str, pixels: Pixels) -> None:
        """Write an image, shape (height, width, 3)."""
        file = f"{IMAGE_FOLDER}/{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]}-{iteration}.png"
        height, width, _ = pixels.shape
        values = {"name": name, "file": file, "width": width, "height": height}
        if self.run.folder is not None:
            path = self.run.folder / file
            try:
                path.parent.mkdir(exist_ok=True)
                temporary = path.with_name(f".{path.name}-{os.getpid()}")
                temporary.write_bytes(png(pixels))
                temporary.replace(path)
            except OSError as error:
                self.run.warn(f"{path} cannot be written: {error.strerror or error}. Training continues.")
                return
        self._add_once(IMAGES, epoch, iteration, values, "log_image", name, pixels, iteration)

    def add_table(self, table: Mapping[str, Any]) -> None:
        """Give the sinks a table, unless the resumed run gave it before; its file is written elsewhere."""
        if any(all(one.get(key) == table[key] for key in _OF_TABLES) for one in self._tables):
            return
        self._sinks.call("log_table", table["name"], table, table["iteration"])

    def _add_once(self, file: str, epoch: int, iteration: int, values: dict[str, Any], *call: Any) -> None:
        """Write a line and make a call of the sinks, unless the resumed run did so before. See [Note: Once]."""
        same = {"iteration": iteration, **values}
        if any(same.items() <= known.items() for known in self.files[file].known):
            return
        elapsed_s = round(time.monotonic() - self._began, 4)
        self._write_line(file, {"epoch": epoch, "iteration": iteration, "elapsed_s": elapsed_s, **values})
        self._sinks.call(*call)
        self._sinks.call("flush")

    def _write_line(self, name: str, line: Mapping[str, Any]) -> None:
        self.files[name].add(json.dumps(line) + "\n")
        self.files[name].flush()


def _is_same(one: object, other: object) -> bool:
    """Whether two values are the same, up to the rounding on different numbers of ranks; null is not finite."""
    if is_number(one) and is_number(other):
        return isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)
    return one == other


def _is_repeated(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations have the same results."""
    return tuple(one) == tuple(other) and all(name == "elapsed_s" or _is_same(one[name], other[name]) for name in one)


def _opened(run: RunFiles, name: str) -> JsonlWriter:
    try:
        return run.open(name, "keep")
    except OSError as error:
        run.warn(f"{error} Training continues without it.")
        return JsonlWriter(None, run.after, run.warn, "keep")


def _remove_later_images(folder: Path, after: int) -> None:
    """Remove the images of steps that a resumed run makes again."""
    with suppress(OSError):
        for path in folder.glob("*-*.png"):
            step = path.stem.rpartition("-")[2]
            if step.isdecimal() and int(step) > after:
                path.unlink()


def _has_a_number(value: torch.Tensor) -> bool:
    """Whether a tensor's elements can be read as real numbers."""
    return not value.dtype.is_complex and value.layout is torch.strided and not value.is_meta


def as_logged(name: object, value: Any) -> Logged:
    """Return a value of `Loop.log` as a number, or as its copy on the way from a device.

    Raises:
        ValueError: a name or a value of another kind.
    """
    if type(value) is float:
        return value
    if isinstance(value, int | float | np.bool_ | np.integer | np.floating):
        with suppress(OverflowError):  # a whole number may be larger than each float
            return float(value)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.reshape(()))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and _has_a_number(value):
        one = value.detach().reshape(())
        return HostCopy(one) if is_asynchronous(one) else float(one)
    shape = getattr(value, "shape", None)
    what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided):
        what = f"{value.layout} {what} on {value.device}"
    what = "a whole number beyond 1.8e308" if isinstance(value, int) else what
    raise ValueError(f"loop.log takes numbers. Got {what} for {name!r}. Pass a number, or a tensor of one element.")
