"""Trials that fail, die, hang or are stopped: each is reported as such, can be run again, and harms no other."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddp_loop as dl
from ddp_loop.checkpoint import FileLock, write_atomic
from ddp_loop.cli import main
from ddp_loop.reporting import ask_for, trial_folder
from ddp_loop.sweeps import running
from ddp_loop.sweeps.folders import (
    Ending,
    ObjectiveReader,
    begin_attempt,
    end_attempt,
    has_requests,
    is_dead,
    worker_name,
)
from ddp_loop.sweeps.jobs import FunctionJob
from ddp_loop.sweeps.plan import make_plan
from ddp_loop.sweeps.running import SweepWorker
from ddp_loop.sweeps.storage import StorageUnreachable
from ddp_loop.sweeps.trial_queue import Claim, TrialQueue, _attempt_of
from tests.support.harness import until
from tests.support.trials import faulty, final, train, trial, trivial, updates

sweep = partial(dl.sweep, progress=False)
LONG = 100_000  # updates: to be stopped


@contextmanager
def in_a_thread(function: Callable[[], object]) -> Iterator[None]:
    """Call a function in a thread, which must have ended some time after the block."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    assert not thread.is_alive()


def update_of(folder: Path, number: int) -> bool:
    return len(updates(trial_folder(folder, number))) >= 3


@pytest.mark.covers("F3")
@pytest.mark.usefixtures("warm")
def test_a_trial_that_raises_or_gives_nan_harms_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    endings = {
        "raises": ("failed", "ValueError: the data is wrong"),
        "": ("done", "None"),
        "raises for NaN": ("not finite", "the loss is nan"),
        "returns NaN": ("not finite", "loss is nan"),
    }
    results = sweep(faulty, [{"rate": 0.1, "fault": fault} for fault in endings], folder, slots=2)
    for one, (status, why) in zip(results, endings.values(), strict=True):
        assert (one.status, trial(folder, one.trial)["status"]) == (status, status)
        assert why in str(one.why)
    (folder / "healed").touch()
    (folder / "again").mkdir()
    main(["sweep", "again", str(folder), "--slots", "1"])
    found = [trial(folder, number) for number in range(4)]
    assert [one["status"] for one in found] == ["done", "done", "done", "not finite"]
    assert [len(one["attempts"]) for one in found] == [2, 1, 2, 2]
    assert updates(results[0].folder) == [1, 2, 3, 3, 4, 5, 6]  # resumes from its checkpoint of update 2
    assert final(results[0].folder) == final(results[1].folder)


@pytest.mark.slow
@pytest.mark.covers("F3")
def test_a_trial_that_dies_harms_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    points = [{"rate": 0.1, "fault": fault} for fault in ("is killed", "", "")]
    results = sweep(faulty, points, folder, slots=2)
    assert [one.status for one in results] == ["killed", "done", "done"]
    assert "SIGKILL" in str(results[0].why)
    (folder / "healed").touch()
    assert main(["sweep", "again", str(folder), "--slots", "1"]) == 0
    found = [trial(folder, number) for number in range(3)]
    assert [(one["status"], len(one["attempts"])) for one in found] == [("done", 2), ("done", 1), ("done", 1)]
    assert updates(results[0].folder)[:5] == [1, 2, 3, 3, 4]
    assert len({tuple(final(one.folder)) for one in results}) == 1


@pytest.mark.slow
@pytest.mark.covers("F3")
def test_a_trial_that_never_ends_is_killed_at_its_limit_and_can_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    (one,) = sweep(faulty, [{"rate": 0.1, "fault": "never ends"}], folder, slots=1, time_limit_s=2)
    assert (one.status, one.why) == ("timed out", "took more than 2 s")
    (folder / "healed").touch()
    main(["sweep", "again", str(folder), "--slots", "1"])  # it is done, or on a busy machine late again
    assert len(trial(folder, 0)["attempts"]) == 2


@pytest.mark.covers("G5")
@pytest.mark.usefixtures("warm")
def test_one_trial_is_stopped_by_its_own_file_and_stays_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    points = [{"rate": 0.1, "steps": LONG}, {"rate": 0.1, "steps": 4}]
    returned: list[list[dl.TrialResult]] = []
    with in_a_thread(lambda: returned.append(sweep(train, points, folder, slots=2))):
        until(lambda: update_of(folder, 0), "updates of trial 0")
        (trial_folder(folder, 0) / "stop").write_text("the page")
    assert [(one.status, one.why) for one in returned[0]] == [("stopped", "the page"), ("done", None)]
    assert sweep(train, points, folder, slots=2) == returned[0]


@pytest.fixture
def worker_of(tmp_path: Path) -> Iterator[Callable[..., tuple[SweepWorker, TrialQueue]]]:
    """A worker of the sweep in the folder `s`, and its queue."""
    folder = tmp_path / "s"

    def begun(trials: int, function: Callable[..., object] = trivial) -> tuple[SweepWorker, TrialQueue]:
        space = {"x": list(range(trials))} if function is trivial else {"rate": [0.1], "fault": ["never ends"]}
        plan = make_plan(FunctionJob(function), space, {"heartbeat_s": 1})
        folder.mkdir(exist_ok=True)
        url = f"sqlite:///{folder / 'study.db'}"
        queue = ending.enter_context(closing(TrialQueue(url, "s", beat_s=1, grace_s=3, direction="minimize")))
        queue.add_trials(plan.space)
        return SweepWorker(plan, folder, queue, [{}], lambda line: None), queue

    with ExitStack() as ending:
        yield begun


def claimed(worker: SweepWorker, queue: TrialQueue, name: str) -> Claim:
    """A trial that a worker of this name has taken."""
    claim = queue.claim(name, worker._plan.space, worker._plan.sampler)
    assert claim is not None
    return claim


def states(queue: TrialQueue) -> list[tuple[int, int, str]]:
    """The newest attempt at each trial, and how it stands."""
    return [(one.trial, one.attempt, one.state) for one in queue.newest().values()]


@pytest.mark.covers("G5")
@pytest.mark.usefixtures("warm")
def test_the_trial_of_a_dead_worker_resumes_and_its_folder_records_it(worker_of: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    worker, queue = worker_of(2)
    with worker_name(folder) as dead:
        claim = claimed(worker, queue, dead)
        queue._mine.clear()  # as in a process that died
        worker._begin(0, claim, trial_folder(folder, 0))
    assert is_dead(folder, dead)
    worker.run()
    assert states(queue) == [(0, 2, "ended"), (1, 1, "ended")]
    found = trial(folder, 0)
    assert [(one["number"], one["status"]) for one in found["attempts"]] == [(1, "interrupted"), (2, "done")]
    assert found["status"] == "done"


@pytest.mark.covers("F3")
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("added", [False, True], ids=["before", "after"])
@pytest.mark.slow
def test_a_request_to_run_again_survives_a_kill_and_adds_one_attempt(
    added: bool, worker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes before the storage has the attempts, or after it has them and before the request is removed."""
    worker, queue = worker_of(2)
    worker.run()
    ask_for(tmp_path / "s", [0])
    add = queue.again

    def killed(*arguments: Any) -> None:
        if added:
            add(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(queue, "again", killed)
        with pytest.raises(KeyboardInterrupt):
            worker._look_around()
    assert has_requests(tmp_path / "s")
    if added:  # it also ran before the request was read again
        assert queue.end(claimed(worker, queue, "two"), Ending("done", 0.0))
    worker._look_around()
    assert not has_requests(tmp_path / "s")
    assert states(queue) == [(0, 2, "ended" if added else "waiting"), (1, 1, "ended")]


@pytest.mark.covers("F3")
@pytest.mark.usefixtures("warm")
@pytest.mark.slow
def test_a_request_to_run_again_is_read_by_one_worker_at_a_time(
    worker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the slower one writes "waiting" into the folder of a trial that the other one has already begun."""
    worker, queue = worker_of(1)
    worker.run()
    other, second = worker_of(1)
    ask_for(tmp_path / "s", [0])
    record = worker._record_waiting

    def late(trial: int) -> None:
        other._look_around()
        assert second.claim("two", worker._plan.space, worker._plan.sampler) is None
        record(trial)

    monkeypatch.setattr(worker, "_record_waiting", late)
    worker._look_around()
    assert [(one.trial, one.attempt) for one in map(_attempt_of, queue._frozen())] == [(0, 1), (0, 2)]
    other.run()
    assert trial(tmp_path / "s", 0)["status"] == "done"


def test_an_earlier_attempt_that_ends_does_not_change_the_trials_status(tmp_path: Path) -> None:
    """The worker that records a dead worker's end may be slower than the one that has the trial now."""
    run = trial_folder(tmp_path, 0)
    for number in (1, 2):
        begin_attempt(run, {"number": number}, trial=0)
    for _ in range(2):
        found = trial(tmp_path, 0)
        assert (found["status"], found["why"]) == ("running", None)
        assert [one["status"] for one in found["attempts"]] == ["interrupted", "running"]
        end_attempt(run, 1, Ending("interrupted", None, "its worker died"))


@pytest.mark.usefixtures("warm")
def test_the_status_of_an_earlier_attempt_is_not_that_of_this_one(worker_of: Any, tmp_path: Path) -> None:
    folder = trial_folder(tmp_path / "s", 0)
    folder.mkdir(parents=True)
    write_atomic(folder / "status.json", {"status": "stopped", "at": time.time() - 60, "why": "Ctrl-C"})
    worker_of(1)[0].run()
    assert trial(tmp_path / "s", 0)["status"] == "done"
    assert list((tmp_path / "s" / "workers").iterdir()) == []  # names of workers that died stay there


@pytest.mark.usefixtures("warm")
def test_a_request_that_comes_while_the_last_trial_ends_takes_effect(
    worker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_of(1)[0].run()
    worker, queue = worker_of(1)
    look = worker._look_around

    def late() -> None:
        look()
        if states(queue) == [(0, 1, "ended")] and not has_requests(tmp_path / "s"):
            ask_for(tmp_path / "s", [0])

    monkeypatch.setattr(worker, "_look_around", late)
    worker.run()
    assert states(queue) == [(0, 2, "ended")]


def test_a_trial_that_was_asked_to_stop_keeps_the_first_reason_and_its_deadline(tmp_path: Path) -> None:
    """Each look repeats the request, which must not move the deadline."""
    one: Any = running.Running(None, tmp_path, None, None)  # type: ignore[arg-type]
    one.ask("timed out", 5.0)
    deadline = one.deadline
    one.ask("Ctrl-C", 30.0)
    assert (one.asked, one.deadline) == ("timed out", deadline)


@pytest.mark.usefixtures("warm")
@pytest.mark.slow
def test_a_trial_whose_folder_is_in_use_lets_others_go_first(
    worker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on a host that hangs keeps its lock."""
    monkeypatch.setattr(running, "HELD_S", 0.1)
    worker, queue = worker_of(2)
    first = trial_folder(tmp_path / "s", 0)
    first.mkdir(parents=True)
    (first / "run.json").write_text("{}")
    with in_a_thread(worker.run), closing(FileLock(first / "lock", "run")):
        until(lambda: queue.newest()[1].state == "ended", "the other trial has ended")
    assert [state for _, _, state in states(queue)] == ["ended"] * 2


@pytest.mark.usefixtures("warm")
def test_a_worker_that_lost_its_trial_writes_nothing_into_its_folder(
    worker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP for longer than the grace, and SIGCONT."""
    worker, queue = worker_of(1)
    claim = claimed(worker, queue, "one")
    worker_of(1)[1].take_over("two", lambda name: True)
    with closing(vars(running)["Pool"](1, {})) as pool:
        assert worker._run(0, claim, pool)  # the worker continues before the trial began
    assert not (tmp_path / "s" / "trials").exists()
    folder = trial_folder(tmp_path / "s", 0)  # and one that had begun
    queue._mine[claim.key] = claim
    mine = running.Running(claim, folder, pool, ObjectiveReader(folder, worker._plan.objective))
    worker._running[0] = mine
    killed: list[bool] = []
    monkeypatch.setattr(mine, "kill", lambda: killed.append(True))
    monkeypatch.setattr(running, "ask_to_stop", lambda *_: pytest.fail("asked the other worker's run to stop"))
    worker._follow(True, False)
    worker._look_at(mine, time.monotonic())
    assert killed == [True]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("harm", ["was removed", "failed"])
@pytest.mark.slow
def test_a_storage_that_fails_stops_trials_with_checkpoints(harm: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    said = list[str]()

    def start() -> None:
        with pytest.raises(StorageUnreachable) as caught:
            sweep(train, {"rate": [0.1]}, folder, slots=1, keywords={"steps": LONG}, heartbeat_s=1)
        said.append(str(caught.value))

    with in_a_thread(start):
        until(lambda: update_of(folder, 0), "updates of the trial")
        if harm == "was removed":
            (folder / "study.db").unlink()
        else:
            with closing(sqlite3.connect(folder / "study.db")) as database:
                database.execute("DROP TABLE trial_heartbeats")
    assert f"{harm} while the sweep ran" in said[0]
    assert "Running trials were stopped with checkpoints." in said[0]
    assert "tart the sweep again" in said[0]
    assert list(trial_folder(folder, 0).glob("checkpoints/step-*"))
    made = updates(trial_folder(folder, 0))
    assert made == list(range(1, len(made) + 1))


@pytest.mark.slow
def test_a_second_request_kills_trials_that_resume_later(worker_of: Any, tmp_path: Path) -> None:
    worker, queue = worker_of(1, faulty)
    with in_a_thread(worker.run):
        until(lambda: update_of(tmp_path / "s", 0), "updates of the trial")
        worker.stop("Ctrl-C")
        worker.stop("Ctrl-C")
    assert queue.newest()[0].state == "waiting"  # not "killed"
    assert trial(tmp_path / "s", 0)["status"] == "interrupted"


@pytest.mark.covers("G5")
@pytest.mark.usefixtures("warm")
def test_a_finished_sweep_starts_no_trial_again_and_writes_an_ending_that_is_only_in_the_storage(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "s"
    first = sweep(trivial, {"x": [3, 1]}, folder, slots=1)
    whole, half = (trial_folder(folder, number) / "trial.json" for number in (0, 1))
    before = whole.read_text()
    half.write_text(half.read_text().replace('"done"', '"running"'))  # as after a kill in between
    assert sweep(trivial, {"x": [3, 1]}, folder, slots=1) == first
    assert whole.read_text() == before
    found = trial(folder, 1)
    assert (found["status"], found["value"]) == ("done", 1.0)
    assert [one["status"] for one in found["attempts"]] == ["done"]


@pytest.mark.usefixtures("warm")
def test_workers_ignore_a_stop_request_for_earlier_ones(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sweep(faulty, [{"rate": 0.1, "fault": "raises"}], folder, slots=1)
    (folder / "stop").write_text("python -m ddp_loop stop")
    (folder / "healed").touch()
    assert main(["sweep", "again", str(folder), "--slots", "1"]) == 0
    assert trial(folder, 0)["status"] == "done"
