"""A job with everything in its state that a run may need to go on: built in four ways, left at any step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from tests.support.runs import digests

EPOCHS, STEPS, SHARDS = 2, 5, 6  # of 10 updates


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(number, 2, 4, 4, generator=generator)
    return inputs, torch.randint(3, (number,), generator=generator)


class MomentumInFloat32(torch.optim.Optimizer):
    """Keeps a float32 copy of what it updates, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one]
                if not kept:
                    kept["master"], kept["momentum"] = one.float(), torch.zeros_like(one, dtype=torch.float32)
                kept["momentum"].mul_(0.9).add_(one.grad.float())
                kept["master"].sub_(group["lr"] * kept["momentum"])
                one.copy_(kept["master"])


def usual() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def channels_last() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = usual()[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)


def bfloat16() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)).bfloat16()
    return model, MomentumInFloat32(model.parameters())


def attention() -> tuple[nn.Module, torch.optim.Optimizer]:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Flatten(2), encoder, nn.Flatten(), nn.Linear(32, 3))
    return model, torch.optim.RMSprop(model.parameters(), lr=0.003)


BUILDS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "usual": usual,
    "channels_last": channels_last,
    "bfloat16": bfloat16,
    "attention": attention,
}


@dataclass
class Ended:
    """How a run ended: digests of all its state by name, its steps, and what it printed."""

    state: dict[str, str]
    made: list[int]
    stopped: str | None


def train(folder: str, stop_at: int | None = None, build: str = "usual", seed: int = 3, **keywords: Any) -> Ended:
    """The run, with everything in its state; left by `loop.stop()` at a step."""
    with dl.join_world(seed=seed) as world:
        return train_in(world, folder, stop_at, build, **keywords)


def train_in(world: dl.World, folder: str, stop_at: int | None, build: str, **keywords: Any) -> Ended:
    model, optimizer = BUILDS[build]()
    inputs, labels = samples(keywords.pop("number", 24 * STEPS - 7))
    inputs = inputs.to(next(model.parameters()).dtype)
    cut = {"batch_size": 24, "shards": SHARDS, "drop_last": False, "shuffle": True}
    cut = {name: keywords.pop(name, usual) for name, usual in cut.items()}
    batches = dl.Batches((inputs, labels), world=world, **cut)  # type: ignore[arg-type]
    held_out = dl.Batches((inputs[:30], labels[:30]), 10, world, shuffle=False, shards=SHARDS)
    average = AveragedModel(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)  # moved once an epoch
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.zeros(()))
    patience, notes = dl.EarlyStopping(model, 3), dict[str, Any](drawn=[], rows=0)
    state: dict[str, object] = {
        "model": model, "optimizer": optimizer, "average": average, "schedule": schedule, "scaler": scaler,
        "patience": patience, "notes": notes,
    }  # fmt: skip
    score, epochs = keywords.pop("score", None), keywords.pop("epochs", EPOCHS)
    loop = dl.Loop(batches, epochs, state=state, run_dir=folder or None, progress=False, **keywords)
    made = []
    with suppress(dl.Stopped):
        for epoch in loop.epochs():
            for step in epoch:
                made.append(step.iteration)
                notes["drawn"].append([random.random(), float(np.random.rand()), float(torch.rand(()))])
                if step.iteration == stop_at and world.rank == world.size - 1:
                    loop.stop()  # before the last backward, after which a GPU stops one step later
                for images, classes in step:
                    loss = cross_entropy(model(images).float(), classes)
                    loss.register_hook(scaler.scale)
                    step.backward(loss)
                step.fold()
                scaler.step(optimizer)
                scaler.update()
                average.update_parameters(model)
                notes["drawn"].append([random.random(), float(np.random.rand()), float(torch.rand(()))])
                notes["rows"] += step.samples
                if score is not None and step.iteration % STEPS:
                    loop.save(score[step.iteration])
            said = dl.evaluate(model, held_out, loss=lambda output, right: cross_entropy(output.float(), right))
            patience.should_stop(said["loss"])
            if score is not None:
                loop.save(score[loop.iteration])
            notes["drawn"].append(random.random())
            schedule.step()
    return Ended(digests(state), made, loop.stopped)


def different(one: Ended, other: Ended) -> list[str]:
    """The names of what differs; short where a test fails."""
    return [name for name in {**one.state, **other.state} if one.state.get(name) != other.state.get(name)]
