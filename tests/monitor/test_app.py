"""The monitor's application: the requests that it refuses, its answers, and many clients at once."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from ddp_loop.checkpoint import RunFolder, asked_to_stop
from ddp_loop.monitor import app as pages
from ddp_loop.monitor import server as monitor
from ddp_loop.monitor.app import BODY_BYTES, TOKEN_HEADER
from ddp_loop.monitor.continuing import command_of
from ddp_loop.monitor.run_list import Snapshot
from tests.support.harness import until
from tests.support.logged_files import add_texts, append_lines, python_command, write_start
from tests.support.serving import TOKEN, WAIT_S, Served, ask, row, served

pytestmark = pytest.mark.covers("E4")

SLOW_CLIENTS = 200


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OWN = {TOKEN_HEADER: TOKEN}
ORIGIN = {"origin": "http://evil.example"}
READ = (
    "runs", "sweeps", "stream", "runs/one", "runs/one/curves", "runs/one/values?name=loss", "runs/one/usage",
    "runs/one/console?name=rank-0", "runs/one/texts", "runs/one/texts?number=0", "runs/one/images",
    "runs/one/images/0", "runs/one/tables/confusion",
)  # fmt: skip
WRITTEN = (
    "runs/one/stop",
    "runs/one/name",
    "runs/one/note",
    "runs/one/continue",
    "sweeps/one/stop",
    "sweeps/one/again",
)
FOREIGN: dict[str, tuple[int, dict[str, str]]] = {
    "no token": (401, {}),
    "wrong token": (403, {TOKEN_HEADER: TOKEN + "x"}),
    "two tokens": (403, OWN | {TOKEN_HEADER.upper(): TOKEN}),
    "wrong Host": (403, OWN | {"host": "evil.example"}),
    "Host with another port": (403, OWN | {"host": "127.0.0.1:1"}),
    "Host with a user": (403, OWN | {"host": "evil@127.0.0.1"}),
    "foreign Origin": (403, OWN | ORIGIN),
    "Origin of a file": (403, OWN | {"origin": "null"}),
    "Origin of another port": (403, OWN | {"origin": "http://127.0.0.1:1"}),
    "another site": (403, OWN | {"sec-fetch-site": "cross-site"}),
    "another port of this machine": (403, OWN | {"sec-fetch-site": "same-site"}),
    "a body of unknown length": (413, OWN | {"transfer-encoding": "chunked"}),
    "a body too long": (413, OWN | {"content-length": str(BODY_BYTES + 1)}),
    "a body too long, behind zeros": (413, OWN | {"content-length": "00000000009999999"}),
}


@pytest.mark.parametrize(("method", "other", "targets"), [("GET", "POST", READ), ("POST", "GET", WRITTEN)])
def test_every_request_needs_the_token_and_the_own_address(
    page: Served, run: Path, method: str, other: str, targets: tuple[str, ...]
) -> None:
    (run.parent / "train.py").write_text("open('made', 'w').close()")
    write_start(run, python_command("train.py"), run.parent)
    body = command_of(run).digest.encode() if method == "POST" else b""  # with which Continue would start it
    before = contents(run.parent)

    def answer(way: str, target: str, headers: dict[str, str]) -> int:
        status, head = ask(page, way, f"/api/{target}", {"content-length": str(len(body))} | headers, body)
        assert "access-control" not in head
        assert "content-security-policy: default-src 'self';" in head
        return status

    for target in targets:
        for what, (status, headers) in FOREIGN.items():
            assert answer(method, target, headers) == status, (target, what)
        assert answer(method, f"{target}{'&' if '?' in target else '?'}token={TOKEN}", {}) == 401, target
        for way in (other, "PUT", "DELETE"):
            assert answer(way, target, OWN) == 405, (target, way)
        if "/one" in target:
            assert answer(method, target.replace("/one", "/two"), OWN) == 404, target
    assert contents(run.parent) == before


REFUSED: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "wrong Host for a file": (403, "GET", "/", OWN | {"host": "evil.example"}),
    "two Hosts": (400, "GET", "/", {"Host": "evil.example"}),
    "a question before": (403, "OPTIONS", "/api/runs/one/stop", ORIGIN),
    "GET on stop": (405, "GET", "/api/runs/one/stop", OWN),
    "values of no metric": (404, "GET", "/api/runs/one/values", OWN),
    "values of a file": (404, "GET", "/api/runs/one/values?name=../rows.jsonl", OWN),
    "out of the runs": (404, "GET", "/api/runs/../../etc/curves", OWN),
    "out, encoded": (404, "GET", "/api/runs/..%2fone/curves", OWN),
    "out, encoded twice": (404, "GET", "/api/runs/..%252fone/curves", OWN),
    "to stop elsewhere": (404, "POST", "/api/runs/%2e%2e%2f%2e%2e%2ftmp/stop", OWN),
    "to stop a sweep elsewhere": (404, "POST", "/api/sweeps/..%2fone/stop", OWN),
    "a note elsewhere": (404, "POST", "/api/runs/../../etc/note", OWN),
    "a name elsewhere, encoded": (404, "POST", "/api/runs/one%2f..%2f..%2fother/name", OWN),
    "out of the files": (404, "GET", "/uplot/../../monitor.py", OWN),
    "out of the files, encoded": (404, "GET", "/uplot/%2e%2e/%2e%2e/monitor.py", OWN),
    "without a token no file but the page's": (401, "GET", "/monitor.py", {}),
    "no number": (400, "GET", "/api/runs/one/curves?points=many", OWN),
    "another axis": (400, "GET", "/api/runs/one/curves?axis=constructor", OWN),
    "a negative number": (400, "GET", "/api/runs/one/curves?first=-1", OWN),
    "a long number": (400, "GET", f"/api/runs/one/curves?last={'9' * 4000}", OWN),
}  # fmt: skip


def test_a_request_for_what_is_not_there_is_refused_and_changes_nothing(page: Served, run: Path) -> None:
    before = contents(run.parent)
    for case, (status, method, target, headers) in REFUSED.items():
        assert ask(page, method, target, headers)[0] == status, case
    assert ask(page, "GET", "/api/runs", OWN)[0] == 200
    assert contents(run.parent) == before


UNREAD: dict[str, tuple[int, str, bytes, bytes]] = {
    "a long body": (413, "one/stop", b"content-length: 10000000", b"x" * 10_000_000),
    "one of unknown length": (413, "one/stop", b"transfer-encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n"),
    "no chunks": (413, "one/stop", b"transfer-encoding: chunked", b"zz\r\n" * 1000),
    "one that is only read": (405, "one/curves", b"content-length: 2000", b"x" * 2000),
}


@pytest.mark.parametrize("case", UNREAD)
@pytest.mark.parametrize("keep", [b"", b"connection: close\r\n"])
def test_a_body_that_is_not_wanted_is_read_so_that_no_reset_takes_the_answer_away(
    page: Served, run: Path, case: str, keep: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    status, target, length, body = UNREAD[case]
    head = f"POST /api/runs/{target} HTTP/1.1\r\nhost: 127.0.0.1:{page.port}\r\n{TOKEN_HEADER}: {TOKEN}\r\n".encode()
    with socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(head + keep + length + b"\r\n\r\n")
        with closing(http.client.HTTPResponse(connection)) as answer:
            answer.begin()
            answer.read()
        assert answer.status == status
        try:
            for part in (body[:100], body[100:]):
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        except OSError:
            assert case == "no chunks"
    assert capfd.readouterr().err == ""


def test_the_page_answers_to_its_own_names(page: Served) -> None:
    for name in ("127.0.0.1", "localhost", "LOCALHOST"):
        host = f"{name}:{page.port}"
        assert ask(page, "GET", "/", {"host": host, "sec-fetch-site": "cross-site"})[0] == 200  # a link was followed
        own = OWN | {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert ask(page, "GET", "/api/runs", own)[0] == 200


def test_the_pages_own_files_need_no_token_and_show_nothing_of_a_run(page: Served) -> None:
    assert {"/page.js", "/page.css", "/uplot/uPlot.iife.min.js", "/uplot/LICENSE"} < pages.PATHS.keys()
    with httpx.Client(base_url=page.base) as client:
        for path in pages.PATHS:
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert TOKEN not in answer.text
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|https?://", client.get("/").text)


@pytest.mark.covers("E5")
def test_stop_asks_a_running_run_and_no_other(page: Served, client: httpx.Client, run: Path) -> None:
    answer = client.post("/api/runs/one/stop")
    assert (answer.status_code, (run / "stop").exists()) == (409, False)
    assert "No run is active in " in answer.text
    with closing(RunFolder(run, {}, True)) as folder:
        answer = client.post("/api/runs/one/stop")
        assert (answer.status_code, answer.json()) == (202, {"said": "stopping"})
        assert asked_to_stop(folder.folder) == "the page"


def test_a_stream_sends_what_is_new(page: Served, client: httpx.Client, run: Path) -> None:
    with client.stream("GET", "/api/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        first = next(events)
        assert (first["all"], first["runs"][0]["last"]) == (True, {"loss": 1 / 20})
        assert page.site.open_pages == 1
        append_lines(run / "rows.jsonl", [row(21)])
        then = next(events)
        assert (then["all"], then["runs"][0]["last"]) == (False, {"loss": 1 / 21})
        add_texts(run, (21, "sample", "one"))
        assert [one["key"] for one in next(events)["runs"]] == ["one"]
    until(lambda: page.site.open_pages == 0, "the stream's end is seen")


# -- many clients ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_200_slow_clients_neither_block_others_nor_cost_work_each(
    page: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, usual = list[float](), page.site.runs.look

    def look() -> Snapshot:
        made.append(time.monotonic())
        return usual()

    monkeypatch.setattr(page.site.runs, "look", look)
    stream = f"GET /api/stream HTTP/1.1\r\nhost: 127.0.0.1:{page.port}\r\n{TOKEN_HEADER}: {TOKEN}\r\n\r\n"
    with ExitStack() as stack:
        for number in range(SLOW_CLIENTS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S))
            connection.sendall(stream.encode() if number % 2 else b"GET / HTTP/1.1\r\nhost: ")  # and never reads
        until(lambda: page.site.open_pages == SLOW_CLIENTS // 2, "all streams are open")
        made.clear()
        until(lambda: len(made) >= 4, "the streams are served")
        streamed = [later - earlier for earlier, later in pairwise(made)]
        for path in ("/", "/api/runs"):
            assert client.get(path).status_code == 200
    assert min(streamed) >= 0.4 * pages.TICK_S  # once a tick for all of them, not once for each
    until(lambda: page.site.open_pages == 0, "the streams are gone")


def test_a_client_without_a_request_is_disconnected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "REQUEST_S", 0.1)
    with served(run) as page, socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /api/runs HTTP/1.1\r\nhost: ")
        assert connection.recv(100) == b""


@pytest.mark.slow
def test_a_client_without_a_further_request_is_disconnected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(run) as page, socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        for wait_s in (monitor.REQUEST_S, 0.1):  # the second one counts from the second answer
            monkeypatch.setattr(monitor, "REQUEST_S", wait_s)
            connection.sendall(f"GET /icon.svg HTTP/1.1\r\nhost: 127.0.0.1:{page.port}\r\n\r\n".encode())
            answer = b""
            while b"</svg>" not in answer and (part := connection.recv(65536)):
                answer += part
            assert b"</svg>" in answer
        connection.sendall(b"G")  # this ends the server's own wait for a next request
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
