"""The tab Results in a browser: table, filter, notes, pictures, confusion matrix, and requests to sweeps."""

from __future__ import annotations

import csv
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import FileLock, RunFolder, write_atomic
from tests.support.browsing import NEEDS_BROWSER, PHONE, WIDE, Visit
from tests.support.harness import MOMENT_S, until
from tests.support.serving import row, write_lines
from tests.support.sweep_folders import write_sweep, write_trial

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("G4")]
STATUSES = {3: "failed", 5: "killed", 7: "not finite", 9: "timed out", 10: "waiting", 11: "pruned"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "digits", 12, statuses=STATUSES)


def opened(show: Any, folder: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> Visit:
    """Open the page at the tab Results, and wait for its pictures."""
    one: Visit = show(folder, size, scheme)
    one.tab("Results")
    one.at(".trial").first.wait_for()
    one.at(".way").first.wait_for(state="attached")
    return one


def numbers(one: Visit) -> list[int]:
    """The trials of the table, in its order."""
    return [int(key.rpartition("/")[2]) for key in one.texts(".trial .open-run")]


def column(one: Visit, title: str) -> list[str]:
    """The cells of a column."""
    titles = one.texts(".trials th")
    return one.at(f".trial td:nth-child({titles.index(title) + 1})").all_text_contents()


def facts(sweep: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((sweep / "trials" / f"{number:04d}" / "trial.json").read_text())
    return found


def sort(one: Visit, title: str) -> None:
    one.at(".trials th").get_by_role("button", name=title, exact=True).click()


def box(one: Visit, number: int) -> Any:
    return one.page.get_by_role("checkbox", name=f"Pick trials/{number:04d}")


# -- the table ---------------------------------------------------------------------------------------------


def test_the_table_shows_parameters_and_results_and_sorts_by_each_column(show: Any, sweep: Path) -> None:
    one = opened(show, sweep)
    titles = one.texts(".trials th")
    assert titles[:6] == ["Pick", "Trial", "Objective: loss", "best loss", "loss", "accuracy"]
    assert titles[6:] == ["Status", "rate", "momentum", "width", "activation", "Time", "Steps", "Note", "Actions"]
    assert column(one, "Status")[:4] == ["done", "done", "done", "failed"]
    assert column(one, "width")[0] == str(facts(sweep, 0)["parameters"]["width"])
    rates = {number: facts(sweep, number)["parameters"]["rate"] for number in range(12)}
    for turn in ("ascending", "descending"):
        sort(one, "rate")
        assert numbers(one) == sorted(rates, key=lambda number: rates[number], reverse=turn == "descending")
        assert one.page.get_attribute("[data-column='parameter rate']", "aria-sort") == turn
    values = {number: value for number in range(12) if (value := facts(sweep, number)["value"]) is not None}
    best_first = sorted(values, key=lambda number: values[number])
    head = one.at("[data-column='value'] button")
    head.focus()
    head.press("Enter")
    assert numbers(one)[: len(values)] == best_first
    head.press("Enter")
    assert numbers(one)[: len(values)] == best_first[::-1]  # trials without a value come last both times
    head.press("Enter")
    assert numbers(one) == list(range(12))
    assert one.page.get_attribute("[data-column='value']", "aria-sort") == "none"


def test_last_and_best_are_two_columns_which_differ_where_a_run_got_worse(show: Any, sweep: Path) -> None:
    path = sweep / "trials" / "0000" / "rows.jsonl"
    write_lines(path, [row(k, loss=loss, accuracy=loss) for k, loss in ((1, 0.5), (2, 0.25), (3, 0.75))])
    write_lines(sweep / "trials" / "0001" / "rows.jsonl", [row(1, loss=None, accuracy=0.5)])
    write_lines(sweep / "trials" / "0001" / "evaluations.jsonl", [row(1, loss=2.0), row(2, loss=3.0)])
    one = opened(show, sweep)
    assert (column(one, "loss")[:2], column(one, "best loss")[:2]) == (["0.75", "nan"], ["0.25", "–"])
    assert (column(one, "accuracy")[0], column(one, "eval loss")[:2]) == ("0.75", ["–", "3"])
    for text in ("loss=0.75", '"best loss"=0.25', '"best accuracy">=0.75 loss>0.7', "loss=3", '"best loss"=2'):
        one.fill("Filter the table", text)
        assert numbers(one)[:1] == ([1] if text[-1] in "23" else [0]), text
    one.fill("Filter the table", "status=done")
    sort(one, "best loss")
    best = numbers(one)
    sort(one, "loss")
    assert numbers(one) != best
    assert (best[-1], numbers(one)[-2:]) == (1, [0, 1])


def test_what_the_filter_finds_is_shown_exported_and_drawn(show: Any, sweep: Path) -> None:
    (sweep / "trials" / "0003" / "note.txt").write_text('=1+1, "so"')
    every = {number: facts(sweep, number) for number in range(12)}
    one = opened(show, sweep)

    def found(text: str) -> list[int]:
        one.fill("Filter the table", text)
        return numbers(one)

    assert found("status=failed") == [3]
    assert found('status="timed out"') == [9]
    assert found("made up") == [3, 5, 7, 9]
    assert found("rate<0.05 activation=relu") == [
        number
        for number, of in every.items()
        if of["parameters"]["rate"] < 0.05 and of["parameters"]["activation"] == "relu"
    ]
    assert found("value<=0.2") == [number for number, of in every.items() if of["value"] and of["value"] <= 0.2]
    assert found('"best loss"<0.2') == [number for number in found("loss<0.2") if number not in STATUSES]
    assert found("status!=done") == [*STATUSES]
    assert found("rate=") == list(range(12))  # while it is typed
    assert (found("speed>3"), one.text(".filter-says")) == ([], "No column is called speed.")
    assert (found("rate>x"), one.text(".filter-says")) == ([], "x is no number.")
    assert (found(""), one.text(".results-tools .count")) == (list(range(12)), "12 runs")

    found("status!=waiting")
    sort(one, "rate")
    with one.page.expect_download() as waiting:
        one.press("Export CSV")
    assert waiting.value.suggested_filename == "results.csv"
    with Path(waiting.value.path()).open(newline="", encoding="utf-8") as file:
        lines = {line["Trial"]: line for line in csv.DictReader(file)}
    assert [int(key.rpartition("/")[2]) for key in lines] == numbers(one)
    exported = [float(lines["trials/0000"][name]) for name in ("rate", "Objective: loss")]
    assert exported == [every[0]["parameters"]["rate"], every[0]["value"]]
    noted = [lines["trials/0003"][name] for name in ("Note", "Folder")]
    assert noted == ['\'=1+1, "so"', str(sweep / "trials" / "0003")]  # no formula

    assert one.button("Show curves (0)").is_disabled()
    for number in (2, 6):
        box(one, number).check()
    one.press("Show curves (2)")
    assert one.page.get_by_role("tab", name="Curves").get_attribute("aria-selected") == "true"
    losses = [[10, every[number]["value"]] for number in (2, 6)]
    until(lambda: one.last("loss") == losses, "both curves are drawn, and no others")


def test_a_note_is_written_in_its_cell_and_html_in_it_is_text(show: Any, sweep: Path) -> None:
    text = "<img src=x onerror=alert(1)> & better"
    note = sweep / "trials" / "0002" / "note.txt"
    one = opened(show, sweep)
    written = one.at(".note-input")
    one.press("Note on trials/0002")
    written.fill("never mind")
    written.press("Escape")
    assert column(one, "Note")[2] == ""
    one.button("Note on trials/0002").press("Enter")
    written.fill(text)
    written.press("Enter")
    until(note.exists, "the note is written, to a disk that may be busy", 3 * MOMENT_S)
    assert (note.read_text(), column(one, "Note")[2]) == (text, text)
    assert one.at(".trials img").count() == 0
    one.fill("Filter the table", "better")
    until(lambda: numbers(one) == [2], "the filter finds it")
    one.fill("Filter the table", "")
    (sweep / "trials" / "0004" / "note.txt").write_text("of another page")
    until(lambda: column(one, "Note")[4] == "of another page", "another note appears")
    one.page.evaluate("window.fetch = async () => new Response('The disk is full.', { status: 500 })")
    one.press("Note on trials/0001")
    written.fill("a long thought")
    written.press("Enter")
    one.waits_for("#notice", "The note on trials/0001 was not saved: The disk is full.")
    assert written.input_value() == "a long thought"


# -- pictures ----------------------------------------------------------------------------------------------


NOTE_TOPS = """() => {
  window.tops = [];
  const look = () => {
    const line = document.querySelector(".trial");
    if (line) tops.push(line.getBoundingClientRect().top);
    requestAnimationFrame(look);
  };
  look();
}"""


def test_the_table_stays_where_it_is_when_the_tab_opens(show: Any, sweep: Path) -> None:
    """A press would miss its button."""
    one = show(sweep)
    one.at(".sweep").first.wait_for(state="attached")
    one.page.evaluate(NOTE_TOPS)
    one.tab("Results")
    one.at(".way").first.wait_for(state="attached")
    drawn = one.page.evaluate("tops.length")
    until(lambda: one.page.evaluate("tops.length") > drawn + 2, "it was painted with the pictures")
    assert len(set(one.page.evaluate("tops"))) == 1


def test_the_scatter_takes_any_column_names_the_trial_under_the_pointer_and_a_click_picks_it(
    show: Any, sweep: Path
) -> None:
    write_trial(sweep, 12, {"rate": 0.1, "width": 16}, "failed", rows=[row(1, loss=1e30)])
    one = opened(show, sweep)
    mark, labels = one.at(".scatter .mark"), one.at(".scatter .tick-label")
    until(lambda: mark.count() == 13, "all are drawn")
    assert one.at(".scatter .mark.cross").count() == 7
    one.at(".scatter-y").select_option("last loss")
    ticks = [float(text) for text in labels.all_text_contents() if text != "none"]
    assert max(ticks) < 2  # a loss of 1e30 is a mark on the edge, and no part of the scale
    assert one.at(".log-x").is_checked()
    one.at(".log-x").uncheck()
    assert "0" in labels.all_text_contents()
    one.at(".scatter-x").select_option("parameter activation")
    assert {"relu", "tanh", "gelu"} <= set(labels.all_text_contents())
    assert one.at(".log-x").is_disabled()
    one.waits_for(".picture-says", "1 without activation: left out.")
    for colour in ("parameter momentum", "parameter activation", "value"):
        one.at(".scatter-colour").select_option(colour)
        assert mark.first.evaluate("(mark) => mark.style.fill || mark.style.stroke")
    one.fill("Filter the table", "name=trials/0000")
    until(lambda: mark.count() == 1, "the filter reaches the scatter")
    mark.hover()
    assert one.text(".tip strong") == "trials/0000"
    mark.click()
    assert box(one, 0).is_checked()
    assert one.at(".scatter .mark.picked").count() == 1
    one.at(".scatter").focus()
    one.at(".scatter").press("ArrowRight")
    assert one.text(".tip strong") == "trials/0000"
    one.at(".scatter").press("Enter")
    assert not box(one, 0).is_checked()


def test_a_range_on_an_axis_of_the_parallel_coordinates_filters_the_table(show: Any, sweep: Path) -> None:
    one = opened(show, sweep)
    axis = one.at(".axis", has_text="Objective: loss")
    axis.scroll_into_view_if_needed()
    place = axis.locator(".hit").bounding_box()
    assert place is not None
    middle = place["x"] + place["width"] / 2
    one.page.mouse.move(middle, place["y"] + place["height"])
    one.page.mouse.down()
    one.page.mouse.move(middle, place["y"] + place["height"] * 0.75)
    one.page.mouse.move(middle, place["y"] + place["height"] * 0.5)
    one.page.mouse.up()
    values = {number: facts(sweep, number)["value"] for number in range(12)}
    best = [number for number in sorted(values, key=lambda number: values[number] or 9) if values[number]]
    shown = numbers(one)
    assert 0 < len(shown) < len(best)
    assert sorted(shown) == sorted(best[: len(shown)])
    assert one.at(".way.dim").count() == 12 - len(shown)
    until(lambda: one.at(".scatter .mark").count() == len(shown), "the scatter follows")
    one.press("Clear ranges")
    assert numbers(one) == list(range(12))
    axis.focus()
    axis.press("ArrowDown")
    assert len(numbers(one)) < 12
    axis.press("Escape")
    assert numbers(one) == list(range(12))
    assert one.at(".way.none").count() == 6
    one.at(".way").last.dispatch_event("click")
    assert one.at(".pick-one:checked").count() == 1


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_the_confusion_matrix_has_counts_and_the_accuracy_of_each_class(
    show: Any, sweep: Path, size: tuple[int, int], scheme: str
) -> None:
    path = sweep / "trials" / "0001" / "tables" / "confusion.json"
    counts = json.loads(path.read_text())["values"]
    one = opened(show, sweep, size, scheme)
    assert one.button("Matrix trials/0006").count() == 0
    one.press("Matrix trials/0001")
    one.waits_for(".matrix-place h2", "Confusion matrix: trials/0001, step 10")
    lines = [line.locator("td").all_text_contents() for line in one.at(".matrix tbody tr").all()]
    assert [[int(cell) for cell in line[:-1]] for line in lines] == counts
    assert [line[-1] for line in lines] == [f"{100 * row[k] / sum(row):.1f} %" for k, row in enumerate(counts)]
    share = "(cell) => cell.style.getPropertyValue('--share')"
    assert one.at(".matrix tbody td").nth(0).evaluate(share) == f"{100 * counts[0][0] / sum(counts[0]):.1f}%"
    assert one.page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # the frame scrolls
    counts[0][0] = 77
    write_atomic(path, json.loads(path.read_text()) | {"values": counts})
    until(lambda: one.text(".matrix td") == "77", "a new table is shown")
    one.press("Close the table")
    assert not one.at(".matrix").is_visible()


def test_at_1400_pixels_names_are_whole_and_the_result_is_the_last_axis_in_its_pane(show: Any, tmp_path: Path) -> None:
    name = "adamw-lr0.001-momentum0.9-width128"
    for number in range(4):
        parameters = {f"parameter_{k}": number * k for k in range(9)}
        folder = write_trial(tmp_path / "sweep", number, parameters, value=number + 0.5)
        (folder / "name.txt").write_text(f"{name}-{number}")
    write_trial(tmp_path / "sweep", 4, parameters, "failed", value=9.0)
    write_trial(tmp_path / "sweep", 5, parameters, "not finite")
    one = opened(show, tmp_path / "sweep", (1400, 900))
    whole = "(all) => all.map((one) => one.scrollWidth <= one.clientWidth)"
    assert one.at(".trial .open-run").evaluate_all(whole) == [True] * 6
    first = [one.at(f".trials th:nth-child({at})").inner_text() for at in (2, 3, 4)]
    assert first == ["Trial", "Objective: loss", "best loss"]
    assert column(one, "Objective: loss")[4:] == ["9", "nan"]
    right = "(one) => one.getBoundingClientRect().right"
    title = one.at(".axis", has_text="Objective").locator(".axis-title")
    assert title.evaluate(right) <= one.at(".wide-frame").first.evaluate(right)
    assert one.at(".wide-frame").first.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    said = "1 without a finite result and 1 that failed: dashed, and left out of the scale of Objective: loss."
    one.waits_for(".picture-says", said)
    one.waits_for(".picture-says", "1 without a finite Objective: loss: on the lower edge.")
    one.fill("Filter the table", "nothing")
    assert one.text(".results-tools .count") == ("0 of 6 runs. Empty the filter, the search and the ranges to see all.")


LOOKS = """() => {
    const colour = (place) => getComputedStyle(document.querySelector(place)).color;
    const of = (state) => [`.line[data-state="${state}"] .state`, `.trial[data-state="${state}"] .state`,
        `.legend [data-state="${state}"]`, `.scatter .mark[data-state="${state}"]`].map(colour);
    const states = [...new Set([...document.querySelectorAll(".trial")].map((one) => one.dataset.state))];
    return Object.fromEntries(states.map((state) => [state, of(state)]));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_state_has_one_colour_in_list_table_and_legend_which_has_the_marks(
    show: Any, sweep: Path, scheme: str
) -> None:
    for number, (status, of_loop) in enumerate((("running", "running"), ("done", "done"), ("stopped", "stopped"))):
        run = write_trial(sweep, 20 + number, {"rate": 0.1}, status, value=0.5)
        (run / "status.json").write_text(json.dumps({"status": of_loop, "iteration": 1}))
    one = opened(show, sweep, scheme=scheme)
    one.page.get_by_label("Colour").select_option(label="Status")
    until(lambda: one.at(".scatter .mark").count() == 15, "all marks are drawn")
    looks = one.page.evaluate(LOOKS)
    assert {state for state, colours in looks.items() if len(set(colours)) > 1} == set()
    assert len({looks[state][0] for state in ("failed", "lost", "done", "stopped")}) == 4
    samples = one.at(".legend .mark")
    crosses = samples.evaluate_all(
        "(all) => all.filter((one) => one.matches('.cross')).map((one) => one.dataset.state)"
    )
    assert crosses == ["failed", "killed", "lost", "not finite", "timed out"]
    assert samples.count() == len(looks)


def test_an_objective_of_evaluate_has_one_name_on_the_page(show: Any, sweep: Path) -> None:
    facts = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(facts | {"objective": "evaluation.loss"}))
    for number in range(12):
        path = sweep / "trials" / f"{number:04d}" / "trial.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"objective": "evaluation.loss"}))
    one = opened(show, sweep)
    one.waits_for(".sweep-says", "best eval loss ")
    assert one.at("#of-value").text_content() == "eval loss"
    assert "evaluation." not in one.at("body").inner_text()


# -- requests ----------------------------------------------------------------------------------------------


@pytest.mark.covers("G5")
def test_one_trial_and_all_trials_are_stopped_after_a_question(show: Any, sweep: Path) -> None:
    run = write_trial(sweep, 12, {"rate": 0.1}, "running")
    with closing(RunFolder(run, {}, True)), closing(FileLock(sweep / "lock", "sweep")):
        one = opened(show, sweep)
        assert one.button("Stop trials/", exact=False).filter(visible=True).count() == 1
        one.press("Stop trials/0012")
        one.press("Stop the run")
        until((run / "stop").exists, "one is asked to stop")
        until(lambda: column(one, "Status")[0].startswith("stopping"), "the table says so")
        assert not (sweep / "stop").exists()
        one.press("Stop all")
        one.waits_for(".confirm-all h2", "Stop all trials of digits?")
        one.at(".confirm-all").get_by_role("button", name="Keep running").click()
        assert not (sweep / "stop").exists()
        one.press("Stop all")
        one.press("Stop all trials")
        until((sweep / "stop").exists, "all are asked to stop")
        one.waits_for(".stop-all", "Stopping…")


@pytest.mark.covers("G5")
def test_failed_trials_run_again(show: Any, sweep: Path) -> None:
    one = opened(show, sweep)
    one.waits_for(".sweep-says", "12 of 12 trials · 6 done, 1 failed, 1 killed, 1 not finite, 1 timed out, 1 waiting")
    assert not one.button("Stop all").is_visible()
    one.press("Run 4 failed again")
    one.waits_for(".sweep-needs", f"when a worker starts: python -m ddp_loop sweep work {sweep}")
    assert [json.loads(path.read_text()) for path in (sweep / "again").iterdir()] == [{"trials": [3, 5, 7, 9]}]


# -- odd trials ----------------------------------------------------------------------------------------


def test_names_and_values_of_users_are_only_text(show: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "odd", 1)
    odd = {"__proto__": 3, "constructor": "<b>x</b>", "toString": 0.5, "a.b": None, "x" * 200: True}
    write_trial(sweep, 1, odd, why="<script>alert(1)</script>", objective="constructor", value=1e300)
    write_trial(sweep, 2, odd | {"toString": 2}, "failed", rows=[row(1, loss=None, __proto__=2.0)], value="text")
    write_trial(sweep, 3, {"status": "odd", "loss": 7}, status="<b>")
    one = opened(show, sweep)
    assert numbers(one) == [0, 1, 2, 3]
    assert column(one, "__proto__") == ["–", "–", "2", "–"]  # the metric, which stands before the parameter
    assert column(one, "constructor") == ["–", "<b>x</b>", "<b>x</b>", "–"]
    sort(one, "toString")
    assert numbers(one) == [1, 2, 0, 3]
    one.fill("Filter the table", "tostring=0.5")
    assert numbers(one) == [1]
    one.fill("Filter the table", "status=odd loss=7 loss=1")  # of the run, or its parameter
    assert numbers(one) == [3]
    assert one.at(".trials b, .trials script").count() == 0
    assert one.page.evaluate("({}).x === undefined && Object.prototype.constructor === Object")
