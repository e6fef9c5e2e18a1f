"""Trials for the tests of sweeps, and readers of their results. New processes import this module."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import CHECKPOINTS, read_json
from ddp_loop.determinism import digest, leaves
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.updates import Momentum

INTERVALS, UPDATES, FINAL, BEGAN = "intervals.jsonl", "updates.txt", "final.json", "began"
MARK = "DDP_LOOP_SWEEP_TEST"  # in the environment of a sweep's processes: identifies those that are left


def train(
    rate: float,
    width: int = 3,
    *,
    run_dir: str,
    steps: int = 4,
    fault: str = "",
    save_every: int = 2,
    first_two: str = "",
) -> float | None:
    """A small network, down a mean square. Rank 0 notes when it ran, each update, and the digest of what came out.

    Args:
        rate, width: the parameters.
        run_dir: of the trial.
        steps: updates.
        fault: what happens at step 3, unless the file `healed` is two folders above.
        save_every: as in `Loop`.
        first_two: how the first two trials run: "together", or "reversed", the second one first.
    """
    began = time.monotonic()
    folder = Path(run_dir)
    _await(first_two, folder)
    with dl.join_world(seed=7) as world:
        inputs = torch.randn(24, width, generator=torch.Generator().manual_seed(1))
        model = nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = Momentum(model.parameters(), rate)
        batches = dl.Batches(inputs, 6, world, shards=2)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(
            batches, steps=steps, state=state, run_dir=run_dir, save_every=save_every, keep_last=2, progress=False
        )
        with suppress(dl.Stopped):
            for step in loop:
                for rows in step:
                    step.backward(model(rows).square().mean())
                step.fold()
                optimizer.step()
                if world.rank == 0:
                    _append(folder / UPDATES, f"{step.iteration}\n")
                if step.iteration == 3 and not (folder.parents[1] / "healed").exists():
                    _fail(fault, folder, world)
        found = [f"{leaf} {digest(one)}" for leaf, one in leaves("model", model.state_dict())]
        if world.rank == 0 and loop.iteration == steps:
            (folder / FINAL).write_text(json.dumps(found))
    if os.environ["RANK"] == "0":
        interval = {"began": began, "ended": time.monotonic(), "ranks": int(os.environ["WORLD_SIZE"])}
        _append(folder / INTERVALS, json.dumps(interval) + "\n")
    return float("nan") if fault == "returns NaN" else None


def _await(first_two: str, folder: Path) -> None:
    if first_two == "together" and folder.name in ("0000", "0001"):
        (folder / BEGAN).touch()
        until(lambda: all((folder.with_name(name) / BEGAN).exists() for name in ("0000", "0001")), "the other trial")
    if first_two == "reversed" and folder.name == "0000":
        until(lambda: trial(folder.parents[1], 1).get("status") == "done", "the end of the second trial")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _fail(fault: str, folder: Path, world: dl.World) -> None:
    if fault == "stands still":
        until(lambda: world.stops.asked is not None, "a request to stop")
    if fault == "raises":
        raise ValueError("the data is wrong")
    if fault == "is killed":
        until(lambda: newest_checkpoint(folder) > 0, "the checkpoint, which a thread writes")
        os.kill(os.getpid(), 9)
    if fault == "raises for NaN":
        raise FloatingPointError("the loss is nan")
    while fault == "never ends":  # ignores requests to stop
        pass


def faulty(rate: float, fault: str, run_dir: str, steps: int = 6) -> float | None:
    """`train`, whose fault is a parameter."""
    return train(rate, run_dir=run_dir, fault=fault, steps=steps)


def trivial(x: int, run_dir: str) -> float:
    """No training at all."""
    return float(x)


def writes(x: float, run_dir: str) -> None:
    """A training loss of 5, and an evaluated one of x if that is positive."""
    _append(Path(run_dir) / "rows.jsonl", '{"iteration": 1, "loss": 5.0}\n')
    if x > 0:
        _append(Path(run_dir) / "evaluations.jsonl", json.dumps({"iteration": 1, "loss": x}) + "\n")


def named(x: int, run_dir: str) -> dict[str, float]:
    """Several numbers by name."""
    return {"accuracy": float(x), "losses": 1.0}


# -- what is left ------------------------------------------------------------------------------------------


def intervals(folder: Path) -> list[tuple[float, float]]:
    """When the trials of a sweep ran."""
    lines = [line for path in folder.glob(f"trials/*/{INTERVALS}") for line in path.read_text().splitlines()]
    return sorted((one["began"], one["ended"]) for one in map(json.loads, lines))


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """The largest number of trials that ran at the same time."""
    return max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans)


def final(run: Path) -> list[str]:
    """The digests of the parameters that a run ended with."""
    found: list[str] = json.loads((run / FINAL).read_text())
    return found


def updates(run: Path) -> list[int]:
    """The updates that a run made, also those that were repeated after a kill."""
    return [int(line) for line in (run / UPDATES).read_text().split()] if (run / UPDATES).exists() else []


def newest_checkpoint(run: Path) -> int:
    """The update of a run's newest whole checkpoint; 0 without one."""
    return max((int(path.name.rpartition("-")[2]) for path in (run / CHECKPOINTS).glob("step-*")), default=0)


def trial(folder: Path, number: int) -> dict[str, Any]:
    """trial.json of a trial."""
    return read_json(folder / "trials" / f"{number:04d}" / "trial.json")


def marked(mark: str) -> Iterator[int]:
    """The processes that have a mark in their environment, and have not ended."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                yield int(path.name)


@contextmanager
def sweeping(mark: str, *words: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process of `python -m ddp_loop sweep` on one slot; it and its ranks have the mark, and are killed at the end.

    Args:
        mark: of the processes.
        words: of its command line.
        inside: a command that runs the rest of its command line.
    """
    command = [*inside, sys.executable, "-m", "ddp_loop", "sweep", *words, "--slots=1"]
    environment = {**os.environ, MARK: mark}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as one:
        try:
            yield one
        finally:
            for process in marked(mark):
                os.kill(process, signal.SIGKILL)


def all_ended(mark: str) -> None:
    """Wait until no process has the mark."""
    until(lambda: not list(marked(mark)), f"an end of the processes marked {mark}")


def toml(path: Path, **facts: Any) -> Path:
    """Write the TOML file of a sweep."""
    space = facts.pop("space")
    lines = [f"{name} = {_toml(value)}" for name, value in facts.items()]
    path.write_text("\n".join([*lines, "[space]", *(f"{name} = {_toml(value)}" for name, value in space.items())]))
    return path


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)
