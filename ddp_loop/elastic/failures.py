"""How a launcher's ranks ended, in words: the culprit's error once, and a line for each of the others."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_loop.elastic.process_states import INTERRUPTED_EXIT, PEER_FAILED_EXIT, UNSAVED_EXIT

_RED = "\x1b[31m"
_PLAIN = "\x1b[0m"
_PLACE = re.compile(r'^  File "(.+)", line (\d+), in .+\n    (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Ending:
    """How a rank ended; endings of several are in the order of their ranks.

    Attributes:
        rank, exit_code: negative for a signal.
        at: the time, in seconds since 1970.
        error: the traceback that the rank left for the launcher; empty if it left none.
        line: the error in one line.
        where: the rank's stage, such as " in forward of step 12".
        is_peer: whether it ended since another rank failed.
        is_shown: whether the rank printed its error itself.
        is_by_launcher: whether the launcher sent the signal that ended it.
        is_stopped: whether it was stopped, as by SIGSTOP, so that the launcher killed it.
        lacked_memory: whether the kernel has killed a process for lack of memory since the ranks were started; None
            where it does not count such kills.
    """

    rank: int
    exit_code: int
    at: float = 0.0
    error: str = ""
    line: str = ""
    where: str = ""
    is_peer: bool = False
    is_shown: bool = True
    is_by_launcher: bool = False
    is_stopped: bool = False
    lacked_memory: bool | None = None


def read_ending(rank: int, failure: ProcessFailure) -> Ending:
    """What a failed rank left in its error file, which `report_to_launcher` or torch's own `record` wrote."""
    found = failure.error_file_data.get("message")
    if not isinstance(found, dict):
        found = {"extraInfo": {"is_peer": failure.exitcode == PEER_FAILED_EXIT}}
    facts = found.get("extraInfo") or {}
    at = float(failure.timestamp)
    with suppress(TypeError, ValueError):
        at = float(facts.get("at", facts.get("timestamp", at)))
    return Ending(
        rank,
        failure.exitcode,
        at,
        error=str(facts.get("py_callstack", "")),
        line=str(found.get("message", "")),
        where=str(facts.get("where", "")),
        is_peer=bool(facts.get("is_peer")),
        is_shown=bool(facts.get("is_shown", True)),
    )


def find_first(endings: Sequence[Ending]) -> Ending:
    """The culprit: who failed by itself, before one that another rank's failure ended.

    The agent ends all ranks when the first has ended, and that may be another one than the culprit. A rank that was
    ended before it left a word is the least likely to be it. Of ranks with the same error it is the lowest,
    as in the run's status and on the page.
    """

    def order(one: Ending) -> tuple[bool, bool, bool, float, int]:
        is_ended = one.exit_code == -signal.SIGTERM or (one.is_by_launcher and not one.is_stopped)
        has_lost_a_peer = one.is_peer or "gloo/transport" in one.line  # outside of a world gloo raises a plain error
        return is_ended and not one.line, has_lost_a_peer, not one.error, one.at, one.rank

    first = min((one for one in endings if one.exit_code != 0), key=order)

    def facts(one: Ending) -> tuple[str, str, str]:
        return one.line, one.where, _place_of(one)

    alike = [one for one in endings if first.error and facts(one) == facts(first)]
    return min(alike, default=first)


def describe(
    endings: Sequence[Ending], running: Sequence[int], *, is_coloured: bool = False, width: int | None = None
) -> str:
    """The lines about a failure.

    Args:
        endings: of this host's ranks, of which one failed at least.
        running: the ranks that are still to be ended.
        is_coloured: whether the culprit is red, on a terminal.
        width: of the terminal, in letters, for the culprit's words; None without one.
    """
    first = find_first(endings)
    head = _of_first(first)
    if width is not None:
        head = "\n".join(_wrap(line, width) for line in head.splitlines())
    if is_coloured:
        head = f"{_RED}{head}{_PLAIN}"
    others = [one for one in endings if one != first]
    if first.exit_code == INTERRUPTED_EXIT:  # as most of them
        others = [one for one in others if one.exit_code != INTERRUPTED_EXIT]
    after = [f"rank {rank} has not ended by itself, and gets SIGTERM" for rank in running]
    return f"{head}\n{describe_rest(others, after, first)}"


def describe_interrupt(endings: Sequence[Ending]) -> str:
    """The line about ranks of which each ended by a second Ctrl-C: where one was, if it said so."""
    for one in sorted(endings):
        if one.line and not one.is_shown:
            return f"{_of_first(one)}\n"
    return "ddp_loop: all ranks were ended by a second Ctrl-C\n"


def describe_rest(endings: Sequence[Ending], after: Sequence[str], first: Ending | None = None) -> str:
    """The lines that follow: how the ranks ended that still ran, and what comes next.

    Args:
        endings: of these ranks.
        after: what comes next, or what the user can do.
        first: the culprit's, if it has just been described.
    """
    lines = [f"rank {one.rank} {_of_other(one, first)}" for one in sorted(endings)]
    return "".join(f"ddp_loop: {line}\n" for line in (*lines, *after))


def _of_first(one: Ending) -> str:
    if one.is_peer:
        why = f": {one.line}" if one.line else ", since another host was ended or a rank there failed"
        return f"ddp_loop: rank {one.rank} was ended{one.where}{why}"
    if one.error and not one.is_shown:
        return f"ddp_loop: rank {one.rank} failed{one.where}:\n{one.error.rstrip()}"
    if one.error:  # the launcher may have ended it before it could end by itself, so its code says nothing
        return f"ddp_loop: rank {one.rank} failed{one.where}, and has printed its error"
    said = one.line if one.line and not one.is_shown else _of_code(one)
    return f"ddp_loop: rank {one.rank} {said}{one.where}"


def _wrap(line: str, width: int) -> str:
    """A line of a message over several, between words; lines of source stay as they are."""
    if line.startswith(" "):
        return line
    return "\n".join(textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False))


def _of_other(one: Ending, first: Ending | None) -> str:
    """What happened to another rank than the culprit.

    Args:
        one: its ending.
        first: the culprit's ending. If it was stopped and left no word, this rank's word counts.
    """
    if one.is_peer:
        explains = first is not None and first.is_stopped
        return f"was ended{one.where}" + (f": {one.line}" if explains and one.line else "")
    if one.line and not one.is_shown and one.error:
        is_same = first is not None and one.line == first.line
        what = ", with the same error" if is_same else f": {one.line.splitlines()[0]}"
        place = _place_of(one)
        is_known = place == "" or (first is not None and place == _place_of(first))
        return f"failed{one.where} too{what}" + ("" if is_known else f", at {place}")
    return _of_code(one) + one.where


def _place_of(one: Ending) -> str:
    """The last line of a rank's traceback that has a place, such as "train.py:20: step.fold()"; empty without one."""
    places = _PLACE.findall(one.error)
    return "{}:{}: {}".format(*places[-1]) if places else ""


def _of_code(one: Ending) -> str:
    if one.exit_code >= 0:
        why = ", since its run was not saved whole" if one.exit_code == UNSAVED_EXIT else ""
        return f"ended with exit code {one.exit_code}{why}"
    name = str(-one.exit_code)
    with suppress(ValueError):
        name = signal.Signals(-one.exit_code).name
    if one.is_stopped:
        return "was stopped, as by SIGSTOP, so it did not answer, and the launcher killed it"
    if one.exit_code == -signal.SIGTERM:
        return "was ended by SIGTERM"
    return f"was killed by {name}{_who_killed(one)}"


def _who_killed(one: Ending) -> str:
    if one.is_by_launcher:
        return ", which the launcher sent"
    if one.exit_code != -signal.SIGKILL:
        return ""
    if one.lacked_memory is None:
        return ", by a user or for lack of memory"
    return ", for lack of memory" if one.lacked_memory else ", by a user or another program"
