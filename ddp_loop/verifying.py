"""`python -m ddp_loop verify SCRIPT`: the user's own script on several numbers of ranks, held against each other."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from ddp_loop.differing import describe
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
    printed = (Path(folder) / f"output-{rank}.txt").open("w", encoding="utf-8", buffering=1)
    with printed, redirect_stdout(printed), redirect_stderr(printed), watching(Watch(Path(folder), steps)):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise RuntimeError(f"the script ended with exit code {ending.code}") from ending
        finally:
            sys.argv, sys.path[:] = before


@dataclass(frozen=True)
class Job:
    """What is verified.

    Attributes:
        script, arguments: the user's.
        steps: of each Loop, at most.
        timeout_s: for each run, in seconds.
        start: calls a function on so many ranks, as `launch` does.
    """

    script: Path
    arguments: Sequence[str] = ()
    steps: int = 5
    timeout_s: float = 600.0
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
    if not any(trace.numbers[1:] for trace in traces):
        raise CannotVerify(
            f"a script is verified by the steps of its Loop; {job.script} made none on {_said(ranks)}: does it need "
            f"arguments (verify SCRIPT -- ARGUMENTS), or is its training under a condition?\n{_printed(folder)}"
        )
    return traces


def _printed(folder: Path, lines: int = 12) -> str:
    path = folder / "output-0.txt"
    said = path.read_text(encoding="utf-8").splitlines()[-lines:] if path.exists() else []
    return "\n".join(["What its rank 0 printed last:", *(f"  {line}" for line in said)]) if said else ""


def _said(ranks: int) -> str:
    return _counted(ranks, "rank")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


# -- verdicts ----------------------------------------------------------------------------------------------


def verify(job: Job, ranks: Sequence[int], say: Callable[[str], None]) -> bool:
    """Run a script on each number of ranks, say how they differ, and return whether they are equal.

    Equal are runs whose differences stay within the tolerances. The first number of ranks is what the others are held
    against; inside each run its ranks are held against each other.

    Raises:
        CannotVerify: the script fails on some number of ranks, or made no step.
    """
    equal, same_bits = True, True
    with tempfile.TemporaryDirectory(prefix="ddp_loop-verify-") as folder:
        reference: list[Trace] = []
        for number in ranks:
            found = run_on(number, job, Path(folder) / str(number))
            heading = (
                f"{_said(number)}, {_counted(found[0].head['shards'], 'shard')}, {len(found[0].numbers) - 1} steps"
            )
            problem = next(filter(None, map(_replicas, found)), None)
            if problem is None and reference:
                problem, lines, bits = _against(reference, found)
                heading += f", against {_said(ranks[0])}: " + ("the same bits" if bits else "\n  ".join(["", *lines]))
                same_bits = same_bits and bits
            say(heading)
            if problem is not None:
                say(f"\nUNEQUAL on {_said(number)}. {problem}\n")
                equal = False
            reference = reference or found
    if equal:
        said = ", ".join(map(str, ranks))
        say(f"\nEQUAL on {said} ranks: " + ("the same bits." if same_bits else "the same numbers, up to rounding."))
    return equal


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


def _against(reference: list[Trace], found: list[Trace]) -> tuple[str | None, list[str], bool]:
    """What is wrong with a run, lines with its largest differences, and whether it has the same bits."""
    if len(reference) != len(found):
        return (
            f"The script makes {len(reference)} Loops on the first number of ranks, and {len(found)} here.",
            [],
            False,
        )
    lines: list[str] = []
    same = True
    for one, other in zip(reference, found, strict=True):
        check_comparable(one, other)
        if one.numbers != other.numbers:
            made, here = len(one.numbers) - 1, len(other.numbers) - 1
            return f"The loop makes {made} steps on the first number of ranks, and {here} here.", [], False
        parting = next((found for _, found in differences(one, other) if found is not None), None)
        if parting is None:
            continue
        same = False
        unequal, largest = compare_values(one, other)
        lines += [f"{kind}: {_measured(each)}" for kind, each in largest.items()]
        if unequal is not None:
            return _why(one, other, unequal), lines, False
    return None, lines, same


def _why(one: Trace, other: Trace, unequal: Unequal) -> str:
    """What differs, in which stage, and what that means.

    The cause follows from the first digest that differs alone, and from whether the shards are the same.
    """
    times = "" if unequal.tolerances == float("inf") else f" by {unequal.tolerances:.3g} times the tolerance"
    step, shards = unequal.step, (one.head["shards"], other.head["shards"])
    if shards[0] == shards[1]:
        found = first_difference(step, one.whole(step), other.whole(step))
        said = describe(found) if found is not None else ""
        return f"Step {step}: `{unequal.name}` is off{times}. {said}"
    said = f"Step {step}, {unequal.stage}: `{unequal.name}` is off{times}, before it nothing is."
    if unequal.stage != "fold":
        return f"{said} {MEANING[unequal.stage].capitalize()}."
    return (
        f"{said} The runs cut a mini-batch into {shards[0]} and {_counted(shards[1], 'shard')}, and what was computed "
        "in a shard depends on how it is cut: statistics of the shard (batch norm), random numbers of the shard "
        "(dropout), a loss that is no mean over its observations. Fix the shards, by "
        f"dl.Batches(..., shards={max(shards)}) say, in this script perhaps --shards; or give step.backward the weight "
        "that the loss is a mean over."
    )


def _measured(largest: Largest) -> str:
    return (
        f"{largest.tolerances:.3g} of the tolerance, {largest.bits:.0f} bits (`{largest.name}`, step {largest.step})"
        if largest.tolerances
        else "the same bits"
    )
