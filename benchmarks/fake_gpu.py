"""A step of ddp_loop, DDP, Accelerate and Fabric on fake GPUs: launches, waits of the host, memory, and host time.

    python -m benchmarks fake-gpu

The fake device (tests/fake_cuda) runs the CPU's kernels at once, on this machine's cores, so this is a simulation. What
it counts is what a GPU would get: launches, waits, and bytes of tensors. Host time includes the kernels, which are made
as small as they can be: the network has the 161 parameters of ResNet-50 with few channels, and a mini-batch has two
images of 8 x 8 for each GPU.

All take the same network, optimizer and images on the device, and all compute loss and accuracy of a step, but only
ddp_loop reduces them over the ranks. Times are taken in one process group, A B B A against the plain loop, which has no
communication. The table replaces the one in docs/benchmarks/fake_gpu.md. All takes three minutes at most.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks.measuring import Ratio, Step, compare, hardware, joined, table_lines
from benchmarks.models import CLASSES
from benchmarks.steps import hits, steps_of
from ddp_loop.distributed import Pool

REPORT = Path(__file__).parents[1] / "docs" / "benchmarks" / "fake_gpu.md"
BEGIN, END = "<!-- python -m benchmarks fake-gpu: begin -->\n", "<!-- python -m benchmarks fake-gpu: end -->\n"
RANKS = (1, 2)
PER_RANK, MINI_BATCHES, SIDE, WIDTH = 2, 20, 8, 2  # images, pixels and channels
WARM_UP, COUNTED = 15, 10  # steps: the checks of a loop's first ones are over
PAIRS, STEPS, WITHIN_S = 60, 2, 10.0
PLAIN = "plain loop"
HEAD = (
    "GPUs | step | launches | waits for the device | waits for an event | peak memory / weights | "
    "host time / plain loop | quartiles | ms | pairs"
)


class Bottleneck(nn.Module):
    """Three convolutions with norms, and one more in the shortcut of a stage's first block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *_normed(inputs, width, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride),
            nn.ReLU(),
            *_normed(width, 4 * width, 1),
        )
        is_same = inputs == 4 * width and stride == 1
        self.short = nn.Identity() if is_same else nn.Sequential(*_normed(inputs, 4 * width, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (self.path(images) + self.short(images)).relu()  # type: ignore[no-any-return]


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50(width: int = WIDTH) -> nn.Module:
    """ResNet-50 with `width` channels in the place of 64, for images of 8 x 8: 161 parameters.

    He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2016.
    """
    layers: list[nn.Module] = [*_normed(3, width, 3), nn.ReLU()]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


# -- the ways to make a step -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Material:
    """What all have: a world of fake GPUs, and images with labels on this rank's."""

    world: dl.World
    images: torch.Tensor
    labels: torch.Tensor

    def network(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = resnet50().to(self.world.device)
        # The last layers normalise a few values each: at a larger rate their gradients grow until they are not finite.
        return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def mini_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's images of mini-batch after mini-batch."""
        while True:
            order = torch.randperm(MINI_BATCHES * PER_RANK, device=self.world.device)
            for chosen in order.split(PER_RANK):
                yield self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


def _step(
    given: Material, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None]
) -> Step:
    """The usual step, with the model, the optimizer and the backward of a library."""
    mini_batches = given.mini_batches()

    def step() -> None:
        images, labels = next(mini_batches)
        optimizer.zero_grad()
        logits = model(images)
        loss = cross_entropy(logits, labels)
        backward(loss)
        optimizer.step()
        hits(logits, labels).float().mean()

    return step


def plain(given: Material) -> Step:
    return _step(given, *given.network(), torch.Tensor.backward)


def ddp(given: Material) -> Step:
    model, optimizer = given.network()
    wrapped = DistributedDataParallel(model, device_ids=[given.world.device.index])
    return _step(given, wrapped, optimizer, torch.Tensor.backward)


def accelerate(given: Material) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*given.network())
    return _step(given, model, optimizer, accelerator.backward)


def fabric(given: Material) -> Step:
    from lightning_fabric import Fabric

    made: Any = Fabric(accelerator="cuda", devices=given.world.size, strategy="ddp")
    made.launch()
    model, optimizer = made.setup(*given.network())
    return _step(given, model, optimizer, made.backward)


def ours(given: Material) -> Step:
    model, optimizer = given.network()
    batches = dl.Batches((given.images, given.labels), PER_RANK * given.world.size, given.world)
    loop = dl.Loop(batches, 10**6, state={"model": model, "optimizer": optimizer}, progress=False)
    return steps_of(loop, model, optimizer)


WAYS: dict[str, Callable[[Material], Step]] = {
    PLAIN: plain,
    "DDP": ddp,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "ddp_loop": ours,
}
NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}


# -- on the ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Of a step: launches, waits of the host for the device and for an event, and the peak over the weights' bytes."""

    launches: float
    waits: float
    events: float
    peak: float


@contextmanager
def _material() -> Iterator[Material]:
    with joined(device="gpu") as world:
        alone = world.size == 1
        if alone:  # DDP needs a group
            dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            generator = torch.Generator().manual_seed(0)
            count = MINI_BATCHES * PER_RANK * world.size
            images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
            labels = torch.randint(CLASSES, (count,), generator=generator)
            yield Material(world, images.to(world.device), labels.to(world.device))
        finally:
            if alone:
                dist.destroy_process_group()


def _count(make: Callable[[Material], Step], given: Material) -> Counts:
    import fake_cuda_extension as device

    from tests.fake_cuda import cuda

    gc.collect()
    before = device.memory()[0]
    step = make(given)
    for _ in range(WARM_UP):
        step()
    device.reset_peak()
    launches = device.launches()
    with cuda.Waits() as waits:
        for _ in range(COUNTED):
            step()
    launches = device.launches() - launches
    events = sum(what == "event.synchronize" for what, _ in waits.found)
    weights = sum(parameter.nbytes for parameter in resnet50().parameters())
    peak = (device.memory()[1] - before) / weights
    return Counts(launches / COUNTED, (len(waits.found) - events) / COUNTED, events / COUNTED, peak)


def measure(names: list[str], pairs: int, steps: int, within_s: float) -> dict[str, tuple[Counts, Ratio]]:
    """What each way's step costs, on every rank; run in processes with fake GPUs."""
    with _material() as given:
        counts = {name: _count(WAYS[name], given) for name in names}
        reference = plain(given)
        options = {"pairs": pairs, "steps": steps, "within_s": within_s}
        return {
            name: (counts[name], compare(WAYS[name](given), reference, **options))  # type: ignore[arg-type]
            for name in names
        }


# -- the report --------------------------------------------------------------------------------------------


def measure_on(
    ranks: int, pairs: int = PAIRS, steps: int = STEPS, within_s: float = WITHIN_S
) -> dict[str, tuple[Counts, Ratio]]:
    """Rank 0's results on so many fake GPUs, of the libraries that are installed."""
    from tests.fake_cuda.build import environment

    variables = environment(ranks)
    names = [name for name in WAYS if name not in NEEDS or find_spec(NEEDS[name])]
    with mock.patch.dict(os.environ, variables), Pool(ranks, variables) as pool:
        return pool.run(measure, ranks, names, pairs, steps, within_s)[0]


def _rows(ranks: int) -> Iterator[tuple[object, ...]]:
    for name, (counts, ratio) in measure_on(ranks).items():
        numbers = (counts.launches, counts.waits, counts.events)
        yield ranks, name, *(f"{number:.5g}" for number in numbers), f"{counts.peak:.1f}", *ratio.columns()


def report(names: Iterable[str]) -> None:
    """Print the table, and put it into docs/benchmarks/fake_gpu.md."""
    lines = [
        "Command: `python -m benchmarks fake-gpu`  ",
        f"Hardware: {hardware()}; 1 thread a rank, load {os.getloadavg()[0]:.1f} at the end.  ",
        f"Date: {datetime.date.today()}.",
        "",
        *table_lines(HEAD, [row for ranks in RANKS for row in _rows(ranks)], words=2),
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    before, _, rest = REPORT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    REPORT.write_text(f"{before}{BEGIN}{table}{END}{after}")
