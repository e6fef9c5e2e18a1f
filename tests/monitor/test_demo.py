"""The made-up runs of `ddp_loop monitor --demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.monitor.demo import EPOCHS, RUNNING, STEP_S, STEPS_PER_EPOCH, FakeRun, fake_runs
from ddp_loop.reporting import read_run
from tests.support.runs import lines_of


def test_the_values_of_a_made_up_run_fit_together(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", seed=0, rate=0.1, width=64)
    run.run(2 * STEPS_PER_EPOCH)
    run.end("stopped")
    rows = lines_of(tmp_path / "one/rows.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert rows[0]["loss"] > 1.5 > 0.2 > rows[-1]["loss"] > 0
    assert all(0.1 < row["gradient_norm"] < 8 for row in rows)
    for row in rows:
        assert row["accuracy"] == pytest.approx(max(0.0, 0.99 - 0.4 * row["loss"]), abs=0.1)
    evaluated = lines_of(tmp_path / "one/evaluations.jsonl")
    assert [row["iteration"] for row in evaluated] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    for row in lines_of(tmp_path / "one/ranks.jsonl"):
        assert all(0 < rank["wait_s"] < STEP_S for rank in row["ranks"])


def test_made_up_runs_have_ended_but_for_the_last_ones(tmp_path: Path) -> None:
    with fake_runs(tmp_path):
        runs = sorted((tmp_path / "trials").iterdir())
        found = [read_run(run) for run in runs]
        assert [one.state for one in found[-RUNNING:]] == ["running"] * RUNNING
    assert [one.state for one in found[:-RUNNING]] == [
        {3: "failed", 7: "stopped"}.get(at, "done") for at in range(len(runs) - RUNNING)
    ]
    assert found[0].rows["loss"].at == EPOCHS * STEPS_PER_EPOCH
