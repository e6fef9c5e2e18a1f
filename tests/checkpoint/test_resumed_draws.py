"""A resumed run draws what the whole run drew, wherever the script draws, and fills what the script refers to."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.training import mean_square, take

pytestmark = pytest.mark.covers("E5")

EPOCHS, STEPS = 3, 3
ROWS = torch.arange(48.0, dtype=torch.float64).reshape(12, 4) / 48

Drawn = dict[tuple[str, int], list[float]]


def numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def draw_everywhere(folder: str, stop_at: int = 0) -> tuple[Drawn, list[float]]:
    """Train with numbers drawn outside of shards; returns them by place and number, and the weights."""
    drawn: Drawn = {}
    with suppress(dl.Stopped), dl.join_world(seed=3) as world:
        model = nn.Linear(4, 1).double().to(world.device)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        batches = dl.Batches(ROWS, 4, world, shards=2)
        state = {"model": model, "sgd": sgd}
        loop = dl.Loop(batches, EPOCHS, state=state, run_dir=folder, progress=False)
        drawn["made", 0] = numbers()
        target = torch.tensor(drawn["made", 0][1], device=world.device)
        for epoch in loop.epochs():
            drawn["epoch", epoch.number] = numbers()
            for step in epoch:
                drawn["step", step.iteration] = numbers()
                for rows in step:
                    step.backward((model(rows) - target * drawn["epoch", epoch.number][0]).square().mean())
                step.fold()
                drawn["fold", step.iteration] = numbers()
                sgd.step()
                if step.iteration == stop_at:
                    loop.stop()
            drawn["after", epoch.number] = numbers()
        drawn["end", 0] = numbers()
    return drawn, model.weight.flatten().tolist()


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_numbers_that_a_resumed_script_draws_are_the_whole_runs(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole, weights = on_ranks(2, draw_everywhere, str(tmp_path / "whole"))[0]
    assert len({str(drawn) for drawn in whole.values()}) == len(whole)
    for stop_at in (1, STEPS, EPOCHS * STEPS):
        folder = str(tmp_path / str(stop_at))
        first, _ = on_ranks(2, draw_everywhere, folder, stop_at)[0]
        second, found = on_ranks(2, draw_everywhere, folder)[0]
        assert first == {place: whole[place] for place in first}
        assert second == {place: whole[place] for place in second}
        assert {"made", "after", "end"} <= {place for place, _ in second}
        assert found == weights


class Notes:
    """What a script keeps in a dict of `state`, and refers to by names of its own."""

    def __init__(self) -> None:
        self.average = torch.zeros((), dtype=torch.float64)
        self.losses = np.zeros(EPOCHS * STEPS)
        self.large: set[int] = set()
        self.steps: list[int] = []
        self.scale = torch.ones(1, dtype=torch.float64, requires_grad=True)  # trained without a module
        self.table = torch.zeros(2, 3)
        self.kept: dict[str, Any] = {
            "average": self.average,
            "losses": self.losses,
            "large": self.large,
            "scale": self.scale,
        }
        self.kept |= {"table": self.table, "column": self.table[:, 0], "steps": self.steps}

    def take(self, iteration: int, loss: torch.Tensor) -> None:
        self.average.mul_(0.9).add_(loss.cpu(), alpha=0.1)
        self.losses[iteration - 1] = float(loss)
        self.table += iteration
        self.steps.append(iteration)
        if iteration % 2:
            self.large.add(iteration)


def take_notes(folder: str, stop_at: int = 0) -> list[Any]:
    """Train with a rate that follows from notes in state."""
    notes = Notes()
    best: dict[str, Any] = {}
    with suppress(dl.Stopped), dl.join_world(seed=3, device="cpu") as world:
        model = nn.Linear(4, 1).double()
        sgd = torch.optim.SGD([*model.parameters(), notes.scale], 0.1)
        best["weights"] = model.state_dict()  # the model's own tensors, until the first step
        state = {"model": model, "sgd": sgd, "notes": notes.kept, "best": best}
        loop = dl.Loop(dl.Batches(ROWS, 4, world), EPOCHS, state=state, run_dir=folder, progress=False)
        for step in loop:
            for rows in step:
                step.backward((model(rows) * notes.scale - 1).square().mean())
            notes.take(step.iteration, step.fold().loss)
            if step.iteration == 2:
                best["weights"] = {name: one.clone() for name, one in model.state_dict().items()}
            sgd.param_groups[0]["lr"] = 0.1 / (1 + float(notes.average) + len(notes.large) + notes.losses.sum())
            sgd.step()
            if step.iteration == stop_at:
                loop.stop()
    found = [float(notes.average), notes.losses.tolist(), sorted(notes.large), float(notes.scale.detach())]
    return [
        *found,
        model.weight.flatten().tolist(),
        best["weights"]["weight"].flatten().tolist(),
        notes.kept["column"].tolist(),
        notes.steps,
    ]


def test_tensors_arrays_sets_and_lists_in_a_dict_of_state_are_filled_in_place(
    on_ranks: OnRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (whole,) = on_ranks(1, take_notes, str(tmp_path / "whole"))
    on_ranks(1, take_notes, str(tmp_path / "run"), 4)
    (resumed,) = on_ranks(1, take_notes, str(tmp_path / "run"))
    assert resumed == whole
    assert whole[-1] == list(range(1, EPOCHS * STEPS + 1))
    assert "trains parameters" not in capfd.readouterr().out  # the dict has them
    assert whole[4] != whole[5]  # the best weights are not the last ones


def rebind_notes(folder: str, stop_at: int = 0) -> list[Any]:
    """Train with notes that begin as other objects of the script, and are replaced by new ones or share memory."""
    anchor = torch.zeros(4, dtype=torch.float64)
    history = np.zeros(2)
    seen = {0}
    mapped = torch.from_numpy(np.memmap(f"{folder}.numbers", dtype=np.float64, mode="w+", shape=2))
    notes: dict[str, Any] = {
        "average": anchor, "now": history, "best": history, "seen": seen, "kept": seen, "mapped": mapped,
    }  # fmt: skip
    with suppress(dl.Stopped), dl.join_world(seed=3, device="cpu") as world:
        model = nn.Linear(4, 1).double()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        notes["queue"] = [anchor, model.weight.detach()]  # the parameter's memory
        state = {"sgd": sgd, "model": model, "notes": notes}
        loop = dl.Loop(dl.Batches(ROWS, 4, world), EPOCHS, state=state, run_dir=folder, progress=False)
        for step in loop:
            for rows in step:
                pull = (model.weight[0] - anchor).square().sum() + notes["average"].sum()
                step.backward((model(rows) - 1).square().mean() + pull)
            step.fold()
            sgd.step()
            notes["average"] = 0.9 * notes["average"] + model.weight.detach()[0]
            notes["best"] = notes["now"].copy()
            notes["now"][0] += step.iteration
            notes["kept"] = notes["kept"] | {step.iteration}
            notes["mapped"] = notes["mapped"] + 1
            notes["queue"] = [*notes["queue"][1:], model.weight.detach().clone()]
            if step.iteration == stop_at:
                loop.stop()
    plain = [one.tolist() if hasattr(one, "tolist") else one for one in notes.values() if type(one) is not list]
    return [anchor.tolist(), mapped.tolist(), model.weight.tolist(), plain, [one.tolist() for one in notes["queue"]]]


def test_objects_that_the_script_replaced_in_a_dict_of_state_stay_apart(on_ranks: OnRanks, tmp_path: Path) -> None:
    (whole,) = on_ranks(1, rebind_notes, str(tmp_path / "whole"))
    on_ranks(1, rebind_notes, str(tmp_path / "run"), 4)
    assert on_ranks(1, rebind_notes, str(tmp_path / "run")) == [whole]


def test_a_script_that_restores_generators_itself_draws_on_from_them(on_ranks: OnRanks) -> None:
    (whole,) = on_ranks(1, restore_by_hand, 6)
    assert on_ranks(1, restore_by_hand, 4) == [whole]


def restore_by_hand(first: int) -> list[float]:
    """Draw at the top of each of 6 steps, with another loop from one of them on, whose position the script loads."""
    drawn: list[float] = []
    with dl.join_world(seed=3, device="cpu") as world:
        model = nn.Linear(4, 1).double()

        def make_steps(loop: dl.Loop, last: int) -> None:
            for step in loop:
                drawn.append(float(torch.rand(())))
                take(step, model, mean_square)
                if step.iteration == last:
                    break

        loops = [dl.Loop(dl.Batches(ROWS, 4, world), 2, state={"model": model}, progress=False) for _ in range(2)]
        make_steps(loops[0], first)
        if first < 6:
            position, generator = loops[0].state_dict(), torch.get_rng_state()
            loops[1].load_state_dict(position)
            torch.set_rng_state(generator)
            make_steps(loops[1], 6)
    return drawn
