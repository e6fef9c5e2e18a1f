"""Ranks whose replicas became different: found within the steps that were asked for, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import ReplicaMismatch, describe_difference
from ddp_loop.distributed.replica_check import _describe_settings, _take, named_tensors
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loss_of, samples
from tests.support.training import take

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

EVERY, WRONG_AT, STEPS = 3, 4, 8  # compared at steps 3 and 6; the bit is flipped after step 4


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4, dtype=torch.float64))
        self.level: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class Average:
    """Keeps tensors without being a module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}


def flip(tensor: torch.Tensor) -> None:
    """The last bit of the first value's mantissa."""
    tensor.detach().reshape(-1)[:1].view(torch.int64).bitwise_xor_(1)


def job() -> tuple[nn.Sequential, dict[str, Any]]:
    torch.manual_seed(3)
    model = nn.Sequential(Level(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, {"model": model, "optimizer": optimizer, "average": Average(model)}


def train(world: dl.World, folder: str, wrong: str, ranks: list[int], every: int = EVERY, **keywords: Any) -> int:
    model, state = job()
    batches = dl.Batches(samples(6 * STEPS), 6, world)
    loop = dl.Loop(batches, 1, state=state, progress=False, check_replicas_every=every, **keywords)
    late = world.accelerator.is_asynchronous
    sees = wrong and world.size > 1 and not keywords
    due = next(number for number in range(WRONG_AT + 1, 99) if number % every == 0) if sees else 0  # the first look
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        try:
            step.fold()
        except ReplicaMismatch:
            assert step.iteration == due + late
            raise
        assert not due or step.iteration < due + late
        state["optimizer"].step()
        if step.iteration == WRONG_AT and world.rank in ranks:
            flip(named_tensors(state)[wrong])
    return loop.iteration


FLIPPED = [
    ("parameter model.1.weight", r"parameter model\.1\.weight \(float64, \(3, 4\)\)"),
    ("buffer model.0.level", r"buffer model\.0\.level \(float64, \(4,\)\)\. Look"),
    ("optimizer, exp_avg_sq of model.3.bias", r"optimizer, exp_avg_sq of model\.3\.bias"),
    ("average.shadow.1.bias", r"average\.shadow\.1\.bias \(float64, \(3,\)\)\. Look"),
]


@pytest.mark.parametrize(("wrong", "said"), FLIPPED)
@pytest.mark.quick_on_gpus
def test_one_flipped_bit_on_one_rank_is_found_and_named(wrong: str, said: str, refused: Refused) -> None:
    text = f"At the fold of step 6, rank 2 of 3 differs from the others in .*{said}"
    refused(3, train, wrong, [2], kind="ReplicaMismatch", said=text, by=ALL)


@pytest.mark.one_device(GPU, "tests a late error")
def test_a_late_error_comes_at_the_end_of_the_epoch_at_the_latest(refused: Refused) -> None:
    text = "At the fold of step 8, rank 1 of 3 differs from the others in parameter model.1.weight"
    refused(3, train, FLIPPED[0][0], [1], STEPS, kind="ReplicaMismatch", said=text, by=ALL)


def test_a_rank_with_other_tensors_is_named(refused: Refused) -> None:
    text = "rank 0 of 3 differs from the others: optimizer, step of model.* is on ranks 1, 2 alone"
    # At step 7 Adam has its state again, so it is looked at in the fold after the clearing.
    refused(3, forget, kind="ReplicaMismatch", said=text, by=ALL)


def forget(world: dl.World, folder: str) -> None:
    model, state = job()
    for step in dl.Loop(dl.Batches(samples(12), 6, world), 1, state=state, progress=False, check_replicas_every=1):
        take(step, model)
        state["optimizer"].step()
        if world.rank == 0:
            state["optimizer"].state.clear()


def train_alone(wrong: str, ranks: list[int], every: int, **keywords: Any) -> int:
    with dl.join_world() as world:
        return train(world, "", wrong, ranks, every, **keywords)


def test_equal_replicas_and_one_rank_are_let_pass(on_ranks: OnRanks) -> None:
    assert on_ranks(3, train_alone, "", [], 1) == [STEPS] * 3
    assert on_ranks(1, train_alone, FLIPPED[0][0], [0], 1) == [STEPS]
    assert on_ranks(2, train_alone, FLIPPED[1][0], [1], 1, buffer_reduction={"model.0.level": "local"}) == [STEPS] * 2


def look(world: dl.World, folder: str, *every: Any) -> None:
    train(world, folder, "", [], every[world.rank])


def test_an_interval_that_is_none_is_refused(refused: Refused) -> None:
    for every in (-1, 1.5, True):
        refused(2, look, every, every, kind="ValueError", said="check_replicas_every must be a whole number", by=ALL)
    refused(2, look, 1, 2, kind="ValueError", said="check_replicas_every of Loop must be the same", by=ALL)


def test_a_difference_is_described() -> None:
    names = ["a", "b", "c", "d", "e"]
    same = [0, 1, 2, 3, 4]
    assert describe_difference([same, [*same], same], names) is None
    assert describe_difference([same], names) is None
    other = [0, 2, 2, 3, 4]
    assert describe_difference([same, other, same], names) == "rank 1 of 3 differs from the others in b"
    many = describe_difference([same, same, other, same, [1, 2, 3, 4, 5]], names)
    assert many == "ranks 2, 4 of 5 differ from the others in a, b, c, and 2 more tensors"
    split = describe_difference([same, other, other, same], names)
    assert split == "ranks 0, 3 and ranks 1, 2 of 4 differ from each other in b"
    assert describe_difference([same, [1, 2, 3, 4, 4]], names) == (
        "rank 0 and rank 1 of 2 differ from each other in a, b, c, and 1 more tensor"
    )


def test_settings_that_differ_are_said_with_the_ranks_that_have_each_value() -> None:
    settings = [{"shards": "2", "dtype": one} for one in ("bfloat16", "float32", "bfloat16")]
    assert _describe_settings(settings) == "dtype is bfloat16 on ranks 0, 2 and float32 on rank 1"
    assert _describe_settings(settings[::2]) is None


def test_everything_that_must_be_the_same_has_a_name() -> None:
    model, state = job()
    loss_of(model, samples(6)).backward()
    state["optimizer"].step()
    found = named_tensors(state, ["model.0.level"])
    assert len(found) == 4 + 3 * 4 + 4
    assert {"parameter model.1.weight", "optimizer, step of model.1.weight", "average.shadow.3.bias"} <= found.keys()
    assert "buffer model.0.level" in named_tensors(state)
    assert _take("", named_tensors(state), {}).names[0] == "parameter model.1.weight (float64, (3, 4))"
