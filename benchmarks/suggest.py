"""TPE against random draws, and a pruner against none, on the surface network with the same number of trials.

    python -m benchmarks suggest [SEED ...]

Each seed is a sweep of its own start weights: `TRIALS` trainings of `STEPS` updates of Adam on a grid of `SIDE` x
`SIDE` points, compared by their last error. "random" draws points, "TPE" suggests them, and "random, pruned" draws the
same points as "random" and stops those that are worse than the median. Updates are counted by the rows of the run
folders.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.nn.functional import mse_loss

import ddp_loop as dl
from benchmarks.measuring import print_table
from ddp_loop import networks
from examples.surface.train import grid

SIDE = 40
STEPS = 800
EVERY = 40  # updates between two values for the pruner
TRIALS = 30
SLOTS = 2
SEEDS = ("0", "1", "2", "3", "4")
SPACE: Mapping[str, Any] = {
    "rate": {"low": 1e-4, "high": 1.0, "log": True},
    "beta_1": {"low": 0.0, "high": 0.99},
    "beta_2": {"low": 0.9, "high": 0.9999},
    "linear_end": [False, True],
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "random": {"sampler": "random"},
    "TPE": {"sampler": "tpe"},
    "random, pruned": {"sampler": "random", "pruner": "median"},
}


@dataclass(frozen=True)
class Found:
    """What a sweep found: its least error, its updates, and the trials that were pruned or did not end."""

    best: float
    updates: int
    pruned: int
    failed: int


def train(
    rate: float, beta_1: float, beta_2: float, linear_end: bool, run_dir: str, seed: int, steps: int, side: int
) -> None:
    """Train one surface network on the whole grid. Every rank must call this."""
    with dl.join_world(device="cpu", seed=seed) as world:
        model = networks.surface_network(linear_end)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(beta_1, beta_2), fused=True)
        data, state = grid(side), {"model": model, "optimizer": optimizer}
        batches = dl.Batches(data, len(data[0]), world, shuffle=False)
        loop = dl.Loop(batches, steps, run_dir=run_dir, save_every=steps, state=state, progress=False)
        for step in loop:
            for points, heights in step:
                step.backward(mse_loss(model(points), heights))
            step.fold()
            optimizer.step()


def search(way: str, seed: int, folder: Path, *, trials: int = TRIALS, steps: int = STEPS, side: int = SIDE) -> Found:
    """Run one sweep."""
    results = dl.sweep(
        train,
        SPACE,
        folder,
        keywords={"seed": seed, "steps": steps, "side": side},
        trials=trials,
        report_every=max(1, steps * EVERY // STEPS),
        slots=SLOTS,
        seed=seed,
        progress=False,
        **WAYS[way],
    )
    ended = [one.value for one in results if one.status == "done" and one.value is not None]
    updates = sum(len((one.folder / "rows.jsonl").read_text().splitlines()) for one in results)
    pruned = sum(one.status == "pruned" for one in results)
    return Found(min(ended), updates, pruned, len(results) - len(ended) - pruned)


def measure(seeds: Sequence[str]) -> Iterator[tuple[str, dict[str, Found]]]:
    """What each way found, by seed."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            yield seed, {way: search(way, int(seed), Path(folder) / way.replace(", ", "-")) for way in WAYS}


def rows_of(found: Mapping[str, Mapping[str, Found]]) -> Iterator[tuple[object, ...]]:
    """The rows of the table: a seed each, then median and quartiles."""
    errors = {way: [each[way].best for each in found.values()] for way in WAYS}
    saved = [1 - each["random, pruned"].updates / each["random"].updates for each in found.values()]
    for number, (seed, each) in enumerate(found.items()):
        pruned = each["random, pruned"].pruned
        yield seed, *(f"{errors[way][number]:.4f}" for way in WAYS), f"{saved[number]:.1%}", pruned
    if len(found) > 1:
        yield "median", *(f"{median(errors[way]):.4f}" for way in WAYS), f"{median(saved):.1%}", ""
        low = {way: quantiles(errors[way], n=4, method="inclusive") for way in WAYS}
        share = quantiles(saved, n=4, method="inclusive")
        yield (
            "quartiles",
            *(f"{low[way][0]:.4f} to {low[way][2]:.4f}" for way in WAYS),
            f"{share[0]:.1%} to {share[2]:.1%}",
            "",
        )


def report(parts: Sequence[str]) -> None:
    found = dict(measure(parts or SEEDS))
    print(
        f"{TRIALS} trials of {STEPS} updates on {SIDE}x{SIDE} points, {SLOTS} slots; errors are the least of a sweep.\n"
    )
    print_table("seed | random | TPE | random, pruned | updates saved by pruning | trials pruned", rows_of(found))
    failed = sum(one.failed for each in found.values() for one in each.values())
    better = sum(each["TPE"].best < each["random"].best for each in found.values())
    print(f"TPE found less error than random draws in {better} of {len(found)} seeds. {failed} trials failed.")
