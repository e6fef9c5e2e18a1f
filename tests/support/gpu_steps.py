"""Steps on fake GPUs: each scenario's waits of the host and its weights, beside those on the CPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl

AFTER_ALL_WORK = ("event.synchronize",)  # a value of the step before is waited for, not the device
LOOKING_ONCE = " ready"  # `HostCopy.ready` looks at an event and goes on
SAMPLES, WARM_UP, COUNTED = 40, 13, 9  # an epoch has 4 steps, and the checks of a loop's first steps are over
Scenario = Callable[[dl.World], Generator[nn.Module, None, None]]
ROWS: list[Any] = []


class Memory(nn.Module):
    """A moving average, and a counter and a rate that all shards change alike; the fold reduces them."""

    average: torch.Tensor
    count: torch.Tensor
    rate: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("rate", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(rows.detach().mean(0).to(self.average.device), 0.1)
        self.count += 1
        self.rate *= 0.99
        return rows


def network(world: dl.World, *more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 4)).to(world.device)


def loop_of(
    world: dl.World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    shards: int | None = 4,
    batch_size: int = 10,
    shuffle: bool = True,
    transform: Any = None,
    **options: Any,
) -> dl.Loop:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    batches = dl.Batches(data, batch_size, world, shards=shards, shuffle=shuffle, transform=transform)
    state = {"model": model, "optimizer": optimizer}
    return dl.Loop(batches, 10**6, state=state, progress=False, on_row=ROWS.append, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def plain(
    world: dl.World, model: nn.Module, weight_of: Callable[[torch.Tensor], Any] = lambda rows: None, **options: Any
) -> Generator[nn.Module, None, None]:
    optimizer = options.pop("optimizer", None) or sgd(model)
    for step in loop_of(world, model, optimizer, **options):
        for rows, labels in step:
            logits = model(rows)
            loss = cross_entropy(logits, labels)
            step.backward(loss, weight=weight_of(rows), accuracy=logits.argmax(1) == labels)
        step.fold()
        optimizer.step()
        yield model


def adam(world: dl.World) -> Generator[nn.Module, None, None]:
    model = network(world)
    yield from plain(world, model, optimizer=torch.optim.Adam(model.parameters(), fused=True))


def spectral(world: dl.World) -> Generator[nn.Module, None, None]:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
    yield from plain(world, nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 4)).to(world.device))


def remembering(world: dl.World, *, on_host: bool = False, **options: Any) -> Generator[nn.Module, None, None]:
    model = nn.Sequential(Memory() if on_host else Memory().to(world.device), network(world))
    yield from plain(world, model, buffer_reduction={"model.0.average": "mean"}, **options)


def weights(world: dl.World) -> Generator[nn.Module, None, None]:
    """A weight and metrics on the device, one on the host, and a result that is read."""
    model = network(world)
    optimizer = sgd(model)
    for step in loop_of(world, model, optimizer):
        for rows, labels in step:
            weight = (labels > 0).sum()
            step.backward(cross_entropy(model(rows), labels), weight=weight, s=dl.Sum(weight), of=labels.float(), v=0.5)
        result = step.fold()
        result.weight, result.metrics, result.gradient_norm  # noqa: B018
        optimizer.step()
        yield model


def several(world: dl.World) -> Generator[nn.Module, None, None]:
    """Two passes, two losses, of which one is a sum, and a clipped norm."""
    model = network(world)
    optimizer = sgd(model)
    for step in loop_of(world, model, optimizer):
        for _ in range(2):
            for rows, labels in step:
                logits = model(rows)
                loss = cross_entropy(logits, labels, reduction="sum")
                step.backward(loss, reduction="sum", more_losses=True)
                step.backward(logits.square().sum(), reduction="sum")
            step.fold()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield model


def gathered(world: dl.World) -> Generator[nn.Module, None, None]:
    model = network(world)
    optimizer = sgd(model)
    for step in loop_of(world, model, optimizer):
        for rows, labels in step:
            step.hold(model(rows), labels)
        logits, labels = step.gather()
        step.backward(cross_entropy(logits, labels), mean=logits.mean())
        step.fold()
        optimizer.step()
        yield model


def synced(world: dl.World) -> Generator[nn.Module, None, None]:
    model = dl.sync_batch_norm(network(world, nn.BatchNorm1d(16)), world)
    optimizer = sgd(model)
    for step in loop_of(world, model, optimizer, shards=None):
        for rows, labels in step:
            step.backward(cross_entropy(model(rows), labels), weight=0 if step.iteration == 3 else None)
        step.fold()
        optimizer.step()
        yield model


def shifted(data: Any, draws: dl.Draws) -> Any:
    rows, labels = data
    return rows + draws.uniform(8) * draws.integers(0, 3, 8), labels


SCENARIOS: dict[str, Scenario] = {
    "one shard a rank": lambda world: plain(world, network(world), shards=None),
    "4 shards": lambda world: plain(world, network(world)),
    "4 shards, batch norm": lambda world: plain(world, network(world, nn.BatchNorm1d(16)), batch_size=20),
    "synced batch norm": synced,
    "Adam": adam,
    "spectral norm": spectral,
    "buffers": remembering,
    "buffers, empty shards": lambda world: remembering(world, batch_size=38),
    "weights on the device": weights,
    "numbers as weights": lambda world: plain(world, network(world), weight_of=len),
    "two passes, two losses": several,
    "gathered outputs": gathered,
    "transformed data": lambda world: plain(world, network(world), transform=shifted),
    "data in order": lambda world: plain(world, network(world), shuffle=False),
    "skipped steps": lambda world: plain(world, network(world), on_nonfinite="skip"),
    "every step allowed": lambda world: plain(world, network(world), on_nonfinite="allow"),
}


def weights_of(
    scenario: Scenario, world: dl.World, counting: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[float]:
    """The weights after all steps; those after the warm-up are made inside of `counting`."""
    steps = scenario(world)
    for _ in range(WARM_UP):
        next(steps)
    with counting():
        for _ in range(COUNTED):
            model = next(steps)
    last: list[float] = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().tolist()
    steps.close()
    return last


@dataclass(frozen=True)
class Ran:
    """A scenario on one rank.

    Attributes:
        waits: the places of the counted steps at which the host waits for the device.
        errors: of the order of streams and of late copies.
        elsewhere: the allocations on devices of other ranks.
        on_gpu, on_cpu: the last weights.
    """

    waits: dict[str, int]
    errors: list[str]
    elsewhere: int
    on_gpu: list[float]
    on_cpu: list[float]


def is_wait(what: str, place: str) -> bool:
    """Whether the host waits there for what it launched in the same step."""
    return what not in AFTER_ALL_WORK and not place.endswith(LOOKING_ONCE)


def run(name: str) -> Ran:
    """Run a scenario on this rank's fake GPU, then on the CPU."""
    import fake_cuda_extension as device

    from tests.fake_cuda.waits import Waits

    warnings.simplefilter("ignore")
    device.errors()
    device.check_order(True)
    before = device.allocations()
    try:
        with dl.join_world(device="gpu", seed=0) as world:
            waits = Waits(events=True)
            on_gpu = weights_of(SCENARIOS[name], world, lambda: waits)
            counted = Counter(f"{what}: {place}" for what, place in waits.found if is_wait(what, place))
            own = world.device.index
    finally:
        device.check_order(False)
    allocated = [now - then for now, then in zip(device.allocations(), before, strict=True)]
    with dl.join_world(device="cpu", seed=0) as world:
        on_cpu = weights_of(SCENARIOS[name], world)
    return Ran(dict(counted), device.errors(), sum(allocated) - allocated[own], on_gpu, on_cpu)


def require_like_the_cpu(of_ranks: list[Ran], is_same: bool) -> None:
    """Require that no host waited, nothing was made elsewhere, and the weights are the CPU's, to the bit if so."""
    for one in of_ranks:
        assert (one.waits, one.errors, one.elsewhere) == ({}, [], 0)
        assert one.on_gpu == of_ranks[0].on_gpu
    on_gpu = of_ranks[0].on_gpu
    on_cpu = of_ranks[0].on_cpu
    assert on_gpu == (on_cpu if is_same else pytest.approx(on_cpu, rel=1e-4, abs=1e-6))
