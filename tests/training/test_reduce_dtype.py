"""Sums of bfloat16 and float16 gradients in a wider dtype: added up there over shards and ranks, and rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.training import loop_on, train

pytestmark = pytest.mark.covers("B10")

SHARDS, BATCH = 6, 17  # which 6 does not divide
SIZES = dl.split_sizes(BATCH, SHARDS)
KINDS = {"bfloat16": (torch.bfloat16, 7), "float16": (torch.float16, 10)}  # and the bits after the leading one
WEIGHTS = (3.0, 1.0, 0.0, 2.0, 5.0, 23.0)  # one of them is more than the mini-batch has samples
MIB = 1e-4  # a bucket for each parameter but the small ones


class Mixed(nn.Module):
    """A network in low precision, with a float32 layer and a parameter that no shard uses."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.unused = nn.Parameter(torch.zeros(3))
        self.to(kind)
        self.norm.float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(rows).float()).to(rows.dtype)
        outputs: torch.Tensor = self.last(hidden.tanh())
        return outputs

    def used(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter is not self.unused]


def rows_of(kind: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1)).to(kind)


def loss_of(model: nn.Module, rows: torch.Tensor, is_low: bool = False) -> torch.Tensor:
    outputs = model(rows)
    loss: torch.Tensor = ((outputs if is_low else outputs.float()) - 1).square().mean()
    return loss


def gradients_by_loop(
    name: str, reduce_dtype: torch.dtype | None, *, is_low: bool, weighted: bool, **options: Any
) -> Tensors:
    """The first mini-batch's gradients."""
    kind, _ = KINDS[name]
    with dl.join_world(seed=0) as world:
        model = Mixed(kind)
        shard_of = torch.arange(SHARDS).repeat_interleave(torch.tensor(SIZES))
        batches = dl.Batches((rows_of(kind), shard_of), BATCH, world, shards=SHARDS, shuffle=False)
        options = {"reduce_dtype": reduce_dtype, "bucket_cap_mib": MIB, "progress": False, **options}
        for step in loop_on(batches, model, **options):
            for rows, shards in step:
                step.backward(loss_of(model, rows, is_low), weight=WEIGHTS[shards[0]] if weighted else None)
            step.fold()
        assert model.unused.grad is None
        return [parameter.grad.clone() for parameter in model.used() if parameter.grad is not None]


def gradients_in_float64(name: str, *, is_low: bool, weighted: bool) -> Tensors:
    """The same, of the gradients that autograd makes for each shard."""
    kind, _ = KINDS[name]
    model = Mixed(kind)
    weights = WEIGHTS if weighted else tuple(map(float, SIZES))
    sums = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in model.used()]
    for weight, rows in zip(weights, rows_of(kind).split(SIZES), strict=True):
        if weight:
            loss = loss_of(model, rows, is_low)
            factor = weight / BATCH
            made = torch.autograd.grad(loss, model.used(), torch.full_like(loss, 1.0 if is_low else factor))
            for total, gradient in zip(sums, made, strict=True):
                total += gradient.double() * (factor if is_low else 1.0)
    return [total * (BATCH / sum(weights)) for total in sums]


def ulps(found: Tensors, expected: Tensors, name: str) -> float:
    """The largest difference from what is rounded once, in last places of low-precision gradients."""
    kind, bits = KINDS[name]
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.dtype == kind:
            last = torch.exp2(other.abs().log2().floor().clamp(min=-14.0 if kind == torch.float16 else -126.0) - bits)
            worst = max(worst, float(((one.double() - other.to(kind).double()).abs() / last).max()))
        else:
            assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-7)
    return worst


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("is_low", "weighted"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", KINDS)
def test_a_sum_in_float32_is_rounded_once(
    name: str, is_low: bool, weighted: bool, ranks: int, on_ranks: OnRanks
) -> None:
    how: dict[str, Any] = {"is_low": is_low, "weighted": weighted}
    expected = gradients_in_float64(name, **how)
    for dtype, ordered in ((torch.float32, None), (torch.float32, False), (torch.float64, None)):
        found = same_on_all(on_ranks(ranks, gradients_by_loop, name, dtype, ordered=ordered, **how))
        assert ulps(found, expected, name) <= 1
    assert ulps(on_ranks(ranks, gradients_by_loop, name, None, **how)[0], expected, name) > 1


def weights_of_steps(steps: int, folder: str | None = None) -> list[Tensors]:
    """The weights after each step; a parameter is unfrozen in the third one, and gradients are kept."""
    model = Mixed(torch.bfloat16)
    model.last.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        assert all(torch.equal(one, copy) for one, copy in kept)
        return loss_of(model, rows)

    def after_fold(step: dl.Step, result: dl.StepResult) -> Tensors:
        assert (model.last.bias.grad is not None) == model.last.bias.requires_grad
        model.last.bias.requires_grad_(step.iteration > 1)  # of the next one
        kept[:] = [(one.grad, one.grad.clone()) for one in model.parameters() if one.grad is not None]
        return values_of(model)

    options: dict[str, Any] = {"epochs": None, "steps": steps, "run_dir": folder, "bucket_cap_mib": MIB}
    return train(model, loss, rows_of(torch.bfloat16), optimizer=optimizer, shards=SHARDS, after_fold=after_fold,
                 reduce_dtype=torch.float32, **options)  # fmt: skip


@pytest.mark.both_exchanges
@pytest.mark.slow
def test_the_bits_are_the_same_on_any_number_of_ranks_and_where_a_run_resumes(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    (expected,) = on_ranks(1, weights_of_steps, 6)
    assert not any(is_same(one, other) for one, other in zip(expected[1:], expected, strict=False))
    for ranks, steps, wanted in ((3, 4, expected[:4]), (2, 6, expected[4:])):
        for found in on_ranks(ranks, weights_of_steps, steps, str(tmp_path)):
            assert list(map(is_same, found, wanted)) == [True] * len(wanted)
