"""The page of a running sweep in a browser: its workers follow the page's requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import NEEDS_BROWSER
from tests.support.harness import TASK_S, until
from tests.support.runs import status_of
from tests.support.trials import MARK, all_ended, marked, newest_checkpoint, trial, updates

pytestmark = NEEDS_BROWSER
REPOSITORY = Path(__file__).parents[2]
LONG = 1_000_000  # updates: to be stopped
START_S = 2 * TASK_S  # processes that import torch on a busy machine
SWEEP = f"""
function = "{REPOSITORY}/tests/support/trials.py:train"
folder = "s"
points = [
    {{rate = 0.1, steps = 6, fault = "raises", save_every = 2}},
    {{rate = 0.05, steps = {LONG}, fault = "", save_every = {LONG}}},
    {{rate = 0.02, steps = {LONG}, fault = "", save_every = {LONG}}},
    {{rate = 0.01, steps = {LONG}, fault = "", save_every = {LONG}}},
]
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep of a trial that raises and of three long ones, on two slots."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddp_loop", "sweep", str(tmp_path / "sweep.toml"), "--slots", "2"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=output)
    yield process
    for one in marked(mark):
        os.kill(one, signal.SIGKILL)
    process.wait()
    all_ended(mark)


@pytest.mark.covers("G4", "G5")
def test_the_workers_of_a_sweep_stop_one_run_again_and_stop_all_from_the_page(
    show: Any, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "s"

    def statuses() -> list[Any]:
        return [trial(folder, number).get("status") for number in range(4)]

    def runs(number: int, since: int = 0) -> bool:
        return len(updates(folder / "trials" / f"{number:04d}")) > since

    until(lambda: statuses()[0] == "failed" and runs(1) and runs(2), "one has failed, two run", START_S)
    one = show(folder)
    one.tab("Results")
    shown = {number: one.at(f".trial[data-run='trials/{number:04d}'] .status") for number in range(4)}
    assert statuses() == ["failed", "running", "running", "waiting"]
    one.at(".sweep").first.wait_for()  # a line that comes after the tab opened moves the table

    one.press("Stop trials/0001")
    one.press("Stop the run")
    until(lambda: statuses()[1] == "stopped" and runs(3), "trial 1 stops, and its slot takes the next", START_S)
    assert newest_checkpoint(folder / "trials" / "0001") == updates(folder / "trials" / "0001")[-1]
    assert statuses() == ["failed", "stopped", "running", "running"]

    (folder / "healed").touch()
    one.press("Run 2 failed again")
    one.waits_for(".sweep-needs", "2 trials will run again.")
    until(lambda: statuses()[:2] == ["waiting", "waiting"], "both are in line", START_S)
    one.press("Stop trials/0003")
    one.press("Stop the run")
    made = len(updates(folder / "trials" / "0001"))
    until(lambda: statuses()[0] == "done" and runs(1, made), "one after the other runs in its slot", START_S)
    assert updates(folder / "trials" / "0000") == [1, 2, 3, 3, 4, 5, 6]  # from its checkpoint of update 2
    so_far = updates(folder / "trials" / "0001")  # read once, since the trial goes on
    assert so_far == list(range(1, len(so_far) + 1))
    until(lambda: shown[0].inner_text() == "done", "the table says so")

    one.press("Stop all")
    one.press("Stop all trials")
    process.wait(START_S)
    assert statuses() == ["done", "interrupted", "interrupted", "stopped"]
    until(lambda: not one.at(".stop-all").is_visible(), "the button is gone")
    until(lambda: [shown[number].inner_text() for number in (1, 2)] == ["interrupted"] * 2, "the table says so")
    for number in (1, 2):
        run = folder / "trials" / f"{number:04d}"
        assert newest_checkpoint(run) == updates(run)[-1]
        assert status_of(run)["status"] == "stopped"
