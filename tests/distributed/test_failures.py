"""One rank's failure becomes everybody's, with its words, within the time that the project promises."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed import RankFailed
from tests.support.harness import FAULT_S, OnRanks, Unspeakable, caught


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError("no words")


def fail_in(kind: str) -> tuple[str, str, float]:
    errors: dict[str, Callable[[], BaseException]] = {
        "ValueError": lambda: ValueError("a fault of rank 1"),
        "two arguments": lambda: Unspeakable(1, 2),
        "mute": Mute,
        "SystemExit 0": lambda: SystemExit(0),
        "SystemExit 3": lambda: SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
        "not of this alphabet": lambda: RuntimeError("\ud800 \0 \U0001f600"),
        "long": lambda: RuntimeError("x" * 10**6),
        "group": lambda: ExceptionGroup("two faults", [ValueError("one"), KeyError("two")]),
    }

    def work() -> None:
        with dl.join_world() as world:
            world.sum(torch.ones(()))
            if world.rank == 1:
                raise errors[kind]()
            world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("kind", "own", "told"),
    [
        ("ValueError", "ValueError", "ValueError: a fault of rank 1"),
        ("two arguments", "Unspeakable", "Unspeakable: 1 is not 2"),
        ("mute", "Mute", "Mute: <exception str() failed>"),
        ("SystemExit 0", "SystemExit", "SystemExit: 0"),
        ("SystemExit 3", "SystemExit", "SystemExit: 3"),
        ("KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("GeneratorExit", "GeneratorExit", "GeneratorExit"),
        ("not of this alphabet", "RuntimeError", "RuntimeError: "),
        ("long", "RuntimeError", "RuntimeError: xxx"),
        ("group", "ExceptionGroup", "two faults (2 sub-exceptions)"),
    ],
)
def test_whatever_a_rank_raises_the_others_are_told_it_with_its_traceback(
    kind: str, own: str, told: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(3, fail_in, kind)
    assert results[1][0] == own
    for peer in (0, 2):
        raised, text, took_s = results[peer]
        assert raised == "PeerFailed"
        assert text.startswith("rank 1 failed: ")
        assert told in text
        assert "Traceback (most recent call last)" in text
        assert "in work\n" in text
        assert took_s < FAULT_S


def peers_rank() -> int | None:
    try:
        with dl.join_world() as world:
            if world.rank == 2:
                raise ValueError
            world.sum(torch.ones(()))
    except dl.PeerFailed as error:
        return error.rank
    except ValueError:
        return None
    raise AssertionError("nothing was raised")


@pytest.mark.covers("D10")
def test_the_culprit_is_a_number_too(on_ranks: OnRanks) -> None:
    assert on_ranks(3, peers_rank) == [2, 2, None]


def all_fail() -> NoReturn:
    with dl.join_world() as world:
        raise ValueError(f"rank {world.rank} has it too")


@pytest.mark.covers("D10")
def test_a_fault_of_all_ranks_is_raised_by_each(on_ranks: OnRanks) -> None:
    with pytest.raises(RankFailed, match="rank 0 raised ValueError: rank 0 has it too") as failed:
        on_ranks(3, all_fail)
    assert isinstance(failed.value.__cause__, ValueError)
    assert "rank 2 raised ValueError: rank 2 has it too" in str(failed.value)


def agree_on(problems: dict[int, str]) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            world.raise_if_any_failed(ValueError(problems[world.rank]) if world.rank in problems else None)

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("problems", [{1: "bad"}, {0: "bad", 2: "worse"}, {0: "a", 1: "b", 2: "c"}])
def test_one_ranks_problem_is_raised_by_all(problems: dict[int, str], on_ranks: OnRanks) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, agree_on, problems)):
        if rank in problems:
            assert (kind, text) == ("ValueError", problems[rank])
        else:
            assert (kind, text.split(": ")[0]) == ("PeerFailed", f"rank {min(problems)} failed")
        assert took_s < FAULT_S


def fail_on_rank_1() -> str:
    """The traceback of a rank as the interpreter prints it."""
    try:
        with dl.join_world() as world:
            if world.rank == 1:
                raise ValueError("the labels are bad")
            world.sum(torch.ones(1))
    except (ValueError, dl.PeerFailed):
        return traceback.format_exc()
    raise AssertionError("it did not fail")


@pytest.mark.covers("D10")
def test_a_peers_traceback_has_the_scripts_lines_alone_and_torchrun_gets_the_culprits(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    peer, culprit = on_ranks(2, fail_on_rank_1)
    assert "world.sum(torch.ones(1))" in peer
    assert not re.search(r"gloo|ddp_loop/|another exception|direct cause", peer)
    assert peer.count("\n") < 15
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == "ValueError: the labels are bad"
    assert told["extraInfo"]["py_callstack"] in culprit


def fail_at_length(folder: str | None, letters: int) -> dl.PeerFailed | None:
    """Rank 1 raises a long text, in a run folder or without one."""
    try:
        with dl.join_world() as world:
            model = torch.nn.Linear(1, 1)
            batches = dl.Batches(torch.ones(4, 1), 2, world)
            for _ in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
                if world.rank == 1:
                    raise ValueError("first words " + "ä" * letters + " last words")
                world.store.await_first("never", 20.0, "", 0)
    except ValueError:
        return None
    except dl.PeerFailed as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.covers("D10")
@pytest.mark.parametrize("with_folder", [True, False])
def test_a_text_of_5_mb_is_cut_and_the_run_folder_keeps_the_whole(
    with_folder: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    error, _ = on_ranks(2, fail_at_length, str(tmp_path) if with_folder else None, 5_000_000, timeout_s=30)
    assert error is not None
    assert (error.rank, error.step) == (1, 1)
    said = str(error)
    assert said.startswith("rank 1 failed in step 1: ValueError: first words ä")
    assert said.rstrip().endswith("last words")
    assert re.search(r"\[4\d{6} characters are left out\. The run folder, if there is one, has the whole\.\]", said)
    assert len(said) < 250_000
    kept = list(tmp_path.glob("error.*"))
    assert [path.name for path in kept] == ["error.rank-1.txt"] * with_folder
    assert all(len(path.read_text()) > 5_000_000 for path in kept)
