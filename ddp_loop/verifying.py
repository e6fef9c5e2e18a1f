"""`python -m ddp_loop verify SCRIPT`: the user's own script on several numbers of ranks, held against each other."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import isinf
from pathlib import Path

from ddp_loop.differing import counted, describe
from ddp_loop.distances import Largest, Unequal, compare_values
from ddp_loop.launching import RankFailed, launch
from ddp_loop.traces import MEANING, Trace, check_comparable, differences, first_difference, read_trace
from ddp_loop.tracing import Watch, watching


class CannotVerify(Exception):
    """The script gave nothing that could be compared."""


# -- runs --------------------------------------------------------------------------------------------------


def run_watched(script: str, arguments: Sequence[str], folder: str, steps: int) -> None:
    """Run a script on this rank as its launcher would, leaving traces in `folder`."""
    rank, before = os.environ["RANK"], (sys.argv, list(sys.path))
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    printed = (Path(folder) / f"output-{rank}.txt").open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with printed, redirect_stdout(printed), redirect_stderr(printed), watching(Watch(Path(folder), steps)):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise RuntimeError(f"the script ended by sys.exit({ending.code!r})") from None
        finally:
            sys.argv, sys.path[:] = before


@dataclass(frozen=True)
class Job:
    """What is verified.

    Attributes:
        script, arguments: the user's.
        steps: of each Loop, at most.
        timeout_s: for each run, in seconds.
        tolerance: for all values, relative; by default it follows from their types.
        start: calls a function on so many ranks, as `launch` does.
    """

    script: Path
    arguments: Sequence[str] = ()
    steps: int = 5
    timeout_s: float = 600.0
    tolerance: float | None = None
    start: Callable[..., list[None]] = launch


def run_on(ranks: int, job: Job, folder: Path) -> list[Trace]:
    """Run the script on so many ranks; a trace for each Loop that it made.

    Raises:
        CannotVerify: it failed, or made no step.
    """
    folder.mkdir(parents=True)
    try:
        arguments = str(job.script), list(job.arguments), str(folder), job.steps
        job.start(run_watched, ranks, *arguments, timeout_s=job.timeout_s)
    except RankFailed as error:
        raise CannotVerify(f"{job.script} fails on {_said(ranks)}:\n{error}\n{_printed(folder)}") from error
    traces = [read_trace(loop) for loop in sorted(folder.glob("loop-*"))]
    traces = [trace for trace in traces if trace.numbers]  # without those that were made and never gone through
    if not any(trace.numbers[1:] for trace in traces):
        raise CannotVerify(
            f"a script is verified by the steps of its Loop; {job.script} made none on {_said(ranks)}: does it need "
            "arguments (verify SCRIPT -- ARGUMENTS), train without dl.Loop, or start ranks of its own (dl.launch), "
            f"which verify must do itself?\n{_printed(folder)}"
        )
    return traces


def _printed(folder: Path, lines: int = 12) -> str:
    path = folder / "output-0.txt"
    said = path.read_text(encoding="utf-8").splitlines()[-lines:] if path.exists() else []
    return "\n".join(["What its rank 0 printed last:", *(f"  {line}" for line in said)]) if said else ""


def _said(ranks: int) -> str:
    return counted(ranks, "rank")


# -- verdicts ----------------------------------------------------------------------------------------------


def verify(job: Job, ranks: Sequence[int], say: Callable[[str], None]) -> bool:
    """Run a script on each number of ranks, say how they differ, and return whether they are equal.

    With the same shards in an ordered fold equal are runs of the same bits, else those whose differences stay within
    the tolerances. The first number of ranks is what the others are held against; inside each run its ranks are.

    Raises:
        CannotVerify: the script fails on some number of ranks, or made no step.
    """
    equal, same_bits, steps = True, True, 0
    with tempfile.TemporaryDirectory(prefix="ddp_loop-verify-") as folder:
        reference: list[Trace] = []
        for number in ranks:
            found = run_on(number, job, Path(folder) / str(number))
            steps = max(len(trace.numbers) - 1 for trace in found)
            heading = f"{_said(number)}, {counted(found[0].head['shards'], 'shard')}, {counted(steps, 'step')}"
            verdict = _Verdict(next(filter(None, map(_replicas, found)), None))
            if verdict.problem is None and reference:
                verdict = _against(reference, found, ranks[0], job.tolerance)
                same_bits = same_bits and verdict.same_bits
                heading += f", against {_said(ranks[0])}" + (": the same bits" if verdict.same_bits else "")
            say("\n  ".join([heading, *verdict.lines]))
            if verdict.problem is not None:
                say(f"\nUNEQUAL on {_said(number)}. {verdict.problem}\n")
                equal = False
            reference = reference or found
    if equal:
        what = "the same bits" if same_bits else "the same numbers, up to rounding"
        say(
            f"\nEQUAL on {', '.join(map(str, ranks))} ranks: {what}, in what the state holds after "
            f"{counted(steps, 'step')}."
        )
    return equal


@dataclass(frozen=True)
class _Verdict:
    """What is wrong with a run, lines with its largest differences, and whether it has the reference's bits."""

    problem: str | None
    lines: tuple[str, ...] = ()
    same_bits: bool = False


def _replicas(trace: Trace) -> str | None:
    """What is wrong if the ranks of one run do not have the same state."""
    for step in trace.numbers:
        for rank in range(1, len(trace.steps)):
            found = first_difference(step, trace.common(step), trace.common(step, rank))
            if found is not None:
                return (
                    f"Its ranks 0 and {rank} have different values: every rank must compute the same from the fold on. "
                    f"{describe(found)} Let every rank decide on folded values alone: row, step.gather, dl.evaluate."
                )
    return None


def _against(reference: list[Trace], found: list[Trace], first: int, tolerance: float | None) -> _Verdict:
    """A run held against that on the `first` number of ranks."""
    if len(reference) != len(found):
        made = counted(len(reference), "Loop")
        return _Verdict(f"The script goes through {made} on {_said(first)}, and through {len(found)} here.")
    lines: list[str] = []
    same = True
    for number, (one, other) in enumerate(zip(reference, found, strict=True), 1):
        try:
            check_comparable(one, other)
        except ValueError as error:
            return _Verdict(f"{str(error).replace(str(one.folder), _said(first)).replace(str(other.folder), 'here')}.")
        if one.numbers != other.numbers:
            made = counted(len(one.numbers) - 1, "step")
            return _Verdict(f"The Loop makes {made} on {_said(first)}, and {len(other.numbers) - 1} here.")
        parting = next((each for _, each in differences(one, other) if each is not None), None)
        if parting is None:
            continue
        same = False
        unequal, largest = compare_values(one, other, tolerance)
        which = f"Loop {number}, " if len(found) > 1 else ""
        lines += [f"{which}{kind}: {_measured(each)}" for kind, each in largest.items()]
        if one.head["shards"] == other.head["shards"] and one.head["ordered"] and other.head["ordered"]:
            rule = "With fixed shards, in an ordered fold, every number of ranks must give the same bits."
            return _Verdict(f"{rule} {describe(parting)}", tuple(lines))
        if unequal is not None:
            return _Verdict(_why(one, other, unequal), tuple(lines))
    return _Verdict(None, tuple(lines), same)


def _why(one: Trace, other: Trace, unequal: Unequal) -> str:
    """What is off, in which stage, and what that means.

    The cause follows from the first value that is off alone, and from whether the shards are the same.
    """
    times = "" if isinf(unequal.tolerances) else f" by {unequal.tolerances:.3g} times the tolerance"
    step, shards = unequal.step, (one.head["shards"], other.head["shards"])
    said = f"Step {step}, {unequal.stage}: `{unequal.name}` is off{times}"
    if shards[0] == shards[1]:
        found = first_difference(step, one.whole(step), other.whole(step))
        return f"{said}. {describe(found)}" if found is not None else said
    said += "; what came before it agrees, up to rounding."
    if unequal.stage != "fold":
        return f"{said} So {MEANING[unequal.stage]}."
    return (
        f"{said} The runs cut a mini-batch into {shards[0]} and {counted(shards[1], 'shard')}, and what was computed "
        "in a shard depends on how it is cut: statistics of the shard (batch norm), random numbers of the shard "
        "(dropout), a loss that is no mean over its observations, or the shorter numbers of mixed precision. Fix the "
        f"shards, by dl.Batches(..., shards={max(shards)}) say, in this script perhaps --shards; or give step.backward "
        "the weight that the loss is a mean over; or, for mixed precision, verify --tolerance 0.02."
    )


def _measured(largest: Largest) -> str:
    return (
        f"{largest.tolerances:.3g} of the tolerance, {largest.bits:.0f} bits (`{largest.name}`, step {largest.step})"
        if largest.tolerances
        else "the same bits"
    )
