"""Scripts in which one rank does something alone: found within the run, however short, and before an evaluation."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loss_of, samples
from tests.support.training import mean, take

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

SIZE = 6


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1)).double()


def part(fault: str, world: dl.World, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """The optimizer's step, with the fault of one rank."""
    if fault == "a forward of its own" and world.rank == 0:
        model(torch.randn(5, 4, dtype=torch.float64))
    if fault == "another learning rate" and world.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.02
    if fault != "a step left out" or world.rank == 0:
        optimizer.step()


def train(world: dl.World, folder: str, fault: str, since: int, steps: int, end: str = "", **keywords: Any) -> int:
    """The fault comes in each step from `since` on; the first comparison after it must find it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = dl.Batches(samples(SIZE * 10), SIZE, world)
    state = {"model": model, "optimizer": optimizer}
    loop = dl.Loop(batches, steps=steps, state=state, progress=False, **keywords)
    late = world.accelerator.is_asynchronous
    due = next((at for at in (2, 11, *range(100, 1000, 100)) if since < at <= steps), None)
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        try:
            step.fold()
        except dl.ReplicaMismatch:
            assert due is not None
            assert step.iteration == due + late
            raise
        assert due is None or step.iteration < due + late
        part(fault if step.iteration >= since else "", world, model, optimizer, step.iteration)
        if step.iteration == since and end == "break":
            break
        if step.iteration == since and end == "stop" and world.rank == 1:
            loop.stop()
        if step.iteration == since and end == "evaluate":
            dl.evaluate(model, dl.Batches(samples(20), 10, world), loss=lambda output, rows: output[:, 0])
    if end == "break":
        world.gather(world.rank)
    return loop.iteration


FAULTS = {
    "a forward of its own": r"rank 0 and rank 1 of 2 differ from each other in buffer model\.1\.running_mean",
    "a step left out": r"(parameter|momentum_buffer of) model\.0\.weight",
    "another learning rate": r"optimizer, group 0\.lr is 0\.01 on rank 0 and 0\.02 on rank 1",
}


@pytest.mark.slow
@pytest.mark.parametrize(("since", "steps"), [(1, 5), (4, 5), (15, 20), (99, 130), (120, 130)])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_that_does_something_alone_is_found(fault: str, since: int, steps: int, refused: Refused) -> None:
    said = f"{FAULTS[fault]}.*Look for what one rank does alone"
    refused(2, train, fault, since, steps, kind="ReplicaMismatch", said=said, by=ALL)


@pytest.mark.parametrize("end", ["break", "stop", "evaluate"])
@pytest.mark.slow
def test_it_is_found_too_where_a_loop_ends_early_and_before_an_evaluation(end: str, refused: Refused) -> None:
    for fault in ("a forward of its own", "a step left out"):
        where = "evaluate" if end == "evaluate" else f"step {3 + (end == 'stop')}"
        refused(2, train, fault, 3, 9, end, kind="ReplicaMismatch", said=where, by=ALL)


@pytest.mark.quick_on_gpus
def test_without_the_comparison_nothing_is_found_not_even_before_an_evaluation(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_alone, "a step left out", 3, 9, "evaluate", check_replicas_every=0) == [9, 9]


def train_alone(*arguments: Any, **keywords: Any) -> int:
    with dl.join_world() as world:
        return train(world, "", *arguments, **keywords)


def keep(world: dl.World, folder: str, fault: str) -> None:
    """The last checkpoint is not written."""
    train(world, folder, fault, 4, 5, run_dir=folder)


def test_no_checkpoint_is_left_of_the_end_of_replicas_that_parted(refused: Refused, tmp_path: Any) -> None:
    refused(2, keep, "a step left out", kind="ReplicaMismatch", said="After step 5", by=ALL)
    assert not list((tmp_path / "run").glob("checkpoints/step-*5"))


# -- a model outside of a loop's state--------------------------------------------------------------------------------


def first_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return output[:, 0]


def evaluate_another(world: dl.World, folder: str, call: str, what: str) -> None:
    model = network()
    if world.rank == 1:
        with torch.no_grad():
            (model[3].weight if what == "parameter 3.weight" else model[1].running_var).mul_(2)  # type: ignore[operator]
    batches = dl.Batches(samples(20), 10, world, shuffle=False)
    if call == "evaluate":
        dl.evaluate(model, batches, loss=first_of)
    else:
        dl.predict(model, batches)


@pytest.mark.covers("B8")
@pytest.mark.parametrize(("call", "what"), [("evaluate", "parameter 3.weight"), ("predict", "buffer 1.running_var")])
def test_a_model_that_differs_between_ranks_is_neither_evaluated_nor_predicted_with(
    call: str, what: str, refused: Refused
) -> None:
    said = rf"{call} needs the same model on every rank, but rank 0 and rank 1 of 2 differ from each other in "
    said += re.escape(what)
    refused(2, evaluate_another, call, what, kind="ReplicaMismatch", said=said, by=ALL)


class Observer(nn.Linear):
    """A buffer that forward changes in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__(4, 1, dtype=torch.float64)
        self.register_buffer("most", torch.zeros((), dtype=torch.float64))
        self.most: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.most.copy_(torch.maximum(self.most, rows.detach().abs().max()))
        return super().forward(rows)


def evaluate_twice(world: dl.World, folder: str) -> None:
    torch.manual_seed(0)
    model, batches = Observer(), dl.Batches(samples(20), 10, world, shuffle=False)
    for _ in range(2):
        dl.evaluate(model, batches, loss=first_of)


@pytest.mark.covers("B8")
def test_a_buffer_that_an_evaluation_moved_is_a_cause_that_the_remedy_names(refused: Refused) -> None:
    said = "in buffer most .* a buffer that forward changes in evaluation mode too"
    refused(2, evaluate_twice, kind="ReplicaMismatch", said=said, by=ALL)


# -- runs that are right ---------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """A buffer that is a rank's own, and a cache, in no checkpoint, of what a rank saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(()), persistent=False)
        self.seen: torch.Tensor
        self.rank = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + self.rank
        if not self.training:
            self.cache = rows.abs().max()
        return rows


class Average:
    """An average of all that a model's state dict holds, as scripts keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: one.detach().clone() for name, one in model.state_dict().items()}

    def update(self) -> None:
        for name, one in self.model.state_dict().items():
            self.shadow[name].lerp_(one.to(self.shadow[name].dtype), 0.1) if one.is_floating_point() else None

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def train_rightly(folder: str) -> tuple[int, float]:
    with dl.join_world(seed=1) as world:
        model = nn.Sequential(network(), Counter())
        model[1].rank = world.rank  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        patience, average, moving = dl.EarlyStopping(model, 50), Average(model), AveragedModel(model)
        another = copy.deepcopy(model)
        state = {"model": model, "optimizer": optimizer, "patience": patience, "average": average, "moving": moving}
        loop = dl.Loop(
            dl.Batches(samples(42), SIZE, world),
            6,
            state=state,
            progress=False,
            check_replicas_every=3,
            buffer_reduction={"model.1.seen": "local", "model.1.cache": "local"},
            run_dir=folder,
        )
        for step in loop:
            take(step, model)
            optimizer.step()
            average.update()
            moving.update_parameters(model)
            if step.iteration % 2 == 0:
                batches = dl.Batches(samples(11), 5, world, shuffle=False)
                result = dl.evaluate(model, batches, loss=lambda output, rows: (output[:, 0] - rows.sum(1)) ** 2)
                dl.predict(another, batches)
                dl.predict(moving, batches)
                patience.should_stop(result["loss"])
        patience.restore_best()
        model[1].seen.add_(world.rank)  # type: ignore[operator]
        return loop.iteration, result["loss"]


@pytest.mark.slow
def test_a_run_that_is_right_is_never_refused(on_ranks: OnRanks, tmp_path: Any) -> None:
    first, *others = on_ranks(3, train_rightly, str(tmp_path / "run"))
    assert first[0] == 42
    assert all(other == first for other in others)


def leave_and_change() -> int:
    """All ranks leave the loop alike; what one does with its model afterwards is its own business."""
    with dl.join_world() as world:
        model = network()
        loop = dl.Loop(dl.Batches(samples(60), SIZE, world), 1, state={"model": model}, progress=False)
        for step in loop:
            take(step, model)
            if step.iteration == 4:
                break
        if world.rank == 0:
            model.half()
        return loop.iteration


def test_what_one_rank_does_with_its_model_after_the_loop_is_its_own_business(on_ranks: OnRanks) -> None:
    assert on_ranks(2, leave_and_change) == [4, 4]


class Caching(nn.Module):
    """Makes a table in its first forward, as rotary embeddings do."""

    table: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        self.register_buffer("table", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(4, dtype=torch.float64)
        return self.layer(rows * self.table)  # type: ignore[no-any-return]


def cache_late(part: bool) -> int:
    with dl.join_world() as world:
        model = Caching()
        loop = dl.Loop(dl.Batches(samples(4), 1, world), 1, state={"model": model}, progress=False)
        for step in loop:
            take(step, model, mean)
            if part and world.rank == 1:
                with torch.no_grad():
                    model.layer.bias.add_(1)
        return loop.iteration


def test_a_buffer_that_a_forward_makes_may_be_missing_on_a_rank_without_samples_and_nothing_else_may_differ(
    on_ranks: OnRanks,
) -> None:
    assert on_ranks(2, cache_late, False) == [4, 4]
    with pytest.raises(dl.RankFailed, match=r"differ.* in parameter model\.layer\.bias"):
        on_ranks(2, cache_late, True)
