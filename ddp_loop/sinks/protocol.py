"""The protocol of a sink, which takes all that a run reports, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ddp_loop.reporting import Pixels, RunStart

__all__ = ["RunStart", "Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes all that a run reports, on rank 0: an entry of `Loop(on_row=[...])` that has `begin`.

    An exception in one of these methods does not end the run: one line names it, and the sink gets nothing more. A
    plain callable gets the rows alone, and its exception ends the run.
    """

    def begin(self, run: RunStart) -> None:
        """Called before anything else, also when a run resumes.

        Args:
            run: the run; everything after its iteration is written again.
        """

    def __call__(self, row: dict[str, Any]) -> None:
        """Take the row of an update: epoch, iteration, samples, loss, metrics, samples_per_s, elapsed_s, ...

        Args:
            row: by name.
        """

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Take the result of `evaluate`: epoch, iteration, metrics, samples, elapsed_s.

        Args:
            line: by name; None for a value that is not finite.
        """

    def logged(self, line: Mapping[str, Any]) -> None:
        """Take the values of `Loop.log` in one step: epoch, iteration, values, elapsed_s.

        Args:
            line: by name.
        """

    def log_text(self, name: str, text: str, iteration: int) -> None:
        """Take a text of `Loop.log_text`.

        Args:
            name, text, iteration: as logged.
        """

    def log_image(self, name: str, pixels: Pixels, iteration: int) -> None:
        """Take an image of `Loop.log_image`.

        Args:
            name, pixels, iteration: as logged; pixels of 8 bits, shape (height, width, 3).
        """

    def log_table(self, name: str, table: Mapping[str, Any], iteration: int) -> None:
        """Take a table of `Loop.log_table`.

        Args:
            name, table, iteration: as logged; the table has rows, columns and values.
        """

    def flush(self) -> None:
        """Write all that came so far; called before each checkpoint, and at the end of the loop."""

    def ended(self, error: BaseException | None) -> None:
        """Take how the script left the world, just before `close`.

        Args:
            error: the exception that ended it; None after its end or a stop.
        """

    def close(self) -> None:
        """Write all that came so far, and close; called when the world is left."""
