"""Jobs for sweeps with several workers: short trainings that pause where a test needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.reporting import trial_folder
from tests.support.harness import until
from tests.support.trials import trial
from tests.support.updates import Momentum

UPDATES, SAVE_EVERY, STANDS_AT = 12, 3, 8
STANDS_S = 120.0
WEIGHTS = "weights.json"
REACHED = "reached"  # a file in the run folder of a trial that pauses


def train(rate: float, run_dir: str, stands: float | None = None) -> float:
    """Train a small network; the trial of this rate pauses once, until its run is asked to stop."""
    with dl.join_world(seed=0) as world:
        model = nn.Linear(4, 1)
        optimizer = Momentum(model.parameters(), rate)
        inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        batches = dl.Batches((inputs, inputs.sum(1, keepdim=True)), 8, world, shuffle=True)
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 1, state=state, run_dir=run_dir, save_every=SAVE_EVERY, progress=False)
        for epoch in loop.epochs():
            for step in epoch:
                for rows, right in step:
                    step.backward((model(rows) - right).square().mean())
                step.fold()
                optimizer.step()
                if rate == stands and step.iteration == STANDS_AT:
                    stand_still_once(world, Path(run_dir, REACHED))
        Path(run_dir, WEIGHTS).write_text(json.dumps(model.weight.tolist()))
        return float(model.weight.detach().sum())


def check_alone(folder: Path, rates: Sequence[float], on_one_rank: Callable[[float, str], float]) -> None:
    """Each trial of a sweep of these rates has the value and the bits of a run alone."""
    for number, rate in enumerate(rates):
        alone = folder.with_name(f"alone-{number}")
        assert trial(folder, number)["parameters"] == {"rate": rate}
        assert trial(folder, number)["value"] == on_one_rank(rate, str(alone))
        run = trial_folder(folder, number)
        assert (run / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()


def stand_still_once(world: dl.World, path: Path) -> None:
    """Make a file and wait for a request to stop; do nothing if there is the file."""
    if not path.exists():
        path.touch()
        until(lambda: world.stops.asked is not None, "a request to stop", STANDS_S)
