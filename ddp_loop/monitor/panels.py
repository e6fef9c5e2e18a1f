"""The panels of a run's card: console, usage, texts and images. See [Note: Foreign files]."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import IMAGES, TEXTS
from ddp_loop.monitor.run_files import EntryList, UsageView, list_console, read_console, read_image
from ddp_loop.monitor.sweep_view import Answer, Refused

MOST_LISTED = 50
MOST_NAMES = 200
MOST_STEPS = 5000  # texts in one answer; names; images of one name


class RunPanels:
    """Answers the requests for the panels of a run. Several threads may use it.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._turn = threading.Lock()
        self._texts = EntryList(run / TEXTS, "text")
        self._images = EntryList(run / IMAGES, "file")
        self._usage = UsageView(run)

    def about(self) -> dict[str, Any]:
        """Return which panels the run's card has, as JSON values."""
        with self._turn:
            self._texts.look()
            self._images.look()
            return {
                "console": list_console(self._run),
                "usage": len(self._usage.ranks()),
                "texts": len(self._texts),
                "images": len(self._images),
            }

    def answer(self, what: str, asked: Mapping[str, str]) -> Answer:
        """Return status and body of the answer to a request for a panel.

        Args:
            what: "console", "usage", "texts" or "images".
            asked: the parameters of the request.
        """
        numbers = {name: whole_number(name, asked[name]) for name in ("first", "before", "number") if name in asked}
        if what == "console":
            return read_console(self._run, asked.get("name", ""), numbers.get("first"), numbers.get("before"))
        with self._turn:
            if what == "usage":
                return 200, self._usage.look()
            if what == "images":
                self._images.look()
                return 200, images_by_name(self._images)
            self._texts.look()
            if "number" in numbers:
                entry = self._texts.entry(numbers["number"])
                text = None if entry is None else self._texts.text_of(entry)
                if text is None:
                    return 404, "There is no such text."
                return 200, {"number": numbers["number"], "text": text}
            return 200, newest_texts(self._texts, asked.get("name"), numbers.get("before"))

    def image(self, number: str) -> Answer:
        """Return status and body of the answer to a request for an image: a PNG file, or the reason of a refusal."""
        place = whole_number("number", number)
        with self._turn:
            self._images.look()
            entry = self._images.entry(place)
        return (404, "There is no such image.") if entry is None else read_image(self._run, entry)


def whole_number(name: str, text: str) -> int:
    """Return a parameter of a request.

    Raises:
        Refused: it is no whole number.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 13):
        raise Refused(400, f"{name} must be a whole number.")
    return int(text)


def newest_texts(texts: EntryList, name: str | None, before: int | None) -> dict[str, Any]:
    """Return the starts of the newest texts, the newest first.

    Args:
        texts: of the run.
        name: of the texts; None for all.
        before: a number; only older texts are returned.
    """
    many = Counter(entry.name for entry in texts.entries)
    asked = [
        entry
        for entry in reversed(texts.entries)
        if (name is None or entry.name == name) and (before is None or entry.number < before)
    ]
    parts = ("number", "name", "epoch", "iteration", "start", "letters")
    return {
        "names": [[one, count] for one, count in list(many.items())[:MOST_NAMES]],
        "texts": [{part: getattr(entry, part) for part in parts} for entry in asked[:MOST_LISTED]],
        "has_older": len(asked) > MOST_LISTED,
        "dropped": texts.dropped,
        "is_behind": texts.is_behind,
        "unreadable": texts.unreadable,
    }


def images_by_name(images: EntryList) -> dict[str, Any]:
    """Return the numbers, steps and sizes of the newest images, by name; the name that was logged last is first."""
    found: dict[str, list[list[int]]] = {}
    left_out = images.dropped
    for entry in reversed(images.entries):
        one = [entry.number, entry.iteration, entry.width, entry.height]
        steps = found.setdefault(entry.name, []) if entry.name in found or len(found) < MOST_NAMES else None
        if steps is None or len(steps) == MOST_STEPS:
            left_out += 1
        elif not steps or steps[-1][1] != entry.iteration:  # of a step that was written twice, the later one
            steps.append(one)
    return {
        "names": [{"name": name, "images": steps[::-1]} for name, steps in found.items()],
        "left_out": left_out,
        "is_behind": images.is_behind,
        "unreadable": images.unreadable,
    }
