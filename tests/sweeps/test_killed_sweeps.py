"""kill -9 of sweeps and their workers at random moments: no trial runs twice or is lost, no orphans, the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.reporting import trial_folder
from ddp_loop.sweeps.trial_queue import TrialQueue, _attempt_of
from tests.support.harness import MOMENT_S, until
from tests.support.paths import ROOT
from tests.support.trials import MARK, all_ended, final, marked, toml, train, trial, updates

RATES, STEPS, EVERY = [0.1, 0.05, 0.02, 0.01, 0.005], 60, 7
KEYWORDS = {"steps": STEPS, "save_every": EVERY}
START_S = 120.0  # an interpreter that imports torch on a busy machine


@dataclass
class Started:
    """Processes of a sweep, found by a mark in their environment."""

    folder: Path
    mark: str

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ddp_loop", "sweep", *words, "--slots", "2"]
        with (self.folder.parent / "output").open("ab") as output:
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return (self.folder.parent / "output").read_text()

    @property
    def made(self) -> int:
        """The updates of all trials."""
        return sum(len(updates(path)) for path in (self.folder / "trials").glob("*"))

    def has_made(self, count: int) -> bool:
        return self.made == count

    @property
    def attempts(self) -> int:
        """The attempts at all trials that have begun."""
        return sum(len(trial(self.folder, number).get("attempts", ())) for number in range(len(RATES)))

    @property
    def ended(self) -> int:
        """The trials whose function has returned."""
        return len(list(self.folder.glob("trials/*/final.json")))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path / "s", uuid.uuid4().hex)
    yield started
    for process in marked(started.mark):
        os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The digests of the trials, each trained alone and undisturbed."""
    runs = [tmp_path_factory.mktemp("undisturbed") for _ in RATES]
    for run, rate in zip(runs, RATES, strict=True):
        pool.run(train, 1, rate, run_dir=str(run), **KEYWORDS)
    return [final(run) for run in runs]


def described(folder: Path, **more: str) -> str:
    facts = {"function": f"{ROOT}/tests/support/trials.py:train", "folder": str(folder), "heartbeat_s": 1}
    return str(toml(folder.parent / "sweep.toml", **facts, keywords=KEYWORDS | more, space={"rate": RATES}))


def kill_at(process: subprocess.Popen[bytes], holds: Callable[[], bool], mark: str) -> bool:
    """Kill a process at a moment, and check that none of its children is left; False if its work was done before."""
    until(lambda: holds() or process.poll() is not None, "the moment of a kill", START_S)
    process.kill()
    code = process.wait(MOMENT_S)
    all_ended(mark)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check(folder: Path, undisturbed: list[list[str]]) -> None:
    """No trial ran twice or was lost, each has its bits, and no update in a checkpoint was made again."""
    with closing(TrialQueue(f"sqlite:///{folder / 'study.db'}", folder.name, beat_s=1, grace_s=3)) as queue:
        ended = [(one.trial, one.ending.status) for one in map(_attempt_of, queue._frozen()) if one.ending is not None]
    assert sorted(ended) == [(number, "done") for number in range(len(RATES))]
    for number, expected in enumerate(undisturbed):
        facts = trial(folder, number)
        run = trial_folder(folder, number)
        assert facts["status"] == "done"
        assert [one["status"] for one in facts["attempts"]] == ["interrupted"] * (len(facts["attempts"]) - 1) + ["done"]
        assert final(run) == expected
        made = updates(run)
        assert set(made) == set(range(1, STEPS + 1))
        for before, after in pairwise(made):
            assert after == before + 1 or (after <= before + 1 and after > before - 2 * EVERY)  # from a checkpoint


def finish(started: Started, words: list[str]) -> None:
    """Start the sweep again, and let it finish."""
    process = started.start(*words)
    assert process.wait(2 * START_S) == 0, started.output
    all_ended(started.mark)


@pytest.mark.slow
@pytest.mark.covers("G5", "F3")
@pytest.mark.parametrize("by_workers", [False, True])
def test_a_killed_sweep_resumes_where_it_was(by_workers: bool, started: Started, undisturbed: list[list[str]]) -> None:
    """It is killed three times; so are its workers, one after the other, each with the trials of the one before."""
    words = [described(started.folder)]
    folder = started.folder
    again = ["work", str(folder)] if by_workers else words
    moments: list[Callable[[], bool]] = [
        lambda: (folder / ("trials/0000/trial.json" if by_workers else "sweep.json")).exists(),
        lambda: started.made >= made + STEPS // 2,
        lambda: started.attempts > attempts if by_workers else started.ended > ended,  # a claim, or an end of a trial
    ]
    for number, moment in enumerate(moments):
        made = started.made
        attempts = started.attempts
        ended = started.ended
        is_killed = kill_at(started.start(*(again if number else words)), moment, started.mark)
        assert is_killed or number > 0  # by the later ones a busy machine may have done all trials
    finish(started, words)
    check(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.covers("G5")
def test_a_stopped_sweep_saves_checkpoints_and_resumes(started: Started, undisturbed: list[list[str]]) -> None:
    """It is stopped by Ctrl-C while the first two trials stand still, and by a file while the next two do."""
    words = [described(started.folder, fault="stands still")]
    stop = started.folder / "stop"
    for how, made in (("Ctrl-C", 2 * 3), ("the test", 2 * STEPS + 2 * 3)):
        process = started.start(*words)
        until(partial(started.has_made, made), "two trials stand still", START_S)
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            stop.write_text(how)
        assert process.wait(START_S) == 0, started.output
        assert f"The sweep was stopped by {how}. Start it again to go on." in started.output
        all_ended(started.mark)
    (started.folder / "healed").touch()
    finish(started, words)
    check(started.folder, undisturbed)
    for number in range(len(RATES)):  # what was saved was not made again
        assert updates(trial_folder(started.folder, number)) == list(range(1, STEPS + 1))
