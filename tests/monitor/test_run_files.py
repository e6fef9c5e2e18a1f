"""Texts, images and console output of a run folder, as the page reads them; also damaged, huge and foreign files."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.monitor import run_files
from ddp_loop.monitor.run_files import (
    MOST_IMAGE,
    MOST_PIXELS,
    PIECE,
    EntryList,
    UsageView,
    clean,
    list_console,
    read_console,
    read_image,
)
from ddp_loop.reporting import jsonl, png
from tests.support.logged_files import add_image, add_texts, add_usage, pixels_of, write_console

pytestmark = pytest.mark.covers("E4")


def texts_of(run: Path) -> EntryList:
    found = EntryList(run / "texts.jsonl", "text")
    found.look()
    return found


def piece(run: Path, name: str = "rank-0", **asked: int) -> dict[str, Any]:
    status, found = read_console(run, name, **asked)
    assert status == 200
    assert isinstance(found, dict)
    return found


# -- texts -------------------------------------------------------------------------------------------------


def test_texts_are_listed_as_they_come_and_read_from_their_places(tmp_path: Path) -> None:
    add_texts(tmp_path, (1, "sample", "é" * 1000), (2, "__proto__", "two\nlines"))
    texts = texts_of(tmp_path)
    found = [(one.iteration, one.name, one.letters) for one in texts.entries]
    assert found == [(1, "sample", 1000), (2, "__proto__", 9)]
    first = texts.entries[0]
    assert first.start == "é" * 300
    assert texts.text_of(first) == "é" * 1000
    add_texts(tmp_path, (3, "sample", "new"))
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"iteration": 4, "name": "sample", "te')
    texts.look()
    assert (len(texts), texts.unreadable) == (3, 0)


def test_texts_that_a_resumed_run_writes_again_replace_those_before(tmp_path: Path) -> None:
    add_texts(tmp_path, *((step, "sample", f"text {step}") for step in range(1, 6)))
    texts = texts_of(tmp_path)
    last = texts.entries[4]
    (tmp_path / "texts.jsonl").unlink()
    add_texts(tmp_path, *((step, "sample", f"other {step}") for step in range(1, 6)))
    assert texts.text_of(last) is None
    (tmp_path / "texts.jsonl").unlink()
    add_texts(tmp_path, *((step, "sample", f"next {step}") for step in range(1, 6)))  # in the same places
    assert texts.text_of(last) is None
    texts.look()
    assert [one.start for one in texts.entries] == [f"next {step}" for step in range(1, 6)]
    lines = (tmp_path / "texts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "texts.jsonl").write_text("".join(lines[:2]))
    texts.look()
    assert len(texts) == 2


def test_damaged_lines_are_counted_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "CHUNK", 4096)
    with (tmp_path / "texts.jsonl").open("w") as file:
        file.write(
            'no line\n[]\n{"iteration": -1, "name": "a", "text": "b"}\n{"iteration": 1, "name": "", "text": ""}\n'
        )
        file.write('{"iteration": 1, "name": 3, "text": "b"}\n{"iteration": 1, "name": "a", "text": ["b"]}\n')
        file.write("[" * 3000 + "\n" + "x" * 20_000 + "\n")
    add_texts(tmp_path, (1, "whole", "text"))
    texts = texts_of(tmp_path)
    assert [one.name for one in texts.entries] == ["whole"]
    assert texts.unreadable == 8
    assert texts.text_of(texts.entries[0]) == "text"


def test_of_very_many_texts_the_newest_are_listed_and_all_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MOST_ENTRIES", 100)
    add_texts(tmp_path, *((step, "sample", f"text {step} " * 20) for step in range(1, 10_001)))
    texts = texts_of(tmp_path)
    while texts.is_behind:
        texts.look()
    assert (len(texts), texts.dropped, texts.entries[0].iteration) == (10_000, 9900, 9901)
    entry = texts.entry(9999)
    assert entry is not None
    assert texts.text_of(entry) == "text 10000 " * 20
    assert texts.entry(9899) is None
    assert texts.entry(10_000) is None
    monkeypatch.setattr(EntryList, "_take", lambda *_: pytest.fail("lines were read again"))
    texts.look()


# -- images ------------------------------------------------------------------------------------------------


def image(run: Path) -> tuple[int, bytes | str]:
    images = EntryList(run / "images.jsonl", "file")
    images.look()
    return read_image(run, images.entries[0])


def test_an_image_is_sent_as_it_was_written(tmp_path: Path) -> None:
    path = add_image(tmp_path, 7, "an image / of a ∞")
    assert image(tmp_path) == (200, path.read_bytes())


def test_a_line_names_an_image_of_its_run_or_nothing(tmp_path: Path) -> None:
    for file in (
        "../../etc/passwd", "/etc/passwd", "images/../run.json", "images/../../secret-7.png", "run.json", "",
        "images/0123abcd-7.png/../../secret", "images/0123abcd-7.svg", "images\\0123abcd-7.png", "constructor",
        "images/0123abcd-٣.png", "images//0123abcd-7.png", "http://evil.example/0123abcd-7.png",
        "images/0123abcd-7.png\0",
    ):  # fmt: skip
        (tmp_path / "images.jsonl").unlink(missing_ok=True)
        add_image(tmp_path, 7, "one", file=file)
        assert image(tmp_path) == (422, "one: this line of the images does not name an image of the run."), file


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def head(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


WHOLE = png(pixels_of(1))
BAD_IMAGES = {
    "is not a PNG file": [b"", b"GIF89a", b"<svg onload=alert(1)>", b"<html>", b"\x89PNG\r\n\x1a\n", WHOLE[1:]],
    "is a damaged PNG file": [
        WHOLE[:-1], WHOLE + b"<script>", WHOLE[:40], head(8, 8), head(8, 8) + chunk(b"IEND", b""),
        head(8, 8) + chunk(b"zTXt", b"x") + chunk(b"IDAT", b"") + chunk(b"IEND", b""),
        head(8, 8) + b"\xff\xff\xff\xffIDAT" + b"x" * 40,
        head(8, 8) + 2 * chunk(b"IDAT", b"") + chunk(b"IEND", b""),
    ],
    "pixels, and the page shows at most": [
        head(width, height) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
        for width, height in ((1 << 31, 1 << 31), (MOST_PIXELS + 1, 1), (0, 8), (8192, 8192))
    ],
    f"instead of at most {MOST_IMAGE}": [b"\0" * (MOST_IMAGE + 1)],
}  # fmt: skip


def test_a_browser_gets_only_images_that_log_image_wrote(tmp_path: Path) -> None:
    for why, contents in BAD_IMAGES.items():
        for number, data in enumerate(contents):
            (tmp_path / "images.jsonl").unlink(missing_ok=True)
            add_image(tmp_path, 7, "one", data)
            status, said = image(tmp_path)
            assert (status, why in str(said)) == (422, True), (number, said)


# -- the console -------------------------------------------------------------------------------------------


def test_the_console_is_read_from_its_end_back_and_onward(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(20_000)]
    path = write_console(tmp_path, "".join(lines))
    last = piece(tmp_path)
    assert last["end"] == last["size"] == path.stat().st_size
    assert len(last["text"]) <= PIECE
    assert last["text"].startswith("line ")
    assert last["text"].endswith("line 19999\n")
    text, start = last["text"], last["start"]
    while start:
        older = piece(tmp_path, before=start)
        assert older["end"] == start
        text, start = older["text"] + text, older["start"]
    assert text == "".join(lines)
    with path.open("a") as file:
        file.write("more")
    more = piece(tmp_path, first=last["end"])
    assert (more["text"], more["start"], more["end"]) == ("more", last["end"], more["size"])
    assert piece(tmp_path, first=more["end"])["text"] == ""


def test_a_letter_or_an_escape_that_is_half_written_waits_for_its_rest(tmp_path: Path) -> None:
    for cut in ("é", "∞", "🙂", "\x1b[38;5;9mred", "\x1b]0;title\x07x", "\x1bM"):
        whole = f"before {cut} after\n".encode()
        for size in range(7, len(whole) + 1):
            write_console(tmp_path, whole[:size])
            first = piece(tmp_path, first=0)
            write_console(tmp_path, whole)
            rest = piece(tmp_path, first=first["end"])
            assert first["text"] + rest["text"] == clean(whole), cut


def test_escapes_of_terminals_are_left_out() -> None:
    said = b"\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x07 \x1b[2J"
    said += b"\x1b(B\x00\x07\x08tab\t\xc2\x9bC1 \x7f\xff\xfe\r\nx\ry"
    assert clean(said) == "red link tab\tC1 \ufffd\ufffd\nx\ny"
    assert clean("é ∞ 🙂 <b>".encode()) == "é ∞ 🙂 <b>"


def test_binary_junk_is_a_text_at_any_place(tmp_path: Path) -> None:
    junk = bytes(range(256)) * 2000
    write_console(tmp_path, junk)
    questions: list[dict[str, Any]] = [{}, {"first": 0}, {"first": 77_777}, {"before": 77_777}, {"before": 0}]
    for asked in (*questions, {"first": 10**12}):
        found = piece(tmp_path, **asked)
        assert 0 <= found["start"] <= found["end"] <= found["size"] == len(junk)
        text = json.loads(json.dumps(found["text"]))
        assert not any(ord(letter) < 32 and letter not in "\t\n" for letter in text)
    at = 0
    while (found := piece(tmp_path, first=at))["end"] < len(junk) - 8:
        assert found["end"] > at
        at = found["end"]


def test_only_the_files_of_ranks_are_listed_in_their_order(tmp_path: Path) -> None:
    for name in ("rank-10", "rank-2", "rank-0", "continued", "rank-x", "other", "rank-1.log.swp", "rank-1234567"):
        write_console(tmp_path, "text", name)
    assert list_console(tmp_path) == ["rank-0", "rank-2", "rank-10", "continued"]
    for name in ("other", "../rank-0", "rank-1234567", "rank-", "", "rank-٣", "rank-0.log"):
        assert read_console(tmp_path, name) == (404, "There is no such output.")


# -- files that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device", "missing", "linked folder"])
def test_only_a_file_of_the_run_itself_is_read(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    add_texts(run, (1, "secret", "a secret"))
    picture = add_image(run, 7, "one")
    paths = [run / "texts.jsonl", picture, write_console(run, "a secret"), add_usage(run, 0, [(1.0, 77.0, 77.0)])]
    for path in paths if kind != "linked folder" else [path.parent for path in paths[1:]]:
        elsewhere = tmp_path / f"elsewhere-{path.name}"
        path.rename(elsewhere)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind != "missing":
            path.symlink_to("/dev/zero" if kind == "device" else elsewhere)
    assert len(texts_of(run)) == (kind == "linked folder")
    status, why = image(run)
    assert status in ((404,) if kind in ("missing", "linked folder") else (404, 422))
    assert isinstance(why, str)
    assert read_console(run, "rank-0") == (404, "There is no such output.")
    assert kind != "linked folder" or list_console(run) == []
    assert UsageView(run).look()["ranks"] == []


def test_a_file_of_a_gigabyte_does_not_hold_the_page_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "READ_S", 0.05)
    paths = [tmp_path / "texts.jsonl", add_image(tmp_path, 7, "one"), write_console(tmp_path, "")]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(1 << 30)
    texts = texts_of(tmp_path)
    assert (texts.is_behind, len(texts)) == (True, 0)
    assert image(tmp_path)[0] == 422
    assert (piece(tmp_path)["text"], piece(tmp_path)["size"]) == ("", 1 << 30)
