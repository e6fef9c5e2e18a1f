"""A small trained run, whose weights are taken out of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from tests.support.runs import go_by_epochs

State = dict[str, torch.Tensor]
NAMES = [f"step-{iteration:08d}" for iteration in (3, 6, 9, 12)]  # the checkpoints of `train_run`, one for each epoch


class Tied(nn.Module):
    """A network with two names for one tensor, batch norm, and a buffer of whole numbers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(rows)).relu())
        return out


def rows(width: int = 4) -> torch.Tensor:
    return torch.randn(24, width, generator=torch.Generator().manual_seed(5))


def train_run(
    folder: Path | str, epochs: int = 4, scores: tuple[float, ...] = (3.0, 1.0, 2.0, 4.0), *,
    model: nn.Module | None = None, compiled: bool = False, keep_last: int = 9, **keywords: Any,
) -> list[State]:  # fmt: skip
    """Train, with a score for each epoch; returns the model's state after each epoch."""
    with dl.join_world(seed=3) as world:
        model = model or Tied()
        used = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        state: dict[str, object] = {"model": used, "optimizer": optimizer, "schedule": schedule, "notes": {"rows": 0}}
        kept = []
        data = dl.Batches(rows(), 8, world, shards=2)
        loop = dl.Loop(data, epochs, state=state, run_dir=folder, progress=False, keep_last=keep_last, **keywords)

        def keep() -> None:
            kept.append({name: one.clone() for name, one in model.state_dict().items()})
            if scores:
                loop.save(scores[loop.iteration // 3 - 1])

        go_by_epochs(loop, model, optimizer, after_epoch=keep)
        return kept


def flip_tensors(checkpoint: Path) -> None:
    """Flip a bit in the last byte of a checkpoint's tensors."""
    file = checkpoint / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
