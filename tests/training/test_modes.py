"""train() and eval(): the same in all shards of a mini-batch, on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of

pytestmark = pytest.mark.on_gpus_too

SAID = (
    r"Each module must be in the same mode, train\(\) or eval\(\), in every shard\. model\.1 was in evaluation mode on "
)
OF_RANKS = (
    SAID + r"rank 1, and in training mode on rank 0\. Call model\.train\(\) and model\.eval\(\) on all ranks alike"
)


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    middle = {"batch norm": nn.BatchNorm1d(6), "dropout": nn.Dropout(0.2)}[kind]
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 1)).double()


def evaluate_on_rank_1(world: dl.World, folder: str, kind: str, since: int, shards: int | None, toggles: bool) -> None:
    """Rank 1 stays in evaluation mode from step `since` on; with `toggles` all ranks were in both modes before."""
    model = network(kind)
    for step in loop_over(world, folder, model, shards=shards, epochs=4):
        if toggles and step.iteration < since:
            model.train(step.iteration % 2 == 1)
        if step.iteration == since:
            model.train()
            model[1].train(world.rank != 1)
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D6")
@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (2, 3), (3, None), (3, 3)])
@pytest.mark.parametrize("since", [1, 5])
@pytest.mark.parametrize("kind", ["batch norm", "dropout"])
@pytest.mark.quick_on_gpus
def test_modes_that_differ_between_ranks_are_refused(
    kind: str, since: int, ranks: int, shards: int | None, toggles: bool, refused: Refused
) -> None:
    refused(ranks, evaluate_on_rank_1, kind, since, shards, toggles, kind="ValueError", said=OF_RANKS, by=ALL)


def mix_known_modes(world: dl.World, folder: str, shards: int | None) -> None:
    """All ranks were in either mode; then rank 1 forgets to change it."""
    model = network("dropout")
    for step in loop_over(world, folder, model, shards=shards, epochs=4):
        if step.iteration < 6 or world.rank != 1:
            model[1].train(step.iteration % 2 == 0)
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D6")
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (3, 6)])
def test_known_modes_that_differ_between_ranks_are_refused(ranks: int, shards: int | None, refused: Refused) -> None:
    refused(ranks, mix_known_modes, shards, kind="ValueError", said=SAID, by=ALL)


def evaluate_in_a_shard(world: dl.World, folder: str) -> None:
    model = network("dropout")
    for step in loop_over(world, folder, model, shards=4):
        for number, rows in enumerate(step):
            model[1].train(number == 0)
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("ranks", [1, 2])
def test_modes_that_differ_between_shards_are_refused(ranks: int, refused: Refused) -> None:
    said = SAID + r"shard \d, and in training mode on an earlier shard"
    refused(ranks, evaluate_in_a_shard, kind="ValueError", said=said, by=ALL)


def evaluate_held(world: dl.World, folder: str) -> None:
    model = network("dropout")
    model[1].train(world.rank != 1)
    for step in loop_over(world, folder, model):
        for rows in step:
            step.hold(model(rows))
        step.backward(step.gather().square().mean())
        step.fold()


def test_modes_of_held_outputs_are_compared_too(refused: Refused) -> None:
    refused(2, evaluate_held, kind="ValueError", said=OF_RANKS, by=ALL)


def alternate(how: str, shards: int | None, count: int) -> tuple[Tensors, int]:
    """All ranks change modes alike; a rank without a shard does so later, in its next shard."""
    with dl.join_world(seed=0) as world:
        model, layouts = network("dropout"), list[object]()
        loop = loop_over(world, "", model, run_dir=None, shards=shards, epochs=6, count=count)
        for step in loop:
            for _ in range(2):  # passes
                for rows in step:
                    if how == "once":
                        model.train(step.iteration < 3)
                    else:
                        model[1].train((step.iteration + step.passes) % 2 == 0)
                    step.backward(loss_of(model, rows))
                step.fold()
                if not layouts or loop.fold._rows is not layouts[-1]:
                    layouts.append(loop.fold._rows)
        return values_of(model), len(layouts)


@pytest.mark.covers("D6")
@pytest.mark.parametrize("how", ["once", "each pass"])
@pytest.mark.parametrize(("ranks", "shards", "count"), [(1, None, 24), (2, None, 24), (3, 4, 24), (2, None, 7)])
def test_modes_that_all_ranks_change_alike_cost_one_agreement(
    how: str, ranks: int, shards: int | None, count: int, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, alternate, how, shards, count)
    same_on_all([values for values, _ in results])
    assert [layouts for _, layouts in results] == [2] * ranks  # one for each mode, in two or in 48 passes


def evaluate_without_a_shard() -> Tensors:
    """Nothing runs on a rank without a shard, so its modes are no matter."""
    with dl.join_world(seed=0) as world:
        model = network("dropout")
        model.train(world.rank == 0)
        for step in loop_over(world, "", model, run_dir=None, count=1):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
        return values_of(model)


def test_the_modes_of_a_rank_without_a_shard_are_no_matter(on_ranks: OnRanks) -> None:
    same_on_all(on_ranks(2, evaluate_without_a_shard))


def replace_by_another(world: dl.World, folder: str) -> None:
    """A module without tensors that comes in mid-run is compared too."""
    model = network("dropout")
    for step in loop_over(world, folder, model):
        if step.iteration == 3:
            model[1] = nn.Dropout(0.1).train(world.rank != 1)
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


def test_a_module_that_comes_in_mid_run_is_compared_too(refused: Refused) -> None:
    refused(2, replace_by_another, kind="ValueError", said=OF_RANKS, by=ALL)


def evaluate_synced(world: dl.World, folder: str, layer: bool) -> None:
    model = dl.sync_batch_norm(network("batch norm"), world)
    for step in loop_over(world, folder, model):
        if step.iteration == 3 and world.rank == 1:
            (model[1] if layer else model).eval()  # type: ignore[index]
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D6")
@pytest.mark.one_device("cpu", "the host of a fake GPU waits in the sum of such a layer")
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_synced_layers_evaluate_is_refused_at_once(ranks: int, layer: bool, refused: Refused) -> None:
    said = r"rank 0 is at the forward of layer .* rank 1 at .* Call train\(\) and eval\(\) on all ranks alike"
    refused(ranks, evaluate_synced, layer, kind="RuntimeError|PeerFailed", said=said)
