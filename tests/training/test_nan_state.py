"""NaN in parameters, buffers and optimizer states: the tensor is named on all ranks, and no sample is blamed for it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from ddp_loop.training.validation import OnNonFinite
from tests.support.devices import CPU
from tests.support.harness import OnRanks, caught
from tests.support.refusals import ALL, Refused, does_it, samples
from tests.support.training import train as train_model

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

STEPS, SIZE, HARMED = 14, 4, 3  # what is harmed is harmed behind this step's update
NAN, INF = math.nan, math.inf


class Extra(nn.Module):
    """Keeps buffers that its forward does not use: an average, a mask, the best so far, a ring that is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([0.0, -INF, INF]))
        self.register_buffer("best", torch.tensor(INF))
        self.register_buffer("unset", torch.tensor([1.0, NAN]))
        self.register_buffer("ring", torch.full((STEPS,), NAN))
        self.frozen = nn.Parameter(torch.tensor([0.0, -INF, NAN]), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@dataclass
class Job:
    model: Any
    optimizer: torch.optim.Optimizer
    average: Any


def make() -> Job:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Extra(), nn.Tanh(), nn.Linear(6, 1)).double()
    return Job(model, torch.optim.Adam(model.parameters(), lr=0.01), AveragedModel(model[0]))


def weight(job: Job) -> nn.Parameter:
    found: nn.Parameter = job.model[4].weight
    return found


# What is harmed, and its name in errors.
HARMS: dict[str, tuple[Callable[[Job], torch.Tensor], str]] = {
    "weight": (weight, r"parameter model\.4\.weight"),
    "momentum": (lambda job: job.optimizer.state[weight(job)]["exp_avg"], r"optimizer, exp_avg of model\.4\.weight"),
    "variance": (lambda job: job.model[1].running_var, r"buffer model\.1\.running_var"),
    "average": (lambda job: job.model[2].average, r"buffer model\.2\.average"),
    "averaged weight": (lambda job: job.average.module.weight, r"parameter average\.module\.weight"),
}
NAMES = {what: name for what, (_, name) in HARMS.items()}


def square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def train(
    world: dl.World, folder: str | None, what: str = "", *, at: int = HARMED, value: float = NAN, on: int = ALL,
    rule: OnNonFinite = "raise", steps: int = STEPS, shards: int | None = None, bad: int = -1,
    synced: bool = False, **keywords: Any,
) -> Job:  # fmt: skip
    """Damage `what` after the update of step `at`, or before the first step for 0; `bad`: a sample that is NaN."""
    job = make()
    if synced:
        dl.sync_batch_norm(job.model, world)
    data = samples(STEPS * SIZE)
    if bad >= 0:
        data[bad] = NAN

    def harm(now: int) -> None:
        if what and now == at and does_it(world, on):
            with torch.no_grad():
                HARMS[what][0](job).reshape(-1)[0] = value

    harm(0)
    state = {"model": job.model, "optimizer": job.optimizer, "average": job.average}
    batches = dl.Batches(data, SIZE, world, shards=shards, shuffle=False)
    keywords = {"check_replicas_every": 0, "progress": False, "run_dir": folder, **keywords}
    loop = dl.Loop(batches, steps=steps, state=state, on_nonfinite=rule, **keywords)
    harm(loop.iteration)  # of a resumed one
    for step in loop:
        for rows in step:
            step.backward(square(job.model, rows))
        step.fold()
        job.optimizer.step()
        with torch.no_grad():
            job.model[2].ring[step.iteration - 1] = 1.0
        harm(step.iteration)
    return job


def refuse(
    refused: Refused, said: str, ranks: int = 2, job: Callable[..., Any] = train, by: int = ALL, **how: Any
) -> None:
    """All ranks raise it, and blame no sample."""
    results = refused(ranks, partial(job, **how), kind="FloatingPointError", said=said, by=by)
    texts = [result.text.partition("\n")[0] for result in results]  # without its notes, such as how to go on
    assert not [text for text in texts if "samples" in text or "shard" in text]


# -- the loss tells ----------------------------------------------------------------------------------------------


BEFORE = f"{NAMES['weight']} was not finite before the step's data came in"
BY_NOW = r"Not finite by now, and perhaps before: parameter model\.0\.weight"  # the step's update made them NaN


@pytest.mark.parametrize(
    ("how", "ranks", "said", "said_late"),
    [
        ({"what": "weight"}, 2, f"step 4 is nan: {BEFORE}", rf"step 4 is nan\. {BY_NOW}"),
        ({"what": "weight", "value": INF, "shards": 2}, 1, f"step 4 is (nan|inf): {BEFORE}", BY_NOW),
        ({"what": "weight", "at": 0}, 2, f"step 1 is nan: {BEFORE}", rf"step 1 is nan\. {BY_NOW}"),
        (
            {"what": "momentum"},
            2,
            f"step 5 is nan: {NAMES['weight']} and {NAMES['momentum']} were not finite before",
            r"step 5 is nan\. Not finite by now, and perhaps before: parameter .* and optimizer, exp_avg of .*\. Look",
        ),
    ],
)
def test_what_is_not_finite_is_named_and_no_sample(
    how: dict[str, Any], ranks: int, said: str, said_late: str, late: bool, refused: Refused
) -> None:
    refuse(refused, said_late if late else said, ranks, **how)


@pytest.mark.one_device(CPU, "the bad step's update has made the parameters NaN on all ranks")
@pytest.mark.parametrize(("ranks", "on", "where"), [(1, ALL, ""), (2, 1, r" \(on rank 1 of 2\)")])
def test_an_only_shard_is_not_blamed_and_a_rank_that_alone_has_it_is_named(
    ranks: int, on: int, where: str, refused: Refused
) -> None:
    said = rf"step 4 is nan: {NAMES['weight']}{where} was not finite before"
    refuse(refused, said, ranks, what="weight", on=on)


@pytest.mark.quick_on_gpus
def test_a_sample_is_still_blamed_whatever_legitimate_nan_there_is(refused: Refused) -> None:
    said = "The loss of step 2 is nan, from shard 0 of .*, samples 4, 5"
    refused(2, partial(train, bad=5), kind="FloatingPointError", said=said)


def test_statistics_that_a_samples_forward_moved_are_not_blamed(refused: Refused) -> None:
    job = partial(train, bad=5, synced=True)  # all shards' losses are NaN by it
    for result in refused(2, job, kind="FloatingPointError", said="The loss of step 2 is nan"):
        assert "running" not in result.text
        assert "before the step's data" not in result.text


class Masked(nn.Linear):
    """A mask that is a parameter, as scripts forget to freeze it: its forward can bear -inf."""

    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.mask = nn.Parameter(torch.tensor([0.0, 0.0, -INF], dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(super().forward(rows) + self.mask, 1)[:, 0]


def train_masked() -> None:
    torch.manual_seed(0)
    model = Masked()
    data = samples(12)
    data[5] = NAN
    train_model(model, square, data, SIZE, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_a_mask_that_a_step_could_bear_is_not_blamed_for_a_sample(on_ranks: OnRanks) -> None:
    for kind, said, _ in on_ranks(2, caught, train_masked):
        assert kind == "FloatingPointError"
        assert "The loss of step 2 is nan, from shard 0 of 2, samples 4, 5" in said
        assert "before the step's data" not in said


def resume_with_nan(world: dl.World, folder: str) -> None:
    """The script damages a weight between the checkpoint that is loaded and the first step."""
    train(world, folder, steps=2)
    train(world, folder, "weight", at=2, steps=4, resume=True)


@pytest.mark.one_device(CPU, "a GPU reads the loss after the update, which makes more NaN")
def test_a_network_that_is_nan_when_a_run_resumes_is_named(refused: Refused) -> None:
    refuse(refused, f"The loss of step 3 is nan: {BEFORE}", job=resume_with_nan)


# -- the loss does not tell --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "ranks", "found", "by", "how"),
    [
        ("variance", 2, 6, ALL, {"steps": 6, "run_dir": None}),
        ("average", 2, 6, ALL, {"steps": 6, "run_dir": None}),
        ("average", 1, 10, ALL, {}),
        ("averaged weight", 1, 10, ALL, {}),
        ("variance", 2, 1, ALL, {"at": 0}),  # a statistic is no placeholder
        ("averaged weight", 2, 6, 1, {"on": 1, "steps": 6, "run_dir": None}),
    ],
)
def test_what_the_loss_does_not_show_is_found_at_intervals_and_at_the_end(
    what: str, ranks: int, found: int, by: int, how: dict[str, Any], refused: Refused
) -> None:
    said = f"After step {found} {NAMES[what]} is"
    refuse(refused, f"must not become NaN. {said}", ranks, by=by, what=what, **how)


WAITS = (
    'ddp_loop: With on_nonfinite="skip" the host waits for the device in each step. Adam is not fused. Pass fused=True '
    "where the optimizer has it.\n"
)


def go_on(folder: str, rule: OnNonFinite, what: str, **keywords: Any) -> tuple[str, bool]:
    """What rank 0 printed; whether what was harmed is NaN at the end."""
    said = io.StringIO()
    with redirect_stdout(said), dl.join_world() as world:
        job = train(world, folder, what, rule=rule, save_every=5, **keywords)
    return said.getvalue(), bool(what) and bool(HARMS[what][0](job).isnan().any())


@pytest.mark.parametrize("rule", ["skip", "allow"])
def test_a_loop_that_bears_it_says_it_once_and_goes_on(rule: OnNonFinite, on_ranks: OnRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (said, is_there), _ = on_ranks(2, go_on, str(run), rule, "average")
    assert is_there
    assert said.count("buffer model.2.average is NaN after step 5") == 1
    assert said.count("NaN") == 1
    assert (run / "checkpoints" / "step-00000014").is_dir()


@pytest.mark.parametrize("rule", ["raise", "skip", "allow"])
def test_what_is_legitimate_is_not_refused(rule: OnNonFinite, late: bool, on_ranks: OnRanks, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    waits = WAITS if late and rule == "skip" else ""
    assert on_ranks(2, go_on, run, rule, "", steps=6)[0] == (waits, False)
    said, _ = on_ranks(2, go_on, run, rule, "", resume=True)[0]  # and goes on
    assert said == f"ddp_loop: {run} continues with changes: steps: was 6, is 14.\n{waits}"


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "steps"), [*((what, 6) for what in NAMES), ("weight", STEPS)])
def test_no_checkpoint_is_written_of_what_became_nan(what: str, steps: int, refused: Refused, tmp_path: Path) -> None:
    said = rf"After step 6 {NAMES[what]} is\. .* No checkpoint of it is written"
    refuse(refused, said, what=what, at=6, save_every=2, steps=steps)
    there = sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir())
    assert there == ["step-00000002", "step-00000004"]


def told_of(folder: str) -> tuple[str, str]:
    """The error of a loop in which a look at the state and a save go wrong in the same step; what it printed."""
    said = io.StringIO()
    with redirect_stdout(said), dl.join_world() as world, pytest.raises(FloatingPointError) as error:
        train(world, folder, "average", at=9, save_every=10)
    return str(error.value), said.getvalue()


@pytest.mark.one_device(CPU, "an asynchronous device finds them in different folds")
def test_the_error_of_a_save_is_not_lost_where_the_state_has_another(on_ranks: OnRanks, tmp_path: Path) -> None:
    ((error, said),) = on_ranks(1, told_of, str(tmp_path / "run"))
    assert "After step 10 buffer model.2.average is" in error
    assert "No checkpoint of it is written" not in error
    assert said.startswith("ddp_loop: No checkpoint was written. FloatingPointError: ")
