"""What the monitor reads from a run folder: facts, curves, the run's state, and what cannot be read."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddp_loop.checkpoint import RunFolder, ask_to_stop, is_running
from ddp_loop.monitor.run_view import RunView
from ddp_loop.monitor.series import MOST_COLUMNS
from tests.support.harness import until
from tests.support.logged_files import append_lines
from tests.support.serving import logged_line, row, running, write_lines, write_run


def curves(view: RunView, points: int, first: int = 0, last: int = 10**12) -> dict[str, Any]:
    """A part of the curves without smoothing."""
    return view.curves(points=points, smoothing=0, first=first, last=last)


def test_curves_and_facts_of_a_run_are_those_of_its_files(client: httpx.Client, run: Path) -> None:
    write_lines(run / "evaluations.jsonl", [logged_line(10, accuracy=0.5, samples=100)])
    write_lines(run / "ranks.jsonl", [{"iteration": 9, "ranks": [{"rank": 0, "step_s": 0.2, "wait_s": 0.1}]}])
    said = client.get("/api/runs/one").json()
    assert (said["key"], said["folder"], said["rows"]) == ("one", str(run), 20)
    assert said["last"] == row(20)
    assert said["by_rank"] == [{"rank": 0, "step_s": 0.2, "wait_s": 0.1, "memory_mib": None}]
    assert (said["ranks"], said["device"], said["elapsed_s"]) == (2, "cpu", 0)
    curves = client.get("/api/runs/one/curves", params={"smoothing": 4}).json()
    assert curves["x"] == list(range(1, 21))
    assert curves["curves"]["loss"] == [1 / k for k in range(1, 21)]
    assert len(curves["smoothed"]["loss"]) == 20
    assert curves["evaluated_x"] == [10]
    assert curves["evaluated"] == {"accuracy": [0.5], "samples": [100.0]}


PROFILE = {
    "heading": "20 steps",
    "phases": ["data", "forward"],
    "ranks": [{"rank": rank, "step_s": 0.3, "phases": {"data": 0.1, "forward": 0.2}} for rank in range(2)],
    "hints": ["33 % of the step waits for data."],
}


def test_names_beyond_those_that_a_card_shows_are_counted_in_each_file(run: Path) -> None:
    many = {f"norm/{number}": 1.0 for number in range(MOST_COLUMNS + 3)}
    for name in ("evaluations.jsonl", "logged.jsonl"):
        write_lines(run / name, [{"epoch": 1, "iteration": 10, **many}])
    problems = RunView("one", run).summary()["problems"]
    assert problems == [f"{name}: 3 more metrics are left out" for name in ("evaluations.jsonl", "logged.jsonl")]


def test_a_damaged_profile_is_left_out_and_a_large_one_cut(run: Path) -> None:
    def shown(profile: object) -> Any:
        (run / "profile" / "profile.json").write_text(json.dumps(profile))
        return RunView("one", run).summary()["profile"]

    (run / "profile").mkdir()
    damaged: list[dict[str, Any]] = [
        {"ranks": []}, {"ranks": None}, {"ranks": [7, {"rank": 0, "phases": 3}]}, {"phases": "data"}, {"hints": 3},
    ]  # fmt: skip
    for profile in ({}, [], "text", *(PROFILE | one for one in damaged)):
        assert shown(profile) is None, profile
    ranks = [{"rank": rank, "step_s": "soon", "phases": {"data": 1e999, "forward": []}} for rank in range(1000)]
    found = shown(PROFILE | {"ranks": ranks, "hints": ["x" * 10_000, 4, None], "heading": 5})
    assert found["rows"] == [[rank, None, None, None] for rank in range(64)]
    assert ([len(hint) for hint in found["hints"]], found["heading"]) == ([2000], None)


def test_the_curves_of_the_metrics_that_were_asked_for_come_with_the_names_of_all(
    client: httpx.Client, run: Path
) -> None:
    write_lines(run / "evaluations.jsonl", [logged_line(20, score=0.5)])
    write_lines(run / "logged.jsonl", [logged_line(20, f1=0.25)])

    def ask(metrics: str) -> Any:
        asked = {"metrics": metrics, "smoothing": "4"}
        return client.get("/api/runs/one/curves", params=asked)

    found = ask('["loss", "score", "none"]').json()
    assert found["names"] == ["samples", "loss", "score", "f1"]
    parts = [list(found[part]) for part in ("curves", "smoothed", "evaluated", "logged")]
    assert parts == [["loss"], ["loss"], ["score"], []]
    assert list(ask('["f1"]').json()["logged"]) == ["f1"]
    assert ask("[]").json()["curves"] == {}
    for bad in ("loss", "{}", "[1]", "[" * 10_000, json.dumps(["x"] * 201)):
        answer = ask(bad)
        assert (answer.status_code, answer.text) == (400, "metrics must be a list of names, as JSON.")


def test_a_long_run_is_thinned_out_and_a_part_of_it_is_exact(tmp_path: Path) -> None:
    view = RunView("long", write_run(tmp_path / "long", 20_000))
    until(lambda: view.summary()["rows"] == 20_000, "all rows are read")
    whole = curves(view, 500)
    assert len(whole["x"]) <= 500
    assert (whole["x"][-1], whole["curves"]["loss"][-1]) == (20_000, 1 / 20_000)
    assert len(whole["epochs"]) <= 60
    part = curves(view, 500, 1000, 1099)
    assert part["x"] == list(range(999, 1101))
    assert part["epochs"] == whole["epochs"]
    assert whole["epochs"][:2] == [[4, 400], [8, 800]]  # of 199


@pytest.mark.parametrize(
    ("status", "state", "says"),
    [
        ({"status": "done", "iteration": 20, "checkpoint": "step-00000020"}, "done",
         "done at step 20, checkpoint saved"),
        ({"status": "stopped", "iteration": 20, "checkpoint": "step-00000020-2"}, "stopped",
         "stopped at step 20, checkpoint saved"),
        ({"status": "stopped", "iteration": 20, "checkpoint": "step-00000015"}, "stopped",
         "stopped at step 20, last checkpoint at step 15"),
        ({"status": "stopped", "iteration": 20}, "stopped", "stopped at step 20, no checkpoint"),
        ({"status": "left", "iteration": 20, "checkpoint": None}, "left",
         "left by its script at step 20, no checkpoint"),
        ({"status": "failed", "rank": 1, "step": 21, "stage": "backward", "why": "ValueError: x"}, "failed",
         "failed on rank 1 in step 21 (backward)"),
        ({"status": "failed", "rank": -1, "step": "?"}, "failed", "failed on a rank"),
        ({"status": "running", "iteration": 0}, "lost",
         "ended after step 20 without a status: its process no longer runs"),
        ({"status": ["no", "word"]}, "lost", "ended after step 20 without a status: its process no longer runs"),
        ({}, "waiting", "no run has begun in this folder yet: Loop(run_dir=...) begins one here"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_described_in_words(tmp_path: Path, status: dict[str, Any], state: str, says: str) -> None:
    said = RunView("one", write_run(tmp_path / "one", [row(k) for k in range(1, 21)], **status)).summary()
    assert (said["state"], said["says"]) == (state, says)
    assert said["why"] == status.get("why")
    goes_on = "cd /home/me && torchrun --nproc_per_node=2 lab/train.py --run 'runs/the one'"
    assert said["continue"] == (goes_on if state in ("stopped", "left", "failed", "lost") else None)


@pytest.mark.covers("J6")
def test_the_way_on_is_the_command_that_started_the_run(tmp_path: Path) -> None:
    start = ["python", "-m", "ddp_loop", "run", "--ranks", "2", "train.py", "--run", "the one"]
    run = write_run(tmp_path / "one", status="stopped", start=start, directory="/home/my lab")
    way = "cd '/home/my lab' && python -m ddp_loop run --ranks 2 train.py --run 'the one'"
    assert RunView("one", run).summary()["continue"] == way
    long = write_run(tmp_path / "two", status="stopped", start=[*start, "x" * 30_000], directory="/lab")
    assert len(RunView("two", long).summary()["continue"]) < 300


def test_how_far_a_run_is_and_how_long_it_takes(tmp_path: Path) -> None:
    with running(tmp_path / "one", epochs=4):
        write_lines(tmp_path / "one" / "rows.jsonl", [row(k) for k in range(1, 101)])
        view = RunView("one", tmp_path / "one")
        said = view.summary()
        assert (said["state"], said["can_stop"], said["steps"], said["fraction"]) == ("running", True, 400, 0.25)
        assert (said["elapsed_s"], said["remaining_s"]) == (1, 3)  # 100 rows in a second, 300 to come
        assert said["samples_per_s"] == pytest.approx(1000)
        ask_to_stop(tmp_path / "one", "a test")
        said = RunView("one", tmp_path / "one").summary()
        found = [said[name] for name in ("state", "says", "why", "can_stop")]
        assert found == ["stopping", "stopping…", "a test", False]


@pytest.mark.slow
def test_missing_and_unreadable_files_are_reported(client: httpx.Client, run: Path) -> None:
    def look() -> dict[str, Any]:
        said: dict[str, Any] = client.get("/api/runs/one").json()
        return said

    with (run / "rows.jsonl").open("a") as file:
        file.write('{"loss": 1}\n[]\nnot a row\n{"iteration": 21, "loss": null}\n{"iteration": 22, "lo')
    said = look()
    assert (said["rows"], said["last"]["iteration"]) == (21, 21)
    assert said["problems"] == [
        "rows.jsonl: 2 lines cannot be read, the first is line 22",
        "rows.jsonl: the last line is half-written and left out (21 bytes)",
        "rows.jsonl: 1 rows have no iteration and are left out",
        "1 loss is not finite",
    ]
    (run / "run.json").write_text("[")
    (run / "status.json").write_bytes(b"\xff")
    assert until(lambda: look()["state"] == "waiting", "no status")
    shutil.rmtree(run)
    said = until(lambda: (said := look())["state"] == "gone" and said, "the folder is gone")
    assert (said["says"], said["rows"]) == ("this run folder was removed", 21)
    assert client.get("/api/runs/one/curves").json()["x"][-1] == 21  # what was read stays
    assert client.post("/api/runs/one/stop").status_code == 409
    write_run(run, status="done")
    said = until(lambda: (said := look())["state"] == "done" and said, "another run of this folder")
    assert (said["rows"], said["problems"]) == (1, [])


def test_a_resumed_run_is_read_again_and_evaluations_that_are_gone_are_news(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 20)
    write_lines(run / "evaluations.jsonl", [logged_line(3, accuracy=0.5)])
    view = RunView("one", run)
    before = view.summary()["version"]
    write_lines(run / "rows.jsonl", [row(k) for k in range(1, 16)] + [row(k, loss=9.0) for k in range(16, 21)])
    said = until(lambda: (said := view.summary())["last"]["loss"] == 9.0 and said, "it was read again")
    assert said["rows"] == 20
    assert said["version"] != before  # although there are as many rows
    curves = view.curves(100, 0, 0, 10)
    assert curves["evaluated"] == {"accuracy": [0.5]}
    (run / "evaluations.jsonl").write_text("")
    after = view.curves(100, 0, 0, 10)
    assert after["evaluated"] == {}
    assert after["version"] != curves["version"]


def test_a_part_of_a_smoothed_curve_is_that_of_the_whole(tmp_path: Path) -> None:
    view = RunView("one", write_run(tmp_path / "one", [row(k, loss=float(k % 7)) for k in range(1, 201)]))
    whole, part = view.curves(500, 50, 0, 300), view.curves(500, 50, 150, 160)
    assert part["x"] == list(range(149, 162))
    assert part["smoothed"]["loss"] == whole["smoothed"]["loss"][148:161]
    assert view.curves(500, 1, 0, 300)["smoothed"] == {}  # a mean over one step is no other curve


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: elsewhere the lock can be looked at only by taking it"
)
def test_looking_at_a_run_folder_takes_no_lock_that_a_run_needs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It did once, for 10 microseconds: 3 of 200 runs that began while a page looked all the time were refused.
    RunFolder(run, {}, True).close()
    taken: list[int] = []
    monkeypatch.setattr("ddp_loop.checkpoint.file_locks._lock_file", taken.append)
    assert not is_running(run)
    assert taken == []


def test_evaluations_are_thinned_out_and_a_part_of_them_is_exact(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 20)
    lines = [logged_line(k, loss=abs(k - 2500)) for k in range(1, 5001)]
    write_lines(run / "evaluations.jsonl", lines)
    view = RunView("one", run)
    until(lambda: not view.summary()["problems"], "all lines are read")
    found = curves(view, 300)
    values = found["evaluated"]["loss"]
    assert len(found["evaluated_x"]) == len(found["evaluated_steps"]) == len(values) <= 300
    assert (min(values), max(values), values[-1], found["evaluated_steps"][-1]) == (0, 2500, 2500, 5000)
    part = curves(view, 300, 100, 101)
    assert (part["evaluated_x"], part["evaluated"]["loss"]) == ([99, 100, 101, 102], [2401, 2400, 2399, 2398])


@pytest.mark.covers("J7")
def test_logged_values_have_their_own_steps_and_are_thinned_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 20)
    lines = [logged_line(k, often=k / 2) for k in range(1, 5001)]
    lines[9] |= {"constructor": 0.5, "no number": None}
    write_lines(run / "logged.jsonl", [logged_line(0, before=1), *lines])
    view = RunView("one", run)
    until(lambda: not view.summary()["problems"], "all lines are read")
    logged = curves(view, 300)["logged"]
    assert logged["constructor"] == [[10], [0.5], [10]]
    assert logged["before"] == [[0], [1.0], [0]]
    assert logged["no number"] == [[], [], []]
    assert "elapsed_s" not in logged
    assert len(logged["often"][0]) == len(logged["often"][1]) <= 300
    assert [part[-1] for part in logged["often"]] == [5000, 2500.0, 5000]
    part = curves(view, 300, 100, 102)["logged"]
    assert part["often"] == [[100, 101, 102], [50.0, 50.5, 51.0], [100, 101, 102]]
    version = view.summary()["version"]
    append_lines(run / "logged.jsonl", [logged_line(5000, later=3)])
    until(lambda: view.summary()["version"] != version, "the new line is read")
    assert curves(view, 300)["logged"]["later"] == [[5000], [3.0], [5000]]
