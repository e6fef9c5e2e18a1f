"""The values by which trials are compared, read from run folders as rows and evaluations arrive."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path

import pytest

from ddp_loop.sweeps.trial_folder import Objective, ObjectiveReader


def write(path: Path, *rows: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(iteration: int, epoch: int, loss: object, samples: int = 10) -> dict[str, object]:
    return {"iteration": iteration, "epoch": epoch, "loss": loss, "samples": samples}


@pytest.mark.covers("F2")
def test_the_value_is_the_last_epoch_s_mean_and_reports_are_means_of_updates(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("loss", every=2))
    assert reader.poll() == []
    assert reader.value is None
    write(tmp_path / "rows.jsonl", row(1, 0, 4.0), row(2, 0, 2.0), row(3, 1, 1.0, 30))
    assert reader.poll() == [(2, 3.0)]
    assert reader.value == 1.0
    write(tmp_path / "rows.jsonl", row(4, 1, 2.0, 10))
    assert reader.poll() == [(4, 1.5)]
    assert reader.value == 1.25  # over the samples
    assert reader.poll() == []


def test_rows_that_begin_anew_are_not_added_to_the_former_ones(tmp_path: Path) -> None:
    """A trial whose checkpoints were removed starts over, with rows of its own."""
    reader = ObjectiveReader(tmp_path, Objective("loss", every=2))
    write(tmp_path / "rows.jsonl", row(1, 0, 4.0), row(2, 0, 2.0), row(3, 0, 9.0))
    reader.poll()
    (tmp_path / "rows.jsonl").unlink()
    write(tmp_path / "rows.jsonl", row(1, 0, 1.0))
    assert reader.poll() == []
    assert reader.value == 1.0
    write(tmp_path / "rows.jsonl", row(2, 0, 3.0))
    assert reader.poll() == [(2, 2.0)]


def test_evaluations_are_reported_one_by_one(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("evaluation.accuracy", "maximize", every=50))
    write(tmp_path / "evaluations.jsonl", {"iteration": 3, "accuracy": 0.5}, {"iteration": 7, "accuracy": None})
    (first, (iteration, value)) = reader.poll()
    assert first == (3, 0.5)
    assert iteration == 7
    assert isnan(value)
    assert "The results of dl.evaluate have no 'accuracy'" in reader.missing()
