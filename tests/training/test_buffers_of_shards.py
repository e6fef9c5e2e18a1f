"""Buffers that shards change: what one device leaves of them, or an error on every rank that names the buffer.

Those of every dtype keep their bits: float64 in a float32 network, large integers, complex numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from ddp_loop.distributed import columns, decode, encode_all
from ddp_loop.distributed.encoding import assemble_all
from tests.support.comparing import Tensors, is_same, same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, loss_of, network, samples
from tests.support.training import take, train

pytestmark = [
    pytest.mark.covers("D6"),
    pytest.mark.on_gpus_too,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

Make = Callable[[], nn.Module]
DOUBLE = torch.complex128


class Layer(nn.Module):
    """Hands its rows on, and has its buffers written."""

    def __init__(self, write: Callable[[Any, torch.Tensor], object], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.write = write
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, rows)
        return rows


# -- refused -----------------------------------------------------------------------------------------------


def write_maximum(layer: Any, rows: torch.Tensor) -> None:
    layer.largest.copy_(torch.maximum(layer.largest, rows.amax(0)))


def write_table(layer: Any, rows: torch.Tensor) -> None:
    """Of rotary embeddings: computed again for the longest row of the shard, in a new tensor."""
    base = 1e4 * float(rows.abs().max())
    layer.inv_freq = 1.0 / base ** torch.tensor([0.0, 0.5])


def write_statistics(layer: Any, rows: torch.Tensor) -> None:
    """Batch norm's running statistics by arithmetic of its own."""
    layer.running_mean.lerp_(rows.mean(0), 0.1)
    layer.running_var.lerp_(rows.var(0, correction=0), 0.1)


def write_count(layer: Any, rows: torch.Tensor) -> None:
    layer.seen += (rows > 0).sum()


def widen(layer: Any, rows: torch.Tensor) -> None:
    layer.count = layer.count + 0.5


def grow(layer: Any, rows: torch.Tensor) -> None:
    """Past torch's counter of writes, as the fused kernel of its quantization observers does in the first forward."""
    with torch.autograd._unsafe_preserve_version_counter(layer.seen):
        layer.seen.resize_(4).fill_(1)


def write_phase(layer: Any, rows: torch.Tensor) -> None:
    layer.phase[1] *= torch.complex(rows.mean(), rows.max())


WRONG = {
    "a maximum": r"model\.0\.largest .* after step\.gather .* is a mean over the samples, .* \"min\", \"max\"",
    "a table": r"Element 1 of model\.0\.inv_freq \(torch\.float32\) became \S+ in shard 0 and \S+ in shard 1",
    "own statistics": r"model\.0\.running_mean .* Call F\.batch_norm .* less than the variance of all",
    "a count": r"must change a buffer alike, .* model\.0\.seen .* became \d+ in shard 0 and \d+ .*\. Compute it from",
    "a phase": r"Element 1 of model\.0\.phase \(torch\.complex64\) became \(\S+j\) in shard 0 .* rule: \"first\"",
    "scripted norm": r"of model\.0\.running_mean .* Call F\.batch_norm .* 'model\.0\.running_var': 'mean'",
}


def differ(world: dl.World, folder: str, what: str, shards: int | None, steps: int, is_left: bool = False) -> None:
    model = nn.Sequential(LAYERS[what](), *network())
    for step in loop_over(world, folder, model, shards=shards, steps=steps, epochs=None):
        take(step, model)
        if is_left:
            model[0] = nn.Identity()  # the next step has another fold


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize(("ranks", "shards", "steps"), [(2, None, 1), (1, 3, 4)])
def test_a_buffer_that_depends_on_the_shard_is_refused_by_name(
    what: str, ranks: int, shards: int | None, steps: int, refused: Refused
) -> None:
    """On a GPU the next step finds it, and the last one has none."""
    refused(ranks, differ, what, shards, steps, kind="ValueError", said=WRONG[what])


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize(
    ("what", "before"),
    [("a wider dtype", r"count had \(\), torch\.int64"), ("more elements", r"seen had \(0,\), torch\.float32")],
)
def test_a_buffer_that_changes_its_shape_or_dtype_is_refused_and_named(
    what: str, before: str, ranks: int, refused: Refused
) -> None:
    said = rf"must keep its shape and dtype .* model\.0\.{before} .* run the model on a sample before the Loop"
    refused(ranks, differ, what, None, 1, kind="ValueError", said=said)


@pytest.mark.one_device(GPU, "elsewhere the first fold raises")
def test_a_new_fold_does_not_forget_what_the_former_one_had_to_find_out(refused: Refused) -> None:
    refused(2, differ, "a maximum", None, 4, True, kind="ValueError", said=r"model\.0\.largest")


def order_complex_numbers(world: dl.World, folder: str) -> None:
    loop_over(world, folder, nn.Sequential(LAYERS["a phase"](), *network()), buffer_reduction={"model.0.phase": "max"})


def test_values_without_an_order_are_refused(refused: Refused) -> None:
    refused(2, order_complex_numbers, kind="ValueError", said='"max" needs values with an order')


# -- as one device leaves them -----------------------------------------------------------------------------


LARGE = 2**24 + 1  # the first whole number that float32 rounds


def write_alike(layer: Any, rows: torch.Tensor) -> None:
    """Functions of the step alone, whose bits stay, NaN, and -0.0 beside 0.0; the last one is a mean of samples."""
    layer.rate.mul_(0.999)
    layer.power.mul_(1 / 3)
    layer.nothing.fill_(math.nan)
    layer.zero.fill_(-0.0 if float(rows[0, 0]) < 0 else 0.0)
    layer.negative.fill_(-0.0)
    layer.count += torch.tensor([LARGE, -(2**40) - 1])
    layer.wave.mul_(complex(0, 1 + 1e-12))
    layer.mean.copy_(rows.mean())


def write_silently(layer: Any, rows: torch.Tensor) -> None:
    """Through .data, as moving averages of codebooks are."""
    layer.level.data.mul_(0.5).add_(rows.mean())
    layer.begun.data.fill_(True)


def silent() -> nn.Module:
    level = torch.full((2,), 4.0, dtype=torch.float64)
    begun = torch.zeros((), dtype=torch.bool)
    return Layer(write_silently, level=level, begun=begun, constant=torch.tensor([math.nan, 0.1]))


def write_extremes(layer: Any, rows: torch.Tensor) -> None:
    """Of all values, as torch's MinMaxObserver does, and of ten times them as integers."""
    dtype = layer.least.dtype
    seen = (rows if dtype.is_floating_point else rows * 10).to(dtype)
    layer.least.copy_(torch.minimum(layer.least, seen.amin(0)))
    layer.largest.copy_(torch.maximum(layer.largest, seen.amax(0)))


def observer(dtype: torch.dtype) -> nn.Module:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    least = torch.full((4,), info.max, dtype=dtype)
    return Layer(write_extremes, least=least, largest=torch.full((4,), info.min, dtype=dtype))


class OwnNorm(nn.Module):
    """Batch norm as many write it; its momentum has a name of its own, and is given by place or by name."""

    def __init__(self, call: str, mean: str, var: str) -> None:
        super().__init__()
        self.call = call
        self.decay = 0.3
        self.register_buffer(mean, torch.zeros(4, dtype=torch.float64))
        self.register_buffer(var, torch.ones(4, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean, var = self.buffers()
        if self.call == "torch":
            return torch.batch_norm(rows, None, None, mean, var, self.training, self.decay, 1e-5, False)
        if self.call == "places":
            return F.batch_norm(rows, mean, var, None, None, self.training, self.decay)
        return F.batch_norm(rows, mean, var, momentum=self.decay, training=self.training)


ALIKE = "alike in all shards"
LAYERS: dict[str, Make] = {
    "a maximum": lambda: Layer(write_maximum, largest=torch.zeros(4, dtype=torch.float64)),
    "a table": lambda: Layer(write_table, inv_freq=torch.ones(2)),
    "own statistics": lambda: Layer(
        write_statistics, running_mean=torch.zeros(4).double(), running_var=torch.ones(4).double()
    ),
    "a count": lambda: Layer(write_count, seen=torch.zeros((), dtype=torch.int64)),
    "a phase": lambda: Layer(write_phase, phase=torch.ones(2, dtype=torch.complex64)),
    "scripted norm": lambda: torch.jit.script(nn.BatchNorm1d(4).double()),
    "a wider dtype": lambda: Layer(widen, count=torch.zeros((), dtype=torch.int64)),
    "more elements": lambda: Layer(grow, seen=torch.tensor([])),
    ALIKE: lambda: Layer(
        write_alike,
        rate=torch.tensor(0.1, dtype=torch.float64),
        power=torch.full((3,), 5 / 3),
        nothing=torch.full((2,), math.nan),
        zero=torch.ones(1, dtype=torch.bfloat16),
        negative=torch.ones(1),
        count=torch.zeros(2, dtype=torch.int64),
        wave=torch.tensor([1 / 3 + 0.1j, 2.0 - 1j], dtype=torch.complex128),
        mean=torch.zeros((), dtype=torch.float64),
    ),
    "silent": silent,
    "own norm by names": lambda: OwnNorm("names", "running_mean", "running_var"),
    "own norm by places": lambda: OwnNorm("places", "moving_mean", "moving_variance"),
    "own norm by torch": lambda: OwnNorm("torch", "mean", "var"),
    "extremes in float64": lambda: observer(torch.float64),
    "extremes in bfloat16": lambda: observer(torch.bfloat16),
    "extremes in int64": lambda: observer(torch.int64),
}
OWN: dict[str, str] = {}
EXTREMES = {"least": "min", "largest": "max"}
RULES: dict[str, dict[str, str]] = {  # of what one device leaves
    ALIKE: {"mean": "mean"},
    "silent": {"level": "mean"},
    "scripted norm": {"running_mean": "mean", "running_var": "mean"},
    **dict.fromkeys(("own norm by names", "own norm by places", "own norm by torch"), OWN),
    **dict.fromkeys(("extremes in float64", "extremes in bfloat16", "extremes in int64"), EXTREMES),
}


def move_between(model: nn.Module) -> None:
    """What a script may do after a step."""
    if "0.level" in dict(model.named_buffers()):
        model.get_buffer("0.level").data.add_(1.0)


def buffers_on_ranks(what: str, rules: dict[str, str], shards: int | None) -> Tensors:
    """After two steps; where buffers are alike, the network is of float32."""
    model = nn.Sequential(LAYERS[what](), *([nn.Linear(4, 1)] if what == ALIKE else network()))
    options: dict[str, Any] = {
        "buffer_reduction": {f"model.0.{name}": rule for name, rule in rules.items()},
        "check_replicas_every": 1,
        "after_fold": lambda step, result: move_between(model),
    }

    def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
        return model[1:](model[0](rows).to(model[1].weight.dtype)).mean()  # type: ignore[no-any-return]

    train(model, loss, samples(23), 12, shards=shards, **options)
    assert not model[0]._forward_hooks
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


def buffers_on_one_device(what: str) -> Tensors:
    model = nn.Sequential(LAYERS[what]())
    for rows in samples(23).split(12):
        model(rows)
        move_between(model)
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


def test_one_shard_has_the_bits_of_one_device(on_ranks: OnRanks) -> None:
    for what, rules in (*((what, OWN) for what in WRONG), *RULES.items()):
        (found,) = on_ranks(1, buffers_on_ranks, what, rules, None)
        assert is_same(found, buffers_on_one_device(what)), what


@pytest.mark.covers("D4", "C6", "J4")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("what", RULES)
@pytest.mark.parametrize(("ranks", "shards"), [(3, 4), (3, 2)])
def test_other_buffers_are_those_of_one_device(what: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    found = same_on_all(on_ranks(ranks, buffers_on_ranks, what, RULES[what], shards))
    every = buffers_on_one_device(what)
    assert what != ALIKE or (is_same(found[:-1], every[:-1]) and bool(found[4].signbit()))
    for number, (one, wanted) in enumerate(zip(found, every, strict=True)):
        assert one.dtype == wanted.dtype
        if (what, number) != ("scripted norm", 1):  # a mean of variances
            assert torch.allclose(one.to(DOUBLE), wanted.to(DOUBLE), rtol=1e-12, atol=1e-14)


def write_in_mid_run(layer: Any, rows: torch.Tensor) -> None:
    """Some begin to change late, one in the shard of sample 9, one in every shard; and one is replaced."""
    if 9.0 in rows:
        layer.one += 8.0
    if float(rows.min()) >= 6.0:
        layer.each += 1
    layer.level = layer.level / 2 + rows.mean()
    layer.seen += len(rows)


def change_in_mid_run() -> tuple[list[list[float]], bool]:
    level = torch.tensor(4.0).double()
    whole = torch.zeros((), dtype=torch.int64)
    layer = Layer(write_in_mid_run, one=torch.full((2,), 4.0), each=whole.clone(), level=level, seen=whole)
    rules = {"model.0.one": "mean", "model.0.level": "mean", "model.0.seen": "first"}

    def look(step: dl.Step, result: dl.StepResult) -> list[float]:
        return [number for buffer in layer.buffers() for number in buffer.reshape(-1).tolist()]

    data = torch.arange(12.0, dtype=torch.float64).unsqueeze(1).expand(-1, 4)
    found = train(nn.Sequential(layer, *network()), loss_of, data, 3, buffer_reduction=rules, after_fold=look)
    return found, layer.level is level


@pytest.mark.covers("C6")
def test_buffers_that_begin_to_change_in_mid_run_or_are_replaced_follow_their_rules(on_ranks: OnRanks) -> None:
    # Mini-batches of 3 over 2 shards of 2 and 1: sample 9 is in the first shard of the fourth one. The level is halved,
    # and the mean of the samples is added.
    last = 4.0 + 8.0 * 2 / 3
    wanted = [[4.0, 4.0, 0, 3.0, 2], [4.0, 4.0, 0, 5.5, 4], [4.0, 4.0, 1, 9.75, 6], [last, last, 2, 14.875, 8]]
    for found, is_in_its_own_tensor in on_ranks(2, change_in_mid_run):
        assert found == [pytest.approx(numbers, rel=1e-6) for numbers in wanted]
        assert is_in_its_own_tensor


# -- bits --------------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.float8_e4m3fn,
]


def mean_of_integers() -> float:
    def write(layer: Any, rows: torch.Tensor) -> None:
        layer.moved += len(rows) ** 2

    model = nn.Sequential(Layer(write, moved=torch.tensor([1000])), *network())
    train(model, loss_of, samples(5), 5, buffer_reduction={"model.0.moved": "mean"})
    return float(model.get_buffer("0.moved"))


@pytest.mark.parametrize(("ranks", "moved"), [(2, (3 * 9 + 2 * 4) / 5), (3, (2 * 4 + 2 * 4 + 1) // 5)])
def test_integers_move_by_the_whole_part_of_their_mean(ranks: int, moved: float, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, mean_of_integers) == [1000 + moved] * ranks


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
    encoded = encode_all([value], column)
    assert len(encoded) == columns(value, column)
    whole = nn.functional.pad(encoded, (before, after))
    rows = torch.stack([torch.full_like(whole, -0.0), whole]) + -0.0  # as a sum over ranks brings it
    [back] = assemble_all(decode(rows[:, before : before + len(encoded)], dtype)[1], [value])
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
