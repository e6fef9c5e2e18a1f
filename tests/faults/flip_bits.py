"""Flip one bit of a checkpoint, or cut a file short, many times: is it seen?   python -m tests.faults.flip_bits

The flips and cuts go over the three files in turn. Each must be refused with its file named, and the checkpoint before
it used. The control flips bits of the same state as torch.save and safetensors write it: most are read without a word.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from ddp_loop.checkpoint import CheckpointStore
from ddp_loop.checkpoint.serialization import to_tree
from ddp_loop.checkpoint.storage import MANIFEST, STATE, TENSORS

State = dict[str, torch.Tensor]
Damage = Callable[[Path, random.Random], AbstractContextManager[None]]


@contextmanager
def flipped(path: Path, chance: random.Random) -> Iterator[None]:
    """One bit of a file flipped, for a while."""
    place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
    for _ in range(2):
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ bit]))
        if _ == 0:
            yield


@contextmanager
def cut(path: Path, chance: random.Random) -> Iterator[None]:
    """A file without its end, for a while."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])
    yield
    path.write_bytes(data)


def flip_checkpoints(
    folder: Path, state: State, flips: int, chance: random.Random, damaged: Damage = flipped
) -> dict[str, Counter[str]]:
    """For each file how many flips were seen, and how many not."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"id": "flipped"}))
    checkpoints = CheckpointStore(folder, "flipped")
    for iteration in (1, 2):
        path = checkpoints.write(to_tree({"state": state, "n": 1}), iteration=iteration, facts={"a": 1}, score=0.5)
    counts: dict[str, Counter[str]] = {name: Counter() for name in (TENSORS, STATE, MANIFEST)}
    for number in range(flips):
        name = (TENSORS, STATE, MANIFEST)[number % 3]
        with damaged(path / name, chance):
            found = checkpoints.newest()
            seen = (
                found is not None
                and found.iteration == 1
                and [one.path for one in checkpoints.refused] == [path / name]
            )
        counts[name]["seen" if seen else "not seen"] += 1
    found = checkpoints.newest()
    if found is None or found.iteration != 2:
        raise RuntimeError("after the last flip was undone the checkpoint must be readable; it is not")
    return counts


def flip_file(
    path: Path, load: Callable[[Path], State], state: State, flips: int, chance: random.Random
) -> Counter[str]:
    """How many flips an ordinary file's reader sees."""
    counts: Counter[str] = Counter()
    for _ in range(flips):
        with flipped(path, chance):
            try:
                found = load(path)
                same = list(found) == list(state) and all(
                    torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)) for name, one in state.items()
                )
                counts["same numbers" if same else "not seen"] += 1
            except Exception:  # of many types
                counts["seen"] += 1
    return counts


def main() -> int:
    """Print the report; 1 if a flip was not seen."""
    from safetensors.torch import load_file, save_file

    parser = argparse.ArgumentParser(description="flip single bits")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(said.seed)
    chance = random.Random(said.seed)
    state = {name: torch.randn(128, 128) for name in ("a", "b", "c")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        own = flip_checkpoints(folder / "flipped", state, said.flips, chance)
        short = flip_checkpoints(folder / "cut", state, said.cuts, chance, cut)
        torch.save(state, folder / "state.pt")
        plain = flip_file(
            folder / "state.pt", lambda path: torch.load(path, weights_only=True), state, said.flips, chance
        )
        save_file(state, folder / "state.safetensors")
        bare = flip_file(folder / "state.safetensors", lambda path: load_file(path), state, said.flips, chance)
    print(f"`python -m tests.faults.flip_bits {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}\n")  # fmt: skip
    print("| file | flips or cuts | detected | undetected, other numbers | undetected, same numbers |")
    print("|---|--:|--:|--:|--:|")
    rows = {
        **own,
        **{f"{name}, cut short": one for name, one in short.items()},
        "torch.save, torch.load(weights_only=True)": plain,
        "safetensors alone": bare,
    }
    for name, one in rows.items():
        print(f"| {name} | {one.total()} | {one['seen']} | {one['not seen']} | {one['same numbers']} |")
    return int(any(one["not seen"] for one in (*own.values(), *short.values())))


if __name__ == "__main__":
    sys.exit(main())
