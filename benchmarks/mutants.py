"""Mutants of the package: one line is changed in each, and a test must fail.

    python -m benchmarks mutants [NUMBER or ROOM ...] [--tests room|quick|all] [--record FILE]

docs/benchmarks/mutants.json has them, drawn by a seed. Each is applied to one copy of the files under version control,
which is mended afterwards. First the tests run that caught another mutant of the same file, then the quick tests of the
file's room, then the other quick tests, then all others; `--tests` says how far to go, by default to the quick tests.
The first failing test ends it. A test that also fails without a mutant catches nothing. A test that comes to its time
limit fails, and so counts as one that catches.

With `--record`, results go into a JSON file as they come, and what it has already is not run again. A record elsewhere
than in docs/benchmarks/mutants_caught.json runs all again, and begins with the tests that are known to catch: that is
how to try a change of the package.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import print_table

HERE = Path(__file__).parents[1]
LIST = HERE / "docs" / "benchmarks" / "mutants.json"
CAUGHT = HERE / "docs" / "benchmarks" / "mutants_caught.json"
TESTS = ("room", "quick", "all")  # how far to go
ALIKE = ("training", "batch_norm")  # rooms that test each other
NOTHING = "nothing"
LONGEST_S = 3600.0
MOST_KNOWN = 8  # tests that run before the others
DRAWN = ("tests/training/test_differential.py", "tests/training/test_call_orders.py")  # which catch most, in a minute
_PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
_PASSED = 0  # exit statuses of pytest
_WRONG_USE = 4
_NONE_CHOSEN = 5


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what takes its place."""

    number: int
    file: str
    operator: str
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder or file below the package."""
        return self.file.split("/")[1].removesuffix(".py")

    def apply(self, folder: Path) -> None:
        """Change the line in a copy.

        Raises:
            ValueError: the line is not there once.
        """
        path = folder / self.file
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        places = [number for number, line in enumerate(lines) if line.strip() == self.before]
        if len(places) != 1:
            raise ValueError(f"mutant {self.number}: {self.file} has its line {len(places)} times: mend {LIST.name}")
        lines[places[0]] = lines[places[0]].replace(self.before, self.after)
        path.write_text("".join(lines))


@dataclass(frozen=True)
class Outcome:
    """What caught a mutant.

    Args:
        after: the mutant's line. Where the list has another line now, the outcome no longer counts.
        caught_by: the first failing test, its file where that is not imported, how pytest ended where it named no test,
            "timeout" where it did not end, or "nothing".
        tests: how far it went, one of `TESTS`.
        commit: of the checkout that was copied.
        seconds: that it took.
    """

    after: str
    caught_by: str
    tests: str
    commit: str
    seconds: int


def read_mutants(chosen: Collection[str] = ()) -> list[Mutant]:
    """Return the mutants with the chosen numbers or in the chosen rooms; all of them where nothing is chosen."""
    listed: list[dict[str, Any]] = json.loads(LIST.read_text())["mutants"]
    mutants = [Mutant(**one) for one in listed]
    return [one for one in mutants if not chosen or str(one.number) in chosen or one.room in chosen]


def read_record(path: Path) -> dict[int, Outcome]:
    """Return the outcome of each mutant by its number. Mutants that have changed since then are left out."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    current = {one.number: one.after for one in read_mutants()}
    outcomes = {int(number): Outcome(**one) for number, one in stored.items()}
    return {number: one for number, one in outcomes.items() if current.get(number) == one.after}


def write_record(path: Path, record: Mapping[int, Outcome]) -> None:
    """Put a record where `read_record` finds it, at once."""
    text = json.dumps({str(number): asdict(record[number]) for number in sorted(record)}, indent=1, ensure_ascii=False)
    beside = path.with_suffix(".new")
    beside.write_text(f"{text}\n")
    beside.replace(path)


def report(parts: Collection[str], tests: str = "quick", record: str | None = None) -> None:
    """Print which are caught, and by what, and how many of each room."""
    mutants = read_mutants(parts)
    path = None if record is None else Path(record)
    have = {} if path is None else read_record(path)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), read_record(CAUGHT) | have)
        print_table("mutant | file | operator | caught by", _rows(runner, mutants, tests, path, have), words=4)
    print_table("room | drawn | tried | caught", _rooms(mutants, have))


def _rows(
    runner: Runner, mutants: Iterable[Mutant], tests: str, path: Path | None, have: dict[int, Outcome]
) -> Iterator[Iterable[object]]:
    for mutant in mutants:
        earlier = have.get(mutant.number)
        if earlier and (earlier.caught_by != NOTHING or TESTS.index(earlier.tests) >= TESTS.index(tests)):
            continue
        try:
            have[mutant.number] = outcome = runner.run(mutant, tests, earlier)
        except ValueError as gone:
            yield mutant.number, mutant.file, mutant.operator, gone
            continue
        if path is not None:
            write_record(path, have)
        yield mutant.number, mutant.file, mutant.operator, outcome.caught_by


def _rooms(mutants: Iterable[Mutant], have: Mapping[int, Outcome]) -> Iterator[Iterable[object]]:
    mutants = list(mutants)
    for room in sorted({one.room for one in mutants}):
        drawn = [one.number for one in mutants if one.room == room]
        tried = [have[number] for number in drawn if number in have]
        yield room, len(drawn), len(tried), sum(one.caught_by != NOTHING for one in tried)


class Runner:
    """Runs the tests on mutants, one after another, in one copy of the files.

    Args:
        folder: an empty one, for the copy.
        known: earlier outcomes. They say which tests to run first, and the runner adds its own.
    """

    def __init__(self, folder: Path, known: Mapping[int, Outcome]) -> None:
        self._folder = folder
        self._known = dict(known)
        self._file_of = {one.number: one.file for one in read_mutants()}
        self._sound: set[str] = set()  # tests that pass without a mutant
        self._unsound: set[str] = set()
        self._commit = _git("rev-parse", "--short", "HEAD").strip()
        for name in filter(None, _git("ls-files", "-z").split("\0")):
            if (HERE / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(HERE / name, folder / name)
        if (HERE / "build" / "fake_cuda").is_dir():  # or the first tests on fake GPUs build it, in a minute
            shutil.copytree(HERE / "build" / "fake_cuda", folder / "build" / "fake_cuda")

    def run(self, mutant: Mutant, tests: str, earlier: Outcome | None = None) -> Outcome:
        """Go as far as `tests`, from where an earlier run of the same mutant ended.

        Raises:
            ValueError: the mutant's line is gone.
        """
        began = time.monotonic()
        caught = NOTHING
        for arguments in self._stages(mutant, tests, earlier):
            caught = self._catch(mutant, arguments)
            if caught != NOTHING:
                break
        seconds = round(time.monotonic() - began) + (earlier.seconds if earlier else 0)
        self._known[mutant.number] = outcome = Outcome(mutant.after, caught, tests, self._commit, seconds)
        return outcome

    def _stages(self, mutant: Mutant, tests: str, earlier: Outcome | None) -> Iterator[list[str]]:
        """The arguments of pytest, stage by stage."""
        done = -1 if earlier is None else TESTS.index(earlier.tests)
        room = self._room_files(mutant)
        if done < 0:
            if known := self._known_tests(mutant):
                yield known
            if room:
                yield [*room, "-m", "not full"]
        here = [f"--ignore={name}" for name in (*room, "tests/examples/test_mutants.py")]  # it reads the changed line
        several = ["-n", "2", "--dist", "worksteal"]
        if done < TESTS.index("quick") <= TESTS.index(tests):
            yield ["tests", *here, *several, "-m", "not full"]
        if tests == "all":
            yield ["tests", here[-1], *several, "-m", "full"]

    def _known_tests(self, mutant: Mutant) -> list[str]:
        """Tests that caught this mutant or others of its file, as far as they are still there."""
        same = [number for number in self._known if self._file_of.get(number) == mutant.file]
        same.sort(key=lambda number: number != mutant.number)
        counts = Counter(self._known[number].caught_by.partition("[")[0] for number in same)
        own = self._known[mutant.number].caught_by.partition("[")[0] if mutant.number in self._known else ""
        return [name for name, _ in counts.most_common() if name != own and self._has(name)][:MOST_KNOWN] + (
            [own] if self._has(own) else []
        )

    def _has(self, test: str) -> bool:
        file, _, function = test.partition("::")
        path = self._folder / file
        return bool(function) and path.is_file() and f"def {function}(" in path.read_text()

    def _room_files(self, mutant: Mutant) -> list[str]:
        """Test files of the mutant's room: what draws jobs and calls, those of its subject, those that caught most."""
        folders = ALIKE if mutant.room in ALIKE else (mutant.room,)
        paths = [path for folder in folders for path in (self._folder / "tests" / folder).glob("test_*.py")]
        if mutant.file.count("/") == 1:
            paths = _files_that_name(self._folder / mutant.file, self._folder / "tests")
        counts = Counter(one.caught_by.partition("::")[0] for one in self._known.values())
        names = sorted(path.relative_to(self._folder).as_posix() for path in paths)
        subject = Path(mutant.file).stem.removesuffix("s")
        return sorted(names, key=lambda name: (name not in DRAWN, subject not in name, -counts[name]))

    def _catch(self, mutant: Mutant, arguments: list[str]) -> str:
        """The first test that fails with the mutant and passes without it."""
        path = self._folder / mutant.file
        original = path.read_bytes()
        while True:
            mutant.apply(self._folder)
            try:
                failed = self._first_failure([*arguments, *(f"--deselect={name}" for name in sorted(self._unsound))])
            finally:
                path.write_bytes(original)
            if "::" not in failed or failed in self._sound:
                return failed
            if self._first_failure([failed]) == NOTHING:
                self._sound.add(failed)
                return failed
            self._unsound.add(failed)

    def _first_failure(self, arguments: list[str]) -> str:
        command = [sys.executable, *_PYTEST, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}  # of scripts that tests start elsewhere
        with tempfile.TemporaryFile("w+") as printed:
            process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=printed, stderr=printed)
            try:
                status = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                process.kill()  # also when the run is interrupted
                process.wait()
            printed.seek(0)
            lines = printed.read()
        if status in (_PASSED, _NONE_CHOSEN):
            return NOTHING
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\])?(?= - |$)|\S+)", lines, re.MULTILINE):
            return failed[1]
        if status == _WRONG_USE and "ImportError while loading conftest" not in lines:
            raise RuntimeError(f"pytest refused {arguments}:\n{lines}")
        return f"pytest, which ended with {status}"


def _files_that_name(module: Path, tests: Path) -> list[Path]:
    """Test files that have the name of a module at the top of the package, or name it or what it has in public."""
    definitions = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in ast.parse(module.read_text()).body if isinstance(node, definitions)]
    words = [f"ddp_loop.{module.stem}", *(name for name in names if not name.startswith("_"))]
    named = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b")
    others = [path for path in tests.rglob("test_*.py") if path.parent.name != "project"]
    return [path for path in others if path.stem == f"test_{module.stem}" or named.search(path.read_text())]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout
