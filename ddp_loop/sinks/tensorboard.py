"""Rows, evaluations, logged values, texts, images and tables for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_loop.reporting import Pixels, RunStart
from ddp_loop.sinks.points import Point, PointSink, require


def as_markdown(table: Mapping[str, Any]) -> str:
    """A table as Markdown."""
    head = ["", *table["columns"]]
    lines = [head, ["---"] * len(head)]
    lines += [[name, *row] for name, row in zip(table["rows"], table["values"], strict=True)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    """A label or a number in one line of a table."""
    return " ".join(str(value).replace("|", "\\|").splitlines())


class _TensorBoard(PointSink):
    """See `tensorboard_sink`."""

    def __init__(self, folder: Path, every_s: float) -> None:
        super().__init__(every_s)
        self._folder = folder
        self._writer: Any = None

    def begin(self, run: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=run.iteration + 1)

    def _send(self, points: list[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.iteration, walltime=point.at_s)

    def log_text(self, name: str, text: str, iteration: int) -> None:
        self._writer.add_text(name, text, iteration)

    def log_image(self, name: str, pixels: Pixels, iteration: int) -> None:
        self._writer.add_image(name, pixels, iteration, dataformats="HWC")

    def log_table(self, name: str, table: Mapping[str, Any], iteration: int) -> None:
        self.log_text(name, as_markdown(table), iteration)

    def flush(self) -> None:
        """Write the points so far."""
        if self._writer is not None:
            self._send_waiting()
            self._writer.flush()

    def close(self) -> None:
        """Write the points so far, and close the file."""
        if self._writer is not None:
            self._send_waiting()
            self._writer.close()
            self._writer = None


def tensorboard_sink(folder: str | os.PathLike[str], every_s: float = 1.0) -> _TensorBoard:
    """Write points for TensorBoard: of rows the mean since the last point, of everything else each one.

    Evaluations are tags below `evaluation/`; the values, texts and images of `Loop.log` keep their names, and tables
    are texts.

    Args:
        folder: the `--logdir` of tensorboard, or a folder in it.
        every_s: seconds between two points of rows, at least; 0 writes a point for each row, which takes some 0.2 ms.

    Raises:
        ImportError: tensorboard is missing.
    """
    require("tensorboard")
    return _TensorBoard(Path(folder), every_s)
