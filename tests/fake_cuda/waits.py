"""The waits of the host for a fake device, each with its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
OWN = tuple(str(HERE / f"{name}.py") for name in ("cuda", "kernels", "npu", "waits"))
OF_LAST = "of the last launch"
_listeners: list[Callable[[str, str], None]] = []


def place() -> str:
    """The line of Python outside of torch that launched the kernel at hand; a backward's kernels have none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and not path.startswith(OWN) and "importlib" not in path:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "in a backward"


def tell(what: str, where: str) -> None:
    """Tell all who count of a wait."""
    for listener in _listeners:
        listener(what, where)


class Waits:
    """The waits of the host inside a block, as (what it did, where).

    Args:
        events: whether looks at an event count where nothing was launched after it, so that a wait for it is a wait for
            all work of its stream.
    """

    def __init__(self, *, events: bool = False) -> None:
        self.found: list[tuple[str, str]] = []
        self._events = events

    def _note(self, what: str, where: str) -> None:
        if self._events or not what.endswith(OF_LAST):
            self.found.append((what, where))

    def __enter__(self) -> Waits:
        _listeners.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _listeners.remove(self._note)
