"""Run folders with damaged and hostile files: every view of them answers, and other runs are unharmed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import FileLock, ask_to_stop
from ddp_loop.monitor import run_list
from ddp_loop.monitor.app import MonitorApp, _sent
from ddp_loop.monitor.sweep_view import Answer, Refused, read_table, stop_from_page, write_text
from ddp_loop.reporting import RunQuery, best_run, list_runs
from tests.support.logged_files import add_image, add_texts, add_usage
from tests.support.serving import row
from tests.support.sweep_folders import write_sweep

KEY, OTHER = "trials/0000", "trials/0001"
DEEP = "[" * 900 + "]" * 900
TEXTS = {  # as JSON
    "null": "null", "true": "true", "text": '"running"', "empty": '""', "list": "[]", "object": "{}",
    "NaN": "NaN", "infinity": "-Infinity", "too large": "1e999", "large": "1e308", "negative": "-1",
    "300 digits": "9" * 300, "4000 digits": "9" * 4000, "half a surrogate": '"\\ud800"', "zero byte": '"\\u0000"',
    "escape": '"\\u001b[2J<b>"', "deep": DEEP, "prototype": '{"__proto__": {"constructor": 1}}',
    "nested": '[{"a": [1]}]',
}  # fmt: skip


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "LOOK_S", 0.0)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = write_sweep(tmp_path / "digits", 2)
    run = folder / KEY
    (run / "run.json").write_text(json.dumps({"id": "0" * 16, "began": 1.0, "config": {"rate": 0.1}}))
    attempt = {"host": "a", "process": 1, "slot": 0, "began": 1.0, "ended": 2.0, "status": "done"}
    trial = json.loads((run / "trial.json").read_text())
    (run / "trial.json").write_text(json.dumps(trial | {"attempts": [attempt], "why": "so"}))
    (run / "evaluations.jsonl").write_text(json.dumps(row(10, accuracy=0.5)) + "\n")
    ranks = {"ranks": [{"rank": 0, "step_s": 0.1, "wait_s": 0.01, "memory_mib": 1.0}]}
    (run / "ranks.jsonl").write_text(json.dumps(ranks) + "\n")
    add_texts(run, (1, "sample", "text"))
    add_image(run, 1, "digits")
    add_usage(run, 0, [(5.0, 100.0, 200.0)])
    (run / "profile").mkdir()
    profile = {"phases": ["a"], "ranks": [{"rank": 0, "step_s": 0.1, "phases": {"a": 1.0}}], "hints": ["b"]}
    (run / "profile" / "profile.json").write_text(json.dumps(profile | {"heading": "c"}))
    return folder


NAMES = ", ".join(  # of parameters or metrics: columns of a table, attributes of every object of JavaScript
    f'"{name}": 0.5'
    for name in (
        "name", "state", "status", "objective", "value", "steps", "of steps", "time", "note", "why", "folder", "trial",
        "best loss", "eval loss", "best eval loss", "loss", "config.rate", "__proto__", "constructor", "toString", "",
        "\\u001b[2J", "\\ud800", "<b>", "a\\nb", "x" * 5000,
    )
)  # fmt: skip
NAMES = f"{{{NAMES}}}"
FILES = (
    "run.json", "trial.json", "status.json", "../../sweep.json", "tables/confusion.json", "profile/profile.json",
    "rows.jsonl", "evaluations.jsonl", "ranks.jsonl", "texts.jsonl", "images.jsonl", "usage/rank-0.jsonl",
)  # fmt: skip


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a value of JSON, but the 2nd and later ones of a list."""
    yield at
    parts = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*at, name))


def replaced(value: Any, at: tuple[Any, ...], mark: str) -> Any:
    if not at:
        return mark
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(copy[at[0]], at[1:], mark)
    return copy


PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("texts", {}), ("texts", {"number": "0"}), ("images", {}), ("usage", {}), ("console", {"name": "rank-0"}),
)  # fmt: skip


def panel(site: MonitorApp, what: str, **asked: str) -> tuple[int, str]:
    return as_text(site.panels(site.folder_of(KEY)).answer(what, asked))


def table_of(site: MonitorApp) -> Answer:
    return read_table(site.folder_of(KEY), "confusion")


def as_text(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    return status, body if isinstance(body, str) else json.dumps(body, allow_nan=False)


def read_all(sweep: Path, site: MonitorApp) -> None:
    """Every view of the runs returns JSON, and that of the other run is complete."""
    runs = {run["key"]: run for run in json.loads(site.runs.look().changes(), parse_constant=pytest.fail)["runs"]}
    assert (runs[OTHER]["state"], runs[OTHER]["iteration"]) == ("done", 4)
    for status, body in map(as_text, (
        site.card(KEY), site.sweeps(), table_of(site),
        *(site.curves(KEY, asked) for asked in ({}, {"smoothing": "10"}, {"axis": "epoch"}, {"axis": "time"})),
        *(site.values(KEY, name) for name in ("loss", "__proto__")),
        site.ask_sweep("digits", "again", b'{"trials": [0]}'),
        *(panel(site, what, **asked) for what, asked in PANELS),
    )):  # fmt: skip
        _sent(status, body)
        assert status in (200, 409, 422) or body.startswith("There is no"), body
        if status == 200:
            json.loads(body, parse_constant=pytest.fail)
    assert site.panels(site.folder_of(KEY)).image("0")[0] in (200, 404, 422)
    lines: list[str] = []
    list_runs(RunQuery(sweep, sort="loss"), lines.append, file=sweep / "out.csv")
    best_run(sweep, lines.append)
    best_run(sweep, lines.append, by="loss")
    assert "\x1b" not in "".join(lines)


def put(sweep: Path, name: str, at: tuple[Any, ...], text: str) -> None:
    """Replace a value of a trial's file, of the last line where it has several, by JSON."""
    path = sweep / KEY / name
    *before, last = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    content = json.dumps(replaced(json.loads(last), at, "\0here")).replace('"\\u0000here"', text)
    path.write_text("\n".join([*before, content]) + "\n")


FATAL = {  # each of these once ended the page of all runs
    "began": ("trial.json", ("attempts", 0, "began"), "NaN"),
    "status": ("trial.json", ("status",), TEXTS["half a surrogate"]),
    "parameter": ("trial.json", ("parameters", "rate"), TEXTS["half a surrogate"]),
    "name": ("../../sweep.json", ("name",), TEXTS["escape"]),
    "not a number of seconds": ("rows.jsonl", ("elapsed_s",), "NaN"),
    "endless": ("evaluations.jsonl", ("elapsed_s",), "1e999"),
    "names": ("trial.json", ("parameters",), NAMES),
    "metrics": ("rows.jsonl", (), f'{{"iteration": 4, "loss": 1, "elapsed_s": 1, {NAMES[1:]}'),
    "evaluations": ("evaluations.jsonl", (), f'{{"iteration": 4, "elapsed_s": 1, {NAMES[1:]}'),
}


@pytest.mark.parametrize("case", FATAL)
def test_a_damaged_value_of_one_run_leaves_all_runs_on_the_page(sweep: Path, case: str) -> None:
    site = MonitorApp([sweep])
    read_all(sweep, site)
    put(sweep, *FATAL[case])
    read_all(sweep, site)
    read_all(sweep, MonitorApp([sweep]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_value_of_another_kind_anywhere_leaves_all_runs_on_the_page(sweep: Path, name: str) -> None:
    site, path = MonitorApp([sweep]), sweep / KEY / name
    whole = path.read_text()
    for at in places(json.loads(whole.splitlines()[-1] if name.endswith("l") else whole)):
        for kind, text in TEXTS.items():
            put(sweep, name, at, text)
            try:
                read_all(sweep, site)
            except Exception as error:
                raise AssertionError(f"{name}: {at} is {kind}") from error
            path.write_text(whole)


@pytest.mark.parametrize("size", [0, 1, 20, 60])
@pytest.mark.parametrize("name", FILES)
def test_half_of_a_file_leaves_all_runs_on_the_page(sweep: Path, name: str, size: int) -> None:
    site, path = MonitorApp([sweep]), sweep / KEY / name
    read_all(sweep, site)
    path.write_bytes(path.read_bytes()[:size])
    read_all(sweep, site)


# -- files that are none ------------------------------------------------------------------------------------

ODD = (
    "run.json",
    "trial.json",
    "status.json",
    "note.txt",
    "name.txt",
    "rows.jsonl",
    "lock",
    "stop",
    "profile/profile.json",
)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to nothing"])
def test_reading_does_not_wait_for_pipes_and_other_special_files(sweep: Path, name: str, kind: str) -> None:
    path = sweep / KEY / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else sweep / "nothing")
    with closing(FileLock(sweep / KEY / "lock", "run")) if name == "stop" else nullcontext():  # so it is stopping
        read_all(sweep, MonitorApp([sweep]))


def test_a_note_and_a_reason_are_read_from_the_run_folder_only(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    for name in ("note.txt", "name.txt", "stop"):
        (sweep / KEY / name).symlink_to(tmp_path / "secret")
    site = MonitorApp([sweep])
    with closing(FileLock(sweep / KEY / "lock", "run")):
        (sweep / KEY / "run.json").touch()
        card = json.loads(as_text(site.card(KEY))[1])
        assert (card["state"], card["why"]) == ("stopping", None)
        assert "secret" not in site.runs.look().changes()
        assert stop_from_page(ask_to_stop, site.folder_of(KEY), "The run folder")[0] == 202
        assert json.loads(as_text(site.card(KEY))[1])["why"] == "the page"
    assert (tmp_path / "secret").read_text() == "a secret"
    for what in ("note", "name"):
        assert write_text(site.folder_of(KEY), what, b"mine")[0] == 200
    assert (tmp_path / "secret").read_text() == "a secret"


# -- folders that come and go -------------------------------------------------------------------------------


def test_runs_may_vanish_while_they_are_looked_at(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, spare = MonitorApp([sweep]), sweep.parent / "spare"
    shutil.copytree(sweep / KEY, spare)
    for name in ("open", "scandir", "stat"):
        for turn in range(1, 60):
            shutil.rmtree(sweep / KEY, ignore_errors=True)
            shutil.copytree(spare, sweep / KEY)
            with monkeypatch.context() as patch:
                calls = vanish_at(sweep / KEY, patch, name, turn)
                runs = json.loads(site.runs.look().changes())["runs"]
                for act in (partial(site.card, KEY), partial(site.curves, KEY, {}), partial(table_of, site)):
                    with suppress(Refused):  # the run is known no more
                        assert act()[0] in (200, 404)
            assert {run["key"]: run["state"] for run in runs}[OTHER] == "done"
            if len(calls) < turn:
                break
        assert 2 < turn < 59, name


def vanish_at(run: Path, patch: pytest.MonkeyPatch, name: str, turn: int) -> list[str]:
    """Have the run removed just before a function of `os` is called for the turn-th time for it; list these calls."""
    usual, calls = getattr(os, name), list[str]()

    def vanishing(path: Any, *args: Any, **keywords: Any) -> Any:
        if str(path).startswith(str(run)):
            calls.append(str(path))
            if len(calls) == turn:
                run.rename(run.parent.parent.parent / f"removed-{name}-{turn}")
        return usual(path, *args, **keywords)

    patch.setattr(os, name, vanishing)
    return calls
