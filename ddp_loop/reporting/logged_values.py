"""What a script logs beside the rows of a run: numbers, texts, images, tables; in the run folder and in the sinks.

[Note: Once] The script of a resumed run repeats what follows the checkpoint's step, and logs it again. Lines of later
steps are cut off, and of the checkpoint's own step a value is left out that the file has already.
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
from functools import lru_cache
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import HostCopy, is_asynchronous
from ddp_loop.checkpoint import IMAGE_FOLDER, IMAGES, LOGGED, TEXTS, FileSum
from ddp_loop.reporting.images import png
from ddp_loop.reporting.jsonl import JsonlWriter
from ddp_loop.reporting.jsonl_tail import CHUNK, JsonlTail
from ddp_loop.reporting.sink_calls import SinkCalls
from ddp_loop.reporting.tables import tables_of

MOST_TEXT = 65_536  # letters of a logged text
_PLACE = ("epoch", "iteration", "elapsed_s")
_OF_TABLES = ("name", "iteration", "rows", "columns", "values")
_REDONE = 1e-6  # the rounding of float32, by which sums on different numbers of ranks differ
Logged = float | HostCopy


@dataclass(slots=True)
class _Line:
    """The values that were logged in one step."""

    epoch: int
    iteration: int
    elapsed_s: float
    values: dict[str, Logged]

    def is_ready(self) -> bool:
        return all(isinstance(one, float) or one.ready() for one in self.values.values())


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """The format string of a line with these values."""
    fields = "".join(f"{json.dumps(name).replace('%', '%%')}: %s, " for name in names)
    return f'{{"epoch": %d, "iteration": %d, {fields}"elapsed_s": %.4f}}\n'


def _number(value: float) -> str:
    return repr(value) if isfinite(value) else "null"


def _texts_of(line: _Line, values: dict[str, float]) -> Iterator[str]:
    """A line of the file; several where it would be longer than readers take."""
    names = tuple(values)
    numbers = map(_number, values.values())
    text = _form(names) % (line.epoch, line.iteration, *numbers, line.elapsed_s)
    if len(text) <= CHUNK or len(names) == 1:
        yield text
        return
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        yield from _texts_of(line, {name: values[name] for name in half})


def is_same(one: float | None, other: float | None) -> bool:
    """Whether two values are the same, up to the rounding on different numbers of ranks; null is not finite."""
    if one is None or other is None:
        return one is other
    return one == other or isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)


class LazyFile:
    """A JSON Lines file of a run folder that comes with its first line.

    Args:
        path: of the file.
        after: lines of later iterations are cut off.
        warn: called with a message when lines cannot be written, and when they can again, and about damage.
        sum_before: the file's sum in the checkpoint; None if that has none.

    Attributes:
        known: the lines of the iteration from which the run resumes.
    """

    def __init__(self, path: Path, after: int, warn: Callable[[str], None], sum_before: FileSum | None = None) -> None:
        self._path = path
        self._after = after
        self._warn = warn
        self._sum_before = sum_before
        self._file: JsonlWriter | None = None
        self._has_failed = False
        self.known: list[dict[str, Any]] = []
        if path.exists() or (sum_before is not None and sum_before[0] > 0):
            self._open()
            self.known = [line for line in _all_lines(path) if line.get("iteration") == after]

    def _open(self) -> None:
        try:
            self._file = JsonlWriter(self._path, self._after, self._warn, "keep", sum_before=self._sum_before)
            if self._file.notice:
                self._warn(f"{self._path.parent}: {self._file.notice}")
        except OSError as error:
            self._has_failed = True
            self._warn(f"{self._path} cannot be written: {error.strerror or error}. Training continues without it.")

    @property
    def sum(self) -> FileSum | None:
        """The number of bytes of the lines in the file, and their SHA-256; None without a file."""
        return None if self._file is None else self._file.sum

    def add(self, line: str) -> None:
        """Add a line, which the next `flush` writes."""
        if self._file is None and not self._has_failed:
            self._open()
        if self._file is not None:
            self._file.add(line)

    def flush(self) -> None:
        """Write the added lines."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write the added lines, and close the file."""
        if self._file is not None:
            self._file.close()


def _all_lines(path: Path) -> Iterator[dict[str, Any]]:
    tail = JsonlTail(path)
    more = True
    while more:
        update = tail.poll()
        yield from update.rows
        more = update.more


class LoggedValues:
    """Takes what the script logs, on rank 0; values of a device are written when they have arrived.

    Args:
        folder: of the run; None without one.
        after: the iteration that the run resumes from.
        sinks: get everything, too.
        warn: called with a message when a file cannot be written.
        began: when the run began, by the monotonic clock.
        show: called with the values of a line, and the epoch that they belong to.
        sums: of the files in the checkpoint, by name.
    """

    def __init__(
        self,
        folder: Path | None,
        after: int,
        sinks: SinkCalls,
        warn: Callable[[str], None],
        began: float,
        show: Callable[[Mapping[str, float], int], None] | None = None,
        sums: Mapping[str, FileSum] | None = None,
    ) -> None:
        self._folder = folder
        self._after = after
        self._sinks = sinks
        self._warn = warn
        self._began = began
        self._show = show
        self._open: _Line | None = None
        self._waiting: deque[_Line] = deque()
        self._files: dict[str, LazyFile] = {}
        if folder is not None:
            names = (LOGGED, TEXTS, IMAGES)
            before = sums or {}
            self._files = {name: LazyFile(folder / name, after, warn, before.get(name)) for name in names}
            _remove_later_images(folder / IMAGE_FOLDER, after)
        self._tables = [] if folder is None else tables_of(folder, after)
        known = self._files[LOGGED].known if self._files else []
        self._known: dict[str, float | None] = {
            name: one for line in known for name, one in line.items() if name not in _PLACE
        }

    @property
    def sums(self) -> dict[str, FileSum]:
        """The sums of the files that there are, by name."""
        return {name: file.sum for name, file in self._files.items() if file.sum is not None}

    def add(self, epoch: int, iteration: int, values: dict[str, Logged]) -> None:
        """Add values of a step; a later value of the same name and step replaces the earlier one."""
        line = self._open
        if line is not None and line.iteration == iteration and line.epoch == epoch:
            line.values.update(values)
            return
        self.end_line()
        self._open = _Line(epoch, iteration, time.monotonic() - self._began, values)

    def end_line(self) -> None:
        """Take the line of the current step as complete."""
        if self._open is not None:
            self._waiting.append(self._open)
            self._open = None

    def flush_ready(self) -> None:
        """Hand on the lines of earlier steps whose values have arrived."""
        waiting = self._waiting
        while waiting and waiting[0].is_ready():
            self._hand_on(waiting.popleft())

    def flush_all(self) -> None:
        """Wait for all values, hand them on and write them."""
        self.end_line()
        while self._waiting:
            self._hand_on(self._waiting.popleft())
        self.write()

    def write(self) -> None:
        """Write the lines that were handed on."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Write all, and close the files."""
        self.flush_all()
        for file in self._files.values():
            file.close()

    def _hand_on(self, line: _Line) -> None:
        values = {
            name: one if isinstance(one, float) else float(one.wait().item()) for name, one in line.values.items()
        }
        if line.iteration == self._after and self._known:  # see [Note: Once]
            values = {
                name: one
                for name, one in values.items()
                if name not in self._known or not is_same(one if isfinite(one) else None, self._known[name])
            }
            if not values:
                return
        if self._files:
            for text in _texts_of(line, values):
                self._files[LOGGED].add(text)
        if self._sinks:
            self.write()  # before a sink has it: what a killed run gave to sinks is known when it resumes
            place = {"epoch": line.epoch, "iteration": line.iteration}
            self._sinks.call("logged", place | values | {"elapsed_s": round(line.elapsed_s, 4)})
        if self._show is not None:
            self._show(values, line.epoch)

    # -- texts, images, tables ---------------------------------------------------------------------------------

    def add_text(self, epoch: int, iteration: int, name: str, text: str) -> None:
        """Write a text; a long one is cut, with a warning."""
        if len(text) > MOST_TEXT:
            self._warn(f"The text {name} has {len(text):,} characters and is cut after {MOST_TEXT:,}.")
            text = f"{text[:MOST_TEXT]}\n[cut: {len(text):,} characters]"
        text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no letter for others
        line = self._line(epoch, iteration, {"name": name, "text": text})
        if self._add_once(TEXTS, line, ("name", "text")):
            self._sinks.call("log_text", name, text, iteration)
            self._sinks.call("flush")

    def add_image(self, epoch: int, iteration: int, name: str, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Write an image, shape (height, width, 3)."""
        file = f"{IMAGE_FOLDER}/{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]}-{iteration}.png"
        height, width, _ = pixels.shape
        line = self._line(epoch, iteration, {"name": name, "file": file, "width": width, "height": height})
        if self._folder is not None:
            path = self._folder / file
            try:
                path.parent.mkdir(exist_ok=True)
                temporary = path.with_name(f".{path.name}-{os.getpid()}")
                temporary.write_bytes(png(pixels))
                temporary.replace(path)
            except OSError as error:
                self._warn(f"{path} cannot be written: {error.strerror or error}. Training continues.")
                return
        if self._add_once(IMAGES, line, ("name", "file")):
            self._sinks.call("log_image", name, pixels, iteration)
            self._sinks.call("flush")

    def add_table(self, table: Mapping[str, Any]) -> None:
        """Give the sinks a table, unless the resumed run gave it before; its file is written elsewhere."""
        if any(all(one.get(key) == table[key] for key in _OF_TABLES) for one in self._tables):
            return
        self._sinks.call("log_table", table["name"], table, table["iteration"])

    def _line(self, epoch: int, iteration: int, values: dict[str, Any]) -> dict[str, Any]:
        elapsed_s = round(time.monotonic() - self._began, 4)
        return {"epoch": epoch, "iteration": iteration, "elapsed_s": elapsed_s, **values}

    def _add_once(self, name: str, line: dict[str, Any], keys: tuple[str, ...]) -> bool:
        """Write a line unless the resumed run wrote it before; returns whether it was new. See [Note: Once]."""
        file = self._files.get(name)
        if file is None:
            return True
        if any(all(one.get(key) == line[key] for key in ("iteration", *keys)) for one in file.known):
            return False
        file.add(json.dumps(line) + "\n")
        file.flush()
        return True


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
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
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
