"""Scripts and examples: loaded, written, and run by an interpreter of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.support.paths import EXAMPLES

SCRIPT_S = 120.0  # a script with ranks of its own takes 5 s on two idle cores

StartPython = Callable[..., subprocess.Popen[str]]


def write(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


def load(name: str) -> ModuleType:
    """An example as a module; not through the import path, where its name may stand for another."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in an example's folder."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
