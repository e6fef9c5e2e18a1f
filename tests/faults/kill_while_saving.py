"""Kill a process at random moments of a save: what is left?   python -m tests.faults.kill_while_saving --times 200

A child saves again and again, and acknowledges each save over a pipe when `write` has returned. It is killed (SIGKILL),
and then each acknowledged checkpoint that is kept must be readable with the numbers that were saved, and the newest
must not be older than the last acknowledged. The control does the same with torch.save: over one file, and over two in
turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddp_loop.checkpoint import CheckpointStore
from ddp_loop.checkpoint.atomic_files import DELETING, SAVING
from ddp_loop.checkpoint.serialization import from_tree, to_tree
from ddp_loop.checkpoint.storage import MANIFEST, STATE, TENSORS

KEEP = 3
TENSORS_OF_STATE = 8


class OwnFormat:
    """ddp_loop's checkpoints."""

    name = "checkpoints"

    def __init__(self, folder: Path) -> None:
        (folder / "run.json").write_text(json.dumps({"id": "killed"}))
        self._checkpoints = CheckpointStore(folder, "killed", keep_last=KEEP)

    def save(self, state: dict[str, torch.Tensor], number: int) -> None:
        """Save, and return when it lasts."""
        self._checkpoints.write(to_tree({"state": state, "number": number}), iteration=number, facts={})

    def found(self) -> dict[int, bool]:
        """For each number that is there whether its state can be read and is right."""
        right = {}
        for entry in self._checkpoints.entries(verify=True):
            right[entry.iteration] = entry.problem is None and is_right(
                from_tree(self._checkpoints.read(entry.path).packed), entry.iteration
            )
        return right

    def expected(self, acknowledged: int, newest: int, first: int) -> set[int]:
        """The acknowledged numbers that must be there."""
        return {number for number in range(newest - KEEP + 1, acknowledged + 1) if number >= first}

    def phase(self, acknowledged: int) -> str:
        """Where the kill hit, from the files on the disk."""
        names = os.listdir(self._checkpoints.folder) if self._checkpoints.folder.is_dir() else []
        if any(name.startswith(DELETING) for name in names):
            return "while an old one was removed"
        for name in names:
            if name.startswith(SAVING):
                there = os.listdir(self._checkpoints.folder / name)
                at = next((file for file in (MANIFEST, STATE, TENSORS) if file in there), "the folder")
                return f"while {at} was written"
        newest = max(self.found(), default=0)
        return "after the rename, not acknowledged" if newest > acknowledged else "between two saves"

    def clean(self) -> None:
        """As at a restart."""
        self._checkpoints.clean()


class TorchSave:
    """torch.save over files in turn; the newer one that can be read counts."""

    def __init__(self, folder: Path, files: int) -> None:
        self._paths = [folder / f"state-{number}.pt" for number in range(files)]
        self.name = "torch.save over one file" if files == 1 else "torch.save over two files in turn"

    def save(self, state: dict[str, torch.Tensor], number: int) -> None:
        """Save as many scripts do."""
        torch.save({"state": state, "number": number}, self._paths[number % len(self._paths)])

    def found(self) -> dict[int, bool]:
        """For each file, by its number, or a negative one where it cannot be read, whether it is right."""
        right = {}
        for place, path in enumerate(self._paths):
            if path.exists():
                try:
                    state = torch.load(path, weights_only=True)
                    right[int(state["number"])] = is_right(state, int(state["number"]))
                except Exception:  # of many types
                    right[-1 - place] = False
        return right

    def expected(self, acknowledged: int, newest: int, first: int) -> set[int]:
        """The last acknowledged number must be there."""
        return {acknowledged} if acknowledged >= first and newest <= acknowledged else set()

    def phase(self, acknowledged: int) -> str:
        """Not told."""
        return ""

    def clean(self) -> None:
        """What cannot be read is removed."""
        for place, path in enumerate(self._paths):
            if -1 - place in self.found():
                path.unlink()


Format = OwnFormat | TorchSave


@dataclass
class Counts:
    """What was seen of a format."""

    name: str
    kills: int = 0
    saves: int = 0
    unreadable: int = 0
    lost: int = 0
    phases: Counter[str] = field(default_factory=Counter)


def is_right(state: dict[str, object], number: int) -> bool:
    """Whether a state has the numbers that were saved."""
    tensors = state["state"]
    if not isinstance(tensors, dict) or state["number"] != number or len(tensors) != TENSORS_OF_STATE:
        return False
    return all(bool(one.eq(number).all()) for one in tensors.values())


def save_again_and_again(form: Format, state: dict[str, torch.Tensor], number: int, pipe: int) -> None:
    """The child's life."""
    while True:
        number += 1
        for one in state.values():
            one.fill_(number)
        form.save(state, number)
        os.write(pipe, struct.pack("q", number))


def killed_after(seconds: float, life: Callable[[int], None]) -> list[int]:
    """Fork a child that lives so, kill it, and return what it acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()  # from a warm process of one thread: a start would take 2 s
    if child == 0:
        try:
            os.close(reading)
            life(writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the child must live until it is killed; it ended by itself")
    return [one for (one,) in struct.iter_unpack("q", data)]


def kill_again_and_again(form: Format, state: dict[str, torch.Tensor], times: int, chance: random.Random) -> Counts:
    """Kill `times` children at random moments of their first saves."""
    counts, newest, first = Counts(form.name), 0, 1
    took = []
    for number in range(1, 6):
        began = time.perf_counter()
        form.save({name: one.fill_(number) for name, one in state.items()}, number)
        took.append(time.perf_counter() - began)
        newest = number
    for _ in range(times):
        start = newest
        acknowledged = killed_after(
            chance.uniform(0, 3 * statistics.median(took)),
            lambda pipe, start=start: save_again_and_again(form, state, start, pipe),  # type: ignore[misc]
        )
        last = max([start, *acknowledged])
        counts.kills += 1
        counts.saves += len(acknowledged)
        counts.phases[form.phase(last)] += 1
        found = form.found()
        newest = max(found, default=0)
        counts.unreadable += sum(not right for right in found.values())
        counts.lost += len({number for number in form.expected(last, newest, first) if not found.get(number)})
        counts.lost += newest < last and not form.expected(last, newest, first)
        form.clean()
        if newest < last:  # a lost one is counted once
            newest = first = last + 1
            form.save({name: one.fill_(newest) for name, one in state.items()}, newest)
    return counts


def main() -> int:
    """Print the report; 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description="kill -9 while saving")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-control", action="store_true")
    said = parser.parse_args()
    torch.set_num_threads(1)
    size = int(said.mib * 2**20 / 4 / TENSORS_OF_STATE)
    state = {f"w{number}": torch.zeros(size) for number in range(TENSORS_OF_STATE)}
    with tempfile.TemporaryDirectory() as folder:
        formats: list[Format] = [OwnFormat(Path(folder))]
        if not said.without_control:
            formats += [TorchSave(Path(folder), 1), TorchSave(Path(folder), 2)]
        every = [kill_again_and_again(form, state, said.times, random.Random(said.seed)) for form in formats]
    print(f"`python -m tests.faults.kill_while_saving {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}, {said.mib:g} MiB\n")  # fmt: skip
    print("| saved as | kills | unreadable | acknowledged lost | saves acknowledged |\n|---|--:|--:|--:|--:|")
    for one in every:
        print(f"| {one.name} | {one.kills} | {one.unreadable} | {one.lost} | {one.saves} |")
    print("\n| the kill hit | times |\n|---|--:|")
    for phase, number in every[0].phases.most_common():
        print(f"| {phase} | {number} |")
    return int(every[0].unreadable + every[0].lost > 0)


if __name__ == "__main__":
    sys.exit(main())
