"""Runs, sweeps and traces that a former version wrote are resumed and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.monitor.run_list import RunList
from ddp_loop.reporting.jsonl import read_lines
from ddp_loop.reporting.run_records import find_runs
from ddp_loop.tracing import compare_runs
from tests.support.former import EPOCHS, SPACE, STEPS, former_run, former_sweep, train
from tests.support.harness import OnRanks

ALL = list(range(1, EPOCHS * STEPS + 1))
ROUNDING = 1e-9  # between processors: another one made the first steps


@pytest.mark.covers("E5")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_former_run_goes_on_as_one_that_was_not_stopped(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(1, train, 0.1, str(tmp_path / "whole"))[0]
    run = former_run(tmp_path)
    for found in on_ranks(ranks, train, 0.1, str(run), None, True):
        assert found == pytest.approx(whole, abs=ROUNDING)
    for name in ("rows", "evaluations", "logged"):
        found = [line["iteration"] for line in read_lines(run / f"{name}.jsonl")]
        assert found == (ALL if name == "rows" else ALL[STEPS - 1 :: STEPS]), name


def test_a_former_trace_is_read_beside_that_of_the_run_that_goes_on(on_ranks: OnRanks, tmp_path: Path) -> None:
    before = former_run(tmp_path / "before")
    on_ranks(1, train, 0.1, str(former_run(tmp_path)), None, True)
    is_equal, lines = compare_runs(before, tmp_path / "run")
    assert is_equal
    assert "steps 0 to 7" in lines[0]
    assert f"steps 0 to {ALL[-1]}" in lines[1]


@pytest.mark.usefixtures("warm")
def test_a_former_sweep_grows_and_keeps_its_trial(tmp_path: Path) -> None:
    folder = former_sweep(tmp_path)
    rows = (folder / "trials" / "0000" / "rows.jsonl").read_bytes()
    first, second = dl.sweep(train, SPACE, folder, trials=2, sampler="random", slots=1, seed=3, progress=False)
    assert (first.status, first.value) == ("done", 0.30345354214865067)
    assert second.status == "done"
    assert second.value is not None
    assert (folder / "trials" / "0000" / "rows.jsonl").read_bytes() == rows


def test_former_runs_are_shown_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sweep = former_run(tmp_path), former_sweep(tmp_path)
    assert sorted(find_runs(tmp_path)) == [run, sweep / "trials" / "0000"]
    for words in (["runs", str(tmp_path)], ["best", str(sweep)], ["checkpoints", str(run)], ["plot", str(run)]):
        assert main(words) == 0
    shown = capsys.readouterr().out
    assert "stopped" in shown
    assert "0.303454" in shown
    assert main(["export", str(run), "-o", str(tmp_path / "weights.safetensors")]) == 0
    runs = json.loads(RunList([tmp_path]).look().changes(None))["runs"]
    seen = {one["key"]: one["state"] for one in runs}
    assert seen == {"run": "stopped", "sweep/trials/0000": "done"}
