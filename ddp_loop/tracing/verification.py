"""`python -m ddp_loop verify SCRIPT`: the user's own script on several numbers of ranks, held against each other."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from math import inf, isinf, nan
from pathlib import Path

from ddp_loop.distributed import RankFailed, launch
from ddp_loop.tracing.compare import (
    FirstMismatch,
    MaxDifference,
    compare_values,
    counted,
    describe,
    is_close,
    rounding_of,
)
from ddp_loop.tracing.diagnosis import explain_loss, other_sample
from ddp_loop.tracing.trace import MEANING, STAGES, Trace, check_comparable, differences, first_difference, read_trace
from ddp_loop.tracing.tracer import TraceRequest, watching


class CannotVerify(Exception):
    """The script gave nothing that could be compared."""


# -- runs --------------------------------------------------------------------------------------------------


def run_watched(script: str, arguments: Sequence[str], watch: TraceRequest) -> None:
    """Run a script on this rank as its launcher would, leaving traces in the watch's folder."""
    rank, before = os.environ["RANK"], (sys.argv, list(sys.path))
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    printed = (watch.folder / f"output-{rank}.txt").open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with printed, redirect_stdout(printed), redirect_stderr(printed), watching(watch):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise RuntimeError(f"the script ended by sys.exit({ending.code!r})") from None
        finally:
            sys.argv, sys.path[:] = before


@dataclass(frozen=True)
class VerifyJob:
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


def run_on(
    ranks: int, job: VerifyJob, folder: Path, followed: Path | None = None, rounding: float = 0.0
) -> list[Trace]:
    """Run the script on so many ranks; a trace for each Loop that it made.

    Args:
        followed, rounding: the folder of a run whose gradients it takes where its own are the same up to rounding.

    Raises:
        CannotVerify: it failed, or made no step.
    """
    folder.mkdir(parents=True)
    try:
        watch = TraceRequest(folder, job.steps, followed, rounding)
        job.start(run_watched, ranks, str(job.script), list(job.arguments), watch, timeout_s=job.timeout_s)
    except RankFailed as error:
        raise CannotVerify(f"{job.script} fails on {_ranks(ranks)}:\n{error}\n{_printed(folder)}") from error
    traces = [read_trace(loop) for loop in sorted(folder.glob("loop-*"))]
    traces = [trace for trace in traces if trace.numbers]  # without those that were made and never gone through
    if not any(trace.numbers[1:] for trace in traces):
        raise CannotVerify(
            f"a script is verified by the steps of its Loop; {job.script} made none on {_ranks(ranks)}: does it need "
            "arguments (verify SCRIPT -- ARGUMENTS), train without dl.Loop, or start ranks of its own (dl.launch), "
            f"which verify must do itself?\n{_printed(folder)}"
        )
    return traces


def _printed(folder: Path, lines: int = 12) -> str:
    path = folder / "output-0.txt"
    said = path.read_text(encoding="utf-8").splitlines()[-lines:] if path.exists() else []
    return "\n".join(["What its rank 0 printed last:", *(f"  {line}" for line in said)]) if said else ""


def _ranks(ranks: int) -> str:
    return counted(ranks, "rank")


# -- verdicts ----------------------------------------------------------------------------------------------


def verify(job: VerifyJob, ranks: Sequence[int], say: Callable[[str], None]) -> bool:
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
            heading = f"{_ranks(number)}, {counted(found[0].head['shards'], 'shard')}, {counted(steps, 'step')}"
            verdict = _Verdict(next(filter(None, map(_replicas, found)), None))
            if verdict.problem is None and reference:
                verdict = _against(reference, found, ranks[0], job.tolerance)
                if verdict.may_be_rounding:
                    verdict = _following(reference, found, ranks[0], job, Path(folder) / f"following-{number}")
                same_bits = same_bits and verdict.same_bits
                heading += f", against {_ranks(ranks[0])}" + (": the same bits" if verdict.same_bits else "")
            say("\n  ".join([heading, *verdict.lines]))
            if verdict.problem is not None:
                say(f"\nUNEQUAL on {_ranks(number)}. {verdict.problem}\n")
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
    """What is wrong with a run, lines with its largest differences, and whether it has the reference's bits.

    `may_be_rounding` says that the problem comes behind an optimizer's step, which may make much of little.
    """

    problem: str | None
    lines: tuple[str, ...] = ()
    same_bits: bool = False
    may_be_rounding: bool = False


def _replicas(trace: Trace) -> str | None:
    """What is wrong if the ranks of one run do not have the same state."""
    for step in trace.numbers:
        for rank in range(1, len(trace.steps)):
            found = first_difference(step, trace.common(step), trace.common(step, rank))
            if found is not None:
                return (
                    f"Its ranks 0 and {rank} have different values: every rank must compute the same from the fold on. "
                    f"{describe(found)} Let every rank decide on folded values alone: the result of "
                    "step.fold, step.gather, dl.evaluate."
                )
    return None


def _against(reference: list[Trace], found: list[Trace], first: int, tolerance: float | None) -> _Verdict:
    """A run held against that on the `first` number of ranks."""
    if len(reference) != len(found):
        made = counted(len(reference), "Loop")
        return _Verdict(f"The script goes through {made} on {_ranks(first)}, and through {len(found)} here.")
    lines: list[str] = []
    same = True
    for number, (one, other) in enumerate(zip(reference, found, strict=True), 1):
        verdict = _of_loop(one, other, first, tolerance)
        which = f"Loop {number}, " if len(found) > 1 else ""
        lines += [f"{which}{line}" for line in verdict.lines]
        same = same and verdict.same_bits
        if verdict.problem is not None:
            return replace(verdict, lines=tuple(lines))
    return _Verdict(None, tuple(lines), same)


def _following(reference: list[Trace], found: list[Trace], first: int, job: VerifyJob, folder: Path) -> _Verdict:
    """A run held against one on the `first` number of ranks that takes its gradients, up to rounding.

    See [Note: Followed gradients] in `tracer`. From the same gradients the same must come.
    """
    rounding = job.tolerance or max(map(rounding_of, reference))
    again = run_on(first, job, folder, found[0].folder.parent, rounding)
    verdict = _against(again, found, first, job.tolerance)
    said = f"against {_ranks(first)} that took these gradients, the same up to rounding, for the optimizer's step:"
    return replace(verdict, lines=(said, *verdict.lines), same_bits=False)


def _of_loop(one: Trace, other: Trace, first: int, tolerance: float | None) -> _Verdict:
    """One Loop's trace held against another's."""
    try:
        check_comparable(one, other)
    except ValueError as error:
        return _Verdict(f"{str(error).replace(str(one.folder), _ranks(first)).replace(str(other.folder), 'here')}.")
    if one.numbers != other.numbers:
        made = counted(len(one.numbers) - 1, "step")
        return _Verdict(f"The Loop makes {made} on {_ranks(first)}, and {len(other.numbers) - 1} here.")
    parting = next((each for _, each in differences(one, other) if each is not None), None)
    evaluated = _evaluations(one, other, first, tolerance or rounding_of(one))
    if parting is None:
        return _Verdict(evaluated, (), evaluated is None)
    unequal, largest = compare_values(one, other, tolerance)
    lines = tuple(f"{kind}: {_measured(each)}" for kind, each in largest.items())
    if one.head["shards"] == other.head["shards"] and one.head["ordered"] and other.head["ordered"]:
        rule = "With fixed shards, in an ordered fold, every number of ranks must give the same bits."
        return _Verdict(f"{rule} {describe(parting)}", lines)
    late = unequal is not None and _place(unequal) >= (one.numbers[1], STAGES.index("optimizer"))
    sample = other_sample(one, other)
    if sample is not None and sample.is_whole and (unequal is None or _explained(one, other, unequal) is not None):
        sample = None  # a number of the place in its shard, say, which nothing depends on
    if sample is not None:
        sampled = FirstMismatch(sample.step, "data", sample.name, inf)
        late = late and sample.is_whole
        unequal = min(sampled, unequal or sampled, key=_place)
    if unequal is not None:
        return _Verdict(_why(one, other, unequal), lines, may_be_rounding=late)
    return _Verdict(evaluated, lines, may_be_rounding=evaluated is not None)


def _place(unequal: FirstMismatch) -> tuple[int, int]:
    return unequal.step, STAGES.index(unequal.stage)


def _explained(one: Trace, other: Trace, unequal: FirstMismatch) -> str | None:
    """What the shards' losses and gradients say of a fold's that differ."""
    if unequal.stage != "fold":
        return None
    turn, _, rest = unequal.name.partition(", ")
    return explain_loss(one, other, unequal.step, f"{turn}, " if rest and turn.startswith("pass ") else "")


def _evaluations(one: Trace, other: Trace, first: int, tolerance: float) -> str | None:
    """What is wrong with the results of `dl.evaluate`."""
    here, there = one.evaluations(), other.evaluations()
    if len(here) != len(there):
        return f"The script makes {counted(len(here), 'evaluation')} on {_ranks(first)}, and {len(there)} here."
    for number, (result, others) in enumerate(zip(here, there, strict=True), 1):
        for name in dict.fromkeys([*result, *others]):
            values = result.get(name, nan), others.get(name, nan)
            if not is_close(*values, tolerance):
                return (
                    f"In evaluation {number}: `{name}` is {values[0]:.6g} on {_ranks(first)}, "
                    f"and {values[1]:.6g} here, "
                    "though all that the state holds agrees: is the metric one value per sample, or their mean, and "
                    "the same on every rank? If the model draws random numbers here, fix the shards of this "
                    "evaluation, by dl.Batches(..., shards=)."
                )
    return None


def _why(one: Trace, other: Trace, unequal: FirstMismatch) -> str:
    """What is off, in which stage, and what that means.

    The cause follows from the first value that is off, from whether the shards are the same, and from what these gave.
    """
    times = "" if isinf(unequal.tolerances) else f" by {unequal.tolerances:.3g} times the tolerance"
    step, shards = unequal.step, (one.head["shards"], other.head["shards"])
    said = f"Step {step}, {unequal.stage}: `{unequal.name}` is off{times}"
    if shards[0] == shards[1]:
        found = first_difference(step, one.whole(step), other.whole(step))
        return f"{said}. {describe(found)}" if found is not None else said
    said += "; what came before it agrees, up to rounding."
    fixed = f"by dl.Batches(..., shards={max(shards)}) say, in this script perhaps --shards"
    if unequal.stage == "data":
        return (
            f"{said} So {MEANING['data']}: by the rank, by a generator of your own or the clock, or by draws of the "
            f"shard. Draw from torch's, Python's or NumPy's own generators for each sample; or fix the shards, {fixed}."
        )
    if unequal.stage != "fold":
        return f"{said} So {MEANING[unequal.stage]}."
    if (explained := _explained(one, other, unequal)) is not None:
        return f"{said} {explained}"
    return (
        f"{said} The runs cut a mini-batch into {shards[0]} and {counted(shards[1], 'shard')}, and what was computed "
        "in a shard depends on how it is cut: statistics of the shard (batch norm), random numbers of the shard "
        "(dropout), a loss that is no mean over its samples, or the shorter numbers of mixed precision. Fix the "
        f"shards, {fixed}; or give step.backward the weight that the loss is a mean over; or, for mixed precision, "
        "verify --tolerance 0.02."
    )


def _measured(largest: MaxDifference) -> str:
    return (
        f"{largest.tolerances:.3g} of the tolerance, {largest.bits:.0f} bits (`{largest.name}`, step {largest.step})"
        if largest.tolerances
        else "the same bits"
    )
