"""A save under way: the memory that it takes, the step that its messages name, and a world that is left meanwhile."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint.checkpointer import KEPT_BYTES, Checkpointer
from tests.support.harness import FAULT_S, OnRanks, caught, until
from tests.support.memory import living_tensors, only_new_objects
from tests.support.refusals import Refused, loop_over, loss_of, network, on_this_rank
from tests.support.runs import checkpoints_of
from tests.support.training import mean, take

WIDTH = 1009  # a size that no other tensor has


def copies() -> int:
    """The pieces of memory that hold a tensor of this size."""
    return len({one.untyped_storage().data_ptr() for one in living_tensors() if one.numel() == WIDTH})


def steps_and_copies(folder: Path, kept_bytes: int = KEPT_BYTES, **options: Any) -> list[int]:
    """The copies that are in memory in each step of two epochs, once its save has ended, and at the end."""
    kept = mock.patch("ddp_loop.checkpoint.checkpointer.KEPT_BYTES", kept_bytes)
    with kept, only_new_objects(), dl.join_world() as world:
        model = nn.Linear(WIDTH, 1, bias=False)
        batches = dl.Batches(torch.randn(8, WIDTH), 2, world)
        loop = dl.Loop(batches, 2, state={"model": model}, run_dir=folder, progress=False, **options)
        checkpointer = loop._recorder.checkpointer
        assert checkpointer is not None
        counted = []
        for epoch in loop.epochs():
            for step in epoch:
                take(step, model, mean)
                model.zero_grad()
                checkpointer.wait()
                counted.append(copies())
        return [*counted, copies()]


@pytest.mark.on_gpus_too
@pytest.mark.parametrize("options", [{"save_every": 1}, {"save_every": 100}, {}])
def test_a_large_state_is_in_memory_once_after_a_save(
    options: dict[str, int], on_ranks: OnRanks, tmp_path: Path
) -> None:
    (counted,) = on_ranks(1, steps_and_copies, tmp_path, 4 * WIDTH - 1, **options)
    once = counted[0]
    assert [one - once for one in counted] == (
        # Without a checkpoint at an epoch's end, its state is held until the next step is made.
        [0, 0, 0, 0, 1, 0, 0, 0, -1] if options.get("save_every") == 100 else [0, 0, 0, 0, 0, 0, 0, 0, -1]
    )  # the loop's bucket is freed with it


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_a_small_state_keeps_its_memory_until_the_end(on_ranks: OnRanks, tmp_path: Path) -> None:
    (counted,) = on_ranks(1, steps_and_copies, tmp_path, save_every=1)
    assert [one - counted[0] for one in counted] == [0, 1, 1, 1, 1, 1, 1, 1, -1]


def save_each_step(world: dl.World, folder: str) -> None:
    make_steps(loop_over(world, folder, model := network(), save_every=1), model)


def make_steps(loop: dl.Loop, model: nn.Module, then: Callable[[dl.Step], object] = lambda step: None) -> None:
    """Make all steps, with a call after each."""
    for epoch in loop.epochs():
        for step in epoch:
            take(step, model)
            then(step)


def test_the_three_newest_checkpoints_stay_by_default(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, on_this_rank, save_each_step, str(tmp_path), ())
    assert checkpoints_of(tmp_path) == [2, 3, 4]


# -- messages ------------------------------------------------------------------------------------------------


def save_wrongly(world: dl.World, folder: str, fault: str) -> None:
    model = network()
    notes = dict[str, Any]()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)

    def spoil(step: dl.Step) -> None:
        if step.iteration == 2 and world.rank == 1 and fault == "differs":
            notes["more"] = torch.ones(3)
        if step.iteration == 3 and world.rank == 1 and fault == "has other values":
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        if step.iteration == 3 and world.rank == 0 and fault == "cannot be stored":
            notes["file"] = range(3)
        if step.iteration == 3 and fault == "has lost a group":
            optimizer.step()
            del optimizer.param_groups[0]

    every = 100 if fault == "cannot be stored" else None  # the state of an epoch's end is then held in memory
    loop = loop_over(world, folder, model, notes, optimizer, epochs=2, save_every=every, check_replicas_every=0)
    make_steps(loop, model, spoil)


def fail_after_a_fold(folder: str) -> None:
    """Rank 1 fails between a fold and the checkpoint of that step."""

    def fail(step: dl.Step) -> None:
        if step.iteration == 3 and world.rank == 1:
            raise ZeroDivisionError

    with dl.join_world() as world:
        make_steps(loop_over(world, folder, model := network(), save_every=1), model, fail)


def printed_after(failure: Callable[[str], None], folder: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed), suppress(Exception):
        failure(folder)
    return printed.getvalue()


def test_a_checkpoint_that_a_failure_prevents_does_not_ask_for_save(on_ranks: OnRanks, tmp_path: Path) -> None:
    printed, _ = on_ranks(2, printed_after, fail_after_a_fold, str(tmp_path))
    assert "A rank failed before rank 1 sent its checksums for the checkpoint of step 3." in printed
    assert "loop.save()" not in printed


def score_wrongly(world: dl.World, folder: str, scores: tuple[float | None, float | None], inside: bool) -> None:
    """After the second epoch, or in step 6, two ranks give these scores; one without does not call `save`."""
    model = network()
    score = scores[world.rank]
    loop = loop_over(world, folder, model, epochs=3)
    for epoch in loop.epochs():
        for step in epoch:
            for rows in step:
                step.backward(loss_of(model, rows))
            if inside and step.iteration == 6 and score is not None:
                loop.save(score)
            step.fold()
        if not inside and epoch.number == 2 and score is not None:
            loop.save(score)


@pytest.mark.parametrize(
    ("scores", "inside", "said"),
    [
        ((2.0, 3.0), False, r"score of loop\.save must be the same on every rank\. Rank 0 has 2\.0, rank 1 has 3\.0"),
        ((2.0, 3.0), True, r"score of loop\.save must be the same on every rank\. Rank 0 has 2\.0, rank 1 has 3\.0"),
        ((None, 3.0), True, r"rank 1 is at a gather of score of loop\.save|did not take part"),
        ((float("nan"), float("nan")), False, "^$"),
    ],
)
def test_a_score_must_be_given_on_every_rank_alike(
    scores: tuple[float | None, float | None], said: str, inside: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    for one in on_ranks(2, on_this_rank, score_wrongly, str(tmp_path), (scores, inside)):
        assert re.search(said, one.text)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("differs", "ReplicaMismatch", "step 4, the state of rank 1 and that of rank 0 have different tensors"),
        (
            "has other values",
            "ReplicaMismatch",
            r"step 4, rank 0 and rank 1 of 2 differ from each other in job\.model\.",
        ),
        ("cannot be stored", "TypeError", r"step 4 could not be made\. state\.job\.other 0\.file is of type range"),
        ("has lost a group", "ValueError", r"step 4 could not be made\. .* optimizer\.state\.pop\(parameter\)"),
    ],
)
def test_what_is_wrong_at_a_checkpoint_is_named_with_its_step(
    fault: str, kind: str, said: str, refused: Refused
) -> None:
    refused(2, save_wrongly, fault, kind=kind, said=rf"[Tt]he checkpoint of {said}", by=None)


def save_notes(folder: str, differ: bool) -> str:
    """What is printed where the notes in the state have each rank's number, or the same ones in another order."""
    printed = io.StringIO()
    with redirect_stdout(printed), dl.join_world() as world:
        pairs = [("hardest", [world.rank if differ else 7]), ("words", {"a", "b", "c", "d"})]
        notes = dict(reversed(pairs) if world.rank else pairs)
        make_steps(loop_over(world, folder, model := network(), notes, save_every=2), model)
    return printed.getvalue()


@pytest.mark.parametrize("differ", [True, False])
def test_values_of_a_rank_alone_are_named_once(differ: bool, on_ranks: OnRanks, tmp_path: Path) -> None:
    printed, _ = on_ranks(2, save_notes, str(tmp_path), differ)
    said = "state['other 0'] of rank 1 and of rank 0 have different numbers or words at the checkpoint of step 2."
    assert printed.count("different numbers or words") == printed.count(said) == differ


# -- a world that is left ------------------------------------------------------------------------------------


def leave_in_a_save(folder: str, comes: bool) -> None:
    """Rank 0 fails while its save waits for rank 1, whose checksums come after that, or never."""
    usual, threads = Checkpointer._begin, list[threading.Thread]()

    def later(self: Checkpointer, *arguments: Any) -> None:
        def begin() -> None:
            until(self._world.store.has_failure, "rank 0 fails")
            usual(self, *arguments)

        if comes:
            threads.append(threading.Thread(target=begin))
            threads[0].start()

    def fail(step: dl.Step) -> None:
        if step.iteration == 3 and world.rank == 0:
            raise ZeroDivisionError

    try:
        with dl.join_world() as world:
            if world.rank == 1:
                Checkpointer._begin = later  # type: ignore[method-assign, assignment]
            make_steps(loop_over(world, folder, model := network(), save_every=2), model, fail)
    finally:
        Checkpointer._begin = usual  # type: ignore[method-assign]
        for one in threads:
            one.join()


@pytest.mark.parametrize("comes", [True, False])
def test_a_save_under_way_is_completed_when_an_exception_leaves_the_world(
    comes: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, second = on_ranks(2, caught, leave_in_a_save, str(tmp_path), comes)
    assert (first[0], second[0]) == ("ZeroDivisionError", "PeerFailed")
    assert checkpoints_of(tmp_path) == ([2] if comes else [])
    assert max(first[2], second[2]) < FAULT_S  # a grace, not the world's timeout
