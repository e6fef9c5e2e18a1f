"""A page's server on a free port, in a thread, and run folders for it to show."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ddp_loop.checkpoint import STATUS, RunFolder
from ddp_loop.checkpoint.atomic_files import write_atomic
from ddp_loop.checkpoint.run_folder import RUN
from ddp_loop.monitor.app import TOKEN_HEADER, MonitorApp
from ddp_loop.monitor.server import HERE, listen, make_server, names_of

TOKEN = "a-token-of-the-tests"
START = ["torchrun", "--nproc_per_node=2", "lab/train.py", "--run", "runs/the one"]
COMMAND = {"start": START, "directory": "/home/me"}
WAIT_S = 60.0  # for what takes a moment


@dataclass(frozen=True)
class Served:
    """A page that is served.

    Attributes:
        visitors: called before the server ends. A browser that is left open would report the lost connection.
    """

    site: MonitorApp
    port: int
    visitors: ExitStack = field(default_factory=ExitStack)

    @property
    def base(self) -> str:
        return f"http://{HERE}:{self.port}"

    @property
    def link(self) -> str:
        return f"{self.base}/#token={TOKEN}"

    @property
    def headers(self) -> dict[str, str]:
        return {TOKEN_HEADER: TOKEN}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base, headers=self.headers, timeout=WAIT_S)


@contextmanager
def served(*runs: Path, port: int = 0) -> Iterator[Served]:
    """Serve the page of these runs."""
    site = MonitorApp(runs)
    with listen(port=port) as listening:
        number = listening.getsockname()[1]
        server = make_server(site, listening, TOKEN, names_of(HERE, ()))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            with ExitStack() as visitors:
                yield Served(site, number, visitors)
        finally:
            server.should_exit = True
            thread.join()


def answers(port: int) -> bool:
    """Whether a process listens at a port of this machine."""
    try:
        socket.create_connection((HERE, port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def ask(page: Served, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Return the status and the head of the answer to a request that is sent as it stands; clients would tidy it up."""
    said = {"host": f"127.0.0.1:{page.port}"} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    with socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(f"{method} {target} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode())
        connection.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = connection.recv(65536)
            assert part, answer
            answer += part
    head_of_answer = answer.partition(b"\r\n\r\n")[0].decode()
    return int(head_of_answer.split()[1]), head_of_answer.lower()


def row(iteration: int, **values: Any) -> dict[str, Any]:
    return {
        "epoch": (iteration - 1) // 100 + 1,
        "iteration": iteration,
        "samples": 10,
        "loss": 1 / iteration,
        **{name: value for name, value in values.items() if name != "elapsed_s"},
        "elapsed_s": values.get("elapsed_s", iteration * 0.01),  # the last one, as in a run
    }


def logged_line(iteration: int, **values: Any) -> dict[str, Any]:
    """As of an evaluation or of `loop.log`."""
    return {"epoch": (iteration - 1) // 100 + 1, "iteration": iteration, "elapsed_s": iteration * 0.01, **values}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


@contextmanager
def running(folder: Path, *, epochs: int = 2) -> Iterator[RunFolder]:
    """A run of epochs of 100 steps, which this process holds."""
    with closing(RunFolder(folder, {}, None)) as held:
        held.write_status("running", epochs=epochs, steps_per_epoch=100, steps=None, iteration=0)
        yield held


def write_run(folder: Path, rows: Iterable[Mapping[str, Any]] | int = 1, **status: Any) -> Path:
    """A run folder that no process holds; `began` and `config` are not of its status.

    A number of rows stands for that many usual ones, after which the run ended.
    """
    about = {"id": "0123456789abcdef", "began": status.pop("began", 1.0), "fingerprint": {}}
    if "config" in status:
        about["config"] = status.pop("config")
    if isinstance(rows, int):
        status = {"iteration": rows} | status if status else {}
        rows = map(row, range(1, rows + 1))
    folder.mkdir(parents=True)
    write_atomic(folder / RUN, about)
    write_lines(folder / "rows.jsonl", rows)
    if status:
        write_atomic(folder / STATUS, {"at": time.time(), "process": 1, "ranks": 2, "device": "cpu"} | COMMAND | status)
    return folder
