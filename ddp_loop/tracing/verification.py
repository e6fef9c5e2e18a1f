"""`python -m ddp_loop verify SCRIPT`: runs of a script on several numbers of ranks, and their comparison."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import starmap
from math import inf, isinf, nan
from pathlib import Path

from ddp_loop.data import Cut
from ddp_loop.distributed import RankFailed, launch, run_script, sharing_gpus
from ddp_loop.tracing.compare import (
    KINDS,
    Mismatch,
    compare_values,
    counted,
    describe,
    is_close,
    rounding_of,
)
from ddp_loop.tracing.diagnosis import (
    difference_of_halves,
    explain_halves,
    explain_loss,
    explain_singles,
    is_judged_whole,
    is_small,
    other_sample,
)
from ddp_loop.tracing.trace import MEANING, STAGES, Trace, check_comparable, differences, first_difference, read_trace
from ddp_loop.tracing.tracer import TraceRequest, tracing

_STEPS_IN_HALVES = 2  # a term that is 0 at the initial parameters shows in the second one
_WORTH_TELLING = 0.01  # of the tolerance
_AGREES = "; everything before it agrees, up to rounding."
_PAIRS = (
    "A loss that compares samples (pairs, ranking, contrastive) needs the whole mini-batch, by step.hold and "
    "step.gather (docs/buffers.md): with fixed shards it is equal on all ranks, but another loss."
)


class CannotVerify(Exception):
    """The script failed, or made no step that could be compared."""


# -- runs --------------------------------------------------------------------------------------------------


def run_requested(script: str, arguments: Sequence[str], request: TraceRequest) -> None:
    """Run a script on this rank as its launcher would, under a request and with its output in the request's folder."""
    path = request.folder / f"output-{os.environ['RANK']}.txt"
    printed = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with printed, redirect_stdout(printed), redirect_stderr(printed), tracing(request), sharing_gpus():
        run_script(script, arguments)


@dataclass(frozen=True)
class VerifyJob:
    """A script to verify.

    Attributes:
        script: its path.
        arguments: of its command line.
        steps: the maximum number of steps of each Loop.
        timeout_s: of each run, in seconds.
        tolerance: relative, for all values; by default it depends on their dtypes.
        start: calls a function on a number of ranks, as `launch` does.
    """

    script: Path
    arguments: Sequence[str] = ()
    steps: int = 5
    timeout_s: float = 600.0
    tolerance: float | None = None
    start: Callable[..., list[None]] = launch


def run_on(ranks: int, job: VerifyJob, request: TraceRequest) -> list[Trace]:
    """Run the script on a number of ranks, and read the trace of each of its Loops.

    Args:
        ranks: their number.
        job: the script.
        request: of the traces, in a folder that does not exist yet.

    Raises:
        CannotVerify: the script failed, or made no step.
    """
    folder = request.folder
    where = counted(ranks, "rank")
    folder.mkdir(parents=True)
    try:
        job.start(run_requested, ranks, str(job.script), list(job.arguments), request, timeout_s=job.timeout_s)
    except RankFailed as error:
        raise CannotVerify(f"{job.script} fails on {where}:\n{error}\n{last_output(folder)}") from error
    traces = [read_trace(loop) for loop in sorted(folder.glob("loop-*"))]
    traces = [trace for trace in traces if trace.numbers]  # without Loops that were never iterated over
    if not any(trace.numbers[1:] for trace in traces):
        raise CannotVerify(
            f"verify compares the steps of a Loop. {job.script} made none on {where}. Pass the arguments that "
            "it needs (verify SCRIPT -- ARGUMENTS), train with dl.Loop, and leave out dl.launch, since verify starts "
            f"the ranks itself.\n{last_output(folder)}"
        )
    return traces


def last_output(folder: Path) -> str:
    """The last lines that rank 0 printed in `run_requested`, with a heading; empty without any."""
    path = folder / "output-0.txt"
    # A script may print any bytes through sys.stdout.buffer.
    last = path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if path.exists() else []
    return "\n".join(["The last output of rank 0:", *(f"  {line}" for line in last)]) if last else ""


def _ranks(trace: Trace) -> str:
    return counted(trace.head["ranks"], "rank")


# -- verdicts ----------------------------------------------------------------------------------------------


def verify(job: VerifyJob, ranks: Sequence[int], say: Callable[[str], None]) -> bool:
    """Run a script on each number of ranks, report the differences, and return whether the runs are equal.

    Each run is compared with the first, and inside each run the ranks are compared with each other. With the same
    shards in an ordered fold, equal runs have the same bits. Otherwise their differences are within the tolerances.
    If all are equal, further runs with fixed shards find losses that follow the cut into shards.

    Args:
        job: the script.
        ranks: the numbers of ranks; the first is the reference.
        say: called with each line of the report.

    Raises:
        CannotVerify: the script fails on some number of ranks, or makes no step.
    """
    equal = True
    same_bits = True
    steps = 0
    told: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="ddp_loop-verify-") as folder:
        reference: list[Trace] = []
        for number in ranks:
            found = run_on(number, job, TraceRequest(Path(folder) / str(number), job.steps))
            steps = max(len(trace.numbers) - 1 for trace in found)
            heading = f"{_ranks(found[0])}, {counted(found[0].head['shards'], 'shard')}, {counted(steps, 'step')}"
            verdict = _Verdict(next(filter(None, map(_replicas, found)), None))
            if verdict.problem is None and reference:
                verdict = _compare(reference, found, job, Path(folder))
                same_bits = same_bits and verdict.same_bits
                heading += f", against {_ranks(reference[0])}" + (": the same bits" if verdict.same_bits else "")
            say("\n  ".join([heading, *verdict.lines]))
            if verdict.problem is not None:
                say(f"\nUNEQUAL on {_ranks(found[0])}. {_untold(verdict.problem, told)}\n")
                equal = False
            reference = reference or found
        if equal:
            equal = _try_halves(reference, job, Path(folder), say)
    if equal:
        what = "the same bits" if same_bits else "the same numbers, up to rounding"
        say(
            f"\nEQUAL on {', '.join(map(str, ranks))} ranks: {what}, in the whole state after {counted(steps, 'step')}."
        )
    return equal


@dataclass(frozen=True)
class _Verdict:
    """The result of a comparison.

    Attributes:
        problem: the difference and its meaning; None if the runs are equal.
        lines: the largest differences.
        same_bits: whether all bits are the same.
        may_be_rounding: whether the problem follows an optimizer's step, which can enlarge rounding errors.
        where: the place of a difference that halved shards may explain; None without one.
    """

    problem: str | None
    lines: Sequence[str] = ()
    same_bits: bool = False
    may_be_rounding: bool = False
    where: str | None = None


def _untold(problem: str, told: set[str]) -> str:
    """A problem without the sentences in `told`, and with its first one always; adds them to `told`."""
    first, *others = re.split(r"(?<=[.?]) (?=[A-Z])", problem)
    new = [sentence for sentence in others if sentence not in told]
    told.update(others)
    return " ".join([first, *new, *(["The rest is as above."] if len(new) < len(others) else [])])


def _replicas(trace: Trace) -> str | None:
    """The problem if the ranks of one run do not have the same state."""
    for step in trace.numbers:
        for rank in range(1, len(trace.steps)):
            found = first_difference(step, trace.common(step), trace.common(step, rank))
            if found is not None:
                return (
                    f"Ranks 0 and {rank} have different values, but every rank must compute the same after the fold. "
                    f"{describe(found)} Let every rank decide by folded values only: the results of step.fold, "
                    "step.gather and dl.evaluate."
                )
    return None


def _compare(reference: list[Trace], found: list[Trace], job: VerifyJob, folder: Path) -> _Verdict:
    """Compare a run with the reference, and run the script again where its traces leave a question."""
    verdict = _against(reference, found, job.tolerance)
    if verdict.may_be_rounding:
        return _following(reference, found, job, folder / f"following-{found[0].head['ranks']}")
    if verdict.where is not None:
        of_most = max(reference, found, key=lambda traces: max(int(trace.head["shards"]) for trace in traces))
        reason = _first_reason(explain_halves, _cut("halves", of_most, job, folder)[0])
        if reason is not None:
            return replace(verdict, problem=f"{verdict.where} With each shard cut into two: {reason}")
    return verdict


def _cut(cut: Cut, traces: list[Trace], job: VerifyJob, folder: Path) -> tuple[list[tuple[Trace, Trace]], str]:
    """Loops that can be cut otherwise, each with its trace in a run that cuts it so and takes its gradients.

    The second part is the failure if the script fails in this cut, such as by BatchNorm1d with one sample, or by too
    little memory. See [Note: Halved shards] in `diagnosis`.
    """
    if not any(trace.head["can_cut_otherwise"] for trace in traces):
        return [], ""
    ranks = traces[0].head["ranks"]
    steps = min(job.steps, _STEPS_IN_HALVES)
    request = TraceRequest(folder / f"{cut}-{ranks}", steps, traces[0].folder.parent, inf, cut=cut)
    try:
        found = {trace.folder.name: trace for trace in run_on(ranks, job, request)}
    except CannotVerify as error:
        return [], str(error.__cause__ or error).partition("\n")[0]
    pairs = [(trace, found[trace.folder.name]) for trace in traces if trace.folder.name in found]
    return [(trace, other) for trace, other in pairs if other.head["shards"] != trace.head["shards"]], ""


def _first_reason(explain: Callable[..., str | None], traces: Iterable[Sequence[Trace]]) -> str | None:
    return next(filter(None, starmap(explain, traces)), None)


def _try_halves(traces: list[Trace], job: VerifyJob, folder: Path, say: Callable[[str], None]) -> bool:
    """Report what follows the cut into fixed shards, and return whether no loss does that should not."""
    fixed = [trace for trace in traces if trace.head["fixed"]]
    how = "each shard cut into two"
    pairs, failed = _cut("halves", fixed, job, folder)
    reason = _first_reason(explain_halves, pairs)
    difference = max(starmap(difference_of_halves, pairs), default=0.0)
    if reason is None and (failed or difference):
        wholes, _ = _cut("whole", [trace for trace in fixed if is_judged_whole(trace)], job, folder)
        reason = _first_reason(explain_halves, [(whole, trace) for trace, whole in wholes])
        if wholes and (reason is not None or failed):
            how = "each mini-batch in one shard"
            failed = "" if len(wholes) == len(fixed) else failed
            difference = max(starmap(difference_of_halves, wholes), default=0.0)
    if reason is None and pairs and difference:
        halves = {trace.folder: halved for trace, halved in pairs}
        singles, _ = _cut("singles", [trace for trace, _ in pairs if is_small(trace)], job, folder)
        reason = _first_reason(explain_singles, [(trace, halves[trace.folder], single) for trace, single in singles])
        how = "shards of one sample" if reason is not None else how
    if reason is not None:
        say(
            "\nUNEQUAL in other shards. All ranks agree, but the result follows the cut into shards. With "
            f"{how}: {reason}\n"
        )
        return False
    if failed:
        say(
            "The losses were not judged, since the script fails with each shard cut into two, so a loss that follows "
            "the cut is not found. Verify the script once with fewer shards, or with drop_last=True, so that each "
            f"shard of an epoch has 4 samples or more. The failure: {failed}"
        )
    if difference:
        say(
            f"With {how}, the first gradients differ by {difference:.2g} of their size, by what "
            "depends on the shard (batch norm, dropout, a loss over pairs of samples, mixed precision). So keep the "
            f"number of shards as it is. {_PAIRS}"
        )
    return True


def _against(reference: list[Trace], found: list[Trace], tolerance: float | None) -> _Verdict:
    """Compare a run with the reference."""
    if len(reference) != len(found):
        made = counted(len(reference), "Loop")
        return _Verdict(f"The script runs {made} on {_ranks(reference[0])}, and {len(found)} here.")
    lines: list[str] = []
    same = True
    for number, (one, other) in enumerate(zip(reference, found, strict=True), 1):
        verdict = _of_loop(one, other, tolerance)
        which = f"Loop {number}, " if len(found) > 1 else ""
        lines += [f"{which}{line}" for line in verdict.lines]
        same = same and verdict.same_bits
        if verdict.problem is not None:
            return replace(verdict, lines=lines)
    return _Verdict(None, lines, same)


def _following(reference: list[Trace], found: list[Trace], job: VerifyJob, folder: Path) -> _Verdict:
    """Compare a run with the reference's ranks once more, which use its gradients where they are equal up to rounding.

    See [Note: Followed gradients] in `tracer`.
    """
    rounding = job.tolerance or max(map(rounding_of, reference))
    request = TraceRequest(folder, job.steps, found[0].folder.parent, rounding)
    again = run_on(reference[0].head["ranks"], job, request)
    verdict = _against(again, found, job.tolerance)
    line = (
        "The gradients are equal up to rounding, which an optimizer can enlarge. So the steps were made again on "
        f"{_ranks(again[0])} with the gradients of {_ranks(found[0])}{':' if verdict.lines else '.'}"
    )
    return replace(verdict, lines=(line, *verdict.lines), same_bits=False)


def _of_loop(one: Trace, other: Trace, tolerance: float | None) -> _Verdict:
    """Compare the traces of one Loop on two numbers of ranks."""
    try:
        check_comparable(one, other)
    except ValueError as error:
        return _Verdict(str(error).replace(str(one.folder), _ranks(one)).replace(str(other.folder), "here"))
    if one.numbers != other.numbers:
        made = counted(len(one.numbers) - 1, "step")
        return _Verdict(f"The Loop makes {made} on {_ranks(one)}, and {len(other.numbers) - 1} here.")
    parting = next((each for _, each in differences(one, other) if each is not None), None)
    evaluated = _evaluations(one, other, tolerance or rounding_of(one))
    if parting is None:
        return _Verdict(evaluated, (), evaluated is None)
    unequal, largest = compare_values(one, other, tolerance)
    lines = [_line_of(kind, each) for kind, each in largest.items() if each.tolerances >= _WORTH_TELLING]
    same_shards = one.head["shards"] == other.head["shards"]
    if same_shards and one.head["ordered"] and other.head["ordered"]:
        rule = "With fixed shards, in an ordered fold, every number of ranks must give the same bits."
        return _Verdict(f"{rule} {describe(parting)}", lines)
    late = unequal is not None and unequal.place >= (one.numbers[1], STAGES.index("optimizer"))
    sample, is_whole = other_sample(one, other)
    if is_whole and (unequal is None or _explained(one, other, unequal) is not None):
        sample = None  # such as the position in the shard, on which nothing depends
    if sample is not None:
        late = late and is_whole
        unequal = min(sample, unequal or sample, key=lambda each: each.place)
    if unequal is None:
        return _Verdict(evaluated, lines, may_be_rounding=evaluated is not None)
    where = None
    if unequal.stage == "fold" and not same_shards:
        is_sum = any(name.endswith(", sum of loss") for _, name in one.of_shards(unequal.step))
        where = f"{_where(unequal)}{_AGREES}" if is_sum else None
    return _Verdict(_why(one, other, unequal), lines, may_be_rounding=late, where=where)


def _line_of(kind: str, largest: Mismatch) -> str:
    share = f"{largest.tolerances:.2%} of" if largest.tolerances < 10 else f"{largest.tolerances:,.0f} times"
    largest_of_kind = f"largest difference of {KINDS[kind]}: `{largest.name}` in step {largest.step}"
    return f"{largest_of_kind}, {share} the tolerance for rounding"


def _explained(one: Trace, other: Trace, unequal: Mismatch) -> str | None:
    """The reason for a difference in a fold; None if unknown."""
    if unequal.stage != "fold":
        return None
    turn, _, rest = unequal.name.partition(", ")
    return explain_loss(one, other, unequal.step, f"{turn}, " if rest and turn.startswith("pass ") else "")


def _evaluations(one: Trace, other: Trace, tolerance: float) -> str | None:
    """The problem if results of `dl.evaluate` differ."""
    here = one.evaluations()
    there = other.evaluations()
    if len(here) != len(there):
        return f"The script makes {counted(len(here), 'evaluation')} on {_ranks(one)}, and {len(there)} here."
    for number, (result, others) in enumerate(zip(here, there, strict=True), 1):
        for name in dict.fromkeys([*result, *others]):
            values = result.get(name, nan), others.get(name, nan)
            if not is_close(*values, tolerance):
                return (
                    f"In evaluation {number}: `{name}` is {values[0]:.6g} on {_ranks(one)}, and {values[1]:.6g} "
                    "here, though the whole state agrees. Is the metric one value per sample, or their mean, and the "
                    "same on every rank? Does the batch size of this evaluation depend on the ranks?"
                )
    return None


def _why(one: Trace, other: Trace, unequal: Mismatch) -> str:
    """The first difference above the tolerance, its stage and its probable cause, as text."""
    step = unequal.step
    shards = (one.head["shards"], other.head["shards"])
    where = _where(unequal)
    if shards[0] == shards[1]:
        found = first_difference(step, one.whole(step), other.whole(step))
        return f"{where}. {describe(found)}" if found is not None else where
    where += _AGREES
    fixed = f"such as dl.Batches(..., shards={max(shards)}), or --shards if the script has it"
    if unequal.stage == "data":
        return (
            f"{where} So {MEANING['data']}. They may depend on the rank, on a generator of your own, on the clock, or "
            "on draws of the shard. Draw from torch's, Python's or NumPy's global generators for each sample, or fix "
            f"the shards, {fixed}."
        )
    if unequal.stage != "fold":
        return f"{where} So {MEANING[unequal.stage]}."
    if (explained := _explained(one, other, unequal)) is not None:
        return f"{where} {explained}"
    if unequal.name.startswith("buffer "):
        return (
            f"{where} Shards change this buffer, and what the fold makes of them depends on their number. Running "
            f"statistics behind another batch norm do: fix the shards, {fixed}. Any other buffer has a rule that is "
            "not exact for it (buffer_reduction=): compute it from the whole mini-batch, after step.gather "
            "(docs/buffers.md)."
        )
    return (
        f"{where} The runs cut a mini-batch into {shards[0]} and {counted(shards[1], 'shard')}. A result depends on "
        "the shard: by its statistics (batch norm), its random numbers (dropout), a loss over pairs of samples, a loss "
        "that is neither a mean nor a sum over its samples (a penalty beside a sum counts once per shard), or mixed "
        f"precision. {_PAIRS} Otherwise fix the shards, {fixed}. Or pass step.backward the weight that the loss is a "
        "mean over (tokens, boxes). Or, for mixed precision, verify --tolerance 0.02."
    )


def _where(unequal: Mismatch) -> str:
    times = "" if isinf(unequal.tolerances) else f" by {unequal.tolerances:.3g} times the tolerance"
    return f"Step {unequal.step}, {unequal.stage}: `{unequal.name}` is off{times}"
