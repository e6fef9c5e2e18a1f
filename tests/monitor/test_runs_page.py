"""The page of several runs in a browser: the list at the left, a run's card, and which curves are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import asked_to_stop, forget_stop
from tests.support.browsing import NEEDS_BROWSER, WIDE, Visit
from tests.support.harness import until
from tests.support.logged_files import append_lines
from tests.support.serving import row, running, served, write_lines, write_run
from tests.support.sweep_folders import write_trial

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
SMALL = (390, 844)


def write_sweep(top: Path, count: int, steps: int = 20) -> Path:
    """Run folders of a sweep, whose last loss is (5 number) mod 7 + 1, and whose rate is one of three."""
    for number in range(count):
        loss = 5 * number % 7 + 1
        write_run(
            top / "trials" / f"{number:04}",
            [row(k, loss=loss + 1 - k / steps, accuracy=0.5) for k in range(1, steps + 1)], began=1000.0 + number,
            config={"rate": (0.1, 0.1234567890123, 0.5)[number % 3], "momentum": 0.9},
            status="stopped" if number % 4 == 3 else "done", iteration=steps, checkpoint=f"step-{steps:08}", epochs=1,
            steps_per_epoch=steps,
        )  # fmt: skip
    return top


def trials(*numbers: int) -> list[str]:
    return [f"trials/{number:04}" for number in numbers]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "sweep", 12)


# -- the list ----------------------------------------------------------------------------------------------

FOUND: dict[str, Any] = {
    "0003": [3], "STOPPED": [3, 7, 11], "rate=0.1": [0, 3, 6, 9], "rate=1e-1": [0, 3, 6, 9], "rate=0.": range(12),
    "rate=0.1234567890123 done": [1, 4, 10], "rate<=0.13 rate>0.1": [1, 4, 7, 10], "loss<2": [0, 7],
    "momentum=0.9 trials/000": range(10), "nothing": [], "rate=": range(12), "loss=2": [3, 10],
    "name=trials/0004": [4], "state=stop momentum!=0.5": [3, 7, 11], "steps<20": [], '"0001"': [1],
}  # fmt: skip


def test_the_list_shows_sorts_and_finds_runs_and_the_newest_ten_are_drawn(show: Any, sweep: Path) -> None:
    one = show(sweep)
    assert one.listed() == trials(*range(12))
    assert one.chosen() == trials(*range(2, 12))
    one.has_lines(10)
    line = one.at(".line[data-run='trials/0003']")
    assert [line.locator(part).inner_text() for part in (".state", ".value")] == ["stopped", "2"]
    assert line.locator(".parameters").inner_text() == "rate=0.1"  # momentum is the same in all
    long = one.at(".line[data-run='trials/0004'] .parameters")
    assert (long.inner_text(), "rate=0.1234567890123" in str(long.get_attribute("title"))) == ("rate=0.1235", True)
    assert (one.text("#count"), one.page.title()) == ("12 runs", "12 runs")
    assert not one.visible(".run, #unfold")
    assert one.page.get_by_role("tab", selected=True).inner_text() == "Curves"

    search = one.page.get_by_label("Search runs")
    for text, found in FOUND.items():
        search.fill(text)
        assert one.listed() == trials(*found), text
        clears = "" if found else ". Empty the search to see all."
        assert one.text("#count") == ("12 runs" if len(found) == 12 else f"{len(found)} of 12 runs{clears}")
        assert one.text("#states") == "9 done · 3 stopped"
    search.fill("rate<x")
    assert one.text("#count") == "0 of 12 runs. x is no number. Empty the search to see all."
    search.fill("")

    turn, values = (
        one.button("Reverse the order"),
        one.at(".line:visible .value"),
    )
    one.page.get_by_label("Sort").select_option("value")
    sorted_values = sorted(values.all_text_contents())
    assert (values.all_text_contents(), one.listed()[:2]) == (sorted_values, trials(0, 7))  # equal ones by name
    turn.click()
    assert values.all_text_contents() == sorted_values[::-1]
    one.page.get_by_label("Sort").select_option("began")
    assert one.listed() == trials(*range(11, -1, -1))
    turn.click()
    one.page.get_by_label("Sort").select_option("state")
    assert one.listed() == trials(0, 1, 2, 4, 5, 6, 8, 9, 10, 3, 7, 11)


def test_runs_that_begin_later_appear_and_those_that_are_removed_go(show: Any, sweep: Path) -> None:
    one = show(sweep)
    with running(sweep / "trials" / "0100") as folder:
        one.waits_for(".line[data-run='trials/0100'] .state", "running 0 %")
        write_lines(folder.folder / "rows.jsonl", [row(50, loss=0.5)])
        one.waits_for(".line[data-run='trials/0100'] .state", "running 25 %")
        assert one.chosen() == ["trials/0100", *trials(*range(3, 12))]  # running, so first; the oldest one made way
        assert one.page.title() == "1 running · 13 runs"
    one.waits_for(".line[data-run='trials/0100'] .state", "lost")
    (sweep / "trials" / "0100").rename(sweep.parent / "0100")
    until(lambda: one.listed() == trials(*range(12)), "its line is gone")
    write_run(sweep / "rate2=0.1,seed=3", status="done")
    until(lambda: len(one.listed()) == 13, "a run whose name has signs is there")
    for text, said in (
        ("rate2=0.1,seed", "1 of 13 runs"),
        ("rate2=0.2", "0 of 13 runs. No column is called rate2. Empty the search to see all."),
        ("", "13 runs"),
    ):
        one.fill("Search runs", text)
        assert one.text("#count") == said
    one.open_card("trials/0003")
    one.waits_for(".run .name", "trials/0003")
    (sweep / "trials" / "0003").rename(sweep.parent / "0003")
    one.waits_for("#notice", f"trials/0003 is gone: its folder {sweep}/trials/0003 was removed.")
    sweep.rename(sweep.parent / "elsewhere")
    one.waits_for("#notice", f"{sweep} was removed. Its runs appear here again when it is back.")
    assert one.text(".says") == "there is no such folder: Loop(run_dir=...) makes it and begins a run there"
    (sweep.parent / "elsewhere").rename(sweep)
    one.at("#notice").wait_for(state="hidden")
    until(lambda: len(one.listed()) == 12, "the other runs are back")


def test_60_runs_are_drawn_up_to_50_in_colours_and_dashes_that_differ(show: Any, tmp_path: Path) -> None:
    one = show(write_sweep(tmp_path / "sweep", 60, steps=3), WIDE, "dark")
    one.press("Show only these")
    one.waits_for("#limit", "50 of the 60 chosen runs")
    one.has_lines(50)
    looks = one.page.evaluate(
        "[...document.querySelectorAll('.line.drawn')].map((line) => "
        "`${getComputedStyle(line).getPropertyValue('--run')} ${line.className}`)"
    )
    assert (len(looks), len(set(looks))) == (50, 50)
    assert one.text(".chart[data-metric=loss] .values").split("\n")[0] == "50 runs"
    one.at(".line[data-run='trials/0055'] .open").hover()  # it is not drawn
    assert one.text(".chart[data-metric=loss] .values").split("\n")[0] == "50 runs"
    before = one.ink("accuracy")
    one.at(".line[data-run='trials/0001'] .open").hover()
    one.waits_for(".chart[data-metric=accuracy] .values", "trials/0001: 0.5")
    assert one.ink("accuracy") != before  # its curve is wider now
    one.page.get_by_label("Smoothing").select_option("10")
    one.has_lines(100)
    assert one.chart("loss", "standing") == "trials/0001"  # in new charts too


def test_the_head_names_the_folder_and_the_best_run_and_running_runs_stand_first(visit: Any, tmp_path: Path) -> None:
    top = write_sweep(tmp_path / "sweep", 4)
    with running(top / "zebra"), served(top) as page:
        one = visit(page)
        assert one.text("#folders") == str(top)
        one.waits_for(".best", "Best: trials/0000 loss 1")
        assert one.listed() == ["zebra", *trials(*range(4))]
        one.press("Reverse the order")
        assert one.listed() == ["zebra", *trials(*range(3, -1, -1))]
        one.page.get_by_label("Sort").select_option("value")
        assert one.listed()[-1] == "zebra"  # which has none yet
        write_lines(top / "trials" / "0002" / "evaluations.jsonl", [row(20, loss=3.5)])
        one.waits_for(".best", "Best: trials/0002 eval loss 3.5")
        one.at("#best").click()
        one.waits_for(".run .name", "trials/0002")
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):  # trials of a sweep are compared by its objective
        facts: dict[str, Any] = {"objective": "accuracy", "direction": "maximize", "value": accuracy}
        write_trial(tmp_path / "other", number, {"rate": number}, **facts)
    with served(tmp_path / "other") as page:
        visit(page).waits_for(".best", "Best: trials/0001 accuracy 0.9")


# -- a card ------------------------------------------------------------------------------------------------


def test_boxes_the_search_and_the_open_card_choose_the_curves(show: Any, sweep: Path) -> None:
    one = show(sweep)
    one.press("Draw none")
    one.waits_for("#limit", "No run is chosen.")
    one.page.get_by_label("Search runs").focus()
    opener = one.at(".line[data-run='trials/0003'] .open")
    opener.focus()
    one.key("Enter")
    one.waits_for(".run .folder", str(sweep / "trials" / "0003"))
    assert (one.text(".run .name"), one.text(".says")) == ("trials/0003", "stopped at step 20, checkpoint saved")
    one.waits_for(".run .facts", "rate")
    one.waits_for(".continue code", "torchrun --nproc_per_node=2 lab/train.py")
    assert opener.get_attribute("aria-expanded") == "true"
    assert one.page.evaluate("document.activeElement.className") == "close"
    until(lambda: one.last("loss") == [[20, 2]], "its curve")
    assert (one.at("#limit").is_visible(), one.chosen()) == (False, [])
    one.key("Escape")
    assert not one.at(".run").is_visible()
    assert one.page.evaluate("document.activeElement.closest('.line').dataset.run") == "trials/0003"
    opener.click()
    one.open_card("trials/0002")  # another one, without closing the first
    one.waits_for(".run .folder", str(sweep / "trials" / "0002"))
    assert one.at(".continue").is_hidden()
    until(lambda: one.last("loss") == [[20, 4]], "the curve is the other run's")
    one.page.get_by_role("checkbox", name="Draw trials/0002").check()
    one.press("Close")
    assert not one.at(".run").is_visible()
    assert one.last("loss") == [[20, 4]]
    one.page.get_by_role("checkbox", name="Draw trials/0002").uncheck()
    one.waits_for("#limit", "No run is chosen.")
    assert (one.chosen(), one.last("loss")) == ([], [])
    one.fill("Search runs", "stopped")
    one.press("Show only these")
    until(lambda: one.last("loss") == [[20, 2], [20, 1], [20, 7]], "three others")
    assert one.text(".chart[data-metric=loss] .values").split() == ["2", "1", "7", "step", "20"]


@pytest.mark.covers("E4", "E5")
def test_stop_stops_the_run_of_its_card_and_no_other(visit: Any, sweep: Path) -> None:
    trial = sweep / "trials"
    with running(trial / "0100") as first, running(trial / "0101") as second, served(sweep) as page:
        one = visit(page)
        one.open_card("trials/0101")
        one.press("Stop trials/0101")
        assert one.text("#confirm-title") == "Stop trials/0101?"
        one.key("Escape")
        assert one.at(".run").is_visible()  # Escape closed the question only
        one.press("Stop trials/0101")
        one.key("Enter")  # the safe choice has the focus
        until(lambda: not one.button("Stop the run").is_visible(), "it is closed again")
        assert asked_to_stop(second.folder) is None
        one.press("Stop trials/0101")
        one.press("Stop the run")
        one.waits_for(".line[data-run='trials/0101'] .state", "stopping")
        one.button("Stopping… trials/0101").wait_for()  # named by its text
        assert (asked_to_stop(first.folder), asked_to_stop(second.folder)) == (None, "the page")
        second.write_status("stopped", iteration=7, why="the page")
        forget_stop(second.folder)
        second.close()
        one.waits_for(".says", "stopped at step 7, no checkpoint")
        assert one.text(".line[data-run='trials/0100'] .state") == "running 0 %"


@pytest.mark.parametrize("is_there", [False, True], ids=["misspelt", "empty"])
def test_a_folder_without_a_run_offers_nothing_of_a_run(browser: Any, tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "one"
    if is_there:
        folder.mkdir()
    with served(folder) as page:
        one = Visit(browser, WIDE, "light")
        page.visitors.callback(one.context.close)
        one.page.goto(page.link)
        one.waits_for(".says", "no run has begun in this folder yet" if is_there else "there is no such folder")
        assert not one.visible(".run button")
        assert "Step" not in one.text(".run")
        write_run(tmp_path / "other", 2, status="done").rename(folder)
        one.waits_for(".says", "done at step 2")
        assert one.button("Rename one").is_visible()


def test_a_card_has_the_loss_its_best_value_and_the_config_under_a_heading(show: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 2, config={"rate": 0.1}, status="done", checkpoint="step-00000032")
    (run / "checkpoints" / "step-00000032").mkdir(parents=True)
    write_lines(run / "evaluations.jsonl", [row(1, loss=0.5), row(2, loss=0.75)])
    one = show(run)
    assert one.text(".config").split() == ["Config", "rate", "0.1"]
    one.waits_for(".facts [data-fact=Checkpoint]", "step-00000032")
    facts = one.facts()
    assert (facts["eval loss"], facts["best eval loss"]) == ("0.75", "0.5")
    heights = [one.at(f"[data-fact={name}] dd").bounding_box()["height"] for name in ("Checkpoint", "Step")]
    assert heights[0] == heights[1]  # on one line


# -- layouts -----------------------------------------------------------------------------------------------


def test_on_a_phone_a_button_folds_the_list_away_and_another_one_unfolds_rename_and_hide(
    show: Any, sweep: Path
) -> None:
    long = "sgd-lr0.1-momentum0.9-width32"
    (sweep / "trials" / "0000" / "name.txt").write_text(long)
    one = show(sweep, SMALL)
    assert not one.at("#list").is_visible()
    assert one.at(".chart").first.bounding_box()["y"] < SMALL[1] / 2
    one.press("Runs (12)")
    assert one.at("#list").is_visible()
    wide = "document.documentElement.scrollWidth"
    assert one.page.evaluate(wide) == SMALL[0]
    one.key("Escape")
    assert not one.at("#list").is_visible()
    one.press("Runs (12)")
    name = one.at(".line .name", has_text=long)
    assert name.evaluate("(one) => one.scrollWidth <= one.clientWidth")  # it is whole
    hide = one.button(f"Hide {long}")
    assert not hide.is_visible()
    one.press(f"Rename or hide {long}")
    hide.click()
    assert one.listed() == trials(*range(1, 12))
    one.open_card("trials/0003")
    assert not one.at("#list").is_visible()
    one.waits_for(".run .name", "trials/0003")
    assert one.page.evaluate(wide) == SMALL[0]


def test_a_folder_with_one_run_shows_its_card_and_no_list_until_there_is_another(show: Any, tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", 1)
    one = show(tmp_path / "sweep")
    assert one.text(".run .name") == "trials/0000"
    hidden = "#list, #unfold, #tabs, #limit, .close, .run .swatch"
    assert not one.visible(hidden)
    assert one.at(".run").bounding_box()["width"] > 1200
    write_run(tmp_path / "sweep" / "trials" / "0001", status="done")
    until(lambda: one.listed() == trials(0, 1), "the list appears")
    assert not one.at(".run").is_visible()
    one.page.set_viewport_size({"width": 1000, "height": 800})
    chart, panel = (one.at(place).first.bounding_box() for place in (".chart", "#list"))
    assert panel["x"] + panel["width"] <= chart["x"]
    assert chart["y"] + chart["height"] < 800
    width = "document.documentElement.scrollWidth"
    until(lambda: one.page.evaluate(width) == 1000, "the charts have the page's width")


# -- many --------------------------------------------------------------------------------------------------


def test_500_runs_stay_smooth_in_list_and_table_and_only_the_lines_that_changed_are_touched(
    show: Any, tmp_path: Path
) -> None:
    sweep = write_sweep(tmp_path / "sweep", 500, steps=3)
    one = show(sweep)
    until(lambda: len(one.listed()) == 500, "all lines are there")
    until(lambda: "" not in one.texts(".lines .line .value"), "all runs are read")
    one.page.evaluate(
        """() => {
            window.touched = new Set();
            new MutationObserver((changes) => changes.forEach(({ target }) =>
                touched.add((target.closest ?? (() => target.parentElement.closest(".line"))).call(target, ".line")
                    ?.dataset.run)))
                .observe(document.getElementById("lines"),
                    { subtree: true, childList: true, attributes: true, characterData: true });
        }"""
    )
    append_lines(sweep / "trials" / "0123" / "rows.jsonl", [row(4, loss=0.125)])
    one.waits_for(".line[data-run='trials/0123'] .value", "0.125")
    assert one.page.evaluate("[...touched]") == ["trials/0123"]
    one.fill("Search runs", "rate=0.1 done")
    until(lambda: len(one.listed()) == 125, "the runs are found")
    one.fill("Search runs", "")
    one.tab("Results")
    until(lambda: one.at(".trial").count() == 500, "the table has all")
    one.fill("Filter the table", "rate=0.1 stopped loss<2")
    until(lambda: one.at(".trial").count() == 7, "the filter finds some, also the one that changed")
