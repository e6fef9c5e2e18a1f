"""Every block of docs/checkpoints.md, run in order as a reader would, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.runs import checkpoints_of, lines_of, rows_of
from tests.support.snippets import blocks_of, run_python, run_shell

GUIDE = "docs/checkpoints.md"


def run_all(on_ranks: OnRanks, ranks: int, folder: Path) -> str:
    """The output of all blocks, each of Python after the first one, which defines the job."""
    job, *blocks = blocks_of(GUIDE)
    printed = ""
    for block in blocks:
        if block.language == "sh":
            printed += run_shell(folder, block.text)
        else:
            printed += on_ranks(ranks, run_python, str(folder), job.text, block.text)[0].printed
    return printed


@pytest.mark.covers("J9", "J10", "J17")
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.slow
def test_the_guide_to_checkpoints_runs_and_does_what_it_says(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    printed = run_all(on_ranks, ranks, tmp_path)
    runs = tmp_path / "runs"
    assert rows_of(runs / "points") == list(range(1, 29))
    assert checkpoints_of(runs / "points")[-3:] == [20, 24, 28]
    assert rows_of(runs / "branch") == list(range(1, 33))
    assert [one["iteration"] for one in lines_of(runs / "branch" / "starts.jsonl")] == [0, 20, 24]
    assert rows_of(runs / "tuned") == rows_of(runs / "tuned-early") == list(range(1, 9))
    assert f"starts with model and optimizer of {runs}/points/checkpoints/step-00000028\n" in printed
    assert "valid, best, a resumed run starts from here" in printed
    assert "tensor([" in printed
    with safe_open(tmp_path / "points.safetensors", "pt") as file:
        assert {"run", "checkpoint", "iteration", "epoch", "score"} <= file.metadata().keys()
    best = dl.load(runs / "points", best=True)
    with safe_open(tmp_path / "points.safetensors", "pt") as file:
        assert all((file.get_tensor(name) == one).all() for name, one in best.items())


def test_the_promises_of_the_guide_about_the_branch_hold(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The bits after the branch are those of the run itself, and those of any number of ranks."""
    job = blocks_of(GUIDE)[0].text
    for ranks in (1, 2):
        on_ranks(ranks, run_python, str(tmp_path / str(ranks)), job, "train('run', 2)")
    one, two = (dl.load(tmp_path / f"{ranks}/run") for ranks in (1, 2))
    assert all((one[name] == two[name]).all() for name in one)
