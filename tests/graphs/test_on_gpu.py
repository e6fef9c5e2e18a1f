"""CUDA graphs themselves, on a GPU: the bits of the eager function, and what a failed capture leaves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same

pytestmark = [pytest.mark.gpu, pytest.mark.covers("J12")]

STEPS = 12


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 16, 4)
    )  # fmt: skip


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mini-batch of 32 rows; each fifth has 20."""
    generator, rows = torch.Generator().manual_seed(step), 20 if step % 5 == 4 else 32
    inputs, labels = torch.randn(rows, 2, 6, 6, generator=generator), torch.randint(4, (rows,), generator=generator)
    return inputs.cuda(), labels.cuda()


def update(captured: bool) -> tuple[Tensors, Any]:
    """What a training by whole updates leaves."""
    with dl.deterministic(), dl.join_world(device="gpu", seed=3) as world:
        model = network().to(world.device)
        rate = torch.tensor(0.01, device=world.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            return loss

        state = {"model": model, "optimizer": optimizer}
        call: Any = dl.capture(step, world, state=state) if captured else step
        losses = []
        for number in range(STEPS):
            torch.manual_seed(number)
            losses.append(call(*rows_of(number)).detach().clone())
            schedule.step()
        kept = [one.clone() for each in optimizer.state.values() for one in each.values()]
        return [*losses, *(one.clone() for one in model.state_dict().values()), *kept], call


def fold(captured: bool, shards: int | None, precision: torch.dtype | None) -> tuple[Tensors, Any]:
    """What a Loop leaves, with a captured loss."""
    with dl.deterministic(), dl.join_world(device="gpu", seed=3) as world:
        model = network().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        state = {"model": model, "optimizer": optimizer}

        def compute(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
                logits = model(inputs).float()
            return cross_entropy(logits, labels), (logits.argmax(1) == labels).float()

        call: Any = dl.capture(compute, world, state=state) if captured else compute
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(92, 2, 6, 6, generator=generator), torch.randint(4, (92,), generator=generator)
        losses = []
        for step in dl.Loop(dl.Batches(data, 16, world, shards=shards), 3, state=state, progress=False):
            for inputs, labels in step:
                loss, hits = call(inputs, labels)
                step.backward(loss, accuracy=hits)
            losses.append(step.fold().loss.clone())
            optimizer.step()
        kept = [one["momentum_buffer"].clone() for one in optimizer.state.values()]
        return [*losses, *(one.clone() for one in model.state_dict().values()), *kept], call


def test_an_update_has_the_bits_of_the_eager_function() -> None:
    (eager, _), (captured, call) = update(False), update(True)
    assert call.reason is None
    assert call.replays == 7  # of 12: 3 to warm up, and 2 of another shape
    assert is_same(captured, eager)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("shards", [None, 2, 4])
def test_a_loss_in_a_loop_has_the_bits_of_the_eager_function(shards: int | None, precision: torch.dtype | None) -> None:
    (eager, _), (captured, call) = (fold(one, shards, precision) for one in (False, True))
    assert call.reason is None
    assert call.replays >= 9
    assert is_same(captured, eager)


def test_a_host_read_is_named_before_anything_is_captured() -> None:
    with dl.join_world(device="gpu", seed=3) as world:
        model = network().to(world.device)

        def compute(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = cross_entropy(model(inputs), labels)
            return loss if loss.item() >= 0 else -loss

        call = dl.capture(compute, world, state={"model": model})
        for _ in range(5):
            call(*rows_of(0)).backward()
        assert call.replays == 0
        assert call.reason is not None
        assert call.reason.startswith("The host waits for the device in it (test_on_gpu.py, line ")


def fail(captured: bool) -> tuple[Tensors, Any]:
    """A function that fails only while it is captured; then random numbers, and a second one that can be captured."""
    with dl.join_world(device="gpu", seed=3) as world:
        model, other = network().to(world.device), network().to(world.device)

        def asks(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = cross_entropy(model(inputs), labels)
            torch.cuda.current_stream().query()  # it waits for nothing, and makes a capture invalid
            return loss

        def works(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(other(inputs), labels)

        stream = torch.cuda.current_stream()
        first: Any = dl.capture(asks, world, state={"model": model}) if captured else asks
        second: Any = dl.capture(works, world, state={"model": other}) if captured else works
        torch.manual_seed(5)
        found = []
        for call in (first, second):
            for _ in range(6):
                loss = call(*rows_of(0))
                loss.backward()
                found += [loss.detach().clone(), torch.rand(1, device=world.device)]
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        gradients = [one.grad.clone() for each in (model, other) for one in each.parameters() if one.grad is not None]
        buffers = [one.clone() for each in (model, other) for one in each.buffers()]
        return [*found, *gradients, *buffers], (first, second)


def test_a_failed_capture_leaves_no_trace_and_a_later_one_succeeds() -> None:
    (eager, _), (captured, (first, second)) = fail(False), fail(True)
    assert first.reason is not None
    assert first.reason.startswith("Capturing it failed: ")
    assert first.replays == 0
    assert (second.reason, second.replays) == (None, 3)
    assert is_same(captured, eager)


def test_memory_does_not_grow_with_replays() -> None:
    with dl.join_world(device="gpu", seed=3) as world:
        model = network().to(world.device)
        call = dl.capture(lambda *rows: cross_entropy(model(rows[0]), rows[1]), world, state={"model": model})
        rows, held = rows_of(0), []
        gc.collect()  # what earlier tests left would be freed in the middle
        for _ in range(30):
            call(*rows).backward()
            held.append(torch.cuda.memory_allocated())
        assert call.replays == 27
        assert len(set(held[6:])) == 1
