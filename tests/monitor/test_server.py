"""The monitor's process: the command, its link, and a page during training."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import httpx
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.monitor import server as monitor
from ddp_loop.monitor.app import TOKEN_HEADER, MonitorApp
from tests.support.harness import OnRanks, until
from tests.support.paths import ROOT
from tests.support.scripts import run
from tests.support.serving import WAIT_S, Served, answers, ask
from tests.support.training import sgd, train_in


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The command and its output; it is always terminated at the end."""
    command = [sys.executable, "-m", "ddp_loop", "monitor", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process, cast("IO[str]", process.stdout)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.covers("E4")
def test_the_command_prints_its_link_once_keeps_it_to_its_user_and_ends_on_request() -> None:
    with started("--demo") as (process, said_by_it):
        link, said = said_by_it.readline(), said_by_it.readline()
        found = re.fullmatch(r"Page: http://127\.0\.0\.1:(\d+)/#token=([\w-]{40,})\n", link)
        assert found, link
        path = Path(said.split()[4])
        assert path.read_text() == link.removeprefix("Page: ")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", headers={TOKEN_HEADER: found[2]}) as client:
            runs = {run["key"]: run for run in client.get("/api/runs", timeout=WAIT_S).json()["runs"]}
            assert len(runs) == 12
            done, other = runs["trials/0000"], runs["trials/0011"]
            assert (done["state"], other["state"], done["fraction"]) == ("done", "running", 1.0)
            assert len(client.get("/api/runs/trials/0000/curves", timeout=WAIT_S).json()["x"]) > 500
            assert client.post("/api/runs/trials/0011/stop", timeout=WAIT_S).status_code == 202

            def is_stopped() -> bool:
                return bool(client.get("/api/runs/trials/0011", timeout=WAIT_S).json()["state"] == "stopped")

            until(is_stopped, "the made-up run stops")
        process.send_signal(signal.SIGTERM)
        assert said_by_it.read() == ""
        assert process.wait(WAIT_S) == 143
        assert not path.parent.exists()


@pytest.mark.slow
def test_a_folder_that_is_not_there_and_more_than_this_machine_bring_warnings(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    folder = tmp_path / "digit"
    with started(str(folder), "--host", "0.0.0.0", "--allow-host", "train.example") as (process, said):
        assert said.readline().startswith("WARNING: other machines can connect to 0.0.0.0. Whoever has the link")
        assert said.readline() == (
            f"WARNING: {folder} is no folder yet. The page shows it once a run begins there. "
            f"Did you mean {tmp_path / 'digits'}?\n"
        )
        link = said.readline()
        found = re.search(r":(\d+)/#token=(\S+)", link)
        assert found, link
        assert socket.gethostname() in link
        page = Served(MonitorApp([]), int(found[1]))
        for host, status in (("127.0.0.1", 200), ("train.example", 200), ("evil.example", 403), ("127.0.0.2", 403)):
            assert ask(page, "GET", "/api/runs", {TOKEN_HEADER: found[2], "host": f"{host}:{found[1]}"})[0] == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143


def test_the_page_listens_on_this_machine_only_unless_asked_otherwise() -> None:
    with monitor.listen() as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        assert all(map(monitor.is_here, ("127.0.0.1", "::1", "localhost")))
        assert not any(map(monitor.is_here, ("0.0.0.0", "::", "10.0.0.1", "host")))
        with pytest.raises(monitor.MonitorUnavailable, match=r"cannot be used .* Leave out --port"):
            monitor.listen(port=listening.getsockname()[1])


def test_an_address_of_no_machine_and_a_file_in_place_of_a_folder_are_refused_with_their_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["monitor", "--demo", "--host", "192.0.2.1"]) == 2  # of documentation: no machine has it
    assert "192.0.2.1 cannot be used" in (said := capsys.readouterr().err)
    assert "Pass an address of this machine as --host" in said
    assert main(["monitor", __file__]) == 2
    assert f"one with runs below it. {__file__} is a file." in capsys.readouterr().err


def test_without_its_libraries_the_error_names_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor"]) == 2
    assert "at least one FOLDER" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["monitor", "--demo"]) == 2
    assert "uvicorn is missing. Run pip install 'ddp_loop[monitor]'" in capsys.readouterr().err


# -- during training -------------------------------------------------------------------------------------

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
    batches = dl.Batches(torch.arange(60.0).reshape(20, 3) / 60, 4, world, shuffle=False)
    loop = dl.Loop(batches, 2, state=dict(model=model, optimizer=optimizer), run_dir=sys.argv[1], monitor=True,
                   progress=False)
    base, token = said[0].removeprefix("Page: ").split("/#token=")
    for step in loop:
        for rows in step:
            step.backward(nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)))
        step.fold()
        optimizer.step()
        if step.iteration == 3:
            state = httpx.get(base + "/api/runs", headers={"x-monitor-token": token}, timeout=60).json()
            (page,) = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
            files = []
            for file in Path(f"/proc/{page}/fd").iterdir():
                with suppress(FileNotFoundError):  # the connection of that question, which ends now
                    files.append(os.readlink(file))
            own_session = os.getsid(page) == page
            os.kill(page, signal.SIGKILL)
            os.waitpid(page, 0)
print(state["runs"][0]["state"], model.weight.tolist())
print([file for file in files if sys.argv[1] in file], own_session)
for file in held:
    os.close(file)
start_page(Path(sys.argv[1]), print, linger_s=0.5)  # it is there when this process has ended
"""


@pytest.mark.slow
@pytest.mark.covers("E4", "E6")
def test_the_page_of_a_loop_serves_while_it_runs_may_be_killed_and_ends_after_it(tmp_path: Path) -> None:
    done = run("-W", "error", "-c", SCRIPT, str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    first, files, link = done.stdout.splitlines()
    assert first == f"running {without_a_page()}"
    assert files == "[] True"  # it holds nothing of the run open, and the run's terminal sends it no Ctrl-C
    port = int(link.partition("/#")[0].rpartition(":")[2])
    until(lambda: not answers(port), "the page ends after its script")


def without_a_page() -> list[list[float]]:
    with dl.join_world(seed=1) as world:
        model = nn.Linear(3, 1)
        data = torch.arange(60.0).reshape(20, 3) / 60
        train_in(world, model, data=data, batch_size=4, optimizer=sgd(model), epochs=2)
    weights: list[list[float]] = model.weight.tolist()
    return weights


def page_without_a_folder() -> None:
    with dl.join_world() as world:
        dl.Loop(dl.Batches(torch.ones(4, 2), 2, world), 1, state={"model": nn.Linear(2, 1)}, monitor=True)


def test_a_page_without_a_run_folder_is_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"Got monitor=True without one\. Pass run_dir="):
        on_ranks(2, page_without_a_folder)
