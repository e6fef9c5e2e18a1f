"""Damage a file of a run folder, many times, and resume: is anything wrong taken?   python -m tests.faults.damage_run

A bit is flipped, a digit replaced, a line removed or a file cut short, in each file in turn. The resumed run must end
with the weights and rows of the undisturbed one, or refuse to start, or name the file in what it prints.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.runs import lines_of

ROWS = "rows.jsonl"
TIMES = frozenset({"elapsed_s", "began"})
FILES = (ROWS, "evaluations.jsonl", "logged.jsonl", "run.json", "checkpoints")  # what a resumed run reads


def train(folder: Path, stop_at: int = 0) -> tuple[str, str]:
    """What was printed, and a digest of the weights."""
    said = io.StringIO()
    with redirect_stdout(said), dl.join_world(seed=0, device="cpu") as world:
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = torch.randn(48, 3, generator=torch.Generator().manual_seed(2)).double()
        state = {"model": model, "optimizer": optimizer}
        batches = dl.Batches(data, 4, world, shards=2)
        with suppress(dl.Stopped):
            for step in (loop := dl.Loop(batches, 1, state=state, run_dir=folder, save_every=3, progress=False)):
                for rows in step:
                    step.backward(model(rows).square().mean())
                step.fold()
                optimizer.step()
                loop.log(twice=2 * step.iteration)
                if step.iteration % 2 == 0:
                    dl.evaluate(model, dl.Batches(data, 8, world), mean=lambda output, rows: output.squeeze(1))
                if step.iteration == stop_at:
                    loop.stop()
    return said.getvalue(), digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


def flip(data: bytes, chance: random.Random) -> bytes:
    """One bit."""
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def other_digit(data: bytes, chance: random.Random) -> bytes:
    """A digit replaced by another one."""
    places = [one.start() for one in re.finditer(rb"[0-9]", data)]
    if not places:
        return flip(data, chance)
    place = chance.choice(places)
    return data[:place] + str((data[place] - 48 + chance.randrange(1, 10)) % 10).encode() + data[place + 1 :]


def without_a_line(data: bytes, chance: random.Random) -> bytes:
    """A line removed."""
    lines = data.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def cut(data: bytes, chance: random.Random) -> bytes:
    """The end removed."""
    return data[: chance.randrange(len(data))]


KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (other_digit, flip, without_a_line, cut)


def told(run: Path) -> list[list[dict[str, Any]]]:
    """What the run's files say, without times."""
    files = [run / name for name in (ROWS, "evaluations.jsonl", "logged.jsonl")]
    return [
        [{key: one for key, one in row.items() if key not in TIMES} for row in lines_of(file)] if file.exists() else []
        for file in files
    ]


def resumed(run: Path, path: Path, expected: tuple[str, list[list[dict[str, Any]]]]) -> str:
    """Whether a damage was "seen", harmless ("same") or "taken"."""
    try:
        said, weights = train(run)
        found = weights, told(run)
    except Exception:  # of many types
        return "seen"
    names = {path.name, path.parent.name, path.parent.parent.name} & set(re.findall(r"[\w.-]+", said))
    if names - {run.name}:
        return "seen" if weights == expected[0] else "taken"
    return "same" if found == expected else "taken"


def damage_runs(folder: Path, damages: int, chance: random.Random) -> dict[str, Counter[str]]:
    """For each kind of file how many damages were seen, harmless, and taken."""
    _, weights = train(folder / "whole")
    expected = weights, told(folder / "whole")
    train(folder / "left", 7)
    paths = [one.relative_to(folder / "left") for one in sorted((folder / "left").rglob("*")) if one.is_file()]
    paths = [one for one in paths if one.parts[0] in FILES]
    counts: dict[str, Counter[str]] = {}
    for number in range(damages):
        path = paths[number % len(paths)]
        run = Path(shutil.copytree(folder / "left", folder / "damaged"))
        data = (run / path).read_bytes()
        kind = KINDS[number // len(paths) % len(KINDS)]
        (run / path).write_bytes(kind(data, chance))
        outcome = resumed(run, run / path, expected)
        counts.setdefault(path.name, Counter())[outcome] += 1
        shutil.rmtree(run)
    return counts


def main() -> int:
    """Print the report; 1 if something wrong was taken."""
    parser = argparse.ArgumentParser(description="damage the files of a run folder")
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        counts = damage_runs(Path(place), said.damages, random.Random(said.seed))
    print(f"`python -m tests.faults.damage_run {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}\n")
    print("| file | damages | seen | harmless | taken |\n|---|--:|--:|--:|--:|")
    for name, one in counts.items():
        print(f"| {name} | {one.total()} | {one['seen']} | {one['same']} | {one['taken']} |")
    print(f"\ntaken: {sum(one['taken'] for one in counts.values())} of {said.damages}")
    return int(any(one["taken"] for one in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
