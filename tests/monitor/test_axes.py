"""Where the steps of a run lie on an axis of epochs or of seconds, and the curves over these axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ddp_loop.monitor.run_view import RunView
from ddp_loop.monitor.series import AXES, MetricSeries, places_on
from tests.support.serving import logged_line, row, write_lines, write_run


def series_of(*lines: tuple[int, int | None, float | None]) -> MetricSeries:
    """Lines of step, epoch and elapsed seconds."""
    series = MetricSeries()
    for step, epoch, seconds in lines:
        series.extend([{"iteration": step, "epoch": epoch, "elapsed_s": seconds, "loss": 1.0}])
    return series


def test_the_last_step_of_an_epoch_lies_at_its_end_and_the_others_evenly_before_it() -> None:
    rows = series_of(*[(k, (k - 1) // 4 + 1, k / 10) for k in range(1, 11)])
    epochs = places_on("epoch", rows, rows, None).tolist()
    assert epochs == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5]  # the third is as long as the second
    assert places_on("epoch", rows, rows, 8)[-1] == 2.25  # but for what the run says
    assert places_on("time", rows, rows, None).tolist() == [k / 10 for k in range(1, 11)]
    assert places_on("step", rows, rows, None).tolist() == list(range(1, 11))
    seldom = series_of(*[(k, (k - 1) // 50 + 1, k / 10) for k in range(3, 401, 3)])
    assert places_on("epoch", seldom, seldom, 50).tolist() == [round(k / 50, 5) for k in range(3, 401, 3)]
    found = places_on("epoch", seldom, seldom, 70).tolist()  # which is not so
    assert (found[:16:15], found[-1]) == ([3 / 48, 1], 7 + round(51 / 70, 5))
    early = series_of(*[(k, 1 if k < 50 else 2, 0.0) for k in range(1, 53)])
    assert places_on("epoch", early, early, 50)[48] == 1  # step 50 of the next epoch does not end the one before


def test_evaluations_and_logged_values_lie_on_the_epochs_of_the_rows() -> None:
    rows = series_of(*[(k, (k - 1) // 100 + 1, k / 10) for k in range(1, 301)])
    logged = series_of((0, 0, 0.0), (50, 1, 5.0), (200, 7, 99.0))
    assert places_on("epoch", logged, rows, 100).tolist() == [0, 0.5, 2]
    assert places_on("time", logged, rows, 100).tolist() == [0, 5, 99]


def test_lines_without_epochs_or_times_have_places_too() -> None:
    for lines, epochs, seconds in (
        ((), [], []),
        (((5, 1, 2.0),), [1], [2]),
        (((1, None, None), (2, None, None)), [0.5, 1], [0, 0]),
        (((1, 1, 1.0), (2, 1, None), (3, 1, 3.0)), [1 / 3, 2 / 3, 1], [1, 2, 3]),
        (((1, 1, -5.0), (2, 1, 3.0), (3, 1, 1e300)), [1 / 3, 2 / 3, 1], [0, 3, 1e9]),
        (((1, 1, 5.0), (2, 2, 1.0), (3, 1, 7.0)), None, [5, 5, 7]),  # damaged: they never fall
    ):
        rows = series_of(*lines)
        found = places_on("epoch", rows, rows, None)
        assert (np.diff(found) >= 0).all()
        if epochs is not None:
            np.testing.assert_allclose(found, epochs, atol=1e-5)
        assert places_on("time", rows, rows, None).tolist() == seconds
    timeless = MetricSeries()
    timeless.extend([{"iteration": 3, "loss": 1.0}])
    assert places_on("time", timeless, timeless, None).tolist() == [0]


def view_of(folder: Path, rows: list[dict[str, Any]], **status: Any) -> RunView:
    """A run with an evaluation and a logged value."""
    run = write_run(folder, rows, **status)
    write_lines(run / "evaluations.jsonl", [logged_line(200, loss=0.5, elapsed_s=2.5)])
    write_lines(run / "logged.jsonl", [logged_line(50, f1=0.25)])
    return RunView("one", run)


def test_curves_over_epochs_and_time_keep_their_steps(tmp_path: Path) -> None:
    rows = [row(k) for k in range(1, 401)]
    view = view_of(tmp_path / "one", rows, status="done", steps_per_epoch=100, epochs=4)
    by_epoch, by_time, by_step = (
        view.curves(points=500, smoothing=0, first=0, last=10**9, axis=axis) for axis in ("epoch", "time", "step")
    )
    assert (by_epoch["axis"], by_epoch["x"][49], by_epoch["x"][-1]) == ("epoch", 0.5, 4)
    assert by_epoch["steps"] == by_time["steps"] == by_step["steps"] == by_step["x"] == list(range(1, 401))
    assert by_epoch["evaluated_x"] == [2]
    assert (by_epoch["logged"], by_time["logged"]) == ({"f1": [[0.5], [0.25], [50]]}, {"f1": [[0.5], [0.25], [50]]})
    assert by_epoch["epochs"] == [[1, 1], [2, 2], [3, 3]]
    assert (by_time["x"][0], by_time["x"][-1], by_time["evaluated_x"]) == (0.01, 4, [2.5])
    assert by_time["epochs"] == [[1, 1], [2, 2], [3, 3]]  # 100 steps take a second
    assert by_step["epochs"] == [[1, 100], [2, 200], [3, 300]]
    assert by_step["evaluated_steps"] == by_epoch["evaluated_steps"] == [200]


def test_a_part_of_any_axis_is_what_was_asked_for_and_a_row_on_either_side(client: httpx.Client, run: Path) -> None:
    (run / "status.json").unlink()
    write_lines(run / "rows.jsonl", [row(k) for k in range(1, 401)])
    parts = {"step": (100, 110), "epoch": (1000, 1100), "time": (1000, 1100)}  # in thousandths
    assert parts.keys() == set(AXES)
    for axis, (first, last) in parts.items():
        asked: dict[str, str | int] = {"axis": axis, "first": first, "last": last}
        curves = client.get("/api/runs/one/curves", params=asked).json()
        assert curves["steps"] == list(range(99, 112)), axis
        assert curves["curves"]["loss"][0] == 1 / 99


# -- all values --------------------------------------------------------------------------------------------


def test_all_values_of_a_metric_come_whole(tmp_path: Path) -> None:
    rows = [row(k, __proto__=k / 4) for k in range(1, 8001)]
    rows[10]["loss"] = None
    view = view_of(tmp_path / "one", rows)
    found = view.values("loss")
    assert found is not None
    loss = found["found"]
    assert loss["row"]["steps"] == list(range(1, 8001))
    assert (loss["row"]["values"][:2], loss["row"]["values"][10]) == ([1, 0.5], None)
    assert (loss["row"]["epochs"][-1], loss["row"]["seconds"][-1]) == (80, 80)
    assert loss["evaluation"] == {"steps": [200], "epochs": [2], "seconds": [2.5], "values": [0.5]}
    assert (view.values("f1") or {})["found"] == {
        "logged": {"steps": [50], "epochs": [1], "seconds": [0.5], "values": [0.25]}
    }
    assert (view.values("__proto__") or {})["found"]["row"]["values"][-1] == 2000
    for unknown in ("", "constructor", "iteration", "elapsed_s", "../one"):
        assert view.values(unknown) is None
