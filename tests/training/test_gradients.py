"""Buckets, hooks and weights: gradients that are right whatever the backward does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from ddp_loop.training.buckets import BucketSizes, bucket_sizes, grouped, is_dense
from tests.support.cases import make_data
from tests.support.comparing import gradients_of, is_same
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too


def deep(width: int = 16, depth: int = 6) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, width)]
    for _ in range(depth):
        layers += [nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 3)).double()


def test_neighbours_share_a_bucket_up_to_its_size_and_by_dtype() -> None:
    forms = [(10, torch.float32), (10, torch.float32), (100, torch.float32), (10, torch.float64), (10, torch.float32)]
    sizes = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in forms]
    groups = grouped(sizes, BucketSizes(100, 100))
    assert [[p.numel() for p in group] for group in groups] == [[10, 10], [100], [10], [10]]


@pytest.mark.parametrize(
    ("device", "cap_mib", "expected"),
    [("cpu", None, (8, 8)), ("cuda", None, (1, 25)), ("cuda", 8.0, (8, 8)), ("cpu", 0.5, (0.5, 0.5))],
)
def test_buckets_are_as_large_as_those_of_ddp_on_a_gpu(
    device: str, cap_mib: float | None, expected: tuple[float, float]
) -> None:
    sizes = bucket_sizes(cap_mib, torch.device(device))
    assert tuple(size / 2**20 for size in sizes) == expected


def test_the_first_bucket_has_a_size_of_its_own() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 2, 10, 1)]
    groups = grouped(parameters, BucketSizes(first=10, further=44))
    assert [[p.numel() for p in group] for group in groups] == [[2], [2], [10, 1]]


def test_dense_tensors_are_distinguished_from_those_with_gaps() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert is_dense(image)
    assert is_dense(image.to(memory_format=torch.channels_last))
    assert is_dense(image[:, :1].contiguous())
    assert is_dense(torch.zeros(()))
    assert not is_dense(image[:, :, ::2])
    assert not is_dense(torch.zeros(3, 1).expand(3, 4))


def gradients_by_buckets(bucket_cap_mib: float, shards: int | None, steps: int = 3) -> tuple[int, list[torch.Tensor]]:
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = deep()
        batches = dl.Batches(make_data((6,), 40), 10, world, shards=shards)
        loop = dl.Loop(batches, steps=steps, state={"model": model}, progress=False, bucket_cap_mib=bucket_cap_mib)
        for step in loop:
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            buckets = len(loop.fold.gradients.buckets)
        return buckets, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.covers("D3")
@pytest.mark.parametrize("shards", [None, 5])
@pytest.mark.quick_on_gpus
def test_many_buckets_give_the_bits_of_one(shards: int | None, on_ranks: OnRanks) -> None:
    # Two values commute, so on 2 ranks a sum does not depend on how it is cut up.
    one, whole = on_ranks(2, gradients_by_buckets, 8.0, shards)[0]
    many, pieces = on_ranks(2, gradients_by_buckets, 0.001, shards)[0]
    assert (one, many > 5) == (1, True)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def early_starts(shards: int) -> list[int]:
    """How many buckets' sums had begun when each shard's backward returned."""
    with dl.join_world(seed=0) as world:
        model = deep()
        batches = dl.Batches(make_data((6,), 40), 40, world, shards=shards)
        loop = dl.Loop(batches, steps=2, state={"model": model}, progress=False, bucket_cap_mib=0.001)
        started: list[int] = []
        for step in loop:
            started = []
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
                started.append(loop.fold.gradients.current.next)
            step.fold()
        return started


def test_sums_begin_during_the_last_shards_backward_and_not_before(on_ranks: OnRanks) -> None:
    for started in on_ranks(2, early_starts, 6):
        assert started[:2] == [0, 0]
        assert started[2] > 5


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # No callback on a future: run by gloo's thread, it can deadlock with the end of the group.
    dist.all_reduce(bucket.buffer())
    summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    summed.set_result(bucket.buffer())
    return summed


# torch compares annotations with the classes themselves, which `annotations` from the future hides.
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def train_by_ddp(model: nn.Module, batches: dl.Batches, steps: int) -> None:
    """torch's DDP with a hook that sums, on losses scaled by their shard's share; gone when this returns."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, sum_hook)
    for loaded in batches.epoch(1):
        if loaded.mini_batch.position == steps:
            break
        model.zero_grad()
        shard = loaded.mini_batch.shards[0]
        inputs, labels = loaded.data(0)
        (cross_entropy(wrapped(inputs), labels) * (shard.samples / 10)).backward()


def ddp_gradients() -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = deep()
        train_by_ddp(model, dl.Batches(make_data((6,), 40), 10, world), 3)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.covers("D3")
def test_gradients_are_those_of_torchs_ddp_with_a_summing_hook(on_ranks: OnRanks) -> None:
    expected = on_ranks(2, ddp_gradients)[0]
    _, found = on_ranks(2, gradients_by_buckets, 8.0, None)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class SharedAndCheckpointed(nn.Module):
    """A weight used by two checkpointed blocks: with reentrant checkpointing its hook fires twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=reentrant)
        return self.last(x)  # type: ignore[no-any-return]


def checkpointed(reentrant: bool, bucket_cap_mib: float) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = SharedAndCheckpointed().double()
        batches = dl.Batches(make_data((6,), 40), 10, world)
        for step in dl.Loop(batches, steps=3, state={"model": model}, progress=False, bucket_cap_mib=bucket_cap_mib):
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs, reentrant), labels))
            step.fold()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_reentrant_checkpointing_of_a_shared_weight_is_refused_once_its_sum_has_begun(on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=r"shared\.\w+ got a second one[\s\S]*use_reentrant=False"):
        on_ranks(2, checkpointed, True, 0.0001)


def test_reentrant_checkpointing_is_right_where_the_network_fits_one_bucket(on_ranks: OnRanks) -> None:
    found = on_ranks(2, checkpointed, True, 8.0)[0]
    expected = on_ranks(2, checkpointed, False, 0.0001)[0]
    assert all(float((a - b).abs().max()) <= 1e-15 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_only_shard_with_a_weight_has_the_bits_of_its_own_mean(as_tensor: bool) -> None:
    torch.manual_seed(1)
    model = deep()
    inputs, labels = make_data((6,), 10)
    cross_entropy(model(inputs), labels).backward()
    expected = gradients_of(model)
    with dl.join_world() as world:
        batches = dl.Batches((inputs, labels), 10, world, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows, classes in step:
                step.backward(cross_entropy(model(rows), classes), weight=torch.tensor(3.0) if as_tensor else 3.0)
            step.fold()
    assert is_same(gradients_of(model), expected)
