"""Asking that every rank refuses a scenario, with one clear error; and the small job that scenarios are made of.

Every rank raises the error, or PeerFailed with its words, before the timeout of its world; and the run folder holds
whole lines only. On an idle machine `FAULT_S=3 python -m pytest ...` holds the tests to the promise of 3 s too.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.harness import OnRanks

TIMEOUT_S = 60.0  # of the worlds here: what hangs in spite of all ends in a failed test, not in a stuck one
WAIT_S = 10.0  # the timeout of worlds in which a rank waits for it
MOST_S = float(os.environ.get("FAULT_S", TIMEOUT_S))  # a rank that ends later has waited for the timeout
BOUND = 1e-12
ALL = -1  # every rank does it

Scenario = Callable[..., Any]


@dataclass(frozen=True)
class Caught:
    """What a rank raised, with its notes, and after how many seconds."""

    kind: str
    text: str
    took_s: float


def on_this_rank(
    scenario: Scenario, folder: str, arguments: tuple[Any, ...], warm: bool = True, timeout_s: float = TIMEOUT_S
) -> Caught:
    if warm:
        torch.optim.SGD([nn.Parameter(torch.ones(()))])  # a process's first imports torch._dynamo, for 3 s
    began = time.monotonic()
    try:
        with dl.join_world(timeout_s=timeout_s) as world:
            scenario(world, folder, *arguments)
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return Caught(type(error).__name__, text, time.monotonic() - began)
    return Caught("", "", time.monotonic() - began)


class Refused:
    """Runs a scenario on ranks and asks that all of them refuse it."""

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self._folder = on_ranks, folder

    def __call__(
        self,
        ranks: int,
        scenario: Scenario,
        *arguments: Any,
        kind: str,
        said: str,
        by: int | None = ALL,
        waits: bool = False,
    ) -> list[Caught]:
        """Run it.

        Args:
            ranks, scenario, arguments: what runs.
            kind: of the error, or `one|another`.
            said: a pattern that each error has.
            by: the rank that raises it; by default all do; None for some.
            waits: whether a rank may wait for the timeout.
        """
        timeout_s = WAIT_S if waits else TIMEOUT_S
        results = self._on_ranks(ranks, on_this_rank, scenario, str(self._folder), arguments, True, timeout_s)
        for rank, result in enumerate(results):
            own, peer = kind.split("|"), ["PeerFailed"]
            allowed = own if by in (ALL, rank) else peer if by is not None else own + peer
            assert result.kind in allowed, f"rank {rank}: {result}"
            assert re.search(said, result.text, re.DOTALL), f"rank {rank}: {result.text}"
            assert waits or result.took_s < MOST_S, f"rank {rank} waited for the timeout: {result}"
        assert {result.kind for result in results} & set(kind.split("|"))
        assert_whole_lines(self._folder)
        return results


def assert_whole_lines(folder: Path) -> None:
    path = folder / "rows.jsonl"
    if path.is_file() and (text := path.read_text()):
        assert text.endswith("\n")
        for number, line in enumerate(text.splitlines(), 1):
            assert json.loads(line)["iteration"] == number


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def network_by_columns() -> nn.Sequential:
    """With a weight in another memory format, as by channels_last."""
    model = network()
    weight = next(model.parameters())
    weight.data = weight.detach().t().contiguous().t()
    return model


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def loop_over(
    world: dl.World, folder: str | None, model: nn.Module, *more: object, count: int = 24, shards: int | None = None,
    shares: Any = None, **keywords: Any,
) -> dl.Loop:  # fmt: skip
    """4 steps of 6 samples; without a folder no run is kept."""
    batches = dl.Batches(samples(count), 6, world, shards=shards, shares=shares, shuffle=False)
    state = {"model": model, **{f"other {number}": one for number, one in enumerate(more)}}
    keywords = {"epochs": 1, "progress": False, "run_dir": folder or None, **keywords}
    return dl.Loop(batches, state=state, **keywords)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(rows), rows.sum(1, keepdim=True))


def mean_of(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return output.mean()


def does_it(world: dl.World, culprit: int) -> bool:
    return culprit in (ALL, world.rank)
