"""Rows written to other places: CSV, TensorBoard, several receivers at once, and again where a run goes on."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.sinks import RunStart, csv_sink, read_csv, tensorboard_sink
from ddp_loop.sinks.tensorboard import as_markdown
from tests.support.harness import OnRanks
from tests.support.refusals import network
from tests.support.runs import log_everything
from tests.support.training import train as plain_training


def points_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads: by name, step and value, in the order of the steps.

    It takes a folder's files by their names, which end in a counter: of two that were made within a second, the tenth
    comes before the ninth. So nothing is purged for a step that seems to go back.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return {name: sorted((one.step, one.value) for one in events.Scalars(name)) for name in events.Tags()["scalars"]}


def log_all(folder: str, stop_at: int = 0, every_s: float = 0.0) -> list[dict[str, Any]]:
    """Two sinks and a function of one's own; what that was given."""
    rows: list[dict[str, Any]] = []
    sinks = [csv_sink(f"{folder}/new/rows.csv"), tensorboard_sink(f"{folder}/board", every_s), rows.append]
    log_everything(folder, sinks, stop_at)
    return rows


@pytest.mark.covers("E7", "J7")
@pytest.mark.parametrize("stop_at", [3, 5])
def test_rows_evaluations_and_logged_values_reach_csv_and_tensorboard_once_also_when_the_run_goes_on(
    stop_at: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    rows = on_ranks(3, log_all, str(tmp_path), stop_at)[0]
    assert len(rows) == stop_at
    rows += on_ranks(2, log_all, str(tmp_path))[0]
    table = read_csv(tmp_path / "new" / "rows.csv")
    assert [{name: float(value) for name, value in row.items()} for row in table] == rows
    points = points_of(tmp_path / "board")
    of_rows = {"loss", "gradient_norm", "learning_rate", "samples_per_s"}
    assert set(points) == {*of_rows, "second", "score", "evaluation/size", "evaluation/after"}
    for name in of_rows:
        assert [step for step, _ in points[name]] == list(range(1, 10))
        assert [value for _, value in points[name]] == pytest.approx([row[name] for row in rows], rel=1e-6)  # float32
    assert points["second"] == [(n, n / 2) for n in range(1, 10)]
    assert points["score"] == [(3, 1.0), (6, 2.0), (9, 3.0)]
    assert [step for step, _ in points["evaluation/size"]] == [3, 6, 9]
    assert [step for step, _ in points["evaluation/after"]] == [9]
    evaluated = read_csv(tmp_path / "new" / "rows.evaluations.csv")
    assert [(one["iteration"], bool(one["size"]), bool(one["after"])) for one in evaluated] == [
        *(("3", True, False), ("6", True, False), ("9", True, False)),
        ("9", False, True),
    ]
    logged = read_csv(tmp_path / "new" / "rows.logged.csv")
    for name in ("second", "score"):
        assert [(int(one["iteration"]), float(one[name])) for one in logged if one[name]] == points[name]


@pytest.mark.covers("E7")
def test_tensorboard_gets_the_mean_of_rows_that_come_quickly(tmp_path: Path) -> None:
    rows = log_all(str(tmp_path), every_s=1e9)  # more than any machine has been up
    points = points_of(tmp_path / "board")
    (first, one), *others = points["loss"]
    assert first == 1
    assert one == pytest.approx(rows[0]["loss"])
    # A point is written before the checkpoint at each epoch's end, and at the end.
    assert [step for step, _ in others] == [3, 6, 9]
    for (step, value), begins in zip(others, (1, 3, 6), strict=True):
        part = rows[begins:step]
        mean = sum(row["samples"] * row["loss"] for row in part) / sum(row["samples"] for row in part)
        assert value == pytest.approx(mean)
    assert points["learning_rate"][-1][1] == pytest.approx(0.1)


def row(iteration: int, **more: float) -> dict[str, Any]:
    return {"epoch": 1, "iteration": iteration, "samples": 4, "loss": 1 / iteration, **more}


def test_a_value_that_comes_later_gets_a_column_and_what_a_row_lacks_is_empty(tmp_path: Path) -> None:
    sink = csv_sink(tmp_path / "rows.csv")
    sink(row(1, gradient_norm=0.5))
    sink(row(2, gradient_norm=0.25))  # waits to be written
    sink(row(3, accuracy=0.25))
    sink(row(4, gradient_norm=math.nan))
    sink.close()
    assert (tmp_path / "rows.csv").read_text() == (
        "epoch,iteration,samples,loss,gradient_norm,accuracy\n"
        f"1,1,4,1.0,0.5,\n1,2,4,0.5,0.25,\n1,3,4,{1 / 3!r},,0.25\n1,4,4,0.25,nan,\n"
    )
    assert [one.name for one in tmp_path.iterdir()] == ["rows.csv"]


def test_a_run_that_goes_on_takes_out_what_is_made_again_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    sink = csv_sink(path)
    for iteration in range(1, 6):
        sink(row(iteration, elapsed_s=iteration / 4))
    sink.close()
    path.write_text(path.read_text() + "1,6,4,0.1")  # it was killed while it wrote
    assert [int(one["iteration"]) for one in read_csv(path)] == [1, 2, 3, 4, 5]
    lines = [{**row(iteration), "elapsed_s": iteration / 4} for iteration in range(1, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = csv_sink(path)
    again.begin(RunStart(tmp_path, {}, 3, "run"))
    again(row(4))
    again.flush()
    assert [int(one["iteration"]) for one in read_csv(path)] == [1, 2, 3, 4]
    again.close()
    anew = csv_sink(path)
    anew.begin(RunStart(None, {}, 0, "run"))
    anew(row(1))
    anew.close()
    assert [int(one["iteration"]) for one in read_csv(path)] == [1]


def test_files_with_the_rows_of_another_run_are_moved_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("rows.csv", "rows.evaluations.csv", "rows.logged.csv")

    def train(run: str, stop_at: int = 0) -> list[str]:
        log_everything(str(tmp_path / run), csv_sink(tmp_path / "rows.csv"), stop_at)
        return [(tmp_path / name).read_text() for name in names]

    def moved(number: int) -> list[str]:
        return [(tmp_path / f"{name}.{number}").read_text() for name in names]

    first = train("a", stop_at=5)
    assert "of another start" not in capsys.readouterr().out
    second = train("b", stop_at=4)
    assert moved(1) == first
    path = tmp_path / "rows.csv"
    assert f"ddp_loop: {path} had the rows of another start. They are in {path}.1 now." in capsys.readouterr().out
    train("a")
    assert moved(2) == second  # also where it resumes
    assert [int(one["iteration"]) for one in read_csv(path)] == [6, 7, 8, 9]
    train("a")
    assert not list(tmp_path.glob("*.3"))  # its own


def test_a_new_run_replaces_the_values_of_an_earlier_one_whatever_step_it_logs_first(tmp_path: Path) -> None:
    for score, step in ((1.0, 2), (2.0, 4)):
        sink = csv_sink(tmp_path / "rows.csv")
        sink.begin(RunStart(None, {}, 0, "run"))
        sink.logged({"epoch": 1, "iteration": step, "score": score, "elapsed_s": 0.0})
        sink.close()
    assert [(one["iteration"], one["score"]) for one in read_csv(tmp_path / "rows.logged.csv")] == [("4", "2.0")]


def test_values_that_are_not_finite_are_nan_in_files_and_points(tmp_path: Path) -> None:
    for sink in (csv_sink(tmp_path / "rows.csv"), tensorboard_sink(tmp_path / "board")):
        sink.begin(RunStart(None, {}, 0, "run"))
        sink.evaluated({"epoch": 1, "iteration": 2, "score": None, "samples": 3, "elapsed_s": 0.0})
        sink.close()
    assert [one["score"] for one in read_csv(tmp_path / "rows.evaluations.csv")] == ["nan"]
    assert [math.isnan(value) for _, value in points_of(tmp_path / "board")["evaluation/score"]] == [True]


def test_a_sink_opens_nothing_before_its_first_row(tmp_path: Path) -> None:
    for sink in (csv_sink(tmp_path / "rows.csv"), tensorboard_sink(tmp_path / "board")):
        sink.flush()
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "ddp_loop\[tensorboard\]"'):
        tensorboard_sink(tmp_path)


class Clearing:
    """A sink that changes what it gets."""

    def begin(self, run: RunStart) -> None:
        pass

    def __call__(self, row: dict[str, Any]) -> None:
        row.clear()


def test_what_a_receiver_does_to_its_row_the_next_one_does_not_see() -> None:
    seen: list[int] = []
    receivers: list[Any] = [lambda row: row.clear(), Clearing(), lambda row: seen.append(row["iteration"])]
    plain_training(network(), on_row=receivers)
    assert seen == [1, 2, 3, 4]


def test_texts_images_and_tables_reach_tensorboard(on_ranks: OnRanks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_ranks(1, log_all, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "board"), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    texts = {
        name: [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    assert texts["words/a/text_summary"] == [(3 * n, f"epoch {n}") for n in (1, 2, 3)]
    assert texts["counts/text_summary"][2] == (9, "|  | 0 | 1 |\n| --- | --- | --- |\n| a\\|b | 1 | 3 |")
    assert [(one.step, one.width, one.height) for one in events.Images("picture")] == [(n, 5, 4) for n in (3, 6, 9)]


def test_csv_files_that_cannot_be_written_stop_neither_training_nor_other_sinks(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for name in ("rows.csv", "rows.logged.csv", "rows.evaluations.csv"):
        (tmp_path / "new" / name).mkdir(parents=True)
    on_ranks(2, log_all, str(tmp_path))
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 9
    assert [step for step, _ in points_of(tmp_path / "board")["second"]] == list(range(1, 10))


def test_a_label_of_several_lines_is_one_cell() -> None:
    table = {"rows": ["a\nb"], "columns": ["c|d"], "values": [[None]]}
    assert as_markdown(table) == "|  | c\\|d |\n| --- | --- |\n| a b | None |"
