"""A run and a sweep that a former version began, and the training that continues them.

`former/` beside this file was written by the version of 2026-11-24 (9d1b9b0), with the functions below. Paths
of its machine are replaced by FOLDER and SCRIPT, and the study of the sweep is its dump.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl

HERE = Path(__file__).parent
EPOCHS, STEPS = 3, 4  # steps of an epoch
SPACE = {"rate": {"low": 0.01, "high": 0.1}}
INPUTS = torch.arange(72.0, dtype=torch.float64).reshape(24, 3).sin()
TARGETS = INPUTS.sum(1, keepdim=True).cos()


def train(rate: float, run_dir: str, stop_at: int | None = None, trace: bool = False) -> list[float]:
    """Train a small network, from a checkpoint in the folder if there is one; returns its values in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.25), nn.Linear(4, 1)).double()
    with suppress(dl.Stopped), dl.join_world(device="cpu", seed=5) as world:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        notes: dict[str, Any] = {"losses": []}
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "notes": notes}
        batches = dl.Batches((INPUTS, TARGETS), 6, world, shards=2)
        options: dict[str, Any] = {
            "config": {"rate": rate},
            "save_every": 3,
            "keep_last": 1,
            "trace": trace,
            "progress": False,
        }
        loop = dl.Loop(batches, EPOCHS, state=state, run_dir=run_dir, **options)
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, targets in step:
                    step.backward(mse_loss(model(inputs), targets))
                notes["losses"].append(float(step.fold().loss))
                optimizer.step()
                if step.iteration == stop_at:
                    loop.stop()
            schedule.step()
            loop.log(rate=optimizer.param_groups[0]["lr"])
            loop.save(
                dl.evaluate(model, dl.Batches((INPUTS, TARGETS), 24, world, shuffle=False), loss=mse_loss)["loss"]
            )
    values = [*model.parameters(), *(one.double() for one in model.buffers())]
    return [*notes["losses"], *(number for one in values for number in one.detach().flatten().tolist())]


def former_run(folder: Path) -> Path:
    """A copy of the run, which was stopped after step 7 of 12."""
    return shutil.copytree(HERE / "former" / "run", folder / "run")


def former_sweep(folder: Path) -> Path:
    """A copy of the sweep, with one trial of a random search."""
    path = shutil.copytree(HERE / "former" / "sweep", folder / "sweep")
    for file in (path / "sweep.json", path / "study.sql"):
        file.write_text(file.read_text().replace("SCRIPT", __file__).replace("FOLDER", str(folder)))
    with closing(sqlite3.connect(path / "study.db")) as study:
        study.executescript((path / "study.sql").read_text())
    return path
