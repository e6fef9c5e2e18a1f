"""A run that was stopped anywhere and goes on, on any number of ranks, is the undisturbed run: to the bit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from ddp_loop.checkpoints import Checkpoints, run_id_of
from ddp_loop.digests import digest, leaves
from tests.harness import OnRanks

# torch does not know that the optimizer stepped in another process, where a run goes on at the first epoch's end.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

EPOCHS, STEPS, SHARDS = 2, 5, 6  # of 10 updates
STATUS, ROWS = "status.json", "rows.jsonl"


def observations(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(number, 2, 4, 4, generator=generator)
    return inputs, torch.randint(3, (number,), generator=generator)


class MomentumInFloat32(torch.optim.Optimizer):
    """Keeps a float32 copy of what it updates, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one]
                if not kept:
                    kept["master"], kept["momentum"] = one.float(), torch.zeros_like(one, dtype=torch.float32)
                kept["momentum"].mul_(0.9).add_(one.grad.float())
                kept["master"].sub_(group["lr"] * kept["momentum"])
                one.copy_(kept["master"])


def usual() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def channels_last() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = usual()[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)


def bfloat16() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)).bfloat16()
    return model, MomentumInFloat32(model.parameters())


BUILDS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "usual": usual,
    "channels_last": channels_last,
    "bfloat16": bfloat16,
}


def go_by_epochs(
    loop: dl.Loop, model: nn.Module, optimizer: torch.optim.Optimizer, stop_at: int | None = None, *,
    after_step: Callable[[int], None] = lambda iteration: None, after_epoch: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """The epochs that are still to be made, down a mean square; what comes behind an epoch, unless it was stopped."""
    for _ in range(loop.epochs_made, loop.epochs or 0):
        for step in loop.epoch():
            for rows in step:
                step.backward(model(rows).square().mean())
            if step.iteration == stop_at:
                loop.stop()
            step.fold()
            optimizer.step()
            after_step(step.iteration)
        if loop.stopped is None:
            after_epoch()


@dataclass
class Ended:
    """How a run ended: digests of all its state by name, its steps, and what it said of itself."""

    state: dict[str, str]
    made: list[int]
    stopped: str | None


def train(folder: str, stop_at: int | None = None, build: str = "usual", **keywords: Any) -> Ended:
    """The run, with everything in its state; left by `loop.stop()` at a step."""
    with dl.join_world(seed=3) as world:
        return train_in(world, folder, stop_at, build, **keywords)


def train_in(world: dl.World, folder: str, stop_at: int | None, build: str, **keywords: Any) -> Ended:
    model, optimizer = BUILDS[build]()
    inputs, labels = observations(keywords.pop("number", 24 * STEPS - 7))
    inputs = inputs.to(next(model.parameters()).dtype)
    batches = dl.Batches((inputs, labels), keywords.pop("batch_size", 24), world, shards=keywords.pop("shards", SHARDS))
    held_out = dl.Batches((inputs[:30], labels[:30]), 10, world, shuffle=False, shards=SHARDS)
    average = AveragedModel(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)  # moved once an epoch
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.zeros(()))
    patience, notes = dl.Patience(model, 3), dict[str, Any](drawn=[], rows=0)
    state: dict[str, object] = {
        "model": model, "optimizer": optimizer, "average": average, "schedule": schedule, "scaler": scaler,
        "patience": patience, "notes": notes,
    }  # fmt: skip
    score = keywords.pop("score", None)
    loop = dl.Loop(batches, EPOCHS, state=state, run=folder or None, progress=False, **keywords)
    made = []
    for _ in range(loop.epochs_made, EPOCHS):
        for step in loop.epoch():
            made.append(step.iteration)
            for images, classes in step:
                loss = cross_entropy(model(images).float(), classes)
                loss.register_hook(scaler.scale)
                step.backward(loss)
            if step.iteration == stop_at and world.rank == world.size - 1:
                loop.stop()
            step.fold()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            notes["drawn"].append([random.random(), float(np.random.rand()), float(torch.rand(()))])
            notes["rows"] += step.observations
            if score is not None and step.iteration % STEPS:
                loop.save(score[step.iteration])
        if loop.stopped is None:
            said = dl.evaluate(model, held_out, loss=lambda output, right: cross_entropy(output.float(), right))
            patience.is_over(said["loss"])
            if score is not None:
                loop.save(score[loop.iteration])
            notes["drawn"].append(random.random())
            schedule.step()
    return Ended(digests(state), made, loop.stopped)


def digests(state: dict[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in state.items():
        kept = value.state_dict() if hasattr(value, "state_dict") else value
        found.update({leaf: digest(one) for leaf, one in leaves(name, kept)})
    return found


def different(one: Ended, other: Ended) -> list[str]:
    """The names of what differs; short where a test fails."""
    return [name for name in {**one.state, **other.state} if one.state.get(name) != other.state.get(name)]


def rows_of(folder: Path) -> list[int]:
    text = (folder / ROWS).read_text()
    assert text.endswith("\n")
    return [json.loads(line)["iteration"] for line in text.splitlines()]


def status_of(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / STATUS).read_text())
    return said


def checkpoints_of(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))


# -- everywhere ----------------------------------------------------------------------------------------------


@pytest.mark.covers("E5")
@pytest.mark.parametrize("build", BUILDS)
def test_a_run_that_goes_on_after_any_step_is_the_undisturbed_one(build: str, tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole"), build=build)
    assert whole.made == list(range(1, EPOCHS * STEPS + 1))
    for at in whole.made if build == "usual" else (2, STEPS, STEPS + 1):
        run = tmp_path / str(at)
        first = train(str(run), at, build)
        assert (first.stopped, first.made[-1], checkpoints_of(run)[-1]) == ("loop.stop()", at, at)
        assert (status_of(run)["status"], status_of(run)["iteration"]) == ("stopped", at)
        second = train(str(run), build=build)
        assert second.made == whole.made[at:]
        assert different(whole, second) == []
        assert rows_of(run) == whole.made
        assert status_of(run)["status"] == "done"


@pytest.mark.covers("E5")
def test_a_run_stopped_twice_within_an_epoch_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole = train("")
    parts = [train(str(tmp_path), at).made for at in (6, 8)]
    last = train(str(tmp_path))
    assert [*parts, last.made] == [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]
    assert different(whole, last) == []
    assert rows_of(tmp_path) == whole.made


@pytest.mark.covers("E5", "H7")
@pytest.mark.parametrize("at", [3, STEPS])
@pytest.mark.parametrize("build", ["usual", "bfloat16"])
def test_a_run_of_two_ranks_goes_on_on_any_number(at: int, build: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(2, train, "", build=build)[0]
    on_ranks(2, train, str(tmp_path / "begun"), at, build)
    for ranks in (1, 3, 4):
        run = tmp_path / f"{ranks} ranks"
        shutil.copytree(tmp_path / "begun", run)
        for ended in on_ranks(ranks, train, str(run), build=build):
            assert ended.made == whole.made[at:]
            assert different(whole, ended) == []
        assert rows_of(run) == whole.made


def without_fixed_shards(folder: str, at: int | None) -> Ended:
    with dl.join_world(seed=3) as world:
        return train_in(world, folder, at, "usual", shards=None)


@pytest.mark.covers("E5")
def test_on_the_same_number_of_ranks_the_shards_need_not_be_fixed(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = on_ranks(2, without_fixed_shards, "", None)
    on_ranks(2, without_fixed_shards, str(tmp_path), 7)
    for one, other in zip(whole, on_ranks(2, without_fixed_shards, str(tmp_path), None), strict=True):
        assert different(one, other) == []


# -- which one is gone on from ---------------------------------------------------------------------------------


def test_a_finished_run_makes_no_step_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(str(tmp_path))
    again = train(str(tmp_path))
    assert again.made == []
    assert different(whole, again) == []
    assert status_of(tmp_path)["status"] == "done"
    with dl.join_world(seed=3) as world:
        model = nn.Linear(1, 1)
        for _ in range(2):
            for step in dl.Loop(dl.Batches(torch.ones(4, 1), 2, world), 1, state={"m": model}, run=tmp_path / "other"):
                for rows in step:
                    step.backward(model(rows).mean())
                step.fold()
    assert f"{tmp_path / 'other'}: nothing is left to do after step 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"number": 100}, "observations: was 113, is 100"),
        ({"batch_size": 12}, "batch_size: was 24, is 12"),
        ({"shards": 3}, "shards: was 6, is 3"),
    ],
)
def test_a_run_of_something_else_is_refused_with_the_difference(
    keywords: dict[str, Any], said: str, tmp_path: Path
) -> None:
    train(str(tmp_path), 3)
    with pytest.raises(ValueError, match=said):
        train(str(tmp_path), **keywords)
    assert status_of(tmp_path)["status"] == "stopped"  # it is as it was
    assert train(str(tmp_path)).made[0] == 4


def test_another_argument_of_the_script_is_refused_unless_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1"])
    train(str(tmp_path), 3)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.2"])
    with pytest.raises(ValueError, match=r"arguments: was '--lr 0.1', is '--lr 0.2'.*resume=True.*resume=False"):
        train(str(tmp_path))
    assert train(str(tmp_path), 5, resume=True).made == [4, 5]
    assert train(str(tmp_path)).made[0] == 6  # the new arguments are the run's now


def test_a_run_begun_anew_keeps_the_old_one(tmp_path: Path) -> None:
    whole = train("")
    train(str(tmp_path), 3)
    assert different(whole, train(str(tmp_path), resume=False)) == []
    train(str(tmp_path), 2, resume=False)
    assert checkpoints_of(tmp_path) == [2]
    assert rows_of(tmp_path) == [1, 2]
    for number, rows, status in (("1", [1, 2, 3], "stopped"), ("2", whole.made, "done")):
        before = tmp_path / "before" / number
        assert (rows_of(before), status_of(before)["status"]) == (rows, status)
        assert checkpoints_of(before)[-1] == rows[-1]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("")
    train(str(tmp_path), 8, save_every=3)
    damaged = tmp_path / "checkpoints" / "step-00000008" / "tensors.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    before = checkpoints_of(tmp_path)[-2]
    ended = train(str(tmp_path), save_every=3)
    assert ended.made == whole.made[before:]
    assert different(whole, ended) == []
    assert rows_of(tmp_path) == whole.made
    said = capsys.readouterr().out
    assert str(damaged) in said
    assert "the one before it is used" in said


def test_rows_after_the_checkpoint_and_half_lines_are_taken_out(tmp_path: Path) -> None:
    train(str(tmp_path), 4)
    with (tmp_path / ROWS).open("a") as file:  # what a killed process leaves
        file.write('{"epoch": 1, "iteration": 5, "observations": 24, "loss": 1.0, "elapsed_s": 1.0}\n{"epoch": 2, "it')
    assert train(str(tmp_path)).made == [5, 6, 7, 8, 9, 10]
    assert rows_of(tmp_path) == list(range(1, 11))


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    scores = {1: 5.0, 2: 4.0, 3: 0.5, 4: 3.0, 5: float("nan"), 6: 2.0, 7: 0.5, 8: 9.0, 9: 8.0, 10: 7.0}
    train(str(tmp_path), keep=2, score=scores)
    assert checkpoints_of(tmp_path) == [3, 9, 10]


def test_a_score_of_a_whole_epoch_is_that_of_its_last_step(tmp_path: Path) -> None:
    scores = dict.fromkeys(range(1, 11), 9.0) | {5: 0.25, 10: 0.5}
    whole = train("")
    for every in (None, 4, 10**6):  # written behind the epoch, before its end, or kept in memory until it has a score
        run = tmp_path / str(every)
        train(str(run), keep=1, score=scores, save_every=every)
        assert checkpoints_of(run) == [5, 10]
        found = Checkpoints(run, run_id_of(run) or "").entries(verify=True)
        assert [(one.iteration, one.score, one.problem) for one in found] == [(10, 0.5, None), (5, 0.25, None)]
        shutil.rmtree(run / "checkpoints" / "step-00000010")
        assert different(whole, train(str(run), keep=1, score=scores, save_every=every)) == []
