"""The step of a Loop, written out with its parts: it gives the same bits as `Loop`.

One process:      python by_hand.py
Two CPU ranks:    torchrun --nproc_per_node=2 by_hand.py

With `--loop` the same training uses `Loop`. Both print a digest of all parameters and buffers.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop import networks


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters and buffers."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def by_hand(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: dl.Batches, epochs: int) -> None:
    """Train as `Loop` does, part by part."""
    world = batches.world
    parameters = dict(model.named_parameters(prefix="model"))
    fold = dl.Fold({"model": model}, parameters, world, shards=batches.shards, ordered=batches.fixed_shards)
    iteration = 0
    for epoch in range(1, epochs + 1):
        for loaded in batches.epoch(epoch):
            iteration += 1
            mini_batch = loaded.mini_batch  # the same on all ranks, except for `shards`, those of this rank
            fold.open()  # clears gradients; every shard starts from the buffers as they are now
            for number, shard in enumerate(mini_batch.shards):
                images, labels = loaded.data(number)
                dl.seed_shard(world.seed, iteration, shard.number, world.device)  # its own random stream
                record = fold.begin_shard(shard)  # from here on batch norm records the shard's statistics
                loss = cross_entropy(model(images), labels)
                record.losses.append(loss.detach())
                # The shard's share of the mini-batch, w_s / R; exactly 1 for one shard.
                share = shard.samples / mini_batch.samples
                fold.backward(record, loss, share, last=shard is mini_batch.shards[-1])
                fold.end_shard(record)
            # One sum over the ranks gives all of them the mini-batch's gradients, losses and statistics.
            result = fold.close(mini_batch, iteration)
            dl.seed_step(world.seed, iteration, world.device)  # all ranks draw the same between steps
            optimizer.step()
        world.print(f"Epoch: {epoch + 1}, last loss: {float(result.loss):.4f}")
    fold.release()


def by_loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: dl.Batches, epochs: int) -> None:
    """Do the same with `Loop`."""
    for step in dl.Loop(batches, epochs, state={"model": model, "optimizer": optimizer}, progress=False):
        for images, labels in step:
            step.backward(cross_entropy(model(images), labels))
        step.fold()
        optimizer.step()


def train(through_loop: bool, samples: int = 500, epochs: int = 2, shards: int | None = None) -> str:
    """Train the digit network on noise in one of the two ways, and return the digest."""
    with dl.join_world(seed=0) as world:
        generator = torch.Generator().manual_seed(1)
        images = torch.rand(samples, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (samples,), generator=generator)
        model = networks.digit_classifier().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = dl.Batches((images, labels), 128, world, shards=shards)
        (by_loop if through_loop else by_hand)(model, optimizer, batches, epochs)
        world.print(digest(model))
        return digest(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of a Loop, written out with its parts.")
    parser.add_argument("--loop", action="store_true", help="use Loop instead, for the same digest")
    train(parser.parse_args().loop)


if __name__ == "__main__":
    main()
