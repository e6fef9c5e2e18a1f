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
from tests.support.scripts import run

pytestmark = pytest.mark.covers("C8")


def go_first(folder: str) -> list[list[str]]:
    """What each turn found that others had left, in two worlds; rank 0 takes a while in its block."""
    found, one = [], torch.ones(300, 300)
    for number in range(2):
        with dl.join_world() as world:
            for turn in ("a", "b"):
                world.gather(turn)  # so that all come at once
                with world.rank_zero_first():
                    for _ in range(50 if world.rank == 0 else 0):
                        torch.mm(one, one)
                    found.append([one for one in os.listdir(folder) if one.startswith(f"{number}{turn}")])
                    Path(folder, f"{number}{turn}-{world.rank}").touch()
    return found


def test_rank_0_is_through_before_the_others_begin(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = on_ranks(3, go_first, str(tmp_path))
    assert first == [[]] * 4
    for found in others:
        assert [f"{turn}-0" in there for turn, there in zip(("0a", "0b", "1a", "1b"), found, strict=True)] == [True] * 4
    assert len(os.listdir(tmp_path)) == 12


def fail_around_first(where: str) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            if (where, world.rank) in (("before", 0), ("elsewhere", 1)):
                raise OSError("no such host")
            if where == "elsewhere" and world.rank == 0:
                world.sum(torch.ones(()))
            with world.rank_zero_first():
                if where == "summing":
                    world.sum(torch.ones(()))
                if where == "inside" and world.rank == 0:
                    raise OSError("no such host")
                if where == "leaving" and world.rank == 0:
                    sys.exit(0)

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("where", "culprit", "own", "said"),
    [
        ("inside", 0, "OSError", "no such host"),
        ("leaving", 0, "SystemExit", "0"),
        ("before", 0, "OSError", "no such host"),
        ("elsewhere", 1, "OSError", "no such host"),
        (
            "summing",
            0,
            "RuntimeError",
            "`with world.rank_zero_first()`, where the ranks are at different places",
        ),
    ],
)
def test_a_failure_while_others_wait_for_the_first_is_everybodys(
    where: str, culprit: int, own: str, said: str, on_ranks: OnRanks
) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, fail_around_first, where)):
        assert kind == (own if rank == culprit else "PeerFailed")
        assert said in text
        assert rank == culprit or text.startswith(f"rank {culprit} failed")
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


def test_the_wait_for_the_first_has_an_end(on_ranks: OnRanks) -> None:
    kind, text, took_s = on_ranks(2, wait_for_a_slow_first)[1]
    assert (kind, text) == ("PeerFailed", "Rank 0 did not leave its block within timeout_s=1. Pass a longer one.")
    assert 1.0 <= took_s < 1.0 + FAULT_S


class Writes(io.StringIO):
    """Keeps what each call of `write` wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[str]()

    def write(self, text: str, /) -> int:
        self.texts.append(text)
        return super().write(text)


def print_something() -> list[str]:
    with dl.join_world() as world, redirect_stdout(Writes()) as file:
        world.print("one line", world.size)
        world.print(1, 2, sep="/", end=".", flush=True)
        world.say("another")
    return [text for text in file.texts if text]


def test_a_line_is_printed_once(on_ranks: OnRanks) -> None:
    """In one write, so that lines of several threads do not mix."""
    assert on_ranks(3, print_something) == [["one line 3\n", "1/2.", "ddp_loop: another\n"], [], []]


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


OWN_HANDLER = """
import logging
logger = logging.getLogger("ddp_loop")
logger.addHandler(logging.FileHandler("own.log"))
logger.propagate = False
import ddp_loop as dl
with dl.join_world(device="cpu") as world:
    world.say("a line")
"""


def test_a_handler_that_was_there_before_the_package_takes_its_lines(tmp_path: Path) -> None:
    done = run("-c", OWN_HANDLER, folder=tmp_path)
    assert (tmp_path / "own.log").read_text() == "a line\n"
    assert done.stdout + done.stderr == ""
