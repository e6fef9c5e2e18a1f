"""Sums of bfloat16 and float16 gradients in a wider dtype: added up there over shards and ranks, and rounded once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import ddp_loop as dl
from tests.support.comparing import Tensors
from tests.support.harness import OnRanks
from tests.support.refusals import Refused

pytestmark = pytest.mark.covers("B10")

SHARDS, BATCH = 6, 17  # which 6 does not divide
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


def rows_of(kind: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1)).to(kind)


def loss_of(model: nn.Module, rows: torch.Tensor, is_low: bool) -> torch.Tensor:
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
        shard_of = torch.arange(SHARDS).repeat_interleave(torch.tensor(dl.split_sizes(BATCH, SHARDS)))
        batches = dl.Batches((rows_of(kind), shard_of), BATCH, world, shards=SHARDS, shuffle=False)
        loop = dl.Loop(
            batches,
            steps=1,
            state={"model": model},
            progress=False,
            bucket_cap_mib=MIB,
            reduce_dtype=reduce_dtype,
            **options,
        )
        for step in loop:
            for rows, shards in step:
                step.backward(loss_of(model, rows, is_low), weight=WEIGHTS[shards[0]] if weighted else None)
            step.fold()
        assert model.unused.grad is None
        return [given(parameter) for parameter in model.parameters() if parameter is not model.unused]


def given(parameter: Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def gradients_in_float64(name: str, *, is_low: bool, weighted: bool) -> Tensors:
    """The same, of the gradients that autograd makes for each shard."""
    kind, _ = KINDS[name]
    model = Mixed(kind)
    used = [parameter for parameter in model.parameters() if parameter is not model.unused]
    sums = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in used]
    sizes = dl.split_sizes(BATCH, SHARDS)
    for number, rows in enumerate(rows_of(kind).split(sizes)):
        weight = WEIGHTS[number] if weighted else len(rows)
        if weight == 0:
            continue
        loss = loss_of(model, rows, is_low)
        factor = weight / BATCH
        made = torch.autograd.grad(loss, used, torch.full((), 1.0 if is_low else factor, dtype=loss.dtype))
        for total, gradient in zip(sums, made, strict=True):
            total += gradient.double() * (factor if is_low else 1.0)
    whole = sum(WEIGHTS) if weighted else BATCH
    return [total * (BATCH / whole) for total in sums]


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
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("is_low", "weighted"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", KINDS)
def test_a_sum_in_float32_is_rounded_once(
    name: str, is_low: bool, weighted: bool, ranks: int, on_ranks: OnRanks
) -> None:
    how: dict[str, Any] = {"is_low": is_low, "weighted": weighted}
    expected = gradients_in_float64(name, **how)
    found = on_ranks(ranks, gradients_by_loop, name, torch.float32, **how)
    for one in found:
        assert all(map(torch.equal, one, found[0]))
        assert ulps(one, expected, name) <= 1
    assert ulps(on_ranks(ranks, gradients_by_loop, name, None, **how)[0], expected, name) > 1
    wider = on_ranks(ranks, gradients_by_loop, name, torch.float64, **how)[0]
    assert ulps(wider, expected, name) <= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_so_is_a_sum_in_any_order(ranks: int, on_ranks: OnRanks) -> None:
    how: dict[str, Any] = {"is_low": False, "weighted": False}
    expected = gradients_in_float64("bfloat16", **how)
    found = on_ranks(ranks, gradients_by_loop, "bfloat16", torch.float32, ordered=False, **how)
    assert ulps(found[0], expected, "bfloat16") <= 1


def digests(folder: str, steps: int, *, shards: int | None = SHARDS) -> list[str]:
    """SHA-256 of the weights after each step; a parameter is unfrozen in the third one, and gradients are kept."""
    found = []
    with dl.join_world(seed=0) as world:
        model = Mixed(torch.bfloat16)
        model.last.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        batches = dl.Batches(rows_of(torch.bfloat16), 6, world, shards=shards)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(
            batches,
            steps=steps,
            state=state,
            progress=False,
            bucket_cap_mib=MIB,
            reduce_dtype=torch.float32,
            run_dir=folder or None,
        )
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in loop:
            model.last.bias.requires_grad_(step.iteration > 2)
            for rows in step:
                step.backward(loss_of(model, rows, is_low=False))
            step.fold()
            optimizer.step()
            assert (model.last.bias.grad is not None) == (step.iteration > 2)
            assert all(torch.equal(one, copy) for one, copy in kept)
            kept = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
            sha = hashlib.sha256()
            for parameter in model.parameters():
                sha.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
            found.append(sha.hexdigest())
    return found


@pytest.mark.both_exchanges
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_are_the_same_on_any_number_of_ranks(ranks: int, on_ranks: OnRanks) -> None:
    expected = on_ranks(1, digests, "", 5)[0]
    assert len(set(expected)) == 5
    assert on_ranks(ranks, digests, "", 5) == [expected] * ranks


def test_a_run_resumes_on_another_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected = on_ranks(1, digests, "", 6)[0]
    folder = str(tmp_path / "run")
    assert on_ranks(3, digests, folder, 4)[0] == expected[:4]
    assert on_ranks(2, digests, folder, 6)[0] == expected[4:]


def begin(world: dl.World, folder: str, dtype: Any, other: Any) -> None:
    batches = dl.Batches(rows_of(torch.bfloat16), 6, world)
    chosen = dtype if world.rank == 0 else other
    dl.Loop(batches, 1, state={"model": Mixed(torch.bfloat16)}, progress=False, reduce_dtype=chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, "float32", 32])
def test_other_dtypes_are_refused(dtype: Any, refused: Refused) -> None:
    refused(2, begin, dtype, dtype, kind="ValueError", said="reduce_dtype must be torch.float32, torch.float64 or None")


def test_ranks_with_different_dtypes_are_refused(refused: Refused) -> None:
    refused(2, begin, torch.float32, None, kind="ValueError", said="reduce_dtype")
