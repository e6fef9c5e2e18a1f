"""The processes of a host's ranks, once torch's agent has started them: how they end, and which signals it sends.

[Note: The end of the other ranks] When a rank fails, torch's agent sends SIGTERM to the others at once, waits up to
30 s, and reports then. The ranks of a world end by themselves within 2 s, each with a word on why. So they get that
time first, or until all have left their word. A rank that is stopped takes no signal but SIGKILL, so it is killed
without that wait. The failure is described before anything else is waited for.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_loop.elastic.failures import Ending, describe, describe_interrupt, describe_rest, read_ending
from ddp_loop.elastic.process_states import GRACE_S, INTERRUPTED_EXIT, is_stopped, lacked_memory, oom_kills
from ddp_loop.elastic.rank import ADVICE

_LOOK_S = 0.02
_INTERRUPTED = (0, INTERRUPTED_EXIT, -signal.SIGINT)


class RankProcesses:
    """The processes of this host's ranks.

    Args:
        context: torch's `SubprocessContext`, which has just started them.
        ranks: their numbers in the world, by their numbers on this host.
        timeout_s: from SIGTERM to SIGKILL.

    Attributes:
        are_ended: whether a second Ctrl-C ends them.
    """

    def __init__(self, context: Any, ranks: dict[int, int], timeout_s: int) -> None:
        self._context = context
        self._ranks = ranks
        self._processes = {local: handler.proc for local, handler in context.subprocess_handlers.items()}
        self._timeout_s = timeout_s
        self.are_ended = False
        self._sent: set[tuple[int, int]] = set()  # a rank's number on this host, and a signal that it was sent
        self._stopped: set[int] = set()
        self._left: list[int] = []  # the ranks that still ran when a failure was described
        self._oom_kills = oom_kills()
        context.close = partial(self._close, context.close)  # torch calls it itself when a rank has failed
        for local, handler in context.subprocess_handlers.items():
            handler.close = partial(self._send, local, handler.close)

    def _describe(self) -> None:
        """Describe a failure, while some ranks may still run."""
        endings = self._endings()
        if self.are_ended and all(one.is_by_launcher or one.exit_code in _INTERRUPTED for one in endings):
            sys.stderr.write(describe_interrupt(endings))
            return
        self._left = [self._ranks[local] for local in self._running() if not self._has_word(local)]
        is_terminal = sys.stderr.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        is_coloured = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        sys.stderr.write(describe(endings, self._left, is_coloured=is_coloured, width=width))

    def describe_rest(self, again: str) -> None:
        """Describe how the ranks ended that still ran then, and what comes next, or else what the user can do."""
        after = [again] if again else self._advice()
        sys.stderr.write(describe_rest([one for one in self._endings() if one.rank in self._left], after))

    def are_interrupted(self) -> bool:
        """Whether a second Ctrl-C ends them, or all ended well or by the first one, which was passed on to them."""
        return self.are_ended or all(process.poll() in _INTERRUPTED for process in self._processes.values())

    def _endings(self) -> list[Ending]:
        """How the ranks ended, or are about to end, of which this is known."""
        found = []
        for local, rank in self._ranks.items():
            code = self._processes[local].poll()
            if code == 0:
                found.append(Ending(rank, 0))
            elif code is not None or self._has_word(local):
                # Torch's if it has seen it first, since a failure keeps the time.
                failure = self._context._failures.get(local) or ProcessFailure(
                    local_rank=local,
                    pid=self._processes[local].pid,
                    exitcode=code or 1,
                    error_file=self._context.error_files[local],
                )
                ending = replace(
                    read_ending(rank, failure),
                    is_by_launcher=(local, -failure.exitcode) in self._sent,
                    is_stopped=local in self._stopped,
                    lacked_memory=lacked_memory(self._oom_kills),
                )
                found.append(ending)
        return found

    def _advice(self) -> list[str]:
        """What ranks left to be printed after a failure."""
        found = []
        for path in self._context.error_files.values():
            with suppress(OSError):
                found.append(Path(f"{path}{ADVICE}").read_text("utf-8"))
        return [*filter(None, found)]

    def _has_word(self, local: int) -> bool:
        return os.path.exists(self._context.error_files[local])

    def _running(self) -> list[int]:
        return [local for local in self._ranks if self._processes[local].poll() is None]

    def _close(
        self, close: Callable[..., None], death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        """End the ranks that still run. See [Note: The end of the other ranks]."""
        if death_sig is None and self._context._failures:
            self._await_others()
            self._describe()
        close(death_sig, self._timeout_s if timeout is None else timeout)

    def _await_others(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if all(self._has_word(local) or is_stopped(self._processes[local].pid) for local in self._running()):
                break
            time.sleep(_LOOK_S)
        for local in self._running():
            if is_stopped(self._processes[local].pid):
                self._stopped.add(local)
                self._context.subprocess_handlers[local].close(signal.SIGKILL)
                self._processes[local].wait()

    def _send(self, local: int, send: Callable[..., None], death_sig: signal.Signals | None = None) -> None:
        self._sent.add((local, death_sig or signal.SIGTERM))
        send(death_sig)
