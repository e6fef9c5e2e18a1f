"""A day with the page in a browser: a run is watched, stopped and continued, among runs of other days."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import is_running
from tests.support.browsing import NEEDS_BROWSER, Visit
from tests.support.harness import TASK_S, until
from tests.support.runs import rows_of, status_of
from tests.support.serving import row, served, write_run

pytestmark = NEEDS_BROWSER
WINDOW = (1400, 900)
BEGINS_S = 2 * TASK_S  # for Python to import torch and make the first steps on a busy machine
SCRIPT = """
import torch
import ddp_loop as dl

with dl.join_world(device="cpu", seed=1) as world:
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 4)
    batches = dl.Batches((inputs, inputs.sum(1, keepdim=True)), 8, world)
    state = {"model": model, "optimizer": optimizer}
    loop = dl.Loop(batches, 10**6, state=state, run_dir="lab/live", config={"rate": 0.01}, save_every=10**6)
    print(f"the script begins after step {loop.iteration}", flush=True)
    for step in loop:
        for given, wanted in step:
            step.backward((model(given) - wanted).square().mean())
        step.fold()
        optimizer.step()
        if step.iteration == 1:
            dl.evaluate(model, batches, error=lambda output, wanted: (output - wanted).abs().mean(1))
            loop.log(probe=0.25)
            loop.log_text("sample", "<b>a text of the script</b>")
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Two runs of other days."""
    top = tmp_path / "lab"
    for number in range(2):
        rows = [row(k, loss=number + 1 / k) for k in range(1, 101)]
        write_run(top / f"old-{number}", rows, began=1.0 + number, status="done", steps_per_epoch=50, iteration=100)
    return top


@contextmanager
def training(lab: Path) -> Iterator[Path]:
    """A script that trains beside the other runs, until the page stops it; returns its run folder."""
    (lab.parent / "train.py").write_text(SCRIPT)
    run, environment = lab / "live", dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "train.py"]
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=lab.parent, env=environment, stdout=output, stderr=output)
    try:
        until(lambda: is_running(run) or process.poll() is not None, "the script trains", BEGINS_S)
        yield run
    finally:
        process.kill()
        process.wait()
        if run.is_dir():
            (run / "stop").touch()
            until(lambda: not is_running(run) and not waits(), "the run that was continued has ended")


def waits() -> bool:
    """Whether the page waits for a process that it has started."""
    return any(thread.name.startswith("waits for") for thread in threading.enumerate())


def stop(one: Visit) -> int:
    """Stop the live run, whose card is open; returns the step that the page then names."""
    one.press("Stop live")
    one.press("Stop the run")
    one.waits_for(".says", "stopped at step")
    one.waits_for(".says", "checkpoint saved")
    return int(one.text(".says").split()[3].rstrip(",").replace("\u202f", ""))


@pytest.mark.covers("E4", "E5", "J7", "J8")
def test_a_run_is_watched_stopped_and_continued_on_the_page(visit: Any, lab: Path) -> None:
    with training(lab) as run, served(lab) as page:
        one: Visit = visit(page, WINDOW)
        box = one.at(".chart[data-metric=loss]").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < WINDOW[1]
        one.has_lines(3)

        one.open_card("live")
        one.press("Console")
        one.waits_for(".console-text", "the script begins after step 0")
        until(lambda: "Remaining" in one.at(".facts dt").all_inner_texts(), "the remaining time is said")
        first = stop(one)
        one.waits_for(".why", "Asked by: the page")
        assert one.at(".ranks li").count() == 1  # from the run's ranks.jsonl
        assert (run / "checkpoints" / f"step-{first:08}" / "manifest.json").is_file()
        one.press("Continue live")
        start = status_of(run)["start"]
        assert one.text("#go-on-command") == f"cd {lab.parent} && {shlex.quote(start[0])} train.py"
        one.press("Start it")
        until(lambda: one.at(".says", has_text="running").count(), "the run goes on", BEGINS_S)
        one.waits_for(".console-text", f"the script begins after step {first}")
        one.at("[data-panel=texts]").first.click()
        one.waits_for(".texts pre", "<b>a text of the script</b>")
        second = stop(one)
        assert second > first
        one.page.get_by_role("checkbox", name="Draw live").check()
        until(lambda: [1, 0.25] in one.last("probe"), "the logged value is drawn")
        until(lambda: len(one.last("error")) == 1, "the evaluation is drawn")
        iterations = rows_of(run)
        assert iterations == sorted(set(iterations))  # each step once, in order
        assert iterations[-1] == second
