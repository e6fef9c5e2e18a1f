"""Notes, tables and sweeps: what the page may read and write, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ddp_loop.checkpoint import FileLock
from ddp_loop.monitor.app import BODY_BYTES
from tests.support.harness import until
from tests.support.serving import Served, ask, served
from tests.support.sweep_folders import write_sweep

RUN = "/api/runs/trials/0000"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "digits", 5, statuses={1: "failed", 2: "killed", 3: "waiting", 4: "interrupted"})


@pytest.fixture
def page(sweep: Path) -> Iterator[Served]:
    with served(sweep) as page:
        yield page


# -- notes and names ---------------------------------------------------------------------------------------

LETTERS = {"note": 500, "name": 100}
EACH = pytest.mark.parametrize("what", LETTERS)


@EACH
@pytest.mark.covers("G4", "E4")
def test_a_note_and_a_name_are_written_whole_changed_and_removed(client: httpx.Client, sweep: Path, what: str) -> None:
    path = sweep / "trials" / "0000" / f"{what}.txt"
    start = "<b>bold</b> & \u00fc \u20ac \U0001f642"
    for text in ("the best so far", "x" * LETTERS[what], start + "\U0001f642" * (LETTERS[what] - len(start))):
        answer = client.post(f"{RUN}/{what}", content=text.encode())
        assert (answer.status_code, answer.json()) == (200, {what: text})
        assert path.read_text() == text

    def listed() -> dict[str, str | None]:
        return {run["key"]: run[what] for run in client.get("/api/runs").json()["runs"]}

    until(lambda: listed()["trials/0000"] == text, "the list has the text")
    assert listed()["trials/0001"] == (None if what == "note" else "trials/0001")
    assert {run["path"] for run in client.get("/api/runs").json()["runs"]} == {f"trials/000{k}" for k in range(5)}
    assert client.post(f"{RUN}/{what}", content=b" \n ").json() == {what: None}
    assert not path.exists()
    until(lambda: listed()["trials/0000"] == (None if what == "note" else "trials/0000"), "the text is gone")
    assert client.post(f"{RUN}/{what}", content=b"").status_code == 200
    assert not [one for one in path.parent.iterdir() if one.name.startswith((".note", ".name"))]


@EACH
def test_a_note_and_a_name_have_no_control_characters_and_are_files_of_their_run(
    client: httpx.Client, sweep: Path, tmp_path: Path, what: str
) -> None:
    path, other = sweep / "trials" / "0000" / f"{what}.txt", tmp_path / "other.txt"
    for body, status in ((b"x" * 501, 400), (b"\xff\xfe", 400), (b"x" * (BODY_BYTES + 1), 413)):
        answer = client.post(f"{RUN}/{what}", content=body)
        assert answer.status_code == status
        assert len(body) != 501 or answer.text == f"A {what} has at most {LETTERS[what]} letters. This one has 501."
        assert not path.exists()
    other.write_text("untouched")
    path.symlink_to(other)
    answer = client.post(f"{RUN}/{what}", content="a\x1b[31m\tb\u202ec\nd\x00".encode())
    assert (answer.json(), other.read_text()) == ({what: "a [31m b c d"}, "untouched")


def test_a_name_that_comes_from_elsewhere_is_one_line_of_what_is_seen(client: httpx.Client, sweep: Path) -> None:
    (sweep / "trials" / "0000" / "name.txt").write_text("a\x1b[2J\nb\u202ec" + "x" * 5000)
    first = client.get("/api/runs").json()["runs"][0]
    assert (first["name"], first["path"]) == ("a [2J b c" + "x" * 91, "trials/0000")


# -- tables ------------------------------------------------------------------------------------------------


HOSTILE = (
    "{", "[]", "[" * 100_000,
    '{"rows": [], "columns": []}',
    '{"rows": ["a"], "columns": ["a"], "values": [[1, 2]]}',
    json.dumps({"rows": ["a"] * 1000, "columns": ["a"], "values": [[1]] * 1000}),
    json.dumps({"rows": [1] * 1000, "columns": [2] * 1000, "values": [[0] * 1000] * 1000}),
)  # fmt: skip


def test_a_damaged_table_is_an_error(client: httpx.Client, sweep: Path) -> None:
    for content in HOSTILE:
        (sweep / "trials" / "0000" / "tables" / "odd.json").write_text(content)
        answer = client.get(f"{RUN}/tables/odd")
        assert answer.status_code == 422
        assert answer.text.startswith(("The table odd ", "The values of the table odd "))
        assert len(answer.text) < 500


@pytest.mark.covers("G4")
def test_labels_are_short_texts_and_values_numbers_or_none(client: httpx.Client, sweep: Path) -> None:
    table = client.get(f"{RUN}/tables/confusion").json()
    assert table["rows"] == table["columns"] == [str(k) for k in range(10)]
    assert ([len(one) for one in table["values"]], table["iteration"]) == ([10] * 10, 10)
    odd = {"rows": ["<b>" + "x" * 1000], "columns": [None, "__proto__", 3], "values": [["1", float("nan"), 1e308]]}
    (sweep / "trials" / "0000" / "tables" / "odd.json").write_text(json.dumps(odd))
    table = client.get(f"{RUN}/tables/odd").json()
    assert [len(table["rows"][0]), table["columns"]] == [60, ["None", "__proto__", "3"]]
    assert table["values"] == [[None, None, None]]


def test_no_other_file_is_read_as_a_table(page: Served, client: httpx.Client, sweep: Path, tmp_path: Path) -> None:
    tables = sweep / "trials" / "0000" / "tables"
    (tmp_path / "secret.json").write_text('{"rows": [], "columns": [], "values": []}')
    (tables / "link.json").symlink_to(tmp_path / "secret.json")
    os.mkfifo(tables / "pipe.json")
    assert client.get(f"{RUN}/tables/link").status_code == 404
    assert client.get(f"{RUN}/tables/pipe").status_code in (404, 422)
    for name in ("none", ".hidden", "..%2frun", "%2e%2e%2ftrial", "../trial", "a" * 200):
        assert ask(page, "GET", f"{RUN}/tables/{name}", page.headers)[0] == 404, name


# -- sweeps ------------------------------------------------------------------------------------------------


@pytest.mark.covers("G4", "G5")
def test_a_sweep_is_known_by_its_trials_and_stops_only_while_a_worker_runs(client: httpx.Client, sweep: Path) -> None:
    one = client.get("/api/sweeps").json()["sweeps"]
    found = [(of["key"], of["trials"], of["objective"], of["is_active"], len(of["runs"])) for of in one]
    assert found == [("digits", 5, "loss", False, 5)]
    answer = client.post("/api/sweeps/digits/stop")
    assert (answer.status_code, (sweep / "stop").exists()) == (409, False)
    with closing(FileLock(sweep / "lock", "sweep")):
        assert client.get("/api/sweeps").json()["sweeps"][0]["is_active"]
        assert client.post("/api/sweeps/digits/stop").status_code == 202
        assert (sweep / "stop").read_text() == "the page"
        assert client.get("/api/sweeps").json()["sweeps"][0]["is_stopping"]


@pytest.mark.covers("G5")
def test_only_failed_trials_can_be_run_again(client: httpx.Client, sweep: Path) -> None:
    runs = client.get("/api/runs").json()["runs"]
    assert [run["trial"]["can_again"] for run in runs] == [False, True, True, False, False]
    answer = client.post("/api/sweeps/digits/again", json={"trials": [2, 1, 2]})
    assert (answer.status_code, answer.json()) == (202, {"asked": 2, "is_active": False})
    assert [json.loads(path.read_text()) for path in (sweep / "again").iterdir()] == [{"trials": [1, 2]}]
    assert client.post("/api/sweeps/digits/again", json={"trials": [4]}).status_code == 409  # resumes by itself
    for trials, status in ([0], 409), ([1, 3], 409), ([7], 404), ([-1], 400), ([True], 400), ([], 400), ("1", 400):
        assert client.post("/api/sweeps/digits/again", json={"trials": trials}).status_code == status, trials
    for body in (b"", b"{", b"[1]", b"[" * 2000):
        assert client.post("/api/sweeps/digits/again", content=body).status_code == 400
    assert len(list((sweep / "again").iterdir())) == 1


def test_the_page_of_some_trials_cannot_reach_their_sweep(sweep: Path) -> None:
    some = [sweep / "trials" / "0000", sweep / "trials" / "0001"]
    with closing(FileLock(sweep / "lock", "sweep")):
        with served(*some) as page, page.client() as client:
            assert len(client.get("/api/runs").json()["runs"]) == 2
            assert client.get("/api/sweeps").json() == {"sweeps": []}
            assert client.post("/api/sweeps/digits/stop").status_code == 404
            assert client.post("/api/sweeps/digits/again", json={"trials": [1]}).status_code == 404
        with served(sweep.parent) as page, page.client() as client:
            assert client.post("/api/sweeps/digits/stop").status_code == 202


def test_two_sweeps_of_one_name_have_two_keys(tmp_path: Path) -> None:
    first, second = (write_sweep(tmp_path / name / "digits", 1) for name in "ab")
    with served(tmp_path) as page, page.client() as client:
        found = client.get("/api/sweeps").json()["sweeps"]
        assert {one["folder"]: one["key"] for one in found} == {str(first): "digits", str(second): "digits-2"}
        assert client.get("/api/sweeps").json()["sweeps"] == found
