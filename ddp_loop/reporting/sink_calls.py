"""The calls of a loop's sinks and other receivers of rows; what a sink is: `ddp_loop.sinks.Sink`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_loop.distributed import format_error

OnRow = Callable[[dict[str, Any]], None]
Receivers = OnRow | Sequence[OnRow] | None


@dataclass(frozen=True, slots=True)
class RunStart:
    """The facts that a sink gets before the first row.

    Attributes:
        folder: of the run; None without one.
        config: the hyper-parameters, flat, by name.
        iteration: the step after which the run resumes; 0 for a new run.
        name: of the run: its folder's, else the script's.
    """

    folder: Path | None
    config: Mapping[str, Any]
    iteration: int
    name: str


def without_sinks(receivers: Sequence[OnRow]) -> list[OnRow]:
    """Return the receivers that are plain callables."""
    return [one for one in receivers if not _is_sink(one)]


def all_of(receivers: Receivers) -> list[OnRow]:
    """Return receivers as a list.

    Raises:
        TypeError: one cannot be called.
    """
    given = [] if receivers is None else list(receivers) if isinstance(receivers, Sequence) else [receivers]
    for one in given:
        if not callable(one):
            raise TypeError(
                f"on_row must be a callable that takes a row, or a list of callables. Got {type(one).__name__}. Pass "
                "on_row=print, or on_row=[csv_sink(path), tensorboard_sink(folder)]."
            )
    return given


def _is_sink(receiver: OnRow) -> bool:
    return hasattr(receiver, "begin")


def _nothing(*_: object) -> None:
    """The method of a receiver that has none."""


class SinkCalls:
    """Calls the receivers of a loop, in order, on rank 0.

    Args:
        receivers: sinks and plain callables.
        say: prints a line.
    """

    def __init__(self, receivers: Sequence[OnRow], say: Callable[[str], None]) -> None:
        self._receivers = list(receivers)
        self._say = say

    def __bool__(self) -> bool:
        return bool(self._receivers)

    def row(self, row: dict[str, Any]) -> None:
        """Give every receiver a row."""
        for one in tuple(self._receivers):
            if _is_sink(one):
                self._call(one, "__call__", row.copy())
            else:
                one(row.copy())

    def call(self, method: str, *arguments: object) -> None:
        """Call a method of all sinks that have it."""
        for one in filter(_is_sink, tuple(self._receivers)):
            self._call(one, method, *arguments)

    def flush(self) -> None:
        """Let all receivers write what they have."""
        for one in without_sinks(self._receivers):
            getattr(one, "flush", _nothing)()
        self.call("flush")

    def end_loop(self) -> None:
        """Close plain receivers; sinks get what follows the loop, too."""
        with ExitStack() as ending:
            ending.callback(self.call, "flush")
            for one in without_sinks(self._receivers):
                ending.callback(getattr(one, "close", _nothing))

    def close(self, error: BaseException | None) -> None:
        """Close the sinks, of a script that an exception ended, or None."""
        self.call("ended", error)
        self.call("close")
        self._receivers.clear()

    def _call(self, sink: OnRow, method: str, *arguments: object) -> None:
        try:
            getattr(sink, method, _nothing)(*arguments)
        except Exception as error:  # a record elsewhere is not worth a run
            self._receivers.remove(sink)
            name = type(sink).__name__.lstrip("_")
            what = " ".join(format_error(error).split())[:500]
            self._say(f"ddp_loop: {name} gets nothing more, since it failed: {what} Training continues.")
            if method != "close":
                with suppress(Exception):  # the first error says it
                    getattr(sink, "close", _nothing)()
