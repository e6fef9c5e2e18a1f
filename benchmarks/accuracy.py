"""How well the digit network tells digits apart: over seeds, on 1, 2 and 4 ranks.

    python -m benchmarks accuracy [SETTING ...]

The seed gives the start weights, the order of the mini-batches and the shifts; the images and their split stay the
same. No time is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

import ddp_loop as dl
from benchmarks.measuring import print_table
from benchmarks.steps import MINI_BATCH, hits
from ddp_loop import datasets, networks

EPOCHS = 20
SEEDS = range(5)
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Setting:
    """What is trained on, and how: SGD with momentum 0.9 throughout."""

    data: Callable[[], datasets.LabelledImages] = datasets.digits
    bf16: bool = False
    channels_last: bool = False
    drop: bool = False
    transform: Callable[[Any, dl.Draws], Any] | None = None

    def precision(self, world: dl.World) -> AbstractContextManager[object]:
        return torch.autocast(world.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """By epochs: a tenth of the rate in the last four, or the same rate throughout."""
        return MultiStepLR(optimizer, [EPOCHS - 4] if self.drop else [], gamma=0.1)


def shift(data: tuple[torch.Tensor, torch.Tensor], draws: dl.Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image moved by at most a pixel in each direction; its edge is repeated."""
    images, labels = data
    places = torch.arange(28, device=images.device)
    rows, columns = ((places - draws.integers(-1, 2, 1)).clamp(0, 27) for _ in range(2))
    numbers = torch.arange(len(images), device=images.device)
    return images[numbers[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1), labels


SETTINGS = {
    "rate 0.01": Setting(),
    "shifted, 0.001 from epoch 17": Setting(drop=True, transform=shift),
    "rate 0.01, bf16": Setting(bf16=True),
    "rate 0.01, channels_last": Setting(channels_last=True),
    "rate 0.01, bf16, channels_last": Setting(bf16=True, channels_last=True),
    "handwriting": Setting(datasets.handwritten),
    "handwriting, shifted, 0.001 from epoch 17": Setting(datasets.handwritten, drop=True, transform=shift),
}


def train(name: str, seed: int) -> list[float]:
    """The accuracy on the test images after each epoch; run by `launch`."""
    setting = SETTINGS[name]
    with dl.join_world(seed=seed) as world:
        with world.rank_zero_first():
            images, test = setting.data().split(0.9)
        model = networks.digit_classifier().to(world.device)
        model.to(memory_format=setting.memory_format)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = dl.Batches(images, MINI_BATCH, world, transform=setting.transform)
        test_batches = dl.Batches(test, 1000, world, shuffle=False)
        schedule = setting.schedule(optimizer)
        accuracies: list[float] = []
        for step in dl.Loop(batches, EPOCHS, state={"model": model, "optimizer": optimizer}, progress=False):
            for inputs, labels in step:
                with setting.precision(world):
                    logits = model(inputs)
                step.backward(cross_entropy(logits.float(), labels))
            step.fold()
            optimizer.step()
            if step.is_last_of_epoch:
                schedule.step()
                accuracies.append(dl.evaluate(model, test_batches, accuracy=hits)["accuracy"])
        return accuracies


def report(names: Iterable[str]) -> None:
    """Print a table: mean, least and most over the seeds after the first and after the last epoch."""
    head = "setting | ranks | after 1 epoch | after 20 epochs: mean | min | max | each seed"
    print_table(head, (_row(name, ranks) for name in names or SETTINGS for ranks in RANKS))


def _row(name: str, ranks: int) -> tuple[object, ...]:
    runs = [dl.launch(train, ranks, name, seed)[0] for seed in SEEDS]
    first, last = [run[0] for run in runs], [run[-1] for run in runs]
    begun = f"{statistics.mean(first):.4f} ({min(first):.4f} to {max(first):.4f})"
    each = ", ".join(f"{accuracy:.4f}" for accuracy in last)
    return name, ranks, begun, f"{statistics.mean(last):.4f}", f"{min(last):.4f}", f"{max(last):.4f}", each
