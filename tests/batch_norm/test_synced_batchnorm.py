"""Synced batch norm on ranks is batch norm of one process on all their values: forward, back, running statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import ddp_loop as dl
from benchmarks.payload import counted
from ddp_loop.batch_norm import sync_batch_norm
from ddp_loop.batch_norm.synced import SyncedBatchNorm
from tests.support.comparing import Tensors, gradients_of, same_on_all
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("D5"), pytest.mark.on_gpus_too]

BOUND = 1e-10  # float64, relative to the largest magnitude: what the project promises
KINDS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Trained = dict[str, Tensors]  # outputs and gradients of the values for each step, gradients of parameters, buffers


@dataclass(frozen=True)
class Case:
    """A layer, trained for two steps; `rows` of values (rows, channels, *places) on each rank."""

    rows: tuple[int, ...]
    places: tuple[int, ...] = (4, 5)
    channels: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    form: str = "contiguous"
    dtype: torch.dtype = torch.float64
    mean: float = 0.5
    is_tracked: bool = True  # False: it has running statistics, and leaves them alone
    most_rows: int = 8  # messages of more ranks have one row


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any of them, for 1 to 4 ranks. 2 values would have no gradient but rounding."""
    places = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    rows = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5)), min_size=1, max_size=4)))
    assume(sum(rows) * prod(places) > 2)
    options = {
        "momentum": draw(st.sampled_from((None, 0.1, 1.0))),
        "affine": draw(st.booleans()),
        "eps": draw(st.sampled_from((1e-5, 0.1))),
        "track_running_stats": draw(st.booleans()),
    }
    forms = ["contiguous", "strided"] + ["channels last"] * (len(places) == 2)
    return Case(
        rows, places, draw(st.integers(1, 5)), options, draw(st.sampled_from(forms)), is_tracked=draw(st.booleans()),
        most_rows=draw(st.sampled_from((1, 8))),
    )  # fmt: skip


def layer_of(case: Case) -> _BatchNorm:
    layer = KINDS[len(case.places)](case.channels, **case.options)
    layer = layer.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
    layer.track_running_stats &= case.is_tracked
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(case.channels, generator=generator, dtype=torch.float64))
    return layer


def steps_of(case: Case) -> list[tuple[Tensors, Tensors]]:
    """Each rank's values, and the gradient that comes back to its outputs; the channels differ in deviation."""
    generator = torch.Generator().manual_seed(10)
    shape = (sum(case.rows), case.channels, *case.places)
    scale = torch.linspace(0.5, 2.0, case.channels, dtype=torch.float64).view(-1, *[1] * len(case.places))
    steps = []
    for _ in range(2):
        values, gradients = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        pieces = (case.mean + values * scale).to(case.dtype).split(case.rows)
        steps.append(([formed(one, case.form) for one in pieces], [*gradients.to(case.dtype).split(case.rows)]))
    return steps


def formed(piece: torch.Tensor, form: str) -> torch.Tensor:
    if form == "channels last":
        return piece.to(memory_format=torch.channels_last)
    return piece.transpose(0, -1).contiguous().transpose(0, -1) if form == "strided" else piece


def train(layer: nn.Module, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> Trained:
    found: Trained = {"outputs": [], "of values": []}
    for values, gradient in steps:
        values = values.detach().requires_grad_()
        output = layer(values)
        output.backward(gradient)
        found["outputs"].append(output.detach())
        found["of values"].append(torch.as_tensor(values.grad))
    return found | {"of parameters": gradients_of(layer), "buffers": [buffer.clone() for buffer in layer.buffers()]}


def train_on_ranks(case: Case, device: str = "cpu") -> Trained:
    patch = mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", case.most_rows)
    with patch, dl.join_world(device=device, share_gpus=True) as world:
        layer = sync_batch_norm(layer_of(case).to(world.device), world)
        assert isinstance(layer, SyncedBatchNorm)
        own = [(values[world.rank], gradients[world.rank]) for values, gradients in steps_of(case)]
        found = train(layer, [(values.to(world.device), one.to(world.device)) for values, one in own])
        for gradient in found["of parameters"]:
            world.sum(gradient)
        return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def train_alone(case: Case, dtype: torch.dtype = torch.float64) -> Trained:
    pieces = [(torch.cat(values).to(dtype), torch.cat(gradients).to(dtype)) for values, gradients in steps_of(case)]
    return train(layer_of(case).to(dtype), pieces)


def assert_equal(results: list[Trained], case: Case, bound: float = BOUND) -> None:
    alone = train_alone(case)
    found = {**results[0], "buffers": same_on_all([result["buffers"] for result in results])}
    for name in ("outputs", "of values"):
        found[name] = [torch.cat(pieces) for pieces in zip(*(result[name] for result in results), strict=True)]
    for name, tensors in found.items():
        for one, wanted in zip(tensors, alone[name], strict=True):
            assert float((one.double() - wanted).abs().max()) <= bound * float(wanted.abs().max()), name


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
@pytest.mark.slow
@given(case=cases())
def test_a_layer_equals_one_process(on_ranks: OnRanks, case: Case) -> None:
    assert_equal(on_ranks(len(case.rows), train_on_ranks, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound"),  # some 100, 3 units in the last place, where no deviation is close to 0
    [(torch.float64, BOUND), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
)
@settings(max_examples=20)
@given(case=cases())
def test_a_layer_is_that_of_one_process_on_a_gpu(
    dtype: torch.dtype, bound: float, on_ranks: OnRanks, case: Case
) -> None:
    case = replace(case, dtype=dtype, options={**case.options, "eps": 0.1})
    assert_equal(on_ranks(len(case.rows), train_on_ranks, case, device="gpu"), case, bound)


# -- bits and digits ---------------------------------------------------------------------------------------------------

FLOAT32 = Case((300, 0, 500), (6, 6), mean=1000.0, dtype=torch.float32, options={"momentum": 1.0})


@pytest.mark.covers("J13")
@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (Case((4, 1, 2), mean=1e6), 1e-8),  # float64 itself has 1e-10 left of the values' deviation
        (Case((40, 30, 20), mean=1000.0, most_rows=1), 1e-8),
        (FLOAT32, 1e-4),  # a product near 1,000 is rounded by 6e-5, as in torch's own
        (replace(FLOAT32, form="channels last"), 1e-4),  # here torch adds float32 in columns
        (replace(FLOAT32, form="channels last", mean=1e4), 1e-3),
        (replace(FLOAT32, dtype=torch.bfloat16), 2e-2),
        (replace(FLOAT32, dtype=torch.bfloat16, form="channels last"), 2e-2),
    ],
)
@pytest.mark.slow
def test_a_layer_keeps_its_digits_far_from_0(case: Case, bound: float, on_ranks: OnRanks) -> None:
    results = on_ranks(3, train_on_ranks, case)
    assert_equal(results, case, bound)
    for found, expected, most in zip(results[0]["buffers"], train_alone(case)["buffers"], (1.2e-7, 1e-5), strict=False):
        assert float((found.double() / expected - 1).abs().max()) < most  # the mean: float32's last digit, twice


def in_evaluation() -> bool:
    with dl.join_world() as world:
        layer = sync_batch_norm(nn.BatchNorm1d(3), world).eval()
        values = torch.randn(3, 3)
        return world.rank > 0 or torch.equal(layer(values), nn.BatchNorm1d(3).eval()(values))


@pytest.mark.quick_on_gpus
def test_evaluation_is_torchs_own_and_asks_no_other_rank(on_ranks: OnRanks) -> None:
    assert all(on_ranks(2, in_evaluation))


def test_a_world_of_one_gives_the_bits_of_torchs_own() -> None:
    case = Case((5,), dtype=torch.float32)
    expected = train_alone(case, torch.float32)
    for name, tensors in train_on_ranks(case).items():
        assert same_on_all([tensors, expected[name]])


def bytes_of_a_layer(rows: int, needs_gradient: bool = True) -> list[int]:
    """Of each collective, in a forward and a backward."""
    patch = mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", rows)
    with patch, dl.join_world() as world, counted(world) as handed:
        layer = sync_batch_norm(nn.BatchNorm1d(100), world)
        handed.clear()
        layer(torch.randn(2 * world.rank, 100, requires_grad=needs_gradient)).sum().backward()
        return [sum(each) for each in handed]


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
def test_a_forward_and_a_backward_are_a_collective_each_whose_one_row_does_not_grow_with_the_ranks(
    on_ranks: OnRanks,
) -> None:
    row = 8 * (3 + 2 * 100)
    for ranks in (2, 3):
        assert on_ranks(ranks, bytes_of_a_layer, 1)[0] == [row, row]
    assert on_ranks(3, bytes_of_a_layer, 8)[0] == [3 * row, 3 * row]
    assert on_ranks(2, bytes_of_a_layer, 1, False)[0] == [row]  # its backward has nowhere to go
