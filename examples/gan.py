"""A GAN, with two networks, two optimizers and two passes per step, for points in eight clusters on a ring.

One process:      python gan.py
All your GPUs:    torchrun --nproc_per_node=gpu gan.py
Two CPU ranks:    torchrun --nproc_per_node=2 gan.py

The first pass over a step's shards trains the discriminator, the second the generator. Each ends with its own fold and
optimizer step. A pass begins without gradients, so those that the generator's pass leaves in the discriminator are gone
in the next pass, and nothing needs to be frozen. Both passes have the same metric: with other names the ranks would
have to agree on the columns in each fold. Noise is drawn inside the passes from the stream of the shard and the pass,
so a run with `--shards 4` draws the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import ddp_loop as dl

CLUSTERS, DEVIATION, NOISE = 8, 0.1, 16


def centres() -> torch.Tensor:
    """The centres of the clusters, on a circle of radius 2; (8, 2)."""
    angles = 2 * math.pi * torch.arange(CLUSTERS) / CLUSTERS
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def make_points(count: int, seed: int) -> torch.Tensor:
    """Points around the centres, (count, 2), a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    clusters = torch.randint(CLUSTERS, (count,), generator=generator)
    return centres()[clusters] + DEVIATION * torch.randn(count, 2, generator=generator)


def make_network(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    hidden = [nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), *hidden, nn.Linear(width, outputs))


def energy_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two sets of points as distributions: 2 E|X - Y| - E|X - X'| - E|Y - Y'|, 0 for equal ones.

    Source: Székely, Rizzo: Energy statistics, 2013.
    """
    across = torch.cdist(one, other).mean()
    within = [torch.cdist(points, points).sum() / (len(points) * (len(points) - 1)) for points in (one, other)]
    return float(2 * across - within[0] - within[1])


@torch.no_grad()
def measure(generator: nn.Module, device: torch.device) -> tuple[float, int, float]:
    """The energy distance of 2,000 generated points, the clusters found, and the share of points near a centre."""
    noise = torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(1)).to(device)
    made = generator(noise).cpu()
    distances, clusters = torch.cdist(made, centres()).min(dim=1)
    near = distances < 3 * DEVIATION
    found = int((clusters[near].bincount(minlength=CLUSTERS) >= 20).sum())
    return energy_distance(made, make_points(2000, seed=2)), found, float(near.float().mean())


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a generator of points against a discriminator.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--points", type=int, default=8000, help="to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=256, help="per GPU; on the CPU, of all ranks")
    parser.add_argument("--shards", type=int, help="shards of a mini-batch (default: one per rank)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder for rows.jsonl; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        generator = make_network(NOISE, 2).to(world.device)
        discriminator = make_network(2, 1).to(world.device)
        generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.99))
        discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.001, betas=(0.5, 0.99))
        batch_size = dl.scale_batch_size(arguments.batch_size, world)
        points = make_points(arguments.points, seed=0)
        batches = dl.Batches(points, batch_size, world, shards=arguments.shards)
        world.print(
            f"{len(points)} points, {world.size} ranks on {world.device.type}, {batches.shards} shards of a "
            f"mini-batch of {batch_size}"
        )

        def report(epoch: int) -> None:
            distance, clusters, near = measure(generator, world.device)
            found = f"Clusters: {clusters} of {CLUSTERS}, Near one: {near:.3f}"
            world.print(f"Epoch: {epoch}, Energy distance: {distance:.4f}, {found}")

        def noise(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(len(like), NOISE, device=world.device)

        report(0)
        state = {
            "generator": generator,
            "discriminator": discriminator,
            "generator_optimizer": generator_optimizer,
            "discriminator_optimizer": discriminator_optimizer,
        }
        for step in dl.Loop(batches, arguments.epochs, run_dir=arguments.run_dir, state=state, progress=False):
            for drawn in step:  # the discriminator's pass; rows.jsonl has its values
                with torch.no_grad():
                    made = generator(noise(drawn))
                on_drawn, on_made = discriminator(drawn), discriminator(made)
                loss = softplus(-on_drawn).mean() + softplus(on_made).mean()
                step.backward(loss, taken_for_drawn=on_made.squeeze(1) > 0)
            step.fold()
            discriminator_optimizer.step()

            for drawn in step:  # the generator's pass, with noise of its own
                on_made = discriminator(generator(noise(drawn)))
                step.backward(softplus(-on_made).mean(), taken_for_drawn=on_made.squeeze(1) > 0)
            step.fold()
            generator_optimizer.step()

            if step.is_last_of_epoch and (step.epoch % 10 == 0 or step.epoch == arguments.epochs):
                report(step.epoch)


if __name__ == "__main__":
    main()
