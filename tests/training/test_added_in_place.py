"""Shards whose gradients autograd adds up itself: the tree's order, whatever a shard's backward does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.cases import make_data
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

SHARDS = 11
ROWS = 44
Loss = Callable[[nn.ModuleDict, torch.Tensor, torch.Tensor, int], torch.Tensor]


def make_model(width: int = 16) -> nn.ModuleDict:
    torch.manual_seed(1)
    layers = {"first": nn.Linear(6, width), "shared": nn.Linear(width, width), "at_times": nn.Linear(width, width)}
    return nn.ModuleDict({**layers, "last": nn.Linear(width, 3)})


def forward(
    model: nn.ModuleDict, rows: torch.Tensor, *, at_times: bool = True, checkpointed: bool = False
) -> torch.Tensor:
    hidden = torch.tanh(model["first"](rows))
    for _ in range(2):
        if checkpointed:
            hidden = checkpoint(lambda x: torch.tanh(model["shared"](x)), hidden, use_reentrant=True)
        else:
            hidden = torch.tanh(model["shared"](hidden))
    hidden = hidden + model["at_times"](hidden) if at_times else hidden
    return model["last"](hidden)  # type: ignore[no-any-return]


def plain(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    return cross_entropy(forward(model, rows), labels)


def without_a_layer(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    """Left and right halves of the tree that do not use a layer, which other shards use."""
    return cross_entropy(forward(model, rows, at_times=shard not in (3, 4, 5, 8)), labels)


def used_once(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    """A layer that the last shard alone uses."""
    return cross_entropy(forward(model, rows, at_times=shard == SHARDS - 1), labels)


def reentrant(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    """A weight that gets its gradient in two parts."""
    return cross_entropy(forward(model, rows, checkpointed=True), labels)


def in_bfloat16(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    return cross_entropy(forward(model, rows), labels).to(torch.bfloat16)


def losing_zeros(model: nn.ModuleDict, rows: torch.Tensor, labels: torch.Tensor, shard: int) -> torch.Tensor:
    """Gradients of -0.0, whose sign a sum that starts from 0.0 would lose."""
    return torch.stack([(one * torch.ones_like(one)).sum() for one in model.parameters()]).sum() * -0.0


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "without a layer": without_a_layer,
    "used once": used_once,
    "reentrant": reentrant,
    "bfloat16": in_bfloat16,
    "signed zeros": losing_zeros,
}


def tree_sum(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum in the tree's order; None where no shard has a gradient."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    left, right = tree_sum(parts[:middle]), tree_sum(parts[middle:])
    return right if left is None else left if right is None else left + right


def by_hand(name: str, *, losses: int = 1, width: int = 16) -> list[torch.Tensor | None]:
    """The gradients of one mini-batch: each shard's own from torch, added up in the tree's order."""
    model, (inputs, labels) = make_model(width), make_data((6,), ROWS)
    inputs = inputs.float()
    size, shards = ROWS // SHARDS, []
    for shard in range(SHARDS):
        rows = slice(shard * size, (shard + 1) * size)
        model.zero_grad()
        for _ in range(losses):
            loss = LOSSES[name](model, inputs[rows], labels[rows], shard)
            low = loss.dtype == torch.bfloat16
            loss.backward(torch.ones_like(loss) if low else torch.tensor(size / ROWS))
            if low:
                for one in model.parameters():
                    one.grad.mul_(size / ROWS)  # type: ignore[union-attr]
        shards.append([one.grad for one in model.parameters()])
    return [tree_sum(list(parts)) for parts in zip(*shards, strict=True)]


def by_loop(
    name: str, *, losses: int = 1, bucket_cap_mib: float = 8.0, steps: int = 1, width: int = 16
) -> list[torch.Tensor | None]:
    """The same gradients of a Loop, in the last of its steps, in which no parameter moves."""
    with dl.join_world(seed=0) as world:
        model, (inputs, labels) = make_model(width).to(world.device), make_data((6,), ROWS)
        batches = dl.Batches((inputs.float(), labels), ROWS, world, shards=SHARDS, shuffle=False)
        loop = dl.Loop(batches, steps, state={"model": model}, progress=False, bucket_cap_mib=bucket_cap_mib)
        for step in loop:
            for shard, (rows, targets) in enumerate(step, dl.split_range(SHARDS, world.size, world.rank).start):
                for left in range(losses, 0, -1):
                    step.backward(LOSSES[name](model, rows, targets, shard), more_losses=left > 1)
            step.fold()
        return [None if one.grad is None else one.grad.cpu().clone() for one in model.parameters()]


def assert_same_bits(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.covers("H7")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_is_that_of_the_tree_to_the_bit(name: str, ranks: int, on_ranks: OnRanks) -> None:
    for found in on_ranks(ranks, by_loop, name, steps=2):
        assert_same_bits(found, by_hand(name))


@pytest.mark.parametrize("bucket_cap_mib", [8.0, 0.0005])
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.quick_on_gpus
def test_several_buckets_and_losses_have_the_same_order(losses: int, bucket_cap_mib: float, on_ranks: OnRanks) -> None:
    found = on_ranks(2, by_loop, "without a layer", losses=losses, bucket_cap_mib=bucket_cap_mib)[1]
    assert_same_bits(found, by_hand("without a layer", losses=losses))


def test_a_bucket_above_the_size_for_sums_from_zero_has_the_same_order(on_ranks: OnRanks) -> None:
    assert_same_bits(on_ranks(2, by_loop, "plain", width=256)[0], by_hand("plain", width=256))


class Counts(TorchDispatchMode):
    """Counts the operators that torch runs, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def copies_of(shards: int) -> int:
    """The fused copies and additions of gradients in one step."""
    with dl.join_world(seed=0) as world:
        model, (inputs, labels) = make_model().to(world.device), make_data((6,), ROWS)
        batches = dl.Batches((inputs.float(), labels), ROWS, world, shards=shards, shuffle=False)
        counts = Counts()
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            with counts:
                for rows, targets in step:
                    step.backward(plain(model, rows, targets, 0))
            step.fold()
        assert counts.found["addmm"] >= 4 * shards  # the mode has seen the forwards
        return counts.found["_foreach_copy_"] + counts.found["_foreach_add_"]


@pytest.mark.one_device("cpu", "a GPU adds all gradients of a shard in one kernel")
def test_a_further_shard_copies_no_gradients(on_ranks: OnRanks) -> None:
    assert on_ranks(1, copies_of, 4) == on_ranks(1, copies_of, 44) == [1]


def tampering(how: str, at: int) -> None:
    with dl.join_world(seed=0) as world:
        model, (inputs, labels) = make_model().to(world.device), make_data((6,), ROWS)
        batches = dl.Batches((inputs.float(), labels), ROWS, world, shards=SHARDS, shuffle=False)
        part = torch.optim.SGD(model["shared"].parameters(), lr=0.1)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for shard, (rows, targets) in enumerate(step):
                loss = plain(model, rows, targets, shard)
                if shard == at and how == "zero_grad":
                    part.zero_grad()
                elif shard == at and how == "clip":
                    torch.nn.utils.clip_grad_norm_(model["shared"].parameters(), 1e-3)
                elif shard == at and how == "another backward":
                    cross_entropy(forward(model, rows), targets).backward()
                elif shard == at and how == "another tensor":
                    model["last"].bias.grad = torch.zeros(3, device=world.device)
                elif shard == at and how == "twice":
                    loss = cross_entropy(forward(model, rows, checkpointed=True), targets)
                step.backward(loss)
            if at == SHARDS and how == "zero_grad":
                part.zero_grad()
            step.fold()


@pytest.mark.parametrize("at", [1, 2, 3, 4, SHARDS])
def test_a_gradient_taken_away_between_two_shards_is_refused(at: int, on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"must stay as they are until its fold\. That of model\.shared"):
        on_ranks(1, tampering, "zero_grad", at)


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("how", ["clip", "another backward", "another tensor"])
def test_a_gradient_changed_between_two_shards_is_refused(how: str, at: int, on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"must stay as they are until its fold"):
        on_ranks(1, tampering, how, at)


@pytest.mark.one_device("cpu", "a GPU's gradients of a shard are made apart")
def test_a_gradient_in_two_parts_in_a_later_shard_alone_is_refused(on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"written as often in each shard's backward[\s\S]*use_reentrant=False"):
        on_ranks(1, tampering, "twice", 5)
    on_ranks(1, tampering, "twice", 0)  # each bucket then takes gradients apart


def without_shards(left_out: tuple[int, ...]) -> list[torch.Tensor | None]:
    """The gradients of a mini-batch whose shards `left_out` have weight 0."""
    with dl.join_world(seed=0) as world:
        model, (inputs, labels) = make_model().to(world.device), make_data((6,), ROWS)
        batches = dl.Batches((inputs.float(), labels), ROWS, world, shards=SHARDS, shuffle=False)
        for step in dl.Loop(batches, 2, state={"model": model}, progress=False):
            for shard, (rows, targets) in enumerate(step, dl.split_range(SHARDS, world.size, world.rank).start):
                weight = 0 if shard in left_out else len(rows)
                step.backward(plain(model, rows, targets, shard), weight=weight)
            step.fold()
        return [None if one.grad is None else one.grad.cpu().clone() for one in model.parameters()]


@pytest.mark.parametrize("left_out", [(2,), (3,), (4, 5), (0, 8)])
def test_shards_of_weight_0_leave_the_order_of_the_others(left_out: tuple[int, ...], on_ranks: OnRanks) -> None:
    model, (inputs, labels) = make_model(), make_data((6,), ROWS)
    size, shards = ROWS // SHARDS, []
    for shard in range(SHARDS):
        rows = slice(shard * size, (shard + 1) * size)
        model.zero_grad()
        if shard not in left_out:
            plain(model, inputs[rows].float(), labels[rows], shard).backward(torch.tensor(size / ROWS))
        shards.append([one.grad for one in model.parameters()])
    scale = ROWS / torch.tensor(float(ROWS - size * len(left_out)))
    sums = [tree_sum(list(parts)) for parts in zip(*shards, strict=True)]
    expected = [None if one is None else one * scale for one in sums]
    for ranks in (1, 2):
        for found in on_ranks(ranks, without_shards, left_out):
            assert_same_bits(found, expected)
