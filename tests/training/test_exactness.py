"""A step on N ranks against a plain torch loop over the same shards in one process, in float64.

The bound is 1e-12 relative to the largest element of each tensor: float64 rounds at 1.1e-16, and no sum here
has more than some thousand terms. Where nothing but rounding differs, errors of 1e-15 are seen.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.cases import CASES, make_data
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12
STEPS = 7


def is_close(value: torch.Tensor | None, expected: torch.Tensor | None, bound: float) -> bool:
    if value is None or expected is None:
        return value is expected
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((value.double() - expected.double()).abs().max()) <= bound * max(scale, 1e-3)


def far_from_0(mean: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (mean + torch.randn(100, 6, 4, 4, generator=generator, dtype=torch.float64)).float()


def statistics_far_from_0(mean: float, memory_format: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    with dl.join_world(seed=0) as world:
        norm = torch.nn.BatchNorm2d(6, momentum=1.0)
        model = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(96, 1))
        inputs = far_from_0(mean).contiguous(memory_format=memory_format)
        batches = dl.Batches(inputs, 100, world, shards=5, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
        return torch.as_tensor(norm.running_mean).double(), torch.as_tensor(norm.running_var).double()


@pytest.mark.covers("D4")
@pytest.mark.one_device("cpu", "on a GPU the means stay rounded, see the next test")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_the_variance_far_from_0_does_not_cancel_in_float32(
    mean: float, memory_format: torch.memory_format, on_ranks: OnRanks
) -> None:
    expected = far_from_0(mean).double().movedim(1, 0).flatten(1)
    for found, variance in on_ranks(3, statistics_far_from_0, mean, memory_format):
        # float32 rounds the shards' means at 6e-8 * 1e4 = 6e-4; sums of squares would be off by 6e-8 * 1e8 = 6 there.
        assert is_close(found, expected.mean(1), 1e-7)
        assert is_close(variance, expected.var(1), 1e-5)


@pytest.mark.covers("D4")
@pytest.mark.one_device("gpu", "the CPU computes the rounded means again")
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_on_a_gpu_the_variance_far_from_0_is_off_by_the_rounding_of_the_means(mean: float, on_ranks: OnRanks) -> None:
    expected = far_from_0(mean).double().movedim(1, 0).flatten(1)
    for found, variance in on_ranks(3, statistics_far_from_0, mean, torch.contiguous_format):
        assert is_close(found, expected.mean(1), 1e-7)
        # Twice the rounding, 6e-8 of the mean, times a shard's distance from the mean of all, a tenth of a deviation.
        assert is_close(variance, expected.var(1), 1e-8 * mean)


class Recomputed(nn.Module):
    """Batch norm in a block that may be computed again inside backward, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
        y = self.block(x) if reentrant is None else checkpoint(self.block, x, use_reentrant=reentrant)
        return self.last(y).mean()  # type: ignore[no-any-return]


def trained_with_recomputation(reentrant: bool | None) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Recomputed().double().to(world.device)
        rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        batches = dl.Batches(rows, 10, world, shards=4)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for inputs in step:
                step.backward(model(inputs.requires_grad_(), reentrant))
            step.fold()
        return [tensor.detach().double() for tensor in model.state_dict().values()]


@pytest.mark.covers("D4")
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_inside_backward_does_not_count_twice(reentrant: bool, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, trained_with_recomputation, None)[0]
    for found in on_ranks(2, trained_with_recomputation, reentrant):
        assert all(map(torch.equal, found, expected))


def every_state(rounds: int) -> list[list[bytes]]:
    """Parameters, momentum and buffers after every step, as bytes."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(world.rank)  # differing start: rank 0's is given to all
        model = CASES["batch norm 2d"].build().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs, labels = make_data((2, 4, 4), 50)
        batches = dl.Batches((inputs.float(), labels), 7, world)
        states = []
        for step in dl.Loop(batches, steps=rounds, state={"model": model, "optimizer": optimizer}, progress=False):
            for images, classes in step:
                step.backward(cross_entropy(model(images), classes))
            step.fold()
            optimizer.step()
            momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            tensors = [*model.state_dict().values(), *momenta]
            states.append([tensor.cpu().numpy().tobytes() for tensor in tensors])
        return states


@pytest.mark.covers("D2", "D7")
def test_parameters_and_momentum_and_buffers_are_bit_equal_on_all_ranks_after_each_of_50_steps(
    on_ranks: OnRanks,
) -> None:
    first, *others = on_ranks(3, every_state, 50)
    assert len(first) == 50
    assert all(other == first for other in others)
