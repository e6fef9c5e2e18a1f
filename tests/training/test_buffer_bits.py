"""Buffers of every dtype keep their bits: float64 in a float32 network, large integers, complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import assemble, columns, decode, encode
from tests.support.comparing import is_same, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

LARGE = 2**24 + 1  # the first whole number that float32 rounds


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
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, 0.25)
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


def buffers_after(shards: int | None, ordered: bool | None = None) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Keeping()
        data = torch.arange(33.0).view(11, 3)
        batches = dl.Batches(data, 5, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False, ordered=ordered):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
        return [one.clone() for one in model.buffers()]


def expected(calls: int = 3) -> list[torch.Tensor]:
    model = Keeping()
    for _ in range(calls):
        model(torch.ones(1, 3))
    return list(model.buffers())


@pytest.mark.covers("D6", "J4")
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (2, 3), (3, 3), (3, 7)])
@pytest.mark.quick_on_gpus
def test_buffers_have_the_bits_of_the_plain_loop(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    found = same_on_all(on_ranks(ranks, buffers_after, shards))
    assert is_same(found, expected())
    assert bool(found[3].signbit())


@pytest.mark.covers("D6")
def test_they_have_them_also_where_sums_are_ordered(on_ranks: OnRanks) -> None:
    assert is_same(same_on_all(on_ranks(3, buffers_after, 6, True)), expected())


def mean_of_two() -> torch.Tensor:
    """Each shard's own mean, written into a float64 buffer of a float32 network."""
    with dl.join_world(seed=0) as world:
        model = nn.Linear(1, 1)
        model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        data = torch.tensor([[1 / 3], [2 / 7], [1e-9]], dtype=torch.float64)
        batches, rules = dl.Batches(data, 3, world, shuffle=False), {"model.seen": "mean"}
        for step in dl.Loop(batches, 1, state={"model": model}, buffer_reduction=rules, progress=False):  # type: ignore[arg-type]
            for rows in step:
                model.seen = rows.mean()
                step.backward(model(rows.float()).mean())
            step.fold()
        return torch.as_tensor(model.seen)


@pytest.mark.covers("D6")
def test_the_mean_of_a_float64_buffer_is_taken_in_float64(on_ranks: OnRanks) -> None:
    mean = (1 / 3 + 2 / 7 + 1e-9) / 3
    assert all(abs(float(found) - mean) <= 1e-15 for found in on_ranks(2, mean_of_two))


class Widening(nn.Module):
    """Replaces its integer buffer by a floating one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count: torch.Tensor = self.count + 0.5
        return self.layer(rows)  # type: ignore[no-any-return]


def widen(world: dl.World, folder: str) -> None:
    model = Widening()
    batches = dl.Batches(torch.ones(4, 3), 4, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_buffer_that_changes_its_dtype_is_refused_and_named(ranks: int, refused: Refused) -> None:
    said = r"must keep its shape and dtype .* model\.count had \(\), torch\.int64"
    refused(ranks, widen, kind="ValueError", said=said, by=ALL)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("column", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_with_its_bits(dtype: torch.dtype, column: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
        value = (torch.view_as_complex(numbers) if dtype.is_complex else numbers[..., 0]).to(dtype)
    else:
        raw = torch.randint(0, 256, (2, 5, dtype.itemsize), generator=generator, dtype=torch.uint8)
        value = raw[..., 0] > 127 if dtype is torch.bool else raw.view(dtype).squeeze(-1)
    value = value.contiguous()
    encoded = encode(value, column)
    assert len(encoded) == columns(value, column)
    rows = torch.stack([torch.full_like(encoded, -0.0), encoded]) + -0.0  # as a sum over ranks brings it
    back = assemble(decode(rows, dtype)[1], value)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), value.view(torch.uint8))


def sums_of_every_dtype() -> list[list[object]]:
    with dl.join_world() as world:
        return [world.sum(torch.tensor([1, 0, 3]).to(dtype)).tolist() for dtype in DTYPES]


@pytest.mark.covers("E1")
def test_every_dtype_can_be_added_up_over_the_ranks(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, sums_of_every_dtype):
        assert found == [torch.tensor([2, 0, 6]).to(dtype).tolist() for dtype in DTYPES]


def sum_of_a_strided_tensor() -> list[list[int]]:
    with dl.join_world() as world:
        tensor = torch.arange(6).view(2, 3).t()
        world.sum(tensor)
        found: list[list[int]] = tensor.tolist()
        return found


def test_a_tensor_with_strides_is_added_up_in_place(on_ranks: OnRanks) -> None:
    assert on_ranks(2, sum_of_a_strided_tensor) == [[[0, 6], [2, 8], [4, 10]]] * 2


def train_complex(shards: int) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        weight = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j], dtype=torch.complex128))
        bias = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        model = nn.ParameterList([weight, bias])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(11, 2, generator=torch.Generator().manual_seed(2), dtype=torch.complex128)
        batches = dl.Batches(data, 5, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows in step:
                step.backward(((rows * weight).sum(1).abs() ** 2 + bias).mean())
            step.fold()
            optimizer.step()
        return [weight.detach().clone(), bias.detach().clone()]


@pytest.mark.covers("H7")
@pytest.mark.both_exchanges
def test_complex_parameters_have_the_same_bits_on_1_2_and_3_ranks(on_ranks: OnRanks) -> None:
    (first,) = on_ranks(1, train_complex, 4)
    assert is_same(same_on_all(on_ranks(2, train_complex, 4)), first)
    assert is_same(same_on_all(on_ranks(3, train_complex, 4)), first)


def test_a_complex_buffer_may_begin_at_an_odd_place_of_the_row() -> None:
    like = torch.zeros(2, dtype=torch.complex64)
    row = torch.arange(5, dtype=torch.float64)
    for first in (0, 1):
        values = assemble(row.float()[first : first + 4], like)
        assert values.tolist() == [complex(first, first + 1), complex(first + 2, first + 3)]
