"""The requests of a card's panels: their answers, what they refuse, and hostile content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

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

pytestmark = pytest.mark.covers("E4")

EVIL = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'


def read(client: httpx.Client, path: str) -> Any:
    answer = client.get(f"/api/runs/one{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def card(client: httpx.Client) -> Any:
    return read(client, "")


def test_the_card_says_which_panels_there_are_and_each_takes_numbers_and_known_names(
    client: httpx.Client, run: Path
) -> None:
    names = ("console", "usage", "texts", "images")
    assert [card(client)[name] for name in names] == [[], 0, 0, 0]
    write_console(run, "printed\n")
    add_usage(run, 0, [(5.0, 100.0, 200.0)])
    add_texts(run, (1, "sample", "one"), (2, "sample", "two"), (2, EVIL, EVIL))
    add_image(run, 1, "digits")
    assert [card(client)[name] for name in names] == [["rank-0"], 1, 3, 1]
    found = read(client, "/console?name=rank-0")
    assert (found["text"], found["end"]) == ("printed\n", 8)
    assert read(client, "/usage")["ranks"] == [
        {"rank": 0, "elapsed_s": [5.0], "processor_percent": [100.0], "memory_mib": [200.0]}
    ]
    answer = client.get("/api/runs/one/texts?number=2")
    assert (answer.json()["text"], answer.headers["content-type"]) == (EVIL, "application/json")
    assert "blob:" not in answer.headers["content-security-policy"]

    for what in ("texts?number=", "texts?before=", "console?name=rank-0&first=", "images/"):
        for number in ("-1", "NaN", "1e3", "٣", "9" * 14, "", "0x1", "1.0", " 1", "Infinity"):
            answer = client.get(f"/api/runs/one/{what}{number}")
            assert answer.status_code in (400, 404), (what, number)
            assert len(answer.text) < 100
    for name in ("../status", "..%2fstatus", "rank-0.log", "%00", "rank-0%00", "x" * 3000, "continued"):
        assert client.get(f"/api/runs/one/console?name={name}").status_code == 404, name
    far = "9" * 13  # beyond the end
    for what in (f"texts?number={far}", f"images/{far}"):
        assert client.get(f"/api/runs/one/{what}").status_code == 404
    assert read(client, f"/texts?before={far}")["texts"][0]["iteration"] == 2
    assert read(client, f"/console?name=rank-0&first={far}")["text"] == ""
    assert read(client, f"/console?name=rank-0&before={far}")["text"] == "printed\n"


def test_texts_come_newest_first_by_name_and_by_page(client: httpx.Client, run: Path) -> None:
    add_texts(run, *((step, f"name {step % 2}", f"text {step}") for step in range(1, 131)))
    found = read(client, "/texts")
    assert [one["iteration"] for one in found["texts"]] == list(range(130, 80, -1))
    assert (found["names"], found["has_older"]) == ([["name 1", 65], ["name 0", 65]], True)
    older = read(client, f"/texts?before={found['texts'][-1]['number']}&name=name%201")
    assert [one["iteration"] for one in older["texts"]] == list(range(79, 0, -2))
    assert not older["has_older"]
    assert read(client, "/texts?number=129") == {"number": 129, "text": "text 130"}


def test_images_come_by_name_each_with_its_steps_and_5_000_are_one_small_answer(
    client: httpx.Client, run: Path
) -> None:
    for step in (1, 2):
        add_image(run, step, "digits")
    path = add_image(run, 2, "constructor")
    add_image(run, 2, "constructor")  # a resumed run wrote it again
    assert read(client, "/images")["names"] == [
        {"name": "constructor", "images": [[3, 2, 8, 8]]},
        {"name": "digits", "images": [[0, 1, 8, 8], [1, 2, 8, 8]]},
    ]
    answer = client.get("/api/runs/one/images/3")
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("image/png", "nosniff")
    assert answer.content == path.read_bytes()
    place = {"epoch": 1, "elapsed_s": 0.5, "width": 8, "height": 8}
    lines = ({**place, "iteration": k, "name": f"n{k % 500}", "file": f"images/01234567-{k}.png"} for k in range(5000))
    (run / "images.jsonl").unlink()
    append_lines(run / "images.jsonl", lines)
    answer = client.get("/api/runs/one/images")
    assert len(answer.content) < 100_000
    found = answer.json()
    assert (len(found["names"]), found["left_out"]) == (200, 3000)
    assert found["names"][0]["images"][-1] == [4999, 4999, 8, 8]


def test_continue_starts_the_command_of_the_card(client: httpx.Client, run: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('made', 'w').close()")
    write_start(run, python_command("train.py"), tmp_path)
    digest = command_of(run).digest
    said = card(client)
    assert (said["continuing"]["digest"], said["continue"]) == (digest, f"cd {tmp_path} && python train.py")
    answer = client.post("/api/runs/one/continue", content=digest)
    assert (answer.status_code, answer.json()) == (202, {"said": "starting"})
    until((tmp_path / "made").exists, "the command has run")
    until(lambda: not card(client)["continuing"]["is_starting"], "the command has ended")
    assert card(client)["console"] == ["continued"]
