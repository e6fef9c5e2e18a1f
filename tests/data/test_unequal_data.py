"""Ranks with own data of unequal length: exact weights, the end of the shorter ones, unused samples."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of
from tests.support.documents import fenced_blocks
from tests.support.harness import OnRanks
from tests.support.own_data import made_steps, network_after_a_norm, own_stream, rows_of
from tests.support.paths import DOCS
from tests.support.refusals import network
from tests.support.runs import lines_of
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A11", "A12")

Step = tuple[
    int, list[int], int, bool, float, Tensors
]  # epoch, own samples, R, is it the epoch's last, loss, gradients
Record = tuple[list[Step], list[tuple[int, ...] | None]]  # the steps of a rank; unused samples after each epoch


def train(
    counts: list[int], size: int | None, until: str, epochs: int, *, layer: bool = False, partition: str = "",
    **options: Any,
) -> Record:  # fmt: skip
    """Train over the ranks' own streams, or over tensors in a partition."""
    with dl.join_world() as world:
        model = dl.sync_batch_norm(network_after_a_norm(), world) if layer else network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data: Any = own_stream(world, counts)
        if partition:
            numbers = data.numbers if partition == "own" else list(range(sum(counts)))
            data = torch.tensor(numbers, dtype=torch.int64), rows_of(numbers)
        batches = dl.Batches(data, size, world, partition=partition or "local", until=until, **options)
        assert size or batches.batch_size == sum(counts) == sum(batches.sizes(0))
        loop = loop_on(batches, model, optimizer, epochs=epochs, allow_single_sample_shards=True)  # fmt: skip
        steps: list[Step] = []
        unused: list[tuple[int, ...] | None] = []
        for epoch in loop.epochs():
            for step in epoch:
                seen: list[int] = []
                for numbers, rows in step:
                    seen += numbers.tolist()
                    step.backward(mse_loss(model(rows), rows.sum(1, keepdim=True)))
                result = step.fold()
                place = step.epoch, seen, step.samples, step.is_last_of_epoch
                steps.append((*place, result.loss.item(), gradients_of(model)))
                assert result.samples == step.samples
                optimizer.step()
            unused.append(None if batches.unused is None else tuple(batches.unused))
        return steps, unused


def assert_exact(results: list[Record], layer: bool = False) -> list[list[int]]:
    """Compare each step with one process on the union of the ranks' samples; returns the numbers of these."""
    model = network_after_a_norm() if layer else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    unions = []
    for steps in zip(*(steps for steps, _ in results), strict=True):
        union = [number for step in steps for number in step[1]]
        unions.append(union)
        rows = rows_of(union)
        loss = mse_loss(model(rows), rows.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for _, _, count, _, found, gradients in steps:
            assert count == len(union)
            assert found == pytest.approx(loss.item(), rel=1e-12)
            torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-12, atol=1e-12)
        optimizer.step()
    return unions


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(
    ("counts", "partition", "size"),
    [([7, 3], "", 4), ([7, 3], "own", 4), ([1000, 0], "", 64), ([13, 0, 6], "own", 6)],
)
def test_own_data_of_unequal_length_train_as_one_process_on_their_union(
    counts: list[int], partition: str, size: int, on_ranks: OnRanks
) -> None:
    results = on_ranks(len(counts), train, counts, size, "all", 2, partition=partition)
    unions = assert_exact(results)
    steps = len(unions) // 2
    assert steps == -(-max(counts) // (size // len(counts)))
    for epoch in range(2):
        seen = Counter(number for union in unions[epoch * steps :][:steps] for number in union)
        assert seen == Counter(range(sum(counts)))
    for made, unused in results:
        assert [is_last for _, _, _, is_last, _, _ in made] == ([False] * (steps - 1) + [True]) * 2
        assert unused == [(0, True)] * 2


@pytest.mark.parametrize(("counts", "partition"), [([3, 0, 5], "own"), ([3, 0, 5], "local"), ([1], "own")])
def test_without_a_batch_size_all_samples_are_one_mini_batch(
    counts: list[int], partition: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(len(counts), train, counts, None, "all", 1, partition=partition)
    (union,) = assert_exact(results)
    assert sorted(union) == list(range(sum(counts)))
    for rank, ((one,), _) in enumerate(results):
        assert partition == "local" or sorted(one[1]) == list(range(sum(counts[:rank]), sum(counts[: rank + 1])))


def test_until_first_ends_with_the_first_rank_and_counts_the_unused(on_ranks: OnRanks) -> None:
    for partition in ("", "own"):
        results = on_ranks(2, train, [7, 3], 4, "first", 2, partition=partition)
        assert [len(union) for union in assert_exact(results)] == [4, 3] * 2
        for _, unused in results:
            assert unused == [(3, True)] * 2
    for _, unused in on_ranks(2, train, [1000, 3], 4, "first", 1):
        assert unused == [(6, False)]  # rank 0 had read three pieces of its other 996


@pytest.mark.slow
@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("seed", range(2))
def test_streams_of_random_lengths_on_four_ranks(seed: int, on_ranks: OnRanks) -> None:
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, draw.randrange(40)]) for _ in range(4)]
    counts[draw.randrange(4)] += 5
    size, drop_last = draw.randrange(4, 20), bool(seed % 2)
    piece = dl.split_sizes(size, 4)
    made = [count // one if drop_last else -(-count // one) for count, one in zip(counts, piece, strict=True)]
    left = [count % one if drop_last else 0 for count, one in zip(counts, piece, strict=True)]
    results = on_ranks(4, train, counts, size, "all", 2, drop_last=drop_last)
    unions = assert_exact(results)
    assert len(unions) == 2 * max(made)
    assert sum(map(len, unions)) == 2 * (sum(counts) - sum(left))
    assert results[0][1] == [(sum(left), True)] * 2


@pytest.mark.parametrize(("counts", "partition"), [([9, 3], ""), ([9, 2], "own")])
def test_synced_batch_norm_continues_where_a_rank_has_no_samples_left(
    counts: list[int], partition: str, on_ranks: OnRanks
) -> None:
    assert_exact(on_ranks(2, train, counts, 6, "all", 2, layer=True, partition=partition), layer=True)


def reported(folder: str, counts: list[int], until: str) -> Any:
    with dl.join_world() as world:
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", until=until)
        assert batches.unused is None
        list(made_steps(batches, network(), 2, run_dir=folder))
        return str(batches.unused)


@pytest.mark.slow
@pytest.mark.on_gpus_too
@pytest.mark.parametrize(
    ("counts", "until", "key", "said"),
    [
        ([5, 3], "first", "unused_samples", "1 sample"),
        ([1000, 2], "first", "unused_samples_at_least", "at least 6 samples"),
        ([7, 3], "all", "unused_samples", "0 samples"),
    ],
)
def test_unused_samples_are_reported(
    counts: list[int], until: str, key: str, said: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, reported, str(tmp_path), counts, until) == [said] * 2
    rows = lines_of(tmp_path / "rows.jsonl")
    assert [row["samples"] for row in rows][: len(rows) // 2] == [row["samples"] for row in rows][len(rows) // 2 :]
    last = [row for row in rows if key in row]
    assert [row["epoch"] for row in last] == [1, 2]
    assert {row[key] for row in last} == {float(said.removeprefix("at least ").split()[0])}


def documented(code: str) -> tuple[int, str]:
    with dl.join_world() as world:
        names: dict[str, Any] = {"dl": dl, "torch": torch, "world": world}
        exec(code, names)
        return len(names["batches"]), str(names["batches"].unused)


def test_the_example_of_the_document_is_true(on_ranks: OnRanks) -> None:
    blocks = fenced_blocks((DOCS / "migrate.md").read_text(), "python")
    (code,) = (block for block in blocks if 'partition="own", until="first"' in block)
    steps, unused = on_ranks(2, documented, code)[0]
    assert f"# {steps} mini-batches; {unused} are not used" in code
