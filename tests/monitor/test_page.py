"""The page in a headless browser, on real runs and their folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browsing import NEEDS_BROWSER, PHONE, WIDE, Visit
from tests.support.harness import until
from tests.support.logged_files import append_lines
from tests.support.serving import logged_line, row, served, write_lines, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
LOSS = ".chart[data-metric=loss]"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(
        tmp_path / "digits",
        [row(k, accuracy=1 - 1 / k, learning_rate=0.1) for k in range(1, 401)],
        status="done", iteration=400, checkpoint="step-00000400", epochs=4, steps_per_epoch=100,
    )  # fmt: skip
    write_lines(
        run / "evaluations.jsonl",
        [logged_line(100 * k, accuracy=(90 + k) / 100, loss=0.5 / k) for k in range(1, 5)],
    )
    write_lines(
        run / "ranks.jsonl",
        [{"iteration": 400, "ranks": [{"rank": k, "step_s": 0.01, "wait_s": 0.001 * k} for k in range(2)]}],
    )
    return run


def test_a_second_passs_loss_is_among_losses_and_its_weight_is_no_metric(show: Any, tmp_path: Path) -> None:
    lines = [row(k, weight=6.0, loss_2_weight=3.0, loss_2=0.5, accuracy=0.5) for k in range(1, 4)]
    one = show(write_run(tmp_path / "two", lines, status="done", iteration=3))
    assert one.last("loss_2") == [[3, 0.5]]
    charts = {
        group.locator("h2").inner_text(): [
            chart.get_attribute("data-metric") for chart in group.locator("[data-metric]").all()
        ]
        for group in one.at(".group").all()
    }
    assert charts == {"Loss": ["loss", "loss_2"], "Metrics": ["accuracy"], "Steps": ["loss_2_weight", "weight"]}


@pytest.mark.covers("J7")
def test_the_curves_end_with_the_last_row_evaluation_and_logged_value_and_keys_move_over_them(
    show: Any, run: Path
) -> None:
    lines = [logged_line(k, constructor=k / 4, loss=3.0) for k in (100, 300)]
    write_lines(run / "logged.jsonl", [*lines, logged_line(400, a=2.5)])
    one = show(run)
    assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4], [300, 3.0]]
    assert one.last("accuracy") == [[400, 1 - 1 / 400], [400, 0.94]]
    assert (one.last("learning_rate"), one.last("a")) == ([[400, 0.1]], [[400, 2.5]])
    assert one.last("constructor") == [[300, 75.0]]
    assert one.at(".group > h2").all_inner_texts() == ["Loss", "Metrics", "Optimizer"]
    assert (one.text(".says"), one.text(".percent")) == ("done at step 400, checkpoint saved", "100 %")
    facts = one.facts()
    assert [facts[name] for name in ("Epoch", "Ranks", "Device", "Elapsed")] == ["4 of 4", "2", "cpu", "0:04"]
    assert one.at(".ranks li").count() == 2

    reached = []
    for _ in range(12):
        one.key("Tab")
        reached.append(
            one.page.evaluate(
                "((one) => one.id || one.name || one.dataset.metric || one.className)(document.activeElement)"
            )
        )
    charts = [name for metric in ("loss", "a") for name in (metric, "csv", "png", "log")]
    assert reached == ["edit", "smoothing", "axis", "scale", "marks", *charts[:7]]
    whole = one.button("Whole run")
    one.at(LOSS).focus()
    one.key("Home")
    assert (one.text(f"{LOSS} .step"), one.text(f"{LOSS} .line")) == ("step 1", "1")
    one.key("End")
    one.key("+")
    assert whole.is_visible()
    one.key("0")
    assert not whole.is_visible()
    assert "loss" in one.at(LOSS).get_attribute("aria-label")
    one.at("[data-metric=constructor]").focus()
    for key in ("Home", "+", "+", "End", "-", "ArrowLeft", "0"):
        one.key(key)
        assert "NaN" not in one.at("#groups").inner_text()
    append_lines(run / "rows.jsonl", [row(401, accuracy=0.25, learning_rate=0.1)])
    until(lambda: one.last("accuracy")[0] == [401, 0.25], "the new row is drawn")
    assert one.last("loss")[0] == [401, 1 / 401]


def test_scale_smoothing_epoch_marks_zoom_and_what_is_left_of_a_removed_folder(show: Any, run: Path) -> None:
    with (run / "rows.jsonl").open("a") as file:
        file.write('no row\n{"iteration": 401, "lo')
    one = show(run)
    problems = one.at(".problems li").all_inner_texts()
    assert [problem.split(":")[1].split(",")[0] for problem in problems] == [
        " 1 line cannot be read",
        " the last line is half-written and left out (22 bytes)",
    ]
    assert one.chart("loss", "scale") == "linear"
    one.page.get_by_label("log", exact=True).check()
    assert one.chart("loss", "scale") == "log"
    assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4]]
    one.page.get_by_label("Smoothing").select_option("30")
    one.has_lines(3)
    raw, smooth, _ = one.last("loss")
    assert (raw, smooth[0]) == ([400, 1 / 400], 400)
    assert 1 / 400 < smooth[1] < 1 / 300  # the mean of the values before
    marked = one.ink("loss")
    one.page.get_by_label("Epochs").uncheck()
    assert 1000 < one.ink("loss") < marked
    one.drag_over("loss", 0.5, 0.75)
    until(lambda: int(one.chart("loss", "points")) < 120, "a part is shown")
    assert 295 <= one.last("loss")[0][0] <= 305
    assert 95 <= int(one.chart("loss", "points") or 0) <= 110  # the other pictures zoom as far, and once
    one.press("Whole run")
    until(lambda: one.last("loss")[0][0] == 400, "all is shown")
    shutil.rmtree(run)
    one.waits_for(".says", "this run folder was removed")
    assert one.last("loss")[0] == [400, 1 / 400]


@pytest.mark.covers("J11")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways_and_a_profile_when_it_comes(
    show: Any, run: Path, scheme: str
) -> None:
    times = {"step_s": 0.03, "phases": {"data": 0.02, "forward": 0.01}}
    profile = {
        "heading": "20 steps after 5 of warm-up, 2 ranks on cpu",
        "phases": ["data", "forward"],
        "ranks": [{"rank": rank, **times} for rank in range(2)],
        "hints": ["67 % of the step waits for <b>data</b>."],
    }
    one = show(run, PHONE, scheme)
    assert not one.at(".profile").is_visible()
    (run / "profile").mkdir()
    (run / "profile" / "profile.json").write_text(json.dumps(profile))
    one.waits_for(".profile h3", f"Milliseconds per step: {profile['heading']}")
    rows = [line.locator("th, td").all_inner_texts() for line in one.at(".profile tr").all()]
    assert rows == [
        ["rank", "step", "data", "forward"],
        ["0", "30.00", "20.00", "10.00"],
        ["1", "30.00", "20.00", "10.00"],
        ["share", "", "67 %", "33 %"],
    ]
    assert one.at(".profile li").all_inner_texts() == profile["hints"]
    widths = one.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths == [375, 375]
    too_wide = one.page.evaluate(
        "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 376 "
        "&& !one.closest('.plot, .group > h2')).map((one) => one.className)"
    )
    assert too_wide == []
    assert one.at(".chart canvas").first.bounding_box()["width"] > 300
    ground = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 246, 248)", "dark": "rgb(17, 21, 26)"}[scheme]


# -- the link ----------------------------------------------------------------------------------------------


def test_without_its_token_the_page_asks_for_it(browser: Browser, run: Path) -> None:
    with served(run) as page:
        one = Visit(browser, WIDE, "light")
        for address, notice in (("", "needs the whole link"), ("/#token=wrong", "The token is wrong")):
            one.page.goto(page.base + address)
            one.waits_for("#notice", notice)
            assert not one.visible(".run, .line")
        one.context.close()
        assert one.outward == []


def test_a_reload_keeps_the_token_and_a_monitor_that_comes_back_is_found(browser: Browser, run: Path) -> None:
    with served(run) as page:
        one = Visit(browser, WIDE, "light").open(page)
        assert "token" not in one.page.url
        one.page.reload()
        one.page.wait_for_selector(".chart[data-last]")
        assert one.last("loss")[0] == [400, 1 / 400]
        port = page.port
    one.waits_for("#link", "connection lost")
    append_lines(run / "rows.jsonl", [row(401, accuracy=0.25, learning_rate=0.1)])
    with served(run, port=port):
        one.waits_for("#link[data-link=live]", "live")
        until(lambda: one.last("loss")[0] == [401, 1 / 401], "the curve goes on")
        one.context.close()
    assert one.outward == []
