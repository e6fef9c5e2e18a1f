"""Shards whose gradients autograd adds up itself: the tree's order, whatever a shard's backward does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.cases import make_data
from tests.support.dispatching import Dispatched
from tests.support.harness import OnRanks
from tests.support.training import loop_on, train

pytestmark = pytest.mark.on_gpus_too

SHARDS, ROWS = 11, 44
LEFT_OUT = {"without a layer": (3, 4, 5, 8), "used once": tuple(range(SHARDS - 1))}  # shards that do not use it
KINDS = ["plain", "reentrant", "signed zeros", "bfloat16", *LEFT_OUT]
Gradients = list[torch.Tensor | None]


def make_model(width: int = 16) -> nn.ModuleDict:
    torch.manual_seed(1)
    layers = {"first": nn.Linear(6, width), "shared": nn.Linear(width, width), "at_times": nn.Linear(width, width)}
    return nn.ModuleDict({**layers, "last": nn.Linear(width, 3)})


def data() -> tuple[torch.Tensor, ...]:
    """Inputs, labels, and the number of each sample's shard."""
    inputs, labels = make_data((6,), ROWS)
    return inputs.float(), labels, torch.arange(ROWS) * SHARDS // ROWS


def loss_of(
    kind: str, model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shards: torch.Tensor
) -> torch.Tensor:
    """Of a shard. A weight that is used twice gets its gradient in two parts if the layer is reentrant."""
    if kind == "signed zeros":  # which a sum that starts from 0.0 would lose
        return torch.stack([(one * torch.ones_like(one)).sum() for one in model.parameters()]).sum() * -0.0
    hidden = torch.tanh(model["first"](rows))
    for _ in range(2):
        if kind == "reentrant":
            hidden = checkpoint(lambda values: torch.tanh(model["shared"](values)), hidden, use_reentrant=True)
        else:
            hidden = torch.tanh(model["shared"](hidden))
    if int(shards[0]) not in LEFT_OUT.get(kind, ()):
        hidden = hidden + model["at_times"](hidden)
    loss = cross_entropy(model["last"](hidden), labels)
    return loss.bfloat16() if kind == "bfloat16" else loss


class Job(NamedTuple):
    """A mini-batch."""

    kind: str
    losses: int  # of each shard
    width: int
    weights: tuple[float, ...] | None  # of the shards
    as_tensors: bool


JOBS = st.builds(
    Job,
    kind=st.sampled_from(KINDS),
    losses=st.integers(1, 2),
    width=st.sampled_from((16, 256)),
    weights=st.none() | st.tuples(*[st.sampled_from((4.0, 4.0, 0.0, 1e6))] * SHARDS).filter(any),
    as_tensors=st.booleans(),
)


def tree_sum(parts: Gradients) -> torch.Tensor | None:
    """The sum in the tree's order; None where no shard has a gradient."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    left = tree_sum(parts[:middle])
    right = tree_sum(parts[middle:])
    return right if left is None else left if right is None else left + right


def by_hand(job: Job) -> Gradients:
    """The gradients: each shard's own from torch, added up in the tree's order, and divided once."""
    model = make_model(job.width)
    weights = job.weights or (4.0,) * SHARDS
    is_narrow = job.kind == "bfloat16"
    shards: list[Gradients] = []
    for weight, *shard in zip(weights, *(one.split(ROWS // SHARDS) for one in data()), strict=True):
        model.zero_grad()
        for _ in range(job.losses):
            loss = loss_of(job.kind, model, *shard)
            loss.backward(torch.ones_like(loss) if is_narrow else torch.tensor(weight / ROWS))
        found = [one.grad for one in model.parameters()]
        factor = weight / ROWS if is_narrow else 1  # a product that is made in float32
        # What a shard of weight 0 reaches has zeros, without a sign.
        shards.append([one if one is None else one * factor if weight else torch.zeros_like(one) for one in found])
    sums = [tree_sum(list(parts)) for parts in zip(*shards, strict=True)]
    return [None if one is None else one * (ROWS / torch.tensor(sum(weights))) for one in sums]


def by_loop(job: Job, bucket_cap_mib: float) -> Gradients:
    """The same in the second of two steps, in which no parameter moves."""
    with dl.join_world() as world:
        model = make_model(job.width)
        batches = dl.Batches(data(), ROWS, world, shards=SHARDS, shuffle=False)
        loop = loop_on(batches, model, epochs=2, bucket_cap_mib=bucket_cap_mib)
        for step in loop:
            for shard in step:
                weight: Any = job.weights and job.weights[int(shard[2][0])]
                weight = torch.tensor(weight) if weight is not None and job.as_tensors else weight
                for left in reversed(range(job.losses)):
                    step.backward(loss_of(job.kind, model, *shard), weight=weight, more_losses=left > 0)
            step.fold()
        return [None if one.grad is None else one.grad.cpu().clone() for one in model.parameters()]


def bits(gradients: Gradients) -> list[bytes | None]:
    return [None if one is None else one.numpy().tobytes() for one in gradients]


@pytest.mark.covers("H7", "B10")
@settings(max_examples=40)
@given(job=JOBS, ranks=st.integers(1, 3), bucket_cap_mib=st.sampled_from((8.0, 0.0005)))
@pytest.mark.slow
def test_the_sum_is_that_of_the_tree_to_the_bit(on_ranks: OnRanks, job: Job, ranks: int, bucket_cap_mib: float) -> None:
    room = 8.0 if job.kind == "reentrant" else bucket_cap_mib
    assert {tuple(bits(found)) for found in on_ranks(ranks, by_loop, job, room)} == {tuple(bits(by_hand(job)))}


def copies_of(shards: int) -> int:
    """The fused copies and additions of gradients in one step."""
    found = Counter[str]()
    with Dispatched(lambda function, *_: found.update([function.overloadpacket.__name__])):
        train(make_model(), partial(loss_of, "plain"), data(), ROWS, shards=shards)
    assert found["addmm"] >= 4 * shards  # the mode has seen the forwards
    return found["_foreach_copy_"] + found["_foreach_add_"]


@pytest.mark.one_device("cpu", "a GPU adds all gradients of a shard in one kernel")
def test_a_further_shard_copies_no_gradients(on_ranks: OnRanks) -> None:
    assert on_ranks(1, copies_of, 4) == on_ranks(1, copies_of, 44)


def tampering(how: str, at: int) -> None:
    with dl.join_world() as world:
        model = make_model()
        batches = dl.Batches(data(), ROWS, world, shards=SHARDS, shuffle=False)
        part = torch.optim.SGD(model["shared"].parameters(), lr=0.1)
        for step in loop_on(batches, model):
            for number, shard in enumerate(step):
                loss = loss_of("reentrant" if (how, at) == ("twice", number) else "plain", model, *shard)
                if number == at and how == "zero_grad":
                    part.zero_grad()
                elif number == at and how == "clip":
                    nn.utils.clip_grad_norm_(part.param_groups[0]["params"], 1e-3)
                elif number == at and how == "another backward":
                    loss_of("plain", model, *shard).backward()
                elif number == at and how == "another tensor":
                    model["last"].bias.grad = torch.zeros(3)
                step.backward(loss)
            if at == SHARDS:
                part.zero_grad()
            step.fold()


@pytest.mark.parametrize(
    ("how", "at"),
    [*(("zero_grad", at) for at in (1, 4, SHARDS)), ("clip", 3), ("another backward", 4), ("another tensor", 3)],
)
@pytest.mark.quick_on_gpus
def test_a_gradient_changed_between_two_shards_is_refused(how: str, at: int, on_ranks: OnRanks) -> None:
    of = r"\. That of model\.shared" if how == "zero_grad" else ""
    with pytest.raises(dl.RankFailed, match="must stay as they are until its fold" + of):
        on_ranks(1, tampering, how, at)


@pytest.mark.one_device("cpu", "a GPU's gradients of a shard are made apart")
def test_a_gradient_in_two_parts_in_a_later_shard_alone_is_refused(on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"written as often in each shard's backward[\s\S]*use_reentrant=False"):
        on_ranks(1, tampering, "twice", 5)
    on_ranks(1, tampering, "twice", 0)  # each bucket then takes gradients apart
