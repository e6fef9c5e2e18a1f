"""The job of a sweep: a function or a script, and how a rank runs a trial of it."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ddp_loop.distributed import pack_call, run_script

Scalar: TypeAlias = bool | int | float | str | None
Point: TypeAlias = dict[str, Scalar]
RUN_DIR = "run_dir"  # the name under which a job gets its trial's run folder
_HELP_S = 120.0  # for a script's --help, which imports torch
_GIT_S = 10.0


def nearest(name: str, known: Iterable[str]) -> str:
    """ "Did you mean ...? ", or nothing if no name is like it."""
    found = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"Did you mean {found[0]!r}? " if found else ""


@dataclass(frozen=True)
class FunctionJob:
    """A function that is called with a trial's parameters as keywords, and with its run folder as `run_dir`.

    Attributes:
        is_warm: whether trials run one after the other in the same processes.
        function: called on each rank of a trial.
        keywords: further keywords, the same for all trials.
    """

    is_warm: ClassVar[bool] = True
    function: Callable[..., object]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path | None:
        """The file with its code."""
        with suppress(TypeError):
            if (found := inspect.getsourcefile(inspect.unwrap(self.function))) is not None:
                return Path(found).resolve()
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """The job as JSON, from which `read_job` makes it again."""
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        # without addresses, which are others in the process that resumes the sweep
        shown = {key: re.sub(" at 0x[0-9a-f]+", "", repr(one)) for key, one in self.keywords.items()}
        return {"function": f"{self.file}:{name}", "keywords": shown}

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError unless the job takes parameters of these names."""
        pack_call(self.function, (), dict(self.keywords))  # raises if new processes cannot get it
        given = [*names, *self.keywords, RUN_DIR]
        if twice := [name for name in given if given.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is given twice: by the space, by keywords= or by the sweep. Remove one.")
        try:
            taken = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
            return
        function = getattr(self.function, "__name__", type(self.function).__name__)
        for name in (*names, *self.keywords):
            if name not in taken:
                raise ValueError(f"{function} has no parameter {name!r}. {_named(name, taken)}")
        if RUN_DIR not in taken:
            raise ValueError(
                f"{function} has no parameter 'run_dir', which is the run folder of its trial. Add it, "
                "and pass it on to Loop(run_dir=...)."
            )

    def call(self, parameters: Point, folder: str) -> object:
        """Run a trial on this rank."""
        return self.function(**self.keywords, **parameters, run_dir=folder)

    def arguments(self, parameters: Point, folder: str) -> list[str]:
        """The trial's arguments in words."""
        return [f"{name}={value!r}" for name, value in {**self.keywords, **parameters, RUN_DIR: folder}.items()]


@dataclass(frozen=True)
class ScriptJob:
    """A script that gets a trial's parameters as options, and its run folder as `--run-dir`.

    `learning_rate=0.1` becomes `--learning-rate 0.1`, or `--learning_rate 0.1` where the script's help has that one;
    True becomes the option alone, False and None leave it out.

    Attributes:
        is_warm: a script may change its process in any way, so each trial has new ones.
        script: its path.
        words: further arguments, the same for all trials.
    """

    is_warm: ClassVar[bool] = False
    script: Path
    words: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        return self.script.resolve()

    @property
    def facts(self) -> dict[str, Any]:
        return {"script": str(self.file), "arguments": list(self.words)}

    def check(self, names: Sequence[str]) -> None:
        if not self.script.is_file():
            what = "is a folder" if self.script.is_dir() else "does not exist"
            raise ValueError(f"The script must be a Python file. {self.script} {what}. Check its path.")
        for option in map(self._option, (*names, RUN_DIR) if self._options else ()):
            if option not in self._options:
                raise ValueError(f"{self.script.name} has no option {option}. {_named(option, self._options)}")

    def call(self, parameters: Point, folder: str) -> object:
        run_script(str(self.script), self.arguments(parameters, folder))
        return None

    def arguments(self, parameters: Point, folder: str) -> list[str]:
        words = list(self.words)
        for name, value in parameters.items():
            if value is True:
                words.append(self._option(name))
            elif value is not None and value is not False:
                words.append(f"{self._option(name)}={value}")  # one word: a negative number would look like an option
        return [*words, f"{self._option(RUN_DIR)}={folder}"]

    @cached_property
    def _options(self) -> list[str]:
        """The options that the script's --help names; none where it has no help."""
        command = [sys.executable, str(self.script), "--help"]
        try:
            helped = subprocess.run(command, capture_output=True, text=True, timeout=_HELP_S, check=True)
        except (subprocess.SubprocessError, OSError):
            return []
        return list(dict.fromkeys(re.findall(r"--[A-Za-z][\w-]*", helped.stdout)))

    def _option(self, name: str) -> str:
        return f"--{name}" if f"--{name}" in self._options else "--" + name.replace("_", "-")


Job: TypeAlias = FunctionJob | ScriptJob  # what a sweep runs, once for each trial


def _named(name: str, known: Iterable[str]) -> str:
    listed = list(known)
    return nearest(name, listed) + f"It has {', '.join(listed) or 'none'}."


def find_function(name: str, folder: Path) -> Callable[..., object]:
    """Import a function by "FILE.py:NAME" or "MODULE:NAME", so that new processes can import it too.

    Args:
        name: as it is written; a file's path is relative to `folder`.
        folder: of relative paths.

    Raises:
        ValueError: it cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    path = (folder / place).resolve()
    if not place or (place.endswith(".py") and not path.is_file()):
        raise ValueError(f'A function is written "FILE.py:NAME" or "MODULE:NAME". {name!r} names no file. Check it.')
    if place.endswith(".py"):
        root = path.parent
        place = path.stem
        while (root / "__init__.py").is_file():  # a module of a package has the package's name
            place = f"{root.name}.{place}"
            root = root.parent
        sys.path.insert(0, str(root))  # ranks get this path too
    try:
        found: Any = importlib.import_module(place)
        if path.is_file() and Path(found.__file__ or "").resolve() != path:
            raise ValueError(f"The module {place} is {found.__file__} here, not {path}. Rename the file.")
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be imported ({error}). Define the function at the top level of its file, whose training "
            'is under `if __name__ == "__main__":`.'
        ) from error
    return found  # type: ignore[no-any-return]


def read_job(facts: Mapping[str, Any]) -> Job:
    """The job of a sweep that another process began, from its facts.

    Raises:
        ValueError: its function cannot be imported, or has keywords that are not in the file.
    """
    if "script" in facts:
        return ScriptJob(Path(facts["script"]), tuple(facts["arguments"]))
    try:
        keywords = {name: ast.literal_eval(text) for name, text in facts["keywords"].items()}
    except (ValueError, SyntaxError):
        raise ValueError(
            f"The keywords of {facts['function']} are objects of the process that began the sweep. They are "
            f"{facts['keywords']}. Give numbers and texts, so that other workers can make them too."
        ) from None
    return FunctionJob(find_function(facts["function"], Path()), keywords)


def code_of(file: Path | None) -> dict[str, Any]:
    """The version of a job's code: the digest of its file, and the commit of the repository that it is in."""
    if file is None:
        return {}
    facts: dict[str, Any] = {"file": str(file)}
    with suppress(OSError):
        facts["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    with suppress(subprocess.SubprocessError, OSError):
        facts["commit"] = _git(file.parent, "rev-parse", "HEAD").strip()
        facts["changed"] = bool(_git(file.parent, "status", "--porcelain", "--untracked-files=no").strip())
    return facts


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout


# -- on a rank ---------------------------------------------------------------------------------------------


def run_trial(job: Job, parameters: Point, folder: str) -> dict[str, float] | float | None:
    """Run a trial on this rank, with its output in the trial's folder, and return the numbers it returned."""
    with _output_in(Path(folder) / f"output.rank-{os.environ['RANK']}.txt"):
        return _numbers(job.call(parameters, folder))


@contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Append the output of this process to a file, with the output of C++ and of its children."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for number, copy in zip((1, 2), before, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(file)


def _numbers(result: object) -> dict[str, float] | float | None:
    """A result as a number or as numbers by name; None if it is neither."""
    if isinstance(result, Mapping):
        named = {str(name): _numbers(value) for name, value in result.items()}
        return {name: value for name, value in named.items() if isinstance(value, float)}
    with suppress(TypeError, ValueError, RuntimeError):
        if result is not None and not isinstance(result, str):
            return float(result)  # type: ignore[arg-type]
    return None
