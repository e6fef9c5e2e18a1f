"""The list of runs: those below a folder, including later ones, their names in requests, and changes."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.monitor import run_list
from ddp_loop.monitor.run_list import RunList, RunSummary, Snapshot
from ddp_loop.reporting.run_records import find_runs
from tests.support.harness import count_calls
from tests.support.logged_files import append_lines
from tests.support.serving import ask, logged_line, row, running, served, write_lines, write_run

pytestmark = pytest.mark.covers("E4")


@pytest.fixture(autouse=True)
def _looks_each_time_at_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "READ_S", math.inf)
    monkeypatch.setattr(run_list, "LOOK_S", 0.0)


def runs_of(now: Snapshot, since: int | None = None) -> dict[str, Any]:
    """The runs of an event, by key."""
    return {run["key"]: run for run in json.loads(now.changes(since))["runs"]}


def summary_of(run: Path) -> Any:
    """What the list of its folder says of a run."""
    return runs_of(RunList([run.parent]).look())[run.name]


def write_trial(folder: Path, number: int = 0, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    trial = {"trial": number, "parameters": {"rate": 0.1}, "status": "waiting", "value": None, "why": None}
    (folder / "trial.json").write_text(json.dumps({**trial, "objective": "loss", "direction": "minimize", **facts}))
    return folder


# -- which runs --------------------------------------------------------------------------------------------


def test_a_folder_shows_the_runs_below_it_and_those_that_begin_later(tmp_path: Path) -> None:
    top = tmp_path / "sweep"
    runs = RunList([top])
    missing = "there is no such folder: Loop(run_dir=...) makes it and begins a run there"
    assert runs_of(runs.look())["sweep"]["says"] == missing
    write_run(top / "trials" / "0000", status="done")
    now = runs.look()
    assert list(runs_of(now)) == ["trials/0000"]
    assert json.loads(now.changes(0))["removed"] == ["sweep"]
    write_trial(top / "trials" / "0001")
    later = runs.look()
    assert list(runs_of(later, now.version)) == ["trials/0001"]
    assert runs_of(later)["trials/0001"]["says"] == "waiting for a slot"
    with running(top / "trials" / "0001"):
        begun = runs.look()
        assert {key: run["state"] for key, run in runs_of(begun, later.version).items()} == {"trials/0001": "running"}


def test_the_page_finds_the_runs_that_the_command_finds(tmp_path: Path) -> None:
    """A run's own folders have none, and any other folder may have such a name."""
    own = ("before/x", "tables/x", "checkpoints/x", "pictures/x")
    for name in ("a", "a/below", "b/c/d", *(f"a/{one}" for one in own), *own, ".x/y", "node_modules/x"):
        write_run(tmp_path / "top" / name)
    (tmp_path / "top" / "link").symlink_to(tmp_path / "top" / "a")
    found = [str(path.relative_to(tmp_path / "top")) for path in find_runs(tmp_path / "top")]
    listed = [run["name"] for run in runs_of(RunList([tmp_path / "top"]).look()).values()]
    assert listed == found == sorted(["a", "a/below", "b/c/d", *own])
    assert list(runs_of(RunList([tmp_path / "top" / "a"]).look())) == ["a"]  # one run, whatever lies below it


def test_a_removed_run_leaves_the_list_and_comes_back_under_its_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, status="done")
    runs = RunList([tmp_path])
    first = runs.look()
    shutil.rmtree(tmp_path / "a")
    second = runs.look()
    assert json.loads(second.changes(first.version)) == {
        "version": second.version, "all": False, "folders": [str(tmp_path)], "removed": ["a"], "runs": [],
    }  # fmt: skip
    assert runs.folder_of("a") is None
    write_run(tmp_path / "a", 2, status="done")
    third = runs.look()
    event = json.loads(third.changes(second.version))
    assert (event["removed"], [run["iteration"] for run in event["runs"]]) == ([], [2])
    assert json.loads(third.changes(first.version))["removed"] == []
    (tmp_path / "a" / "run.json").rename(tmp_path / "a" / "kept")  # for a moment, as a new run in this folder does
    assert list(runs_of(runs.look())) == ["a", "b"]


def test_keys_are_unique_stable_and_fit_an_address(tmp_path: Path) -> None:
    keys = {
        "a b": "a-b", "a#b": "a-b-2", "a?b": "a-b-3", "curves": "curves-", "läufe": "läufe", "q\"'<&>": "q-----",
        "rate=0.1,x": "rate=0.1,x", "stop": "stop-", "x%2fy": "x-2fy",
    }  # fmt: skip
    for name in keys:
        write_run(tmp_path / "top" / name)
    runs = RunList([tmp_path / "top"])
    assert {run["name"]: key for key, run in runs_of(runs.look()).items()} == keys
    shutil.rmtree(tmp_path / "top" / "a b")
    assert runs_of(runs.look())["a-b-3"]["name"] == "a?b"


def test_runs_of_two_folders_have_different_names_and_a_run_given_twice_is_one(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name)
    assert list(runs_of(RunList([tmp_path / "a", tmp_path / "b"]).look())) == ["a/run", "b/run"]
    given = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run", tmp_path / "a"]
    assert list(runs_of(RunList(given).look())) == ["run", "run-2"]


def test_folders_that_have_not_changed_are_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "old" / "a")
    for folder in (tmp_path / "old" / "a", tmp_path / "old", tmp_path):
        os.utime(folder, (1, 1))
    runs = RunList([tmp_path])
    runs.look()
    listed: list[str] = []
    usual = run_list.list_folder

    def listing(path: str, changed: int, was_run: bool) -> run_list.Listing:
        listed.append(path)
        return usual(path, changed, was_run)

    monkeypatch.setattr(run_list, "list_folder", listing)
    runs.look()
    assert listed == []
    write_run(tmp_path / "old" / "b")
    assert list(runs_of(runs.look())) == ["old/a", "old/b"]
    assert listed == [f"{tmp_path}/old", f"{tmp_path}/old/b"]


# -- a line ------------------------------------------------------------------------------------------------


def test_a_summary_has_what_the_list_and_the_results_show(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [row(k, accuracy=1 / k) for k in range(1, 21)], began=7.5,
                       config={"rate": 0.1, "deep": {"x": 1}, "on": True}, status="done", iteration=20, epochs=1,
                       steps_per_epoch=20, checkpoint="step-00000020")  # fmt: skip
    write_lines(folder / "evaluations.jsonl", [logged_line(20, accuracy=0.5)])
    logged = [logged_line(at, f1=at / 80, loss=9.0) for at in (10, 20)]
    write_lines(folder / "logged.jsonl", logged)  # a loss of the script's is not the curve's
    (folder / "note.txt").write_text("the good one")
    (folder / "tables").mkdir()
    (folder / "tables" / "confusion.json").write_text("{}")
    version = summary_of(tmp_path / "one").pop("version")
    assert version
    assert summary_of(tmp_path / "one") == {
        "key": "one",
        "name": "one",
        "path": "one",
        "folder": str(folder),
        "version": version,
        "state": "done",
        "says": "done at step 20, checkpoint saved",
        "fraction": 1.0,
        "iteration": 20,
        "steps": 20,
        "epoch": 1,
        "epochs": 1,
        "began": 7.5,
        "elapsed_s": 0,
        "last": {"f1": 0.25, "loss": 1 / 20, "accuracy": 1 / 20, "evaluation.accuracy": 0.5},
        "best": {"f1": 0.25, "loss": 1 / 20, "accuracy": 1.0, "evaluation.accuracy": 0.5},
        "config": {"rate": 0.1, "deep": "{'x': 1}", "on": True},
        "trial": None,
        "note": "the good one",
        "why": None,
        "tables": ["confusion"],
        "can_stop": False,
    }


def test_a_trial_has_the_state_of_its_sweep_and_runs_also_after_its_loop(tmp_path: Path) -> None:
    write_run(tmp_path / "0007", [row(1), row(2)], status="running", iteration=0)
    for status in ("pruned", "killed", "not finite", "timed out", "interrupted", "failed", "stopped"):
        write_trial(tmp_path / "0007", 7, status=status, value=0.25, why="because", attempts=[{"began": 3.0}])
        said = summary_of(tmp_path / "0007")
        assert (said["state"], said["config"], said["why"]) == (status, {"rate": 0.1}, "because")
        assert said["trial"] == {
            "number": 7, "value": 0.25, "status": status, "why": "because", "objective": "loss",
            "direction": "minimize", "can_again": status not in ("pruned", "interrupted"),
        }  # fmt: skip
    write_trial(tmp_path / "0007", 7, status="running")
    (tmp_path / "0007" / "status.json").write_text('{"status": "done"}')
    said = summary_of(tmp_path / "0007")
    assert (said["state"], said["can_stop"]) == ("running", False)


def test_a_whole_number_that_a_browser_would_round_is_a_text(tmp_path: Path) -> None:
    config = {"seed": 2**53 + 1, "below": -(2**63), "small": 2**53 - 1, "far": 1e100, "flag": True}
    folder = write_run(tmp_path / "one", status="done")
    (folder / "run.json").write_text(json.dumps({"config": config}))
    said = summary_of(tmp_path / "one")["config"]
    assert said == config | {"seed": "9007199254740993", "below": "-9223372036854775808"}


def test_a_damaged_trial_or_run_file_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", status="done")
    kinds = '{"parameters": 3, "config": 3, "attempts": [4], "status": ["x"], "value": "y", "began": "z"}'
    for text in ("[", "[1]", '"x"', kinds):
        (folder / "trial.json").write_text(text)
        (folder / "run.json").write_text(text)
        said = summary_of(tmp_path / "one")
        assert (said["state"], said["config"], said["began"]) == ("done", {}, None), text


def test_a_run_that_has_ended_is_read_again_only_when_a_file_of_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "one", status="done")
    summary = RunSummary("one", "one", run)
    assert summary.look(time.monotonic() + 9)
    read: list[str] = []
    usual = RunSummary._sum_up

    def sum_up(self: RunSummary) -> dict[str, Any]:
        read.append(self.key)
        return usual(self)

    monkeypatch.setattr(RunSummary, "_sum_up", sum_up)
    assert not summary.look(time.monotonic() + 9)
    assert read == []
    (run / "note.txt").write_text("seen")
    assert summary.look(time.monotonic() + 9)
    assert (read, summary.said["note"]) == (["one"], "seen")
    append_lines(run / "rows.jsonl", [row(2)])
    assert summary.look(time.monotonic() + 9)
    assert summary.said["last"] == {"loss": 1 / 2}


def test_what_one_look_has_no_time_for_the_next_one_reads(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", status="done")
    summary = RunSummary("one", "one", run)
    assert summary.look(time.monotonic() - 1)
    assert (summary.record.is_behind, summary.said["state"], summary.said["last"]) == (True, "done", {})
    assert summary.look(time.monotonic() + 9)
    assert (summary.record.is_behind, summary.said["last"]) == (False, {"loss": 1.0})


# -- many --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_1000_runs_are_found_and_looked_at_again_without_reading_them(tmp_path: Path) -> None:
    for number in range(1000):
        write_run(tmp_path / "trials" / f"{number:04}", 3, status="done")
    runs = RunList([tmp_path])
    while any(run.record.is_behind for run in runs._runs.values()) or not runs._runs:
        runs.look()
    before = runs.look()
    assert len(runs_of(before)) == 1000
    calls = count_calls(runs.look)
    assert calls["open"] == calls["read"] == calls["loads"] == 0
    assert calls.total() < 1000 * 200  # 105 for each run, in 30 us
    assert runs.look().version == before.version
    append_lines(tmp_path / "trials" / "0123" / "rows.jsonl", [row(4)])
    event = runs.look().changes(before.version)
    assert [run["key"] for run in json.loads(event)["runs"]] == ["trials/0123"]
    assert len(event) < 2000  # bytes: the other runs are not sent again


def test_a_request_can_name_each_run_below_a_folder_and_nothing_else(tmp_path: Path) -> None:
    top = tmp_path / "top"
    write_run(top / "trials" / "0000", status="done")
    write_run(top / "trials" / "0001", 2, status="done")
    write_run(tmp_path / "outside", status="done")
    with served(top) as page, page.client() as client:
        for key in ("trials/0001", "trials%2F0001"):
            assert client.get(f"/api/runs/{key}").json()["rows"] == 2
            assert client.get(f"/api/runs/{key}/curves").json()["x"] == [1, 2]
            assert client.post(f"/api/runs/{key}/stop").status_code == 409
        for path in ("trials", "trials/0002", "..%2foutside", "trials/../../outside", "%2e%2e/outside", "outside"):
            for what in ("", "/curves"):
                assert ask(page, "GET", f"/api/runs/{path}{what}", page.headers)[0] == 404
        assert ask(page, "GET", f"/api/runs/{tmp_path}/outside/curves", page.headers)[0] == 404


def test_known_runs_are_found_while_another_thread_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    runs = RunList([tmp_path])
    runs.look()
    found: list[Path | None] = []

    def look(self: RunSummary, deadline: float) -> bool:
        found.extend(map(runs.folder_of, ("a", "b")))
        return False

    monkeypatch.setattr(RunSummary, "look", look)
    monkeypatch.setattr(runs, "_looked", -10.0)
    runs.look()
    assert found == [tmp_path / "a", tmp_path / "b"] * 2
