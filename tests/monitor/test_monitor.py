"""The page's server: what it says of a run folder, what it lets in, and that training does not know of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import httpx
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import RunFolder, ask_to_stop, is_running
from ddp_loop.cli import main
from ddp_loop.monitor import app as pages
from ddp_loop.monitor import server as monitor
from ddp_loop.monitor.app import BODY_BYTES, TOKEN_HEADER, MonitorApp
from ddp_loop.monitor.run_view import RunView
from tests.support.harness import OnRanks, until
from tests.support.paths import ROOT
from tests.support.serving import TOKEN, WAIT_S, Served, answers, row, served, write_lines, write_run

SLOW_CLIENTS = 200


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", [row(k) for k in range(1, 21)], status="stopped", iteration=20)


@pytest.fixture
def page(run: Path) -> Iterator[Served]:
    with served(run) as page:
        yield page


@pytest.fixture
def client(page: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.base, timeout=WAIT_S) as client:
        yield client


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- what is said of a run ---------------------------------------------------------------------------------


def test_curves_and_facts_of_a_run_are_those_of_its_files(page: Served, client: httpx.Client, run: Path) -> None:
    write_lines(run / "evaluations.jsonl", [{"epoch": 1, "iteration": 10, "accuracy": 0.5, "samples": 100}])
    write_lines(run / "ranks.jsonl", [{"iteration": 9, "ranks": [{"rank": 0, "step_s": 0.2, "wait_s": 0.1}]}])
    (said,) = client.get("/api/runs", headers=page.headers).json()["runs"]
    assert (said["key"], said["folder"], said["rows"]) == ("one", str(run), 20)
    assert said["last"] == row(20)
    assert said["by_rank"] == [{"rank": 0, "step_s": 0.2, "wait_s": 0.1, "memory_mib": None}]
    assert (said["ranks"], said["device"], said["elapsed_s"]) == (2, "cpu", 0)
    curves = client.get("/api/runs/one/curves", headers=page.headers, params={"smoothing": 4}).json()
    assert curves["x"] == list(range(1, 21))
    assert curves["curves"]["loss"] == [1 / k for k in range(1, 21)]
    assert len(curves["smoothed"]["loss"]) == 20
    assert curves["evaluated_x"] == [10]
    assert curves["evaluated"] == {"accuracy": [0.5], "samples": [100.0]}


def test_a_long_run_is_thinned_out_and_a_part_of_it_is_exact(tmp_path: Path) -> None:
    view = RunView("long", write_run(tmp_path / "long", [row(k) for k in range(1, 20_001)]))
    until(lambda: view.summary()["rows"] == 20_000, "all rows are read")
    whole = view.curves(points=500, smoothing=0, first=0, last=10**12)
    assert len(whole["x"]) <= 500
    assert (whole["x"][-1], whole["curves"]["loss"][-1]) == (20_000, 1 / 20_000)
    assert len(whole["epochs"]) <= 60
    part = view.curves(points=500, smoothing=0, first=1000, last=1099)
    assert part["x"] == list(range(999, 1101))
    assert part["epochs"] == whole["epochs"]
    assert whole["epochs"][:2] == [[4, 400], [8, 800]]  # of 199


@pytest.mark.parametrize(
    ("status", "state", "says"),
    [
        ({"status": "done", "iteration": 20, "checkpoint": "step-00000020"}, "done",
         "done at step 20, checkpoint saved"),
        ({"status": "stopped", "iteration": 20, "checkpoint": "step-00000020-2"}, "stopped",
         "stopped at step 20, checkpoint saved"),
        ({"status": "stopped", "iteration": 20, "checkpoint": "step-00000015"}, "stopped",
         "stopped at step 20, last checkpoint at step 15"),
        ({"status": "stopped", "iteration": 20}, "stopped", "stopped at step 20, no checkpoint"),
        ({"status": "left", "iteration": 20, "checkpoint": None}, "left",
         "left by its script at step 20, no checkpoint"),
        ({"status": "failed", "rank": 1, "step": 21, "stage": "backward", "why": "ValueError: x"}, "failed",
         "failed on rank 1 in step 21 (backward)"),
        ({"status": "failed", "rank": -1, "step": "?"}, "failed", "failed on a rank"),
        ({"status": "running", "iteration": 0}, "lost", "ended without a word after step 20: its process is gone"),
        ({"status": ["no", "word"]}, "lost", "ended without a word after step 20: its process is gone"),
        ({}, "waiting", "no run has begun in this folder yet"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_told_in_words(tmp_path: Path, status: dict[str, Any], state: str, says: str) -> None:
    said = RunView("one", write_run(tmp_path / "one", [row(k) for k in range(1, 21)], **status)).summary()
    assert (said["state"], said["says"]) == (state, says)
    assert said["why"] == status.get("why")
    goes_on = "cd /home/me && torchrun --nproc_per_node=2 lab/train.py --run 'runs/the one'"
    assert said["continue"] == (goes_on if state in ("stopped", "left", "failed", "lost") else None)


def test_how_far_a_run_is_and_how_long_it_takes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one", {}, None)
    try:
        folder.write_status("running", epochs=4, steps_per_epoch=100, steps=None, iteration=0)
        write_lines(tmp_path / "one" / "rows.jsonl", [row(k) for k in range(1, 101)])
        view = RunView("one", tmp_path / "one")
        said = view.summary()
        assert (said["state"], said["can_stop"], said["steps"], said["fraction"]) == ("running", True, 400, 0.25)
        assert (said["elapsed_s"], said["remaining_s"]) == (1, 3)  # 100 rows in a second, 300 to come
        assert said["samples_per_s"] == pytest.approx(1000)
        ask_to_stop(tmp_path / "one", "a test")
        said = RunView("one", tmp_path / "one").summary()
        assert (said["state"], said["says"], said["why"], said["can_stop"]) == (
            "stopping",
            "stopping…",
            "a test",
            False,
        )
    finally:
        folder.close()


@pytest.mark.slow
def test_what_is_not_there_or_cannot_be_read_is_said(page: Served, client: httpx.Client, run: Path) -> None:
    def look() -> dict[str, Any]:
        said: dict[str, Any] = client.get("/api/runs", headers=page.headers).json()["runs"][0]
        return said

    with (run / "rows.jsonl").open("a") as file:
        file.write('{"loss": 1}\n[]\nnot a row\n{"iteration": 21, "loss": null}\n{"iteration": 22, "lo')
    said = look()
    assert (said["rows"], said["last"]["iteration"]) == (21, 21)
    assert said["problems"] == [
        "rows.jsonl: 2 lines cannot be read, the first is line 22",
        "rows.jsonl: the last line is half-written and left out (21 bytes)",
        "rows.jsonl: 1 rows have no iteration and are left out",
        "1 loss is not finite",
    ]
    (run / "run.json").write_text("[")
    (run / "status.json").write_bytes(b"\xff")
    assert until(lambda: look()["state"] == "waiting", "no status")
    shutil.rmtree(run)
    said = until(lambda: (said := look())["state"] == "gone" and said, "the folder is gone")
    assert (said["says"], said["rows"]) == ("the run folder is not there any more", 21)
    assert client.get("/api/runs/one/curves", headers=page.headers).json()["x"][-1] == 21  # what was read stays
    assert client.post("/api/runs/one/stop", headers=page.headers).status_code == 409
    write_run(run, [row(1)], status="done", iteration=1)
    said = until(lambda: (said := look())["state"] == "done" and said, "another run of this folder")
    assert (said["rows"], said["problems"]) == (1, [])


def test_a_run_that_goes_on_is_read_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [row(k) for k in range(1, 21)])
    view = RunView("one", run)
    before = view.summary()["version"]
    write_lines(run / "rows.jsonl", [row(k) for k in range(1, 16)] + [row(k, loss=9.0) for k in range(16, 21)])
    said = until(lambda: (said := view.summary())["last"]["loss"] == 9.0 and said, "it was read again")
    assert said["rows"] == 20
    assert said["version"] != before  # although there are as many rows


def test_folders_of_one_name_are_two_runs(tmp_path: Path) -> None:
    views = monitor.views_of([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run"])
    assert [(view.key, view.folder.parent.name) for view in views] == [("run", "a"), ("run-2", "b")]
    assert views[0].summary()["says"] == "there is no such run folder yet"


# -- what is let in ----------------------------------------------------------------------------------------

OWN = {TOKEN_HEADER: TOKEN}
EVIL = "http://evil.example"
REFUSED: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "no token": (401, "GET", "/api/runs", {}),
    "wrong token": (403, "GET", "/api/runs", {TOKEN_HEADER: TOKEN + "x"}),
    "token in the address": (401, "GET", f"/api/runs?token={TOKEN}", {}),
    "no token for the stream": (401, "GET", "/api/stream", {}),
    "no token for curves": (401, "GET", "/api/runs/one/curves", {}),
    "no token to stop": (401, "POST", "/api/runs/one/stop", {}),
    "wrong Host": (403, "GET", "/api/runs", OWN | {"host": "evil.example"}),
    "wrong Host for a file": (403, "GET", "/", OWN | {"host": "evil.example"}),
    "Host with another port": (403, "GET", "/api/runs", OWN | {"host": "127.0.0.1:1"}),
    "Host with a user": (403, "GET", "/api/runs", OWN | {"host": "evil@127.0.0.1"}),
    "foreign Origin": (403, "POST", "/api/runs/one/stop", OWN | {"origin": EVIL}),
    "Origin of a file": (403, "POST", "/api/runs/one/stop", OWN | {"origin": "null"}),
    "Origin of another port": (403, "POST", "/api/runs/one/stop", OWN | {"origin": "http://127.0.0.1:1"}),
    "another site": (403, "GET", "/api/runs", OWN | {"sec-fetch-site": "cross-site"}),
    "another port of this machine": (403, "GET", "/api/runs", OWN | {"sec-fetch-site": "same-site"}),
    "a question before": (403, "OPTIONS", "/api/runs/one/stop", {"origin": EVIL}),
    "GET on stop": (405, "GET", "/api/runs/one/stop", OWN),
    "POST on curves": (405, "POST", "/api/runs/one/curves", OWN),
    "DELETE": (405, "DELETE", "/api/runs", OWN),
    "another run": (404, "GET", "/api/runs/two/curves", OWN),
    "stop another run": (404, "POST", "/api/runs/two/stop", OWN),
    "out of the runs": (404, "GET", "/api/runs/../../etc/curves", OWN),
    "out, encoded": (404, "GET", "/api/runs/..%2fone/curves", OWN),
    "out, encoded twice": (404, "GET", "/api/runs/..%252fone/curves", OWN),
    "to stop elsewhere": (404, "POST", "/api/runs/%2e%2e%2f%2e%2e%2ftmp/stop", OWN),
    "out of the files": (404, "GET", "/uplot/../../monitor.py", OWN),
    "out of the files, encoded": (404, "GET", "/uplot/%2e%2e/%2e%2e/monitor.py", OWN),
    "without a token no file but the page's": (401, "GET", "/monitor.py", {}),
    "no number": (400, "GET", "/api/runs/one/curves?points=many", OWN),
    "a negative number": (400, "GET", "/api/runs/one/curves?first=-1", OWN),
    "a long number": (400, "GET", f"/api/runs/one/curves?last={'9' * 4000}", OWN),
    "a body of unknown length": (413, "POST", "/api/runs/one/stop", OWN | {"transfer-encoding": "chunked"}),
    "a body too long": (413, "POST", "/api/runs/one/stop", OWN | {"content-length": str(BODY_BYTES + 1)}),
    "a body too long, behind zeros": (413, "POST", "/api/runs/one/stop", OWN | {"content-length": "00000000009999999"}),
}  # fmt: skip


def ask(page: Served, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Status and head of the answer to a request that is sent as it stands, which clients would tidy up."""
    said = {"host": f"127.0.0.1:{page.port}"} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    with socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(f"{method} {target} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode())
        if body:
            with suppress(OSError):  # it is told so, and sent away
                connection.sendall(body)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    head_of_answer = answer.partition(b"\r\n\r\n")[0].decode()
    return int(head_of_answer.split()[1]), head_of_answer.lower()


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


def test_the_pages_own_files_need_no_token_and_say_nothing_of_a_run(page: Served, client: httpx.Client) -> None:
    for path in ("/", "/page.js", "/page.css", "/charts.js", "/uplot/uPlot.iife.min.js", "/uplot/LICENSE"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert TOKEN not in answer.text
    html = client.get("/").text
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|https?://", html)


@pytest.mark.covers("E4", "E5")
def test_stop_asks_a_run_that_is_under_way_and_no_other(page: Served, client: httpx.Client, run: Path) -> None:
    answer = client.post("/api/runs/one/stop", headers=page.headers)
    assert (answer.status_code, (run / "stop").exists()) == (409, False)
    assert "only a run under way can be stopped" in answer.text
    folder = RunFolder(run, {}, True)
    try:
        answer = client.post("/api/runs/one/stop", headers=page.headers)
        assert (answer.status_code, answer.json()) == (202, {"said": "stopping"})
        assert folder.asked_to_stop() == "the page"
    finally:
        folder.close()


def test_a_stream_says_what_is_new(page: Served, client: httpx.Client, run: Path) -> None:
    with client.stream("GET", "/api/stream", headers=page.headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["runs"][0]["rows"] == 20
        assert page.site.open_pages == 1
        with (run / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row(21)) + "\n")
        assert json.loads(next(lines).removeprefix("data: "))["runs"][0]["last"] == row(21)
    until(lambda: page.site.open_pages == 0, "the stream's end is seen")


# -- many clients ------------------------------------------------------------------------------------------


@pytest.mark.covers("E4")
@pytest.mark.slow
def test_200_slow_clients_neither_keep_others_out_nor_are_work_each(
    page: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, usual = list[float](), page.site.state

    def state() -> str:
        made.append(time.monotonic())
        return usual()

    monkeypatch.setattr(page.site, "state", state)
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


def test_a_client_that_asks_for_nothing_is_sent_away(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "REQUEST_S", 0.1)
    with served(run) as page, socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /api/runs HTTP/1.1\r\nhost: ")
        assert connection.recv(100) == b""


def test_a_client_that_asks_for_nothing_more_is_sent_away(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "REQUEST_S", 0.1)
    with served(run) as page, socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S) as connection:
        connection.sendall(f"GET /icon.svg HTTP/1.1\r\nhost: 127.0.0.1:{page.port}\r\n\r\n".encode())
        answer = b""
        while b"</svg>" not in answer:
            answer += connection.recv(65536)
        connection.sendall(b"G")  # which ends the server's own wait for a next request
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""


# -- the process -------------------------------------------------------------------------------------------


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The command, and what it says; ended at the end, whatever happens."""
    command = [sys.executable, "-m", "ddp_loop", "monitor", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process, cast("IO[str]", process.stdout)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.covers("E4")
def test_the_command_prints_its_link_once_keeps_it_to_its_user_and_ends_when_told() -> None:
    with started("--demo") as (process, said_by_it):
        link, said = said_by_it.readline(), said_by_it.readline()
        found = re.fullmatch(r"Page: http://127\.0\.0\.1:(\d+)/#token=([\w-]{40,})\n", link)
        assert found, link
        path = Path(said.split()[4])
        assert path.read_text() == link.removeprefix("Page: ")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", headers={TOKEN_HEADER: found[2]}) as client:
            done, other = client.get("/api/runs", timeout=WAIT_S).json()["runs"]
            assert (done["state"], other["state"], done["fraction"]) == ("done", "running", 1.0)
            assert len(client.get("/api/runs/tuesday/curves", timeout=WAIT_S).json()["x"]) > 500
            assert client.post(f"/api/runs/{other['key']}/stop", timeout=WAIT_S).status_code == 202

            def is_stopped() -> bool:
                return bool(client.get("/api/runs", timeout=WAIT_S).json()["runs"][1]["state"] == "stopped")

            until(is_stopped, "the made-up run stops")
        process.send_signal(signal.SIGTERM)
        assert said_by_it.read() == ""
        assert process.wait(WAIT_S) == 143
        assert not path.parent.exists()


@pytest.mark.slow
def test_more_than_this_machine_needs_a_flag_and_brings_a_warning(run: Path) -> None:
    with started(str(run), "--host", "0.0.0.0", "--allow-host", "train.example") as (process, said):
        assert said.readline().startswith("WARNING: 0.0.0.0 is more than this machine: whoever sees the link")
        link = said.readline()
        found = re.search(r":(\d+)/#token=(\S+)", link)
        assert found, link
        assert socket.gethostname() in link
        page = Served(MonitorApp([]), int(found[1]))
        for host, status in (("127.0.0.1", 200), ("train.example", 200), ("evil.example", 403), ("127.0.0.2", 403)):
            assert ask(page, "GET", "/api/runs", {TOKEN_HEADER: found[2], "host": f"{host}:{found[1]}"})[0] == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143


def test_only_this_machine_is_listened_to_unless_asked_otherwise() -> None:
    with monitor.listen() as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        assert all(map(monitor.is_here, ("127.0.0.1", "::1", "localhost")))
        assert not any(map(monitor.is_here, ("0.0.0.0", "::", "10.0.0.1", "host")))
        with pytest.raises(monitor.MonitorUnavailable, match="cannot be had"):
            monitor.listen(port=listening.getsockname()[1])


def test_without_its_libraries_the_command_that_helps_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor"]) == 2
    assert "at least one RUN" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["monitor", "--demo"]) == 2
    assert "uvicorn is missing: pip install 'ddp_loop[monitor]'" in capsys.readouterr().err


# -- beside training ---------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from contextlib import suppress
from pathlib import Path
import httpx, torch
from torch import nn
import ddp_loop as dl
from ddp_loop.monitor import start_page

said = []
Path(sys.argv[1]).mkdir()
held = [os.open(sys.argv[1] + "/held", os.O_CREAT) for _ in range(3)]
for file in held:
    os.set_inheritable(file, True)  # as the sockets of gloo may be
with dl.join_world(seed=1) as world:
    world.print = said.append
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = dl.Batches(torch.arange(60.0).reshape(20, 3) / 60, 4, world)
    loop = dl.Loop(batches, 2, state=dict(model=model, optimizer=optimizer), run_dir=sys.argv[1], monitor=True,
                   progress=False)
    base, token = said[0].removeprefix("Page: ").split("/#token=")
    for step in loop:
        for rows in step:
            step.backward((model(rows) - rows.sum(1, keepdim=True)).square().mean())
        step.fold()
        optimizer.step()
        if step.iteration == 3:
            state = httpx.get(base + "/api/runs", headers={"x-monitor-token": token}, timeout=60).json()
            (page,) = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
            files = []
            for file in Path(f"/proc/{page}/fd").iterdir():
                with suppress(FileNotFoundError):  # the connection of that question, which ends now
                    files.append(os.readlink(file))
            os.kill(page, signal.SIGKILL)
            os.waitpid(page, 0)
print(state["runs"][0]["state"], model.weight.tolist())
print([file for file in files if sys.argv[1] in file])
for file in held:
    os.close(file)
start_page(Path(sys.argv[1]), print, linger_s=0.5)  # it is there when this process has ended
"""


@pytest.mark.slow
@pytest.mark.covers("E4", "E6")
def test_the_page_of_a_loop_is_there_while_it_runs_and_killed_changes_nothing_and_ends_after_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, files, link = done.stdout.splitlines()
    assert first == f"running {without_a_page()}"
    assert files == "[]"  # it holds nothing of the run open
    port = int(link.partition("/#")[0].rpartition(":")[2])
    until(lambda: not answers(port), "the page ends after its script")


def without_a_page() -> list[list[float]]:
    with dl.join_world(seed=1) as world:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(torch.arange(60.0).reshape(20, 3) / 60, 4, world)
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows in step:
                step.backward((model(rows) - rows.sum(1, keepdim=True)).square().mean())
            step.fold()
            optimizer.step()
    weights: list[list[float]] = model.weight.tolist()
    return weights


def page_without_a_folder() -> None:
    with dl.join_world() as world:
        dl.Loop(dl.Batches(torch.ones(4, 2), 2, world), 1, state={"model": nn.Linear(2, 1)}, monitor=True)


def test_a_page_without_a_run_folder_is_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"monitor=True without one\. Pass run_dir="):
        on_ranks(2, page_without_a_folder)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: elsewhere the lock can be looked at only by taking it"
)
def test_to_look_at_a_run_folder_takes_no_lock_that_a_run_would_find_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It did, for 10 microseconds: of 200 runs that began while a page looked all the time, 3 were refused.
    RunFolder(run, {}, True).close()
    taken: list[int] = []
    monkeypatch.setattr("ddp_loop.checkpoint.run_folder.fcntl.lockf", lambda file, how: taken.append(how))
    assert not is_running(run)
    assert taken == []


def hold_or_look(folder: str) -> bool:
    """Rank 0 holds the run folder while the others look."""
    with dl.join_world() as world:
        held = RunFolder(Path(folder), {}, None) if world.rank == 0 else None
        world.sum(torch.zeros(1))
        said = is_running(Path(folder))
        world.sum(torch.zeros(1))
        if held is not None:
            held.close()
        return said


def test_another_process_sees_that_a_run_folder_is_held(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, hold_or_look, str(tmp_path)) == [True, True]
    assert not is_running(tmp_path)
