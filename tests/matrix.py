"""The quick tests on the oldest and the newest Python and torch: `make matrix`, or `python -m tests.matrix`.

Each pair gets a virtual environment below build/matrix, which stays and is used again. The other packages are those of
requirements-dev.txt. A Python that this machine lacks is skipped, with a line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
NEWEST = "newest"  # the newest torch that pip finds for a Python


@dataclass(frozen=True)
class Pair:
    """A Python and a torch, such as 3.11 and 2.11.0; the torch may be "newest"."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"python{self.python}-torch-{self.torch}"


PAIRS = (Pair("3.11", "2.11.0"), Pair("3.12", "2.11.0"), Pair("3.13", NEWEST))


def pair_of(text: str) -> Pair:
    """Parse "3.11:2.11.0" or "3.13:newest"."""
    python, _, torch = text.partition(":")
    if not python or not torch:
        raise argparse.ArgumentTypeError(f"must be PYTHON:TORCH, such as 3.11:2.11.0 or 3.13:newest (got {text})")
    return Pair(python, torch)


def find_python(version: str) -> str | None:
    """The interpreter of a version: on the path, or pyenv's; None without one."""
    found = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(one / "bin" / "python") for one in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for one in found:
        # A shim of pyenv is there for each version, and fails for those that are not chosen.
        if one is not None and subprocess.run([one, "-c", ""], check=False, capture_output=True).returncode == 0:
            return one
    return None


def requirements(text: str) -> list[str]:
    """The lines of requirements-dev.txt without torch, and without setuptools, of which a torch takes its own range."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(("torch==", "setuptools=="))] + ["setuptools>=77"]


def make_environment(pair: Pair, python: str) -> Path:
    """Make a pair's environment, or use that of an earlier call; returns its interpreter."""
    folder = FOLDER / pair.name
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    needed = (ROOT / "requirements-dev.txt").read_text()
    if ready.exists() and ready.read_text() == needed:
        return interpreter
    torch = "torch" if pair.torch == NEWEST else f"torch=={pair.torch}"
    pip = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([*pip, torch, *requirements(needed)], check=True)  # at once, so that nothing else chooses the torch
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
    ready.write_text(needed)
    return interpreter


def main(arguments: list[str] | None = None) -> int:
    """Run the quick tests on each pair; returns 0 if all passed on all pairs that are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=pair_of, nargs="+", default=PAIRS, metavar="PYTHON:TORCH")
    parser.add_argument("--jobs", default="2", help="processes of pytest (default: 2)")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    lines, good = [], True
    for pair in options.pairs:
        python = find_python(pair.python)
        if python is None:
            lines.append(f"{pair.name}: skipped, this machine has no Python {pair.python}")
            continue
        start = time.monotonic()
        interpreter = make_environment(pair, python)
        asked = "import sys, torch; print(sys.version.split()[0], 'and torch', torch.__version__)"
        named = subprocess.run([interpreter, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
        command = [interpreter, "-m", "pytest", "-n", options.jobs, "--dist", "worksteal", "-m", "not full"]
        code = subprocess.run([*command, *options.tests], check=False, cwd=ROOT).returncode
        good = good and code == 0 and (pair.torch == NEWEST or f"torch {pair.torch}" in named)
        state = "passed" if code == 0 else f"FAILED, exit code {code}"
        lines.append(f"Python {named}: {state} after {time.monotonic() - start:.0f} s")
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
