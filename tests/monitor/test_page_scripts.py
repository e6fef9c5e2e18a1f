"""The page's scripts without a browser: the nearest point, the lines of a metric, searches and files of values."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.monitor.app import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which is not installed")


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Evaluate an expression with what a script of the page exports as `page`."""
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(name: str, expression: str) -> Any:
        (tmp_path / "try.js").write_text(
            f'import * as page from "./{name}";\nconsole.log(JSON.stringify({expression}));\n'
        )
        done = subprocess.run([str(NODE), "try.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_nearest_point_is_that_of_the_line_itself(script: Any) -> None:
    places = [-5, 1, 4, 5.5, 5.6, 9, 10, 14, 99]
    found = script("axis.js", f"{places}.map((place) => page.nearestTo([1, 4, 7, 10, 20], place))")
    assert found == [0, 0, 1, 1, 2, 3, 3, 3, 4]  # of two as near, the earlier one
    assert script("axis.js", "[page.nearestTo([], 3), page.nearestTo([2], 3)]") == [-1, 0]


def test_a_metric_of_any_name_has_its_own_lines_and_no_others(script: Any) -> None:
    curves = {
        "x": [1, 2], "steps": [1, 2], "curves": {"__proto__": [3, 4], "loss": [5, 6]}, "smoothed": {"loss": [5, 5.5]},
        "evaluated_x": [2], "evaluated_steps": [2], "evaluated": {"loss": [7], "constructor": [8]},
        "logged": {"constructor": [[1], [9], [1]], "toString": [[2], [10], [2]]},
    }  # fmt: skip
    text = json.dumps(json.dumps(curves))
    names = ["__proto__", "loss", "constructor", "toString", "valueOf", "hasOwnProperty"]
    found = script(
        "axis.js", f"{names}.map((name) => page.linesOf(JSON.parse({text}), name).map((l) => [l.kind, l.y]))"
    )
    assert found == [
        [["line", [3, 4]]],
        [["faint", [5, 6]], ["smooth", [5, 5.5]], ["evaluated", [7]]],
        [["evaluated", [8]], ["evaluated", [9]]],
        [["line", [10]]],
        [],
        [],
    ]


def test_a_place_on_an_axis_is_said_in_its_unit(script: Any) -> None:
    said = '[page.axisOf("step").says(1234), page.axisOf("epoch").says(1.5), page.axisOf("time").says(3.25), '
    said += 'page.axisOf("time").says(3725), page.axisOf("constructor").says(1)]'
    assert script("axis.js", said) == ["step 1\u202f234", "epoch 1.5", "3.25 s", "1:02:05", "step 1"]


def test_a_file_of_values_has_no_formulas_and_quotes_what_needs_it(script: Any) -> None:
    lines = [["=1+1", "@x", "-3", 'a "b", c', None, -3, 1e-300, "a\nb"]]
    assert script("downloads.js", f"page.asCsv({json.dumps(lines)})") == (
        '\'=1+1,\'@x,\'-3,"a ""b"", c",,-3,1e-300,"a\nb"\r\n'
    )


def test_a_name_that_is_too_long_for_a_picture_is_cut(script: Any) -> None:
    said = '[["loss", 4], ["loss", 3], ["x".repeat(10000), 6], ["😀".repeat(3), 2], ["ab", 0]]'
    found = script("downloads.js", f"{said}.map(([text, width]) => page.fitted(text, width, (it) => [...it].length))")
    assert found == ["loss", "lo…", "xxxxx…", "😀…", "…"]


def test_a_renamed_run_is_found_by_its_name_and_by_its_folder(script: Any) -> None:
    run = {"name": "the good one", "path": "trials/0007", "state": "done", "config": {}, "last": {}, "best": {}}
    searches = ["good", "0007", "path=trials/0007", 'name="the good one"', "0008", "name=trials/0007"]
    found = script(
        "query.js",
        f"((row) => {searches}.map((text) => page.parse(text, [row]).test(row)))(new page.Searched({json.dumps(run)}))",
    )
    assert found == [True, True, True, True, False, False]


def test_the_marks_of_epochs_are_those_of_each_run_in_its_colour(script: Any) -> None:
    epochs = {"a": [[1, 100]], "b": [[1, 50], [2, 100]], "c": [[1, 100]]}
    colours = {"a": "blue", "b": "green", "c": "red"}
    runs = [{"key": key, "colour": colours[key], "curves": {"epochs": epochs[key]}} for key in epochs]
    for standing in (None, "b"):
        chart = json.dumps({"hasMarks": True, "runs": runs, "standing": standing, "figure": {"dataset": {}}})
        drawn = script(
            "charts.js",
            f"((chart, drawn) => (page.Chart.prototype.drawMarks.call({{ ...chart, "
            f"drawMarksOf: (_, marks, own) => drawn.push([marks, own]) }}, null), drawn))({chart}, [])",
        )
        of_b = [epochs["b"], "green"]
        assert drawn == ([[epochs["a"], "blue"], of_b] if standing is None else [of_b])


def test_a_file_of_values_waits_until_all_rows_are_read(script: Any) -> None:
    row = {"steps": [1], "epochs": [1], "seconds": [0.5], "values": [0.25]}
    answers = [{"found": {}, "is_behind": True}, {"found": {"row": row}, "is_behind": False}]
    text = script(
        "downloads.js",
        "await (async (answers) => {"
        " let saved; globalThis.setTimeout = () => 0;"
        " globalThis.document = { createElement: () => ({ click() {} }) };"
        ' URL.createObjectURL = (blob) => ((saved = blob), "");'
        ' await page.saveCsv("loss", [{ key: "a b", name: "one" }], { read: async () => answers.shift() });'
        f" return saved.text(); }})({json.dumps(answers)})",
    )
    assert text == "run,kind,step,epoch,seconds,loss\r\none,row,1,1,0.5,0.25\r\n"


def test_names_are_sorted_by_the_numbers_in_them(script: Any) -> None:
    names = ["lr0.3", "lr0.03-w32", "lr0.03-w8", "lr1e-4", "run10", "run2", "lr", "lr0.1"]
    found = script("words.js", f"{names}.sort(page.byName)")
    assert found == ["lr", "lr1e-4", "lr0.03-w8", "lr0.03-w32", "lr0.1", "lr0.3", "run2", "run10"]


def test_a_search_takes_patterns_and_the_names_of_the_table_of_runs(script: Any) -> None:
    accuracies = {"adam-lr0.1-w8": 0.5, "adam-lr0.1-w16": 0.6, "sgd-lr0.1-w8": 0.9}
    runs = [
        {"name": name, "state": "done", "why": "the page", "last": {"evaluation.accuracy": value}}
        | {"best": {"evaluation.accuracy": value}, "config": {"a b c": value}}
        for name, value in accuracies.items()
    ]
    found: dict[str, list[str]] = {
        "adam-lr*w8": ["adam-lr0.1-w8"],
        "^(adam|lion)": ["adam-lr0.1-w8", "adam-lr0.1-w16"],
        "w(8": [],  # half typed
        '"eval accuracy">0.8': ["sgd-lr0.1-w8"],
        '"evaluated accuracy">0.8': ["sgd-lr0.1-w8"],
        "evaluation.accuracy>0.8": ["sgd-lr0.1-w8"],
        "eval accuracy>0.8": ["sgd-lr0.1-w8"],
        "adam best evaluated accuracy>0.5 w16": ["adam-lr0.1-w16"],
        "a b c<0.6": ["adam-lr0.1-w8"],
        '"adam" "w8" why="the page"': ["adam-lr0.1-w8"],
        "w8 name=adam": ["adam-lr0.1-w8"],
        "adam* run=adam-lr0.1-w8": ["adam-lr0.1-w8"],
        "run==adam-lr0.1-w8": ["adam-lr0.1-w8"],
    }
    each = "page.parse(text, rows.map(([, row]) => row)).test(row)"
    expression = f"{json.dumps([*found])}.map((text) => rows.filter(([, row]) => {each}).map(([name]) => name))"
    rows = f"{json.dumps(runs)}.map((run) => [run.name, new page.Searched(run)])"
    assert script("query.js", f"((rows) => {expression})({rows})") == [*found.values()]
    epochs = ": only ddp_loop runs has means over epochs."
    wrong = {
        '"epoch loss"<1': f"No column is called epoch loss{epochs}",
        "sgd epoch loss<1": f"No column is called epoch loss{epochs}",
        "eval accurcy>0.8": "No column is called eval accurcy.",
    }
    says = f"{json.dumps([*wrong])}.map((text) => page.parse(text, rows).says)"
    run = json.dumps(runs)
    assert script("query.js", f"((rows) => {says})({run}.map((run) => new page.Searched(run)))") == [*wrong.values()]


def test_the_table_names_an_objective_as_its_column_and_what_is_no_trial_a_run(script: Any) -> None:
    run = {"key": "a", "name": "a", "state": "done", "last": {"evaluation.loss": 1.0}, "best": {}, "config": {}}
    trial = run | {"trial": {"objective": "evaluation.loss", "value": 1.0}}
    titles = "page.columnsOf([new page.Trial(one)]).map(({ title }) => title).slice(0, 3)"
    found = script("trials.js", f"{json.dumps([run, trial])}.map((one) => {titles})")
    assert found == [["Run", "eval loss", "Status"], ["Trial", "Objective: eval loss", "eval loss"]]
