"""kill -9 of sweeps and their workers at random moments: no trial runs twice or is lost, no orphans, the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ddp_loop as dl
from ddp_loop.reporting import trial_folder
from ddp_loop.sweeps.trial_queue import TrialQueue
from tests.support.harness import MOMENT_S, until
from tests.support.trials import MARK, all_ended, final, marked, toml, train, trial, updates

REPOSITORY = Path(__file__).parents[2]
RATES, STEPS, EVERY = [0.1, 0.05, 0.02, 0.01, 0.005], 60, 7
START_S = 120.0  # an interpreter that imports torch on a busy machine
EARLY = ("sweep.json", "study.db", "trials/0000/trial.json", "workers")


@dataclass
class Started:
    """Processes of a sweep, found by a mark in their environment."""

    folder: Path
    mark: str

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ddp_loop", "sweep", *words, "--slots", "2"]
        with (self.folder.parent / "output").open("ab") as output:
            return subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return (self.folder.parent / "output").read_text()

    @property
    def made(self) -> int:
        """The updates of all trials."""
        return sum(len(updates(path)) for path in (self.folder / "trials").glob("*"))

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


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[list[str]]:
    """The digests of the trials of the same sweep, undisturbed."""
    results = dl.sweep(train, {"rate": RATES}, tmp_path / "undisturbed", slots=2, keywords=keywords(), progress=False)
    return [final(one.folder) for one in results]


def keywords() -> dict[str, Any]:
    return {"steps": STEPS, "save_every": EVERY}


def described(folder: Path, **more: str) -> str:
    facts = {"function": f"{REPOSITORY / 'tests' / 'support' / 'trials.py'}:train", "folder": str(folder)}
    arguments = keywords() | more
    return str(toml(folder.parent / "sweep.toml", **facts, keywords=arguments, heartbeat_s=1, space={"rate": RATES}))


def moment(started: Started, number: int, chance: random.Random) -> Callable[[], bool]:
    """When to kill: while the study is made, between a claim and a start, or after a random number of updates."""
    if number < len(EARLY):
        return lambda: (started.folder / EARLY[number]).exists()
    ended, most = started.ended, started.made + chance.randrange(1, STEPS)
    if number % 4 == 0:  # a claim: the next attempt of a worker begins
        attempts = started.attempts
        return lambda: started.attempts > attempts
    if number % 4 == 1:  # the next end of a trial
        return lambda: started.ended > ended
    return lambda: started.made >= most


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
    queue = TrialQueue(f"sqlite:///{folder / 'study.db'}", folder.name, beat_s=1, grace_s=3)
    ended = [one for one in queue._attempts() if one.ending is not None]
    queue.close()
    assert sorted(one.trial for one in ended) == list(range(len(RATES)))
    assert {one.ending.status for one in ended if one.ending is not None} == {"done"}
    for number, expected in enumerate(undisturbed):
        run = trial_folder(folder, number)
        facts = trial(folder, number)
        assert (facts["status"], facts["attempts"][-1]["status"]) == ("done", "done")
        assert [one["status"] for one in facts["attempts"][:-1]] == ["interrupted"] * (len(facts["attempts"]) - 1)
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
@pytest.mark.parametrize(("first", "by_workers"), [(0, False), (4, False), (24, True)])
def test_a_killed_sweep_resumes_where_it_was(
    first: int, by_workers: bool, started: Started, undisturbed: list[list[str]]
) -> None:
    """It is killed four times; so are its workers, one after the other, each with the trials of the one before."""
    chance = random.Random(first)
    words = [described(started.folder)]
    if by_workers:
        assert kill_at(started.start(*words), lambda: started.made > 0, started.mark)
    again = ["work", str(started.folder)] if by_workers else words
    numbers = range(first, first + 4)
    kills = [kill_at(started.start(*again), moment(started, number, chance), started.mark) for number in numbers]
    assert kills[0]
    assert all(kills) or first > 0  # by the later ones a busy machine may have done all trials
    finish(started, words)
    check(started.folder, undisturbed)


@pytest.mark.slow
@pytest.mark.covers("G5")
@pytest.mark.parametrize("how", ["Ctrl-C", "the test"])
def test_a_stopped_sweep_saves_checkpoints_and_resumes(
    how: str, started: Started, undisturbed: list[list[str]]
) -> None:
    words = [described(started.folder, fault="stands still")]
    process = started.start(*words)
    until(lambda: started.made == 2 * 3, "two trials stand still", START_S)
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        (started.folder / "stop").write_text(how)
    assert process.wait(START_S) == 0, started.output
    assert f"The sweep was stopped by {how}. Start it again to go on." in started.output
    all_ended(started.mark)
    (started.folder / "healed").touch()
    finish(started, words)
    check(started.folder, undisturbed)
    for number in range(len(RATES)):  # what was saved was not made again
        assert updates(trial_folder(started.folder, number)) == list(range(1, STEPS + 1))
