"""One rank and one shard give the bits of the plain torch loop; two ranks those of its shards, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import ddp_loop as dl
from ddp_loop import networks
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

STEPS = 50
BATCH = 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
}


def digit_job() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(4 * BATCH - 1, 1, 28, 28, generator=generator)
    return networks.digit_classifier(), images, torch.randint(10, (len(images),), generator=generator)


def autoencoder_job() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(4 * BATCH - 1, 1, 32, 32, generator=generator)
    return networks.denoising_autoencoder(), images + 0.1, images


JOBS: dict[str, tuple[Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]], Any]] = {
    "digits": (digit_job, cross_entropy),
    "autoencoder": (autoencoder_job, mse_loss),
}


def set_up(job: str, optimizer: str, memory_format: torch.memory_format, dtype: torch.dtype) -> tuple[Any, ...]:
    build, criterion = JOBS[job]
    torch.manual_seed(5)
    model, inputs, targets = build()
    model = model.to(dtype).to(memory_format=memory_format)  # type: ignore[call-overload]
    inputs = inputs.to(dtype)
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    return model, OPTIMIZERS[optimizer](model.parameters()), criterion, inputs, targets


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, buffers and what the optimizer keeps."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *kept)]


def train(job: str, optimizer_name: str, memory_format: torch.memory_format, dtype: torch.dtype,
          bucket_cap_mib: float = 8.0, steps: int = STEPS,
          ) -> tuple[list[float], list[torch.Tensor], list[tuple[int, ...]]]:  # fmt: skip
    with dl.join_world(seed=0) as world:
        model, optimizer, criterion, inputs, targets = set_up(job, optimizer_name, memory_format, dtype)
        batches = dl.Batches((inputs, targets), BATCH, world)
        losses, strides = [], []
        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, steps=steps, state=state, progress=False, bucket_cap_mib=bucket_cap_mib):
            for images, wanted in step:
                step.backward(criterion(model(images.to(memory_format=memory_format)), wanted))
            losses.append(float(step.fold().loss))
            strides = [p.grad.stride() for p in model.parameters()]
            optimizer.step()
        return losses, everything(model, optimizer), strides


def plain(job: str, optimizer_name: str, memory_format: torch.memory_format, dtype: torch.dtype,
          order: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:  # fmt: skip
    """The loop that one would write for one device."""
    model, optimizer, criterion, inputs, targets = set_up(job, optimizer_name, memory_format, dtype)
    losses = []
    for indices in order:
        images, wanted = inputs[indices], targets[indices]
        optimizer.zero_grad()
        loss = criterion(model(images.to(memory_format=memory_format)), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, everything(model, optimizer)


def mini_batches(size: int) -> list[torch.Tensor]:
    """The indices of each update's samples, from `Batches`."""
    with dl.join_world(seed=0) as world:
        batches = dl.Batches(torch.zeros(size), BATCH, world)
        found: list[torch.Tensor] = []
        while len(found) < STEPS:
            epoch, position = divmod(len(found), len(batches))
            mini_batch = batches.mini_batch(epoch + 1, position)
            found.append(batches.indices(epoch + 1, mini_batch.start, mini_batch.samples))
        return found


@pytest.mark.covers("B1", "D4")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.slow
def test_one_rank_gives_the_bits_of_the_plain_loop_over_50_steps(
    job: str, optimizer: str, memory_format: torch.memory_format, on_ranks: OnRanks
) -> None:
    order = mini_batches(4 * BATCH - 1)
    ((losses, tensors, _),) = on_ranks(1, train, job, optimizer, memory_format, torch.float32)
    ((expected_losses, expected),) = on_ranks(1, plain, job, optimizer, memory_format, torch.float32, order)
    assert len(losses) == STEPS
    assert losses == expected_losses
    assert len(tensors) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("bucket_cap_mib", [8.0, 0.01])
@pytest.mark.quick_on_gpus
def test_gradients_have_their_parameters_strides(bucket_cap_mib: float, on_ranks: OnRanks) -> None:
    _, _, strides = on_ranks(2, train, "digits", "SGD", torch.channels_last, torch.float32, bucket_cap_mib, 3)[0]
    model = networks.digit_classifier().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert strides == [p.stride() for p in model.parameters()]
    assert any(not p.is_contiguous() for p in model.parameters())
