"""A PostgreSQL server of its own, in a temporary folder and on a Unix socket.

[Note: How it ends] `setpriv` has the kernel send SIGINT, PostgreSQL's fast shutdown, to a server whose test process
dies. It sets this after it has changed the user, because a change of user clears it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.harness import until

START_S, END_S = 60.0, 20.0
INSTALLED = Path("/usr/lib/postgresql")  # Debian puts the programs of each version here, and not onto the PATH
UNPRIVILEGED = ("postgres", "nobody")  # initdb refuses root
LONGEST_SOCKET = 107  # bytes, of sockaddr_un
SOCKET = ".s.PGSQL.5432"  # in a folder of its own: the number is no port
OWNER = "ddp_loop"
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "dynamic_shared_memory_type": "mmap",
    "shared_buffers": "16MB",
    "max_connections": "50",
}


@dataclass
class PostgresServer:
    """A server.

    Args:
        programs: the folder of its programs.
        folder: where its socket is, and its data.
    """

    programs: Path
    folder: Path
    databases: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        settings = SETTINGS | {"unix_socket_directories": str(self.folder)}
        serve = [str(self.programs / "postgres"), "-D", str(self.folder / "data")]
        serve += [f"--{name}={value}" for name, value in settings.items()]
        command, log = [*as_user(user_of_server()), *serve], self.folder / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=output)
        self.process = process
        until(lambda: process.poll() is not None or self.accepts(), "PostgreSQL accepts connections", START_S)
        assert process.poll() is None, f"PostgreSQL ended:\n{log.read_text()}"

    def stop(self) -> None:
        """Stop it: by its fast shutdown, and its immediate one if that takes too long."""
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL) if self.process is not None else ():
            assert self.process is not None
            self.process.send_signal(number)
            try:
                self.process.wait(END_S)
                return
            except subprocess.TimeoutExpired:
                continue

    def new_database(self) -> str:
        """The URL of a new, empty database, for SQLAlchemy and psycopg 3."""
        self.databases += 1
        name = f"test_{self.databases}"
        command = [str(self.programs / "createdb"), "-h", str(self.folder), "-U", OWNER, name]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)
        return f"postgresql+psycopg://{OWNER}@/{name}?host={self.folder}"

    def accepts(self) -> bool:
        """Whether it accepts connections."""
        command = [str(self.programs / "pg_isready"), "-q", "-h", str(self.folder), "-U", OWNER]
        return subprocess.run(command, check=False, timeout=START_S).returncode == 0


def needed_programs() -> Path:
    """The folder of PostgreSQL's programs; skips the test where something is missing."""
    found = sorted(INSTALLED.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3].partition(".")[0]))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    if initdb is None:
        pytest.skip("needs PostgreSQL's initdb, which is not installed")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, which is not installed")
    pytest.importorskip("psycopg", reason="needs psycopg, which is not installed")
    return Path(initdb).parent


def user_of_server() -> pwd.struct_passwd:
    """The user that runs the server: this one, or an unprivileged one if this is root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    known = {user.pw_name: user for user in pwd.getpwall()}
    return next(known[name] for name in UNPRIVILEGED if name in known)


def as_user(user: pwd.struct_passwd) -> list[str]:
    """The prefix of a command that runs as this user and ends with this process. See [Note: How it ends]."""
    change = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *change, "--pdeathsig", "SIGINT"]


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Start a server; it is stopped and its folder removed at the end, also after a failure."""
    programs, user = needed_programs(), user_of_server()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    try:
        assert len(os.fsencode(folder / SOCKET)) <= LONGEST_SOCKET
        os.chown(folder, user.pw_uid, user.pw_gid)
        make = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", OWNER, "--auth=trust", "--no-sync"]
        make += ["--locale=C", "-E", "UTF8"]
        subprocess.run([*as_user(user), *make], check=True, capture_output=True, timeout=START_S, cwd=folder)
        server = PostgresServer(programs, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
