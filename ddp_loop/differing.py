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
    lines += [describe(first, traces[0].head["shards"] == traces[1].head["shards"]), *_afterwards(found, first.step)]
    return False, lines


def _said(trace: Trace) -> str:
    head, steps = trace.head, trace.numbers
    extent = f"steps {steps[0]} to {steps[-1]}" if steps else "no whole step"
    return f"{trace.folder}: {counted(head['ranks'], 'rank')}, {counted(head['shards'], 'shard')}, {extent}"


def counted(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def describe(difference: Difference, same_shards: bool = True) -> str:
    """A difference, and what it means that it comes first."""
    others = ""
    if difference.others:
        shown = ", ".join(f"`{name}`" for name in difference.others[:_SHOWN])
        more = len(difference.others) - _SHOWN
        others = f" (and in the same stage {shown}{f' and {more} more' if more > 0 else ''})"
    if difference.stage == "start":
        return f"Before the first step: `{difference.name}` differs first{others}: {MEANING['start']}."
    verb = "is in one run only, and is the first difference" if difference.is_missing else "differs first"
    where = f"Step {difference.step}, {difference.stage}: `{difference.name}` {verb}{others}."
    return f"{where}\nWhat came before it is the same: {_meaning(difference, same_shards)}."


def _meaning(difference: Difference, same_shards: bool) -> str:
    """By the stage alone; in `forward` also by whether the loss is among what differs."""
    if difference.is_missing:
        return "one run computes what the other does not"
    if difference.stage == "fold" and not same_shards:
        return "from the same observations, parameters and buffers other shards gave something else"
    names = (difference.name, *difference.others)
    if difference.stage == "forward" and not any(name.endswith((", loss", "output 0")) for name in names):
        return "the losses are the same too, what was given beside them is not"
    return MEANING[difference.stage]


def _afterwards(found: list[tuple[int, Difference | None]], first: int) -> list[str]:
    """From which step on all is the same again, if it is."""
    later = [(step, difference) for step, difference in found if step > first]
    for place, (step, _) in enumerate(later):
        if all(difference is None for _, difference in later[place:]):
            return [f"The same bits again from step {step} on."]
    return [f"They differ to the end, step {later[-1][0]}."] if later else []
