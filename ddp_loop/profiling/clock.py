"""The clock of a profile: a rank's time, cut into the phases of its steps.

[Note: One cut, one phase] Each cut ends a phase and begins the next one, so the phases of a step add up to the step
exactly, and time that no cut claims is "other". On a GPU a cut is an event on the device's stream, not a moment of the
host: a phase then lasts from the moment when the device reaches its first kernel until it reaches the next phase's.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_loop.accelerators import Accelerator

DATA, FORWARD, BACKWARD, COMMUNICATION, FOLD, OPTIMIZER, OTHER = PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "fold",
    "optimizer",
    "other",
)
_MOST_MARKS = 10_000  # before their times are added up, for which the host waits for a GPU
_BY_TORCH = (OPTIMIZER, OTHER)  # a Chrome trace has torch's own range for an optimizer's step


class PhaseClock:
    """Cuts the time of one rank into phases. See [Note: One cut, one phase].

    Args:
        accelerator: of the rank's device.

    Attributes:
        spent: the seconds in each phase of the whole steps, after `stop`.
        has_unfused: whether an optimizer made a step without `fused=True`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.has_unfused = False
        self._marks: list[tuple[str | None, Any]] = []
        self._whole = 0  # the number of marks up to the end of the last whole step
        self._annotates = False
        self._phase: str | None = None
        self._waiting = FOLD  # the phase in which a wait began
        self._outside = OTHER  # the phase between a step's own parts
        self._range: AbstractContextManager[Any] | None = None
        self._hooks: list[Any] = []  # on optimizers, while it measures

    def start(self) -> None:
        """Measure from now on: a step begins."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self.end_step()

    def end_step(self) -> None:
        """End a step, and begin the next one with its data."""
        self.cut(DATA)
        self._whole = len(self._marks)
        if self._whole > _MOST_MARKS:
            self._add_up()

    def pause(self) -> None:
        """Count nothing of the time from the last cut to the next one."""
        self.cut(None)
        if len(self._marks) > 1:
            self._marks[-2] = None, self._marks[-2][1]

    def stop(self) -> None:
        """Measure no more; the time after the last whole step does not count."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._add_up()

    def annotate(self) -> None:
        """Name the phases in the trace of torch's profiler from the next cut on."""
        self._annotates = True

    def stop_annotating(self) -> None:
        """Name no more."""
        self.cut(None)
        self._annotates = False

    def cut(self, phase: str | None) -> None:
        """End a phase and begin the next one; None begins a pause."""
        self._phase = phase
        if self._hooks:
            self._marks.append((phase, self._accelerator.mark()))
        if self._annotates:
            if self._range is not None:
                self._range.__exit__(None, None, None)
            named = phase is not None and phase not in _BY_TORCH
            self._range = torch.profiler.record_function(f"ddp_loop: {phase}") if named else None
            if self._range is not None:
                self._range.__enter__()

    def cut_outside(self) -> None:
        """Begin the phase outside of a step's own parts: the script's lines, or the optimizer's step with a closure."""
        self.cut(self._outside)

    def wait(self) -> float:
        """The time, read by a fold as a wait for other ranks begins and as it ends; a cut at both."""
        if self._phase == COMMUNICATION:
            self.cut(self._waiting)
        else:
            self._waiting = self._phase or FOLD
            self.cut(COMMUNICATION)
        return time.perf_counter()

    def _add_up(self) -> None:
        seconds = self._accelerator.seconds
        for (phase, first), (_, last) in pairwise(self._marks[: self._whole]):
            if phase is not None:
                self.spent[phase] += seconds(first, last)
        del self._marks[: self._whole - 1]
        self._whole = 1

    # -- optimizers ----------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, arguments: object, keywords: object) -> None:
        self.has_unfused = self.has_unfused or not optimizer.defaults.get("fused")
        self._outside = OPTIMIZER
        self.cut(OPTIMIZER)

    def _after(self, optimizer: Optimizer, arguments: object, keywords: object) -> None:
        self._outside = OTHER
        self.cut(OTHER)
