"""Buffers that shards change: what one device leaves of them, or an error on every rank that names the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from ddp_loop.training import Buffers, find_buffers
from tests.support.comparing import Tensors, same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples
from tests.support.training import train

pytestmark = [
    pytest.mark.covers("D6"),
    pytest.mark.on_gpus_too,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning"),
]

Make = Callable[[], nn.Module]


class Layer(nn.Module):
    """Hands its rows on, and writes its buffers."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(rows, **dict(self._buffers))
        return rows

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        raise NotImplementedError

    def move_between(self) -> None:
        """What the script does after each step."""


# -- refused -----------------------------------------------------------------------------------------------


class Codebook(Layer):
    """Moving averages of counts and sums, and the codes as their quotient, as many scripts write it."""

    def __init__(self) -> None:
        super().__init__(codes=samples(3), counts=torch.ones(3, dtype=torch.float64), sums=samples(3))

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        picked = F.one_hot(torch.cdist(rows, buffers["codes"]).argmin(1), 3).to(rows)
        buffers["counts"].mul_(0.9).add_(picked.sum(0), alpha=0.1)
        buffers["sums"].mul_(0.9).add_(picked.T @ rows, alpha=0.1)
        buffers["codes"].copy_(buffers["sums"] / buffers["counts"].unsqueeze(1))


class Maximum(Layer):
    def __init__(self) -> None:
        super().__init__(largest=torch.zeros(4, dtype=torch.float64))

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        buffers["largest"].copy_(torch.maximum(buffers["largest"], rows.amax(0)))


class Rotary(Layer):
    """Computes its table again for the longest row of the shard, in a new tensor."""

    def __init__(self) -> None:
        super().__init__(inv_freq=torch.ones(2))

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        base = 1e4 * float(rows.abs().max())
        self.inv_freq = 1.0 / base ** torch.tensor([0.0, 0.5])


class OwnStatistics(Layer):
    """Batch norm's running statistics by arithmetic of its own."""

    def __init__(self) -> None:
        super().__init__(running_mean=torch.zeros(4, dtype=torch.float64), running_var=torch.ones(4).double())

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        buffers["running_mean"].lerp_(rows.mean(0), 0.1)
        buffers["running_var"].lerp_(rows.var(0, correction=0), 0.1)


class Phase(Layer):
    def __init__(self) -> None:
        super().__init__(phase=torch.ones(2, dtype=torch.complex64))

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        buffers["phase"][1] *= torch.complex(rows.mean(), rows.max())


def scripted_norm() -> nn.Module:
    return torch.jit.script(nn.BatchNorm1d(4).double())


WRONG: dict[Make, str] = {
    Codebook: r"Element 0 of model\.0\.codes \(torch\.float64\) became \S+ in shard 0 and \S+ in shard 1",
    Maximum: r"model\.0\.largest .* after step\.gather .* is a mean over the samples, .* \"min\", \"max\"",
    Rotary: r"Element 1 of model\.0\.inv_freq",
    OwnStatistics: r"model\.0\.running_mean .* Call F\.batch_norm .* less than the variance of all",
    Phase: r"Element 1 of model\.0\.phase \(torch\.complex64\) became \(\S+j\) in shard 0 .* rule: \"first\"",
    scripted_norm: r"of model\.0\.running_mean .* Call F\.batch_norm .* 'model\.0\.running_var': 'mean'",
}


def differ(world: dl.World, folder: str, make: Make, shards: int | None, steps: int, is_left: bool = False) -> None:
    model = nn.Sequential(make(), *network())
    for step in loop_over(world, folder, model, shards=shards, steps=steps, epochs=None):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        if is_left:
            model[0] = nn.Identity()  # the next step has another fold


@pytest.mark.both_exchanges
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("make", WRONG)
@pytest.mark.parametrize("steps", [1, 4])  # on a GPU the next step finds it, and the last one has none
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (1, 3), (2, 3), (3, 3)])
def test_a_buffer_that_depends_on_the_shard_is_refused_by_name(
    make: Make, steps: int, ranks: int, shards: int | None, refused: Refused
) -> None:
    refused(ranks, differ, make, shards, steps, kind="ValueError", said=WRONG[make], by=ALL)


@pytest.mark.one_device(GPU, "elsewhere the first fold raises")
def test_a_new_fold_does_not_forget_what_the_former_one_had_to_find_out(refused: Refused) -> None:
    refused(2, differ, Maximum, None, 4, True, kind="ValueError", said=r"model\.0\.largest", by=ALL)


def give_a_complex_buffer(world: dl.World, folder: str) -> None:
    loop_over(world, folder, nn.Sequential(Phase(), *network()), buffer_reduction={"model.0.phase": "max"})


def test_values_without_an_order_are_refused(refused: Refused) -> None:
    refused(2, give_a_complex_buffer, by=ALL, kind="ValueError", said='"max" needs values with an order')


# -- as one device leaves them -----------------------------------------------------------------------------


class Alike(Layer):
    """Functions of the step alone: a decaying rate, powers of a float32, NaN, and -0.0 beside 0.0."""

    def __init__(self) -> None:
        super().__init__(
            rate=torch.tensor(0.1, dtype=torch.float64),
            power=torch.full((3,), 5 / 3),
            nothing=torch.full((2,), math.nan),
            zero=torch.ones(1, dtype=torch.bfloat16),
        )

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        buffers["rate"].mul_(0.999)
        buffers["power"].mul_(1 / 3)
        buffers["nothing"].fill_(math.nan)
        buffers["zero"].fill_(-0.0 if float(rows[0, 0]) < 0 else 0.0)


class Silent(Layer):
    """Written through .data, as moving averages of codebooks are; also between the steps."""

    def __init__(self) -> None:
        super().__init__(
            level=torch.full((2,), 4.0, dtype=torch.float64),
            begun=torch.zeros((), dtype=torch.bool),
            constant=torch.tensor([math.nan, 0.1]),
        )

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        buffers["level"].data.mul_(0.5).add_(rows.mean())
        buffers["begun"].data.fill_(True)

    def move_between(self) -> None:
        self.get_buffer("level").data.add_(1.0)


class Observer(Layer):
    """Keeps the extremes of all values it saw, as torch's MinMaxObserver does, and of ten times them as integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        super().__init__(least=torch.full((4,), info.max, dtype=dtype), largest=torch.full((4,), info.min, dtype=dtype))

    def write(self, rows: torch.Tensor, **buffers: Any) -> None:
        dtype = buffers["least"].dtype
        seen = (rows if dtype.is_floating_point else rows * 10).to(dtype)
        buffers["least"].copy_(torch.minimum(buffers["least"], seen.amin(0)))
        buffers["largest"].copy_(torch.maximum(buffers["largest"], seen.amax(0)))


class OwnNorm(nn.Module):
    """Batch norm as many write it; its momentum has a name of its own, and is given by place or by name."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.decay = 0.3
        self.register_buffer("running_mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("running_var", torch.ones(4, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean, var = self.buffers()
        if self.call == "torch":
            return torch.batch_norm(rows, None, None, mean, var, self.training, self.decay, 1e-5, False)
        if self.call == "places":
            return F.batch_norm(rows, mean, var, None, None, self.training, self.decay)
        return F.batch_norm(rows, mean, var, momentum=self.decay, training=self.training)


def spectral_norm() -> nn.Module:
    torch.manual_seed(0)
    return torch.nn.utils.spectral_norm(nn.Linear(4, 4).double())


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten())


EXTREMES = {"least": "min", "largest": "max"}
RIGHT: dict[str, tuple[Make, dict[str, str]]] = {
    "alike in all shards": (Alike, {}),
    "spectral norm": (spectral_norm, {}),
    "instance norm": (instance_norm, {}),
    "silent": (Silent, {"level": "mean"}),
    "scripted norm": (scripted_norm, {"running_mean": "mean", "running_var": "mean"}),
    **{f"own norm by {call}": (partial(OwnNorm, call), {}) for call in ("names", "places", "torch")},
    **{
        f"extremes in {dtype}": (partial(Observer, dtype), EXTREMES)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8)
    },
}


def move_between(model: nn.Module) -> None:
    if isinstance(layer := model.get_submodule("0"), Layer):
        layer.move_between()


def buffers_on_ranks(make: Make, rules: dict[str, str], shards: int | None) -> Tensors:
    model = nn.Sequential(make(), *network())
    options: dict[str, Any] = {
        "buffer_reduction": {f"model.0.{name}": rule for name, rule in rules.items()},
        "check_replicas_every": 1,
        "after_fold": lambda step, result: move_between(model),
    }
    train(model, loss_of, samples(23), 12, shards=shards, **options)
    assert not model[0]._forward_hooks
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


def buffers_on_one_device(make: Make) -> Tensors:
    model = nn.Sequential(make(), *network())
    for rows in samples(23).split(12):
        model(rows)
        move_between(model)
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


@pytest.mark.parametrize("make", WRONG)
def test_one_shard_has_the_bits_of_one_device(make: Make, on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, buffers_on_ranks, make, {}, None)
    assert all(map(torch.equal, found, buffers_on_one_device(make)))


@pytest.mark.covers("D4", "C6")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize(("ranks", "shards"), [(3, 4), (2, None), (1, 4), (3, 2), (1, None)])
def test_other_buffers_are_those_of_one_device(what: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    make, rules = RIGHT[what]
    found = same_on_all(on_ranks(ranks, buffers_on_ranks, make, rules, shards))
    for number, (one, wanted) in enumerate(zip(found, buffers_on_one_device(make), strict=True)):
        assert one.dtype == wanted.dtype
        if (what, number) != ("scripted norm", 1):  # a mean of variances
            assert torch.allclose(one.double(), wanted.double(), rtol=1e-12, atol=1e-14)


def test_shards_without_samples_have_no_say() -> None:
    layer = Maximum()
    buffers = Buffers(find_buffers({"model": layer}, set(), {}))
    rows = torch.tensor([[1.0] * 4, [2.0] * 4, [1.0] * 4], dtype=torch.float64)
    buffers.apply(rows, frozenset({"model.largest"}), torch.tensor([0.5, 0.0, 0.5]), [0, 2])
    buffers.settle()
    assert layer.get_buffer("largest").tolist() == [1.0] * 4
