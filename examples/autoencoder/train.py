"""Train a denoising autoencoder twice without determinism and twice with it, and compare the weights.

One process:      python train.py
All your GPUs:    torchrun --nproc_per_node=gpu train.py
Two CPU ranks:    torchrun --nproc_per_node=2 train.py
Trained longer:   python train.py --epochs 50 --patience 5
Faster kernels:   python train.py --precision bf16 --channels-last

Two runs without determinism differ in everything random: initial weights, order, noise, rotations. Their seeds come
from the system's entropy (the default of `join_world` is seed 0), and on a GPU algorithms may sum in another order each
time. Two runs inside `dl.deterministic()` with the same seed have the same bits. The script compares all parameters and
draws the differences of the first convolution.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from ddp_loop import datasets, networks, plots

upright_pairs = partial(datasets.noisy_pairs, turned=False)  # for validation and test


def squared_error(pictures: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """The mean squared error of each picture, (n,)."""
    return (pictures - clean).square().mean((1, 2, 3))


def psnr(pictures: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """The peak signal-to-noise ratio of each picture in dB, 10 log10(1 / mean squared error); (n,)."""
    return -10 * squared_error(pictures, clean).log10()


@dataclass(frozen=True)
class Trained:
    """The result of a run: the network on the CPU, and the PSNR in dB of the noisy and of the cleaned test pictures."""

    model: nn.Sequential
    noisy_psnr: float
    cleaned_psnr: float


def read_images(arguments: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """The images for training, validation and test, (N, 1, 28, 28) uint8 each."""
    return tuple(part.images for part in datasets.digits(seed=0, size=arguments.images).split(0.95, 0.025))


def precision(world: dl.World, arguments: argparse.Namespace) -> torch.autocast:
    """The precision of products in a block, as --precision asks."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")


def train(
    images: torch.Tensor, validation_images: torch.Tensor, world: dl.World, arguments: argparse.Namespace
) -> nn.Sequential:
    """Train on noisy pairs of the images; returns the network with the last weights, or with the best ones."""
    model = networks.denoising_autoencoder().to(world.device)
    if arguments.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forward = dl.compile_model(model, world) if arguments.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.rate)
    batches = dl.Batches(images, arguments.batch_size, world, transform=datasets.noisy_pairs)
    validation = dl.Batches(validation_images, arguments.batch_size, world, shuffle=False, transform=upright_pairs)
    patience = dl.EarlyStopping(model, arguments.patience) if arguments.patience else None

    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, arguments.epochs, state=state, progress=not arguments.quiet):
        for noisy, clean in step:
            with precision(world, arguments):
                cleaned = forward(noisy).float()
            step.backward(mse_loss(cleaned, clean))
        step.fold()
        optimizer.step()
        if patience and step.iteration % arguments.validate_every == 0:
            with precision(world, arguments):
                loss = dl.evaluate(model, validation, loss=squared_error)["loss"]
            if patience.should_stop(loss):
                world.print(f"Validation loss {loss:.5f}, not below {patience.best_loss:.5f}: stopped")
                break
    if patience and arguments.result == "best":
        patience.restore_best()
    return model


def run(seed: int | None, arguments: argparse.Namespace) -> Trained:
    """Train and test once, deterministically with the given seed, or not and with a random seed."""
    block = nullcontext() if seed is None else dl.deterministic(seed)
    with block, dl.join_world(device=arguments.device, seed=draw_seed(arguments) if seed is None else seed) as world:
        if arguments.precision == "bf16" and not dl.use_bfloat16(world):
            arguments.precision = "fp32"
        with world.rank_zero_first():  # drawn and cached once
            training, validation, test = read_images(arguments)
        world.print(
            f"{'Without' if seed is None else 'With'} determinism, seed {world.seed}: {len(training)} training, "
            f"{len(validation)} validation, {len(test)} test images, {world.size} ranks on {world.device.type}, "
            f"mini-batches of {arguments.batch_size}"
        )
        model = train(training, validation, world, arguments)

        def measure(forward: Callable[[nn.Module, Sequence[torch.Tensor]], torch.Tensor]) -> float:
            batches = dl.Batches(test, 250, world, shuffle=False, seed=0, transform=upright_pairs)
            with precision(world, arguments):
                return dl.evaluate(model, batches, forward=forward, psnr=psnr)["psnr"]

        trained = Trained(
            noisy_psnr=measure(lambda model, pair: pair[0]),
            cleaned_psnr=measure(lambda model, pair: model(pair[0])),
            model=model.cpu().to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        )
        world.print(
            f"PSNR of the test images: {trained.noisy_psnr:.2f} dB noisy, {trained.cleaned_psnr:.2f} dB cleaned"
        )
    return trained


def draw_seed(arguments: argparse.Namespace) -> int:
    """A seed from the system's entropy, the same on every rank."""
    with dl.join_world(device=arguments.device) as world:
        return world.gather(secrets.randbits(32))[0]


@dataclass(frozen=True)
class Differences:
    """The number of parameters that differ between two networks, of how many, and the largest difference."""

    differing: int
    learnables: int
    largest: float


def compare(one: nn.Module, other: nn.Module) -> Differences:
    weights = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in (one, other)]
    gaps = (weights[0] - weights[1]).abs()
    return Differences(int((weights[0] != weights[1]).sum()), gaps.numel(), float(gaps.max()))


def report(free: Sequence[Trained], pinned: Sequence[Trained], folder: Path) -> None:
    """Print the differences without and with determinism, and draw those of the first convolution."""
    gaps = {}
    for name, runs, why in (
        ("without", free, "a random seed for each run, any algorithms"),
        ("with", pinned, "the same seed, deterministic algorithms"),
    ):
        one, other = (trained.model for trained in runs)
        found = compare(one, other)
        print(
            f"Two runs {name} determinism: {found.differing} of {found.learnables} learnables differ, "
            f"by {found.largest:.3g} at most ({why})"
        )
        gaps[name] = (one.get_parameter("0.weight") - other.get_parameter("0.weight")).detach()
    reach = 1.1 * max(float(gap.abs().max()) for gap in gaps.values()) or 1.0  # the same for both pictures
    for name, gap in gaps.items():
        title = f"Two runs {name} determinism: {int((gap != 0).sum())} of {gap.numel()} weights differ"
        print(plots.differences(gap, folder / f"differences_{name}_determinism.png", title=title, reach=reach))


def draw_pairs(model: nn.Sequential, arguments: argparse.Namespace, folder: Path) -> None:
    """Draw eight training pairs, and eight noisy test pictures beside the network's output."""
    training, _, test = read_images(arguments)
    draws = dl.Draws(arguments.seed, 1, torch.arange(8), torch.device("cpu"))
    print(plots.pairs(*datasets.noisy_pairs(training[:8], draws), folder / "pairs.png"))
    noisy, _ = upright_pairs(test[:8], draws)
    with torch.no_grad():
        print(plots.pairs(noisy, model(noisy), folder / "cleaned.png", names=("Noisy", "Cleaned")))


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a denoising autoencoder, twice without determinism and twice with it."
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000, help="images to draw, of which 95%% are for training")
    parser.add_argument("--batch-size", type=int, default=500, help="of all ranks")
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0, help="of the runs with determinism")
    parser.add_argument("--patience", type=int, default=0, help="validations without improvement before a stop")
    parser.add_argument("--validate-every", type=int, default=19, help="steps, with --patience; 19 are an epoch")
    parser.add_argument("--result", choices=["best", "last"], default="best", help="weights, with --patience")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of products, by autocast")
    parser.add_argument("--channels-last", action="store_true", help="the memory format that convolutions prefer")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--folder", default="runs/autoencoder", help="for the pictures")
    parser.add_argument("--quiet", action="store_true", help="no line for each epoch")
    return parser.parse_args(given)


def main() -> None:
    arguments = read_arguments()
    free = [run(None, arguments) for _ in range(2)]
    pinned = [run(arguments.seed, arguments) for _ in range(2)]
    with dl.join_world(device=arguments.device) as world:
        if world.rank == 0:
            folder = Path(arguments.folder)
            report(free, pinned, folder)
            draw_pairs(pinned[0].model, arguments, folder)


if __name__ == "__main__":
    main()
