"""One rank and one shard give the bits of the plain torch loop: both networks, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ddp_loop import networks
from tests.support.comparing import Tensors, is_same
from tests.support.harness import OnRanks
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too

STEPS = 12  # three epochs
SAMPLES = 23
BATCH = 6
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "fused SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "Adam": torch.optim.Adam,
    "fused Adam": partial(torch.optim.Adam, fused=True),
}


@dataclass(frozen=True)
class Job:
    """What is trained."""

    network: str
    optimizer: str
    memory_format: torch.memory_format

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
        """A new network, its optimizer, and the data."""
        torch.manual_seed(5)
        if self.network == "digits":
            model: nn.Module = networks.digit_classifier()
            targets = torch.arange(SAMPLES) % 10
            images = torch.rand(SAMPLES, 1, 28, 28)
        else:
            model = networks.denoising_autoencoder()
            targets = torch.rand(SAMPLES, 1, 32, 32)
            images = targets + 0.1
        model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        return model, OPTIMIZERS[self.optimizer](model.parameters()), (images, targets)

    def loss(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = model(images.to(memory_format=self.memory_format))
        return cross_entropy(outputs, targets) if self.network == "digits" else mse_loss(outputs, targets)


def everything(losses: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Losses, parameters, buffers and what the optimizer keeps."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [torch.stack(losses), *(tensor.detach().clone() for tensor in (*model.state_dict().values(), *kept))]


def by_loop(job: Job) -> Tensors:
    model, optimizer, data = job.begin()
    options: dict[str, Any] = {"optimizer": optimizer, "epochs": None, "steps": STEPS}
    losses = train(model, job.loss, data, BATCH, after_fold=lambda _, result: result.loss.float(), **options)
    return everything(losses, model, optimizer)


def plainly(job: Job) -> Tensors:
    """The loop that one would write for one device."""
    model, optimizer, (images, targets) = job.begin()
    mini_batches = list(zip(images.split(BATCH), targets.split(BATCH), strict=True))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(model, *mini_batches[step % len(mini_batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return everything(losses, model, optimizer)


@pytest.mark.covers("B1")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["digits", "autoencoder"])
@pytest.mark.quick_on_gpus
def test_one_rank_gives_the_bits_of_the_plain_loop_over_three_epochs(
    network: str, optimizer: str, memory_format: torch.memory_format, on_ranks: OnRanks
) -> None:
    job = Job(network, optimizer, memory_format)
    assert is_same(on_ranks(1, by_loop, job)[0], on_ranks(1, plainly, job)[0])
