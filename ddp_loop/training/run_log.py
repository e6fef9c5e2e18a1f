"""What the script logs with a loop, beside the rows of its steps: numbers, texts, images, tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ddp_loop.checkpoint import REPAIR, Checkpointer, explained, is_running
from ddp_loop.data import LoopPosition
from ddp_loop.distributed import World, format_error
from ddp_loop.reporting import Labels, LoggedValues, Reporter, as_logged, as_pixels, make_table, write_table

RESERVED = frozenset({"epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"})  # a line's own columns
_MOST_LETTERS = 100


def check_name(name: object, *, is_column: bool = False) -> str:
    """Return the name of something that is logged.

    Args:
        name: of the number, the text or the image.
        is_column: it names a value of a line of `logged.jsonl`, which has columns of its own.

    Raises:
        ValueError: it is none, or that of such a column.
    """
    if not (isinstance(name, str) and 0 < len(name) <= _MOST_LETTERS and name.isprintable()):
        what = f"{name!r:.60}" if isinstance(name, str) else type(name).__name__
        raise ValueError(f"The name of what is logged has 1 to {_MOST_LETTERS} printable letters. Got {what}.")
    if is_column and name in RESERVED:
        raise ValueError(
            f"loop.log cannot take the name {name!r}. {', '.join(sorted(RESERVED))} are columns of each line of "
            "logged.jsonl. Take another name."
        )
    return name


class RunLog:
    """Logs what a script finds beside the rows of its steps; its methods are those of `Loop`.

    What is logged belongs to the current step, after the loop to its last one. It goes to the run folder, the
    terminal, the page, the pictures and the sinks of `on_row`; without any of them it goes nowhere.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.
        report: opens the files.
    """

    def __init__(self, world: World, where: LoopPosition, checkpointer: Checkpointer | None, report: Reporter) -> None:
        self._world = world
        self._where = where
        self._checkpointer = checkpointer
        self._report = report
        self.has_ended = False  # another run may have taken the folder

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, over: Literal["ranks"] | None = None, **more: Any
    ) -> None:
        """Log numbers of the current step, such as a validation score or a second loss.

            loop.log(f1=score)
            loop.log({"generator/loss": loss}, over="ranks")

        A later value of the same name and step replaces an earlier one. Values on a GPU are not waited for. Without
        `over` every rank may call this, and rank 0's values count.

        Args:
            values: by name, for names that are no Python names; numbers, or tensors and arrays of one element.
            over: "ranks" logs the mean over all ranks, (1/N) sum_r(value_r). Every rank must call this then.
            more: further values by name.

        Raises:
            ValueError: a name or a value of another kind, or names that differ between ranks; nothing is logged.
            PeerFailed: over ranks, another rank has such a problem.
        """
        if values is not None:
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"loop.log takes values by name. Got {type(values).__name__} without one. Call "
                    "loop.log(name=value), or loop.log({name: value})."
                )
            more = {**values, **more}
        if over is not None:
            more = self._mean(more, over)
        elif self._world.rank != 0:
            return
        logged = {check_name(name, is_column=True): as_logged(name, value) for name, value in more.items()}
        if (target := self._target()) is not None and logged:
            target.add(self._where.epoch, self._where.iteration, logged)
            if self._report.rows is None:  # after the loop nothing hands it on
                target.flush_all()

    def _mean(self, values: dict[str, Any], over: object) -> dict[str, Any]:
        """The means over all ranks. Every rank must call this."""
        problem: Exception | None = None
        numbers: list[float] = []
        try:
            if over != "ranks":
                raise ValueError(f'over must be "ranks", or None for the value of rank 0. Got {over!r}.')
            for name, value in values.items():
                one = as_logged(check_name(name, is_column=True), value)
                numbers.append(one if isinstance(one, float) else float(one.wait().item()))
        except ValueError as error:
            problem = error
        self._world.raise_if_any_failed(problem)
        self._world.require_equal("the names in loop.log(over=...)", list(values))
        total = self._world.sum(torch.tensor(numbers, dtype=torch.float64)) / self._world.size
        return dict(zip(values, total.tolist(), strict=True))

    def _target(self) -> LoggedValues | None:
        """What takes it, on rank 0; None after the loop if another process runs in the folder."""
        logged = self._report.logged
        checkpointer = self._checkpointer
        if self.has_ended and checkpointer is not None and is_running(checkpointer.folder):
            return None
        return logged

    def log_text(self, name: str, text: str) -> None:
        """Log a text of the current step, such as a generated sentence. Every rank may call this, rank 0's counts.

        Args:
            name: 1 to 100 printable letters.
            text: cut after 65,536 letters, with a warning.

        Raises:
            ValueError: another name, or no text; nothing is logged.
        """
        check_name(name)
        if not isinstance(text, str):
            raise ValueError(f"loop.log_text takes a text. Got {type(text).__name__} for {name!r}. Pass str(...).")
        if self._world.rank == 0 and (target := self._target()) is not None:
            target.add_text(self._where.epoch, self._where.iteration, name, text)

    def log_image(self, name: str, image: Any) -> None:
        """Log an image of the current step, as a PNG. Every rank may call this, rank 0's counts.

        Args:
            name: 1 to 100 printable letters.
            image: a tensor, an array or a picture of Pillow, of shape (height, width), (height, width, 1, 3 or 4) or
                (1 or 3, height, width): whole numbers of 0 .. 255, or fractions of 0 .. 1.

        Raises:
            ValueError: another name or shape; nothing is logged.
        """
        check_name(name)
        if self._world.rank == 0 and (target := self._target()) is not None:
            target.add_image(self._where.epoch, self._where.iteration, name, as_pixels(name, image))

    def log_table(self, name: str, values: Any, rows: Labels = None, columns: Labels = None) -> None:
        """Write a table of numbers to tables/NAME.json of the run folder, if there is one. Every rank may call this.

        Args:
            name: a plain word, such as "confusion"; a later table of the same name replaces it.
            values: shape (rows, columns): nested sequences, an array or a tensor.
            rows, columns: a label for each; by default they are numbered from 0.

        Raises:
            ValueError: another name, other values, or other numbers of labels; nothing is written.
        """
        table = make_table(name, values, rows, columns, self._where.iteration)
        if self._world.rank != 0 or (target := self._target()) is None:
            return
        if (checkpointer := self._checkpointer) is not None:
            try:
                with explained(f"The table {name} in {checkpointer.folder} cannot be written", REPAIR):
                    write_table(checkpointer.folder, table)
            except OSError as error:
                if not checkpointer.continues:
                    raise
                checkpointer.say(f"{format_error(error)} Training continues.")
        target.add_table(table)
