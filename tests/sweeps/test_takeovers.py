"""Workers that are killed or stand still: another one resumes their trials; and servers that do not answer."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from ddp_loop.checkpoint import is_running
from ddp_loop.reporting import trial_folder
from ddp_loop.sweeps.command import folder_in
from ddp_loop.sweeps.trial_queue import TrialQueue
from tests.support.harness import TASK_S, OnRanks, until
from tests.support.paths import ROOT
from tests.support.postgres import SOCKET, running_postgres
from tests.support.runs import checkpoints_of, lines_of, rows_of
from tests.support.sweep_jobs import REACHED, SAVE_EVERY, STANDS_AT, UPDATES, check_alone, train
from tests.support.trials import marked, sweeping, toml, trial, updates

RATES = [0.1, 0.05]
SAVED = STANDS_AT // SAVE_EVERY * SAVE_EVERY  # the checkpoint before the first trial stands still
ELSEWHERE = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")  # a machine of another name


def described(folder: Path) -> str:
    """The file of a sweep whose first trial stands still."""
    facts = {"function": f"{ROOT}/tests/support/sweep_jobs.py:train", "folder": str(folder), "heartbeat_s": 1}
    return str(toml(folder.parent / "sweep.toml", **facts, keywords={"stands": RATES[0]}, space={"rate": RATES}))


def is_taken(url: str) -> bool:
    """Whether another worker has the first trial."""
    with closing(TrialQueue(url, "sweep", beat_s=1, grace_s=3)) as queue:
        newest = queue.newest()[0]
    return newest.attempt > 1 and newest.state == "running"


@pytest.mark.slow
@pytest.mark.covers("G5")
@pytest.mark.parametrize("fate", ["killed elsewhere", "stopped", "stopped with its rank"])
def test_a_worker_takes_over_the_trial_of_one_that_was_killed_or_stands_still(
    fate: str, postgres_url: str, tmp_path: Path, on_ranks: OnRanks
) -> None:
    is_killed = fate == "killed elsewhere"
    if is_killed and os.geteuid() != 0:
        pytest.skip("needs root, to give a process another host name")
    folder = tmp_path / "sweep"
    run = trial_folder(folder, 0)
    mark = uuid.uuid4().hex
    command = (mark, described(folder), f"--storage={postgres_url}")
    with sweeping(*command, inside=ELSEWHERE if is_killed else ()) as first:
        until((run / REACHED).exists, "the first trial stands still", TASK_S)
        until(lambda: SAVED in checkpoints_of(run), "its checkpoint is written", TASK_S)
        processes = list(marked(mark)) if fate == "stopped with its rank" else [first.pid]
        for process in () if is_killed else processes:
            os.kill(process, signal.SIGSTOP)
        with sweeping(uuid.uuid4().hex, "work", postgres_url) as second:
            until(lambda: trial(folder, 1)["status"] == "done", "the second worker has a trial", TASK_S)
            if is_killed:  # a folder whose locks do not reach this machine
                [lock] = (folder / "workers").glob("elsewhere-*")
                lock.unlink()
            elif fate == "stopped":
                until(lambda: trial(folder, 0)["status"] == "done", "it has ended the first trial too", TASK_S)
            else:  # no other process may train in the folder of one that may wake up
                until(lambda: is_taken(postgres_url), "it has the first trial", TASK_S)
                assert is_running(run)
                assert len(trial(folder, 0)["attempts"]) == 1
            for process in processes:
                os.kill(process, signal.SIGKILL if is_killed else signal.SIGCONT)
            printed, _ = second.communicate(timeout=TASK_S)
        late, _ = first.communicate(timeout=TASK_S)
    assert second.returncode == 0, printed
    assert first.returncode == 0 or is_killed, late
    assert [one["status"] for one in trial(folder, 0)["attempts"]] == ["interrupted", "done"]
    check_alone(folder, RATES, lambda rate, alone: on_ranks(1, train, rate, alone)[0])
    assert rows_of(run) == list(range(1, UPDATES + 1))
    first_start, second_start = (start["iteration"] for start in lines_of(run / "starts.jsonl"))
    assert first_start == 0
    assert second_start >= SAVED


@pytest.mark.slow
def test_a_storage_without_a_sweep_has_no_work(postgres_url: str) -> None:
    with pytest.raises(ValueError, match=r"must have one sweep. It has none. Pass --folder"):
        folder_in(postgres_url)


@pytest.mark.slow
def test_a_storage_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    """And writes nothing."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/{SOCKET}")
        listening.listen()
        storage = f"--storage=postgresql+psycopg://me@/study?host={folder}"
        with sweeping(uuid.uuid4().hex, described(tmp_path / "sweep"), storage) as process:
            printed, _ = process.communicate(timeout=TASK_S)  # TCP itself tries for 127 s
    assert process.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
    assert "cannot be opened" in printed
    assert "Check that it runs" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.covers("G5")
def test_a_sweep_continues_while_its_server_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    facts = {"function": f"{ROOT}/tests/support/trials.py:train", "folder": str(folder), "heartbeat_s": 1}
    file = toml(tmp_path / "sweep.toml", **facts, keywords={"steps": 200}, space={"rate": [0.1, 0.05]})
    with (
        running_postgres() as server,
        sweeping(uuid.uuid4().hex, str(file), f"--storage={server.new_database()}") as process,
    ):
        until(lambda: updates(trial_folder(folder, 0)), "updates of the first trial", TASK_S)
        server.stop()
        assert process.stdout is not None
        assert any("does not answer" in line for line in process.stdout)
        server.start()
        printed, _ = process.communicate(timeout=TASK_S)
    assert process.returncode == 0, printed
    for number in range(2):
        found = trial(folder, number)
        assert (found["status"], len(found["attempts"])) == ("done", 1)
        assert updates(trial_folder(folder, number)) == list(range(1, 201))
