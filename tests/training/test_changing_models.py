"""A model that changes while it trains: refused, or alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import (
    ALL,
    Refused,
    does_it,
    loop_over,
    loss_of,
    network,
)

pytestmark = pytest.mark.on_gpus_too


def change_in_mid_run(world: dl.World, folder: str, what: str, culprit: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 1))
    batches = dl.Batches(torch.ones(24, 2, 3, 3), 6, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
        if step.iteration == 3 and does_it(world, culprit):
            if what == "channels_last":
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            elif what == "dtype":
                model.double()
            elif what == "freeze":
                model[2].requires_grad_(False)
            else:
                model[0].requires_grad_(True)
        if step.iteration == 1 and what == "unfreeze":
            model[0].requires_grad_(False)
        for images in step:
            step.backward(model(images.to(model[0].weight.dtype)).mean())
        step.fold()


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
@pytest.mark.parametrize("what", ["channels_last", "dtype"])
def test_a_parameter_that_changes_its_form_in_mid_run_is_refused(what: str, culprit: int, refused: Refused) -> None:
    said = "A parameter's dtype and memory format must not change during training. model.0.weight had"
    refused(2, change_in_mid_run, what, culprit, kind="RuntimeError", said=said, by=culprit)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("what", ["freeze", "unfreeze"])
@pytest.mark.quick_on_gpus
def test_a_layer_frozen_or_unfrozen_on_one_rank_alone_is_refused(what: str, culprit: int, refused: Refused) -> None:
    said = "same parameters must want a gradient on every rank"
    refused(2, change_in_mid_run, what, culprit, kind="ValueError", said=said)


def embed_sparsely(world: dl.World, folder: str, culprit: int) -> None:
    model = nn.Embedding(5, 3, sparse=does_it(world, culprit))
    batches = dl.Batches(torch.arange(12) % 5, 6, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()


@pytest.mark.one_device("cpu", "the fake GPU has no sparse tensors")
@pytest.mark.parametrize("culprit", [ALL, 1])
def test_sparse_gradients_are_refused_with_the_remedy(culprit: int, refused: Refused) -> None:
    said = "The fold takes dense gradients. .* Make the embedding with sparse=False"
    refused(2, embed_sparsely, culprit, kind="ValueError", said=said, by=culprit)


class Counting(nn.Module):
    """Counts in an integer buffer: its forwards, or the samples that it has seen."""

    seen: torch.Tensor

    def __init__(self, samples: bool) -> None:
        super().__init__()
        self.layer = network()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self._samples = samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x) if self._samples else 1
        return self.layer(x)  # type: ignore[no-any-return]


def count(world: dl.World, folder: str, each: bool, keywords: dict[str, Any]) -> int:
    model = Counting(each)
    for step in loop_over(world, folder, model, count=23, **keywords):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
    return int(model.seen)


@pytest.mark.covers("D6")
def test_an_integer_buffer_that_shards_change_differently_is_refused_by_name(refused: Refused) -> None:
    said = r"must change a buffer alike, .* model\.seen .* became 2 in shard 0 and 1 in shard 2\. Compute it from"
    refused(3, count, True, {"shards": 4}, kind="ValueError", said=said, by=ALL)


def count_in_a_world(each: bool, keywords: dict[str, Any]) -> int:
    with dl.join_world() as world:
        return count(world, "", each, {"run_dir": None, **keywords})


@pytest.mark.covers("D6")
@pytest.mark.parametrize(
    ("each", "policy", "expected"),
    [(False, None, [4, 4, 4]), (True, "first", [8, 8, 8]), (False, "first", [4, 4, 4])],
)
def test_integer_buffers_without_batch_norm_are_alike_on_all_ranks(
    each: bool, policy: str | None, expected: list[int], on_ranks: OnRanks
) -> None:
    keywords = {} if policy is None else {"buffer_reduction": {"model.seen": policy}}
    assert on_ranks(3, count_in_a_world, each, keywords) == expected


@pytest.mark.covers("D6", "C6")
def test_empty_shards_have_no_say_in_integer_buffers(on_ranks: OnRanks) -> None:
    assert on_ranks(3, count_in_a_world, False, {"shards": 9}) == [4, 4, 4]


@pytest.mark.covers("D6")
def test_a_word_that_is_no_rule_is_refused(refused: Refused) -> None:
    said = r"to one of .* Got 'model\.seen': 'sum'. The buffers are \['model\.seen'\]"
    refused(2, count, False, {"buffer_reduction": {"model.seen": "sum"}}, kind="ValueError", said=said, by=ALL)


class Awaking(nn.Module):
    """Buffers that begin to change in mid-run: one in the shard that holds sample 9, one in every shard."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("one", torch.full((2,), 4.0))
        self.register_buffer("each", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if 9.0 in rows:
            self.get_buffer("one").add_(8.0)
        if float(rows.min()) >= 6.0:
            self.get_buffer("each").add_(1)
        return self.weight * rows.mean()


def awake() -> list[tuple[list[float], int]]:
    with dl.join_world() as world:
        model = Awaking()
        found = []
        batches, rules = dl.Batches(torch.arange(12.0), 3, world, shuffle=False), {"model.one": "mean"}
        for step in dl.Loop(batches, 1, state={"model": model}, buffer_reduction=rules, progress=False):  # type: ignore[arg-type]
            for rows in step:
                step.backward(model(rows))
            step.fold()
            found.append((model.get_buffer("one").tolist(), int(model.get_buffer("each"))))
        return found


@pytest.mark.covers("D6")
def test_buffers_that_begin_to_change_in_mid_run_follow_their_rules_from_that_step_on(on_ranks: OnRanks) -> None:
    # Mini-batches of 3 over 2 shards of 2 and 1: sample 9 is in the first shard of the fourth one.
    expected = [([4.0] * 2, 0), ([4.0] * 2, 0), ([4.0] * 2, 1), ([4.0 + 8.0 * 2 / 3] * 2, 2)]
    for found in on_ranks(2, awake):
        for (one, each), (expected_one, expected_each) in zip(found, expected, strict=True):
            assert each == expected_each
            assert one == pytest.approx(expected_one, rel=1e-6)


class Assigning(nn.Module):
    """A buffer that forward replaces by another tensor."""

    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("level", torch.full((2,), 4.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.level = self.level / 2 + rows.mean().detach()
        return self.weight * rows.mean()


def assign() -> tuple[list[list[float]], bool]:
    with dl.join_world() as world:
        model = Assigning()
        own, found = model.level, []
        batches, rules = dl.Batches(torch.arange(6.0), 3, world, shuffle=False), {"model.level": "mean"}
        for step in dl.Loop(batches, 1, state={"model": model}, buffer_reduction=rules, progress=False):  # type: ignore[arg-type]
            for rows in step:
                step.backward(model(rows))
            step.fold()
            found.append(model.level.tolist())
        return found, model.level is own


@pytest.mark.covers("D6")
def test_a_buffer_that_forward_replaces_is_reduced_in_its_own_tensor(on_ranks: OnRanks) -> None:
    # Shards of 0, 1 and of 2, then of 3, 4 and of 5: level / 2 and the mean over the samples.
    assert on_ranks(2, assign) == [([[3.0] * 2, [5.5] * 2], True)] * 2
