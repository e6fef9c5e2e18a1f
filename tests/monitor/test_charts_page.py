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
from tests.support.serving import row, served, write_lines, write_run

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
        folder = write_run(top / f"run-{number}", rows, status="done", steps_per_epoch=steps, iteration=400)
        (folder / "run.json").write_text(json.dumps({"began": 1.0 + number, "config": {"rate": number, "bold": EVIL}}))
    return top


def loss(part: str = "") -> str:
    return f".chart[data-metric=loss] {part}"


GROUNDS = "all => all.map((one) => getComputedStyle(one).backgroundColor)"


# -- axes --------------------------------------------------------------------------------------------------


def test_marks_legend_and_pointer_tell_runs_apart(visit: Any, runs: Path) -> None:
    with served(runs) as page:
        one = visit(page)
        until(lambda: len(one.last("loss")) == 3, "all runs are drawn")
        assert json.loads(one.chart("loss", "marked")) == ["run-0", "run-1", "run-2"]  # each in its colour
        one.page.locator(".line[data-run='run-1'] .open").hover()
        until(lambda: json.loads(one.chart("loss", "marked")) == ["run-1"], "the run that stands out is marked")

        legend = one.page.locator(".legend button")
        assert legend.all_inner_texts() == ["run-0", "run-1", "run-2"]
        assert len(set(one.page.locator(".legend .swatch").evaluate_all(GROUNDS))) == 3
        legend.nth(2).hover()
        until(lambda: one.chart("loss", "standing") == "run-2", "its curve stands out")

        box = one.page.locator(loss(".u-over")).bounding_box()
        one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        rows = one.page.locator(loss(".tip p:not(.head)"))
        until(lambda: rows.count() == 3, "the tip has all runs")
        place = int(one.text(loss(".step")).removeprefix("step "))
        nearest = [min(range(every, 401, every), key=lambda k: abs(k - place)) for every in (1, 3, 7)]
        tips = [[line.locator(part).inner_text() for part in (".name", ".step")] for line in rows.all()]
        assert tips == [[f"run-{n}", f"step {nearest[n]}"] for n in (2, 1, 0)]  # the greatest first
        said = one.page.locator(loss(".values .line")).all()
        assert [part.get_attribute("data-step") for part in said] == [str(step) for step in nearest]
        assert len({part.inner_text().endswith(")") for part in said}) == 2  # only other steps are named
        one.page.mouse.move(5, 5)
        until(lambda: not one.page.locator(loss(".tip")).is_visible(), "the tip is gone")
        for number in range(3, 5):
            rows_of_one_epoch = [row(k, epoch=1) for k in range(1, 401)]
            write_run(runs / f"run-{number}", rows_of_one_epoch, status="done", iteration=400)
        until(lambda: len(one.last("loss")) == 5, "two more are drawn")
        assert json.loads(one.chart("loss", "marked")) == ["run-0"]  # of many the first one's
        legend.nth(2).click()
        one.waits_for(".run h2 .name", "run-2")


def test_the_axis_is_steps_epochs_or_time(visit: Any, runs: Path) -> None:
    def are_drawn(*places: float) -> None:
        until(lambda: [last[0] for last in one.last("loss")] == [*places], "they lie on their places")

    with served(runs) as page:
        one = visit(page)
        are_drawn(400, 399, 399)
        axis, whole = one.page.get_by_label("Axis"), one.page.get_by_role("button", name="Whole run")
        axis.select_option("epoch")
        are_drawn(4, 7.98, 15.96)
        assert one.text(loss(".step")) == "epoch 15.96"
        one.page.locator(loss()).focus()
        one.page.keyboard.press("+")
        assert whole.is_visible()
        axis.select_option("time")
        assert not whole.is_visible()
        are_drawn(40, 79.8, 119.7)
        assert one.text(loss(".step")) == "2:00"
        for key in ("Home", "+", "+", "+", "End", "-", "0"):
            one.page.keyboard.press(key)
            assert "NaN" not in one.page.locator("#groups").inner_text()
        are_drawn(40, 79.8, 119.7)
        box = one.page.locator(loss(".u-over")).bounding_box()
        one.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
        one.page.mouse.down()
        one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50, steps=3)
        one.page.mouse.up()
        until(lambda: 55 < one.last("loss")[2][0] < 70, "a part is shown")


# -- names, notes, hidden runs -----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_nan_in_list_and_table_and_a_mark_at_its_step(visit: Any, tmp_path: Path) -> None:
    for name, end in (("good", 99), ("bad", 30), ("never", 1)):
        rows = [row(k, loss=1 / k if k < end else None) for k in range(1, 41)]
        folder = write_run(tmp_path / "lab" / name, rows, status="done", iteration=40)
        (folder / "run.json").write_text(json.dumps({"began": 1.0, "config": {"name": name}}))
    with served(tmp_path / "lab") as page:
        one = visit(page, WINDOW)
        listed = [one.page.locator(f".line .{part}").all_inner_texts() for part in ("name", "value")]
        assert listed == [["bad", "good", "never"], ["nan", "0.025", "nan"]]
        until(lambda: len(one.last("loss")) == 3, "all are drawn")
        assert sorted(json.loads(one.chart("loss", "ends") or "")) == [["bad", 30], ["never", 1]]
        assert sorted(one.page.locator(loss(".values .line")).all_inner_texts()) == ["0.025", "nan", "nan"]
        with_marks = one.ink("loss")
        for name in ("bad", "never"):
            one.page.get_by_role("checkbox", name=f"Draw {name}").uncheck()
        until(lambda: one.chart("loss", "ends") == "[]", "there is no mark")
        assert one.ink("loss") < with_marks
        one.page.get_by_label("Search runs").fill("loss=nan")
        assert one.page.locator(".lines .line:visible .name").all_inner_texts() == ["bad", "never"]
        one.page.get_by_label("Search runs").fill("")
        one.page.get_by_role("tab", name="Results").click()
        one.page.locator(".trial").first.wait_for()
        cells = [line.locator("td").all_inner_texts() for line in one.page.locator(".trial").all()]
        assert [[line[1], *line[2:4]] for line in cells] == [
            ["bad", f"{1 / 29:.4g}", "nan"],
            ["good", "0.025", "0.025"],
            ["never", "–", "nan"],
        ]


def test_the_use_of_each_rank_is_drawn_in_charts_with_its_unit(visit: Any, runs: Path) -> None:
    for rank in range(5):
        add_usage(runs / "run-0", rank, [(5.0, 100.0, 200.0), (10.0, 90.0 + rank, 2100.0)])
    with served(runs) as page:
        one = visit(page, WINDOW)
        one.page.locator(".line[data-run='run-0'] .open").click()
        one.page.locator("button[data-panel=usage]").click()
        chart = one.page.locator(".chart[data-metric=memory_mib]")
        chart.locator("canvas").wait_for()
        assert chart.locator(".title").inner_text() == "Memory"
        assert chart.locator(".values").inner_text().split("\n") == ["5 ranks", "10 s"]
        assert json.loads(chart.get_attribute("data-last") or "") == [[10, 2100]] * 5
        assert not chart.locator(".csv, .log").filter(visible=True).count()
        chart.focus()
        chart.press("ArrowUp")
        assert chart.locator(".values").inner_text().split("\n") == ["rank 4: 2.051 GiB", "10 s"]
        one.page.locator(".chart[data-metric=processor_percent]").press("ArrowDown")
        one.waits_for(".chart[data-metric=processor_percent] .values", "rank 0: 90 %")


def test_a_run_gets_a_name_and_a_note_and_is_hidden_until_it_is_shown_again(visit: Any, runs: Path) -> None:
    def listed() -> list[str]:
        names: list[str] = one.page.locator(".lines .line:visible .name").all_text_contents()
        return names

    with served(runs) as page:
        one = visit(page)
        until(lambda: len(one.last("loss")) == 3, "all runs are drawn")
        one.page.locator(".line[data-run='run-1']").hover()
        one.page.get_by_role("button", name="Rename run-1", exact=True).click()
        one.page.get_by_label("Name", exact=True).fill(EVIL)
        one.page.get_by_label("Note", exact=True).fill(f"a note {EVIL}")
        one.page.get_by_role("button", name="Save", exact=True).click()
        one.waits_for(".line[data-run='run-1'] .name", EVIL)
        one.waits_for(".line[data-run='run-1'] .parameters", f"a note {EVIL}")
        assert [(runs / "run-1" / f"{what}.txt").read_text() for what in ("name", "note")] == [EVIL, f"a note {EVIL}"]
        one.waits_for(".legend button", EVIL)
        assert not one.page.locator("#groups img, #list img, #legend img, #list b, #legend b").count()
        one.page.locator(".line[data-run='run-1'] .open").click()
        one.waits_for(".run h2 .name", EVIL)
        one.waits_for(".run .note", "a note")
        one.page.locator(".run .edit").click()
        one.page.get_by_label("Name", exact=True).fill("")
        one.page.keyboard.press("Enter")
        one.waits_for(".line[data-run='run-1'] .name", "run-1")
        assert not (runs / "run-1" / "name.txt").exists()
        assert (runs / "run-1" / "note.txt").exists()
        one.page.keyboard.press("Escape")
        for name in ("run-0", "run-2"):
            one.page.locator(f".line[data-run='{name}']").hover()
            one.page.get_by_role("button", name=f"Hide {name}", exact=True).click()
        assert listed() == ["run-1"]
        until(lambda: len(one.last("loss")) == 1, "one run is drawn")
        assert one.text("#count") == "1 runs"
        one.page.reload()
        one.page.wait_for_selector(".chart[data-last]")
        until(lambda: len(one.last("loss")) == 1, "they stay hidden")
        one.page.get_by_role("button", name="Show hidden (2)").click()
        assert listed() == ["run-0", "run-1", "run-2"]
        one.page.locator(".line[data-run='run-0']").hover()
        one.page.get_by_role("button", name="Show run-0", exact=True).click()
        until(lambda: len(one.last("loss")) == 2, "it is drawn again")
        one.page.get_by_role("button", name="Without hidden (1)").click()
        assert listed() == ["run-0", "run-1"]


def test_continue_asks_for_the_secrets_that_no_file_keeps(visit: Any, runs: Path, tmp_path: Path) -> None:
    write_run(runs / "ended", [row(1)], status="stopped", iteration=1)
    (tmp_path / "train.py").write_text(
        "import sys; open('said.part', 'w').write(sys.argv[2]); import os; os.rename('said.part', 'said')"
    )
    write_start(runs / "ended", python_command("train.py", "--api-key", "***"), tmp_path)
    with served(runs) as page:
        one = visit(page)
        one.page.locator(".line[data-run='ended'] .open").click()
        one.page.get_by_role("button", name="Continue ended").click()
        secret = one.page.get_by_label("--api-key, which the run folder does not keep")
        assert secret.get_attribute("type") == "password"
        one.page.get_by_role("button", name="Start it").click()
        assert one.page.locator("#go-on").is_visible()  # it lacks the secret
        secret.fill("not seen")
        one.page.get_by_role("button", name="Start it").click()
        until(lambda: (tmp_path / "said").exists(), "the command has begun")
        assert (tmp_path / "said").read_text() == "not seen"
        assert "not seen" not in one.page.content()
        assert one.page.locator("#go-on-secrets input").count() == 0


# -- files -------------------------------------------------------------------------------------------------


def download(one: Visit, metric: str, kind: str) -> tuple[str, bytes]:
    one.page.locator(f".chart[data-metric='{metric}']").hover()
    with one.page.expect_download() as got:
        one.page.get_by_role("button", name=f"Save {metric} as {kind}", exact=True).click()
    return got.value.suggested_filename, Path(got.value.path()).read_bytes()


def test_a_chart_is_saved_as_csv_with_all_rows_and_as_png(visit: Any, runs: Path) -> None:
    (runs / "run-1" / "name.txt").write_text("=1+1")
    rows = [row(k, **{"a/b": k / 3}) for k in range(1, 5001)]
    write_lines(runs / "run-0" / "rows.jsonl", rows)
    write_lines(runs / "run-1" / "evaluations.jsonl", [{"epoch": 2, "iteration": 100, "elapsed_s": 20.0, "loss": 0.5}])
    with served(runs) as page:
        one = visit(page, WINDOW)
        until(lambda: len(one.last("loss")) == 4, "all runs are drawn")
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
        canvas = one.page.locator(loss("canvas")).evaluate("(one) => [one.width, one.height]")
        assert size[0] == canvas[0]
        assert size[1] > canvas[1] + 20  # the title and the names are above it


# -- failures ----------------------------------------------------------------------------------------------


def test_a_request_for_curves_that_fails_is_not_repeated_at_once(visit: Any, runs: Path) -> None:
    for number in range(3):
        with (runs / f"run-{number}" / "evaluations.jsonl").open("w") as file:
            for name in (f"score_{k:02}" for k in range(60)):
                file.write(json.dumps({"epoch": 1, "iteration": 100, name: 0.5, "elapsed_s": 1.0}) + "\n")
    with served(runs) as page:
        one = visit(page, WINDOW)
        until(lambda: len(one.last("loss")) == 3, "all runs are drawn")
        asked: list[str] = []

        def refuse(route: Any) -> None:
            asked.append(route.request.url)
            route.fulfill(status=500, body="no")

        one.page.route(CURVES, refuse)
        one.page.locator(".chart[data-metric=score_59]").scroll_into_view_if_needed()
        # Routes are called while playwright has something to do.
        until(lambda: one.page.title() and len(asked) >= 3, "the curves of the charts that came near are requested")
        one.page.wait_for_timeout(1500)
        assert len(asked) <= 12  # some positions of the scroll, of three runs each
        one.page.unroute(CURVES, refuse)
        one.complaints.clear()  # the browser's own lines about status 500


# -- many --------------------------------------------------------------------------------------------------


def test_20_runs_of_50_metrics_are_read_listed_renamed_and_saved(visit: Any, tmp_path: Path) -> None:
    top = tmp_path / "many"
    names = [f"metric_{k:02}" for k in range(44)] + ["loss_2", "accuracy", "constructor", "__proto__", "toString"]
    for number in range(20):
        steps = 20_000 if number == 0 else 300
        values = {name: number + at for at, name in enumerate(names)}
        rows = (row(k, **values) for k in range(1, steps + 1))
        folder = write_run(top / f"run {number:02}", rows, status="done", iteration=steps)
        about = {"began": 1.0 + number, "config": {"rate": number / 10, "name": EVIL}}
        (folder / "run.json").write_text(json.dumps(about))
    with served(top) as page:
        one = visit(page, WINDOW)
        chart = one.page.locator(loss()).bounding_box()
        assert chart["y"] + chart["height"] < WINDOW[1]
        one.page.get_by_role("button", name="Show only these").click()
        until(lambda: len(one.last("loss")) == 20, "all are drawn")
        until(lambda: 20_000 in [last[0] for last in one.last("loss")], "the long one is read")
        assert int(one.chart("loss", "points")) <= 19 * 300 + 2500  # no more than the picture has
        looks = one.page.locator(".legend .swatch").evaluate_all(GROUNDS)
        assert (len(looks), len(set(looks))) == (20, 20)
        assert one.page.locator(loss()).bounding_box()["y"] < WINDOW[1] / 2
        order = one.page.locator(".chart").evaluate_all("all => all.map((one) => one.dataset.metric)")
        assert order == ["loss", "loss_2", *sorted(set(names) - {"loss_2"})]
        drawn = one.page.locator(".chart[data-last]").count()
        assert 2 < drawn < 30  # the others when they come near
        asked = one.page.evaluate(
            """() => performance.getEntriesByType("resource")
                .map(({ name }) => new URL(name).searchParams.get("metrics") ?? "[]")"""
        )
        assert not any("toString" in json.loads(one) for one in asked)  # nor are their values sent
        one.page.locator(".chart[data-metric=toString]").scroll_into_view_if_needed()
        until(lambda: len(json.loads(one.chart("toString", "last") or "[]")) == 20, "it is drawn when it is near")
        one.page.locator(loss()).scroll_into_view_if_needed()
        one.page.get_by_label("Search runs").fill("rate<0.25")
        assert one.page.locator(".lines .line:visible .name").all_text_contents() == ["run 00", "run 01", "run 02"]
        one.page.get_by_label("Search runs").fill("")
        one.page.get_by_role("tab", name="Results").click()
        labels = one.page.locator("button").evaluate_all(
            "all => all.map((one) => one.getAttribute('aria-label')).filter((one) => one?.startsWith('Stop '))"
        )
        assert len(labels) == len(set(labels)) >= 20  # each names its run
        one.page.get_by_label("Filter the table").fill("rate>=1.8")
        until(lambda: one.page.locator(".trials tbody tr:visible").count() == 2, "the table is filtered")
        one.page.get_by_role("tab", name="Curves").click()
        name, data = download(one, "loss", "CSV")
        assert (name, len(data.splitlines())) == ("loss.csv", 1 + 20_000 + 19 * 300)
