"""One rank first, the others after it; one rank alone."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from tests.support.harness import FAULT_S, OnRanks, caught


def go_first(folder: str) -> list[list[str]]:
    found = []
    with dl.join_world() as world:
        for turn in range(3):
            with world.rank_zero_first():
                there = sorted(name for name in os.listdir(folder) if name.startswith(f"{turn}-"))
                found.append(there)
                Path(folder, f"{turn}-{world.rank}").touch()
    return found


@pytest.mark.covers("C8")
def test_rank_0_is_through_before_the_others_begin(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = on_ranks(3, go_first, str(tmp_path))
    assert first == [[], [], []]
    for found in others:
        assert [f"{turn}-0" in there for turn, there in enumerate(found)] == [True] * 3
    assert len(os.listdir(tmp_path)) == 9


def go_first_in_two_worlds(folder: str) -> list[bool]:
    found = []
    for number in range(2):
        with dl.join_world() as world, world.rank_zero_first():
            found.append(Path(folder, str(number)).exists())
            Path(folder, str(number)).touch()
    return found


@pytest.mark.covers("C8")
def test_rank_0_is_first_also_in_a_second_world_of_the_same_launcher(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, go_first_in_two_worlds, str(tmp_path)) == [[False, False], [True, True]]


def fail_around_first(where: str) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            if where == "before" and world.rank == 0:
                raise OSError("no such host")
            if where == "elsewhere" and world.rank == 1:
                raise OSError("no such host")
            if where == "elsewhere" and world.rank == 0:
                world.sum(torch.ones(()))
            with world.rank_zero_first():
                if where == "inside" and world.rank == 0:
                    raise OSError("no such host")
                if where == "leaving" and world.rank == 0:
                    sys.exit(0)

    return caught(work)


@pytest.mark.covers("C8", "D10")
@pytest.mark.parametrize(
    ("where", "culprit", "own"),
    [("inside", 0, "OSError"), ("leaving", 0, "SystemExit"), ("before", 0, "OSError"), ("elsewhere", 1, "OSError")],
)
def test_a_failure_while_others_wait_for_the_first_is_everybodys(
    where: str, culprit: int, own: str, on_ranks: OnRanks
) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, fail_around_first, where)):
        assert kind == (own if rank == culprit else "PeerFailed")
        assert "no such host" in text or own == "SystemExit"
        assert rank == culprit or f"rank {culprit} failed" in text
        assert took_s < FAULT_S


def wait_for_a_slow_first() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            if world.rank == 0:
                dist.distributed_c10d._get_default_store().wait(["gave up"])
                return
            try:
                with world.rank_zero_first(timeout_s=1.0):
                    pass
            finally:
                dist.distributed_c10d._get_default_store().set("gave up", "")

    return caught(work)


@pytest.mark.covers("C8")
def test_the_wait_for_the_first_has_an_end(on_ranks: OnRanks) -> None:
    kind, text, took_s = on_ranks(2, wait_for_a_slow_first)[1]
    assert (kind, text) == ("PeerFailed", "Rank 0 did not leave its block within timeout_s=1. Pass a longer one.")
    assert 1.0 <= took_s < 1.0 + FAULT_S


def sum_inside_first() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world, world.rank_zero_first():
            world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("C8")
def test_a_collective_inside_first_is_refused_and_does_not_hang(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, sum_inside_first)
    assert first[0] == "RuntimeError"
    assert "inside `with world.rank_zero_first()`, where the ranks are at different places" in first[1]
    assert (second[0], second[1].splitlines()[0][:13]) == ("PeerFailed", "rank 0 failed")
    assert max(first[2], second[2]) < FAULT_S


def print_something(path: str) -> None:
    with dl.join_world() as world, Path(path).joinpath(f"{world.rank}.txt").open("w") as file:
        before, sys.stdout = sys.stdout, file
        try:
            world.print("one line", world.size)
        finally:
            sys.stdout = before


@pytest.mark.covers("C8")
def test_a_line_is_printed_once(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(3, print_something, str(tmp_path))
    assert [tmp_path.joinpath(f"{rank}.txt").read_text() for rank in range(3)] == ["one line 3\n", "", ""]


class Writes(io.StringIO):
    """Keeps what each call of `write` wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[str]()

    def write(self, text: str, /) -> int:
        self.texts.append(text)
        return super().write(text)


def test_a_line_is_one_write_so_that_lines_of_several_threads_do_not_mix() -> None:
    with dl.join_world() as world, redirect_stdout(Writes()) as file:
        world.print("one", 2)
        world.say("three")
    assert [text for text in file.texts if text] == ["one 2\n", "ddp_loop: three\n"]


def fail_on_rank_0_in_a_stage() -> tuple[str, str, int, int | None]:
    def refuse() -> None:
        raise OSError("no such folder")

    try:
        with dl.join_world() as world, world.in_stage("start"):
            world.step = 3
            world.on_rank_zero(refuse)
    except dl.PeerFailed as error:
        return str(error), error.stage, error.step, error.rank
    except OSError as error:
        return str(error), "", 0, None
    return "", "", 0, None


def test_the_error_of_rank_0_names_its_place_on_the_others(on_ranks: OnRanks) -> None:
    own, *others = on_ranks(3, fail_on_rank_0_in_a_stage)
    assert own == ("no such folder", "", 0, None)
    for text, *place in others:
        assert "no such folder" in text
        assert place == ["start", 3, 0]


def logged_by(level: int) -> list[str]:
    """What a handler of the script gets of the package's own lines."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp_loop")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        with dl.join_world() as world:
            world.say("a line of 100 %")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return found


def test_the_package_logs_its_own_lines_on_rank_0(on_ranks: OnRanks, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_ranks(2, logged_by, logging.INFO) == [["a line of 100 %"], []]
    assert on_ranks(2, logged_by, logging.WARNING) == [[], []]
    logged_by(logging.INFO)
    assert capsys.readouterr().out == "ddp_loop: a line of 100 %\n"
