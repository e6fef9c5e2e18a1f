"""Buffers of every dtype keep their bits: float64 in a float32 network, large integers, complex numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import columns, decode, encode
from ddp_loop.distributed.encoding import assemble
from tests.support.comparing import Tensors, is_same, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too

LARGE = 2**24 + 1  # the first whole number that float32 rounds
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.float8_e4m3fn,
]


class Keeping(nn.Module):
    """A float32 network that writes buffers of other dtypes in each forward."""

    fine: torch.Tensor
    count: torch.Tensor
    wave: torch.Tensor
    zero: torch.Tensor
    ticks: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("fine", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("wave", torch.tensor([1 / 3 + 0.1j, 2.0 - 1j], dtype=torch.complex128))
        self.register_buffer("zero", torch.ones(1))
        self.register_buffer("ticks", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.fine.mul_(1 + 1e-12)
            self.count += torch.tensor([LARGE, -(2**40) - 1])
            self.wave.mul_(complex(0, 1 + 1e-12))
            self.zero.copy_(torch.tensor([-0.0]))
            self.ticks += 1.1
        return self.layer(rows)  # type: ignore[no-any-return]


def output_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows.float()).mean()  # type: ignore[no-any-return]


def buffers_after(shards: int | None, ordered: bool | None) -> Tensors:
    model = Keeping()
    train(model, output_of, torch.ones(11, 3), 5, shards=shards, ordered=ordered)
    return [one.clone() for one in model.buffers()]


@pytest.mark.covers("D6", "J4")
@pytest.mark.parametrize(
    ("ranks", "shards", "ordered"), [(1, None, None), (2, None, None), (3, 3, None), (3, 7, None), (3, 6, True)]
)
@pytest.mark.quick_on_gpus
def test_buffers_have_the_bits_of_the_plain_loop(
    ranks: int, shards: int | None, ordered: bool | None, on_ranks: OnRanks
) -> None:
    found = same_on_all(on_ranks(ranks, buffers_after, shards, ordered))
    model = Keeping()
    for _ in range(3):
        model(torch.ones(1, 3))
    assert is_same(found, list(model.buffers()))
    assert bool(found[3].signbit())


def mean_of_two() -> float:
    """Each shard's own mean, written into a float64 buffer of a float32 network."""
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        model.seen = rows.mean()
        return output_of(model, rows)

    data = torch.tensor([[1 / 3], [2 / 7], [1e-9]], dtype=torch.float64)
    train(model, loss, data, 3, buffer_reduction={"model.seen": "mean"})
    return model.get_buffer("seen").item()


@pytest.mark.covers("D6")
def test_the_mean_of_a_float64_buffer_is_taken_in_float64(on_ranks: OnRanks) -> None:
    mean = (1 / 3 + 2 / 7 + 1e-9) / 3
    assert all(abs(found - mean) <= 1e-15 for found in on_ranks(2, mean_of_two))


def widen(world: dl.World, folder: str) -> None:
    """Replace an integer buffer by a floating one."""
    model = nn.Linear(4, 1).double()
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    for step in loop_over(world, folder, model):
        for rows in step:
            model.count = model.get_buffer("count") + 0.5
            step.backward(model(rows).mean())
        step.fold()


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_buffer_that_changes_its_dtype_is_refused_and_named(ranks: int, refused: Refused) -> None:
    said = r"must keep its shape and dtype .* model\.count had \(\), torch\.int64"
    refused(ranks, widen, kind="ValueError", said=said, by=ALL)


def with_bits(dtype: torch.dtype, raw: list[int]) -> torch.Tensor:
    """Elements of a dtype, made of bytes; nan, which a conversion may replace by another nan, becomes 0."""
    if dtype is torch.bool:
        return torch.tensor(raw) > 127
    value = torch.tensor(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype=torch.uint8).view(dtype)
    return torch.where(value != value, torch.zeros_like(value), value) if dtype.itemsize > 1 else value


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    raw=st.lists(st.integers(0, 255), min_size=16, max_size=64),
    column=st.sampled_from((torch.float32, torch.float64)),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)
def test_every_dtype_travels_with_its_bits_from_any_place_of_a_row(
    dtype: torch.dtype, raw: list[int], column: torch.dtype, before: int, after: int
) -> None:
    value = with_bits(dtype, raw)
    encoded = encode(value, column)
    assert len(encoded) == columns(value, column)
    whole = nn.functional.pad(encoded, (before, after))
    rows = torch.stack([torch.full_like(whole, -0.0), whole]) + -0.0  # as a sum over ranks brings it
    back = assemble(decode(rows[:, before : before + len(encoded)], dtype)[1], value)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), value.view(torch.uint8))


def sums() -> list[list[object]]:
    """Of each dtype, and of a tensor with strides, which is added up in place."""
    with dl.join_world() as world:
        strided = torch.arange(6).view(2, 3).t()
        world.sum(strided)
        return [*(world.sum(torch.tensor([1, 0, 3]).to(dtype)).tolist() for dtype in DTYPES), strided.tolist()]


@pytest.mark.covers("E1")
def test_every_dtype_can_be_added_up_over_the_ranks(on_ranks: OnRanks) -> None:
    expected = [torch.tensor([2, 0, 6]).to(dtype).tolist() for dtype in DTYPES]
    assert on_ranks(2, sums) == [[*expected, [[0, 6], [2, 8], [4, 10]]]] * 2
