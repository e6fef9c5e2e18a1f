"""Files of a run folder as training writes them: texts, images, console, usage, and how the run was started."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ddp_loop.checkpoint import write_atomic
from ddp_loop.reporting import png


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def add_texts(run: Path, *texts: tuple[int, str, str]) -> None:
    """Add texts: step, name, text."""
    place = {"epoch": 1, "elapsed_s": 0.5}
    append_lines(
        run / "texts.jsonl", [{**place, "iteration": step, "name": name, "text": text} for step, name, text in texts]
    )


def pixels_of(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image of one colour, which differs for each number."""
    return np.full((8, 8, 3), (number * 40 % 256, 255 - number * 40 % 256, 90), dtype=np.uint8)


def add_image(run: Path, step: int, name: str, data: bytes | None = None, **line: Any) -> Path:
    """Add an image, or these bytes in place of one; returns its file."""
    file = f"images/{hashlib.sha1(name.encode()).hexdigest()[:8]}-{step}.png"
    (run / "images").mkdir(exist_ok=True)
    (run / file).write_bytes(png(pixels_of(step)) if data is None else data)
    place = {"epoch": 1, "iteration": step, "elapsed_s": 0.5, "name": name, "file": file, "width": 8, "height": 8}
    append_lines(run / "images.jsonl", [place | line])
    return run / file


def write_console(run: Path, text: str | bytes, name: str = "rank-0") -> Path:
    (run / "console").mkdir(exist_ok=True)
    path = run / "console" / f"{name}.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def add_usage(run: Path, rank: int, lines: Iterable[tuple[float, float, float]], **more: float | None) -> Path:
    """Add lines of usage: elapsed seconds, percent of a core, MiB."""
    (run / "usage").mkdir(exist_ok=True)
    path = run / "usage" / f"rank-{rank}.jsonl"
    gpu = {"gpu_percent": None, "gpu_memory_mib": None}
    append_lines(
        path,
        [
            {"time": 1e9 + at, "elapsed_s": at, "iteration": int(at), "processor_percent": percent, "memory_mib": mib}
            | gpu
            | more
            for at, percent, mib in lines
        ],
    )
    return path


def write_start(run: Path, words: list[str], directory: Path) -> None:
    """Have the status file of a run name the command that started it."""
    status = json.loads((run / "status.json").read_text())
    write_atomic(run / "status.json", status | {"start": words, "directory": str(directory)})


def python_command(*words: str) -> list[str]:
    """A command as `start` has it, whose Python is that of the tests; the page looks for it beside its own."""
    assert Path(sys.executable).parent.joinpath("python").exists()
    return ["python", *words]
