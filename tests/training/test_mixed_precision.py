"""Lower precision: bf16 autocast, and fp16 with a loss scaler that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too


def plain_shards(rows: torch.Tensor, shards: int) -> Iterator[tuple[torch.Tensor, float]]:
    """The data of each shard, and its part of the mini-batch."""
    for piece in rows.split(dl.split_sizes(len(rows), shards)):
        yield piece, len(piece) / len(rows)


def half(model: nn.Module, rows: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
    """The loss of a float32 network whose products are made in `kind`; None leaves them as they are."""
    with torch.autocast(rows.device.type, dtype=kind, enabled=kind is not None):
        return loss_of(model, rows)


def train_half(shards: int) -> Tensors:
    with dl.join_world() as world:
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(samples(24).float(), 6, world, shards=shards, shuffle=False)
        losses = []
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows in step:
                with torch.autocast(world.device.type, dtype=torch.bfloat16):
                    loss = loss_of(model, rows)
                step.backward(loss)
            losses.append(step.fold().loss)
            optimizer.step()
        return [torch.stack(losses), *values_of(model)]


def train_half_plainly(shards: int, kind: torch.dtype | None = torch.bfloat16) -> Tensors:
    model = network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for rows in [*samples(24).float().split(6)] * 2:
        optimizer.zero_grad()
        total = torch.zeros(())
        for piece, share in plain_shards(rows, shards):
            loss = half(model, piece, kind) * share
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return [torch.stack(losses), *values_of(model)]


@pytest.mark.covers("B10")
def test_bf16_autocast_gives_the_bits_of_one_process_over_the_same_two_shards(on_ranks: OnRanks) -> None:
    # Two terms have one sum, whichever comes first.
    assert is_same(same_on_all(on_ranks(2, train_half, 2)), train_half_plainly(2))


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards"), [(3, 3), (2, 4)])
def test_bf16_autocast_is_near_one_process_over_the_same_shards(ranks: int, shards: int, on_ranks: OnRanks) -> None:
    expected = train_half_plainly(shards)
    # Sums in another order, rounded at 6e-8; where a weight then rounds to the neighbouring bf16, it is 2^-8 away.
    # Equal bits are seen: gradients of bf16 products have 8 bits each, and float32 mostly adds these exactly.
    assert distance(same_on_all(on_ranks(ranks, train_half, shards)), expected) <= 2**-8
    assert distance(train_half_plainly(shards, None), expected) > 1e-4  # bf16 it was


def train_under(where: str) -> Tensors:
    """Four shards on each rank's part, an evaluation in the middle; autocast around as much as `where` says."""
    with dl.join_world() as world, autocast(where == "everything"):
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(samples(24).float(), 8, world, shards=4, shuffle=False)
        losses = []
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            with autocast(where == "the pass"):
                for rows in step:
                    with autocast(where == "the forward"):
                        loss = loss_of(model, rows)
                    with autocast(where == "the backward too"):
                        step.backward(loss_of(model, rows) if where == "the backward too" else loss)
            losses.append(step.fold().loss)
            loss_of(model, samples(2).float())  # a look at the outputs, with a graph, before the update
            optimizer.step()
            if step.is_last_of_epoch:
                with autocast(where != "nothing"):
                    found = dl.evaluate(model, batches, loss=lambda output, _: output.float().square().mean(1))
                losses.append(torch.tensor(found["loss"]))
        return [torch.stack(losses), *values_of(model)]


def autocast(enabled: bool) -> AbstractContextManager[object]:
    device = torch.empty(0).device  # where this task makes its tensors
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


@pytest.mark.covers("B10", "J12")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["the pass", "the backward too", "everything"])
def test_autocast_around_more_than_the_forward_gives_the_same_bits(where: str, ranks: int, on_ranks: OnRanks) -> None:
    """Its cache of weights in bf16 serves several shards, and no weight outlives its update there."""
    expected = on_ranks(1, train_under, "the forward")[0]
    assert is_same(same_on_all(on_ranks(ranks, train_under, where)), expected)
    assert distance(on_ranks(1, train_under, "nothing")[0], expected) > 1e-4


def train_images(shards: int, precision: str, channels_last: bool) -> Tensors:
    with dl.join_world(seed=1) as world:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(32, 5))
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(2))
        batches = dl.Batches((images, torch.arange(40) % 5), 16, world, shards=shards)
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for inputs, labels in step:
                with autocast(precision == "bf16"):
                    logits = model(inputs)
                step.backward(nn.functional.cross_entropy(logits.float(), labels))
            step.fold()
            optimizer.step()
        return [one.detach().clone() for one in model.state_dict().values()]


@pytest.mark.covers("J12")
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_fixed_shards_give_the_same_bits_on_any_ranks_with_any_kernels(
    ranks: int, precision: str, channels_last: bool, on_ranks: OnRanks
) -> None:
    expected = on_ranks(1, train_images, 5, precision, channels_last)[0]
    assert is_same(same_on_all(on_ranks(ranks, train_images, 5, precision, channels_last)), expected)


OVERFLOW = 3  # the update in which the last sample, one of the last shard, is enormous
UPDATES = 8


def with_an_enormous_one(batch_size: int) -> torch.Tensor:
    rows = samples(UPDATES * batch_size).float()
    rows[OVERFLOW * batch_size - 1] = 1000
    return rows


def make_scaler(device: str) -> torch.amp.GradScaler:
    # fp16 ends at 65504: usual gradients here stay below it at this scale, those of the enormous row do not.
    return torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)


@dataclass
class Scaled:
    """What a run with a loss scaler leaves: the scale after each update, the losses in its rows, all parameters."""

    scales: list[float]
    losses: Tensors
    parameters: list[Tensors]


def train_scaled(way: str, shards: int, batch_size: int) -> Scaled:
    with dl.join_world() as world:
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        scaler = make_scaler(world.device.type)
        batches = dl.Batches(with_an_enormous_one(batch_size), batch_size, world, shards=shards, shuffle=False)
        ran = Scaled([], [], [])
        state = {
            "model": model,
            "optimizer": optimizer,
            "scaler": scaler,
        }  # which sees to gradients that are not finite
        for step in dl.Loop(batches, 1, state=state, progress=False):
            for rows in step:
                with torch.autocast(world.device.type, dtype=torch.float16):
                    loss = loss_of(model, rows)
                if way == "hook":
                    loss.register_hook(scaler.scale)  # scales what backward begins with, not the value
                    step.backward(loss)
                else:
                    step.backward(scaler.scale(loss))
            row = step.fold()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)  # skipped where a gradient is not finite: the folded one, so on all ranks or none
            scaler.update()
            ran.scales.append(scaler.get_scale())
            ran.losses.append(row.loss)
            ran.parameters.append(values_of(model))
        return ran


@cache
def train_scaled_plainly(shards: int, batch_size: int) -> Scaled:
    model = network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scaler = make_scaler("cpu")
    ran = Scaled([], [], [])
    for rows in with_an_enormous_one(batch_size).split(batch_size):
        optimizer.zero_grad()
        total = torch.zeros(())
        for piece, share in plain_shards(rows, shards):
            if share:
                loss = half(model, piece, torch.float16) * share
                scaler.scale(loss).backward()
                total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        ran.scales.append(scaler.get_scale())
        ran.losses.append(total)
        ran.parameters.append(values_of(model))
    return ran


def test_in_the_plain_loop_the_gradient_of_one_shard_alone_overflows() -> None:
    """So the test behind this one is about ranks that differ."""
    model = network().float()
    rows = with_an_enormous_one(6).split(6)[OVERFLOW - 1]
    finite = []
    for piece, share in plain_shards(rows, 3):
        model.zero_grad()
        (half(model, piece, torch.float16) * share * 2.0**10).backward()
        finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients_of(model)))
    assert finite == [True, True, False]


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
    assert all(result.scales == expected.scales for result in results)
    for update in range(UPDATES):
        values = same_on_all([result.parameters[update] for result in results])
        if shards <= 2:  # two terms have one sum
            assert is_same(values, expected.parameters[update])
        # Sums in another order, rounded at 6e-8; where a weight then rounds to the neighbouring fp16, it is 2^-11 away.
        assert distance(values, expected.parameters[update]) <= 2**-11
        assert is_same(values, results[0].parameters[update - 1]) == (update == halved_at)
        loss, truth = same_on_all([[result.losses[update]] for result in results])[0], expected.losses[update]
        assert bool(((loss - truth).abs() <= 2**-9 * truth.abs()).all())  # of fp16 outputs, some squared
