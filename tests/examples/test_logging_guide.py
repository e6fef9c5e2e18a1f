"""Every block of docs/logging.md, run as a reader would, on one rank and on two."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.support.harness import OnRanks
from tests.support.runs import lines_of
from tests.support.snippets import Ran, blocks_of, run_python


def run_quietly(folder: str, text: str) -> Ran:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchmetrics, and of an update without an optimizer
        return run_python(folder, text)


@pytest.mark.covers("J7", "J17")
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.slow
def test_the_guide_to_logging_runs_and_writes_what_it_says(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    blocks = blocks_of("docs/logging.md")
    assert [block.language for block in blocks] == ["python"] * 3
    log, metrics, own = (on_ranks(ranks, run_quietly, str(tmp_path), block.text)[0].printed for block in blocks)
    run = tmp_path / "runs" / "log"
    logged = lines_of(run / "logged.jsonl")
    assert [line["iteration"] for line in logged if "weight_norm" in line] == list(range(1, 31))
    assert [(line["iteration"], line["val/worst"]) for line in logged if "val/worst" in line] == [
        (n, 0.25) for n in (10, 20, 30)
    ]
    assert {line["of all ranks"] for line in logged if "of all ranks" in line} == {(ranks - 1) / 2}
    assert [line["text"] for line in lines_of(run / "texts.jsonl")] == [f"after epoch {n}" for n in (1, 2, 3)]
    assert len(list((run / "images").iterdir())) == 3
    assert (run / "tables" / "signs.json").exists()
    assert len((run / "all.logged.csv").read_text().splitlines()) >= 30
    assert list((tmp_path / "board").iterdir())
    assert "val/worst: 0.25" in log
    assert " of 50 samples" in metrics
    assert "the largest loss was " in own
