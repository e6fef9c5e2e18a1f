"""Buckets of gradients: their sizes, and what a fold does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ddp_loop as dl
from ddp_loop.training.buckets import BucketSizes, bucket_sizes, grouped, is_dense
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import ALL, Refused, does_it
from tests.support.training import loop_on, train_in, train_plainly

pytestmark = pytest.mark.on_gpus_too

NUMBERS = torch.arange(23) ** 2 % 7  # of rows of an embedding; some are in no mini-batch


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


def embed(world: dl.World, folder: str, options: dict[str, Any], culprit: int) -> None:
    table = nn.Embedding(8, 3, **(options if does_it(world, culprit) else {}))
    train_in(world, table, lambda model, rows: model(rows).square().mean(), torch.arange(16) % 8, 8, run_dir=folder)


def count_rows(world: dl.World, folder: str, kind: Any, shards: int | None) -> None:
    batches = dl.Batches(torch.arange(16).view(8, 2) % 8, 4, world, shards=shards)
    loop_on(batches, kind(8, 3, scale_grad_by_freq=True), run_dir=folder or None)


@pytest.mark.one_device("cpu", "the fake GPU has no sparse tensors")
def test_sparse_gradients_are_refused_with_the_remedy(refused: Refused) -> None:
    said = "The fold takes dense gradients. .* Make the embedding with sparse=False; for SparseAdam"
    refused(2, embed, {"sparse": True}, 1, kind="ValueError", said=said, by=1)


def lookups(sparse: bool) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    table = nn.Embedding(8, 3, sparse=sparse, _weight=torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3))
    return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)


def square_of(table: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table(numbers)
    return found.square().mean()


def train_sparsely(world: dl.World, folder: str, shards: int | None) -> torch.Tensor:
    table, adam = lookups(sparse=False)

    def make_sparse(step: dl.Step, result: dl.StepResult) -> None:
        if (gradient := table.weight.grad) is not None:
            table.weight.grad = gradient.to_sparse(1)

    train_in(world, table, square_of, NUMBERS, optimizer=adam, shards=shards, after_fold=make_sparse)
    return table.weight.detach()


@pytest.mark.one_device("cpu", "the fake GPU has no sparse tensors")
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (1, 4)])
def test_the_remedy_for_sparse_gradients_trains_as_sparse_adam_does(
    ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    table, adam = lookups(sparse=True)
    train_plainly(table, square_of, NUMBERS, optimizer=adam)
    for found in on_ranks(ranks, in_world, train_sparsely, "", shards):
        torch.testing.assert_close(found, table.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (1, 4)])
def test_a_gradient_divided_by_counts_in_the_shard_is_refused(
    ranks: int, shards: int | None, kind: type[nn.Module], refused: Refused
) -> None:
    said = "must not have scale_grad_by_freq=True. model has it, .* scale_grad_by_freq=False"
    refused(ranks, count_rows, kind, shards, kind="ValueError", said=said)


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_one_shard_may_divide_by_the_counts_in_it(kind: type[nn.Module], on_ranks: OnRanks) -> None:
    on_ranks(1, in_world, count_rows, "", kind, None)


def test_a_forward_that_changes_parameters_is_refused(refused: Refused) -> None:
    said = "model.weight was written .* max_norm"
    refused(2, embed, {"max_norm": 0.5}, ALL, kind="RuntimeError", said=said, by=None)
