"""The requests of a card's panels: their answers, what they refuse, and hostile content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddp_loop.monitor.app import BODY_BYTES, TOKEN_HEADER
from ddp_loop.monitor.continuing import command_of
from tests.support.harness import until
from tests.support.logged_files import (
    add_image,
    add_texts,
    add_usage,
    append_lines,
    python_command,
    write_console,
    write_start,
)
from tests.support.serving import TOKEN, Served, ask

EVIL = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
OWN = {TOKEN_HEADER: TOKEN}
PATHS = ("console?name=rank-0", "usage", "texts", "texts?number=0", "images", "images/0")


@pytest.fixture
def full(run: Path) -> Path:
    """The run with something in each panel."""
    write_console(run, "printed\n")
    add_usage(run, 0, [(5.0, 100.0, 200.0)])
    add_texts(run, (1, "sample", "one"), (2, "sample", "two"), (2, EVIL, EVIL))
    add_image(run, 1, "digits")
    return run


def read(client: httpx.Client, path: str) -> Any:
    answer = client.get(f"/api/runs/one{path}", headers=OWN)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.covers("E4")
def test_the_card_says_which_panels_there_are(client: httpx.Client, run: Path) -> None:
    names = ("console", "usage", "texts", "images")
    assert [read(client, "")[name] for name in names] == [[], 0, 0, 0]
    write_console(run, "printed\n")
    add_usage(run, 0, [(5.0, 100.0, 200.0)])
    add_texts(run, (1, "sample", "one"))
    add_image(run, 1, "digits")
    assert [read(client, "")[name] for name in names] == [["rank-0"], 1, 1, 1]


def test_a_new_text_is_news_for_the_open_pages(page: Served, client: httpx.Client, run: Path) -> None:
    with client.stream("GET", "/api/stream", headers=OWN) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines)[6:])["all"]
        add_texts(run, (1, "sample", "one"))
        assert [one["key"] for one in json.loads(next(lines)[6:])["runs"]] == ["one"]


@pytest.mark.covers("E4")
def test_texts_come_newest_first_by_name_and_by_page(client: httpx.Client, run: Path) -> None:
    add_texts(run, *((step, f"name {step % 2}", f"text {step}") for step in range(1, 131)))
    found = read(client, "/texts")
    assert [one["iteration"] for one in found["texts"]] == list(range(130, 80, -1))
    assert (found["names"], found["has_older"]) == ([["name 1", 65], ["name 0", 65]], True)
    older = read(client, f"/texts?before={found['texts'][-1]['number']}&name=name%201")
    assert [one["iteration"] for one in older["texts"]] == list(range(79, 0, -2))
    assert not older["has_older"]
    assert read(client, "/texts?number=129") == {"number": 129, "text": "text 130"}


@pytest.mark.covers("E4")
def test_images_come_by_name_each_with_its_steps(client: httpx.Client, run: Path) -> None:
    for step in (1, 2):
        add_image(run, step, "digits")
    path = add_image(run, 2, "constructor")
    add_image(run, 2, "constructor")  # a resumed run wrote it again
    found = read(client, "/images")
    assert found["names"] == [
        {"name": "constructor", "images": [[3, 2, 8, 8]]},
        {"name": "digits", "images": [[0, 1, 8, 8], [1, 2, 8, 8]]},
    ]
    answer = client.get("/api/runs/one/images/3", headers=OWN)
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("image/png", "nosniff")
    assert answer.content == path.read_bytes()


def test_5_000_images_are_one_small_answer(client: httpx.Client, run: Path) -> None:
    place = {"epoch": 1, "elapsed_s": 0.5, "width": 8, "height": 8}
    lines = ({**place, "iteration": k, "name": f"n{k % 500}", "file": f"images/01234567-{k}.png"} for k in range(5000))
    append_lines(run / "images.jsonl", lines)
    answer = client.get("/api/runs/one/images", headers=OWN)
    assert len(answer.content) < 100_000
    found = answer.json()
    assert (len(found["names"]), found["left_out"]) == (200, 3000)
    assert found["names"][0]["images"][-1] == [4999, 4999, 8, 8]


def test_the_console_and_usage_are_answered(client: httpx.Client, full: Path) -> None:
    found = read(client, "/console?name=rank-0")
    assert (found["text"], found["end"]) == ("printed\n", 8)
    assert read(client, "/usage")["ranks"] == [
        {"rank": 0, "elapsed_s": [5.0], "processor_percent": [100.0], "memory_mib": [200.0]}
    ]


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, "continue"])
def test_every_request_needs_the_token_and_the_own_origin(page: Served, full: Path, path: str) -> None:
    target, method = f"/api/runs/one/{path}", "POST" if path == "continue" else "GET"
    assert ask(page, method, target, {})[0] == 401
    assert ask(page, method, target, {TOKEN_HEADER: TOKEN + "x"})[0] == 403
    assert ask(page, method, f"{target}{'&' if '?' in target else '?'}token={TOKEN}", {})[0] == 401
    for foreign in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert ask(page, method, target, OWN | foreign)[0] == 403
    assert ask(page, method, target, OWN | {"host": "evil.example"})[0] == 403
    other = "GET" if path == "continue" else "POST"
    assert ask(page, other, target, OWN)[0] == 405
    assert ask(page, method, target.replace("/one/", "/two/"), OWN)[0] == 404


BAD_NUMBERS = ("-1", "NaN", "1e3", "٣", "9" * 14, "", "0x1", "1.0", " 1", "Infinity")


@pytest.mark.parametrize("what", ["texts?number=", "texts?before=", "console?name=rank-0&first=", "images/"])
@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_what_is_no_number_is_refused(client: httpx.Client, full: Path, what: str, number: str) -> None:
    answer = client.get(f"/api/runs/one/{what}{number}", headers=OWN)
    assert answer.status_code in (400, 404)
    assert len(answer.text) < 100


def test_numbers_beyond_the_end_are_answered(client: httpx.Client, full: Path) -> None:
    far = "9" * 13
    for what in (f"texts?number={far}", f"images/{far}"):
        assert client.get(f"/api/runs/one/{what}", headers=OWN).status_code == 404
    assert read(client, f"/texts?before={far}")["texts"][0]["iteration"] == 2
    assert read(client, f"/console?name=rank-0&first={far}")["text"] == ""
    assert read(client, f"/console?name=rank-0&before={far}")["text"] == "printed\n"


@pytest.mark.parametrize(
    "name", ["../status", "..%2fstatus", "rank-0.log", "%00", "rank-0%00", "x" * 3000, "continued"]
)
def test_no_other_file_is_read_as_output(client: httpx.Client, full: Path, name: str) -> None:
    assert client.get(f"/api/runs/one/console?name={name}", headers=OWN).status_code == 404


def test_hostile_names_and_texts_are_json_and_nothing_else(client: httpx.Client, full: Path) -> None:
    for path in ("texts", "texts?number=2"):
        answer = client.get(f"/api/runs/one/{path}", headers=OWN)
        assert answer.headers["content-type"] == "application/json"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "blob:" not in answer.headers["content-security-policy"]
    assert read(client, "/texts?number=2")["text"] == EVIL


# -- Continue ----------------------------------------------------------------------------------------------


@pytest.fixture
def command(run: Path, tmp_path: Path) -> str:
    """The digest of the run's command, which leaves a file."""
    (tmp_path / "train.py").write_text("open('made', 'w').close()")
    write_start(run, python_command("train.py"), tmp_path)
    return command_of(run).digest


@pytest.mark.covers("E4")
def test_continue_starts_the_command_of_the_card(
    page: Served, client: httpx.Client, run: Path, tmp_path: Path, command: str
) -> None:
    said = read(client, "")
    assert said["continuing"]["digest"] == command
    assert said["continue"] == f"cd {tmp_path} && python train.py"
    answer = client.post("/api/runs/one/continue", headers=OWN, content=command)
    assert (answer.status_code, answer.json()) == (202, {"said": "starting"})
    until((tmp_path / "made").exists, "the command has run")
    until(lambda: not read(client, "")["continuing"]["is_starting"], "the command has ended")
    assert read(client, "")["console"] == ["continued"]


REFUSED: dict[str, tuple[int, str, dict[str, str], str]] = {
    "no token": (401, "POST", {}, "own"),
    "wrong token": (403, "POST", {TOKEN_HEADER: "x"}, "own"),
    "foreign origin": (403, "POST", OWN | {"origin": "http://evil.example"}, "own"),
    "foreign site": (403, "POST", OWN | {"sec-fetch-site": "cross-site"}, "own"),
    "foreign host": (403, "POST", OWN | {"host": "evil.example"}, "own"),
    "GET": (405, "GET", OWN, "own"),
    "PUT": (405, "PUT", OWN, "own"),
    "no command": (409, "POST", OWN, ""),
    "another command": (409, "POST", OWN, "x" * 64),
    "a body too long": (413, "POST", OWN | {"content-length": str(BODY_BYTES + 1)}, "own"),
}


@pytest.mark.covers("E4")
@pytest.mark.parametrize("case", REFUSED)
def test_continue_is_refused_and_starts_nothing(
    page: Served, run: Path, tmp_path: Path, command: str, case: str
) -> None:
    status, method, headers, said = REFUSED[case]
    body = (command if said == "own" else said).encode()
    assert ask(page, method, "/api/runs/one/continue", {"content-length": str(len(body))} | headers, body)[0] == status
    assert not (run / "console").exists()
    assert not (tmp_path / "made").exists()
