"""A diffusion model for points on two spirals, sampled with an average of its weights.

One process:      python train.py
All your GPUs:    ddp_loop run train.py
Two CPU ranks:    ddp_loop run --ranks 2 train.py

The averaged weights are torch's `AveragedModel`, updated after each optimizer step as in a script for one device. They
are part of `state`, so they are in each checkpoint. Times and noise are drawn inside the step, from the stream of
the shard: with `--shards 4` a run has the same bits on any number of ranks.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_loop as dl

TIMES = 100  # from the data, 0, to noise


def make_points(count: int, seed: int) -> torch.Tensor:
    """Points near two spirals, (count, 2), a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    turn = 3 * math.pi * torch.rand(count, generator=generator).sqrt()
    side = 2.0 * torch.randint(2, (count,), generator=generator) - 1
    spirals = side[:, None] * torch.stack([turn.cos(), turn.sin()], dim=1) * turn[:, None] / 6
    return spirals + 0.03 * torch.randn(count, 2, generator=generator)


def kept_shares(device: torch.device) -> torch.Tensor:
    """How much of the data's variance is left at each time, (TIMES,); the cosine schedule.

    Source: Nichol, Dhariwal: Improved denoising diffusion probabilistic models, 2021.
    """
    times = (torch.arange(1, TIMES + 1, device=device) / TIMES + 0.008) / 1.008
    return (times * math.pi / 2).cos().square().clamp(1e-4, 0.9999)


class Denoiser(nn.Module):
    """Finds the noise in points: points (n, 2) and times (n,) -> noise (n, 2)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.points = nn.Linear(2, width)
        hidden = [nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)]
        self.noise = nn.Sequential(*hidden, nn.SiLU(), nn.Linear(width, 2))

    def forward(self, points: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        noise: torch.Tensor = self.noise(self.points(points) + self.time(times))
        return noise


@torch.no_grad()
def sample(model: nn.Module, count: int, device: torch.device) -> torch.Tensor:
    """Draw points from the model, (count, 2) on the CPU; always with the same noise.

    Source: Ho, Jain, Abbeel: Denoising diffusion probabilistic models, 2020.
    """
    generator = torch.Generator().manual_seed(1)
    kept = kept_shares(device)
    points = torch.randn(count, 2, generator=generator).to(device)
    for time in reversed(range(TIMES)):
        before = kept[time - 1] if time else torch.ones((), device=device)
        step = kept[time] / before
        noise = model(points, torch.full((count,), time, device=device))
        points = (points - (1 - step) / (1 - kept[time]).sqrt() * noise) / step.sqrt()
        if time:
            spread = ((1 - step) * (1 - before) / (1 - kept[time])).sqrt()
            points = points + spread * torch.randn(count, 2, generator=generator).to(device)
    return points.cpu()


def energy_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two sets of points as distributions: 2 E|X - Y| - E|X - X'| - E|Y - Y'|, 0 for equal ones.

    Source: Székely, Rizzo: Energy statistics, 2013.
    """
    across = torch.cdist(one, other).mean()
    within = [torch.cdist(points, points).sum() / (len(points) * (len(points) - 1)) for points in (one, other)]
    return float(2 * across - within[0] - within[1])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a diffusion model of two spirals.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--points", type=int, default=8000, help="to train on")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks")
    parser.add_argument("--shards", type=int, help="shards of a mini-batch (default: one per rank)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder of the run, which then resumes; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        model = Denoiser().to(world.device)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        batches = dl.Batches(make_points(arguments.points, 0), arguments.batch_size, world, shards=arguments.shards)
        kept = kept_shares(world.device)
        drawn = make_points(2000, 1)

        state = {"model": model, "averaged": averaged, "optimizer": optimizer}
        for step in dl.Loop(batches, arguments.epochs, state=state, run_dir=arguments.run_dir, progress=False):
            for points in step:
                times = torch.randint(TIMES, (len(points),), device=world.device)
                noise = torch.randn_like(points)
                share = kept[times][:, None]
                found = model(share.sqrt() * points + (1 - share).sqrt() * noise, times)
                step.backward(mse_loss(found, noise))
            result = step.fold()
            optimizer.step()
            averaged.update_parameters(model)
            if step.is_last_of_epoch and (step.epoch % 10 == 0 or step.epoch == arguments.epochs):
                distances = [energy_distance(sample(one, 2000, world.device), drawn) for one in (model, averaged)]
                world.print(
                    f"Epoch: {step.epoch}, Loss: {float(result.loss):.4f}, Distance from the data: {distances[0]:.4f}, "
                    f"with averaged weights: {distances[1]:.4f}"
                )


if __name__ == "__main__":
    main()
