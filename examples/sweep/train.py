"""Sweep over learning rate, momentum and width of the digit network: twelve trainings, several at a time.

A grid of 12 trials:     python train.py
Two at a time:           python train.py --slots 2
Two ranks for each:      python train.py --ranks 2
TPE and pruning:         python train.py --tpe
The grid from a file:    python -m ddp_loop sweep sweep.toml
Help from elsewhere:     python -m ddp_loop sweep work runs/grid
All trials as a table:   python -m ddp_loop runs runs/grid

The same command goes on where a sweep was stopped by Ctrl-C, or killed. Each trial is an ordinary run below the
folder's `trials`, with the bits of the same training alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop import datasets, networks, plots

GRID = {"rate": [0.003, 0.01, 0.03], "momentum": [0.0, 0.9], "width": [8, 16]}
RANGES = {
    "rate": {"low": 0.001, "high": 0.1, "log": True},
    "momentum": {"low": 0.0, "high": 0.95},
    "width": {"low": 4, "high": 16, "step": 4},
}
OBJECTIVE = "evaluation.loss"
EVERY = 15  # updates between two evaluations, whose values the pruner compares


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether each prediction is right, (n,) bool."""
    return logits.argmax(1) == labels


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each prediction, (n,)."""
    return cross_entropy(logits, labels, reduction="none")


def train(rate: float, momentum: float, width: int, run_dir: str, epochs: int = 1, images: int = 10_000) -> None:
    """Train one digit network, and evaluate it as it learns. Every rank must call this."""
    with dl.join_world(seed=0) as world:
        with world.rank_zero_first():  # drawn and cached once
            learned, held_out = datasets.digits(seed=0, size=images).split(0.9)
        model = networks.digit_classifier(width=width).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        batches, tests = dl.Batches(learned, 128, world), dl.Batches(held_out, 1000, world, shuffle=False)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, epochs, run_dir=run_dir, state=state, progress=False)
        for step in loop:
            for shard, labels in step:
                step.backward(cross_entropy(model(shard), labels))
            step.fold()
            optimizer.step()
            if step.iteration % EVERY == 0:
                dl.evaluate(model, tests, loss=losses, accuracy=hits)
        dl.evaluate(model, tests, loss=losses, accuracy=hits)


def read_lines(path: Path) -> list[dict[str, float]]:
    """The lines of a run's file, such as rows.jsonl; none if it has not begun."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_table(results: Sequence[dl.TrialResult]) -> None:
    """Print the trials, the best first."""
    print(f"\n{'trial':>5}  {'rate':>8}  {'momentum':>8}  {'width':>5}  {'loss':>8}  {'accuracy':>8}  status")
    for one in sorted(results, key=lambda each: (each.status != "done", each.value is None, each.value)):
        evaluations = read_lines(one.folder / "evaluations.jsonl")
        accuracy = f"{evaluations[-1]['accuracy']:.4f}" if evaluations else ""
        value = "" if one.value is None else f"{one.value:.4f}"
        given = one.parameters
        print(
            f"{one.trial:>5}  {given['rate']:>8.4g}  {given['momentum']:>8.3g}  {given['width']:>5}  {value:>8}  "
            f"{accuracy:>8}  {one.status}"
        )


def draw(results: Sequence[dl.TrialResult], path: Path) -> Path:
    """Draw the evaluation's loss against each parameter, and the training loss of all trials."""
    shown = []
    for one in results:
        rows = read_lines(one.folder / "rows.jsonl")
        iterations, values = [row["iteration"] for row in rows], [row["loss"] for row in rows]
        shown.append(plots.TrialCurve(one.parameters, one.value, iterations, values, one.status == "pruned"))
    title = f"{len(results)} trainings of the digit network"
    return plots.trials(shown, path, value="loss of held-out images", curve="training loss", title=title)


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train many digit networks, and compare them.")
    parser.add_argument("--tpe", action="store_true", help="12 points suggested by TPE, bad ones pruned; not the grid")
    parser.add_argument("--epochs", type=int, default=1, help="of each trial")
    parser.add_argument("--images", type=int, default=10_000, help="of which one in ten is held out")
    parser.add_argument("--ranks", type=int, default=1, help="of each trial")
    parser.add_argument("--slots", type=int, help="ranks at once (default: one per GPU, or per core)")
    parser.add_argument("--folder", type=Path, help="of the sweep (default: runs/grid, or runs/tpe)")
    return parser.parse_args(given)


def main() -> None:
    arguments = read_arguments()
    folder = arguments.folder or Path("runs") / ("tpe" if arguments.tpe else "grid")
    keywords = {"epochs": arguments.epochs, "images": arguments.images}
    shared = {"keywords": keywords, "objective": OBJECTIVE, "ranks": arguments.ranks, "slots": arguments.slots}
    if arguments.tpe:
        results = dl.sweep(train, RANGES, folder, trials=12, sampler="tpe", pruner="median", **shared)
    else:
        results = dl.sweep(train, GRID, folder, **shared)

    print_table(results)
    ended = [one for one in results if one.status == "done" and one.value is not None]
    if ended:
        best = min(ended, key=lambda one: one.value or 0.0)
        print(f"\nBest: trial {best.trial}, {best.parameters}, loss {best.value:.4f}")
        print(f"Run folder: {best.folder}")
        print(f"Picture: {draw(results, folder / 'trials.png')}")


if __name__ == "__main__":
    main()
