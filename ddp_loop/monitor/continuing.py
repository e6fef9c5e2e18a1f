"""Continue: the command that started a run is started again, from the page.

[Note: Continue] Whoever can write status.json could have the page start any program. So the file must belong to the
user of the page, must not be a link, and must not be writable by everyone. The browser shows the whole command, asks
for confirmation, and sends the digest of what it has shown; a command that has changed by then is not started. No shell
reads it. What no file keeps, secrets in its arguments, the browser asks for and sends with it. The process is in a
session of its own, so that it outlives the page, and it gets the page's environment without what a launcher or a page
has set there. `python` and `torchrun` are first looked for beside the Python that serves the page. What it prints goes
to console/continued.log, as errors before the loop are in no other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import (
    CONSOLE,
    STATUS,
    hide_secrets,
    is_running,
    names_of_hidden,
    opened,
    way_on,
    with_secrets,
)
from ddp_loop.monitor.run_files import last_line
from ddp_loop.monitor.sweep_view import Answer
from ddp_loop.reporting import TRIAL

CONTINUED = "continued.log"
MOST_STATUS = 1 << 20
MOST_LINE = 20_000  # bytes of status.json; letters of a command that is shown whole
ENDED = frozenset({"stopped", "failed", "left", "lost"})  # states that a run can be continued from
_NOT_INHERITED = re.compile(  # set by launchers and pages for their own processes
    r"DDP_LOOP_(START|CELL|MONITOR_JOB)|(TORCHELASTIC|PET|GROUP|ROLE)_.*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


@dataclass(frozen=True, slots=True)
class Command:
    """What starts a run again.

    Attributes:
        words: of the command.
        directory: in which it was typed.
        line: both, as one types them in a shell.
        lacks: the names of the secrets that no file keeps, which the user types.
    """

    words: tuple[str, ...]
    directory: str
    line: str
    lacks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return what identifies the command."""
        return hashlib.sha256(json.dumps([self.words, self.directory]).encode()).hexdigest()


def command_of(run: Path) -> Command:
    """Return the command that starts a run again; see [Note: Continue].

    Raises:
        ValueError: it is not known, or may not be started from here.
    """
    status = _own_status(run)
    line = way_on(status)
    words = status.get("start")
    directory = status.get("directory")
    if not line or not isinstance(words, list) or not isinstance(directory, str):
        raise ValueError(f"{STATUS} does not have the command that started this run. Start the script by hand.")
    if len(line) > MOST_LINE or "\0" in line or not words[0] or line != line.encode(errors="replace").decode():
        raise ValueError(f"The command that started this run cannot be shown whole ({len(line)} letters).")
    words = hide_secrets(words)  # an older version kept them
    return Command(tuple(words), directory, line, tuple(names_of_hidden(words)))


def _own_status(run: Path) -> Mapping[str, Any]:
    if os.path.lexists(run / TRIAL):
        raise ValueError("This run is a trial of a sweep. Continue it by the sweep.")
    try:
        file = os.open(run / STATUS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{STATUS} cannot be read ({error.strerror}), so the command is not known.") from error
    with open(file, "rb") as opened_file:
        form = os.fstat(file)
        if not stat.S_ISREG(form.st_mode) or form.st_size > MOST_STATUS:
            raise ValueError(f"{STATUS} is no file of at most {MOST_STATUS} bytes, so the command is not known.")
        if form.st_uid != os.geteuid():
            raise ValueError(f"{STATUS} belongs to another user. The page starts only commands of its own user.")
        if form.st_mode & stat.S_IWOTH:
            raise ValueError(f"Everyone may write {STATUS}, so the page does not start its command. Run chmod o-w.")
        try:
            found = json.loads(opened_file.read(MOST_STATUS))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{STATUS} is damaged, so the command is not known.") from error
    return found if isinstance(found, dict) else {}


def _check_places(command: Command) -> None:
    """Raise ValueError if the folder or the script is gone, as far as the words show which one is the script."""
    if not os.path.isdir(command.directory):
        raise ValueError(f"The folder {command.directory} no longer exists. Start the script where it is now.")
    words = command.words
    if words[1:2] == ("-m",) and words[2:3] != ("ddp_loop",):
        return
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script is not None and not os.path.exists(os.path.join(command.directory, script)):
        raise ValueError(f"The script {script} is no longer in {command.directory}.")


class Continuations:
    """The runs that this page continues. Several threads may use it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._started: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}  # the process, and when

    def about(self, run: Path, state: str) -> dict[str, Any]:
        """Return what a run's card shows: whether it can be continued, the digest or why not, how a start went."""
        failed = self._failure(run)
        is_starting = state in ENDED and self._is_starting(run)
        command = why = None
        if state in ENDED and not is_starting:
            try:
                command = command_of(run)
            except ValueError as error:
                why = str(error)
        return {
            "can": command is not None,
            "digest": command and command.digest,
            "lacks": list(command.lacks) if command else [],
            "why": why,
            "is_starting": is_starting,
            "failed": failed,
        }

    def _is_starting(self, run: Path) -> bool:
        return run in self._started and self._started[run][0].poll() is None

    def _failure(self, run: Path) -> str | None:
        """Return how a command failed that ended before its run began."""
        process, at = self._started.get(run, (None, 0.0))
        if process is None or process.poll() in (None, 0):
            return None
        with suppress(OSError):
            if (run / STATUS).stat().st_mtime > at:
                return None  # the run says itself how it ended
        said = last_line(run, CONTINUED)
        return f"The command ended with code {process.returncode}{f': {said}' if said else '.'}"

    def start(self, run: Path, asked: bytes) -> Answer:
        """Start a run's command again.

        Args:
            run: its folder.
            asked: the digest of the command that the user has confirmed, and in a line each the secrets that it lacks.
        """
        digest, *secrets = asked.decode(errors="replace").split("\n")
        with self._turn:
            if is_running(run) or self._is_starting(run):
                return 409, "The run is active already."
            try:
                command = command_of(run)
                if digest != command.digest:
                    return 409, "The command is not the one that was shown. Read it again, and then confirm it."
                if len(secrets) != len(command.lacks) or not all(secrets) or "\0" in "".join(secrets):
                    return 409, f"The run folder does not keep {', '.join(command.lacks) or 'any secret'}. Type each."
                _check_places(command)
                words = with_secrets(command.words, secrets)
                self._started[run] = _begin(run, words, command.directory), time.time()
            except ValueError as error:
                return 409, str(error)
            except OSError as error:
                return 500, f"The command cannot be started ({error.strerror}: {error.filename or command.words[0]})."
        return 202, {"said": "starting"}


def _begin(run: Path, words: Sequence[str], directory: str) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one.

    Raises:
        OSError: the program is missing, or the run folder cannot be written.
    """
    environment = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), path])
    (run / CONSOLE).mkdir(exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    with opened(run / CONSOLE) as folder:
        file = os.open(CONTINUED, flags, 0o644, dir_fd=folder)
    with open(file, "wb") as output:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(22, "It is not a regular file", CONTINUED)
        os.set_blocking(file, True)
        process = subprocess.Popen(
            words,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name=f"waits for {process.pid}", daemon=True).start()  # leaves no zombie
    return process
