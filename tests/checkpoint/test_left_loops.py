"""A Loop that was left by a break or an error gives its run folder to the next one, as in a cell that is run again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import is_running
from tests.support.harness import OnRanks, caught
from tests.support.refusals import loop_over, loss_of, network
from tests.support.runs import ROWS, checkpoints_of, lines_of, rows_of, status_of
from tests.support.training import take

pytestmark = pytest.mark.covers("E5")


class Interrupted(Exception):
    """What a cell raises."""


def make(step: dl.Step, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Make a step, and return its number."""
    take(step, model)
    if optimizer is not None:
        optimizer.step()
    return step.iteration


def run_cell(world: dl.World, folder: str, leave_at: int | None = None, how: str = "break", **more: Any) -> list[int]:
    """A notebook's cell: a new model, optimizer and Loop, and all steps or some; returns the steps that it made."""
    model = network()
    made = list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = loop_over(world, folder, model, optimizer, save_every=1, **{"epochs": 2, **more})
    with suppress(Interrupted):
        for step in loop:
            here = how if step.iteration == leave_at else ""
            for rows in step:
                step.backward(loss_of(model, rows))
                if here == "an error in a shard":
                    raise Interrupted
            if here == "an error before the fold":
                raise Interrupted
            step.fold()
            optimizer.step()
            made.append(step.iteration)
            if here == "save and break":
                loop.save()
            if here.endswith("break"):
                break
            if here == "an error":
                raise Interrupted
    return made


def run_cells(folder: str, how: str | None, shards: int | None) -> tuple[list[list[int]], list[str]]:
    """Which steps the cells made, and the folder's status after each and in the end."""
    made, statuses = [], []
    with dl.join_world(seed=1) as world:
        for leave_at in (None,) if how is None else (3, 5, None):
            made.append(run_cell(world, folder, leave_at, how or "", shards=shards))
            world.gather(None)
            statuses.append(str(status_of(Path(folder))["status"]))
    return made, [*statuses, str(status_of(Path(folder))["status"])]


@pytest.mark.parametrize("how", ["break", "an error", "an error before the fold", "an error in a shard"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (3, None), (2, 3)])
@pytest.mark.slow
@pytest.mark.on_gpus_too
@pytest.mark.both_exchanges
def test_a_cell_that_is_run_again_resumes_from_the_newest_checkpoint(
    ranks: int, how: str, shards: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    on_ranks(ranks, run_cells, str(tmp_path / "whole"), None, shards)
    for made, statuses in on_ranks(ranks, run_cells, str(tmp_path / "run"), how, shards):
        # A checkpoint of a step is made as the next one begins: the cells resume after steps 2 and 4.
        assert [made[0][0], made[1][0]] == [1, 3]
        assert made[2] == [5, 6, 7, 8]
        assert statuses == ["running", "running", "done", "done"]
    losses, whole = (
        [(row["iteration"], row["loss"]) for row in lines_of(tmp_path / name / ROWS)] for name in ("run", "whole")
    )
    assert losses == whole
    assert not is_running(tmp_path / "run")


def test_a_save_in_the_step_in_which_the_loop_is_left_is_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for how, said in (("save and break", 1), ("break", 0)):
        with dl.join_world(seed=1) as world:
            run_cell(world, str(tmp_path / how), 3, how)
        assert capsys.readouterr().out.count("The loop was left in step 3, so there is none of this step.") == said
        assert checkpoints_of(tmp_path / how) == [1, 2]


def start_over(folder: str) -> list[list[int]]:
    with dl.join_world(seed=1) as world:
        return [run_cell(world, folder, 3), run_cell(world, folder, resume=False)]


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_a_cell_may_start_over_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, start_over, str(tmp_path)) == [[[1, 2, 3], [*range(1, 9)]]] * 2
    before = tmp_path / "before" / "1"
    assert (checkpoints_of(before), rows_of(before), status_of(before)["status"]) == ([1, 2], [1, 2, 3], "left")
    assert rows_of(tmp_path) == [*range(1, 9)]


def fail_at_last(folder: str) -> None:
    with suppress(ZeroDivisionError), dl.join_world(seed=1) as world:
        run_cell(world, folder, 3)
        run_cell(world, folder, 5)
        1 / 0  # noqa: B018


def test_an_error_after_a_second_break_ends_the_run_that_has_the_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, fail_at_last, str(tmp_path))
    said = status_of(tmp_path)
    assert (said["status"], said["iteration"]) == ("failed", 5)
    assert "ZeroDivisionError" in said["why"]
    assert rows_of(tmp_path) == [1, 2, 3, 4, 5]


def replace_before_its_first_step(folder: str) -> tuple[tuple[str, str, float], list[int]]:
    """A cell that creates the Loop is run again before the cell that iterates it."""
    with dl.join_world(seed=1) as world:
        first = loop_over(world, folder, network())
        made = run_cell(world, folder)
        return caught(next, iter(first)), made


def test_a_loop_that_was_not_iterated_yet_gives_the_folder_up(on_ranks: OnRanks, tmp_path: Path) -> None:
    for (kind, text, _), made in on_ranks(2, replace_before_its_first_step, str(tmp_path)):
        assert (kind, made) == ("RuntimeError", [*range(1, 9)])
        assert "This one stopped when a newer Loop took over its run folder. Create a new Loop." in text
    assert status_of(tmp_path)["status"] == "done"


def go_on_with_the_same_model(folder: str, how: str) -> tuple[list[int], list[float]]:
    """The model and its optimizer were made in another cell, which is not run again."""
    with dl.join_world(seed=1) as world:
        model = network()
        made = list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loops = [loop_over(world, folder, model, optimizer, save_every=1)]
        for step in loops[0] if how == "break" else ():
            made.append(make(step, model, optimizer))
            if step.iteration == 3:
                break
        if how != "undisturbed":
            loops.append(loop_over(world, folder, model, optimizer, save_every=1))
        made += [make(step, model, optimizer) for step in loops[-1]]
        return made, [float(one.detach().double().sum()) for one in model.parameters()]


@pytest.mark.parametrize(("how", "steps"), [("not iterated", [1, 2, 3, 4]), ("break", [1, 2, 3, 3, 4])])
@pytest.mark.slow
def test_the_model_and_the_optimizer_may_stay(how: str, steps: list[int], on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(2, go_on_with_the_same_model, str(tmp_path / "whole"), "undisturbed")
    for rank, (made, weights) in enumerate(on_ranks(2, go_on_with_the_same_model, str(tmp_path / "run"), how)):
        assert (made, weights) == (steps, whole[rank][1])


def use_two_at_once(folder: str, place: str) -> tuple[tuple[str, str, float], list[int]]:
    """A second Loop is asked for inside a step of the first, or between its epochs."""
    with dl.join_world(seed=1) as world:
        model = network()
        made = list[int]()
        refused = ("", "", 0.0)
        for epoch in loop_over(world, folder, model, epochs=2, save_every=1).epochs():
            for step in epoch:
                made.append(make(step, model))
                if place == "inside an epoch" and step.iteration == 2:
                    refused = caught(loop_over, world, folder, network())
            if place == "between epochs" and epoch.number == 1:
                refused = caught(loop_over, world, folder, network())
        return refused, made


@pytest.mark.parametrize("place", ["inside an epoch", "between epochs"])
def test_a_loop_that_is_iterated_keeps_its_folder(place: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    results = on_ranks(2, use_two_at_once, str(tmp_path), place)
    assert [refused[0] for refused, _ in results] == ["RuntimeError", "PeerFailed"]
    for (_, text, _), made in results:
        assert "is held by another Loop of this process. It is being iterated. Let it end, leave it by a break," in text
        assert made == [*range(1, 9)]
    assert rows_of(tmp_path) == [*range(1, 9)]
    assert status_of(tmp_path)["status"] == "done"


def save_too_late(folder: str, epochs: int, save_every: int | None) -> tuple[str, str, float]:
    """After the first of `epochs`."""
    with dl.join_world(seed=1) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = loop_over(world, folder, model, optimizer, epochs=epochs, save_every=save_every)
        for epoch in loop.epochs():
            for step in epoch:
                make(step, model)
            break
        run_cell(world, folder)
        return caught(loop.save, 0.5)


@pytest.mark.parametrize(("epochs", "save_every"), [(1, None), (2, 3)])
def test_a_loop_whose_folder_was_taken_over_saves_nothing_there(
    epochs: int, save_every: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    for kind, text, _ in on_ranks(2, save_too_late, str(tmp_path), epochs, save_every):
        assert kind == "RuntimeError"
        assert f"A newer Loop has taken over {tmp_path}. Call save of that one" in text


def test_another_process_is_refused_with_remedies_that_help(on_ranks: OnRanks, tmp_path: Path) -> None:
    world = dl.join_world(seed=1)
    try:
        run_cell(world, str(tmp_path), 3, epochs=1)
        for kind, text, _ in on_ranks(2, caught, run_in_a_world, str(tmp_path)):
            assert kind in ("RuntimeError", "PeerFailed")
            assert f"{tmp_path} is held by process {os.getpid()} on " in text
            assert "A notebook that left its loop holds the folder until it calls world.leave() or ends." in text
    finally:
        world.leave()
    assert on_ranks(2, run_in_a_world, str(tmp_path)) == [[3, 4]] * 2


def run_in_a_world(folder: str) -> list[int]:
    with dl.join_world(seed=1) as world:
        return run_cell(world, folder, epochs=1)


def test_a_new_world_of_the_process_takes_over_what_a_loop_of_the_old_one_left(tmp_path: Path) -> None:
    """All cells of a notebook are run again, the one that joins the world too."""
    worlds = [dl.join_world(seed=1), dl.join_world(seed=1)]
    try:
        assert run_cell(worlds[0], str(tmp_path), 3) == [1, 2, 3]
        assert run_cell(worlds[1], str(tmp_path)) == [*range(3, 9)]
        worlds[0].leave()
        assert status_of(tmp_path)["status"] == "done"
    finally:
        for world in worlds[::-1]:
            world.leave()
