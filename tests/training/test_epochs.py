"""A Loop iterated epoch by epoch, and Batches in a plain `for`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import Refused, loop_over, mean_of, network, samples
from tests.support.sources import Streamed
from tests.support.training import loop_on, sgd, take


def make(step: dl.Step, model: nn.Module) -> None:
    take(step, model)
    sgd(model).step()


def numbers_and_steps(loop: dl.Loop, model: nn.Module) -> list[tuple[int, int]]:
    """The number of each epoch, and how many steps it has."""
    found = []
    for epoch in loop.epochs():
        before = loop.iteration
        for step in epoch:
            assert step.epoch == epoch.number
            make(step, model)
        found.append((epoch.number, loop.iteration - before))
    return found


def by_epochs_and_not() -> Tensors:
    """The parameters, which must be the same by epochs, with an evaluation between them."""
    with dl.join_world() as world:
        model, other = network(), network()
        for step in loop_over(world, "", model, epochs=3):
            make(step, model)
        test_batches = dl.Batches(samples(7), 3, world, shuffle=False)
        seen = []
        for epoch in loop_over(world, "", other, epochs=3).epochs():
            assert len(epoch) == 4
            for step in epoch:
                make(step, other)
                seen.append((epoch.number, step.iteration))
            assert dl.evaluate(other, test_batches, mean=mean_of)["samples"] == 7
    assert seen == [(1 + step // 4, 1 + step) for step in range(12)]
    assert is_same(values_of(model), values_of(other))
    return values_of(model)


def test_epoch_by_epoch_is_the_same_training_and_other_collectives_have_a_place_between(on_ranks: OnRanks) -> None:
    assert same_on_all(on_ranks(3, by_epochs_and_not))


def steps_in_epochs(folder: str) -> list[list[tuple[int, int]]]:
    found = []
    for steps in (6, 6, 7):
        with dl.join_world() as world:
            model = network()
            loop = loop_over(world, folder, model, epochs=None, steps=steps, resume=True)
            found.append(numbers_and_steps(loop, model))
    return found


def test_a_loop_of_so_many_steps_ends_within_an_epoch_which_a_resumed_one_repeats(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    expected = [[(1, 4), (2, 2)], [(2, 0)], [(2, 1)]]
    assert on_ranks(2, steps_in_epochs, str(tmp_path)) == [expected, expected]


def stream_in_epochs() -> list[tuple[int, int]]:
    with dl.join_world() as world:
        batches = dl.Batches(Streamed(lambda: samples(10)), 4, world)
        assert batches.steps is None
        model = network()
        return numbers_and_steps(loop_on(batches, model, epochs=2), model)


def test_epochs_of_unknown_length_have_their_numbers_too(on_ranks: OnRanks) -> None:
    assert on_ranks(3, stream_in_epochs) == [[(1, 3), (2, 3)]] * 3


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ((5, 1, 1), 7),
        ((4, 0, 4), 8),  # at the very end of an epoch
        ((12, 3, 0), 0),  # a finished run
        ((20, 5, 0), 0),  # and one of a longer loop
    ],
)
def test_a_loop_makes_the_steps_that_are_left(place: tuple[int, int, int], left: int, world: dl.World) -> None:
    made = []
    loop = loop_over(world, "", model := network(), epochs=3)
    loop.load_state_dict(dict(zip(("iteration", "epoch", "position"), place, strict=True)))
    for step in loop:
        take(step, model)
        made.append(step.iteration)
    assert made == [*range(13 - left, 13)]


# -- what is refused ---------------------------------------------------------------------------------------

Misuse = Callable[[dl.Loop, nn.Module], object]


def go_on_after_all_epochs(loop: dl.Loop, model: nn.Module) -> None:
    for _ in range(2):
        numbers_and_steps(loop, model)


def go_on_after_a_break(loop: dl.Loop, model: nn.Module) -> None:
    for epoch in loop.epochs():
        for step in epoch:
            make(step, model)
            break


def go_on_after_a_break_between_epochs(loop: dl.Loop, model: nn.Module) -> None:
    for epoch in loop.epochs():
        for step in epoch:
            make(step, model)
        break
    numbers_and_steps(loop, model)


def two_at_once(loop: dl.Loop, model: nn.Module) -> None:
    epochs = loop.epochs()
    steps = iter(next(epochs))
    make(next(steps), model)
    next(epochs)


def one_epoch_again(loop: dl.Loop, model: nn.Module) -> None:
    for epoch in loop.epochs():
        for step in chain(epoch, epoch):
            make(step, model)


def an_epoch_that_is_not_iterated(loop: dl.Loop, model: nn.Module) -> None:
    list(loop.epochs())


def misuse(world: dl.World, folder: str, how: Misuse) -> None:
    model = network()
    how(loop_over(world, folder, model, epochs=2), model)


ONCE = "each epoch must run to its end. This one {}. Create a new Loop"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (go_on_after_all_epochs, "A Loop can be iterated once, .* This one has made its 8 steps. Create a new Loop"),
        (one_epoch_again, ONCE.format("(is|stopped) before epoch 2")),
        (an_epoch_that_is_not_iterated, ONCE.format("(is|stopped) before epoch 1")),
        (go_on_after_a_break_between_epochs, ONCE.format("(is|stopped) before epoch 2")),
        (go_on_after_a_break, ONCE.format("stopped inside epoch 1")),
        (two_at_once, ONCE.format("stopped inside epoch 1")),
    ],
)
def test_each_epoch_is_iterated_once_to_its_end_and_in_order(how: Misuse, said: str, refused: Refused) -> None:
    refused(2, misuse, how, kind="RuntimeError", said=said)


# -- Batches in a plain `for` ------------------------------------------------------------------------------


def rows_of_this_rank(count: int, batch_size: int, shards: int | None) -> list[int]:
    with dl.join_world() as world:
        batches = dl.Batches(torch.arange(count), batch_size, world, shuffle=False, shards=shards)
        once, again = (torch.cat([*batches, torch.zeros(0)]).tolist() for _ in range(2))
        assert once == again
        return once


@pytest.mark.covers("B8")
@pytest.mark.parametrize(
    ("ranks", "count", "batch_size", "shards"), [(3, 10, 4, None), (3, 2, 5, None), (3, 17, 17, 5), (1, 1, 1, 2)]
)
def test_a_plain_for_gives_each_sample_once(
    ranks: int, count: int, batch_size: int, shards: int | None, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, rows_of_this_rank, count, batch_size, shards)
    assert sorted(row for rows in results for row in rows) == list(range(count))


def go_over_batches_for_training(world: dl.World, folder: str, endless: bool) -> None:
    next(iter(dl.Batches((lambda index: torch.ones(1)) if endless else samples(6), 3, world)))


@pytest.mark.parametrize(("endless", "why"), [(False, "are shuffled"), (True, "never end")])
def test_a_plain_for_over_batches_for_training_is_refused(endless: bool, why: str, refused: Refused) -> None:
    said = f"for evaluation. These {why}. Pass shuffle=False"
    refused(2, go_over_batches_for_training, endless, kind="ValueError", said=said)


def go_over_batches_alone(world: dl.World, folder: str) -> None:
    batches = dl.Batches(samples(6), 3, world, shuffle=False)
    if world.rank == 0:
        assert len(list(batches)) == 2
    for step in loop_over(world, None, model := network()):
        make(step, model)


def leave_after(world: dl.World, shards: int) -> int:
    read = list(islice(dl.Batches(samples(7), 3, world, shuffle=False), shards))
    return int(world.sum(torch.tensor(len(read))))


@pytest.mark.parametrize("shards", range(5))
def test_a_plain_for_that_all_ranks_leave_early_is_none_on_one_rank_alone(shards: int, on_ranks: OnRanks) -> None:
    read = min(shards, 3) + min(shards, 2)  # the last mini-batch has one sample, on rank 0
    assert on_ranks(2, in_world, leave_after, shards) == [read, read]


def test_a_plain_for_on_one_rank_alone_is_refused(refused: Refused) -> None:
    said = "rank 0 is at a gather of the length of Batches in a plain `for`"
    refused(2, go_over_batches_alone, kind="Parted", said=said, by=None)
