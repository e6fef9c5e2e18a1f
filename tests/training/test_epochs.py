"""A Loop gone through epoch by epoch, and Batches in a plain `for`."""

from __future__ import annotations

import pytest
import torch

import ddp_loop as dl
from tests.support.comparing import values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.both_modes

Seen = list[tuple[int, int]]  # epoch and iteration of each step


def go(loop: dl.Loop, model: torch.nn.Module, by_epochs: int) -> Seen:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Seen = []

    def make(step: dl.Step) -> None:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()
        seen.append((step.epoch, step.iteration))

    for _ in range(by_epochs):
        for step in loop.epoch():
            make(step)
    if by_epochs < (loop.epochs or 0):
        for step in loop:
            make(step)
    return seen


def by_epochs_and_not() -> list[tuple[Seen, list[torch.Tensor]]]:
    results = []
    for by_epochs in (0, 3, 1):
        with dl.join_world() as world:
            model = network()
            seen = go(loop_over(world, ".", model, epochs=3, run_dir=None), model, by_epochs)
            results.append((seen, values_of(model)))
    return results


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.quick_in_both_modes
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
        for _ in range(2):
            for step in loop.epoch():
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
            results.append(dl.evaluate(model, test_batches, mean=lambda output, rows: output.squeeze(1)))
        return results


def test_between_two_epochs_other_collectives_have_their_place(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, evaluate_between)
    assert first == second
    assert [result["samples"] for result in first] == [7, 7]


def steps_in_epochs() -> list[int]:
    with dl.join_world() as world:
        model = network()
        loop = loop_over(world, ".", model, epochs=None, steps=6, run_dir=None)
        return [len(go_once(loop, model)) for _ in range(2)]


def go_once(loop: dl.Loop, model: torch.nn.Module) -> Seen:
    return go(loop, model, 1)


def test_a_loop_of_so_many_steps_ends_within_an_epoch(on_ranks: OnRanks) -> None:
    assert on_ranks(2, steps_in_epochs) == [[4, 2], [4, 2]]


def go_on_after_all_epochs(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    for _ in range(3):
        go_once(loop, model)


def go_on_after_a_break(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    for step in loop.epoch():
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        break
    go_once(loop, model)


def two_at_once(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network(), epochs=2)
    first = iter(loop.epoch())
    step = next(first)
    for rows in step:
        step.backward(loss_of(model, rows))
    step.fold()
    next(iter(loop.epoch()))


def test_an_epoch_more_than_the_loop_has_is_refused(refused: Refused) -> None:
    said = r"A Loop can be iterated once, .* This one has made its 8 steps. Create a new Loop"
    refused(2, go_on_after_all_epochs, kind="RuntimeError", said=said, by=ALL)


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
