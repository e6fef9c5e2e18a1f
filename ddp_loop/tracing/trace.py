"""Reading of traces, and the first difference between two of them.

[Note: Resumed] A run that resumes keeps the lines up to its checkpoint, and adds one of the stage `start` for that
step: its restored state. It is compared with the state at the end of the same step in a run that was not interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The stages of a step, in order; step 0 has only `start`. See [Note: Stages].
STAGES = ("start", "data", "forward", "backward", "fold", "optimizer")
VERSION = 2
TRACE = "trace"  # the folder in a run folder
EVALUATIONS = "evaluations.jsonl"  # of rank 0, in a trace with values

# What a first difference in a stage means, if all stages before it agree.
MEANING = {
    "start": "the initial values differ",
    "data": "the samples of the mini-batches, or their transforms, differ",
    "forward": "the same data, parameters and buffers gave another loss, so the loss depends on random numbers or on "
    "something else that is not in the state",
    "backward": "the same losses gave other gradients, so the backward does not give the same bits twice, or something "
    "changed the gradients in it",
    "fold": "the fold of the same shards differs: in its order, its rules or its buffers",
    "optimizer": "the same gradients gave another state, so the code between the fold and the end of the step differs",
}

Entries = dict[tuple[str, str], str]
Values = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """The trace of a run.

    Attributes:
        folder: from which it was read.
        head: the first line of rank 0, with the numbers of ranks and shards, the tensors and so on.
        steps: for each rank a dict, step -> (stage, name) -> digest.
        forms: the numbers of ranks and shards in each step, which a resumed run may change.
    """

    folder: Path
    head: Mapping[str, Any]
    steps: list[dict[int, Entries]]
    forms: Mapping[int, tuple[int, int]]

    @property
    def numbers(self) -> list[int]:
        """The steps that all of their ranks wrote."""
        return [number for number in self.steps[0] if all(number in rank for rank in self._ranks(number))]

    def _ranks(self, step: int) -> list[dict[int, Entries]]:
        """Those that made a step; further files may have it from before a resume on fewer ranks."""
        return self.steps[: self.forms[step][0]]

    @property
    def extent(self) -> str:
        """The first and the last step, as text."""
        return f"steps {self.numbers[0]} to {self.numbers[-1]}" if self.numbers else "no complete step"

    def values(self, step: int) -> Values:
        """The values of the whole mini-batch, by (stage, name), of a trace with values."""
        return load_values(self.folder / f"step-{step}.safetensors")

    def of_shards(self, step: int) -> Values:
        """The values of all ranks' shards, by (stage, name), of a trace with values."""
        paths = [self.folder / f"shards-{rank}-{step}.safetensors" for rank in range(len(self.steps))]
        return {key: value for path in paths for key, value in load_values(path).items()}

    def evaluations(self) -> list[dict[str, float]]:
        """The results of `dl.evaluate`, in order, of a trace with values."""
        path = self.folder / EVALUATIONS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def whole(self, step: int) -> Entries:
        """The entries of all ranks for a step."""
        merged: Entries = {}
        for rank in self._ranks(step):
            for key, one in rank[step].items():
                merged.setdefault(key, one)
        return merged

    def common(self, step: int, rank: int = 0) -> Entries:
        """The entries of one rank that concern the whole mini-batch."""
        return {
            (stage, name): one
            for (stage, name), one in self.steps[rank][step].items()
            if not (name.startswith("shard ") or ", shard " in name.partition(", gradient")[0])
        }


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: of the first digest that differs.
        stage: of the same digest.
        name: of the same digest.
        others: the names of other digests of this step and stage that differ.
        is_missing: whether one of the runs does not have this digest.
    """

    step: int
    stage: str
    name: str
    others: tuple[str, ...]
    is_missing: bool = False


def load_values(path: Path) -> Values:
    """The values in a file, by (stage, name)."""
    from safetensors.torch import load_file

    return {tuple(key.split(": ", 1)): value for key, value in load_file(path).items()}  # type: ignore[misc]


def read_trace(run: Path) -> Trace:
    """Read the trace in a run folder, without an incomplete last line, as a killed run leaves it.

    Raises:
        ValueError: there is no trace, the file of a rank is missing, or a file is not a trace.
    """
    folder = run / TRACE if (run / TRACE).is_dir() else run
    if not (folder / "rank-0.jsonl").is_file():
        raise ValueError(f"{run} has no trace. Run the script again with Loop(trace=True).")
    head, first, forms = _read(folder / "rank-0.jsonl")
    most = max([head["ranks"], *(ranks for ranks, _ in forms.values())])
    others = [folder / f"rank-{rank}.jsonl" for rank in range(1, most)]  # further files are of an earlier run
    if missing := [path.name for path in others if not path.is_file()]:
        raise ValueError(f"A trace has one file per rank. {folder} lacks {', '.join(missing)}. Copy all of them.")
    return Trace(folder, head, [first, *(_read(path)[1] for path in others)], forms)


_STEP = b'{"step": '  # the beginning of a line


def lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """The lines of a trace's file up to a step, without its head; none if it is not a trace of this version."""
    with suppress(OSError), path.open("rb") as file:
        if file.readline().startswith(b'{"version": %d,' % VERSION):
            for line in file:
                number = line.removeprefix(_STEP).partition(b",")[0]
                if line.endswith(b"\n") and number.isdigit() and int(number) <= step:
                    yield line


def _read(path: Path) -> tuple[dict[str, Any], dict[int, Entries], dict[int, tuple[int, int]]]:
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # without an incomplete last line
        if not whole:
            raise ValueError("the run ended before its first line was complete")
        head, *rest = [json.loads(line) for line in whole.decode().split("\n")]
        if head["version"] != VERSION or not {"ranks", "shards", "ordered", "tensors"} <= set(head):
            raise ValueError(f"version {head['version']}")
        found: dict[int, Entries] = {}
        forms: dict[int, tuple[int, int]] = {}
        for line in rest:
            found.setdefault(line["step"], {}).update({(stage, name): one for stage, name, one in line["entries"]})
            forms.setdefault(line["step"], (line["ranks"], line["shards"]))  # of the step, before a resume after it
        return head, found, forms
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a trace of version {VERSION} ({error}). Run the script again with Loop(trace=True)."
        ) from error


def first_difference(step: int, one: Entries, other: Entries) -> Difference | None:
    """The first entry, in the order of the stages, that differs."""
    one, other = _resumed_like(one, other), _resumed_like(other, one)
    for stage in STAGES:
        keys = [key for key in one | other if key[0] == stage and one.get(key) != other.get(key)]
        if keys:
            name, *others = [name for _, name in keys]
            return Difference(step, stage, name, tuple(others), (keys[0] in one) != (keys[0] in other))
    return None


def _resumed_like(entries: Entries, other: Entries) -> Entries:
    """A step's entries with a `start`, or with that alone, if the other run has it so. See [Note: Resumed]."""
    stages = {stage for stage, _ in entries}
    others = {stage for stage, _ in other}
    if "start" in others and "start" not in stages:
        entries = {("start", name): one for (stage, name), one in entries.items() if stage == "optimizer"} | entries
    return {key: one for key, one in entries.items() if key[0] == "start"} if others == {"start"} else entries


def differences(one: Trace, other: Trace) -> Iterator[tuple[int, Difference | None]]:
    """For each common step, its first difference: with different shards, among the values of whole mini-batches."""
    there = set(other.numbers)
    for step in one.numbers:
        if step in there:
            entries = Trace.whole if one.forms[step][1] == other.forms[step][1] else Trace.common
            yield step, first_difference(step, entries(one, step), entries(other, step))


def check_comparable(one: Trace, other: Trace) -> None:
    """Raise ValueError unless two runs have the same tensors and common steps."""
    here = one.head["tensors"]
    there = other.head["tensors"]
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"Two runs must have the same tensors. {name} is {_form(here.get(name))} in {one.folder} and "
                f"{_form(there.get(name))} in {other.folder}. Compare runs of the same model."
            )
    if not set(one.numbers) & set(other.numbers):
        raise ValueError(
            f"Two runs must have common steps. {one.folder} has {one.extent}, {other.folder} has {other.extent}. "
            "Compare runs that overlap."
        )


def _form(form: list[Any] | None) -> str:
    return "missing" if form is None else f"{form[0].removeprefix('torch.')} {tuple(form[1])}"
