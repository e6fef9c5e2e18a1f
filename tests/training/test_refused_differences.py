"""What must be alike in all shards of a mini-batch: metrics, weights, modes, what is trained, held and gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.gathering import spread
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples
from tests.support.sources import Streamed
from tests.support.training import loop_on

pytestmark = pytest.mark.on_gpus_too

Way = Callable[[dl.Step, Any], object]  # to go through a step


def back(step: dl.Step, model: nn.Module, **keywords: Any) -> None:
    for rows in step:
        step.backward(1.0 * loss_of(model, rows), **keywords)  # a mean alone is no sum
    step.fold()


def hold(
    step: dl.Step, model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
) -> None:
    for rows in step:
        step.hold(change(model(rows)))
    step.backward(spread(step.gather()))
    step.fold()


def evaluating(way: Way) -> Way:
    def go(step: dl.Step, model: nn.Sequential) -> None:
        model[1].eval()
        way(step, model)

    return go


def alternating(parity: int) -> Way:
    def go(step: dl.Step, model: nn.Sequential) -> None:
        model[1].train(step.iteration % 2 == parity)
        back(step, model)

    return go


def with_another_module(step: dl.Step, model: nn.Sequential) -> None:
    model[1] = nn.Tanh().eval()
    back(step, model)


def backing(**keywords: Any) -> Way:
    return lambda step, model: back(step, model, **keywords)


def frozen(step: dl.Step, model: nn.Sequential) -> None:
    model[0].requires_grad_(False)
    back(step, model)


MODES = (
    r"Each module must be in the same mode, train\(\) or eval\(\), in every shard\. model\.1 was in evaluation mode on "
    r"rank \d, and in training mode on rank \d\. Call model\.train\(\) and model\.eval\(\) on all ranks alike"
)
METRICS = r"Every shard must come with the same metrics\. .*\[.*\].*\[.*\]"
WEIGHTS = r"Every shard of a mini-batch must come with a weight, or none\. .* has one, .* has none\. Give step.backward"
REDUCTIONS = "Every shard must come with the same reductions"
TRAINED = "same parameters must want a gradient on every rank"
FORMS = "the same row shapes and dtypes, .* Pad them"
GATHERS = "Every rank must call step.gather, or none"
DIFFERENCES: dict[str, tuple[Way, Way, str]] = {  # of rank 1, and of the others
    "a metric": (backing(extra=1.0), back, METRICS),
    "a weight": (backing(weight=torch.tensor(5.0)), back, WEIGHTS),
    "no weight": (back, backing(weight=torch.tensor(5.0)), WEIGHTS),
    "a sum": (backing(reduction="sum"), back, REDUCTIONS),
    "a metric that is a sum": (backing(extra=dl.Sum(1)), backing(extra=1.0), REDUCTIONS),
    "a mode": (evaluating(back), back, MODES),
    "a mode that is known": (alternating(1), alternating(0), MODES),
    "a mode of held outputs": (evaluating(hold), hold, MODES),
    "a mode of a new module": (with_another_module, back, MODES),
    "a frozen layer": (frozen, back, TRAINED),
    "wider outputs": (lambda step, model: hold(step, model, lambda rows: torch.cat([rows, rows], 1)), hold, FORMS),
    "detached outputs": (lambda step, model: hold(step, model, torch.Tensor.detach), hold, FORMS),
    "no gather": (back, hold, GATHERS),
    "no shard gathered": (lambda step, model: None, hold, f"{GATHERS}|Every step must end with step.fold"),
}


def differ(world: dl.World, folder: str, how: str, at: int) -> None:
    model = network()
    odd, usual, _ = DIFFERENCES[how]
    for step in loop_over(world, folder, model):
        way = odd if world.rank == 1 and step.iteration == at else usual
        way(step, model)


@pytest.mark.covers("D6", "D10", "D13")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(
    ("how", "at"),
    [*((how, 3) for how in DIFFERENCES), *((how, 1) for how in ("a metric", "a mode", "a frozen layer", "no gather"))],
)
def test_what_differs_on_a_rank_is_refused_on_all(how: str, at: int, refused: Refused) -> None:
    kind = "RuntimeError" if "gather" in how else "ValueError"
    by = None if how == "no shard gathered" else ALL
    refused(3, differ, how, at, kind=kind, said=DIFFERENCES[how][2], by=by)


def differ_in_shards(world: dl.World, folder: str, what: str) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=6):
        for number, rows in enumerate(step):
            is_odd = number == 1 and step.iteration == 3
            model[1].train(not (is_odd and what == "mode"))
            metrics: dict[str, Any] = {"extra" if is_odd and what == "metric" else "usual": 1.0}
            if is_odd and what == "losses":
                step.backward(loss_of(model, rows), more_losses=True)
            step.backward(
                loss_of(model, rows),
                weight=2.0 if is_odd and what == "weight" else None,
                reduction="sum" if is_odd and what in ("reduction", "losses") else "mean",
                **metrics,
            )
        step.fold()


@pytest.mark.covers("D6")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("metric", r"same metrics\. an earlier shard has \['usual'\], shard \d has \['extra'\]"),
        ("weight", r"a weight, or none\. shard \d has one, an earlier shard has none"),
        ("reduction", REDUCTIONS),
        ("losses", "All losses of a shard"),
        ("mode", r"model\.1 was in evaluation mode on shard \d, and in training mode on an earlier shard"),
    ],
)
def test_what_differs_in_a_shard_is_refused(what: str, said: str, refused: Refused) -> None:
    refused(2, differ_in_shards, what, kind="ValueError", said=said)


# -- what may differ -----------------------------------------------------------------------------------------------


def change_together() -> list[tuple[float, dict[str, float]]]:
    """Weights in some steps alone, and metrics in another order; one of three ranks has no shard of two samples."""
    found = []
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, "", model, count=14, epochs=2):
            metrics: dict[str, Any] = {"one": 1.0, "two": 2.0} if world.rank else {"two": 2.0, "one": 1.0}
            for rows in step:
                weight = 5.0 if step.iteration in (2, 3, 5) else None
                step.backward(loss_of(model, rows), weight=weight, **metrics)
            result = step.fold()
            found.append((float(result.weight), {name: value.item() for name, value in result.metrics.items()}))
    return found


def test_weights_come_and_go_from_step_to_step_and_metrics_have_no_order(on_ranks: OnRanks) -> None:
    weights = [6.0, 15.0, 10.0, 6.0, 15.0, 2.0]
    expected: list[Any] = [(pytest.approx(weight, rel=1e-12), {"one": 1.0, "two": 2.0}) for weight in weights]
    assert on_ranks(3, change_together) == [expected] * 3


# -- gathering -----------------------------------------------------------------------------------------------------


def gather_on_some(world: dl.World, folder: str) -> None:
    """Rank 2, which has no shard of the second mini-batch, folds it without a gather."""
    model = network()
    for step in loop_over(world, folder, model, count=8):
        way = back if world.rank == 2 and step.iteration == 2 else hold
        way(step, model)


@pytest.mark.covers("C6", "D10")
def test_a_rank_without_a_shard_that_does_not_gather_ends_all(refused: Refused) -> None:
    refused(3, gather_on_some, kind="RuntimeError", said="Call it also where a rank has no shard")


def gather_streams(world: dl.World, folder: str) -> None:
    """Of 5 and of 4 samples."""
    model = network()
    for step in loop_on(dl.Batches(Streamed(partial(samples, 5 - world.rank)), 6, world), model):
        hold(step, model)


@pytest.mark.covers("A9", "D10")
def test_streams_that_differ_are_refused_before_they_are_gathered(refused: Refused) -> None:
    said = "the samples of a mini-batch must be the same on every rank. Rank 0 has 5, rank 1 has 4"
    refused(2, gather_streams, kind="ValueError", said=said)


def gather_no_number(world: dl.World, folder: str) -> None:
    rows = samples(12)
    rows[9] = float("nan")
    model = network()
    batches = dl.Batches(rows, 12, world, shards=2, shuffle=False)
    for step in loop_on(batches, model, run_dir=folder):
        hold(step, model)


def test_a_loss_of_all_that_is_not_finite_blames_no_shard(refused: Refused) -> None:
    refused(2, gather_no_number, kind="FloatingPointError", said="The loss of step 1 is nan. Look for NaN")
