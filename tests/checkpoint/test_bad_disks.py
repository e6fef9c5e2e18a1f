"""Disks that are full, read-only or gone while ranks train: by policy all stop together, or go on; nothing is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import ddp_loop as dl
from ddp_loop.checkpoint import CheckpointStore, RunFolder, asked_to_stop, is_running
from ddp_loop.checkpoint.atomic_files import SAVING
from ddp_loop.checkpoint.serialization import to_tree
from ddp_loop.reporting.jsonl import JsonlWriter, OnFull, line_of
from tests.faults.bad_disks import (
    DISKS,
    EVERY,
    HARMED,
    HEALED,
    KEEP,
    RANKS,
    STEPS,
    Ended,
    Outcome,
    examine,
    fill,
    kept_in,
    limit_files,
    rows_of,
    small_disk,
    stopped_together,
    train,
    unmount_below,
)
from tests.support.harness import FAULT_S, OnRanks

UNPRIVILEGED = 65534
SAVED = list(range(EVERY, STEPS + 1, EVERY))
BEFORE = [at for at in SAVED if at <= HARMED]
MEANWHILE = [at for at in SAVED if HARMED < at < HEALED]
ALL_ROWS = list(range(1, STEPS + 1))


@pytest.fixture
def run_on(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a folder for a run: on a small disk of its own for "small" or "over", where that can be mounted."""

    def run_on(mounts: str) -> Path:
        try:
            return (ending.enter_context(small_disk(tmp_path / "disk")) if mounts else tmp_path) / "run"
        except OSError as error:
            pytest.skip(f"needs a small disk, which root can mount: {error}")

    with ExitStack() as ending:
        yield run_on
    unmount_below(tmp_path)


@contextmanager
def no_file_beyond(most: int) -> Iterator[None]:
    """No file of this process grows beyond `most` bytes; the one that pytest writes to neither."""
    heal = limit_files(Path(), most)
    try:
        yield
    finally:
        heal()


@pytest.fixture(scope="module")
def whole(pool: dl.Pool) -> str:
    """The state at the end of a run without a fault."""
    first, *others = pool.run(train, RANKS, "")
    assert {one.digest for one in others} == {first.digest}
    return first.digest


# -- all ranks -----------------------------------------------------------------------------------------------


def all_are_whole(ended: list[Ended], whole: str) -> bool:
    """Whether all ranks ended without an error, as they do in an undisturbed run."""
    return {(one.kind, one.text, one.digest) for one in ended} == {("", "", whole)}


def assert_nothing_is_lost(outcome: Outcome, name: str, whole: str) -> None:
    """The older checkpoints are valid, and a run that is started again has all rows, and the undisturbed one's bits."""
    assert outcome.problems == []
    if DISKS[name].heals:
        assert set(BEFORE) <= set(outcome.kept)
        assert all_are_whole(outcome.again, whole)
        assert outcome.left == []
        assert outcome.all_rows == ALL_ROWS


@pytest.mark.slow
@pytest.mark.covers("E5")
@pytest.mark.parametrize("name", DISKS)
def test_all_ranks_stop_together_and_say_where_and_why(
    name: str, on_ranks: OnRanks, run_on: Callable[[str], Path], whole: str
) -> None:
    disk = DISKS[name]
    run = run_on(DISKS[name].mounts)
    outcome = examine(on_ranks, name, "raise", run)
    first, *others = outcome.ended
    assert (first.kind in ("OSError", "FileNotFoundError"), first.stage) == (True, disk.stage), first
    for one in others:
        assert (one.kind, one.rank, one.stage) == ("PeerFailed", 0, disk.stage), one
        assert first.text in one.text
    for said in ("/run/", disk.says, "). Make room there, make it writable, or put it back."):
        assert any(word in first.text for word in said.split("|")), first.text
    assert stopped_together(outcome), outcome.ended
    assert max(one.took_s for one in outcome.ended) < FAULT_S
    assert outcome.kept == (BEFORE if disk.heals else [])
    assert outcome.rows == list(range(1, (outcome.rows or [0])[-1] + 1))
    assert outcome.status in disk.tells.split("|")
    assert_nothing_is_lost(outcome, name, whole)


@pytest.mark.slow
@pytest.mark.covers("E5")
@pytest.mark.parametrize("name", ["full for what is large", "full within a row", "replaced", "removed"])
def test_all_ranks_go_on_with_a_warning_for_each_and_save_again(
    name: str, on_ranks: OnRanks, run_on: Callable[[str], Path], whole: str
) -> None:
    disk = DISKS[name]
    outcome = examine(on_ranks, name, "warn", run_on(""))
    assert all_are_whole(outcome.ended, whole)
    lines = outcome.ended[0].lines
    missed = [line for line in lines if line.startswith("ddp_loop: No checkpoint was written; training continues. ")]
    assert len(missed) == (len(MEANWHILE) if disk.heals else sum(at > HARMED for at in SAVED)), lines
    no_rows = [line for line in lines if line.endswith(" Until then new lines wait in memory; training continues.")]
    again = [line for line in lines if "/rows.jsonl can be written again. Lines added: " in line]
    assert len(no_rows) == (disk.stage == "rows"), lines
    assert len(again) == (disk.stage == "rows" and disk.heals), lines
    if disk.heals:
        assert outcome.kept == [at for at in SAVED if at not in MEANWHILE]
        assert (outcome.rows, outcome.status) == (ALL_ROWS, "done")
    else:
        assert sum(" not written. " in line or "The run's status" in line for line in lines) == 2
    assert_nothing_is_lost(outcome, name, whole)


def test_a_last_checkpoint_that_cannot_be_written_is_reported_on_every_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = on_ranks(RANKS, train, str(tmp_path), "full for what is large", at=STEPS - 1)
    assert (first.kind, first.stage, first.step) == ("OSError", "save", STEPS)
    assert {(one.kind, one.rank, one.stage) for one in others} == {("PeerFailed", 0, "save")}
    assert max(one.took_s for one in (first, *others)) < FAULT_S
    assert kept_in(tmp_path) == (SAVED[:-1][-KEEP:], [])


@pytest.mark.slow
def test_a_log_on_the_full_disk_stops_no_rank(on_ranks: OnRanks, run_on: Callable[[str], Path], whole: str) -> None:
    run = run_on("small")
    ended = on_ranks(RANKS, train, str(run), "full", "warn", str(run.with_name("log")))
    assert all_are_whole(ended, whole)
    assert rows_of(run) == ALL_ROWS


def test_a_loop_that_is_left_while_a_save_fails_says_so(on_ranks: OnRanks, tmp_path: Path) -> None:
    ended = on_ranks(2, train, str(tmp_path), "full for what is large", "raise", "", MEANWHILE[0] + 1)
    assert [one.kind for one in ended] == ["", ""]
    (line,) = [line for line in ended[0].lines if line.startswith("ddp_loop: No checkpoint was written. ")]
    assert "File too large" in line
    assert not is_running(tmp_path)


# -- where a run begins --------------------------------------------------------------------------------------


def test_a_run_on_a_full_disk_is_refused_by_all_with_the_remedy(
    on_ranks: OnRanks, run_on: Callable[[str], Path]
) -> None:
    run = run_on("small")
    run.mkdir()
    heal = fill(run)
    first, second = on_ranks(2, train, str(run))
    assert first.text.endswith(" Make room there, make it writable, or pass another run_dir=.")
    assert "No space left on device" in first.text
    assert (second.kind, second.rank) == ("PeerFailed", 0)
    heal()
    assert [one.kind for one in on_ranks(2, train, str(run))] == ["", ""]  # no process holds it


def test_what_a_killed_save_left_on_a_full_disk_makes_room_for_the_run_that_goes_on(
    on_ranks: OnRanks, run_on: Callable[[str], Path], whole: str
) -> None:
    run = run_on("small")
    on_ranks(2, train, str(run), "full", "raise")
    left = run / "checkpoints" / f"{SAVING}4-01234567"
    left.mkdir()
    fill(run)
    run.with_name("ballast").rename(left / "tensors.safetensors")
    assert all_are_whole(on_ranks(2, train, str(run)), whole)
    assert not left.exists()


# -- one file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_full", "fate", "kept"), [("raise", "", [1]), ("keep", "wait", [1, 2, 3]), ("drop", "are", [1, 3])]
)
def test_lines_that_cannot_be_written_are_an_error_once_or_wait_or_are_dropped(
    on_full: OnFull, fate: str, kept: list[int], tmp_path: Path
) -> None:
    lines = [line_of({"epoch": 1, "iteration": number, "samples": 4}, {"loss": 1.0}, 0.5) for number in (1, 2, 3)]
    said = list[str]()
    path = tmp_path / "rows.jsonl"
    file = JsonlWriter(path, 0, said.append, on_full)
    file.add(lines[0])
    file.flush()
    file.add(lines[1])
    error = rf"\[Errno 27\] {path} cannot be written \(File too large\)\. Make room there"
    with no_file_beyond(len(lines[0]) + 20):
        if on_full == "raise":
            with pytest.raises(OSError, match=error):
                file.flush()
        else:
            file.flush()
            file.flush()
            (line,) = said
            assert re.match(rf"{error}.* Until then new lines {fate} ", line)
    assert path.read_text() == lines[0]
    file.add(lines[2])
    file.close()
    assert rows_of(tmp_path) == kept
    assert said[1:] == ([f"{path} can be written again. Lines added: {len(kept) - 1}."] if fate else [])


@pytest.mark.parametrize(("count", "what"), [(1, "The last line was"), (2, "The last 2 lines were")])
def test_lines_that_a_close_cannot_write_are_counted(count: int, what: str, tmp_path: Path) -> None:
    said = list[str]()
    file = JsonlWriter(tmp_path / "rows.jsonl", 0, said.append, "keep", once=True)
    for number in range(count):
        file.add(f"{number}\n")
    (tmp_path / "rows.jsonl").unlink()
    file.close()
    assert file.lost == count
    assert [line.split(" not written. ")[0] for line in said] == [what]
    assert "intact" not in said[0]  # earlier lines are lost with the file


def test_a_checkpoint_or_score_that_cannot_be_written_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, "r1")
    path = checkpoints.write(to_tree({"w": torch.ones(3)}), iteration=1, facts={})
    with no_file_beyond(2000):
        for large in ({"w": torch.ones(1000)}, {"w": "x" * 4000}):
            with pytest.raises(OSError, match=r"could not be written to .*Make room there.* checkpoints are intact\."):
                checkpoints.write(to_tree(large), iteration=2, facts={})
    with (
        no_file_beyond(10),
        pytest.raises(OSError, match=r"The score of .*step-00000001 could not be written \(.*\)\. Make room there"),
    ):
        checkpoints.give_score(path, 1.0)
    assert checkpoints.read(path).score is None
    assert os.listdir(checkpoints.folder) == [path.name]
    checkpoints.give_score(path, 1.0)
    assert checkpoints.read(path).score == 1.0


def test_a_run_folder_that_cannot_be_looked_into_asks_for_no_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = os.geteuid()
    held = RunFolder(run, {}, None)
    run.chmod(0)
    try:
        if not mine:
            os.seteuid(UNPRIVILEGED)  # permissions do not bind root
        assert asked_to_stop(held.folder) is None
    finally:
        os.seteuid(mine)
        run.chmod(0o755)
        held.close()
