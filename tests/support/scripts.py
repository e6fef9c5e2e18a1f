"""Scripts and examples: loaded, written, and run by an interpreter of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import ddp_loop as dl
from ddp_loop.accelerators import Cpu
from ddp_loop.distributed import Pool
from ddp_loop.tracing import VerifyJob, verify
from tests.support.paths import EXAMPLES, ROOT

SCRIPT_S = 120.0  # a script with ranks of its own takes 5 s on two idle cores

StartPython = Callable[..., subprocess.Popen[str]]


def write(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


def changed(text: str, changes: Mapping[str, str]) -> str:
    """A script with names replaced, each of which it must have."""
    for name, value in changes.items():
        assert name in text
        text = text.replace(name, value)
    return text


def verdict_of(script: str | Path, pool: Pool, ranks: Sequence[int] = (1, 2, 3), **job: Any) -> tuple[bool, str]:
    """Whether a script is equal on these numbers of the pool's ranks, and the report of `verify`."""
    lines: list[str] = []
    equal = verify(VerifyJob(Path(script), start=pool.run, timeout_s=SCRIPT_S, **job), ranks, lines.append)
    return equal, "\n".join(lines)


def load(name: str) -> ModuleType:
    """An example as a module; not through the import path, where its name may stand for another."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def leaving_worlds() -> Iterator[None]:
    """Leave the worlds that a script joins and never leaves, as the end of its process would."""
    with contextlib.ExitStack() as worlds:
        join = dl.join_world

        def joined(*arguments: Any, **keywords: Any) -> dl.World:
            world = join(*arguments, **keywords)
            return world if arguments or keywords else worlds.enter_context(world)

        with mock.patch.object(dl, "join_world", joined):
            yield


def run_here(script: str, *words: str) -> str:
    """Run an example as the main program of this rank; returns its output. It keeps the allocator as it is.

    A new process for each rank needs 3 s to import torch alone.
    """
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *words]),
        mock.patch.object(Cpu, "keep_memory"),
        contextlib.redirect_stdout(printed),
        leaving_worlds(),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def run(*command: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with more variables of the environment."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
