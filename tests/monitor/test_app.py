"""The monitor's application: the requests that it refuses, its answers, and many clients at once."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from ddp_loop.checkpoint import RunFolder
from ddp_loop.monitor import app as pages
from ddp_loop.monitor import server as monitor
from ddp_loop.monitor.app import BODY_BYTES, TOKEN_HEADER
from ddp_loop.monitor.run_list import Snapshot
from tests.support.harness import until
from tests.support.serving import TOKEN, WAIT_S, Served, ask, row, served

SLOW_CLIENTS = 200


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


OWN = {TOKEN_HEADER: TOKEN}
EVIL = "http://evil.example"
REFUSED: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "no token": (401, "GET", "/api/runs", {}),
    "wrong token": (403, "GET", "/api/runs", {TOKEN_HEADER: TOKEN + "x"}),
    "token in the address": (401, "GET", f"/api/runs?token={TOKEN}", {}),
    "no token for the stream": (401, "GET", "/api/stream", {}),
    "no token for a card": (401, "GET", "/api/runs/one", {}),
    "no token for curves": (401, "GET", "/api/runs/one/curves", {}),
    "no token for values": (401, "GET", "/api/runs/one/values?name=loss", {}),
    "no token to rename": (401, "POST", "/api/runs/one/name", {}),
    "no token to stop": (401, "POST", "/api/runs/one/stop", {}),
    "wrong Host": (403, "GET", "/api/runs", OWN | {"host": "evil.example"}),
    "wrong Host for a file": (403, "GET", "/", OWN | {"host": "evil.example"}),
    "Host with another port": (403, "GET", "/api/runs", OWN | {"host": "127.0.0.1:1"}),
    "Host with a user": (403, "GET", "/api/runs", OWN | {"host": "evil@127.0.0.1"}),
    "foreign Origin": (403, "POST", "/api/runs/one/stop", OWN | {"origin": EVIL}),
    "foreign Origin of a name": (403, "POST", "/api/runs/one/name", OWN | {"origin": EVIL}),
    "Origin of a file": (403, "POST", "/api/runs/one/stop", OWN | {"origin": "null"}),
    "Origin of another port": (403, "POST", "/api/runs/one/stop", OWN | {"origin": "http://127.0.0.1:1"}),
    "another site": (403, "GET", "/api/runs", OWN | {"sec-fetch-site": "cross-site"}),
    "another port of this machine": (403, "GET", "/api/runs", OWN | {"sec-fetch-site": "same-site"}),
    "a question before": (403, "OPTIONS", "/api/runs/one/stop", {"origin": EVIL}),
    "GET on stop": (405, "GET", "/api/runs/one/stop", OWN),
    "POST on curves": (405, "POST", "/api/runs/one/curves", OWN),
    "GET on a name": (405, "GET", "/api/runs/one/name", OWN),
    "POST on values": (405, "POST", "/api/runs/one/values?name=loss", OWN),
    "DELETE": (405, "DELETE", "/api/runs", OWN),
    "POST on a card": (405, "POST", "/api/runs/one", OWN),
    "another run's card": (404, "GET", "/api/runs/two", OWN),
    "another run": (404, "GET", "/api/runs/two/curves", OWN),
    "another run's values": (404, "GET", "/api/runs/two/values?name=loss", OWN),
    "rename another run": (404, "POST", "/api/runs/two/name", OWN),
    "values of no metric": (404, "GET", "/api/runs/one/values", OWN),
    "values of a file": (404, "GET", "/api/runs/one/values?name=../rows.jsonl", OWN),
    "stop another run": (404, "POST", "/api/runs/two/stop", OWN),
    "out of the runs": (404, "GET", "/api/runs/../../etc/curves", OWN),
    "out, encoded": (404, "GET", "/api/runs/..%2fone/curves", OWN),
    "out, encoded twice": (404, "GET", "/api/runs/..%252fone/curves", OWN),
    "to stop elsewhere": (404, "POST", "/api/runs/%2e%2e%2f%2e%2e%2ftmp/stop", OWN),
    "out of the files": (404, "GET", "/uplot/../../monitor.py", OWN),
    "out of the files, encoded": (404, "GET", "/uplot/%2e%2e/%2e%2e/monitor.py", OWN),
    "without a token no file but the page's": (401, "GET", "/monitor.py", {}),
    "no number": (400, "GET", "/api/runs/one/curves?points=many", OWN),
    "another axis": (400, "GET", "/api/runs/one/curves?axis=constructor", OWN),
    "a negative number": (400, "GET", "/api/runs/one/curves?first=-1", OWN),
    "a long number": (400, "GET", f"/api/runs/one/curves?last={'9' * 4000}", OWN),
    "a body of unknown length": (413, "POST", "/api/runs/one/stop", OWN | {"transfer-encoding": "chunked"}),
    "a body too long": (413, "POST", "/api/runs/one/stop", OWN | {"content-length": str(BODY_BYTES + 1)}),
    "a body too long, behind zeros": (413, "POST", "/api/runs/one/stop", OWN | {"content-length": "00000000009999999"}),
}  # fmt: skip


@pytest.mark.covers("E4")
@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_and_changes_nothing(page: Served, run: Path, case: str) -> None:
    status, method, target, headers = REFUSED[case]
    before = contents(run)
    found, head = ask(page, method, target, headers)
    assert found == status
    assert "access-control" not in head
    assert "content-security-policy: default-src 'self'" in head
    assert contents(run) == before


def test_a_body_of_10_mb_is_refused_before_it_is_read(page: Served, run: Path) -> None:
    before = contents(run)
    body = b"x" * 10_000_000
    assert ask(page, "POST", "/api/runs/one/stop", OWN | {"content-length": str(len(body))}, body)[0] == 413
    assert ask(page, "GET", "/api/runs", OWN)[0] == 200
    assert contents(run) == before


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST"])
def test_the_page_answers_to_its_own_names(page: Served, name: str) -> None:
    elsewhere = {"host": f"{name}:{page.port}", "sec-fetch-site": "cross-site"}
    assert ask(page, "GET", "/", elsewhere)[0] == 200  # a link that was followed
    own = OWN | {"host": f"{name}:{page.port}", "origin": f"http://{name}:{page.port}", "sec-fetch-site": "same-origin"}
    assert ask(page, "GET", "/api/runs", own)[0] == 200


def test_two_hosts_or_two_tokens_are_none(page: Served) -> None:
    assert ask(page, "GET", "/api/runs", OWN | {TOKEN_HEADER.upper(): TOKEN})[0] == 403
    assert ask(page, "GET", "/", {"Host": "evil.example"})[0] in (400, 403)


def test_the_pages_own_files_need_no_token_and_show_nothing_of_a_run(page: Served, client: httpx.Client) -> None:
    for path in (
        "/",
        "/page.js",
        "/page.css",
        "/charts.js",
        "/axis.js",
        "/naming.js",
        "/uplot/uPlot.iife.min.js",
        "/uplot/LICENSE",
    ):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert TOKEN not in answer.text
    html = client.get("/").text
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|https?://", html)


@pytest.mark.covers("E4", "E5")
def test_stop_asks_a_running_run_and_no_other(page: Served, client: httpx.Client, run: Path) -> None:
    answer = client.post("/api/runs/one/stop", headers=page.headers)
    assert (answer.status_code, (run / "stop").exists()) == (409, False)
    assert "No run is active in " in answer.text
    folder = RunFolder(run, {}, True)
    try:
        answer = client.post("/api/runs/one/stop", headers=page.headers)
        assert (answer.status_code, answer.json()) == (202, {"said": "stopping"})
        assert folder.asked_to_stop() == "the page"
    finally:
        folder.close()


def test_a_stream_sends_what_is_new(page: Served, client: httpx.Client, run: Path) -> None:
    with client.stream("GET", "/api/stream", headers=page.headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert (first["all"], first["runs"][0]["last"]) == (True, {"loss": 1 / 20})
        assert page.site.open_pages == 1
        with (run / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row(21)) + "\n")
        then = json.loads(next(lines).removeprefix("data: "))
        assert (then["all"], then["runs"][0]["last"]) == (False, {"loss": 1 / 21})
    until(lambda: page.site.open_pages == 0, "the stream's end is seen")


# -- many clients ----------------------------------------------------------------------------------------


@pytest.mark.covers("E4")
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
            assert client.get(path, headers=page.headers).status_code == 200
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
