"""Trials that several workers take from one storage, each once: those of dead workers, and while it is away."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.pruners import MedianPruner
from optuna.trial import TrialState
from sqlalchemy import Engine, event
from sqlalchemy.sql.ddl import SchemaGenerator

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


def take_all(queue: TrialQueue, worker: str, space: Space) -> list[tuple[int, int]]:
    """Take trials and end them until none waits; (trial, attempt) of each."""
    taken = []
    while (claim := queue.claim(worker, space, sampler)) is not None:
        taken.append((claim.trial, claim.attempt))
        assert queue.end(claim, Ending("done", float(claim.trial)))
    return taken


def work(folder: str, trials: int, threads: int, results: Any) -> None:
    """A process with several workers."""
    queue, taken = opened(Path(folder)), list[tuple[int, int]]()
    workers = [
        threading.Thread(target=lambda name=name: taken.extend(take_all(queue, name, space_of(trials))))
        for name in (f"{multiprocessing.current_process().pid}-{number}" for number in range(threads))
    ]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    queue.close()
    results.put(taken)


def in_processes(folder: Path, trials: int, processes: int, threads: int) -> Counter[tuple[int, int]]:
    results = SPAWN.Queue()
    started = [SPAWN.Process(target=work, args=(str(folder), trials, threads, results)) for _ in range(processes)]
    for one in started:
        one.start()
    taken = Counter(claim for _ in started for claim in results.get(timeout=120))
    for one in started:
        one.join()
        one.close()
    results.close()
    results.join_thread()
    return taken


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


def claimed(queue: TrialQueue, worker: str = "one") -> Claim:
    claim = queue.claim(worker, space_of(4), sampler)
    assert claim is not None
    return claim


@pytest.mark.slow
@pytest.mark.covers("F1", "G5")
def test_workers_of_several_processes_take_each_trial_once(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as queue:
        queue.add_trials(space_of(40))
        taken = in_processes(tmp_path, 40, processes=3, threads=2)
        assert taken == Counter((trial, 1) for trial in range(40))
        assert queue.is_over()


@pytest.mark.covers("G5")
def test_workers_that_notice_a_dead_one_at_the_same_time_give_its_trial_to_one(
    queue: TrialQueue, other: TrialQueue
) -> None:
    claimed(queue, "dead")
    recorded: list[Attempt] = []
    meet = threading.Barrier(2)

    def notice(one: TrialQueue, name: str) -> None:
        meet.wait()
        one.take_over(name, lambda worker: worker == "dead", recorded.append)

    queue._mine.clear()  # as in another process
    threads = [threading.Thread(target=notice, args=pair) for pair in ((queue, "one"), (other, "two"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.trial, one.attempt, one.state) for one in recorded] == [(0, 1, "interrupted")]
    taken = take_all(queue, "one", space_of(4)) + take_all(other, "two", space_of(4))
    assert sorted(taken) == [(0, 2), (1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("attempt", [1, 2], ids=["its answer was lost", "two workers noticed a dead one"])
def test_a_trial_that_was_added_twice_runs_once(attempt: int, queue: TrialQueue) -> None:
    if attempt == 2:
        queue.end(claimed(queue), None)
    first = min(queue._frozen("WAITING"), key=lambda one: int(one.user_attrs["trial"]))
    queue._add(0, attempt, first.params, first.distributions, {"parameters": {"x": 0}})
    assert take_all(queue, "one", space_of(4)) == [(0, attempt), (1, 1), (2, 1), (3, 1)]


def test_a_worker_whose_trial_was_given_away_can_neither_end_it_nor_write(queue: TrialQueue, other: TrialQueue) -> None:
    claim = claimed(queue)
    other.take_over("two", lambda worker: True)
    written: list[str] = []
    assert not queue.holds(claim)
    assert queue.beat() == [claim]
    assert not queue.end(claim, Ending("done", 1.0), lambda: written.append("done"))
    assert not queue.end(claim, None, lambda: written.append("interrupted"))
    assert written == []
    assert queue.newest()[0].state == "waiting"


def test_a_returned_trial_is_recorded_before_another_worker_can_take_it(queue: TrialQueue, other: TrialQueue) -> None:
    taken: list[int] = []
    assert queue.end(claimed(queue), None, lambda: taken.append(claimed(other, "two").trial))
    assert taken == [1]  # trial 0 is not in line yet
    assert queue.newest()[0].state == "waiting"


def test_an_ending_that_a_killed_worker_had_stored_stays(queue: TrialQueue, other: TrialQueue) -> None:
    claim = claimed(queue)
    with pytest.raises(KeyboardInterrupt):
        queue.end(claim, Ending("done", 2.5), _interrupt)  # killed between the ending and the last state
    recorded: list[Attempt] = []
    other.take_over("two", lambda worker: True, recorded.append)
    assert [(one.trial, one.ending) for one in recorded] == [(0, Ending("done", 2.5))]
    assert other.newest()[0].state == "ended"
    assert other.study.best_value == 2.5  # TPE learns from it


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_worker_that_comes_too_late_leaves_no_name(
    queue: TrialQueue, other: TrialQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would later mistake the other worker's trial for one of its own that it lost."""
    waiting = other._frozen("WAITING")
    claimed(queue, "first")
    with monkeypatch.context() as late:
        late.setattr(other, "_frozen", lambda *states: waiting[:1])
        assert other.claim("second", space_of(4), sampler) is None
    assert queue.newest()[0].worker == "first"
    other.take_over("second", ALIVE)
    assert queue.newest()[0].state == "running"


def test_an_attempt_whose_worker_died_before_it_left_its_name_is_taken_over(queue: TrialQueue, tmp_path: Path) -> None:
    """It has no heartbeat either."""
    key = queue._frozen("WAITING")[0]._trial_id
    queue._storage.set_trial_state_values(key, TrialState.RUNNING)
    queue.take_over("two", ALIVE)
    assert queue.newest()[0].state == "running"  # its worker may be about to write its name
    with database_of(tmp_path) as database:
        database.execute("UPDATE trials SET datetime_start = '2020-01-01 00:00:00' WHERE state = 'RUNNING'")
    queue.take_over("two", ALIVE)
    assert (queue.newest()[0].attempt, queue.newest()[0].state) == (2, "waiting")


def test_a_worker_puts_a_trial_back_whose_claim_failed(queue: TrialQueue) -> None:
    with pytest.raises(ZeroDivisionError):
        queue.claim("one", space_of(4), lambda trial: 1 // 0)  # type: ignore[arg-type, return-value]
    assert queue.newest()[0].state == "running"
    queue.take_over("one", ALIVE)
    assert (queue.newest()[0].attempt, queue.newest()[0].state) == (2, "waiting")


def test_a_resumed_trial_reports_no_update_twice(queue: TrialQueue) -> None:
    """The pruner compares the values of one update; a trial from a checkpoint repeats some."""
    pruner = MedianPruner()
    queue.should_prune(claimed(queue), pruner, 5, 1.0)
    queue.end(next(iter(queue._mine.values())), None)
    again = claimed(queue)
    assert (again.trial, again.attempt, again.reported) == (0, 2, {5})
    assert not queue.should_prune(again, pruner, 5, 2.0)
    queue.should_prune(again, pruner, 10, 3.0)
    assert queue._storage.get_trial(again.key).intermediate_values == {5: 1.0, 10: 3.0}


def test_trials_that_are_missing_in_the_storage_are_added(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as queue:
        queue.add_trials(replace(space_of(4), trials=2))  # a process that was killed in the middle had added two
        assert queue.facts[READY]
        queue.add_trials(space_of(4))
        assert take_all(queue, "one", space_of(4)) == [(trial, 1) for trial in range(4)]


@pytest.mark.covers("G5")
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # of what was killed, on Python 3.13
def test_a_kill_while_the_storage_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between a table and its index must not leave it without one, which would allow two studies of one name."""
    monkeypatch.setattr(SchemaGenerator, "visit_index", lambda *_, **__: _interrupt())
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path)
    monkeypatch.undo()
    gc.collect()
    for queue in (opened(tmp_path), opened(tmp_path)):
        assert queue.newest() == {}
        queue.close()
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


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


def indices_of(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "study.db")) as file:
        return {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}


@pytest.mark.covers("G5")
@pytest.mark.parametrize("at", [3, 16, 21, 30])  # of twice 15: in memory, and then in the file
@pytest.mark.slow
def test_a_kill_while_the_study_is_made_leaves_no_file_that_stays(at: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    opened(tmp_path / "whole").close()
    folder = tmp_path / "killed"
    folder.mkdir()
    process = SPAWN.Process(target=open_and_die, args=(str(folder), at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    opened(folder).close()
    assert [path.name for path in folder.iterdir()] == ["study.db"]
    assert indices_of(folder) == indices_of(tmp_path / "whole")


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


def test_a_trial_that_cannot_run_yet_does_not_keep_others_from_running(queue: TrialQueue) -> None:
    taken = [queue.claim("one", space_of(4), sampler, last={0}) for _ in range(4)]
    assert [claim.trial for claim in taken if claim is not None] == [1, 2, 3, 0]


@pytest.mark.covers("G5")
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
    engine, lost = queue._backend.engine, list[int]()

    @event.listens_for(engine, "before_cursor_execute")
    def end(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if within in statement and not lost:
            lost.append(connection.connection.driver_connection.info.backend_pid)
            with engine.connect() as other:
                other.exec_driver_sql(f"SELECT pg_terminate_backend({lost[0]}, 60000)")
