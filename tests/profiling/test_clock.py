"""The clock of a profile: each cut ends a phase, so the phases of a step add up to the step."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from ddp_loop.accelerators import Cpu
from ddp_loop.profiling import BACKWARD, COMMUNICATION, DATA, FOLD, FORWARD, PhaseClock
from ddp_loop.profiling import clock as clock_module
from ddp_loop.profiling.clock import OPTIMIZER, OTHER, PHASES


class CountingCpu(Cpu):
    """A device whose clock stands still between two marks, and moves by 1 s at each."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._now = count()

    def mark(self) -> int:
        return next(self._now)


@pytest.fixture
def clock() -> PhaseClock:
    return PhaseClock(CountingCpu())


def spent(clock: PhaseClock) -> dict[str, float]:
    return {phase: seconds for phase, seconds in clock.spent.items() if seconds}


CASES: dict[str, tuple[list[str], dict[str, float]]] = {
    "each cut ends a phase and begins the next": (
        ["start", FORWARD, BACKWARD, FOLD, COMMUNICATION, FOLD, OTHER, "end_step", "stop"],
        {DATA: 1.0, FORWARD: 1.0, BACKWARD: 1.0, FOLD: 2.0, COMMUNICATION: 1.0, OTHER: 1.0},
    ),
    "what follows the last whole step does not count": (
        ["start", "end_step", FORWARD, BACKWARD, "stop", FORWARD],
        {DATA: 1.0},
    ),
    "nothing before the start counts": ([FORWARD, "end_step", "pause", "start", "end_step", "stop"], {DATA: 1.0}),
    "a pause at an epoch's end counts for no phase, nor does what led to it": (
        ["start", FORWARD, "end_step", "pause", DATA, FORWARD, "end_step", "stop"],
        {DATA: 2.0, FORWARD: 2.0},
    ),
    "a wait in backward is cut at both ends": (
        ["start", BACKWARD, "wait", "wait", "end_step", "stop"],
        {DATA: 1.0, BACKWARD: 2.0, COMMUNICATION: 1.0},
    ),
    "a wait in a fold is cut at both ends": (
        ["start", FOLD, "wait", "wait", "end_step", "stop"],
        {DATA: 1.0, FOLD: 2.0, COMMUNICATION: 1.0},
    ),
}


@pytest.mark.parametrize(("calls", "expected"), CASES.values(), ids=CASES)
def test_phases_add_up_to_the_steps(calls: list[str], expected: dict[str, float], clock: PhaseClock) -> None:
    for one in calls:
        if one in PHASES:
            clock.cut(one)
        else:
            getattr(clock, one)()
    assert spent(clock) == expected
    assert list(clock.spent) == list(PHASES)


def test_marks_are_added_up_from_time_to_time(clock: PhaseClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "_MOST_MARKS", 7)
    clock.start()
    for _ in range(100):
        clock.cut(FORWARD)
        clock.cut(FOLD)
        clock.end_step()
        assert len(clock._marks) <= 10
    clock.stop()
    assert spent(clock) == {DATA: 100.0, FORWARD: 100.0, FOLD: 100.0}


@pytest.mark.parametrize(("keywords", "can_fuse"), [({}, True), ({"fused": True}, False)])
def test_an_optimizers_step_is_a_phase_and_a_closure_inside_of_it_is_not(
    clock: PhaseClock, keywords: dict[str, bool], can_fuse: bool
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, **keywords)

    def closure() -> torch.Tensor:
        clock.cut(FORWARD)
        loss = parameter.sum()
        loss.backward()
        clock.cut_outside()
        return loss

    clock.start()
    clock.cut_outside()
    optimizer.step(closure)
    clock.end_step()
    clock.stop()
    assert spent(clock) == {DATA: 1.0, OTHER: 2.0, OPTIMIZER: 2.0, FORWARD: 1.0}
    assert clock.has_unfused == can_fuse
    optimizer.step()
    assert clock.spent[OPTIMIZER] == 2.0  # the hooks are gone


def test_phases_have_names_in_the_trace_of_torchs_profiler(clock: PhaseClock, tmp_path: Path) -> None:
    with torch.profiler.profile(acc_events=True) as profiler:
        clock.annotate()
        for phase in (DATA, FORWARD, OTHER, None):
            clock.cut(phase)
        clock.cut(BACKWARD)
        clock.stop_annotating()
        clock.cut(FOLD)
    names = [event.name for event in profiler.events() if event.name.startswith("ddp_loop")]
    assert sorted(names) == ["ddp_loop: backward", "ddp_loop: data", "ddp_loop: forward"]
