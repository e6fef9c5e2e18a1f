"""A Loop iterated epoch by epoch, and Batches in a plain `for`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ddp_loop as dl
from tests.support.comparing import values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, Scenario, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

Seen = list[tuple[int, int]]  # epoch and iteration of each step


def go(loop: dl.Loop, model: torch.nn.Module, *, by_epochs: bool) -> Seen:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Seen = []

    def make(step: dl.Step) -> None:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()
        seen.append((step.epoch, step.iteration))

    if by_epochs:
        for epoch in loop.epochs():
            for step in epoch:
                assert step.epoch == epoch.number
                make(step)
    else:
        for step in loop:
            make(step)
    return seen


def by_epochs_and_not() -> list[tuple[Seen, list[torch.Tensor]]]:
    results = []
    for by_epochs in (False, True):
        with dl.join_world() as world:
            model = network()
            seen = go(loop_over(world, ".", model, epochs=3, run_dir=None), model, by_epochs=by_epochs)
            results.append((seen, values_of(model)))
    return results


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.quick_on_gpus
def test_epoch_by_epoch_is_the_same_training(ranks: int, on_ranks: OnRanks) -> None:
    for (seen, whole), *others in on_ranks(ranks, by_epochs_and_not):
        assert seen == [(1 + step // 4, 1 + step) for step in range(12)]
        for other_seen, other in others:
            assert other_seen == seen
            assert all(map(torch.equal, other, whole))


def evaluate_between() -> list[dict[str, float]]:
    with dl.join_world() as world:
        model = network()
        loop = loop_over(world, ".", model, epochs=2, run_dir=None)
        test_batches = dl.Batches(samples(7), 3, world, shuffle=False)
        results = []
        for epoch in loop.epochs():
            assert len(epoch) == 4
            for step in epoch:
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
            results.append(dl.evaluate(model, test_batches, mean=lambda output, rows: output.squeeze(1)))
        return results


def test_between_two_epochs_other_collectives_have_their_place(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, evaluate_between)
    assert first == second
    assert [result["samples"] for result in first] == [7, 7]


def numbers_and_steps(loop: dl.Loop, model: torch.nn.Module) -> list[tuple[int, int]]:
    """The number of each epoch, and how many steps it has."""
    found = []
    for epoch in loop.epochs():
        before = loop.iteration
        for step in epoch:
            make(step, model)
        found.append((epoch.number, loop.iteration - before))
    return found


def make(step: dl.Step, model: torch.nn.Module) -> None:
    for rows in step:
        step.backward(loss_of(model, rows))
    step.fold()


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
        batches = dl.Batches(Counting(10), 4, world)
        assert batches.steps is None
        loop = dl.Loop(batches, 2, state={"model": (model := network())}, progress=False)
        return numbers_and_steps(loop, model)


class Counting(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream of so many rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(samples(self._rows))


def test_epochs_of_unknown_length_have_their_numbers_too(on_ranks: OnRanks) -> None:
    assert on_ranks(3, stream_in_epochs) == [[(1, 3), (2, 3)]] * 3


def go_on_after_all_epochs(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    for _ in range(2):
        numbers_and_steps(loop, model)


def go_on_after_a_break(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    for epoch in loop.epochs():
        for step in epoch:
            make(step, model)
            break


def go_on_after_a_break_between_epochs(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    for epoch in loop.epochs():
        for step in epoch:
            make(step, model)
        break
    numbers_and_steps(loop, model)


def two_at_once(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    epochs = loop.epochs()
    first = iter(next(epochs))
    make(next(first), model)
    next(epochs)


def one_epoch_again(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    epochs = loop.epochs()
    epoch = next(epochs)
    for _ in range(2):
        for step in epoch:
            make(step, model)


def an_epoch_that_is_not_iterated(world: dl.World, folder: str) -> None:
    for _ in loop_over(world, folder, network(), epochs=2).epochs():
        continue


def test_an_epoch_more_than_the_loop_has_is_refused(refused: Refused) -> None:
    said = r"A Loop can be iterated once, .* This one has made its 8 steps. Create a new Loop"
    refused(2, go_on_after_all_epochs, kind="RuntimeError", said=said, by=ALL)


@pytest.mark.parametrize(
    ("scenario", "epoch"),
    [(one_epoch_again, 2), (an_epoch_that_is_not_iterated, 1), (go_on_after_a_break_between_epochs, 2)],
)
def test_each_epoch_is_iterated_once_and_in_order(scenario: Scenario, epoch: int, refused: Refused) -> None:
    said = f"each epoch must run to its end. This one (is|stopped) before epoch {epoch}. Create a new Loop"
    refused(2, scenario, kind="RuntimeError", said=said, by=ALL)


@pytest.mark.parametrize("scenario", [go_on_after_a_break, two_at_once])
def test_an_epoch_that_was_left_cannot_be_followed_by_another(scenario: object, refused: Refused) -> None:
    said = r"each epoch must run to its end. This one stopped inside epoch 1. Create a new Loop"
    refused(2, scenario, kind="RuntimeError", said=said, by=ALL)  # type: ignore[arg-type]


# -- Batches in a plain `for` ------------------------------------------------------------------------------


def rows_of_this_rank(count: int, batch_size: int, shards: int | None) -> list[int]:
    with dl.join_world() as world:
        batches = dl.Batches(torch.arange(count), batch_size, world, shuffle=False, shards=shards)
        twice = [[row for rows in batches for row in rows.tolist()] for _ in range(2)]
        assert twice[0] == twice[1]
        return twice[0]


@pytest.mark.covers("B8")
@pytest.mark.parametrize(("count", "batch_size", "shards"), [(10, 4, None), (2, 5, None), (17, 17, 5), (1, 1, 2)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_plain_for_gives_each_sample_once(
    ranks: int, count: int, batch_size: int, shards: int | None, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, rows_of_this_rank, count, batch_size, shards)
    assert sorted(row for rows in results for row in rows) == list(range(count))


def go_over_shuffled(world: dl.World, folder: str) -> None:
    next(iter(dl.Batches(samples(6), 3, world)))


def go_over_endless(world: dl.World, folder: str) -> None:
    next(iter(dl.Batches(lambda index: torch.ones(1), 3, world)))


def test_a_plain_for_over_batches_for_training_is_refused(refused: Refused) -> None:
    said = "for evaluation. These are shuffled. Pass shuffle=False"
    refused(2, go_over_shuffled, kind="ValueError", said=said, by=ALL)
    refused(2, go_over_endless, kind="ValueError", said="for evaluation. These never end. Pass shuffle=False", by=ALL)
