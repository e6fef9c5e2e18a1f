"""The curves of a run: drawn when it ends, and by `python -m ddp_loop plot`; its rows as CSV."""

from __future__ import annotations

import csv
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import legend
from matplotlib.colors import to_hex
from PIL import Image
from torch import nn

import ddp_loop as dl
from ddp_loop import plots
from ddp_loop.cli import main
from ddp_loop.plots import Panel
from ddp_loop.reporting import PictureStyle, export, exports
from ddp_loop.reporting.reporter import results_in
from tests.support.harness import OnRanks
from tests.support.runs import lines_of, status_of
from tests.support.serving import row, write_lines, write_run

FILES = ["loss.png", "loss.svg", "metrics.png", "metrics.svg"]


def train(run: str, progress: bool, leaves: bool = False) -> None:
    with dl.join_world(seed=0) as world:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(dl.Batches(data, 4, world), 3, state=state, run_dir=run, progress=progress)
        epochs = loop.epochs()  # which goes on until the world is left
        for epoch in epochs:
            for step in epoch:
                for inputs in step:
                    loss = model(inputs).square()
                    step.backward(loss.mean(), large=loss.squeeze(1) > 1)
                step.fold()
                optimizer.step()
            if leaves:
                return
            dl.evaluate(model, dl.Batches(data, 10, world, shuffle=False), large=lambda out, rows: out.squeeze(1) > 1)
        dl.evaluate(model, dl.Batches(data, 10, world, shuffle=False), distance=lambda out, rows: out.squeeze(1))


def ink(path: Path) -> Any:
    """Where a PNG is neither white nor grey."""
    with Image.open(path) as image:
        colours = np.asarray(image.convert("RGB"), dtype=np.int64)
    return colours.max(2) - colours.min(2) > 50


@pytest.mark.covers("E7")
@pytest.mark.slow
def test_a_run_is_drawn_when_it_ends_and_its_rows_are_a_table(on_ranks: OnRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    on_ranks(2, train, str(run), True)
    assert sorted(one.name for one in (run / "pictures").iterdir()) == FILES
    rows = lines_of(run / "rows.jsonl")
    with (run / "rows.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in table] == rows
    assert len(rows) == 30
    for name in ("loss.svg", "metrics.svg"):
        assert (run / "pictures" / name).read_text().lstrip().startswith("<?xml")
    assert ink(run / "pictures" / "loss.png").sum() > 1000
    assert "distance" in (run / "pictures" / "metrics.svg").read_text()  # of an evaluation after the loop


@pytest.mark.slow
def test_a_run_that_goes_on_until_the_world_is_left_is_drawn_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, train, str(tmp_path), True, True)
    assert (tmp_path / "pictures" / "loss.png").exists()


@pytest.mark.slow
def test_a_run_without_progress_or_of_many_rows_is_not_drawn_until_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet, long = tmp_path / "quiet", tmp_path / "long"
    train(str(quiet), False)
    monkeypatch.setattr(exports, "_SMALL_MIB", 1e-3)
    train(str(long), True)
    capsys.readouterr()
    for run in (quiet, long):
        assert not (run / "pictures").exists()
        assert main(["plot", str(run)]) == 0
        files = [run / "pictures" / name for name in FILES] + [run / "rows.csv"]
        assert capsys.readouterr().out.splitlines() == [str(one) for one in files]
        assert all(one.stat().st_size > 0 for one in files)


@pytest.mark.parametrize(("lines", "among"), [(None, 0), ("", 1), ('{"iteration": 1, "lo', 0)])
def test_what_has_no_rows_is_refused_and_nothing_is_drawn(
    lines: str | None, among: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [str(write_run(tmp_path / "other", [row(1)]))] * among
    run = tmp_path / "run"
    run.mkdir()
    if lines is not None:
        (run / "rows.jsonl").write_text(lines)
    assert main(["plot", *others, str(run), "-o", str(tmp_path / "out")]) == 2
    assert f"{run} has no rows.jsonl with rows to draw. Pass the folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_panels_are_loss_metrics_norm_and_rates_that_change_with_the_evaluations(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": 1, "iteration": 1, "samples": 4, "weight": 2.0, "loss": None, "a": 0.5, "gradient_norm": 2.0,
         "learning_rate": 0.1, "learning_rate_1": 0.5, "skipped": 1.0, "elapsed_s": 1.0},
        {"epoch": 1, "iteration": 2, "samples": 4, "weight": 2.0, "loss": 0.5, "a": 0.75, "learning_rate": 0.2,
         "learning_rate_1": 0.5},
    ]  # fmt: skip
    write_lines(tmp_path / "evaluations.jsonl", [{"epoch": 1, "iteration": 2, "b": 0.25, "a": 0.5, "samples": 9}])
    panels = exports._panels(tmp_path, rows)
    assert list(panels) == ["loss", "a", "b", "gradient_norm", "learning_rate"]
    assert np.isnan(panels["loss"].values[0])
    assert panels["a"] == Panel([1.0, 2.0], [0.5, 0.75], [2.0], [0.5])
    assert panels["b"] == Panel([], [], [2.0], [0.25])
    assert panels["gradient_norm"].iterations == [1.0]


def test_rows_without_a_number_leave_no_gap_in_a_thinned_curve() -> None:
    values = np.arange(6000.0)
    values[::15] = math.nan  # one of the twenty neighbors of each point, or two
    values[:20] = math.nan
    _, means, least, most = plots._thinned(np.arange(6000.0), values)
    assert np.isnan([means[0], least[0], most[0]]).all()
    assert (means[1], least[1], most[1]) == ((sum(range(20, 40)) - 30) / 19, 20, 39)
    assert np.isfinite([means[1:], least[1:], most[1:]]).all()


def test_of_many_values_the_first_are_drawn_and_the_title_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_MOST_PANELS", 3)
    run = write_run(tmp_path / "run", [row(1) | {f"metric_{k}": 1.0 for k in range(5)}])
    export(run)
    text = (run / "pictures" / "metrics.svg").read_text()
    total = len(exports._panels(run, lines_of(run / "rows.jsonl")))
    assert [name in text for name in ("metric 0", "metric 4", f"run (the first 3 of {total} values)")] == [
        True,
        False,
        True,
    ]


def test_many_evaluations_are_thinned_too(tmp_path: Path) -> None:
    at = [float(k) for k in range(30_000)]
    few = plots.curves({"loss": Panel([], [], at[:300], at[:300])}, tmp_path / "few.svg")
    many = plots.curves({"loss": Panel([], [], at, at)}, tmp_path / "many.svg")
    assert many.stat().st_size < 2 * few.stat().st_size


def test_a_long_run_is_thinned_to_means_in_their_band(tmp_path: Path) -> None:
    at = np.arange(1.0, 100_001.0)
    where, means, least, most = plots._thinned(at, np.sin(at))
    assert len(where) <= plots._POINTS
    assert (least <= means).all()
    assert (means <= most).all()
    assert (least.min(), most.max()) == (np.sin(at).min(), np.sin(at).max())
    assert where[0] == at[:334].mean()


def test_the_same_rows_give_the_same_svg(tmp_path: Path) -> None:
    panels = {"loss": Panel([1, 2, 3], [3.0, float("nan"), 1.0])}
    one, other = (plots.curves(panels, tmp_path / f"{name}.svg").read_text() for name in "ab")
    assert "date" not in one
    assert len(one) == len(other)


def test_a_picture_that_fails_is_said_and_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **keywords: object) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(plots, "curves", fail)
    train(str(tmp_path / "scripts" / ".."), True)
    assert f"{tmp_path} was not drawn. OSError('the disk is full')" in capsys.readouterr().out
    assert status_of(tmp_path)["status"] == "done"


def drawn_run(folder: Path, rows: int, *logged: dict[str, Any]) -> Path:
    """A run folder with rows, two evaluations, and what was logged."""
    run = write_run(folder, [row(n, constructor=0.5 + n / 1000) for n in range(1, rows + 1)])
    write_lines(run / "evaluations.jsonl", [row(n, loss=2 / n) for n in (10, 20)])
    write_lines(run / "logged.jsonl", logged)
    return run


LINE = {"epoch": 1, "iteration": 4, "f1": 0.5, "loss": 3.0, "elapsed_s": 0.1}


def texts_of(picture: Path) -> str:
    """The texts of an SVG, which matplotlib writes as comments beside their outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))


@pytest.mark.covers("E6")
def test_several_runs_are_drawn_over_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine so slow that matplotlib would warn."""
    monkeypatch.setattr(legend, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 2.0).__next__))
    runs = [drawn_run(tmp_path / name / "run", 30) for name in ("a$x$", "b")]
    command = ["plot", *map(str, runs), "-o", str(tmp_path / "out"), "--title", "Two $runs$", "--smooth", "5", "--log"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "out" / f"{name}.{kind}") for name in ("loss", "metrics") for kind in ("png", "svg")
    ]
    said = texts_of(tmp_path / "out" / "loss.svg")
    assert "Two" in said
    assert "b/run, evaluated" in said
    assert not list(tmp_path.rglob("rows.csv"))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, which are not written."""
    found: list[Any] = []

    def keep(figure: Any, path: Path) -> Path:
        found.append(figure)
        return Path(path)

    monkeypatch.setattr(plots, "_write", keep)
    return found


def lines_in(axes: Any) -> dict[str, tuple[str, list[float]]]:
    """The color and the values of each line of a panel that has a name."""
    named = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    return {name: (to_hex(line.get_color()), line.get_ydata().tolist()) for name, line in named.items()}


BLUE, ORANGE = "#1f77b4", "#ff7f0e"


def test_a_run_has_one_color_in_all_panels_and_its_evaluations_too(figures: list[Any]) -> None:
    one, two = Panel([1, 2], [1.0, 2.0], [2], [3.0]), Panel([1, 2], [4.0, 5.0], [2], [6.0])
    plots.curves({"loss": {"a": one, "b": two}, "f1": {"b": two}}, "x.png")
    loss, f1 = figures[0].axes
    assert lines_in(loss) == {
        "a": (BLUE, [1, 2]), "a, evaluated": (BLUE, [3]), "b": (ORANGE, [4, 5]), "b, evaluated": (ORANGE, [6]),
    }  # fmt: skip
    assert lines_in(f1) == {"b": (ORANGE, [4, 5]), "b, evaluated": (ORANGE, [6])}
    plots.curves({"loss": one}, "x.png")
    assert lines_in(figures[1].axes[0]) == {"training": (BLUE, [1, 2]), "evaluated": (ORANGE, [3])}


def test_smoothing_in_a_picture_is_over_steps_and_the_rows_stay_pale(figures: list[Any]) -> None:
    at, values = [1, 2, 12, 13], [1.0, math.nan, 5.0, 7.0]
    plots.curves({"loss": Panel(at, values)}, "x.png", smoothing=4)
    (axes,) = figures[0].axes
    pale, curve = axes.get_lines()
    assert pale.get_alpha() == 0.3
    kept = 0.75 ** np.array([[0, np.inf, np.inf], [11, 0, np.inf], [12, 1, 0]])
    expected = (kept * np.array([1.0, 5, 7])).sum(1) / kept.sum(1)
    assert curve.get_xdata().tolist() == [1, 12, 13]
    np.testing.assert_allclose(curve.get_ydata(), expected)


def test_the_scale_is_the_one_that_is_asked_for(figures: list[Any]) -> None:
    for log in (None, False, True):
        plots.curves({"loss": Panel([1, 2], [1.0, 1000.0])}, "x.png", log=log)
    plots.curves({"loss": Panel([1, 2, 3], [-1.0, 0.0, 1000.0])}, "x.png")  # what is below 0 has no place on that axis
    assert [figure.axes[0].get_yscale() for figure in figures] == ["log", "linear", "log", "linear"]


def test_names_are_no_formulas_and_a_long_one_is_cut(figures: list[Any]) -> None:
    plots.curves({"a$x$": Panel([1], [1.0]), "b" * 100: Panel([1], [1.0])}, "x.png", title="$y$")
    assert figures[0].get_suptitle() == r"\$y\$"
    assert [axes.get_ylabel() for axes in figures[0].axes] == [r"a\$x\$", "b" * 59 + "\N{HORIZONTAL ELLIPSIS}"]


def test_runs_that_lack_a_value_or_are_given_twice_are_compared(figures: list[Any], tmp_path: Path) -> None:
    one, two = drawn_run(tmp_path / "one", 6, LINE), drawn_run(tmp_path / "two", 6)
    exports.compare([one, two, one], tmp_path / "out", PictureStyle(smoothing=3, log=True))
    drawn = {axes.get_ylabel(): axes for figure in figures for axes in figure.axes}
    assert lines_in(drawn["f1"]) == {"one": (BLUE, [0.5])}
    assert set(lines_in(drawn["loss"])) == {"one", "one, evaluated", "two", "two, evaluated"}
    assert lines_in(drawn["loss"])["one, evaluated"][1] == [3]  # what was logged
    assert drawn["loss"].get_yscale() == "log"
    assert len(drawn["loss"].get_lines()) == 6  # pale ones too


def test_of_two_rows_of_a_step_the_later_one_is_drawn(tmp_path: Path, figures: list[Any]) -> None:
    run = drawn_run(tmp_path / "run", 3)
    rows = (run / "rows.jsonl").read_text()
    (run / "rows.jsonl").write_text(rows + rows.splitlines()[1].replace('"loss": 0.5,', '"loss": 9.0,') + "\n")
    export(run)
    (loss,) = figures[0].axes
    assert lines_in(loss)["training"][1] == [1, 9, 1 / 3]


def test_twenty_runs_have_colors_of_their_own() -> None:
    assert len(set(plots._run_colors([str(n) for n in range(20)]).values())) == 20


def test_a_single_row_and_values_that_are_not_finite_can_be_drawn_and_no_negative_smoothing(tmp_path: Path) -> None:
    panels = {"x" * 200: Panel([1], [math.nan]), "y": Panel([1], [2.0]), "z": Panel([], [], [3], [math.inf])}
    assert plots.curves(panels, tmp_path / "one.png", smoothing=3, log=True).exists()
    with pytest.raises(ValueError, match=r"a number of steps, 0 or more\. Got -1"):
        plots.curves(panels, tmp_path / "one.png", smoothing=-1)
    with pytest.raises(ValueError, match="There are no curves to draw"):
        plots.curves({}, tmp_path / "none.png")


def test_what_a_run_leaves_is_named(tmp_path: Path) -> None:
    run = drawn_run(tmp_path / "run", 3, LINE)
    assert results_in(run) == []
    export(run, PictureStyle(title="My own"))
    assert results_in(run) == ["curves in pictures/", "rows in rows.csv"]
    assert {"f1", "My own"} <= set(texts_of(run / "pictures" / "metrics.svg").splitlines())
