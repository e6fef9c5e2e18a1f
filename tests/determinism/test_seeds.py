"""One seed fixes all random numbers, and every rank makes the same updates."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import next_key, next_keys, splitmix64
from tests.support.harness import OnRanks
from tests.support.sources import Mapped
from tests.support.training import loop_on
from tests.support.training import train as plain_training

pytestmark = pytest.mark.covers("H1")


def draw(seed: int) -> tuple[float, float, float]:
    with dl.join_world(seed=seed):
        return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_one_seed_starts_all_generators_alike_on_every_rank(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, draw, 3)
    assert first == second == on_ranks(1, draw, 3)[0]
    assert all(one != other for one, other in zip(first, on_ranks(1, draw, 4)[0], strict=True))


def test_the_keys_of_streams_are_those_of_splitmix64() -> None:
    # The first three numbers from state 0 by the authors' program (Steele, Lea, Flood 2014; Vigna 2015).
    step = 0x9E3779B97F4A7C15
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [next_key(0, number * step) for number in range(3)] == expected
    assert [word % 2**64 for word in splitmix64(0, torch.arange(1, 4)).tolist()] == expected
    words = [0, 1, 2**62, 2**63 - 1, -1]
    for key in (0, 5, 2**64 - 1):
        assert next_keys(key, words) == [next_key(key, word) for word in words]
    assert next_keys(3, []) == []


def test_tensors_are_mixed_as_keys_are() -> None:
    states = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    one = torch.ones((), dtype=torch.int64)
    expected = [next_key(0, state) for state in states]
    assert [splitmix64(state, one).item() % 2**64 for state in states] == expected
    signed = torch.tensor([state - 2**64 * (state >= 2**63) for state in states])
    assert [word % 2**64 for word in splitmix64(signed, one).tolist()] == expected


def noisy(index: int) -> tuple[torch.Tensor, int]:
    """Noise from all three generators."""
    noise = torch.randn(5) + random.random() + float(np.random.rand())
    return torch.full((5,), float(index)) / 20 + noise, index % 3


def train_noisily(seed: int) -> dict[str, Any]:
    order, noise = [], []
    with dl.join_world(seed=seed) as world:
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(world.device)
        start = [tensor.tolist() for tensor in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(Mapped(20, noisy), 8, world, shards=4)
        for step in loop_on(batches, model, optimizer, epochs=2):
            for inputs, labels in step:
                order.append(labels.tolist())
                noise.append(inputs.tolist())
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()
        end = [tensor.tolist() for tensor in model.parameters()]
    return {"weights": start, "order": order, "noise": noise, "trained": end}


def test_one_seed_fixes_weights_and_order_and_noise_and_dropout(on_ranks: OnRanks) -> None:
    runs = [on_ranks(2, train_noisily, 5) for _ in range(2)]
    assert runs[0] == runs[1]
    others = on_ranks(2, train_noisily, 6)[0]
    for what, value in runs[0][0].items():
        assert value != others[what], f"another seed must give other {what}"


def masks_by_shard() -> list[tuple[float, ...]]:
    """The dropout mask of each forward."""
    masks: list[tuple[float, ...]] = []

    def loss(model: Any, rows: torch.Tensor) -> Any:
        masks.append(tuple(nn.functional.dropout(torch.ones(64), 0.5).tolist()))
        return model(rows).sum()

    plain_training(nn.Linear(1, 1), loss, torch.ones(12, 1), 4, shards=4)
    return masks


def test_each_shard_of_each_step_has_its_own_dropout_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, masks_by_shard)[0]
    assert len(set(alone)) == len(alone) == 12
    left, right = on_ranks(2, masks_by_shard)
    assert [mask for k in range(3) for mask in (*left[2 * k : 2 * k + 2], *right[2 * k : 2 * k + 2])] == alone
