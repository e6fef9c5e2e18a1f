"""`python -m ddp_loop diff RUN_A RUN_B`: the first step, stage and tensor where two runs part."""

from __future__ import annotations

from pathlib import Path

from ddp_loop.traces import MEANING, Difference, Trace, check_comparable, differences, read_trace

_SHOWN = 5


def compare_runs(one: Path, other: Path) -> tuple[bool, list[str]]:
    """Whether two runs have the same bits in every step that both have, and lines that say where not.

    Raises:
        ValueError: a run has no trace, or the two have other tensors or no step in common.
    """
    traces = read_trace(one), read_trace(other)
    check_comparable(*traces)
    found = list(differences(*traces))
    lines = [_said(trace) for trace in traces]
    if traces[0].head["shards"] != traces[1].head["shards"]:
        lines.append(
            "They cut mini-batches into different shards, so that only what is of the whole mini-batch is compared."
        )
    parting = [difference for _, difference in found if difference is not None]
    if not parting:
        return True, [*lines, f"The same bits in all {len(found)} steps that both have."]
    first = parting[0]
    before = [step for step, _ in found if step < first.step]
    if before:
        lines.append(f"The same bits from step {before[0]} to step {before[-1]}.")
    lines += [describe(first), *_afterwards(found, first.step)]
    return False, lines


def _said(trace: Trace) -> str:
    head, steps = trace.head, trace.numbers
    extent = f"steps {steps[0]} to {steps[-1]}" if steps else "no whole step"
    return f"{trace.folder}: {head['ranks']} ranks, {head['shards']} shards, {extent}"


def describe(difference: Difference) -> str:
    """A difference, and what it means that it comes first."""
    others = ""
    if difference.others:
        shown = ", ".join(f"`{name}`" for name in difference.others[:_SHOWN])
        more = len(difference.others) - _SHOWN
        others = f" (and in the same stage {shown}{f' and {more} more' if more > 0 else ''})"
    where = "Before the first step" if difference.stage == "start" else f"Step {difference.step}, {difference.stage}"
    return (
        f"{where}: `{difference.name}` differs first{others}.\nWhat came before it is the same: {_meaning(difference)}."
    )


def _meaning(difference: Difference) -> str:
    return MEANING[difference.stage]


def _afterwards(found: list[tuple[int, Difference | None]], first: int) -> list[str]:
    """From which step on all is the same again, if it is."""
    later = [(step, difference) for step, difference in found if step > first]
    for place, (step, _) in enumerate(later):
        if all(difference is None for _, difference in later[place:]):
            return [f"The same bits again from step {step} on."]
    return [f"They differ to the end, step {later[-1][0]}."] if later else []
