"""A run that was stopped anywhere and goes on, on any number of ranks, is the undisturbed run: to the bit."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import Checkpointer, CheckpointStore, run_id_of
from tests.support.both_exchanges import GLOO, MEMORY, exchange_of
from tests.support.harness import OnRanks
from tests.support.resuming import BUILDS, EPOCHS, STEPS, Ended, different, train, train_in
from tests.support.runs import checkpoints_of, endless, rows_of, status_of

# torch does not know that the optimizer stepped in another process, where a run resumes at the end of the first epoch.
pytestmark = [pytest.mark.covers("E5"), pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")]


# -- everywhere ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_a_run_that_goes_on_after_any_step_is_the_undisturbed_one(build: str, tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), build=build)
    assert whole.made == list(range(1, EPOCHS * STEPS + 1))
    for at in (1, 3, STEPS, STEPS + 1, EPOCHS * STEPS) if build == "usual" else (2, STEPS, STEPS + 1):
        run = tmp_path / str(at)
        first = train(str(run), at, build)
        assert (first.stopped, first.made[-1], checkpoints_of(run)[-1]) == ("loop.stop()", at, at)
        assert (status_of(run)["status"], status_of(run)["iteration"]) == ("stopped", at)
        second = train(str(run), build=build)
        assert second.made == whole.made[at:]
        assert different(whole, second) == []
        assert rows_of(run) == whole.made
        assert status_of(run)["status"] == "done"


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_a_run_stopped_twice_within_an_epoch_is_the_undisturbed_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    (whole,) = on_ranks(1, train, "")
    parts = [on_ranks(1, train, str(tmp_path), at)[0] for at in (6, 8, None)]
    assert [one.made for one in parts] == [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]
    assert different(whole, parts[-1]) == []
    assert rows_of(tmp_path) == whole.made


@pytest.mark.covers("H7")
@pytest.mark.parametrize(("at", "build"), [(3, "usual"), (STEPS, "bfloat16")])
@pytest.mark.slow
@pytest.mark.on_gpus_too
def test_a_run_of_two_ranks_goes_on_on_any_number(at: int, build: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(2, train, "", build=build)[0]
    on_ranks(2, train, str(tmp_path / "begun"), at, build)
    for ranks in (1, 4):
        run = tmp_path / f"{ranks} ranks"
        shutil.copytree(tmp_path / "begun", run)
        for ended in on_ranks(ranks, train, str(run), build=build):
            assert ended.made == whole.made[at:]
            assert different(whole, ended) == []
        assert rows_of(run) == whole.made


@pytest.mark.covers("H7")
def test_a_run_goes_on_over_another_exchange_on_another_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(1, train, "")[0]
    for ranks, exchange, until in ((2, MEMORY, 3), (3, GLOO, 6), (2, MEMORY, None)):
        with exchange_of(exchange):
            results = on_ranks(ranks, train, str(tmp_path), until)
    for ended in results:
        assert ended.made == whole.made[6:]
        assert different(whole, ended) == []


def read_sequences(folder: str, epochs: int) -> str:
    """What was printed, on rank 0, of a run on sequences without shards of its own."""
    with redirect_stdout(StringIO()) as said, dl.join_world() as world:
        model = torch.nn.Linear(1, 1).to(world.device)
        batches = dl.SequenceBatches([torch.ones(4, 1), torch.ones(4, 1)], 2, 2, world)
        for step in dl.Loop(batches, epochs, state={"model": model}, run_dir=folder, progress=False):
            for chunk in step:
                step.backward(model(chunk.data).mean())
            step.fold()
        return said.getvalue()


def test_the_remedy_for_sequences_on_other_ranks_names_their_batches(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, read_sequences, str(tmp_path), 1)
    assert "Begin runs with SequenceBatches(shards=2) for" in on_ranks(1, read_sequences, str(tmp_path), 2)[0]


def train_and_listen(folder: str, shards: int | None, at: int | None = None) -> tuple[Ended, str]:
    """How the run ended, and what it printed."""
    with redirect_stdout(StringIO()) as said, dl.join_world(seed=3) as world:
        return train_in(world, folder, at, "usual", shards=shards), said.getvalue()


@pytest.mark.parametrize(("shards", "told"), [(None, 1), (6, 0)])
@pytest.mark.slow
def test_a_run_that_resumes_on_other_ranks_with_their_own_shards_says_that_the_bits_differ(
    shards: int | None, told: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copy = tmp_path / "copy"
    for at in (3, 5):
        assert "resumes on" not in on_ranks(2, train_and_listen, str(run), shards, at)[0][1]
    shutil.copytree(run, copy)
    said = on_ranks(1, train_and_listen, str(run), shards, 7)[0][1]
    assert said.count("ran on 2 ranks and resumes on 1. Without shards= each rank computes one shard") == told
    assert said.count("and the bits differ. Begin runs with Batches(shards=2) for the same bits") == told
    said = on_ranks(2, train_and_listen, str(run), shards)[0][1]
    assert said.count("ran on 1 rank and resumes on 2.") == said.count("Begin runs with Batches(shards=2)") == told
    whole = on_ranks(2, train_and_listen, "", shards)
    for (one, _), (other, _) in zip(whole, on_ranks(2, train_and_listen, str(copy), shards), strict=True):
        assert different(one, other) == []  # on as many ranks as it began


# -- which one is gone on from ---------------------------------------------------------------------------------


def test_a_run_begun_anew_keeps_the_old_one(tmp_path: Path) -> None:
    whole = train("")
    train(str(tmp_path), 3)
    assert different(whole, train(str(tmp_path), resume=False)) == []
    train(str(tmp_path), 2, resume=False)
    assert checkpoints_of(tmp_path) == [2]
    assert rows_of(tmp_path) == [1, 2]
    for number, rows, status in (("1", [1, 2, 3], "stopped"), ("2", whole.made, "done")):
        before = tmp_path / "before" / number
        assert (rows_of(before), status_of(before)["status"]) == (rows, status)
        assert checkpoints_of(before)[-1] == rows[-1]


@pytest.mark.slow
def test_a_score_of_a_whole_epoch_is_that_of_its_last_step(tmp_path: Path) -> None:
    scores = dict.fromkeys(range(1, 11), 9.0) | {5: 0.25, 10: 0.5}
    whole = train("")
    for every in (None, 4, 10**6):  # written after the epoch, before its end, or kept in memory until it has a score
        run = tmp_path / str(every)
        train(str(run), keep_last=1, score=scores, save_every=every)
        assert checkpoints_of(run) == [5, 10]
        found = CheckpointStore(run, run_id_of(run) or "").entries(verify=True)
        assert [(one.iteration, one.score, one.problem) for one in found] == [(10, 0.5, None), (5, 0.25, None)]
        shutil.rmtree(run / "checkpoints" / "step-00000010")
        assert different(whole, train(str(run), keep_last=1, score=scores, save_every=every)) == []


def leave_alone(folder: str) -> tuple[int | None, str]:
    """Rank 1 leaves the loop: rank 0 fails in its next step, and rank 1 in an evaluation that it alone reaches."""
    try:
        with dl.join_world() as world:
            loop, make = endless(world, run_dir=folder)
            for step in loop:
                make(step)
                if step.iteration == 3 and world.rank == 1:
                    break
            dl.evaluate(nn.Linear(2, 1), dl.Batches(torch.ones(4, 2), 4, world), mean=lambda output, _: output.mean())
    except dl.PeerFailed as error:
        return error.rank, str(error)
    return None, "no error"


def test_the_status_names_the_rank_that_left_the_loop_alone(on_ranks: OnRanks, tmp_path: Path) -> None:
    for rank, said in on_ranks(2, leave_alone, str(tmp_path)):
        assert rank == 1
        assert "left the loop" in said
    status = status_of(tmp_path)
    assert (status["status"], status["rank"], status["step"]) == ("failed", 1, 3)
    assert "left the loop" in status["why"]


def fail_while_a_checkpoint_is_written(folder: str) -> list[str]:
    """The run's status before and after each wait of the loop for the writer, which is done in that wait alone."""
    found = list[str]()
    is_waited_for = threading.Event()
    wait, write = Checkpointer.wait, CheckpointStore.write

    def look(checkpointer: Checkpointer) -> None:
        found.append(status_of(Path(folder))["status"])
        is_waited_for.set()
        wait(checkpointer)
        found.append(status_of(Path(folder))["status"])

    def write_late(*arguments: Any, **keywords: Any) -> Path:
        is_waited_for.wait()
        return write(*arguments, **keywords)

    with ExitStack() as inside:
        inside.enter_context(mock.patch.object(Checkpointer, "wait", look))
        inside.enter_context(mock.patch.object(CheckpointStore, "write", write_late))
        inside.enter_context(suppress(ArithmeticError))
        world = inside.enter_context(dl.join_world())
        loop, make = endless(world, run_dir=folder, save_every=2)
        for step in loop:
            make(step)
            is_waited_for.clear()
            if step.iteration == 3:
                raise ArithmeticError
    return found


def test_a_failure_is_recorded_before_the_wait_for_a_checkpoint_and_stays(on_ranks: OnRanks, tmp_path: Path) -> None:
    (found,) = on_ranks(1, fail_while_a_checkpoint_is_written, str(tmp_path))
    assert found[-2:] == ["failed", "failed"]
    assert status_of(tmp_path)["checkpoint"] == "step-00000002"


def lose_an_unknown_peer(folder: str) -> None:
    with suppress(dl.PeerFailed), dl.join_world() as world:
        loop, make = endless(world, run_dir=folder)
        for step in loop:
            make(step)
            raise dl.PeerFailed("the network between the machines is broken")


def test_a_failure_of_an_unknown_rank_is_recorded_without_a_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, lose_an_unknown_peer, str(tmp_path))
    status = status_of(tmp_path)
    assert (status["status"], status["rank"], status["iteration"]) == ("failed", -1, 1)
