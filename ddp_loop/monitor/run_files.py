"""What a run has logged and printed, read from its folder: texts, images, console output, the ranks' use.

[Note: Foreign files] A run folder may come from elsewhere. Its files are opened without following links, neither of
the file nor of the folder that the run made for it, and only if they are regular. A request names a file by a number
or by a name of a fixed form. Of texts only places are kept, and of the console's output a piece is read, so that no
size of a file matters. An image is sent only if it has the form that `log_image` writes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import CONSOLE, IMAGE_FOLDER, USAGE, bytes_of, opened
from ddp_loop.monitor.run_state import finite
from ddp_loop.monitor.sweep_view import Answer
from ddp_loop.reporting import JsonlTail, count, object_of

READ_S = 0.5  # for one look; long files take several
MOST_ENTRIES = 20_000  # the newest ones
MOST_NAME = 100
MOST_START = 300
MOST_TEXT = 70_000  # letters: of a name, of a text in the list, of a text
PIECE = 1 << 16  # bytes of the console's output in one answer
MOST_IMAGE = 8 << 20
MOST_PIXELS = 1 << 24
IMAGE_FILE = re.compile(rf"{IMAGE_FOLDER}/([0-9a-f]{{8}}-\d{{1,13}}\.png)", re.ASCII)
CONSOLE_FILE = re.compile(r"rank-\d{1,6}|continued", re.ASCII)
_ESCAPES = re.compile(  # of terminals: CSI, OSC with its text, and two-letter ones; C0 and C1 but for tabs and lines
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\x00-\x08\x0b-\x1f\x7f]"
    rb"|\xc2[\x80-\x9f]"
)
_UNFINISHED = re.compile(  # an escape or a letter that is cut in two
    rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]{0,60}|[ -/]*)"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
MEASURES = ("processor_percent", "memory_mib", "gpu_percent", "gpu_memory_mib")
MOST_POINTS = 1000
MOST_RANKS = 64
USAGE_FILE = re.compile(r"rank-(\d{1,6})\.jsonl", re.ASCII)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEAD = struct.pack(">I", 13) + b"IHDR"


@contextmanager
def regular_file(path: Path | str, folder: int | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file, and yield its descriptor and what it is. Links are not followed, pipes are not waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        form = os.fstat(file)
        if not stat.S_ISREG(form.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        yield file, form
    finally:
        os.close(file)


# -- lines with a name: texts and images -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of texts.jsonl or images.jsonl.

    Attributes:
        number: in the file, counted from 0, without lines that are none.
        at, size: its place in the file, in bytes.
        name: of the text or image.
        epoch, iteration: where it was logged.
        start: the start of a text; the file of an image.
        letters: of the text.
        width, height: of the image.
    """

    number: int
    at: int
    size: int
    name: str
    epoch: int | None
    iteration: int
    start: str
    letters: int
    width: int
    height: int


class EntryList(JsonlTail):
    """The lines of a growing file, in their order; lines of a run that was cut back are read again.

    Args:
        path: of the file.
        part: the member of a line that has the text or the file.

    Attributes:
        entries: the newest ones.
        dropped: the number of older ones.
        is_behind: whether there is more to read now.
    """

    def __init__(self, path: Path, part: str) -> None:
        super().__init__(path, follow=False)
        self._part = part

    def _forget(self) -> None:
        super()._forget()
        self.entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self.dropped = 0
        self.is_behind = False

    def look(self) -> None:
        """Read the lines that are new."""
        for update in self.updates(time.monotonic() + READ_S):
            self.is_behind = update.more

    def _take(self, data: bytes) -> list[dict[str, Any]]:
        """Keep the lines' places; no rows."""
        at = self._at
        for line in data[:-1].split(b"\n"):
            entry = None if self._skips else self._entry(at, line)
            self._skips = False
            at += len(line) + 1
            if entry is None:
                self.unreadable += 1
            else:
                self.dropped += len(self.entries) == MOST_ENTRIES
                self.entries.append(entry)
        return []

    def _entry(self, at: int, line: bytes) -> Entry | None:
        found = object_of(line) or {}
        name = found.get("name")
        iteration = count(found.get("iteration"))
        text = found.get(self._part)
        if not isinstance(name, str) or not name or iteration is None or not isinstance(text, str):
            return None
        width, height = (count(found.get(side)) or 0 for side in ("width", "height"))
        start = text[:MOST_START]
        epoch = count(found.get("epoch"))
        return Entry(len(self), at, len(line), name[:MOST_NAME], epoch, iteration, start, len(text), width, height)

    def __len__(self) -> int:
        return self.dropped + len(self.entries)

    def entry(self, number: int) -> Entry | None:
        """Return an entry by its number, counted from 0; None for one that is not there."""
        place = number - self.dropped
        return self.entries[place] if 0 <= place < len(self.entries) else None

    def text_of(self, entry: Entry) -> str | None:
        """Return the whole text of an entry; None if the file is a different one by now."""
        with suppress(OSError), regular_file(self.path) as (file, _):
            text = (object_of(os.pread(file, entry.size, entry.at)) or {}).get(self._part)
            if isinstance(text, str) and text[:MOST_START] == entry.start:
                return text[:MOST_TEXT]
        return None


# -- images ------------------------------------------------------------------------------------------------


def read_image(run: Path, entry: Entry) -> tuple[int, bytes | str]:
    """Return status and the PNG file of an image, or the reason of a refusal."""
    name = IMAGE_FILE.fullmatch(entry.start)
    if name is None:
        return 422, f"{entry.name}: this line of the images does not name an image of the run."
    try:
        with opened(run / IMAGE_FOLDER) as folder:
            data = bytes_of(folder, name[1], MOST_IMAGE)
        _check_png(data)
    except OSError:
        return 404, f"{entry.name}: the image file of step {entry.iteration} is gone."
    except ValueError as error:
        return 422, f"{entry.name}: the image file of step {entry.iteration} {error}, so it is not shown."
    return 200, data


def _check_png(data: bytes) -> None:
    """Raise ValueError unless these are the chunks that `log_image` writes, and not too many pixels."""
    if data[:16] != _SIGNATURE + _HEAD:
        raise ValueError("is not a PNG file")
    at = 8
    kinds = list[bytes]()
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        kinds.append(data[at + 4 : at + 8])
        at += 12 + size
    if at != len(data) or kinds != [b"IHDR", b"IDAT", b"IEND"]:
        raise ValueError("is a damaged PNG file, or one that log_image did not write")
    width, height = struct.unpack(">II", data[16:24])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"has {width} x {height} pixels, and the page shows at most {MOST_PIXELS}")


# -- the console -------------------------------------------------------------------------------------------


def list_console(run: Path) -> list[str]:
    """Return the names of the console's files, the ranks' in their order."""
    names = []
    with suppress(OSError), opened(run / CONSOLE) as folder:
        for name in os.listdir(folder):
            if (stem := name.removesuffix(".log")) != name and CONSOLE_FILE.fullmatch(stem):
                names.append(stem)
    return sorted(names, key=lambda name: (name == "continued", int(name.partition("-")[2] or 0)))


def read_console(run: Path, name: str, first: int | None = None, before: int | None = None) -> Answer:
    """Return a piece of what a rank has printed, without the escapes of terminals.

    Args:
        run: its folder.
        name: of the file, as `list_console` returns it.
        first: the first byte.
        before: the byte after the last one. Without either, the piece is the end of the file.
    """
    if not CONSOLE_FILE.fullmatch(name):
        return 404, "There is no such output."
    try:
        with opened(run / CONSOLE) as folder, regular_file(f"{name}.log", folder) as (file, form):
            return 200, {"name": name, "file": str(form.st_ino), **_piece(file, form.st_size, first, before)}
    except OSError:
        return 404, "There is no such output."


def _piece(file: int, size: int, first: int | None, before: int | None) -> dict[str, Any]:
    end = size if before is None else min(before, size)
    start = min(first, size) if first is not None else max(0, end - PIECE)
    data = os.pread(file, min(PIECE, end - start), start)
    if first is None and start:  # from the beginning of a line, if there is one, or else of a letter
        skipped = data.find(b"\n") + 1 or next((at for at, one in enumerate(data[:4]) if one & 0xC0 != 0x80), 0)
        start += skipped
        data = data[skipped:]
    if before is None and (cut := _UNFINISHED.search(data[-80:])) and len(cut[0]) < len(data):
        data = data[: -len(cut[0])]  # the next piece has the rest
    return {"start": start, "end": start + len(data), "size": size, "text": clean(data)}


def clean(data: bytes) -> str:
    """Return printed bytes as text, without escapes and control characters; other bytes become replacement marks."""
    return _ESCAPES.sub(b"", data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).decode(errors="replace")


def last_line(run: Path, file_name: str) -> str | None:
    """Return the last line that is not empty, of a file of the console."""
    status, found = read_console(run, file_name.removesuffix(".log"))
    if status != 200 or not isinstance(found, dict):
        return None
    lines = [line for line in found["text"].splitlines() if line.strip()]
    return lines[-1][:300] if lines else None


# -- the use of processor, memory and GPU ------------------------------------------------------------------


class UsageSeries:
    """What one rank has used. When it has too many points, each two become one: their mean, at the later time.

    Attributes:
        points: seconds since the run began, rising, and the measures; NaN where a line has none.
    """

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self._every = 1
        self._open: list[list[float]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; one without a time is left out, and later ones are removed."""
        point = [nan if (value := finite(line.get(name))) is None else value for name in ("elapsed_s", *MEASURES)]
        if isnan(point[0]):
            return
        while self.points and self.points[-1][0] >= point[0]:
            self.points.pop()
        self._open.append(point)
        if len(self._open) < self._every:
            return
        self.points.append(_merged(self._open))
        self._open = []
        if len(self.points) >= MOST_POINTS:
            self._every *= 2
            self.points = [_merged(self.points[at : at + 2]) for at in range(0, MOST_POINTS, 2)]

    def shown(self) -> dict[str, Any]:
        """Return the points as JSON values; a measure that no line has is left out."""
        elapsed, *measures = ([point[place] for point in self.points] for place in range(1 + len(MEASURES)))
        return {
            "elapsed_s": elapsed,
            **{
                name: [None if isnan(one) else round(one, 1) for one in column]
                for name, column in zip(MEASURES, measures, strict=True)
                if not all(map(isnan, column))
            },
        }


def _merged(points: list[list[float]]) -> list[float]:
    """The means of neighbours' measures, at the time of the last one."""
    _, *measures = zip(*points, strict=True)
    return [points[-1][0], *map(_mean, measures)]


def _mean(values: Sequence[float]) -> float:
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
            for update in tail.updates(deadline):
                if update.restarted:
                    series = UsageSeries()
                for line in update.rows:
                    series.add(line)
            is_behind |= update.more
            self._ranks[rank] = (tail, series)
        return {
            "is_behind": is_behind,
            "ranks": [{"rank": rank, **self._ranks[rank][1].shown()} for rank in there],
        }
