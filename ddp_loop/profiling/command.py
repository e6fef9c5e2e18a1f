"""`python -m ddp_loop profile SCRIPT`: the steps of a script measured on a number of ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import PROFILE_FILE
from ddp_loop.distributed import RankFailed, launch
from ddp_loop.profiling.recording import TRACED, WARM_UP
from ddp_loop.tracing import TraceRequest, last_output, run_requested

TOO_SHORT = (
    "A profile measures steps after the first {warm_up}. No Loop of {script} made more on {on}. Train for more epochs, "
    "or with smaller mini-batches."
)


class CannotProfile(Exception):
    """The script failed, or made no step that could be measured."""


def profile(
    script: Path,
    ranks: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
    *,
    steps: int = 20,
    traces: Path | None = None,
    start: Callable[..., list[None]] = launch,
) -> None:
    """Run a script until its steps are measured, and report where their time goes.

    Each Loop ends after the measured steps, and the script goes on to its end. No Loop has a run folder, so no run of
    the user's is written or resumed, but the script's own files are. The measured times are reported even if the script
    fails or is stopped.

    Args:
        script: its path.
        ranks: the number of ranks.
        arguments: of its command line.
        say: called with each part of the report.
        steps: the number of steps to measure of each Loop.
        traces: the folder for Chrome traces of the first Loop; None for none.
        start: calls a function on a number of ranks, as `launch` does.

    Raises:
        CannotProfile: the script fails, or makes no step that is measured.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_loop-profile-") as name:
        folder = Path(name)
        traces = None if traces is None else traces.absolute()
        most = WARM_UP + steps + (TRACED if traces is not None else 0)
        request = TraceRequest(folder, most, profile=steps, traces=traces)
        earlier = _traces_in(traces)
        failure = ""
        try:
            start(run_requested, ranks, str(script), list(arguments), request)
        except RankFailed as error:
            failure = str(error)
        finally:
            found = _show_profiles(folder, say)
        on = f"{ranks} rank{'' if ranks == 1 else 's'}"
        if failure:
            raise CannotProfile(f"{script} fails on {on}:\n{failure}\n{last_output(folder)}".rstrip())
        if not found:
            raise CannotProfile(
                f"profile measures the steps of a Loop. {script} made none on {on}. Pass the arguments that it needs "
                "(profile SCRIPT -- ARGUMENTS), train with dl.Loop, and leave out dl.launch, since profile starts the "
                f"ranks itself.\n{last_output(folder)}".rstrip()
            )
        if not any(one["ranks"] for one in found):
            raise CannotProfile(TOO_SHORT.format(warm_up=WARM_UP, script=script, on=on))
        if _traces_in(traces) - earlier:
            say(f"Chrome traces of {TRACED} further steps: {traces}. Open them at https://ui.perfetto.dev.")
        elif traces is not None:
            say(
                f"No Chrome trace was written into {traces}. Check that it can be, and that the first Loop has {most} "
                f"steps.\n{last_output(folder)}".rstrip()
            )


def _show_profiles(folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Report the profile of each Loop, in their order, and return them."""
    paths = sorted(folder.glob(f"loop-*/{PROFILE_FILE}"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for number, one in enumerate(found, 1):
        say("\n".join([*([f"Loop {number}"] if len(found) > 1 else []), *one["lines"]]))
    return found


def _traces_in(folder: Path | None) -> set[tuple[Path, int]]:
    """The traces in a folder, each with the time of its last change."""
    return {(one, one.stat().st_mtime_ns) for one in folder.glob("trace-rank-*.json")} if folder is not None else set()
