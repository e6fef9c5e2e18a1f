"""Sweeps on a PostgreSQL server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.reporting import trial_folder
from ddp_loop.sweeps.command import folder_in
from tests.support.harness import TASK_S, OnRanks, until
from tests.support.paths import ROOT
from tests.support.postgres import SOCKET, PostgresServer
from tests.support.runs import lines_of, rows_of
from tests.support.sweep_jobs import REACHED, SAVE_EVERY, STANDS_AT, UPDATES, WEIGHTS, train

BEAT_S = 1
RATES = [0.1, 0.05]
SWEEP = f"""
function = "{ROOT}/tests/support/sweep_jobs.py:train"
folder = "sweep"
heartbeat_s = {BEAT_S}
[keywords]
stands = {RATES[0]}
[space]
rate = {RATES}
"""

TAKES_WHAT_WAITS = """
import json, sys
import optuna
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(storage=sys.argv[1], study_name="one", load_if_exists=True)
print("ready", flush=True)
sys.stdin.readline()
taken = []
while "waits" in (trial := study.ask()).user_attrs:
    taken.append(trial.number)
    study.tell(trial, 0.0)
print(json.dumps(taken))
"""

STARTS_A_SERVER = """
import sys
from tests.support.postgres import running_postgres
with running_postgres() as server:
    print(server.folder, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_processes_take_each_waiting_trial_once(postgres_url: str) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra sweep")
    storage = optuna.storages.RDBStorage(postgres_url)
    study = optuna.create_study(storage=storage, study_name="one")
    for number in range(20):
        study.enqueue_trial({"rate": number}, user_attrs={"waits": True})
    storage.remove_session()
    storage.engine.dispose()
    command = [sys.executable, "-c", TAKES_WHAT_WAITS, postgres_url]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    taken = [json.loads(worker.communicate(timeout=TASK_S)[0]) for worker in workers]
    assert all(taken)
    assert sorted(taken[0] + taken[1]) == list(range(20))


def test_each_database_is_new(postgres: PostgresServer) -> None:
    assert postgres.new_database() != postgres.new_database()


@contextmanager
def sweeping(*words: str, is_elsewhere: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process of `python -m ddp_loop sweep`, killed at the end; elsewhere: on a machine of another name."""
    command = [sys.executable, "-m", "ddp_loop", "sweep", *words, "--slots=1"]
    if is_elsewhere:
        command = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.covers("G5")
@pytest.mark.parametrize("seen_by", ["lock", "heartbeats"])
def test_a_worker_takes_over_the_trial_of_one_that_was_killed(
    postgres_url: str, tmp_path: Path, on_ranks: OnRanks, seen_by: str
) -> None:
    elsewhere = seen_by == "heartbeats"
    if elsewhere and os.geteuid() != 0:
        pytest.skip("needs root, to give a process another host name")
    folder = tmp_path / "sweep"
    (tmp_path / "sweep.toml").write_text(SWEEP)
    with sweeping(str(tmp_path / "sweep.toml"), f"--storage={postgres_url}", is_elsewhere=elsewhere) as first:
        until((trial_folder(folder, 0) / REACHED).exists, "the first trial stands still", TASK_S)
        with sweeping("work", postgres_url) as second:
            until(lambda: trial(folder, 1)["status"] == "done", "the second worker has a trial", TASK_S)
            if elsewhere:  # a folder whose locks do not reach this machine
                [lock] = (folder / "workers").glob("elsewhere-*")
                lock.unlink()
            os.kill(first.pid, signal.SIGKILL)
            printed, _ = second.communicate(timeout=TASK_S)
    assert second.returncode == 0, printed
    began = [attempt["began"] for attempt in trial(folder, 0)["attempts"]]
    assert len(began) == 2
    assert trial(folder, 0)["attempts"][0]["status"] == "interrupted"
    for number, rate in enumerate(RATES):
        alone = tmp_path / f"alone-{number}"
        assert trial(folder, number)["value"] == on_ranks(1, train, rate, str(alone))[0]
        assert (trial_folder(folder, number) / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()
    starts = lines_of(trial_folder(folder, 0) / "starts.jsonl")
    assert [start["iteration"] for start in starts] == [0, STANDS_AT // SAVE_EVERY * SAVE_EVERY]
    assert rows_of(trial_folder(folder, 0)) == list(range(1, UPDATES + 1))


def trial(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((trial_folder(folder, number) / "trial.json").read_text())
    return found


def refuses(tmp_path: Path, storage: str) -> str:
    """What `sweep` says of a storage that it cannot reach, within 10 s; it must have written nothing."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    with sweeping(str(tmp_path / "sweep.toml"), f"--storage={storage}") as process:
        printed, _ = process.communicate(timeout=TASK_S)  # TCP itself tries for 127 s
    assert process.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
    return printed


@pytest.mark.slow
def test_a_storage_without_a_sweep_has_no_work(postgres_url: str) -> None:
    with pytest.raises(ValueError, match=r"must have one sweep. It has none. Pass --folder"):
        folder_in(postgres_url)


@pytest.mark.slow
def test_a_storage_without_a_server_is_refused(tmp_path: Path) -> None:
    printed = refuses(tmp_path, f"postgresql+psycopg://me:secret@/study?host={tmp_path.parent}")
    assert "cannot be opened" in printed
    assert "Check that it runs" in printed
    assert "secret" not in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_storage_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/{SOCKET}")
        listening.listen()
        printed = refuses(tmp_path, f"postgresql+psycopg://me@/study?host={folder}")
    assert "cannot be opened" in printed


@pytest.mark.slow
def test_the_server_ends_with_the_process_that_started_it(postgres: PostgresServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_A_SERVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        server = PostgresServer(postgres.programs, folder)
        assert server.accepts()
        os.kill(starter.pid, signal.SIGKILL)
    until(lambda: not (folder / "data" / "postmaster.pid").exists(), "the server has ended")
    assert not server.accepts()
    shutil.rmtree(folder)
