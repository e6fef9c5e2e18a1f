"""Sweeps on a PostgreSQL server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import TASK_S, until
from tests.support.paths import ROOT
from tests.support.postgres import PostgresServer

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
    study = optuna.create_study(storage=postgres_url, study_name="one")
    for number in range(20):
        study.enqueue_trial({"rate": number}, user_attrs={"waits": True})
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
