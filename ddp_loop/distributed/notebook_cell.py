"""The output of a notebook's cell: written in the notebook's own process, or from a rank that it has launched.

A rank's process has no cell. It leaves its newest output in a file, whose path is in its environment, and `launch`
shows that while it waits for the ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

CELL = "DDP_LOOP_CELL"  # in the environment of a rank: the file of its output
Bundle = Mapping[str, str]  # the same output in several MIME types


class CellOutput(Protocol):
    """An output in a notebook's cell that is replaced by the next one."""

    def show(self, bundle: Bundle) -> None:
        """Show this in place of the last one."""


class OwnCell:
    """An output in the cell that runs in this process; it is placed with the first `show`."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._is_placed = False

    def show(self, bundle: Bundle) -> None:
        """Show this in place of the last one."""
        from IPython.display import display, update_display

        if self._is_placed:
            update_display(dict(bundle), display_id=self._name, raw=True)  # type: ignore[no-untyped-call]
        else:
            display(dict(bundle), display_id=self._name, raw=True)  # type: ignore[no-untyped-call]
        self._is_placed = True


class LaunchersCell:
    """An output in the cell of the process that launched this rank.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def show(self, bundle: Bundle) -> None:
        """Show this in place of the last one.

        Raises:
            OSError: the launcher has ended.
        """
        temporary = f"{self._path}-{secrets.token_hex(4)}"
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(dict(bundle), file)
        os.replace(temporary, self._path)


class CellRelay:
    """On the launcher's side: shows what rank 0 leaves; without a notebook it does nothing.

    Attributes:
        environment: what the ranks need in theirs.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._output: OwnCell | None = None
        self._shown: tuple[int, int] | None = None
        if in_notebook():
            self._folder, self._output = tempfile.TemporaryDirectory(prefix="ddp_loop-"), OwnCell()
            self.environment = {CELL: str(Path(self._folder.name, "output.json"))}

    def show(self) -> None:
        """Show what is new."""
        if self._output is None:
            return
        with suppress(OSError, ValueError):
            path = self.environment[CELL]
            about = os.stat(path)
            if (now := (about.st_ino, about.st_mtime_ns)) != self._shown:
                self._shown = now
                with open(path, encoding="utf-8") as file:
                    self._output.show(json.load(file))

    def close(self) -> None:
        """Show the last output, and remove the file."""
        self.show()
        self._output, folder = None, self._folder
        if folder is not None:
            folder.cleanup()


def in_notebook() -> bool:
    """Whether the main thread of a Jupyter kernel calls; imports nothing."""
    shell: Any = sys.modules.get("IPython")
    if shell is None or "ipykernel" not in sys.modules:
        return False
    return threading.current_thread() is threading.main_thread() and hasattr(shell.get_ipython(), "kernel")


def cell_output() -> CellOutput | None:
    """Return an output in a notebook's cell; None where there is no notebook."""
    if in_notebook():
        return OwnCell()
    path = os.environ.get(CELL)
    return None if path is None else LaunchersCell(path)
