"""The page in a headless browser, on real runs and their folders."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.browsing import NEEDS_BROWSER, PHONE, WIDE, Visit
from tests.support.harness import OnRanks, until
from tests.support.serving import row, served, write_lines, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = NEEDS_BROWSER
LAST_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(
        tmp_path / "digits",
        [row(k, accuracy=1 - 1 / k, learning_rate=0.1) for k in range(1, 401)],
        status="done", iteration=400, checkpoint="step-00000400", epochs=4, steps_per_epoch=100,
    )  # fmt: skip
    write_lines(
        run / "evaluations.jsonl",
        [{"epoch": k, "iteration": 100 * k, "accuracy": (90 + k) / 100, "loss": 0.5 / k} for k in range(1, 5)],
    )
    write_lines(
        run / "ranks.jsonl",
        [{"iteration": 400, "ranks": [{"rank": k, "step_s": 0.01, "wait_s": 0.001 * k} for k in range(2)]}],
    )
    return run


# -- curves ------------------------------------------------------------------------------------------------


@pytest.mark.covers("E4")
def test_the_curves_end_with_the_last_row_and_the_last_evaluation(visit: Any, run: Path) -> None:
    with served(run) as page:
        one = visit(page)
        assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4]]
        assert one.last("accuracy") == [[400, 1 - 1 / 400], [400, 0.94]]
        assert one.last("learning_rate") == [[400, 0.1]]
        assert one.ink("loss") > 1000
        assert one.page.locator(".group > h2").all_inner_texts() == ["Loss", "Metrics", "Optimizer"]
        assert one.text(".says") == "done at step 400, checkpoint saved"
        assert one.text(".percent") == "100 %"
        facts = dict(zip(*(one.page.locator(f".facts {kind}").all_inner_texts() for kind in ("dt", "dd")), strict=True))
        assert facts["Epoch"] == "4 of 4"
        assert (facts["Ranks"], facts["Device"], facts["Elapsed"]) == ("2", "cpu", "0:04")
        assert one.page.locator(".ranks li").count() == 2
        with (run / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row(401, accuracy=0.25, learning_rate=0.1)) + "\n")
        until(lambda: one.last("accuracy")[0] == [401, 0.25], "the new row is drawn")
        assert one.last("loss")[0] == [401, 1 / 401]


@pytest.mark.covers("J7")
def test_logged_values_are_drawn_whatever_their_names(visit: Any, run: Path) -> None:
    lines = [{"epoch": 1, "iteration": k, "constructor": k / 4, "loss": 3.0, "elapsed_s": 1.0} for k in (100, 300)]
    write_lines(run / "logged.jsonl", [*lines, {"epoch": 1, "iteration": 400, "a": 2.5, "elapsed_s": 1.0}])
    with served(run) as page:
        one = visit(page)
        assert one.last("constructor") == [[300, 75.0]]
        assert one.last("a") == [[400, 2.5]]
        assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4], [300, 3.0]]
        names = one.page.locator(".chart").evaluate_all("all => all.map((one) => one.dataset.metric)")
        assert names == ["loss", "a", "accuracy", "constructor", "learning_rate"]
        one.page.locator("[data-metric=constructor]").focus()
        for key in ("Home", "+", "+", "End", "-", "ArrowLeft", "0"):
            one.page.keyboard.press(key)
            assert "NaN" not in one.page.locator("#groups").inner_text()


@pytest.mark.covers("J11")
def test_a_profile_is_a_table_with_its_hints_and_appears_while_the_page_is_open(visit: Any, run: Path) -> None:
    times = {"step_s": 0.03, "phases": {"data": 0.02, "forward": 0.01}}
    profile = {
        "heading": "20 steps after 5 of warm-up, 2 ranks on cpu",
        "phases": ["data", "forward"],
        "ranks": [{"rank": rank, **times} for rank in range(2)],
        "hints": ["67 % of the step waits for <b>data</b>."],
    }
    with served(run) as page:
        one = visit(page, PHONE)
        assert not one.page.locator(".profile").is_visible()
        (run / "profile").mkdir()
        (run / "profile" / "profile.json").write_text(json.dumps(profile))
        one.waits_for(".profile h3", "Milliseconds per step: 20 steps after 5 of warm-up, 2 ranks on cpu")
        rows = [line.locator("th, td").all_inner_texts() for line in one.page.locator(".profile tr").all()]
        assert rows == [
            ["rank", "step", "data", "forward"],
            ["0", "30.00", "20.00", "10.00"],
            ["1", "30.00", "20.00", "10.00"],
            ["share", "", "67 %", "33 %"],
        ]
        assert one.page.locator(".profile li").all_inner_texts() == profile["hints"]


@pytest.mark.covers("E4")
def test_scale_smoothing_epoch_marks_and_zoom(visit: Any, run: Path) -> None:
    with served(run) as page:
        one = visit(page)
        assert one.chart("loss", "scale") == "linear"
        one.page.get_by_label("log", exact=True).check()
        assert one.chart("loss", "scale") == "log"
        assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4]]
        one.page.get_by_label("Smoothing").select_option("30")
        until(lambda: len(one.last("loss")) == 3, "the smoothed curve is there")
        raw, smooth, _ = one.last("loss")
        assert (raw, smooth[0]) == ([400, 1 / 400], 400)
        assert 1 / 400 < smooth[1] < 1 / 300  # the mean of the values before
        marked = one.ink("loss")
        one.page.get_by_label("Epochs").uncheck()
        assert one.ink("loss") < marked
        box = one.page.locator(".chart[data-metric=loss] .u-over").bounding_box()
        one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        one.page.mouse.down()
        one.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=3)
        one.page.mouse.up()
        until(lambda: int(one.chart("loss", "points")) < 120, "a part is shown")
        assert 295 <= one.last("loss")[0][0] <= 305
        assert 95 <= int(one.chart("loss", "points") or 0) <= 110  # the other pictures zoom as far, and once
        one.page.get_by_role("button", name="Whole run").click()
        until(lambda: one.last("loss")[0][0] == 400, "all is shown")


@pytest.mark.covers("E4")
def test_everything_can_be_done_with_the_keyboard(visit: Any, run: Path) -> None:
    with served(run) as page:
        one = visit(page)
        reached = []
        for _ in range(12):
            one.page.keyboard.press("Tab")
            reached.append(
                one.page.evaluate(
                    "((one) => one.id || one.name || one.dataset.metric || one.className)(document.activeElement)"
                )
            )
        charts = [name for metric in ("loss", "accuracy", "learning_rate") for name in (metric, "csv", "png", "log")]
        assert reached == ["edit", "smoothing", "axis", "scale", "marks", *charts[:7]]
        one.page.locator(".chart[data-metric=loss]").focus()
        one.page.keyboard.press("Home")
        assert one.text(".chart[data-metric=loss] .step") == "step 1"
        assert one.text(".chart[data-metric=loss] .line") == "1"
        one.page.keyboard.press("End")
        one.page.keyboard.press("+")
        assert one.page.get_by_role("button", name="Whole run").is_visible()
        one.page.keyboard.press("0")
        assert not one.page.get_by_role("button", name="Whole run").is_visible()
        assert "loss" in one.page.locator(".chart[data-metric=loss]").get_attribute("aria-label")


@pytest.mark.covers("E4")
def test_two_runs_are_drawn_over_each_other(visit: Any, run: Path, tmp_path: Path) -> None:
    write_run(
        tmp_path / "other", [row(k, loss=2 / k, accuracy=0.5) for k in range(1, 301)], status="left", iteration=300
    )
    with served(run, tmp_path / "other") as page:
        one = visit(page)
        until(lambda: len(one.last("loss")) == 3, "both are there")
        assert one.last("loss") == [[400, 1 / 400], [400, 0.5 / 4], [300, 2 / 300]]
        assert one.page.locator(".line .name").all_inner_texts() == ["digits", "other"]
        one.page.get_by_role("checkbox", name="Draw digits").uncheck()
        assert one.last("loss") == [[300, 2 / 300]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(visit: Any, run: Path, scheme: str) -> None:
    with served(run) as page:
        one = visit(page, PHONE, scheme)
        widths = one.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths == [375, 375]
        too_wide = one.page.evaluate(
            "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 376 "
            "&& !one.closest('.plot, .group > h2')).map((one) => one.className)"
        )
        assert too_wide == []
        assert one.page.locator(".chart canvas").first.bounding_box()["width"] > 300
        ground = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(245, 246, 248)", "dark": "rgb(17, 21, 26)"}[scheme]


def test_100_000_rows_are_drawn_in_no_more_points_than_the_picture_has(visit: Any, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "long", [row(k, accuracy=0.5) for k in range(1, 100_001)], status="left", iteration=10**5
    )
    with served(run) as page:
        one = visit(page)
        until(lambda: one.last("loss") == [[100_000, 1e-5]], "all rows are read")
        assert int(one.chart("loss", "points")) <= 2500


# -- the link ----------------------------------------------------------------------------------------------


def test_without_its_token_the_page_asks_for_it(browser: Browser, run: Path) -> None:
    with served(run) as page:
        one = Visit(browser, WIDE, "light")
        one.page.goto(page.base)
        one.waits_for("#notice", "needs the whole link")
        assert not one.page.locator(".run, .line").filter(visible=True).count()
        one.page.goto(f"{page.base}/#token=wrong")
        one.waits_for("#notice", "The token is wrong")
        assert not one.page.locator(".run, .line").filter(visible=True).count()
        one.context.close()
        assert one.outward == []


@pytest.mark.covers("E4")
def test_a_reload_keeps_the_token_and_a_monitor_that_comes_back_is_found(browser: Browser, run: Path) -> None:
    with served(run) as page:
        one = Visit(browser, WIDE, "light").open(page)
        assert "token" not in one.page.url
        one.page.reload()
        one.page.wait_for_selector(".chart[data-last]")
        assert one.last("loss")[0] == [400, 1 / 400]
        port = page.port
    one.waits_for("#link", "connection lost")
    with (run / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row(401, accuracy=0.25, learning_rate=0.1)) + "\n")
    with served(run, port=port):
        one.waits_for("#link[data-link=live]", "live")
        until(lambda: one.last("loss")[0] == [401, 1 / 401], "the curve goes on")
        one.context.close()
    assert one.outward == []


def test_a_removed_folder_is_reported_and_its_curves_stay(visit: Any, run: Path) -> None:
    with (run / "rows.jsonl").open("a") as file:
        file.write('no row\n{"iteration": 401, "lo')
    with served(run) as page:
        one = visit(page)
        problems = one.page.locator(".problems li").all_inner_texts()
        assert [problem.split(":")[1].split(",")[0] for problem in problems] == [
            " 1 line cannot be read",
            " the last line is half-written and left out (22 bytes)",
        ]
        shutil.rmtree(run)
        one.waits_for(".says", "this run folder was removed")
        assert one.last("loss")[0] == [400, 1 / 400]


# -- Stop --------------------------------------------------------------------------------------------------


def train(folder: str) -> tuple[int, str | None, float]:
    """Train until a stop; returns the last step, the reason, and the result of an evaluation in the first step."""
    with dl.join_world(seed=2) as world:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        batches = dl.Batches((inputs, inputs.sum(1, keepdim=True)), 8, world)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 10**6, state=state, run_dir=folder, progress=False, save_every=10**6)
        with suppress(dl.Stopped):
            for step in loop:
                for given, wanted in step:
                    output = model(given)
                    step.backward((output - wanted).square().mean(), error=(output - wanted).abs().mean())
                step.fold()
                optimizer.step()
                if step.iteration == 1:
                    result = dl.evaluate(model, batches, error=lambda output, wanted: (output - wanted).abs().mean(1))
        return step.iteration, loop.stopped, result["error"]


@pytest.mark.covers("E4", "E5")
def test_stop_ends_both_ranks_at_the_same_step_with_a_checkpoint_and_the_page_says_so(
    visit: Any, on_ranks: OnRanks, tmp_path: Path
) -> None:
    run = tmp_path / "digits"
    ended: list[Any] = []
    job = threading.Thread(target=lambda: ended.extend(on_ranks(2, train, str(run), timeout_s=LAST_S)))
    job.start()
    try:
        until(lambda: (run / "rows.jsonl").exists() and (run / "rows.jsonl").stat().st_size, "the run is under way")
        with served(run) as page:
            one = visit(page)
            one.waits_for(".says", "running")
            until(lambda: "Remaining" in one.page.locator(".facts dt").all_inner_texts(), "the remaining time is said")
            one.page.get_by_role("button", name="Stop digits", exact=True).click()
            assert one.page.get_by_role("button", name="Keep running").evaluate(
                "(one) => one === document.activeElement"
            )
            one.page.keyboard.press("Enter")  # the safe choice has the focus
            assert not (run / "stop").exists()
            one.waits_for(".says", "running")
            until(lambda: "Remaining" in one.page.locator(".facts dt").all_inner_texts(), "the remaining time is said")
            one.page.get_by_role("button", name="Stop digits", exact=True).click()
            one.page.get_by_role("button", name="Stop the run").click()
            one.waits_for(".says", "stopped at step")
            job.join(LAST_S)
            (first, why, error), (second, *_) = ended
            assert (first, why) == (second, "the page")
            assert one.text(".says") == f"stopped at step {first}, checkpoint saved"
            one.waits_for(".why", "Asked by: the page")
            assert (run / "checkpoints" / f"step-{first:08}" / "manifest.json").is_file()
            assert one.text(".continue code").startswith(f"cd {os.getcwd()} && python ")
            assert not one.page.get_by_role("button", name="Stop digits", exact=True).is_visible()
            until(lambda: one.last("loss")[0][0] == first, "the last row is drawn")
            rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
            assert one.last("loss") == [[first, rows[-1]["loss"]]]
            until(lambda: one.last("error") == [[first, rows[-1]["error"]], [1, error]], "the evaluation is drawn")
            norm = rows[-1]["gradient_norm"]
            until(lambda: one.last("gradient_norm") == [[first, norm]], "its norm is drawn")
            assert one.page.locator(".ranks li").count() == 2  # from the ranks.jsonl of the run
    finally:
        if run.is_dir():
            (run / "stop").touch()
        job.join()
