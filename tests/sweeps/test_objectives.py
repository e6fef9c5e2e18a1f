"""The values by which trials are compared, read from run folders as rows and evaluations arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_loop.sweeps.folders import Objective, ObjectiveReader
from ddp_loop.sweeps.jobs import FunctionJob
from ddp_loop.sweeps.plan import make_plan
from tests.support.trials import trivial


def write(path: Path, *rows: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(iteration: int, epoch: int, loss: object, samples: int = 10) -> dict[str, object]:
    return {"iteration": iteration, "epoch": epoch, "loss": loss, "samples": samples}


@pytest.mark.covers("F2")
def test_the_value_is_the_last_epoch_s_mean_and_reports_are_means_of_updates(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    reader = ObjectiveReader(tmp_path, Objective("loss", every=2))

    def read(*rows: dict[str, object]) -> tuple[list[tuple[int, float]], float | None]:
        write(path, *rows)
        return reader.poll(), reader.value

    assert read() == ([], None)
    assert read(row(1, 0, 4.0), row(2, 0, 2.0), row(3, 1, 1.0, 30)) == ([(2, 3.0)], 1.0)
    assert read(row(4, 1, 2.0, 10)) == ([(4, 1.5)], 1.25)  # over the samples
    assert read() == ([], 1.25)
    path.unlink()  # a trial whose checkpoints were removed starts over, with rows of its own
    assert read(row(1, 0, 1.0)) == ([], 1.0)
    assert read(row(2, 0, 3.0)) == ([(2, 2.0)], 2.0)


def test_own_weights_count_and_skipped_steps_do_not_as_in_the_means_of_the_terminal(tmp_path: Path) -> None:
    rows = [row(1, 0, 4.0) | {"weight": 3.0}, row(2, 0, None) | {"skipped": 1}, row(3, 0, 2.0) | {"weight": 1.0}]
    write(tmp_path / "rows.jsonl", *rows)
    reader = ObjectiveReader(tmp_path, Objective("loss", every=2))
    assert (reader.poll(), reader.value) == ([(2, 4.0)], 3.5)
    write(tmp_path / "rows.jsonl", row(4, 0, 1.0) | {"weight": None})
    assert reader.poll() == [(4, 1.5)]
    assert str(reader.value) == "nan"


def test_an_epoch_whose_steps_were_all_skipped_has_no_finite_value(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("loss", every=2))
    skipped = [row(k, 1, None) | {"skipped": 1} for k in (3, 4)]
    write(tmp_path / "rows.jsonl", row(1, 0, 4.0), row(2, 0, 2.0), *skipped)
    assert str(reader.poll()) == "[(2, 3.0), (4, nan)]"
    assert str(reader.value) == "nan"  # and not the value of the epoch before


def test_evaluations_are_reported_one_by_one(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("evaluation.accuracy", "maximize", every=50))
    write(tmp_path / "evaluations.jsonl", {"iteration": 3, "accuracy": 0.5}, {"iteration": 7, "accuracy": None})
    assert str(reader.poll()) == "[(3, 0.5), (7, nan)]"
    assert "The results of dl.evaluate have no 'accuracy'" in reader.missing()


def test_an_objective_may_have_the_name_that_tables_show() -> None:
    plan = make_plan(FunctionJob(trivial), {"x": [1]}, {"objective": "eval accuracy"})
    assert plan.objective.name == plan.facts["objective"] == "evaluation.accuracy"


def test_the_reason_of_a_trial_whose_loop_did_not_get_its_run_folder(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("loss"))
    assert (reader.poll(), reader.value) == ([], None)
    assert reader.missing().startswith("Its run folder has no rows. Pass run_dir to the Loop")


def test_an_objective_that_no_row_has_is_said_with_the_names_that_the_rows_have(tmp_path: Path) -> None:
    reader = ObjectiveReader(tmp_path, Objective("f2"))
    write(tmp_path / "rows.jsonl", row(1, 0, 4.0), row(2, 0, 2.0) | {"f1": 0.5}, row(3, 0, 1.0))
    assert (reader.poll(), reader.value) == ([], None)
    assert "have no 'f2' (Did you mean 'f1'?). They have loss, f1. Return the value" in reader.missing()
