"""Fit a small network to a surface z(x, y), by the same call on the CPU and on a GPU, and compare the two.

One process:      python train.py
Two CPU ranks:    torchrun --nproc_per_node=2 train.py --device cpu
All your GPUs:    torchrun --nproc_per_node=gpu train.py --device cuda

The mini-batch is the whole grid, 40,000 points of MATLAB's peaks, which is divided among the ranks. Both devices start
from the same weights and see the same points in the same order, so that only the rounding of their sums differs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from ddp_loop import networks, plots

REACH = 3.0  # x and y go from -3 to 3
PANEL = 40  # points a side of a picture
DEVICES = {"cpu": ("cpu",), "cuda": ("gpu",), "both": ("cpu", "gpu")}  # --device, in join_world's words


def peaks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The heights of MATLAB's peaks, of the shape of x and y."""
    hill = 3 * (1 - x) ** 2 * torch.exp(-(x**2) - (y + 1) ** 2)
    valley = 10 * (x / 5 - x**3 - y**5) * torch.exp(-(x**2) - y**2)
    return hill - valley - torch.exp(-((x + 1) ** 2) - y**2) / 3


def grid(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The points (side * side, 2) of a grid, row by row, and their heights (side * side, 1); float32."""
    axis = torch.linspace(-REACH, REACH, side, dtype=torch.float64)
    x, y = torch.meshgrid(axis, axis, indexing="xy")
    points = torch.stack([x.flatten(), y.flatten()], dim=1)
    return points.float(), peaks(x, y).reshape(-1, 1).float()


def is_dead(model: nn.Module) -> bool:
    """Whether no gradient reached the first layer: some layer gives 0 at every point, and cannot recover."""
    gradient = model.get_parameter("0.weight").grad
    return gradient is not None and not gradient.any()


DEAD = (
    "The network is dead: one of its layers gives 0 at every point, so no gradient reaches the layers before it. "
    "Use another --seed (two of three work), or leave out the last relu by --linear-end."
)


@dataclass
class Trained:
    """The result of a training.

    Attributes:
        where: ranks, device and threads in words.
        model: on the CPU.
        error: the mean squared error of the last step, before its update.
        start_s: the seconds for joining, data, network and loop.
        first_s: those for the first step, with what is compiled or set up in it.
        step_s: those for each further step.
        weights: all weights as one vector, after the first, the tenth and the last step.
    """

    where: str
    model: nn.Module
    error: float
    start_s: float
    first_s: float
    step_s: float
    weights: dict[int, torch.Tensor]


def seconds(world: dl.World) -> float:
    """The time at which the device has done all its work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


Steps = Generator[tuple[int, torch.Tensor], None, None]  # of each step the number and the loss
Job = tuple[Any, dict[str, Any], tuple[torch.Tensor, torch.Tensor]]  # the network to call, the state, the data


def folded(job: Job, world: dl.World, arguments: argparse.Namespace) -> Steps:
    """Train on any number of ranks. Every rank must call this."""
    network, state, data = job
    batches = dl.Batches(data, len(data[0]), world, shuffle=False, shards=arguments.shards)
    loop = dl.Loop(batches, arguments.steps, state=state, progress=False)

    def steps() -> Steps:
        for step in loop:
            for points, heights in step:
                step.backward(mse_loss(network(points), heights))
            result = step.fold()
            state["optimizer"].step()
            yield step.iteration, result.loss

    return steps()


def train(device: str, arguments: argparse.Namespace) -> Trained:
    """Train on the whole grid in every step, on "cpu" or "gpu". Every rank must call this."""
    began = time.perf_counter()
    with dl.join_world(device=device, seed=arguments.seed, threads=arguments.threads, keep_memory=True) as world:
        model = networks.surface_network(arguments.linear_end).to(world.device)
        network = dl.compile_model(model, world) if arguments.compile else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.08, fused=True)
        job = network, {"model": model, "optimizer": optimizer}, grid(arguments.side)
        steps = folded(job, world, arguments)
        weights: dict[int, torch.Tensor] = {}
        ready = first = seconds(world)

        with closing(steps):
            for number, error in steps:  # noqa: B007 - the last one is reported
                if number in (1, 10, arguments.steps):
                    weights[number] = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
                if number == 1:
                    first = seconds(world)
                    if is_dead(model):
                        break

        more, ended = number - 1, seconds(world)
        trained = Trained(
            where=f"{world.size} ranks on {world.device.type}, {arguments.threads} threads each",
            model=model,
            error=float(error),
            start_s=ready - began,
            first_s=first - ready,
            step_s=(ended - first) / max(more, 1),
            weights=weights,
        )
        world.print(
            f"{trained.where}: error {trained.error:.4f}; start-up {trained.start_s:.2f} s, first step "
            f"{trained.first_s:.2f} s, {more} more in {ended - first:.2f} s, {1e3 * trained.step_s:.3f} ms each"
        )
        if is_dead(model):
            world.print(DEAD)
        model.cpu()
    return trained


def largest_differences(one: Trained, other: Trained) -> dict[int, float]:
    """The largest difference of a weight between two trainings, after each step at which both have kept them."""
    steps = one.weights.keys() & other.weights.keys()
    return {step: float((one.weights[step] - other.weights[step]).abs().max()) for step in sorted(steps)}


def draw(runs: dict[str, Trained], folder: Path) -> Path:
    """Draw the true surface, the CPU's and the GPU's, on 40x40 points."""
    points, heights = grid(PANEL)
    panels: dict[str, torch.Tensor | str] = {"Peaks": heights.view(PANEL, PANEL)}
    for device, name in (("cpu", "CPU"), ("gpu", "GPU")):
        if device in runs:
            with torch.no_grad():
                panels[f"{name}, error {runs[device].error:.4f}"] = runs[device].model(points).view(PANEL, PANEL)
        else:
            panels[name] = "left out"
    return plots.surfaces(panels, folder / "surfaces.png", reach=(-REACH, REACH))


def report(runs: dict[str, Trained], arguments: argparse.Namespace) -> None:
    """Print what errors can be had, and how far the two devices lie apart; draw all surfaces."""
    _, heights = grid(arguments.side)
    print(
        f"On these {len(heights):,} points the error of a dead network is {heights.square().mean():.4f}, and the least "
        f"of one without negative heights {heights.clamp(max=0).square().mean():.4f}"
    )
    if len(runs) == 2:
        cpu, gpu = runs["cpu"], runs["gpu"]
        for step, difference in largest_differences(cpu, gpu).items():
            print(f"Largest difference of a weight after step {step}: {difference:.3g}")
        print(f"A step on {gpu.where} is {cpu.step_s / gpu.step_s:.1f} times as fast as on {cpu.where}")
    elif arguments.device == "both":
        print("The GPU's part is left out: torch sees no GPU")
    print(draw(runs, Path(arguments.folder)))


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a network to a surface, on the CPU and on a GPU.")
    parser.add_argument("--device", choices=DEVICES, default="both", help="a GPU is left out of both if there is none")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--side", type=int, default=200, help="points along x and along y")
    parser.add_argument("--seed", type=int, default=0, help="of the start weights")
    parser.add_argument("--linear-end", action="store_true", help="leave out the last relu")
    parser.add_argument("--shards", type=int, help="of the grid (default: one per rank)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--compile", action="store_true", help="compile the network in the first step")
    parser.add_argument("--folder", default="runs/surface", help="for the picture")
    return parser.parse_args(given)


def main() -> None:
    arguments = read_arguments()
    leave_out = arguments.device == "both" and not torch.cuda.is_available()
    devices = DEVICES["cpu" if leave_out else arguments.device]
    runs = {name: train(name, arguments) for name in devices}
    with dl.join_world(device="cpu") as world:
        if world.rank == 0:
            report(runs, arguments)


if __name__ == "__main__":
    main()
