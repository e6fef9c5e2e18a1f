"""Mutants of the core: one line is changed in each, and the quick tests must fail.

    python -m benchmarks mutants [NUMBER ...]

docs/benchmarks/mutants.json has them, drawn by a seed. Each is applied to a copy of the files under version control.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import print_table

HERE = Path(__file__).parents[1]
LIST = HERE / "docs" / "benchmarks" / "mutants.json"
QUICK = ["-x", "-q", "-n", "2", "--dist", "worksteal", "-m", "not full", "-p", "no:cacheprovider"]
LONGEST_S = 1800.0


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what takes its place."""

    number: int
    file: str
    operator: str
    before: str
    after: str

    def apply(self, folder: Path) -> None:
        """Change the line in a copy.

        Raises:
            ValueError: the line is not there once.
        """
        path = folder / self.file
        lines = path.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.before]
        if len(places) != 1:
            raise ValueError(f"mutant {self.number}: {self.file} has its line {len(places)} times: mend {LIST.name}")
        lines[places[0]] = lines[places[0]].replace(self.before, self.after)
        path.write_text("".join(lines))


def read_mutants(chosen: Iterable[str] = ()) -> list[Mutant]:
    """Those of the list, or the chosen ones, by number."""
    listed: list[dict[str, Any]] = json.loads(LIST.read_text())["mutants"]
    numbers = {int(number) for number in chosen}
    return [Mutant(**one) for one in listed if not numbers or one["number"] in numbers]


def report(parts: Iterable[str]) -> None:
    """Print which are caught, and by what."""
    print_table("mutant | file | operator | caught by", map(_row, read_mutants(parts)))


def _row(mutant: Mutant) -> Iterator[object]:
    with tempfile.TemporaryDirectory() as folder:
        for name in _tracked():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, Path(folder) / name)
        mutant.apply(Path(folder))
        command = [sys.executable, "-m", "pytest", *QUICK]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    yield from (mutant.number, mutant.file, mutant.operator, failed[0] if failed else done.returncode or "nothing")


def _tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=HERE, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (HERE / name).is_file()]
