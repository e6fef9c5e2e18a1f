"""Traces read again, and where two of them part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Of a step, in this order; `start` is that of step 0. See [Note: Stages].
STAGES = ("start", "data", "forward", "backward", "fold", "optimizer")
VERSION = 1
TRACE = "trace"  # in a run folder
EVALUATIONS = "evaluations.jsonl"  # of rank 0, where a watch keeps values

# What it means that a stage has the first difference, everything before it being the same.
MEANING = {
    "start": "the values that the job starts from differ",
    "data": "the mini-batches' samples, or what was made of them, differ",
    "forward": "from the same data, parameters and buffers another loss came: random numbers, or something else that "
    "is not in the state, went into it",
    "backward": "from the same losses other gradients came: the backward does not give the same bits twice, or "
    "gradients were changed in it",
    "fold": "the same shards were folded to something else: in another order, with other rules, or to other buffers",
    "optimizer": "from the same gradients another state came: what stands between the fold and the end of the step "
    "differs",
}

Entries = dict[tuple[str, str], str]
Values = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """A run's trace.

    Attributes:
        folder: where it was read.
        head: of rank 0: ranks, shards, tensors and so on.
        steps: for each rank, by step: (stage, name) to digest, in the order of the stages.
    """

    folder: Path
    head: Mapping[str, Any]
    steps: list[dict[int, Entries]]

    @property
    def numbers(self) -> list[int]:
        """The steps that all ranks wrote."""
        return [number for number in self.steps[0] if all(number in rank for rank in self.steps)]

    def values(self, step: int) -> Values:
        """What is of the whole mini-batch itself, by stage and name, where a watch kept it."""
        return {
            (key.partition(": ")[0], key.partition(": ")[2]): value
            for key, value in _load(self.folder / f"step-{step}.safetensors").items()
        }

    def of_shards(self, step: int) -> dict[str, torch.Tensor]:
        """What a watch kept of all ranks' shards, by `stage: name`."""
        kept: dict[str, torch.Tensor] = {}
        for rank in range(len(self.steps)):
            kept.update(_load(self.folder / f"shards-{rank}-{step}.safetensors"))
        return kept

    def evaluations(self) -> list[dict[str, float]]:
        """The results of `dl.evaluate`, in order, where a watch kept them."""
        path = self.folder / EVALUATIONS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def whole(self, step: int) -> Entries:
        """What all ranks wrote of a step."""
        merged: Entries = {}
        for rank in self.steps:
            merged.update({key: one for key, one in rank[step].items() if key not in merged})
        return in_order(merged)

    def common(self, step: int, rank: int = 0) -> Entries:
        """What is of the whole mini-batch, as a rank wrote it."""
        return {key: one for key, one in self.steps[rank][step].items() if not is_of_a_shard(key[1])}


@dataclass(frozen=True)
class Difference:
    """Where two runs part first.

    Attributes:
        step, stage, name: of the first digest that differs.
        others: of the same step and stage, those that differ too.
    """

    step: int
    stage: str
    name: str
    others: tuple[str, ...]
    is_missing: bool = False  # in one of the two


def _load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def is_of_a_shard(name: str) -> bool:
    """Whether an entry is of one shard, not of the whole mini-batch."""
    return name.startswith("shard ") or ", shard " in name.partition(", gradient")[0]


def in_order(entries: Entries) -> Entries:
    """Entries in the order of the stages."""
    return {key: entries[key] for stage in STAGES for key in entries if key[0] == stage}


def read_trace(run: Path) -> Trace:
    """The trace in a run's folder.

    A last line that was not written to its end, as a killed run leaves it, is left out.

    Raises:
        ValueError: there is none, a file of a rank is missing, or it is not a trace.
    """
    folder = run / TRACE if (run / TRACE).is_dir() else run
    if not (folder / "rank-0.jsonl").is_file():
        raise ValueError(f"a run has a trace if its Loop was made with trace=True; {run} has none: run it again so")
    head, first = _read(folder / "rank-0.jsonl")
    others = [folder / f"rank-{rank}.jsonl" for rank in range(1, head["ranks"])]  # more are of a run before
    if missing := [path.name for path in others if not path.is_file()]:
        raise ValueError(f"a trace has a file for each rank; {folder} lacks {', '.join(missing)}: copy all of them")
    return Trace(folder, head, [first, *(_read(path)[1] for path in others)])


def _read(path: Path) -> tuple[dict[str, Any], dict[int, Entries]]:
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a killed run leaves the beginning of a line behind that
        if not whole:
            raise ValueError("the run ended before its first line did")
        head, *rest = [json.loads(line) for line in whole.decode().split("\n")]
        if head["version"] != VERSION or not {"ranks", "shards", "ordered", "tensors"} <= set(head):
            raise ValueError(f"version {head['version']}")
        return head, {
            line["step"]: in_order({(stage, name): one for stage, name, one in line["entries"]}) for line in rest
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a trace has lines of JSON, version {VERSION}; {path} cannot be read ({error})") from error


def first_difference(step: int, one: Entries, other: Entries) -> Difference | None:
    """The first entry, in the order of the stages, that is not in both alike."""
    for stage in STAGES:
        keys = dict.fromkeys(key for entries in (one, other) for key in entries if key[0] == stage)
        differing = [name for _, name in (key for key in keys if one.get(key) != other.get(key))]
        if differing:
            key = (stage, differing[0])
            return Difference(step, stage, differing[0], tuple(differing[1:]), (key in one) != (key in other))
    return None


def differences(one: Trace, other: Trace) -> Iterator[tuple[int, Difference | None]]:
    """For each step that both have, the first difference; only of whole mini-batches where the shards are others."""
    alike = one.head["shards"] == other.head["shards"]
    for step in one.numbers:
        if step in set(other.numbers):
            if alike:
                yield step, first_difference(step, one.whole(step), other.whole(step))
            else:
                yield step, first_difference(step, one.common(step), other.common(step))


def check_comparable(one: Trace, other: Trace) -> None:
    """Raise ValueError unless two runs have the same tensors, and steps in common."""
    here, there = one.head["tensors"], other.head["tensors"]
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"two runs are held against each other tensor by tensor; {name} is {_form(here.get(name))} in "
                f"{one.folder} and {_form(there.get(name))} in {other.folder}: compare runs of the same model"
            )
    if not set(one.numbers) & set(other.numbers):
        raise ValueError(
            f"two runs are held against each other step by step; {one.folder} has {_extent(one)}, {other.folder} has "
            f"{_extent(other)}: compare runs that overlap"
        )


def _form(form: list[Any] | None) -> str:
    return "not there" if form is None else f"{form[0].removeprefix('torch.')} {tuple(form[1])}"


def _extent(trace: Trace) -> str:
    return f"steps {trace.numbers[0]} to {trace.numbers[-1]}" if trace.numbers else "no whole step"
