"""Several Loops of a script, one in another or one after the other: whose evaluations are recorded, and which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.refusals import loop_over, loss_of, mean_of, network, samples
from tests.support.runs import lines_of


def make(step: dl.Step, model: nn.Module) -> None:
    for rows in step:
        step.backward(loss_of(model, rows))
    step.fold()


def train_a_probe(world: dl.World, folder: str | None, leave_at: int = 0) -> None:
    probe = network()
    for step in loop_over(world, "", probe, run_dir=folder):
        make(step, probe)
        if step.iteration == leave_at:
            break


def evaluate(world: dl.World, model: nn.Module) -> None:
    dl.evaluate(model, dl.Batches(samples(7), 3, world, shuffle=False), mean=mean_of)


def recorded(folder: Path) -> list[tuple[int, int]]:
    path = folder / "evaluations.jsonl"
    return [(line["epoch"], line["iteration"]) for line in lines_of(path)] if path.exists() else []


@pytest.mark.parametrize("leave_at", [0, 2])
@pytest.mark.parametrize("has_folder", [False, True])
def test_after_an_inner_loop_evaluations_are_the_outer_ones_again(
    has_folder: bool, leave_at: int, tmp_path: Path
) -> None:
    model = network()
    with dl.join_world() as world:
        evaluations = 0
        for epoch in loop_over(world, str(tmp_path / "outer"), model, epochs=2).epochs():
            for step in epoch:
                make(step, model)
                if step.iteration == 6:
                    train_a_probe(world, None, leave_at)
                    assert (world.stage, world.step) == ("optimizer", 6)
                    evaluate(world, model)
            for _ in range(2):
                train_a_probe(world, str(tmp_path / f"inner-{evaluations}") if has_folder else None, leave_at)
                evaluations += 1
            evaluate(world, model)
        train_a_probe(world, None)
        nn.init.ones_(next(model.parameters()))
        evaluate(world, model)  # none is open
    assert recorded(tmp_path / "outer") == [(1, 4), (2, 6), (2, 8)]
    assert not any(recorded(folder) for folder in tmp_path.glob("inner-*"))


@pytest.mark.parametrize("at_once", [False, True])
def test_of_loops_that_are_made_first_each_gets_its_own_evaluations(at_once: bool, tmp_path: Path) -> None:
    models = [network(), network()]
    with dl.join_world() as world:
        loops = [loop_over(world, str(tmp_path / str(n)), model) for n, model in enumerate(models)]
        evaluate(world, models[0])  # before either begins the newest one's
        if at_once:
            for steps in zip(*loops, strict=True):
                for step, model in zip(steps, models, strict=True):
                    make(step, model)
            nn.init.ones_(next(models[1].parameters()))
            evaluate(world, models[1])
        else:
            for loop, model in zip(loops, models, strict=True):
                for step in loop:
                    make(step, model)
                nn.init.ones_(next(model.parameters()))
                evaluate(world, model)
    assert recorded(tmp_path / "0") == ([] if at_once else [(1, 4)])
    assert recorded(tmp_path / "1") == [(0, 0), (1, 4)]


# -- evaluations of a random model, in a run that resumes ----------------------------------------------------


class Noise(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.randn_like(rows)


def noisy_means(folder: Path, *, has_probe: bool = False, leave_after: int = 0, **extent: Any) -> list[Any]:
    """The evaluations in a run's folder, two after each epoch, the second one after an inner loop if there is one."""
    with dl.join_world(seed=3) as world:
        model = network()
        noisy = nn.Sequential(model, Noise())
        for epoch in loop_over(world, str(folder), model, **extent).epochs():
            for step in epoch:
                make(step, model)
            evaluate(world, noisy)
            if has_probe:
                train_a_probe(world, None)
                assert (world.stage, world.step) == ("", 4 * epoch.number)
            evaluate(world, noisy)
            if epoch.number == leave_after:
                break
        assert world.step == (4 if leave_after else 0)
    return [(line["iteration"], line["mean"]) for line in lines_of(folder / "evaluations.jsonl")]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"epochs": 1}, {"epochs": 2}),
        ({"epochs": 2, "leave_after": 1}, {"epochs": 2}),
        ({"epochs": None, "steps": 6}, {"epochs": None, "steps": 6}),
        ({"epochs": 2, "has_probe": True, "leave_after": 1}, {"epochs": 2, "has_probe": True}),
    ],
    ids=["one more epoch", "left between epochs", "finished by steps", "with an inner loop"],
)
def test_a_resumed_run_repeats_random_evaluations(first: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    whole = noisy_means(tmp_path / "whole", **then)
    assert [at for at, _ in whole] == [4, 4, then.get("steps", 8), then.get("steps", 8)]
    assert len({mean for _, mean in whole}) == 4
    noisy_means(tmp_path / "parts", **first)
    assert noisy_means(tmp_path / "parts", **then) == whole


# -- two phases in one folder --------------------------------------------------------------------------------


def after_epochs_of_phases(folder: Path, leave_at: int = 0) -> list[tuple[int, int]]:
    """After which epochs of a first loop of one epoch, and a second one of three, the script's lines ran."""
    lines: list[tuple[int, int]] = []
    with dl.join_world() as world:
        model = network()
        for phase, epochs in ((1, 1), (2, 3)):
            for epoch in loop_over(world, str(folder), model, epochs=epochs).epochs():
                for step in epoch:
                    make(step, model)
                    if step.iteration == leave_at:
                        return lines
                lines.append((phase, epoch.number))
    return lines


def test_the_first_of_two_loops_does_not_repeat_the_lines_after_an_epoch_of_the_second(tmp_path: Path) -> None:
    assert after_epochs_of_phases(tmp_path, leave_at=10) == [(1, 1), (2, 1), (2, 2)]
    assert after_epochs_of_phases(tmp_path) == [(2, 2), (2, 3)]
    assert after_epochs_of_phases(tmp_path) == [(2, 3)]
