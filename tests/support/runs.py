"""Runs for the tests of how they stop and go on, and what is read of one and of its folder."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import STOP
from ddp_loop.determinism import digest, leaves
from tests.support.harness import MOMENT_S, until

STATUS, ROWS = "status.json", "rows.jsonl"
ASKED_S = MOMENT_S  # a watcher looks every 0.25 s
LONG_S = 30.0


def go_by_epochs(
    loop: dl.Loop, model: nn.Module, optimizer: torch.optim.Optimizer, stop_at: int | None = None, *,
    after_step: Callable[[int], None] = lambda iteration: None, after_epoch: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Train the remaining epochs on a mean square, until a stop, with a call after each step and each epoch."""
    with suppress(dl.Stopped):
        for epoch in loop.epochs():
            for step in epoch:
                for rows in step:
                    step.backward(model(rows).square().mean())
                if step.iteration == stop_at:
                    loop.stop()
                step.fold()
                optimizer.step()
                after_step(step.iteration)
            after_epoch()


def log_everything(folder: str, sinks: Any, stop_at: int = 0, second: str = "second", **options: Any) -> None:
    """A run of 3 epochs of 3 steps with evaluations, logged values, texts, images and tables, on a rank."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(20, 2, generator=torch.Generator().manual_seed(3))
        options |= {"run_dir": f"{folder}/run", "on_row": sinks, "progress": False}
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(dl.Batches(data, 7, world), 3, state=state, **options)

        def evaluate(metric: str) -> None:
            held_out = dl.Batches(data, 10, world, shuffle=False)
            dl.evaluate(model, held_out, **{metric: lambda output, rows: output.squeeze(1)})  # type: ignore[arg-type]

        def log_an_epoch() -> None:
            number = loop.iteration // 3
            evaluate("size")
            loop.log(score=number)
            loop.log_text("words/a", f"epoch {number}")
            loop.log_image("picture", torch.rand(3, 4, 5))
            loop.log_table("counts", [[1, number]], rows=["a|b"])

        def log_a_step(iteration: int) -> None:
            loop.log({second: iteration / 2})

        go_by_epochs(loop, model, optimizer, stop_at, after_step=log_a_step, after_epoch=log_an_epoch)
        if not loop.stopped:
            evaluate("after")


def endless(world: dl.World, **keywords: Any) -> tuple[dl.Loop, Callable[..., None]]:
    """A loop of many steps, and what makes one."""
    model = nn.Linear(3, 1)
    loop = dl.Loop(dl.Batches(torch.ones(8, 3), 4, world), 10**6, state={"m": model}, progress=False, **keywords)

    def make(step: dl.Step, forward: Callable[[], None] = lambda: None) -> None:
        for rows in step:
            forward()
            step.backward(model(rows).mean())
        step.fold()

    return loop, make


def ask(kind: str, folder: str, loop: dl.Loop) -> None:
    """Ask for a stop, and wait until this rank has received the request."""
    world = loop.world
    match kind:
        case "call":
            loop.stop()
            return
        case "file":
            Path(folder, STOP).touch()
        case "all processes of rank 0":  # as torchrun does it: workers too
            os.killpg(world.__dict__["process_of_rank_0"], signal.SIGTERM)
        case _:
            for _ in range(2):  # a terminal and a launcher both pass it on
                os.kill(os.getpid(), getattr(signal, kind))
    until(lambda: world.stops.asked is not None, "the request is heard", ASKED_S)


def digests(state: dict[str, object]) -> dict[str, str]:
    """A digest of everything in a job's state, by name."""
    found: dict[str, str] = {}
    for name, value in state.items():
        kept = value.state_dict() if hasattr(value, "state_dict") else value
        found.update({leaf: digest(one) for leaf, one in leaves(name, kept)})
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(folder: Path) -> list[int]:
    text = (folder / ROWS).read_text()
    assert text.endswith("\n")
    return [json.loads(line)["iteration"] for line in text.splitlines()]


def status_of(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / STATUS).read_text())
    return said


def checkpoints_of(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))
