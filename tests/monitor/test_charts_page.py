"""The page in a browser: axes, names, hidden runs, the legend, values at the pointer, and files of a chart."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import NEEDS_BROWSER, Visit
from tests.support.harness import until
from tests.support.logged_files import add_usage, python_command, write_start
from tests.support.serving import logged_line, row, write_lines, write_run

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
WINDOW = (1400, 900)
CURVES = re.compile(r"/curves\?")
EVIL = '<img src=x onerror="alert(1)"></script><b>bold</b>'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs whose epochs have 100, 50 and 25 steps, which write a row every step, every 3rd and every 7th one."""
    top = tmp_path / "lab"
    for number, (steps, every) in enumerate(((100, 1), (50, 3), (25, 7))):
        rows = [
            row(k, loss=number + 1 / k, epoch=(k - 1) // steps + 1, elapsed_s=k * (number + 1) / 10)
            for k in range(every, 401, every)
        ]
        write_run(
            top / f"run-{number}", rows, began=1.0 + number, config={"rate": number, "bold": EVIL}, status="done",
            steps_per_epoch=steps, iteration=400,
        )  # fmt: skip
    return top


def loss(part: str = "") -> str:
    return f".chart[data-metric=loss] {part}"


GROUNDS = "all => all.map((one) => getComputedStyle(one).backgroundColor)"


# -- axes --------------------------------------------------------------------------------------------------


def test_marks_legend_and_pointer_tell_runs_apart(show: Any, runs: Path) -> None:
    one = show(runs)
    one.has_lines(3)
    assert json.loads(one.chart("loss", "marked")) == ["run-0", "run-1", "run-2"]  # each in its colour
    one.at(".line[data-run='run-1'] .open").hover()
    until(lambda: json.loads(one.chart("loss", "marked")) == ["run-1"], "the run that stands out is marked")

    legend = one.at(".legend button")
    assert legend.all_inner_texts() == ["run-0", "run-1", "run-2"]
    assert len(set(one.at(".legend .swatch").evaluate_all(GROUNDS))) == 3
    legend.nth(2).hover()
    until(lambda: one.chart("loss", "standing") == "run-2", "its curve stands out")

    one.point_at("loss")
    rows = one.at(loss(".tip p:not(.head)"))
    until(lambda: rows.count() == 3, "the tip has all runs")
    place = int(one.text(loss(".step")).removeprefix("step "))
    nearest = [min(range(every, 401, every), key=lambda k: abs(k - place)) for every in (1, 3, 7)]
    tips = [[line.locator(part).inner_text() for part in (".name", ".step")] for line in rows.all()]
    assert tips == [[f"run-{n}", f"step {nearest[n]}"] for n in (2, 1, 0)]  # the greatest first
    said = one.at(loss(".values .line")).all()
    assert [part.get_attribute("data-step") for part in said] == [str(step) for step in nearest]
    assert len({part.inner_text().endswith(")") for part in said}) == 2  # only other steps are named
    one.page.mouse.move(5, 5)
    until(lambda: not one.at(loss(".tip")).is_visible(), "the tip is gone")
    for number in range(3, 5):
        rows_of_one_epoch = [row(k, epoch=1) for k in range(1, 401)]
        write_run(runs / f"run-{number}", rows_of_one_epoch, status="done", iteration=400)
    one.has_lines(5)
    assert json.loads(one.chart("loss", "marked")) == ["run-0"]  # of many the first one's
    legend.nth(2).click()
    one.waits_for(".run h2 .name", "run-2")


def test_the_axis_is_steps_epochs_or_time(show: Any, runs: Path) -> None:
    def are_drawn(*places: float) -> None:
        until(lambda: [last[0] for last in one.last("loss")] == [*places], "they lie on their places")

    one = show(runs)
    are_drawn(400, 399, 399)
    axis, whole = one.page.get_by_label("Axis"), one.button("Whole run")
    axis.select_option("epoch")
    are_drawn(4, 7.98, 15.96)
    assert one.text(loss(".step")) == "epoch 15.96"
    one.at(loss()).focus()
    one.key("+")
    assert whole.is_visible()
    axis.select_option("time")
    assert not whole.is_visible()
    are_drawn(40, 79.8, 119.7)
    assert one.text(loss(".step")) == "2:00"
    for key in ("Home", "+", "+", "+", "End", "-", "0"):
        one.key(key)
        assert "NaN" not in one.at("#groups").inner_text()
    are_drawn(40, 79.8, 119.7)
    one.drag_over("loss", 0.25, 0.5)
    until(lambda: 55 < one.last("loss")[2][0] < 70, "a part is shown")


# -- names, notes, hidden runs -----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_nan_in_list_and_table_and_a_mark_at_its_step(show: Any, tmp_path: Path) -> None:
    for name, end in (("good", 99), ("bad", 30), ("never", 1)):
        rows = [row(k, loss=1 / k if k < end else None) for k in range(1, 41)]
        write_run(tmp_path / "lab" / name, rows, config={"name": name}, status="done", iteration=40)
    one = show(tmp_path / "lab", WINDOW)
    listed = [one.at(f".line .{part}").all_inner_texts() for part in ("name", "value")]
    assert listed == [["bad", "good", "never"], ["nan", "0.025", "nan"]]
    one.has_lines(3)
    assert sorted(json.loads(one.chart("loss", "ends") or "")) == [["bad", 30], ["never", 1]]
    assert sorted(one.at(loss(".values .line")).all_inner_texts()) == ["0.025", "nan", "nan"]
    with_marks = one.ink("loss")
    for name in ("bad", "never"):
        one.page.get_by_role("checkbox", name=f"Draw {name}").uncheck()
    until(lambda: one.chart("loss", "ends") == "[]", "there is no mark")
    assert one.ink("loss") < with_marks
    one.fill("Search runs", "loss=nan")
    assert one.at(".lines .line:visible .name").all_inner_texts() == ["bad", "never"]
    one.fill("Search runs", "")
    one.tab("Results")
    one.at(".trial").first.wait_for()
    cells = [line.locator("td").all_inner_texts() for line in one.at(".trial").all()]
    assert [[line[1], *line[2:4]] for line in cells] == [
        ["bad", f"{1 / 29:.4g}", "nan"],
        ["good", "0.025", "0.025"],
        ["never", "–", "nan"],
    ]


def test_the_use_of_each_rank_is_drawn_in_charts_with_its_unit(show: Any, runs: Path) -> None:
    for rank in range(5):
        add_usage(runs / "run-0", rank, [(5.0, 100.0, 200.0), (10.0, 90.0 + rank, 2100.0)])
    one = show(runs, WINDOW)
    one.open_card("run-0")
    one.at("button[data-panel=usage]").click()
    chart = one.at(".chart[data-metric=memory_mib]")
    chart.locator("canvas").wait_for()
    assert chart.locator(".title").inner_text() == "Memory"
    assert chart.locator(".values").inner_text().split("\n") == ["5 ranks", "10 s"]
    assert json.loads(chart.get_attribute("data-last") or "") == [[10, 2100]] * 5
    assert not chart.locator(".csv, .log").filter(visible=True).count()
    chart.focus()
    chart.press("ArrowUp")
    assert chart.locator(".values").inner_text().split("\n") == ["rank 4: 2.051 GiB", "10 s"]
    one.at(".chart[data-metric=processor_percent]").press("ArrowDown")
    one.waits_for(".chart[data-metric=processor_percent] .values", "rank 0: 90 %")


def test_a_run_gets_a_name_and_a_note_and_is_hidden_until_it_is_shown_again(show: Any, runs: Path) -> None:
    one = show(runs)
    one.has_lines(3)
    one.at(".line[data-run='run-1']").hover()
    one.press("Rename run-1")
    one.fill("Name", EVIL)
    one.fill("Note", f"a note {EVIL}")
    one.press("Save")
    one.waits_for(".line[data-run='run-1'] .name", EVIL)
    one.waits_for(".line[data-run='run-1'] .parameters", f"a note {EVIL}")
    assert [(runs / "run-1" / f"{what}.txt").read_text() for what in ("name", "note")] == [EVIL, f"a note {EVIL}"]
    one.waits_for(".legend button", EVIL)
    assert not one.at("#groups img, #list img, #legend img, #list b, #legend b").count()
    one.open_card("run-1")
    one.waits_for(".run h2 .name", EVIL)
    one.waits_for(".run .note", "a note")
    one.at(".run .edit").click()
    one.fill("Name", "")
    one.key("Enter")
    one.waits_for(".line[data-run='run-1'] .name", "run-1")
    assert not (runs / "run-1" / "name.txt").exists()
    assert (runs / "run-1" / "note.txt").exists()
    one.key("Escape")
    for name in ("run-0", "run-2"):
        one.at(f".line[data-run='{name}']").hover()
        one.press(f"Hide {name}")
    assert one.listed() == ["run-1"]
    one.has_lines(1)
    assert one.text("#count") == "1 runs"
    one.page.reload()
    one.page.wait_for_selector(".chart[data-last]")
    one.has_lines(1)
    one.press("Show hidden (2)")
    assert one.listed() == ["run-0", "run-1", "run-2"]
    one.at(".line[data-run='run-0']").hover()
    one.press("Show run-0")
    one.has_lines(2)
    one.press("Without hidden (1)")
    assert one.listed() == ["run-0", "run-1"]


def test_continue_asks_for_the_secrets_that_no_file_keeps(show: Any, runs: Path, tmp_path: Path) -> None:
    write_run(runs / "ended", status="stopped")
    (tmp_path / "train.py").write_text(
        "import sys; open('said.part', 'w').write(sys.argv[2]); import os; os.rename('said.part', 'said')"
    )
    write_start(runs / "ended", python_command("train.py", "--api-key", "***"), tmp_path)
    one = show(runs)
    one.open_card("ended")
    one.press("Continue ended")
    secret = one.page.get_by_label("--api-key, which the run folder does not keep")
    assert secret.get_attribute("type") == "password"
    one.press("Start it")
    assert one.at("#go-on").is_visible()  # it lacks the secret
    secret.fill("not seen")
    one.press("Start it")
    until(lambda: (tmp_path / "said").exists(), "the command has begun")
    assert (tmp_path / "said").read_text() == "not seen"
    assert "not seen" not in one.page.content()
    assert one.at("#go-on-secrets input").count() == 0


# -- files -------------------------------------------------------------------------------------------------


def download(one: Visit, metric: str, kind: str) -> tuple[str, bytes]:
    one.at(f".chart[data-metric='{metric}']").hover()
    with one.page.expect_download() as got:
        one.press(f"Save {metric} as {kind}")
    return got.value.suggested_filename, Path(got.value.path()).read_bytes()


def test_a_chart_is_saved_as_csv_with_all_rows_and_as_png(show: Any, runs: Path) -> None:
    (runs / "run-1" / "name.txt").write_text("=1+1")
    rows = [row(k, **{"a/b": k / 3}) for k in range(1, 5001)]
    write_lines(runs / "run-0" / "rows.jsonl", rows)
    write_lines(runs / "run-1" / "evaluations.jsonl", [logged_line(100, epoch=2, loss=0.5, elapsed_s=20.0)])
    one = show(runs, WINDOW)
    one.has_lines(4)
    name, data = download(one, "loss", "CSV")
    table = list(csv.reader(io.StringIO(data.decode())))
    assert (name, table[0]) == ("loss.csv", ["run", "kind", "step", "epoch", "seconds", "loss"])
    assert [float(line[5]) for line in table if line[0] == "run-0"] == [1 / k for k in range(1, 5001)]
    assert ["'=1+1", "evaluation", "100", "2", "20", "0.5"] in table
    assert len(table) == 1 + 5000 + len(range(3, 401, 3)) + 1 + len(range(7, 401, 7))
    name, data = download(one, "a/b", "CSV")
    assert (name, len(data.splitlines())) == ("a-b.csv", 5001)  # of the run that has it
    name, data = download(one, "loss", "PNG")
    assert (name, data[:8]) == ("loss.png", b"\x89PNG\r\n\x1a\n")
    size = struct.unpack(">II", data[16:24])
    canvas = one.at(loss("canvas")).evaluate("(one) => [one.width, one.height]")
    assert size[0] == canvas[0]
    assert size[1] > canvas[1] + 20  # the title and the names are above it


# -- failures ----------------------------------------------------------------------------------------------


def test_a_request_for_curves_that_fails_is_not_repeated_at_once(show: Any, runs: Path) -> None:
    for number in range(3):
        lines = [logged_line(100, **{f"score_{k:02}": 0.5}) for k in range(60)]
        write_lines(runs / f"run-{number}" / "evaluations.jsonl", lines)
    one = show(runs, WINDOW)
    one.has_lines(3)
    asked: list[str] = []

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=500, body="no")

    one.page.route(CURVES, refuse)
    one.at(".chart[data-metric=score_59]").scroll_into_view_if_needed()
    # Routes are called while playwright has something to do.
    until(lambda: one.page.title() and len(asked) >= 3, "the curves of the charts that came near are requested")
    one.page.wait_for_timeout(1500)
    assert len(asked) <= 12  # some positions of the scroll, of three runs each
    one.page.unroute(CURVES, refuse)
    one.complaints.clear()  # the browser's own lines about status 500


# -- many --------------------------------------------------------------------------------------------------


def test_20_runs_of_50_metrics_are_read_listed_and_drawn_where_they_are_seen(show: Any, tmp_path: Path) -> None:
    top = tmp_path / "many"
    names = [f"metric_{k:02}" for k in range(44)] + ["loss_2", "accuracy", "constructor", "__proto__", "toString"]
    for number in range(20):
        steps = 20_000 if number == 0 else 300
        values = {name: number + at for at, name in enumerate(names)}
        rows = (row(k, **values) for k in range(1, steps + 1))
        write_run(top / f"run {number:02}", rows, config={"name": EVIL}, status="done", iteration=steps)
    one = show(top, WINDOW)
    chart = one.at(loss()).bounding_box()
    assert chart["y"] + chart["height"] < WINDOW[1]
    one.press("Show only these")
    one.has_lines(20)
    until(lambda: 20_000 in [last[0] for last in one.last("loss")], "the long one is read")
    assert int(one.chart("loss", "points")) <= 19 * 300 + 2500  # no more than the picture has
    assert one.at(loss()).bounding_box()["y"] < WINDOW[1] / 2
    order = one.at(".chart").evaluate_all("all => all.map((one) => one.dataset.metric)")
    assert order == ["loss", "loss_2", *sorted(set(names) - {"loss_2"})]
    drawn = one.at(".chart[data-last]").count()
    assert 2 < drawn < 30  # the others when they come near
    asked = one.page.evaluate(
        """() => performance.getEntriesByType("resource")
            .map(({ name }) => new URL(name).searchParams.get("metrics") ?? "[]")"""
    )
    assert not any("toString" in json.loads(one) for one in asked)  # nor are their values sent
    one.at(".chart[data-metric=toString]").scroll_into_view_if_needed()
    until(lambda: len(one.last("toString")) == 20, "it is drawn when it is near")
    one.tab("Results")
    labels = one.at("button").evaluate_all(
        "all => all.map((one) => one.getAttribute('aria-label')).filter((one) => one?.startsWith('Stop '))"
    )
    assert len(labels) == len(set(labels)) >= 20  # each names its run
