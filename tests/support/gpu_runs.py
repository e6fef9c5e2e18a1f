"""A job with a run folder, whose weights are longer than a piece of a checksum."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.determinism import digest

WIDTH = 200  # 40,000 words in a weight, more than the 16,383 of a piece


def train(folder: str, steps: int, device: str = "gpu") -> tuple[int, str]:
    """The step at which the run ends, and a digest of its weights."""
    with dl.join_world(device=device, seed=0) as world:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(48, WIDTH, generator=generator), torch.randint(4, (48,), generator=generator)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4)).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(data, 12, world, shards=6)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=steps, state=state, run_dir=folder, save_every=2, progress=False)
        for step in loop:
            for rows, labels in step:
                step.backward(cross_entropy(model(rows), labels))
            step.fold()
            optimizer.step()
        return loop.iteration, digest(nn.utils.parameters_to_vector(model.parameters()))
