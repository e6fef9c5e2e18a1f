"""Lower precision: bf16 autocast, and fp16 with a loss scaler that all ranks agree on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too


def autocast(enabled: bool) -> AbstractContextManager[object]:
    device = torch.empty(0).device  # where this task makes its tensors
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


def image_network(channels_last: bool) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 5


def half_loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).float(), labels)


def train_half(where: str, shards: int, channels_last: bool) -> tuple[Tensors, Tensors]:
    """Parameters, and what else came out; autocast around as much as `where` says, with evaluations in it."""
    with dl.join_world() as world, autocast(where == "everything"):
        model = image_network(channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(images(), 16, world, shards=shards, shuffle=False)
        values = []
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            with autocast(where == "the pass"):
                for shard in step:
                    with autocast(where == "the backward too"):
                        with autocast(where == "the forward"):
                            loss = half_loss(model, *shard)
                        step.backward(loss)
            values.append(step.fold().loss)
            model.eval()
            half_loss(model, *images())  # a look at the outputs, with a graph, before the update
            model.train()
            optimizer.step()
            if step.is_last_of_epoch:
                with autocast(where != "nothing"):
                    found = dl.evaluate(model, batches, loss=lambda output, _: output.float().square().mean(1))
                values.append(torch.tensor(found["loss"]))
        return values_of(model), [torch.stack(values), *(one.clone() for one in model.buffers())]


def half_plainly() -> Tensors:
    """The parameters that two shards give in one process, of which each has half of a mini-batch."""
    model = image_network(channels_last=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = images()
    for piece, wanted in [*zip(inputs.split(16), labels.split(16), strict=True)] * 2:
        optimizer.zero_grad()
        for shard in zip(piece.chunk(2), wanted.chunk(2), strict=True):
            with autocast(True):
                loss = half_loss(model, *shard)
            (loss * 0.5).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.covers("B10")
def test_bf16_autocast_gives_the_bits_of_one_process_over_the_same_two_shards(on_ranks: OnRanks) -> None:
    # Two terms have one sum, whichever comes first.
    expected = on_ranks(1, half_plainly)[0]
    for parameters, _ in on_ranks(2, train_half, "the forward", 2, False):
        assert is_same(parameters, expected)


@pytest.mark.covers("B10", "J12")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("where", ["the forward", "the pass", "the backward too", "everything"])
def test_fixed_shards_give_the_same_bits_on_any_ranks_wherever_autocast_is(
    where: str, channels_last: bool, ranks: int, on_ranks: OnRanks
) -> None:
    """Its cache of weights in bf16 serves several shards, and no weight outlives its update there."""
    parameters, others = on_ranks(1, train_half, "the forward", 5, channels_last)[0]
    found = same_on_all([[*one, *other] for one, other in on_ranks(ranks, train_half, where, 5, channels_last)])
    assert is_same(found, [*parameters, *others])
    assert distance(on_ranks(1, train_half, "nothing", 5, channels_last)[0][0], parameters) > 1e-4  # bf16 it was


# -- a loss scaler -------------------------------------------------------------------------------------------

OVERFLOW = 3  # the update in which the last sample, one of the last shard, is enormous
UPDATES = 8


def with_an_enormous_one(batch_size: int) -> torch.Tensor:
    rows = samples(UPDATES * batch_size).float()
    rows[OVERFLOW * batch_size - 1] = 1000
    return rows


def fp16_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast(rows.device.type, dtype=torch.float16):
        return loss_of(model, rows)


@dataclass
class Scaled:
    """A run with a loss scaler: the scale after each update, the losses in its rows, all parameters."""

    device: str
    scales: list[float] = field(default_factory=list)
    losses: Tensors = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = network().float()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        # fp16 ends at 65504: usual gradients here stay below it at this scale, those of the enormous row do not.
        self.scaler = torch.amp.GradScaler(self.device, init_scale=2.0**10, growth_interval=3)

    def update(self, loss: torch.Tensor) -> None:
        """Skipped where a gradient is not finite: the folded one, so on all ranks or none."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.losses.append(loss)
        self.parameters.append(values_of(self.model))


def train_scaled(way: str, shards: int, batch_size: int) -> tuple[list[float], Tensors, list[Tensors]]:
    with dl.join_world() as world:
        ran = Scaled(world.device.type)
        state = {"model": ran.model, "optimizer": ran.optimizer, "scaler": ran.scaler}
        batches = dl.Batches(with_an_enormous_one(batch_size), batch_size, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state=state, progress=False):  # its scaler sees to what is not finite
            for rows in step:
                loss = fp16_loss(ran.model, rows)
                if way == "hook":
                    loss.register_hook(ran.scaler.scale)  # scales what backward begins with, not the value
                    step.backward(loss)
                else:
                    step.backward(ran.scaler.scale(loss))
            ran.update(step.fold().loss)
        return ran.scales, ran.losses, ran.parameters


@cache
def train_scaled_plainly(shards: int, batch_size: int) -> Scaled:
    ran = Scaled("cpu")
    for number, rows in enumerate(with_an_enormous_one(batch_size).split(batch_size), 1):
        ran.optimizer.zero_grad()
        total = torch.zeros(())
        finite = []
        for piece in filter(len, rows.tensor_split(shards)):
            before = gradients_of(ran.model)
            loss = fp16_loss(ran.model, piece) * (len(piece) / len(rows))
            ran.scaler.scale(loss).backward()
            total += loss.detach()
            added = [one - other for one, other in zip(gradients_of(ran.model), before, strict=True)]
            finite.append(all(bool(one.isfinite().all()) for one in added))
        assert finite == [True] * (len(finite) - 1) + [number != OVERFLOW]  # so that ranks differ
        ran.update(total)
    return ran


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards", "batch_size"), [(2, 2, 6), (3, 3, 6), (2, 4, 6), (2, 2, 1)])
@pytest.mark.parametrize("way", ["hook", "scaled loss"])
@pytest.mark.quick_on_gpus
def test_a_loss_scaler_skips_on_all_ranks_where_one_shard_overflows(
    way: str, ranks: int, shards: int, batch_size: int, on_ranks: OnRanks
) -> None:
    """How fp16 with a scaler is written, the scaler in the Loop's state:

            step.backward(scaler.scale(loss))
        step.fold()
        scaler.unscale_(optimizer)  # then clip
        scaler.step(optimizer)
        scaler.update()

    The scaler looks at the folded gradient, the same on every rank, so all skip and halve alike, and nothing needs to
    be agreed. The row's loss is the one before the scale, also where a hook scales the gradient alone:
    `loss.register_hook(scaler.scale)`.
    """
    results = on_ranks(ranks, train_scaled, way, shards, batch_size)
    expected = train_scaled_plainly(shards, batch_size)
    halved_at = OVERFLOW - 1
    assert expected.scales[halved_at] == expected.scales[halved_at - 1] / 2
    assert max(expected.scales) > expected.scales[halved_at]  # and it grew again
    assert all(scales == expected.scales for scales, _, _ in results)
    for update, wanted in enumerate(expected.parameters):
        found = same_on_all([parameters[update] for _, _, parameters in results])
        if shards <= 2:  # two terms have one sum
            assert is_same(found, wanted)
        # Sums in another order, rounded at 6e-8; where a weight then rounds to the neighbouring fp16, it is 2^-11 away.
        assert distance(found, wanted) <= 2**-11
        assert is_same(found, results[0][2][update - 1]) == (update == halved_at)
        loss, truth = same_on_all([[losses[update]] for _, losses, _ in results])[0], expected.losses[update]
        assert bool(((loss - truth).abs() <= 2**-9 * truth.abs()).all())  # of fp16 outputs, some squared
