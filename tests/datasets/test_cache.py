"""The cache of drawn digits: a set is read with the same bytes, or drawn again if the file is damaged."""

from pathlib import Path

import pytest

from ddp_loop.datasets import digits, drawing
from tests.support.files import digest_of
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("A1")


def digest_through(folder: Path) -> str:
    return digest_of(digits(3, 100, folder=folder))


def only_file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_set_that_was_drawn_once_is_read_from_the_cache(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    other = digits(1, 20, folder=first)
    there = only_file_in(first)
    digits(0, 20, folder=second)
    name = only_file_in(second).name
    assert name != there.name
    # Seed 1's file under seed 0's name: seed 1's digits for seed 0 show that the file was read.
    third = tmp_path / "third"
    third.mkdir()
    (third / name).write_bytes(there.read_bytes())
    assert digest_of(digits(0, 20, folder=third)) == digest_of(other)


def test_a_cached_set_has_the_bytes_of_the_drawn_set(tmp_path: Path) -> None:
    drawn = digits(0, 20, cache=False, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []  # without the cache nothing is written
    first = digits(0, 20, folder=tmp_path)
    first.images.zero_()  # a change in place does not reach later callers
    read = digits(0, 20, folder=tmp_path / ".")
    assert digest_of(read) == digest_of(drawn)
    assert read.images.shape == drawn.images.shape


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_a_damaged_cache_file_is_replaced(tmp_path: Path, damage: str) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    drawn = digits(0, 20, folder=whole)
    file = only_file_in(whole)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    ruins = {"flipped": bytes(content), "cut": bytes(content)[:-100], "empty": b"", "foreign": b"hello" * 20}
    damaged.mkdir()
    (damaged / file.name).write_bytes(ruins[damage])
    assert digest_of(digits(0, 20, folder=damaged)) == digest_of(drawn)
    assert only_file_in(damaged).read_bytes() == file.read_bytes()


def test_a_folder_that_cannot_be_written_to_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = digits(0, 20, folder=tmp_path / "file" / "folder")
    assert digest_of(data) == digest_of(digits(0, 20, cache=False))


@pytest.mark.slow
def test_ranks_that_draw_at_the_same_time_leave_one_complete_file(tmp_path: Path, on_ranks: OnRanks) -> None:
    assert on_ranks(4, digest_through, tmp_path) == [digest_of(digits(3, 100, cache=False))] * 4
    assert only_file_in(tmp_path).is_file()


def test_other_arguments_and_other_versions_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(0, 20, folder=tmp_path)
    digits(1, 20, folder=tmp_path)
    digits(0, 30, folder=tmp_path)
    digits(0, 20, "held_out", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    for name, value in [("VERSION", -1), ("library_versions", lambda: {"pillow": "1", "matplotlib": "2"})]:
        folder = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(drawing, name, value)
            digits(0, 20, folder=folder)
        assert not (tmp_path / only_file_in(folder).name).exists()
