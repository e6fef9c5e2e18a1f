"""Trials that several workers take from one storage: each trial once, including those of dead workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.pruners import MedianPruner
from optuna.trial import TrialState
from sqlalchemy import Engine, event
from sqlalchemy.sql.ddl import SchemaGenerator

from ddp_loop.sweeps.plan import make_sampler
from ddp_loop.sweeps.space import Space, make_space
from ddp_loop.sweeps.trial_queue import READY, Attempt, Claim, Ending, TrialQueue

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
def queue(tmp_path: Path) -> Any:
    queue = opened(tmp_path)
    queue.add_trials(space_of(4))
    yield queue
    queue.close()


def claimed(queue: TrialQueue, worker: str = "one") -> Claim:
    claim = queue.claim(worker, space_of(4), sampler)
    assert claim is not None
    return claim


@pytest.mark.slow
@pytest.mark.covers("F1", "G5")
def test_workers_of_two_processes_take_each_trial_once(tmp_path: Path) -> None:
    queue = opened(tmp_path)
    queue.add_trials(space_of(40))
    taken = in_processes(tmp_path, 40, processes=3, threads=2)
    assert taken == Counter((trial, 1) for trial in range(40))
    assert [one.state for one in queue.newest().values()] == ["ended"] * 40
    queue.close()


@pytest.mark.slow
def test_queues_of_two_storages_of_one_process_take_each_trial_once(tmp_path: Path) -> None:
    """Threads of two queues collide more often than processes do."""
    queues = [opened(tmp_path) for _ in range(4)]
    queues[0].add_trials(space_of(60))
    taken: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda one=one, n=n: taken.extend(take_all(one, f"worker-{n}", space_of(60))))
        for n, one in enumerate(queues)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in queues:
        one.close()
    assert Counter(taken) == Counter((trial, 1) for trial in range(60))


@pytest.mark.covers("G5")
def test_workers_that_notice_a_dead_one_at_the_same_time_give_its_trial_to_one(tmp_path: Path) -> None:
    queues = [opened(tmp_path) for _ in range(3)]
    queues[0].add_trials(space_of(1))
    claimed(queues[0], "dead")
    recorded: list[Attempt] = []
    meet = threading.Barrier(2)

    def notice(number: int) -> None:
        meet.wait()
        queues[number].take_over(f"worker-{number}", lambda worker: worker == "dead", recorded.append)

    threads = [threading.Thread(target=notice, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.trial, one.attempt, one.state) for one in recorded] == [(0, 1, "interrupted")]
    taken = [queues[number].claim(f"worker-{number}", space_of(1), sampler) for number in (1, 2, 1, 2)]
    assert [(one.trial, one.attempt) for one in taken if one is not None] == [(0, 2)]
    for one in queues:
        one.close()


def test_of_two_attempts_with_one_number_only_the_first_is_taken(queue: TrialQueue) -> None:
    claim = claimed(queue)
    queue.end(claim, None)
    first = next(one for one in queue._frozen("WAITING") if one.user_attrs["attempt"] == 2)
    queue._add(0, 2, first.params, first.distributions, {"parameters": {"x": 0}})  # as another worker does
    taken = take_all(queue, "one", space_of(4))
    assert sorted(taken) == [(0, 2), (1, 1), (2, 1), (3, 1)]


def test_a_trial_that_was_added_twice_runs_once(queue: TrialQueue) -> None:
    """Its storage had it, but the answer was lost, and the call was repeated."""
    first = queue._frozen("WAITING")[0]
    queue._add(0, 1, first.params, first.distributions, {"parameters": {"x": 0}})
    assert take_all(queue, "one", space_of(4)) == [(trial, 1) for trial in range(4)]


def test_a_worker_whose_trial_was_given_away_can_neither_end_it_nor_write(queue: TrialQueue, tmp_path: Path) -> None:
    claim, other = claimed(queue), opened(tmp_path)
    other.take_over("two", lambda worker: True)
    written: list[str] = []
    assert not queue.holds(claim)
    assert queue.beat() == [claim]
    assert not queue.end(claim, Ending("done", 1.0), lambda: written.append("done"))
    assert not queue.end(claim, None, lambda: written.append("interrupted"))
    assert written == []
    assert queue.newest()[0].state == "waiting"
    other.close()


def test_a_returned_trial_is_recorded_before_another_worker_can_take_it(queue: TrialQueue, tmp_path: Path) -> None:
    claim, other = claimed(queue), opened(tmp_path)
    seen: list[int | None] = []

    def record() -> None:
        taken = other.claim("two", space_of(4), sampler)
        seen.append(None if taken is None else taken.trial)

    assert queue.end(claim, None, record)
    assert seen == [1]  # trial 0 is not in line yet
    assert queue.newest()[0].state == "waiting"
    other.close()


def test_an_ending_that_a_killed_worker_had_stored_stays(queue: TrialQueue, tmp_path: Path) -> None:
    claim, other = claimed(queue), opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        queue.end(claim, Ending("done", 2.5), _interrupt)  # killed between the ending and the last state
    recorded: list[Attempt] = []
    other.take_over("two", lambda worker: True, recorded.append)
    assert [(one.trial, one.ending) for one in recorded] == [(0, Ending("done", 2.5))]
    assert other.newest()[0].state == "ended"
    assert other.study.best_value == 2.5  # TPE learns from it
    other.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_worker_takes_no_trial_from_one_that_has_just_taken_it(tmp_path: Path) -> None:
    """Two workers claim one trial; the later one must not mistake the other's claim for its own."""
    first, second = opened(tmp_path), opened(tmp_path)
    first.add_trials(space_of(1))
    change, claims = second._storage.set_trial_state_values, list[Claim | None]()

    def late(*arguments: Any) -> bool:
        claims.append(first.claim("first", space_of(1), sampler))
        return change(*arguments)

    second._storage.set_trial_state_values = late  # type: ignore[method-assign, assignment]
    assert second.claim("second", space_of(1), sampler) is None
    second._storage.set_trial_state_values = change  # type: ignore[method-assign]
    second.take_over("second", ALIVE)
    assert claims[0] is not None
    assert first.holds(claims[0])
    for one in (first, second):
        one.close()


def test_an_attempt_whose_worker_died_before_it_left_its_name_is_taken_over(queue: TrialQueue, tmp_path: Path) -> None:
    """It has no heartbeat either."""
    key = queue._frozen("WAITING")[0]._trial_id
    queue._storage.set_trial_state_values(key, TrialState.RUNNING)
    queue.take_over("two", ALIVE)
    assert queue.newest()[0].state == "running"  # its worker may be about to write its name
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
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
    queue = opened(tmp_path)
    queue.add_trials(replace(space_of(4), trials=2))  # a process that was killed in the middle had added two
    assert queue.facts[READY]
    queue.add_trials(space_of(4))
    assert sorted(take_all(queue, "one", space_of(4))) == [(trial, 1) for trial in range(4)]
    queue.close()


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
