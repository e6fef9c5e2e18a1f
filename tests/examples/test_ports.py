"""Eight scripts as the field writes them, ported: numbers of one process, equal bits, and the lines that changed.

Numbers: in float64, with the whole data as one mini-batch, so that the order of the samples plays no part. What is left
is the order of the sums (1e-16 of each), which Adam divides by gradients' sizes and feeds back.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.paths import ROOT

Weights = dict[str, torch.Tensor]

# Arguments that make the whole data one mini-batch; the GPT's text has 104 windows to train on.
WHOLE = {
    "imagenet": ("--images", "96", "--batch-size", "96", "--epochs", "4", "--lr", "0.05"),
    "gpt": ("--batch-size", "26", "--accumulation", "4", "--max-iters", "4", "--eval-interval", "2"),
    "dcgan": ("--images", "24", "--batch-size", "24", "--epochs", "3"),
    "vae": ("--images", "24", "--batch-size", "24", "--epochs", "4"),
    "language_model": ("--epochs", "2", "--batch-size", "5"),
    "sine_waves": ("--steps", "3", "--length", "12"),
    "detection": ("--images", "20", "--batch-size", "20", "--epochs", "4"),
    "simclr": ("--images", "24", "--batch-size", "24", "--epochs", "4"),
}
MANY = {
    "imagenet": ("--images", "60", "--batch-size", "24", "--epochs", "2"),
    "gpt": ("--batch-size", "5", "--max-iters", "4", "--eval-interval", "2"),
    "dcgan": ("--images", "40", "--batch-size", "16", "--epochs", "2"),
    "vae": ("--images", "40", "--batch-size", "16", "--epochs", "2"),
    "language_model": ("--epochs", "1", "--batch-size", "7"),
    "sine_waves": ("--steps", "2", "--length", "12"),
    "detection": ("--images", "20", "--batch-size", "8", "--epochs", "2"),
    "simclr": ("--images", "40", "--batch-size", "16", "--epochs", "2"),
}
CHANGED = {  # lines added and removed
    "imagenet": (26, 78),
    "gpt": (15, 17),
    "dcgan": (32, 23),
    "vae": (19, 13),
    "language_model": (28, 41),
    "sine_waves": (13, 9),
    "detection": (20, 18),
    "simclr": (18, 14),
}
BOUND = 1e-9


@contextlib.contextmanager
def on_this_rank(states: list[dict[str, Any]], *, fixed: bool) -> Iterator[None]:
    """Leave worlds at the end, keep the loops' states, and with `fixed` give each mini-batch 6 shards.

    Fixed shards need the local batch norm: the synced one takes a shard per rank.
    """
    join, loop = dl.join_world, dl.Loop

    def joined() -> dl.World:
        return around.enter_context(join())

    def kept(*arguments: Any, **keywords: Any) -> dl.Loop:
        states.append(keywords["state"])
        return loop(*arguments, **keywords)

    with contextlib.ExitStack() as around:
        around.enter_context(mock.patch.object(dl, "join_world", joined))
        around.enter_context(mock.patch.object(dl, "Loop", kept))
        if fixed:
            for name in ("Batches", "SequenceBatches"):
                around.enter_context(mock.patch.object(dl, name, partial(in_six, getattr(dl, name))))
            around.enter_context(mock.patch.object(dl, "sync_batch_norm", lambda model, world: model))
        yield


def in_six(batches: Any, *arguments: Any, **keywords: Any) -> dl.Batches:
    made: dl.Batches = batches(*arguments, **{"shards": 6, **keywords})
    return made


def run_port(side: str, script: str, *runs: tuple[str, ...], fixed: bool = False) -> tuple[str, Weights]:
    """The output of a script on this rank, and the weights it ends with; several runs share their folder."""
    printed, states = io.StringIO(), list[dict[str, Any]]()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.chdir(around.enter_context(tempfile.TemporaryDirectory())))
        around.enter_context(contextlib.redirect_stdout(printed))
        if not fixed:
            around.enter_context(mock.patch.object(torch, "randn_like", noise_of))
        around.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        path = str(ROOT / "examples/migrate" / side / f"{script}.py")
        for arguments in runs:
            with mock.patch.object(sys, "argv", [script, *arguments]), on_this_rank(states, fixed=fixed):
                names = runpy.run_path(path, run_name="__main__")
        assert set(os.listdir()) <= {"runs"}
        if side == "before" and script == "imagenet":
            saved: Weights = torch.load("runs/imagenet/checkpoint.pth")["model"]
            return printed.getvalue(), {f"model.{name}": value for name, value in saved.items()}
    modules = states[-1] if states else {name: names[name] for name in ("model", "netG", "netD") if name in names}
    return printed.getvalue(), {
        f"{part}.{name}": value.clone()
        for part, module in modules.items()
        if isinstance(module, nn.Module)
        for name, value in module.state_dict().items()
    }


def noise_of(values: torch.Tensor) -> torch.Tensor:
    """Noise that belongs to a sample, whichever process draws it."""
    return (1e3 * values.detach()).sin()


def sha256(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def results_in(printed: str) -> list[str]:
    """The lines with results of a whole mini-batch or of a validation, which have no times in them."""
    return [line for line in printed.splitlines() if line.startswith((" *", "step ", "epoch ", "["))]


@pytest.mark.covers("J19")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("script", WHOLE)
def test_a_port_gives_the_numbers_of_one_process(script: str, ranks: int, on_ranks: OnRanks) -> None:
    lines, weights = run_port("before", script, WHOLE[script])
    (printed, got), *others = on_ranks(ranks, run_port, "after", script, WHOLE[script])
    assert len(results_in(lines)) >= 2
    assert results_in(printed) == results_in(lines)
    assert not any(printed for printed, _ in others)
    assert got.keys() == weights.keys()
    assert max(float((got[name] - weights[name]).abs().max()) for name in weights) < BOUND


@pytest.mark.covers("J19")
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=[pytest.mark.slow] if number else []) for number, one in enumerate(MANY)]
)
def test_a_port_gives_the_same_bits_on_1_2_and_3_ranks(script: str, on_ranks: OnRanks) -> None:
    found = [on_ranks(ranks, run_port, "after", script, MANY[script], fixed=True) for ranks in (1, 2, 3)]
    assert len({sha256(weights) for results in found for _, weights in results}) == 1


@pytest.mark.covers("J19")
@pytest.mark.slow
def test_the_port_of_imagenet_resumes_where_it_ended(on_ranks: OnRanks) -> None:
    first, whole = (("--images", "60", "--batch-size", "24", "--epochs", epochs) for epochs in ("2", "4"))
    (_, resumed), _ = on_ranks(2, run_port, "after", "imagenet", first, whole, fixed=True)
    (_, at_once), _ = on_ranks(2, run_port, "after", "imagenet", whole, fixed=True)
    assert sha256(resumed) == sha256(at_once)


@pytest.mark.parametrize("script", CHANGED)
def test_so_many_lines_change(script: str) -> None:
    paths = [f"examples/migrate/{side}/{script}.py" for side in ("before", "after")]
    command = ["git", "diff", "--no-index", "--numstat", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    added, removed, _ = done.stdout.split(maxsplit=2)
    assert (int(added), int(removed)) == CHANGED[script]
    row = f"| `{script}.py` | {added} | {removed} |"
    assert row in (ROOT / "docs/migrate.md").read_text()
