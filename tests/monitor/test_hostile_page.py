"""Names and notes of runs and metrics that are markup, very long, or those of every object, all over the page."""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import NEEDS_BROWSER, Visit
from tests.support.harness import until
from tests.support.logged_files import add_image, add_texts, add_usage, write_console
from tests.support.serving import Served, row, served, write_run

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
SIZES = [(1400, 900), (500, 900)]
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>\"'`${1}&lt;"
IMAGE = EVIL.partition("<script")[0]  # without a slash: a chart's title begins after the last one
LONG = "x" * 10_000
METRICS = [
    EVIL,
    IMAGE,
    LONG,
    "__proto__",
    "constructor",
    "toString",
    f"{IMAGE}/{IMAGE}",
    f"{LONG}/loss",
    "../../loss",
    "\u202eetag",
    "..",
]
FOLDERS = ['<img src=x onerror="x">', "__proto__", "constructor", "y" * 255, "\"'`${1}&lt;"]
MOST_FILE = 90  # letters of a file's name


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Served]:
    """Five runs, whose names, notes, metrics, parameters and logged files are hostile."""
    top = tmp_path / "lab"
    for number, name in enumerate(FOLDERS):
        rows = [row(k, **dict.fromkeys(METRICS, k + number)) for k in range(1, 41)]
        config = {EVIL: EVIL, "__proto__": LONG, "rate": number, LONG: 1}
        run = write_run(
            top / name, rows, began=1.0 + number, config=config, status="failed", why=f"{EVIL} {LONG}",
            steps_per_epoch=10, iteration=40,
        )  # fmt: skip
        add_texts(run, (1, EVIL, EVIL), (2, "__proto__", LONG), (3, LONG, LONG))
        add_image(run, 1, EVIL)
        add_image(run, 1, "__proto__")
        write_console(run, f"{EVIL}\n\x1b[31m{LONG}\n")
        add_usage(run, 0, [(5.0, 100.0, 200.0), (10.0, 90.0, 210.0)])
        (run / "tables").mkdir()
        table = {"rows": [EVIL, LONG], "columns": [EVIL, "__proto__"], "values": [[1, 2], [3, 4]], "iteration": 1}
        (run / "tables" / "__proto__.json").write_text(json.dumps(table))
    for place, name, note in ((0, EVIL, LONG), (1, LONG, EVIL), (2, "__proto__", "constructor")):
        (top / FOLDERS[place] / "name.txt").write_text(name)
        (top / FOLDERS[place] / "note.txt").write_text(note)
    with served(top) as page:
        yield page


def is_sound(one: Visit, width: int) -> bool:
    """Whether nothing of a name became markup, ran, or made the page wider than the window."""
    made = "#groups img, #list img, #legend img, #card img, #results img, dialog img, body script, main b.x"
    assert one.page.title() == "5 runs"
    assert one.at(made).count() == 0
    assert one.page.evaluate("({}).polluted === undefined && typeof Object.prototype.toString === 'function'")
    assert one.page.evaluate("document.documentElement.scrollWidth") == width
    return True


def wait_for_lines(drawn: Any, count: int) -> None:
    until(lambda: len(json.loads(drawn.get_attribute("data-last") or "[]")) == count, f"{count} lines are drawn")


def chart(one: Visit, metric: str) -> Any:
    """The chart of a metric, whatever its name."""
    names = one.at(".chart").evaluate_all("all => all.map((one) => one.dataset.metric)")
    return one.at(".chart").nth(names.index(metric))


def come_to(one: Visit, metric: str) -> None:
    chart(one, metric).scroll_into_view_if_needed()
    until(lambda: chart(one, metric).get_attribute("data-last"), f"{metric[:20]} is drawn")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_hostile_names_are_text_in_charts_legend_tip_list_and_card_and_logged_files_in_its_panels(
    visit: Any, page: Served, size: tuple[int, int]
) -> None:
    one = visit(page, size)
    one.has_lines(5)
    titles = one.at(".chart").evaluate_all("all => all.map((one) => one.dataset.metric)")
    assert set(titles) == {"loss", *METRICS}
    longest = one.at(".title, .group > h2").evaluate_all("all => Math.max(...all.map((one) => one.offsetHeight))")
    assert longest < 80  # three lines
    for metric in METRICS:
        come_to(one, metric)
        wait_for_lines(chart(one, metric), 5)
    assert is_sound(one, size[0])

    one.at(".chart[data-metric=loss]").scroll_into_view_if_needed()
    one.point_at("loss")
    until(lambda: one.at(".chart[data-metric=loss] .tip p").count() == 6, "the tip has all runs")
    said = one.texts(".chart[data-metric=loss] .tip .name")
    assert EVIL in said
    tip = one.at(".chart[data-metric=loss] .tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= size[0]
    assert EVIL in one.texts("#legend span")
    assert max(part.bounding_box()["width"] for part in one.at("#legend button").all()) <= 240
    assert is_sound(one, size[0])

    one.unfold()
    listed = one.at(".lines .line")
    assert EVIL in listed.locator(".name").all_text_contents()
    assert EVIL in " ".join(listed.locator(".parameters").all_text_contents())
    assert max(part.bounding_box()["height"] for part in listed.all()) < 120
    for number in range(5):
        if not listed.nth(number).locator(".open").is_visible():
            one.at("#unfold").click()
        listed.nth(number).locator(".open").click()
        name = listed.nth(number).locator(".name").text_content()
        one.waits_for(".run h2 .name", name[:60])
        one.waits_for(".run .why", EVIL)
        assert is_sound(one, size[0])

    one.unfold()
    one.open_card("__proto__")
    for panel, place, said in (
        ("console", ".console-text", EVIL),
        ("usage", ".panel[data-panel=usage]", "rank 0"),
        ("texts", ".texts pre", EVIL),
        ("images", ".logged-image .title", EVIL),
        ("tables", ".matrix th", EVIL[:60]),  # longer labels are cut
    ):
        one.at(f".panel-bar [data-panel={panel}]").click()
        one.waits_for(place, said)
        assert is_sound(one, size[0])
        for image in one.at(".logged-image").all():
            image.scroll_into_view_if_needed()  # images are drawn when they are seen
        until(lambda: not one.at(".logged-image:not([data-drawn])").count(), "all are drawn")


def test_hostile_names_in_files_of_charts_in_dialogs_and_in_the_results(visit: Any, page: Served) -> None:
    one = visit(page, SIZES[0])
    one.has_lines(5)
    files = {}
    for metric in METRICS:
        come_to(one, metric)
        for kind in ("csv", "png"):
            chart(one, metric).hover()
            with one.page.expect_download() as got:
                chart(one, metric).locator(f".{kind}").click()
            files[metric, kind] = (got.value.suggested_filename, Path(got.value.path()).read_bytes())
    assert not one.at("#notice").is_visible()
    for (metric, kind), (name, data) in files.items():
        assert name.endswith(f".{kind}")
        assert len(name) <= MOST_FILE
        assert not set(name) & set("/\\<>\"'|:*?\u202e")
        assert not name.startswith((".", "-"))
        if kind == "csv":
            lines = list(csv.reader(io.StringIO(data.decode())))
            assert lines[0][5] == metric
            assert len(lines) == 1 + 5 * 40
            assert EVIL in {line[0] for line in lines}
        else:
            width, height = struct.unpack(">II", data[16:24])
            assert 100 < width <= SIZES[0][0]
            assert height < SIZES[0][1]
    one.tab("Results")
    until(lambda: one.at(".trials tbody tr").count() == 5, "the table has all runs")
    assert EVIL in " ".join(one.texts(".trials td, .trials th"))
    assert is_sound(one, SIZES[0][0])
    one.tab("Curves")
    act_on = one.at(".line[data-run='__proto__']")
    act_on.hover()
    act_on.locator(".hide").click()
    one.has_lines(4)
    one.page.reload()
    until(lambda: one.at(".chart[data-last]").count() and len(one.last("loss")) == 4, "it stays hidden")
    line = one.at(".lines .line:visible").first
    line.hover()
    line.locator(".edit").click()
    assert one.at("#naming").bounding_box()["width"] <= 640
    one.fill("Name", "=cmd|' /C calc'!A0")
    one.key("Enter")
    one.waits_for(".lines .name", "=cmd|")
    assert is_sound(one, SIZES[0][0])
