"""The monitor's process: its socket, its token, its link, and its end.

[Note: Beside training] The page is served by a process that training does not depend on. The command's ends with
Ctrl-C. The one of `Loop(monitor=True)` ignores the terminal's Ctrl-C, which is meant for the run, so that the page can
show how the run ended; it ends when the script has ended and no browser has shown the page for 10 seconds.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddp_loop.checkpoint import write_text_atomic
from ddp_loop.monitor.app import MonitorApp, make_app
from ddp_loop.monitor.demo import fake_runs

if TYPE_CHECKING:
    import uvicorn

HERE = "127.0.0.1"
LINGER_S = 10.0
REQUEST_S = 10.0  # for a client to send a request, before its connection is closed
_JOB = "DDP_LOOP_MONITOR_JOB"  # an environment variable
CONNECTIONS = 600  # beyond that the answer is 503
INSTALL = "pip install 'ddp_loop[monitor]'"

Say = Callable[[str], None]


class MonitorUnavailable(ValueError):
    """The page cannot be served."""


# -- who listens, and who is let in ------------------------------------------------------------------------


def listen(host: str = HERE, port: int = 0) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        MonitorUnavailable: the address does not exist, or the port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        if not port or isinstance(error, socket.gaierror):
            remedy = "Pass an address of this machine as --host, or leave it out."
            raise MonitorUnavailable(f"{host} cannot be used ({error}). {remedy}") from error
        raise MonitorUnavailable(
            f"Port {port} of {host} cannot be used ({error}). Leave out --port to use a free one."
        ) from error


def is_here(host: str) -> bool:
    """Whether an address is a loopback address of this machine."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def names_of(host: str, also: Sequence[str]) -> list[str]:
    """Return the names that a server bound to `host` answers to."""
    own = [HERE, "localhost", "::1"] if is_here(host) else [host, socket.gethostname()]
    return [*own, *also]


@contextmanager
def token_file(host: str, port: int, token: str) -> Iterator[tuple[str, Path]]:
    """Yield the link, and a file with it that only its owner can read; the file is removed at the end."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    link = f"http://{f'[{name}]' if ':' in name else name}:{port}/#token={token}"
    with tempfile.TemporaryDirectory(prefix="ddp_loop-page-") as folder:
        path = Path(folder) / "link"
        write_text_atomic(path, link + "\n", is_private=True)
        yield link, path


def check_installed() -> None:
    """Raise ImportError, with the remedy, unless the page's libraries are installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"The page needs starlette and uvicorn. {error.name} is missing. Run {INSTALL}") from error


def make_server(site: MonitorApp, listening: socket.socket, token: str, hosts: Sequence[str]) -> uvicorn.Server:
    """Return the server of a page; `server.run(sockets=[listening])` serves until `server.should_exit`."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Closes the connection of a client that sends no request, or no further one."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._answered: object = None
            self.loop.call_later(REQUEST_S, self._close_unless_asked)

        def _close_unless_asked(self) -> None:
            if self.transport.is_closing():
                return
            waits = self.cycle is None or self.cycle.response_complete
            if waits and self.cycle is self._answered:
                self.transport.close()
                return
            self._answered = self.cycle
            self.loop.call_later(REQUEST_S, self._close_unless_asked)

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
                self.transport.close()  # the answer was sent already, as to a chunked body, which is refused
            else:
                super().send_400_response(msg)

    class Server(uvicorn.Server):
        """Ends the streams when it shuts down, so as not to wait for them."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.is_closing = True
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            make_app(site, token, hosts, listening.getsockname()[1]),
            http=Impatient,
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
    )


# -- the command -------------------------------------------------------------------------------------------


def serve(
    runs: Sequence[Path], say: Say, *, host: str = HERE, port: int = 0, also: Sequence[str] = (), demo: bool = False
) -> None:
    """Print the link of the page of these runs, and serve it until Ctrl-C or SIGTERM.

    Args:
        runs: run folders, and folders with runs below them; either may not exist yet.
        say: prints a line.
        host, port: where to listen; port 0 takes a free one.
        also: further names of the server.
        demo: whether to show made-up runs too.

    Raises:
        ImportError: starlette or uvicorn is missing.
        MonitorUnavailable: the address cannot be used, or a run is a file.
    """
    check_installed()
    for run in runs:
        if run.is_file():
            raise MonitorUnavailable(f"FOLDER must be a run folder, or one with runs below it. {run} is a file.")
    signal.signal(signal.SIGTERM, _leave)
    with listen(host, port) as listening, tempfile.TemporaryDirectory(prefix="ddp_loop-demo-") as folder:
        number = listening.getsockname()[1]
        token = secrets.token_urlsafe(32)
        with token_file(host, number, token) as (link, path):
            if not is_here(host):
                say(
                    f"WARNING: other machines can connect to {host}. Whoever has the link can read, stop and "
                    "continue the runs. The connection is not encrypted."
                )
            for run in runs:
                if not run.is_dir():
                    like = difflib.get_close_matches(run.name, _folders_beside(run), 1)
                    meant = f" Did you mean {run.with_name(like[0])}?" if like else ""
                    say(f"WARNING: {run} is no folder yet. The page shows it once a run begins there.{meant}")
            say(f"Page: {link}")
            say(f"The link is in {path} too, readable by you only. Ctrl-C ends the page, not the run.")
            more: AbstractContextManager[list[Path]] = fake_runs(Path(folder)) if demo else nullcontext([])
            with more as made:
                site = MonitorApp([*runs, *made])
                make_server(site, listening, token, names_of(host, also)).run(sockets=[listening])


def _folders_beside(run: Path) -> list[str]:
    try:
        return [one.name for one in run.absolute().parent.iterdir() if one.is_dir()]
    except OSError:
        return []


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


# -- a page that a loop starts -----------------------------------------------------------------------------


def start_page(run: Path, say: Say, linger_s: float = LINGER_S) -> int:
    """Start a process that serves the page of a run, and print its link; see [Note: Beside training].

    Args:
        run: the run folder.
        say: prints a line.
        linger_s: how long the page stays when this process has ended and no browser shows it.

    Returns:
        The process's id.

    Raises:
        ImportError: starlette or uvicorn is missing.
        MonitorUnavailable, OSError: no port is free, or no process can be started.
    """
    check_installed()
    token = secrets.token_urlsafe(32)
    job = {"run": str(run.absolute()), "token": token, "parent": os.getpid(), "linger_s": linger_s}
    with listen() as listening:
        # As inetd does, pass the socket as standard input, and no other file: if the page held a connection between
        # ranks open, its peer would not notice that it was closed. Other users cannot read a process's environment.
        start = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        process = subprocess.Popen(
            [sys.executable, "-c", start + "from ddp_loop.monitor.server import serve_child; serve_child()"],
            env={**os.environ, _JOB: json.dumps(job)},
            stdin=listening.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        say(f"Page: http://{HERE}:{listening.getsockname()[1]}/#token={token}")
    process.returncode = 0  # it outlives this process, and Popen would warn of that
    return process.pid


def serve_child() -> None:
    """Serve the page that `start_page` describes in the environment, on the socket in standard input."""
    job: dict[str, Any] = json.loads(os.environ.pop(_JOB))
    signal.signal(signal.SIGTERM, _leave)
    with socket.socket(fileno=0) as listening:
        site = MonitorApp([Path(job["run"])])
        server = make_server(site, listening, job["token"], names_of(HERE, ()))
        threading.Thread(target=_end_with, args=(job["parent"], job["linger_s"], site, server), daemon=True).start()
        server.run(sockets=[listening])


def _end_with(parent: int, linger_s: float, site: MonitorApp, server: uvicorn.Server) -> None:
    used = time.monotonic()
    while time.monotonic() - used < linger_s:
        if site.open_pages or os.getppid() == parent:
            used = time.monotonic()
        time.sleep(min(0.5, linger_s / 2))
    server.should_exit = True
