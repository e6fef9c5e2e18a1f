"""Trials that several workers take from one storage, each once: those of dead workers, and while it is away."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.pruners import MedianPruner
from optuna.trial import TrialState
from sqlalchemy import Engine, event

from ddp_loop.sweeps import storage
from ddp_loop.sweeps.folders import Ending
from ddp_loop.sweeps.plan import Space, make_sampler, make_space
from ddp_loop.sweeps.trial_queue import READY, Attempt, Claim, TrialQueue

ALIVE: Callable[[str], bool | None] = lambda worker: False  # noqa: E731
SPAWN = multiprocessing.get_context("spawn")


def space_of(trials: int) -> Space:
    return make_space({"x": list(range(trials))}, None, None, 0)


def opened(folder: Path, grace_s: int = 60) -> TrialQueue:
    return TrialQueue(f"sqlite:///{folder / 'study.db'}", "s", beat_s=1, grace_s=grace_s, direction="minimize")


def sampler(trial: int) -> Any:
    return make_sampler(None, 0, trial)


def claimed(queue: TrialQueue, worker: str = "one") -> Claim:
    claim = queue.claim(worker, space_of(4), sampler)
    assert claim is not None
    return claim


def take_all(queue: TrialQueue, worker: str, trials: int = 4) -> list[tuple[int, int]]:
    """Take trials and end them until none waits; (trial, attempt) of each."""
    taken = []
    while (claim := queue.claim(worker, space_of(trials), sampler)) is not None:
        taken.append((claim.trial, claim.attempt))
        assert queue.end(claim, Ending("done", float(claim.trial)))
    return taken


def newest(queue: TrialQueue, trial: int = 0) -> tuple[int, str]:
    """The newest attempt at a trial, and how it stands."""
    found = queue.newest()[trial]
    return found.attempt, found.state


def work(folder: str) -> list[tuple[int, int]]:
    """A process with two workers."""
    with closing(opened(Path(folder))) as queue, ThreadPoolExecutor(2) as threads:
        names = [f"{os.getpid()}-{number}" for number in range(2)]
        return [claim for taken in threads.map(lambda name: take_all(queue, name, 40), names) for claim in taken]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[TrialQueue]:
    with closing(opened(tmp_path)) as queue:
        queue.add_trials(space_of(4))
        yield queue


@pytest.fixture
def other(queue: TrialQueue, tmp_path: Path) -> Iterator[TrialQueue]:
    """The same queue in another process."""
    with closing(opened(tmp_path)) as other:
        yield other


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no queue wait inside SQLite itself, nor before it tries again."""
    monkeypatch.setattr(storage, "_settings", lambda url: {"connect_args": {"timeout": 0}})
    monkeypatch.setattr(storage, "RETRY_S", 0.0)


@contextmanager
def database_of(folder: Path) -> Iterator[sqlite3.Connection]:
    """The storage itself, whose changes are committed."""
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        yield database


@pytest.mark.slow
@pytest.mark.covers("F1", "G5")
def test_workers_of_several_processes_take_each_trial_once(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as queue, ProcessPoolExecutor(3, SPAWN) as processes:
        queue.add_trials(space_of(40))
        taken = [claim for one in processes.map(work, [str(tmp_path)] * 3) for claim in one]
        assert sorted(taken) == [(trial, 1) for trial in range(40)]
        assert queue.is_over()


@pytest.mark.covers("G5")
def test_workers_that_notice_a_dead_one_at_the_same_time_give_its_trial_to_one(
    queue: TrialQueue, other: TrialQueue
) -> None:
    claimed(queue, "dead")
    queue._mine.clear()  # as in another process
    recorded: list[Attempt] = []
    meet = threading.Barrier(2)

    def notice(one: TrialQueue, name: str) -> None:
        meet.wait()
        one.take_over(name, lambda worker: worker == "dead", recorded.append)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(notice, (queue, other), ("one", "two")))
    assert [(one.trial, one.attempt, one.state) for one in recorded] == [(0, 1, "interrupted")]
    assert not queue.is_over()
    assert sorted(take_all(queue, "one") + take_all(other, "two")) == [(0, 2), (1, 1), (2, 1), (3, 1)]
    assert queue.is_over()


@pytest.mark.parametrize("attempt", [1, 2], ids=["its answer was lost", "two workers noticed a dead one"])
@pytest.mark.slow
def test_a_trial_that_was_added_twice_runs_once(attempt: int, queue: TrialQueue) -> None:
    if attempt == 2:
        queue.end(claimed(queue), None)
    first = min(queue._frozen(TrialState.WAITING), key=lambda one: int(one.user_attrs["trial"]))
    queue._add(0, attempt, first.params, first.distributions, {"parameters": {"x": 0}})
    assert take_all(queue, "one") == [(0, attempt), (1, 1), (2, 1), (3, 1)]


def test_a_worker_whose_trial_was_given_away_can_neither_end_it_nor_write(queue: TrialQueue, other: TrialQueue) -> None:
    claim = claimed(queue)
    other.take_over("two", lambda worker: True)
    assert not queue.holds(claim)
    assert queue.beat() == [claim]
    for ending in (Ending("done", 1.0), None):
        assert not queue.end(claim, ending, lambda: pytest.fail("wrote"))
    assert newest(queue) == (2, "waiting")


def test_a_returned_trial_is_recorded_before_another_worker_can_take_it(queue: TrialQueue, other: TrialQueue) -> None:
    taken: list[int] = []
    assert queue.end(claimed(queue), None, lambda: taken.append(claimed(other, "two").trial))
    assert taken == [1]  # trial 0 is not in line yet
    assert newest(queue) == (2, "waiting")


@pytest.mark.slow
def test_an_ending_that_a_killed_worker_had_stored_stays(queue: TrialQueue, other: TrialQueue) -> None:
    with pytest.raises(KeyboardInterrupt):
        queue.end(claimed(queue), Ending("done", 2.5), _interrupt)  # killed between the ending and the last state
    recorded: list[Attempt] = []
    other.take_over("two", lambda worker: True, recorded.append)
    assert [(one.trial, one.ending) for one in recorded] == [(0, Ending("done", 2.5))]
    assert newest(other) == (1, "ended")
    assert other.study.best_value == 2.5  # TPE learns from it


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_worker_that_comes_too_late_leaves_no_name(
    queue: TrialQueue, other: TrialQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would later mistake the other worker's trial for one of its own that it lost."""
    waiting = other._frozen(TrialState.WAITING)
    claimed(queue, "first")
    with monkeypatch.context() as late:
        late.setattr(other, "_frozen", lambda *states: waiting[:1])
        assert other.claim("second", space_of(4), sampler) is None
    assert queue.newest()[0].worker == "first"
    other.take_over("second", ALIVE)
    assert newest(queue) == (1, "running")


def test_an_attempt_whose_worker_died_before_it_left_its_name_is_taken_over(queue: TrialQueue, tmp_path: Path) -> None:
    """It has no heartbeat either."""
    queue._storage.set_trial_state_values(queue._frozen(TrialState.WAITING)[0]._trial_id, TrialState.RUNNING)
    queue.take_over("two", ALIVE)
    assert newest(queue) == (1, "running")  # its worker may be about to write its name
    with database_of(tmp_path) as database:
        database.execute("UPDATE trials SET datetime_start = '2020-01-01 00:00:00' WHERE state = 'RUNNING'")
    queue.take_over("two", ALIVE)
    assert newest(queue) == (2, "waiting")


def test_a_worker_puts_a_trial_back_whose_claim_failed(queue: TrialQueue) -> None:
    with pytest.raises(ZeroDivisionError):
        queue.claim("one", space_of(4), lambda trial: 1 // 0)  # type: ignore[arg-type, return-value]
    assert newest(queue) == (1, "running")
    queue.take_over("one", ALIVE)
    assert newest(queue) == (2, "waiting")


def test_a_resumed_trial_reports_no_update_twice(queue: TrialQueue) -> None:
    """The pruner compares the values of one update; a trial from a checkpoint repeats some."""
    first = claimed(queue)
    queue.should_prune(first, MedianPruner(), 5, 1.0)
    queue.end(first, None)
    again = claimed(queue)
    assert (again.trial, again.attempt, again.reported) == (0, 2, {5})
    for update, value in ((5, 2.0), (10, 3.0)):
        assert not queue.should_prune(again, MedianPruner(), update, value)
    assert queue._storage.get_trial(again.key).intermediate_values == {5: 1.0, 10: 3.0}


def test_trials_that_are_missing_in_the_storage_are_added(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as queue:
        queue.add_trials(replace(space_of(4), trials=2))  # a process that was killed in the middle had added two
        assert queue.facts[READY]
        queue.add_trials(space_of(4))
        assert take_all(queue, "one") == [(trial, 1) for trial in range(4)]


def open_and_die(folder: str, at: int) -> None:
    """Kill this process before the table or index number `at` that it creates, in whatever file or memory."""
    made: list[str] = []

    def look(*arguments: Any) -> None:
        if str(arguments[2]).lstrip().startswith("CREATE"):
            made.append(arguments[2])
            if len(made) == at:
                os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", look)
    opened(Path(folder))


@pytest.mark.covers("G5")
@pytest.mark.parametrize("at", [16, 30])  # of 15 in memory, and then as many in the file
@pytest.mark.slow
def test_a_kill_while_the_study_is_made_leaves_no_file_that_stays(at: int, tmp_path: Path) -> None:
    def indices_of(folder: Path) -> set[str]:
        opened(folder).close()
        with database_of(folder) as database:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}

    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    process = SPAWN.Process(target=open_and_die, args=(str(killed), at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert indices_of(killed) == indices_of(whole)
    assert [path.name for path in killed.iterdir()] == ["study.db"]


# -- a storage that is away ---------------------------------------------------------------------------------


def age_heartbeats(folder: Path) -> None:
    """Make all heartbeats old, as after a long pause of the process that sent them."""
    with database_of(folder) as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")


@pytest.mark.covers("G5")
@pytest.mark.usefixtures("impatient")
def test_a_locked_storage_is_waited_for(queue: TrialQueue, tmp_path: Path) -> None:
    said: list[str] = []
    with database_of(tmp_path) as other:
        claim = claimed(queue)
        other.execute("BEGIN EXCLUSIVE")

        def say(line: str) -> None:
            said.append(line)
            other.rollback()

        queue.patience.say = say
        assert queue.end(claim, Ending("done", 1.0))
    assert "does not answer ((sqlite3.OperationalError) database is locked" in said[0]
    assert said[1].endswith("answers again.")
    assert queue.study.best_value == 1.0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("reason", ["time", "stop"])
def test_a_storage_that_stays_unreachable_is_an_error(
    reason: str, queue: TrialQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "time":
        monkeypatch.setattr(storage, "PATIENCE_S", 0.1)
    else:
        queue.patience.ends = lambda: True
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    claim = claimed(queue)
    with database_of(tmp_path) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(storage.StorageUnreachable, match="database is locked"), storage.failures_explained("x://"):
            queue.end(claim, Ending("done", 1.0))


def test_heartbeats_that_are_old_for_another_reason_do_not_count(
    queue: TrialQueue, other: TrialQueue, tmp_path: Path
) -> None:
    claim = claimed(queue)
    recorded: list[Attempt] = []
    age_heartbeats(tmp_path)
    queue.take_over("one", lambda worker: None)  # this process was stopped for a while
    assert queue.holds(claim)
    age_heartbeats(tmp_path)
    for ago_s, holds in ((0, True), (61, False)):  # no worker could send one while the storage was away
        other.patience.failed_at = time.monotonic() - ago_s
        other.take_over("two", lambda worker: None, recorded.append)
        assert queue.holds(claim) == holds
    assert [(one.trial, one.attempt, one.state) for one in recorded] == [(0, 1, "interrupted")]


@pytest.mark.covers("G5")
@pytest.mark.slow
def test_a_connection_lost_within_a_call_is_waited_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna reads trials by several statements, and answers the failure of one with another on the same connection."""
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    said: list[str] = []
    with closing(TrialQueue(postgres_url, "s", beat_s=1, grace_s=60, direction="minimize")) as queue:
        queue.add_trials(space_of(2))
        queue.patience.say = said.append
        lose_connection(queue, within="trial_user_attributes.trial_id IN")
        assert claimed(queue).trial == 0
    assert [line.endswith("answers again.") for line in said] == [False, True]


def lose_connection(queue: TrialQueue, within: str) -> None:
    """Have the server end the connection of the next statement that holds these words, before it runs."""
    engine = queue._backend.engine
    lost = list[int]()

    @event.listens_for(engine, "before_cursor_execute")
    def end(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if within in statement and not lost:
            lost.append(connection.connection.driver_connection.info.backend_pid)
            with engine.connect() as other:
                other.exec_driver_sql(f"SELECT pg_terminate_backend({lost[0]}, 60000)")
