"""A small training job that records where it is at every moment; the faults of this folder happen to it.

    torchrun --nproc_per_node=4 tests/faults/job.py RUN MARKS

Each rank keeps a file in MARKS, mapped into memory, with its process, its stage and its iteration, so that whoever
disturbs it can choose the moment; and so that after a SIGKILL the file says where it hit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.determinism import digest, leaves
from tests.support.updates import Momentum

STAGES = ("", "start", "data", "forward", "backward", "fold", "optimizer", "save", "evaluate", "rows")
FINAL = "final.json"
SHARDS, CLASSES, SIDE = 12, 4, 6
_PLACES = ("process", "attempt", "first", "iteration", "stage", "asked", "ended")
_DWELL_S = 0.0007  # in each shard's forward and backward; each sample takes half
SLOW = "slow"  # while this file is in the folder of the marks, each step takes longer
_SLOW_STEP_S = 0.5
_SLOW_S = 0.03  # one rank in turn, in one stage in turn: the others wait for it in the fold


class Mark:
    """The state of a rank: integers, each written atomically.

    Attributes, as items:
        process: its id.
        attempt: which start of the job it is of.
        first, iteration: the first one of this process, and the one at hand.
        stage: its place in `STAGES`.
        asked: set from outside: this rank's script calls `loop.stop()`.
        ended: 1 when its loop was left cleanly.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank-{rank}"
        if not path.exists():
            path.write_bytes(bytes(8 * len(_PLACES)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, name: str) -> int:
        found: int = struct.unpack_from("q", self._map, 8 * _PLACES.index(name))[0]
        return found

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._map, 8 * _PLACES.index(name), value)

    @property
    def at(self) -> str:
        """The stage's name."""
        return STAGES[self["stage"]]

    def clear(self) -> None:
        """Forget all places."""
        for name in _PLACES:
            self[name] = 0


class MarkedWorld(dl.World):
    """A world that marks each change of its stage."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "stage":
            self.mark["stage"] = STAGES.index(value) if value in STAGES else 0

    mark: Mark


@dataclass
class Dwell:
    """Makes a rank slow in one stage: a little always, more when it is its turn."""

    world: dl.World
    step: int = 0

    def __call__(self, stage: str, seconds: float) -> None:
        """Be slow."""
        turn, place = self.step % self.world.size, self.step // self.world.size % 4
        slow = turn == self.world.rank and stage == ("data", "forward", "backward", "optimizer")[place]
        time.sleep(seconds + (_SLOW_S * self.world.size / SHARDS if slow else 0.0))


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Noisy pictures of some classes; reading one takes a while."""

    def __init__(self, number: int, dwell_s: float) -> None:
        generator = torch.Generator().manual_seed(4)
        self._forms = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)
        self._number, self._dwell_s = number, dwell_s

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._dwell_s)
        return self._forms[index % CLASSES] + 0.5 * torch.randn(1, SIDE, SIDE), index % CLASSES


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, dwell: Dwell) -> torch.Tensor:
        context.dwell = dwell
        dwell("forward", _DWELL_S)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.dwell("backward", _DWELL_S)
        return gradients[0], None


class Notes:
    """Plain values of the user's; to write them down takes a while."""

    def __init__(self, dwell: Dwell) -> None:
        self._dwell, self.values = dwell, {"drawn": 0.0}

    def state_dict(self) -> dict[str, float]:
        """The values."""
        self._dwell("save", 0.008)
        return dict(self.values)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The values again."""
        self.values = dict(state)


def network() -> nn.Sequential:
    """With batch norm and dropout."""
    body = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(6 * (SIDE - 2) ** 2, CLASSES))


def final_digest(state: dict[str, object]) -> str:
    """The SHA-256 of the digests of everything in the state."""
    lines = []
    for name, value in state.items():
        kept = value.state_dict() if hasattr(value, "state_dict") else value
        lines += [f"{leaf} {digest(one)}" for leaf, one in leaves(name, kept)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def move(updates: Mapping[str, Any]) -> None:
    """Make the step of an optimizer, and of its schedule."""
    for one in updates.values():
        one.step()


@dataclass(frozen=True)
class Job:
    """How the job is made; the same numbers give the same bits.

    Attributes:
        run, marks: folders; `run` may be empty for none.
        epochs: of 10 steps.
        save_every: as in `Loop`.
        workers: of DataLoader.
        evaluate_s: what an evaluation after each epoch takes, about; 0 for none.
        attempt: what the marks shall say; 0 for torchrun's count of restarts, plus 1.
        timeout_s: of the world.
        by_hand: whether it has no optimizer of torch, whose import is nearly half of a start, and no schedule.
    """

    run: str
    marks: str
    epochs: int = 6
    save_every: int = 3
    workers: int = 0
    evaluate_s: float = 0.0
    attempt: int = 0
    timeout_s: float = 60.0
    by_hand: bool = False

    def __call__(self) -> tuple[int, str]:
        """Train; the last iteration and the digest of the state. Every rank must call this."""
        with dl.join_world(seed=5, timeout_s=self.timeout_s) as world:
            mark = Mark(Path(self.marks), world.rank)
            mark.clear()
            mark["attempt"] = self.attempt or 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            mark["process"] = os.getpid()
            world.__dict__["mark"] = mark
            world.__class__ = MarkedWorld
            return self._train(world, mark)

    def _updates(self, model: nn.Module) -> dict[str, Any]:
        """What moves the weights."""
        if self.by_hand:
            return {"optimizer": Momentum(model.parameters(), 0.01)}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)}

    def _train(self, world: dl.World, mark: Mark) -> tuple[int, str]:
        dwell = Dwell(world)
        model = network()
        updates = self._updates(model)
        notes, plain = Notes(dwell), {"steps": 0, "last": [0.0]}
        state: dict[str, object] = {"model": model, **updates, "notes": notes, "plain": plain}
        options: dict[str, Any] = {"num_workers": self.workers} if self.workers else {}
        batches = dl.Batches(Digits(240, _DWELL_S / 2), 24, world, shards=SHARDS, **options)
        test = dl.Batches(Digits(96, self.evaluate_s / 96), 12, world, shards=SHARDS, shuffle=False)
        loop = dl.Loop(
            batches, self.epochs, state=state, run_dir=self.run or None, resume=True if self.run else None,
            save_every=self.save_every, keep_last=2, progress=False
        )  # fmt: skip
        stopped: dl.Stopped | None = None
        for epoch in loop.epochs():
            try:
                for step in epoch:
                    dwell.step = mark["iteration"] = step.iteration
                    mark["first"] = mark["first"] or step.iteration
                    if mark["asked"]:
                        loop.stop()
                    for images, labels in step:
                        values = _SlowBackward.apply(model(images), dwell)  # type: ignore[no-untyped-call]
                        step.backward(cross_entropy(values, labels))
                    row = step.fold()
                    if Path(self.marks, SLOW).exists():
                        time.sleep(_SLOW_STEP_S)
                    dwell("optimizer", 4 * _DWELL_S)
                    move(updates)
                    notes.values["drawn"] += random.random() + np.random.rand() + float(torch.rand(()))
                    plain.update(steps=step.iteration, last=[row.loss.item()])
            except dl.Stopped as error:  # in a loop; in an evaluation there is no result
                stopped = error
                break
            if self.evaluate_s:
                dl.evaluate(model, test, hits=lambda output, labels: output.argmax(1) == labels)
        mark["ended"] = 1
        found = final_digest(state)
        if stopped is not None and stopped.code:
            raise stopped  # to torchrun
        if world.rank == 0 and self.run and stopped is None:
            Path(self.run, FINAL).write_text(json.dumps({"iteration": loop.iteration, "digest": found}))
        return loop.iteration, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("run", "marks"):
        parser.add_argument(name)
    for name in ("epochs", "workers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Job, name))
    for name in ("evaluate_s", "timeout_s"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Job, name))
    parser.add_argument("--by_hand", action="store_true")
    Job(**vars(parser.parse_args()))()
