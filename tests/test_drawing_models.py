"""Evaluation of models that draw, dropout kept on say: by streams of its own, which training does not notice."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import samples
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("B8")


class Drawing(nn.Module):
    """Dropout that is kept on, and noise, also while evaluating."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.other = nn.Linear(4, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = dropout(torch.tanh(self.one(rows)), 0.3, training=True)
        output: torch.Tensor = self.other(hidden + 0.1 * torch.randn_like(hidden))
        if not self.training:  # in a step these streams are not the shard's
            random.random(), np.random.rand()
        return output


def error(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - rows.sum(1)) ** 2


Found = tuple[list[float], list[float], list[float]]


def evaluated(shards: int | None) -> Found:
    """Two evaluations, a prediction, and what all streams give then."""
    with dl.join_world(seed=2) as world:
        model = Drawing()
        batches = dl.Batches(samples(50), 12, world, shards=shards, shuffle=False)
        errors = [dl.evaluate(model, batches, error=error)["error"] for _ in range(2)]
        predicted = dl.predict(model, batches)[:, 0].tolist()
        return errors, predicted, [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.covers("H7")
@pytest.mark.both_exchanges
@pytest.mark.parametrize("shards", [6, None])
def test_a_model_that_draws_has_the_same_bits_on_any_number_of_ranks(shards: int | None, on_ranks: OnRanks) -> None:
    [alone] = on_ranks(1, evaluated, shards)
    for ranks in (2, 3):
        assert on_ranks(ranks, evaluated, shards) == [alone] * ranks


def test_the_streams_stand_alike_afterwards(on_ranks: OnRanks) -> None:
    with dl.join_world(seed=2):
        Drawing()
        untouched = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    for ranks in (1, 2, 3):  # of 50 in mini-batches of 12 the last has 2: on 3 ranks one has none
        found = on_ranks(ranks, evaluated, None)
        assert found == [found[0]] * ranks
        assert found[0][2] == untouched


def test_each_evaluation_draws_anew(on_ranks: OnRanks) -> None:
    [(errors, predicted, _)] = on_ranks(1, evaluated, 6)
    assert errors[0] != errors[1]
    predicted_error = error(torch.tensor(predicted).double()[:, None], samples(50)).mean().item()
    assert predicted_error not in errors


def trained(
    evaluates: bool, folder: str | None = None, steps: int | None = None, epochs: int = 2
) -> tuple[Tensors, Any]:
    """Each step draws in the model, and after the fold from every stream."""
    with dl.join_world(seed=2) as world:
        model = Drawing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = loop_on(
            dl.Batches(samples(24), 6, world, shards=4), model, optimizer, epochs=epochs, run_dir=folder, resume=True
        )
        held_out, found = dl.Batches(samples(21), 5, world, shards=4, shuffle=False), {}

        def evaluate(when: str) -> None:
            if evaluates:
                found[when] = dl.evaluate(model, held_out, error=error)["error"]

        evaluate("at first")
        with suppress(dl.Stopped):
            for epoch in loop.epochs():
                for step in epoch:
                    for rows in step:
                        step.backward(mse_loss(model(rows), rows.sum(1, keepdim=True)))
                    step.fold()
                    evaluate(f"in step {step.iteration}")
                    with torch.no_grad():  # a noisy optimizer
                        for parameter in model.parameters():
                            parameter.grad.add_(0.01 * torch.randn_like(parameter))  # type: ignore[union-attr]
                            parameter.grad.mul_(random.random() + float(np.random.rand()))  # type: ignore[union-attr]
                    optimizer.step()
                    if step.iteration == steps:
                        loop.stop()
                evaluate(f"behind epoch {epoch.number}")
            evaluate("at last")
        return values_of(model), found


@pytest.mark.covers("H8")
@pytest.mark.parametrize("ranks", [1, 3])
def test_training_gives_the_same_bits_with_evaluations_that_draw_and_without(ranks: int, on_ranks: OnRanks) -> None:
    without = same_on_all([values for values, _ in on_ranks(ranks, trained, False)])
    results = on_ranks(ranks, trained, True)
    same_on_all([without, *(values for values, _ in results)])
    errors = results[0][1]
    assert len(set(errors.values())) == len(errors) == 12
    assert all(found == errors for _, found in results)


@pytest.mark.covers("H7", "H8")
@pytest.mark.parametrize("steps", [1, 3, 5, 7])  # a stop after the fold takes effect in the next step
@pytest.mark.slow
def test_a_resumed_run_evaluates_what_the_undisturbed_one_does(steps: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    [(values, errors)] = on_ranks(1, trained, True)
    folder = str(tmp_path / "run")
    on_ranks(2, trained, True, folder, steps)
    for found, again in on_ranks(3, trained, True, folder):
        same_on_all([values, found])
        del again["at first"]  # of the weights at which it resumed
        assert {when: errors[when] for when in again} == again
