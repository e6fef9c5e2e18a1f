"""SIGSTOP of a worker: another one takes its trial, no trial runs twice at once, and it changes nothing later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ddp_loop.checkpoint import is_running
from ddp_loop.sweeps.trial_queue import Attempt, TrialQueue
from tests.support.harness import TASK_S, OnRanks, until
from tests.support.paths import ROOT
from tests.support.runs import lines_of, rows_of
from tests.support.sweep_jobs import REACHED, SAVE_EVERY, STANDS_AT, UPDATES, WEIGHTS, train
from tests.support.trials import MARK, marked, toml, trial

RATES = [0.1, 0.05]


@contextmanager
def worker(mark: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `python -m ddp_loop sweep`; it and its ranks have the mark, and are killed at the end."""
    command = [sys.executable, "-m", "ddp_loop", "sweep", *words, "--slots=1"]
    pipe, environment = subprocess.PIPE, {**os.environ, MARK: mark}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as one:
        try:
            yield one
        finally:
            for process in marked(mark):
                os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.covers("G5")
@pytest.mark.parametrize("stopped", ["the worker", "the worker and its rank"])
def test_a_worker_that_wakes_up_late_has_lost_its_trial(stopped: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    folder, marks = tmp_path / "s", (uuid.uuid4().hex, uuid.uuid4().hex)
    facts = {"function": f"{ROOT}/tests/support/sweep_jobs.py:train", "folder": str(folder), "heartbeat_s": 1}
    file = toml(tmp_path / "sweep.toml", **facts, keywords={"stands": RATES[0]}, space={"rate": RATES})
    run = folder / "trials" / "0000"

    def newest() -> Attempt:
        queue = TrialQueue(f"sqlite:///{folder / 'study.db'}", "s", beat_s=1, grace_s=3)
        with closing(queue):
            return queue.newest()[0]

    with worker(marks[0], str(file)) as late:
        until((run / REACHED).exists, "the first trial stands still", TASK_S)
        processes = [late.pid] if stopped == "the worker" else list(marked(marks[0]))
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        with worker(marks[1], "work", str(folder)) as other:
            if stopped == "the worker":
                until(lambda: trial(folder, 0)["status"] == "done", "the other worker has ended the trial", TASK_S)
            else:  # no other process may train in the folder of a rank that may wake up
                until(lambda: newest().attempt > 1 and newest().state == "running", "it has the trial", TASK_S)
                assert is_running(run)
                assert len(trial(folder, 0)["attempts"]) == 1
            for process in processes:
                os.kill(process, signal.SIGCONT)
            printed, _ = late.communicate(timeout=TASK_S)
            assert other.wait(TASK_S) == 0
    assert late.returncode == 0, printed
    found = trial(folder, 0)
    assert found["status"] == "done"
    assert [one["status"] for one in found["attempts"]] == ["interrupted", "done"]
    alone = tmp_path / "alone"
    assert found["value"] == on_ranks(1, train, RATES[0], str(alone))[0]
    assert (run / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()
    assert rows_of(run) == list(range(1, UPDATES + 1))
    starts = [start["iteration"] for start in lines_of(run / "starts.jsonl")]
    assert starts[0] == 0
    assert len(starts) == 2
    assert starts[1] >= STANDS_AT // SAVE_EVERY * SAVE_EVERY  # from a checkpoint
