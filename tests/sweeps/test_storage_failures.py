"""Storages that are unreachable for a while: a sweep waits for them, and keeps each trial with its worker."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from ddp_loop.sweeps import storage
from ddp_loop.sweeps.plan import make_sampler
from ddp_loop.sweeps.space import Space, make_space
from ddp_loop.sweeps.trial_queue import Attempt, Claim, Ending, TrialQueue
from tests.support.harness import TASK_S, until
from tests.support.paths import ROOT
from tests.support.postgres import running_postgres
from tests.support.trials import toml, trial, updates

SPACE: Space = make_space({"x": [0, 1]}, None, None, 0)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialQueue]:
    """A queue that does not wait inside SQLite itself."""
    monkeypatch.setattr(storage, "_settings", lambda url: {"connect_args": {"timeout": 0}})
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    with closing(TrialQueue(url(tmp_path), "s", beat_s=1, grace_s=60, direction="minimize")) as queue:
        queue.add_trials(SPACE)
        yield queue


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def sampler(trial: int) -> Any:
    return make_sampler(None, 0, trial)


def claimed(queue: TrialQueue, worker: str) -> Claim:
    claim = queue.claim(worker, SPACE, sampler)
    assert claim is not None
    return claim


def age_heartbeats(folder: Path) -> None:
    """Make all heartbeats old, as after a long pause of the process that sent them."""
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")


@pytest.mark.covers("G5")
def test_a_locked_storage_is_waited_for(queue: TrialQueue, tmp_path: Path) -> None:
    said: list[str] = []
    with closing(sqlite3.connect(tmp_path / "study.db")) as other:
        claim = claimed(queue, "one")
        other.execute("BEGIN EXCLUSIVE")

        def say(line: str) -> None:
            said.append(line)
            other.rollback()

        queue.patience.say = say
        assert queue.end(claim, Ending("done", 1.0))
    assert "does not answer ((sqlite3.OperationalError) database is locked" in said[0]
    assert said[1].endswith("answers again.")
    assert queue.study.best_value == 1.0


@pytest.mark.parametrize("reason", ["time", "stop"])
def test_a_storage_that_stays_unreachable_is_an_error(
    reason: str, queue: TrialQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "time":
        monkeypatch.setattr(storage, "PATIENCE_S", 0.1)
    else:
        queue.patience.ends = lambda: True
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    claim = claimed(queue, "one")
    with closing(sqlite3.connect(tmp_path / "study.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(storage.StorageUnreachable, match="database is locked"), storage.failures_explained("x://"):
            queue.end(claim, Ending("done", 1.0))
        other.rollback()


def test_after_a_failure_of_the_storage_old_heartbeats_do_not_count(queue: TrialQueue, tmp_path: Path) -> None:
    """No worker could send one meanwhile; the first one to reconnect must not take the others' trials."""
    other = TrialQueue(url(tmp_path), "s", beat_s=1, grace_s=60)
    claim, recorded = claimed(queue, "one"), list[Attempt]()
    age_heartbeats(tmp_path)
    other.patience.failed_at = time.monotonic()
    other.take_over("two", lambda worker: None, recorded.append)
    assert queue.holds(claim)
    other.patience.failed_at = time.monotonic() - 61
    other.take_over("two", lambda worker: None, recorded.append)
    assert not queue.holds(claim)
    assert [(one.trial, one.attempt, one.state) for one in recorded] == [(0, 1, "interrupted")]
    other.close()


def test_a_worker_that_was_stopped_for_a_while_does_not_take_its_own_trials_over(
    queue: TrialQueue, tmp_path: Path
) -> None:
    claim = claimed(queue, "one")
    age_heartbeats(tmp_path)
    queue.take_over("one", lambda worker: None)
    assert queue.holds(claim)


def test_a_trial_that_cannot_run_yet_does_not_keep_others_from_running(queue: TrialQueue) -> None:
    assert [queue.claim("one", SPACE, sampler, last={0}).trial for _ in range(2)] == [1, 0]  # type: ignore[union-attr]


@pytest.mark.covers("G5")
def test_a_connection_lost_within_a_call_is_waited_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna reads trials by several statements, and answers the failure of one with another on the same connection."""
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    said: list[str] = []
    with closing(TrialQueue(postgres_url, "s", beat_s=1, grace_s=60, direction="minimize")) as queue:
        queue.add_trials(SPACE)
        queue.patience.say = said.append
        lose_connection(queue, within="trial_user_attributes.trial_id IN")
        assert claimed(queue, "one").trial == 0
    assert [line.endswith("answers again.") for line in said] == [False, True]


def lose_connection(queue: TrialQueue, within: str) -> None:
    """Have the server end the connection of the next statement that holds these words, before it runs."""
    engine, lost = queue._backend.engine, list[int]()

    @event.listens_for(engine, "before_cursor_execute")
    def end(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if within in statement and not lost:
            lost.append(connection.connection.driver_connection.info.backend_pid)
            with engine.connect() as other:
                other.exec_driver_sql(f"SELECT pg_terminate_backend({lost[0]}, 60000)")


@pytest.mark.slow
@pytest.mark.covers("G5")
def test_a_sweep_continues_while_its_server_restarts(tmp_path: Path) -> None:
    facts = {"function": f"{ROOT}/tests/support/trials.py:train", "folder": str(tmp_path / "s"), "heartbeat_s": 1}
    file = toml(tmp_path / "sweep.toml", **facts, keywords={"steps": 200}, space={"rate": [0.1, 0.05, 0.02]})
    with running_postgres() as server:
        command = [sys.executable, "-m", "ddp_loop", "sweep", str(file), f"--storage={server.new_database()}"]
        with (tmp_path / "printed").open("w") as printed:
            process = subprocess.Popen([*command, "--slots=2"], cwd=ROOT, stdout=printed, stderr=printed)
        try:
            until(lambda: updates(tmp_path / "s" / "trials" / "0000"), "updates of the first trial", TASK_S)
            server.stop()
            until(lambda: "does not answer" in (tmp_path / "printed").read_text(), "the sweep notices", TASK_S)
            server.start()
            assert process.wait(TASK_S) == 0, (tmp_path / "printed").read_text()
        finally:
            process.kill()
    for number in range(3):
        found = trial(tmp_path / "s", number)
        assert (found["status"], len(found["attempts"])) == ("done", 1)
        assert updates(tmp_path / "s" / "trials" / f"{number:04d}") == list(range(1, 201))
