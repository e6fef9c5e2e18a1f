"""Buckets of gradients: their sizes, the gradients of torch's DDP with any of them, and what a fold does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from ddp_loop.training.buckets import BucketSizes, bucket_sizes, grouped, is_dense
from tests.support.comparing import Tensors, gradients_of, is_same, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, does_it, loss_of, samples
from tests.support.training import train, train_in

pytestmark = pytest.mark.on_gpus_too


@given(
    forms=st.lists(st.tuples(st.integers(0, 30), st.sampled_from((torch.float32, torch.float64))), min_size=1),
    first=st.integers(1, 200),
    further=st.integers(1, 200),
)
@pytest.mark.slow
def test_neighbours_of_a_dtype_fill_a_bucket_up_to_its_size(
    forms: list[tuple[int, torch.dtype]], first: int, further: int
) -> None:
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size, dtype in forms]
    groups = grouped(parameters, BucketSizes(first, further))
    assert [id(one) for group in groups for one in group] == list(map(id, parameters))
    for number, group in enumerate(groups):
        most = further if number else first
        size = sum(one.nbytes for one in group)
        assert len({one.dtype for one in group}) == 1
        assert len(group) == 1 or size <= most
        if number + 1 < len(groups):
            neighbour = groups[number + 1][0]
            assert neighbour.dtype != group[0].dtype or size + neighbour.nbytes > most


@pytest.mark.parametrize(
    ("device", "cap_mib", "expected"),
    [("cpu", None, (8, 8)), ("cuda", None, (1, 25)), ("cuda", 0.5, (0.5, 0.5))],
)
def test_buckets_are_as_large_as_those_of_ddp_on_a_gpu(
    device: str, cap_mib: float | None, expected: tuple[float, float]
) -> None:
    sizes = bucket_sizes(cap_mib, torch.device(device))
    assert tuple(size / 2**20 for size in sizes) == expected


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_a_dense_tensor_may_have_its_dimensions_in_any_order_but_no_gaps(sizes: list[int], data: st.DataObject) -> None:
    tensor = torch.zeros(sizes).permute(data.draw(st.permutations(range(len(sizes)))))
    assert is_dense(tensor)
    assert is_dense(tensor.sum())
    assert not is_dense(torch.stack([tensor, tensor])[..., None].expand(-1, *tensor.shape, 2))
    assert not is_dense(torch.zeros(2, *tensor.shape, 2)[..., 0])


def deep() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(4, 1)).double()


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # No callback on a future: run by gloo's thread, it can deadlock with the end of the group.
    dist.all_reduce(bucket.buffer())
    summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    summed.set_result(bucket.buffer())
    return summed


# torch compares annotations with the classes themselves, which `annotations` from the future hides.
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def by_ddp() -> Tensors:
    """torch's DDP with a hook that sums, on losses scaled by their shard's share."""
    with dl.join_world() as world:
        return of_ddp(world)


def of_ddp(world: dl.World) -> Tensors:
    # A function of its own: the wrapper is gone before its group. Else its Reducer may destroy the group, and hang.
    model = deep()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, sum_hook)
    rows = samples(7).tensor_split(world.size)[world.rank]
    (loss_of(wrapped, rows) * (len(rows) / 7)).backward()
    return gradients_of(model)


def by_loop(bucket_cap_mib: float) -> Tensors:
    model = deep()
    train(model, data=samples(7), batch_size=7, bucket_cap_mib=bucket_cap_mib)
    return gradients_of(model)


@pytest.mark.covers("D3")
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-4])  # at the latter each layer has a bucket of its own
@pytest.mark.quick_on_gpus
def test_gradients_equal_torchs_ddp_with_a_summing_hook(bucket_cap_mib: float, on_ranks: OnRanks) -> None:
    # Two values commute, so on 2 ranks a sum does not depend on how it is cut up.
    assert is_same(same_on_all(on_ranks(2, by_loop, bucket_cap_mib)), on_ranks(2, by_ddp)[0])


def embed(world: dl.World, folder: str, options: dict[str, Any], culprit: int) -> None:
    table = nn.Embedding(8, 3, **(options if does_it(world, culprit) else {}))
    train_in(world, table, lambda model, rows: model(rows).square().mean(), torch.arange(16) % 8, 8, run_dir=folder)


def count_rows(world: dl.World, folder: str, kind: Any, shards: int | None) -> None:
    batches = dl.Batches(torch.arange(16).view(8, 2) % 8, 4, world, shards=shards)
    dl.Loop(batches, 1, state={"model": kind(8, 3, scale_grad_by_freq=True)}, run_dir=folder or None, progress=False)


def count_rows_in_a_world(kind: Any) -> None:
    with dl.join_world() as world:
        count_rows(world, "", kind, None)


@pytest.mark.one_device("cpu", "the fake GPU has no sparse tensors")
def test_sparse_gradients_are_refused_with_the_remedy(refused: Refused) -> None:
    said = "The fold takes dense gradients. .* Make the embedding with sparse=False"
    refused(2, embed, {"sparse": True}, 1, kind="ValueError", said=said, by=1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (1, 4)])
def test_a_gradient_divided_by_counts_in_the_shard_is_refused(
    ranks: int, shards: int | None, kind: type[nn.Module], refused: Refused
) -> None:
    said = "must not have scale_grad_by_freq=True. model has it, .* scale_grad_by_freq=False"
    refused(ranks, count_rows, kind, shards, by=ALL, kind="ValueError", said=said)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_one_shard_may_divide_by_the_counts_in_it(kind: type[nn.Module], on_ranks: OnRanks) -> None:
    on_ranks(1, count_rows_in_a_world, kind)


def test_a_forward_that_changes_parameters_is_refused(refused: Refused) -> None:
    said = "model.weight was written .* max_norm"
    refused(2, embed, {"max_norm": 0.5}, ALL, kind="RuntimeError", said=said, by=None)
