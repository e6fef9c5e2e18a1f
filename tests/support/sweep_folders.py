"""Folders of sweeps for the page to show, without any training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from tests.support.serving import row, write_run

FAILED = ("failed", "killed", "not finite", "timed out")


def write_trial(sweep: Path, number: int, parameters: dict[str, Any], status: str = "done", **facts: Any) -> Path:
    """Add a trial's folder to a sweep, with a short run unless the trial waits."""
    folder = sweep / "trials" / f"{number:04d}"
    rows = facts.pop("rows", [row(1, accuracy=0.5)])
    if status == "waiting":
        folder.mkdir(parents=True)
    else:
        of = {"pruned": "stopped", "running": "done"}.get(status, status if status in ("done", "stopped") else "failed")
        write_run(folder, rows, status=of, iteration=len(rows), steps=10)
    trial = {"trial": number, "parameters": parameters, "status": status, "value": None, "why": None}
    trial |= {"objective": "loss", "direction": "minimize", "ranks": 1, "seed": 0, "attempts": []}
    (folder / "trial.json").write_text(json.dumps(trial | facts))
    return folder


def write_sweep(folder: Path, trials: int, *, statuses: dict[int, str] | None = None) -> Path:
    """A sweep of a rate, a momentum, a width and an activation, whose losses follow from these."""
    folder.mkdir(parents=True)
    facts = {"name": folder.name, "sampler": "random", "pruner": None, "ranks": 1, "objective": "loss"}
    (folder / "sweep.json").write_text(json.dumps(facts | {"direction": "minimize", "trials": trials, "seed": 0}))
    draw = random.Random(5)
    for number in range(trials):
        rate, momentum = 10 ** draw.uniform(-3, 0), draw.choice([0.0, 0.5, 0.9])
        width, activation = draw.choice([16, 32, 64, 128]), draw.choice(["relu", "tanh", "gelu"])
        loss = 0.05 + 0.1 * (math.log10(rate) + 1.2) ** 2 + 0.05 * (1 - momentum) + 2 / width + draw.uniform(0, 0.03)
        accuracy = max(0.1, 1 - loss / 2)
        status = (statuses or {}).get(number, "done")
        parameters = {"rate": round(rate, 6), "momentum": momentum, "width": width, "activation": activation}
        rows = [row(k, loss=loss * (1 + 3 / k), accuracy=accuracy * (1 - 0.5 / k)) for k in (1, 2, 5)]
        rows.append(row(10, loss=loss, accuracy=accuracy) | {"elapsed_s": 20 + width})
        if status in FAILED:
            rows = rows[:2]
        why = f"made up: {status}" if status in FAILED else None
        value = loss if status == "done" else None
        run = write_trial(folder, number, parameters, status, value=value, why=why, rows=rows)
        if status == "done" and number < 5:
            write_confusion(run, random.Random(number))
    return folder


def write_confusion(run: Path, draw: random.Random) -> None:
    """Add a confusion matrix to a run."""
    labels = [str(k) for k in range(10)]
    usual = [0, 0, 0, 1, 4]
    counts = [[draw.randint(85, 100) if k == j else draw.choice(usual) for k in range(10)] for j in range(10)]
    (run / "tables").mkdir()
    table = {"name": "confusion", "rows": labels, "columns": labels, "values": counts, "iteration": 10, "at": 1.0}
    (run / "tables" / "confusion.json").write_text(json.dumps(table))
