"""TPE against random draws, and a pruner against none, on the surface network with the same number of trials.

    python -m benchmarks suggest [PART ...]

Each of five seeds is a sweep of its own start weights: `TRIALS` trainings of `STEPS` updates of Adam on a grid of 40x40
points, compared by their last error. "tpe": suggested points against random ones. "pruning": random points, of which
those that are worse than the median are stopped, against the same points without a pruner. Updates are counted by the
rows of the run folders. A pruner's stop takes effect some tenths of a second after the value that causes it, which is a
part of these trials of a second or two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
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
SEEDS = range(5)
SPACE: Mapping[str, Any] = {
    "rate": {"low": 1e-4, "high": 1.0, "log": True},
    "beta_1": {"low": 0.0, "high": 0.99},
    "beta_2": {"low": 0.9, "high": 0.9999},
    "linear_end": [False, True],
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "random": {"sampler": "random"},
    "TPE": {"sampler": "tpe"},
    "pruned": {"sampler": "random", "pruner": "median"},
}
PARTS = {"tpe": ("random", "TPE"), "pruning": ("random", "pruned")}


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


def search(way: str, seed: int, folder: Path, side: int, *, trials: int = TRIALS, steps: int = STEPS) -> Found:
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


def measure(part: str, seed: int) -> dict[str, Found]:
    """What each way of a part found."""
    with tempfile.TemporaryDirectory() as folder:
        return {way: search(way, seed, Path(folder) / way, SIDE) for way in PARTS[part]}


def rows_of(part: str, found: Mapping[int, Mapping[str, Found]]) -> Iterator[tuple[object, ...]]:
    """The rows of a part's table: a seed each, then median and quartiles."""
    ways = PARTS[part]
    columns = {way: [each[way].best for each in found.values()] for way in ways}
    saved = [1 - each[ways[1]].updates / each[ways[0]].updates for each in found.values()]
    for number, (seed, each) in enumerate(found.items()):
        errors = (f"{columns[way][number]:.4f}" for way in ways)
        yield seed, *errors, *((f"{saved[number]:.1%}", each[ways[1]].pruned) if part == "pruning" else ())
    for what, places in {"median": [1], "quartiles": [0, 2]}.items():
        shown = [[f"{quantiles(columns[way], n=4, method='inclusive')[one]:.4f}" for one in places] for way in ways]
        share = [f"{quantiles(saved, n=4, method='inclusive')[one]:.1%}" for one in places]
        rest = (" to ".join(share), "") if part == "pruning" else ()
        yield what, *(" to ".join(one) for one in shown), *rest


def print_part(part: str, found: Mapping[int, Mapping[str, Found]]) -> None:
    print(f"{TRIALS} trials of {STEPS} updates on {SIDE}x{SIDE} points, {SLOTS} slots.\n")
    further = " | updates saved | trials pruned" if part == "pruning" else ""
    print_table(f"seed | {' | '.join(f'least error, {way}' for way in PARTS[part])}{further}", rows_of(part, found))
    one, other = PARTS[part]
    better = sum(each[other].best < each[one].best for each in found.values())
    worse = sum(each[other].best > each[one].best for each in found.values())
    failed = sum(sweep.failed for each in found.values() for sweep in each.values())
    print(
        f"{other}: less error than {one} in {better} of {len(found)} seeds, more in {worse}. {failed} trials failed.\n"
    )


def report(parts: Sequence[str]) -> None:
    for part in parts or PARTS:
        print_part(part, {seed: measure(part, seed) for seed in SEEDS})
