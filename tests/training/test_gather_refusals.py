"""Gathers gone wrong: one clear error on every rank, also where ranks part ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.gathering import encoder, spread
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, MOST_S, Refused, does_it, loop_over, on_this_rank, samples

pytestmark = [pytest.mark.covers("D10", "D13"), pytest.mark.on_gpus_too]


# -- refusals ----------------------------------------------------------------------------------------------


def rebel(world: dl.World, folder: str, act: Callable[..., Any], culprit: int, at: int = 1) -> None:
    """A loop in which one rank, or all, does `act` in its first shard of a step instead of holding its output."""
    model = encoder()
    for step in loop_over(world, folder, model):
        for number, rows in enumerate(step):
            output = model(rows)
            if step.iteration == at and number == 0 and does_it(world, culprit):
                act(step, output)
            else:
                step.hold(output)
        step.backward(spread(step.gather()))
        step.fold()


def leave_out(step: dl.Step, output: torch.Tensor) -> None:
    pass


def hold_nothing(step: dl.Step, output: torch.Tensor) -> None:
    step.hold()


def hold_a_scalar(step: dl.Step, output: torch.Tensor) -> None:
    step.hold(output.mean())


def hold_wider(step: dl.Step, output: torch.Tensor) -> None:
    step.hold(torch.cat([output, output], 1))


def hold_detached(step: dl.Step, output: torch.Tensor) -> None:
    step.hold(output.detach())


def hold_twice(step: dl.Step, output: torch.Tensor) -> None:
    step.hold(output)
    step.hold(output)


def hold_and_go_back(step: dl.Step, output: torch.Tensor) -> None:
    step.backward(output.mean())
    step.hold(output)


def gather_inside(step: dl.Step, output: torch.Tensor) -> None:
    step.hold(output)
    step.gather()


REBELS: list[tuple[Callable[..., Any], str, str]] = [
    (leave_out, "RuntimeError", "step.gather needs held outputs of every shard. Step . has none of .* Call step.hold"),
    (hold_nothing, "ValueError", "step.hold takes the outputs that the loss of the whole mini-batch needs. Got none"),
    (hold_a_scalar, "ValueError", r"must have a row per sample, shape \(\d, ...\). Got \(\)"),
    (hold_twice, "RuntimeError", "step.hold must be called once for each shard, .* comes after another one"),
    (hold_and_go_back, "RuntimeError", "step.hold must be called once for each shard, .* comes after another one"),
    (gather_inside, "RuntimeError", "step.gather must be called once, between the shards and the fold"),
]


@pytest.mark.covers("D10")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("act", "kind", "said"), REBELS)
def test_a_rank_that_holds_what_it_must_not_ends_all(
    act: Callable[..., Any], kind: str, said: str, at: int, refused: Refused
) -> None:
    refused(3, rebel, act, 1, at, kind=kind, said=said, by=1)


@pytest.mark.parametrize("act", [hold_wider, hold_detached])
@pytest.mark.parametrize("at", [1, 3])
def test_forms_that_differ_between_ranks_are_refused_on_all(act: Callable[..., Any], at: int, refused: Refused) -> None:
    refused(3, rebel, act, 1, at, kind="ValueError", said="the same row shapes and dtypes, .* Pad them", by=ALL)


def weigh_the_whole(world: dl.World, folder: str, **keywords: Any) -> None:
    model = encoder()
    for step in loop_over(world, folder, model):
        for rows in step:
            step.hold(model(rows))
        step.backward(spread(step.gather()), weight=3)


def forget_backward(world: dl.World, folder: str) -> None:
    model = encoder()
    for step in loop_over(world, folder, model):
        for rows in step:
            step.hold(model(rows))
        step.gather()
        step.fold()


def forget_gather(world: dl.World, folder: str) -> None:
    model = encoder()
    for step in loop_over(world, folder, model):
        for rows in step:
            step.hold(model(rows))
        step.fold()


def test_a_gather_is_followed_by_one_plain_backward(refused: Refused) -> None:
    refused(2, weigh_the_whole, kind="ValueError", said="takes no weight, no reduction and no more_losses=", by=ALL)
    for scenario in (forget_backward, forget_gather):
        refused(2, scenario, kind="RuntimeError", said="step.backward must be called for every shard", by=ALL)


# -- ranks that part ways ----------------------------------------------------------------------------------


def part_ways(world: dl.World, folder: str, way: str, at: int, count: int = 24) -> None:
    model = encoder()
    batches = dl.Batches(samples(count), 6, world, shuffle=False)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
        other = step.iteration == at and world.rank == 1
        if other and way == "break":
            break
        if other and way == "continue":
            continue
        had = 0
        for rows in step:
            had += 1
            if other and way == "fold":
                step.backward(model(rows).mean())
            else:
                step.hold(model(rows))
        if (other and way == "fold") or (way == "empty" and not had):
            step.fold()
            continue
        step.backward(spread(step.gather()))
        step.fold()


@pytest.mark.covers("D10")
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("continue", "Every rank must call step.gather, or none|Every step must end with step.fold"),
        ("fold", "Every rank must call step.gather, or none"),
    ],
)
@pytest.mark.quick_on_gpus
def test_a_rank_that_does_not_gather_ends_all(way: str, said: str, at: int, refused: Refused) -> None:
    refused(3, part_ways, way, at, kind="RuntimeError", said=said)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.slow
def test_a_rank_that_leaves_where_others_gather_is_named(at: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second, third = on_ranks(3, on_this_rank, part_ways, str(tmp_path / "run"), ("break", at))
    assert second.kind == ""  # a break is no error where it is made
    for result in (first, third):
        assert (result.kind, f"it left the loop in step {at}" in result.text) == ("PeerFailed", True), result
        assert result.took_s < MOST_S


@pytest.mark.covers("D10", "C6")
def test_a_rank_without_a_shard_that_does_not_gather_ends_all(refused: Refused) -> None:
    refused(3, part_ways, "empty", 0, 8, kind="RuntimeError", said="Call it also where a rank has no shard")


class Rows:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(samples(self.count))


def gather_streams(world: dl.World, folder: str, count: int, other: int) -> None:
    model = encoder()
    batches = dl.Batches(Rows(other if world.rank == 1 else count), 6, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
        for rows in step:
            step.hold(model(rows))
        step.backward(spread(step.gather()))
        step.fold()


@pytest.mark.covers("A9", "D10")
@pytest.mark.parametrize(
    ("count", "other", "said"),
    [
        (
            11,
            10,
            "a stream's last mini-batch must be the same on every rank. Rank 0 has 5, rank 1 has 4",
        ),
        (17, 12, "In mini-batch 2 of epoch 1 it ended on 1 of 2 ranks"),
        (5, 4, "the samples of a mini-batch must be the same on every rank. Rank 0 has 5, rank 1 has 4"),
    ],
)
def test_streams_that_differ_are_refused_before_they_are_gathered(
    count: int, other: int, said: str, refused: Refused
) -> None:
    refused(2, gather_streams, count, other, kind="ValueError", said=said, by=ALL)


def gather_no_number(world: dl.World, folder: str) -> None:
    rows = samples(12)
    rows[9] = float("nan")
    model = encoder()
    for step in dl.Loop(
        dl.Batches(rows, 12, world, shards=2), 1, state={"model": model}, run_dir=folder, progress=False
    ):
        for part in step:
            step.hold(model(part))
        step.backward(spread(step.gather()))
        step.fold()


def test_a_loss_of_all_that_is_not_finite_blames_no_shard(refused: Refused) -> None:
    said = "The loss of step 1 is nan. Look for NaN"
    refused(2, gather_no_number, kind="FloatingPointError", said=said, by=ALL)
