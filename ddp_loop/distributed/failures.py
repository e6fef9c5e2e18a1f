"""Failures: the exception of a rank when another one failed, and which rank is to blame.

A rank that is late, gone, or in another collective is found by a roll call, which each rank's watchdog answers.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from ddp_loop.distributed.values import sendable
from ddp_loop.elastic import cut_text, is_of_package

STORED_LETTERS = 100_000  # of an error's text; JSON writes up to 12 bytes for one
_IN_WORKER = "Original Traceback (most recent call last):\n"  # in the text of an exception from a DataLoader's worker


class PeerFailed(RuntimeError):
    """Another rank failed, so this one cannot continue.

    Attributes:
        rank: the rank that failed; None if that is unknown.
        stage: its stage: data, forward, backward, fold, optimizer (all that follows the fold), save, evaluate, ...;
            empty outside of a loop.
        step: the loop's iteration, counted from 1; 0 outside of a loop.
    """

    def __init__(self, message: str, rank: int | None = None, stage: str = "", step: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.step = step

    @property
    def summary(self) -> str:
        """The message without the failed rank's traceback."""
        return str(self).partition("\n\nTraceback (most recent call last)")[0]


class PeerGone(RuntimeError):
    """The connection to a rank has ended, while this one waits for it.

    Attributes:
        rank: the rank at its other end.
        where: where it was when it sent its last message.
    """

    def __init__(self, rank: int, where: RankStatus) -> None:
        super().__init__(f"rank {rank} has closed its connection")
        self.rank = rank
        self.where = where


def shorten(error: PeerFailed) -> PeerFailed:
    """Leave the script's own lines in the traceback of a rank whose peer failed, and nothing that gloo raised."""
    error.__cause__ = None
    error.__suppress_context__ = True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if is_of_package(trace.tb_next):
            trace.tb_next = None
        trace = trace.tb_next
    return error


class Stopped(SystemExit):
    """The ranks have stopped on request, with a checkpoint; raised on all of them, it ends the script with code 0.

    The code is 75 on a host whose torchrun must not regard it as done, since another host alone was ended. A loop
    raises it after its last step, and `evaluate`, `predict` and `update_bn` wherever they are. So nothing is evaluated,
    saved or scheduled after a stop. It is a `SystemExit`, which `except Exception` does not catch. A script that must
    do something before its end catches it and raises it again.
    """

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)


STAGES = (
    "",
    "start",
    "data",
    "forward",
    "backward",
    "gather",
    "fold",
    "optimizer",
    "rows",
    "save",
    "evaluate",
    "predict",
    "update_bn",
)  # by their numbers in messages
STAGE_NUMBERS = {name: number for number, name in enumerate(STAGES)}


@sendable
@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank is.

    Attributes:
        stage, step: as in `PeerFailed`.
        waits: the collective in which it waits; empty if it does not wait.
    """

    stage: str = ""
    step: int = 0
    waits: str = ""

    def __str__(self) -> str:
        """Such as " in forward of step 12"."""
        of = f" of step {self.step}" if self.step else ""
        return f" in {self.stage}{of}" if self.stage else of.replace(" of", " in")


@sendable
@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's answer to a roll call: where it is, and the stack of its main thread."""

    where: RankStatus
    stack: str


@dataclass(frozen=True, slots=True)
class LeftLoop:
    """A loop inside another one, as the script left it by a break or an error.

    Attributes:
        code, lines: of the script's function that iterated it, from the `for` to the line that left it.
        where: the place in which it was left.
        advice: on how to go on with its run.
    """

    code: CodeType
    lines: range
    where: tuple[str, int]
    advice: Callable[[], str]

    def raised(self, error: BaseException) -> bool:
        """Whether the error came from this loop or its body."""
        raised = traceback.walk_tb(error.__traceback__)
        return any(frame.f_code is self.code and line in self.lines for frame, line in raised)


def running_lines() -> dict[CodeType, int]:
    """The line at which each function that runs now is."""
    return {frame.f_code: line for frame, line in traceback.walk_stack(sys._getframe())}


def line_that_leaves() -> tuple[CodeType | None, int]:
    """The script's function that has left a loop, and its line; it is no generator, which would be closed as well."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        is_of_script = not str(frame.f_globals.get("__name__", "")).startswith(("ddp_loop.", "contextlib"))
        if is_of_script and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return frame.f_code, line
    return None, 0


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def aligned(rows: Sequence[Sequence[str]], place: Callable[[str, int], str] = str.ljust) -> list[str]:
    """The lines of a table: its columns have the width of their longest text, and `place` sets a text in it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(place, row, widths)).rstrip() for row in rows]


def format_error(error: BaseException) -> str:
    """The last line of an exception's traceback, even if its `__str__` raises; shortened as `cut_text` does.

    Of an error that is the package's own alone it is the text without the type.

    An exception from a DataLoader's worker has the worker's traceback in its text, of which only the last line stays.
    """
    if type(error).__module__.startswith("ddp_loop.") and type(error).__name__.startswith("_"):
        return str(error)
    head, mark, trace = "".join(traceback.format_exception_only(error)).strip().partition(_IN_WORKER)
    lines = trace.rpartition("Traceback (most recent call last):\n")[2].splitlines()  # of a chain's last one
    text = head + "\n".join(line for line in lines if not line.startswith(" ")) if mark else head
    return cut_text(text, STORED_LETTERS)


def describe_gone(name: str, where: RankStatus) -> str:
    """The message of a rank whose connection ended without a word."""
    return (
        f"{capital(name)} ended without an error of Python (killed, out of memory, or a crash in compiled code), and "
        f"every rank must take part in every collective.{_last_message(where)} Read what its launcher and kernel say."
    )


def capital(name: str) -> str:
    """The name of a rank at the start of a sentence."""
    return name[0].upper() + name[1:]


def _last_message(where: RankStatus) -> str:
    return f" Its last message was sent{where}." if str(where) else ""


def find_culprit(
    here: Mapping[int, RankReport],
    seen: Mapping[int, RankStatus],
    ended: set[int],
    names: Sequence[str],
    timeout_s: float,
) -> tuple[int | None, str]:
    """The rank that holds up the others, and the reason.

    The first of: a rank that left without an error; one that does not answer; one that is in no collective while the
    others wait; one that waits in another collective than most. Where ranks part evenly, as two always do, none
    is to blame, and the reason names the place of each.

    Args:
        here: the answers to the roll call.
        seen: where ranks that did not answer were last seen.
        ended: those that left without an error.
        names: of all ranks, such as "rank 3 on host node7 (10.0.0.7)".
        timeout_s: of the collectives, in seconds.
    """
    if ended:
        rank = min(ended)
        return rank, (
            f"{capital(names[rank])} left the world without an error while others were in a collective, and every rank "
            "must take part in every collective. Leave loops, call evaluate, and go over Batches in a plain `for`, on "
            "all ranks alike."
        )
    if silent := [rank for rank in range(len(names)) if rank not in here]:
        return silent[0], (
            f"{capital(names[silent[0]])} does not answer (killed, stopped, out of memory, a crash in compiled code, "
            "its machine is down, or the network to it is cut), and every rank must take part in every collective."
            f"{_last_message(seen.get(silent[0], RankStatus()))} Read what its launcher and kernel say."
        )
    if late := [rank for rank in range(len(names)) if not here[rank].where.waits]:
        place = str(here[late[0]].where) or " outside of a loop"
        rank, one = next((rank, one) for rank, one in sorted(here.items()) if one.where.waits)
        return late[0], (
            f"{capital(names[late[0]])} is still{place} while {names[rank]} (in {one.where.waits}{one.where}) waits, "
            f"and every rank must reach every collective within timeout_s={timeout_s:g}. Do less between two "
            "collectives, or pass join_world a longer timeout_s."
        )
    kinds = [one.where.waits for _, one in sorted(here.items())]
    counts = Counter(kinds)
    if len(counts) == 1:
        return None, f"All ranks wait in {kinds[0]}, and it does not end. Check the network between the machines."
    if len(set(counts.values())) == 1:
        places = ", ".join(f"{names[rank]} waits in {one.where.waits}{one.where}" for rank, one in sorted(here.items()))
        return None, (
            f"Every rank must make the same collectives in the same order, but {places}. Base decisions on folded "
            "values alone, and call evaluate, and whatever else is for every rank, on all of them."
        )
    odd = min(range(len(names)), key=lambda rank: (counts[kinds[rank]], -rank))
    other = next(kind for kind in kinds if kind != kinds[odd])
    return odd, (
        f"{capital(names[odd])} waits in {kinds[odd]}{here[odd].where}, others in {other}, and every rank must "
        "make the same collectives in the same order. Base decisions on folded values alone, and call evaluate, "
        "and whatever else is for every rank, on all of them."
    )
