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


def test_each_cut_ends_a_phase_and_begins_the_next(clock: PhaseClock) -> None:
    clock.start()
    for phase in (FORWARD, BACKWARD, FOLD, COMMUNICATION, FOLD, OTHER):
        clock.cut(phase)
    clock.end_step()
    clock.stop()
    expected = {DATA: 1.0, FORWARD: 1.0, BACKWARD: 1.0, FOLD: 2.0, COMMUNICATION: 1.0, OTHER: 1.0}
    assert spent(clock) == expected
    assert list(clock.spent) == list(PHASES)


def test_what_follows_the_last_whole_step_does_not_count(clock: PhaseClock) -> None:
    clock.start()
    clock.end_step()
    for phase in (FORWARD, BACKWARD):
        clock.cut(phase)
    clock.stop()
    clock.cut(FORWARD)
    assert spent(clock) == {DATA: 1.0}


def test_nothing_before_the_start_counts(clock: PhaseClock) -> None:
    clock.cut(FORWARD)
    clock.end_step()
    clock.pause()
    clock.start()
    clock.end_step()
    clock.stop()
    assert spent(clock) == {DATA: 1.0}


def test_a_pause_counts_for_no_phase_nor_does_what_led_to_it(clock: PhaseClock) -> None:
    clock.start()
    clock.cut(FORWARD)
    clock.end_step()  # the epoch's last step
    clock.pause()  # the reader found no further mini-batch
    clock.cut(DATA)
    clock.cut(FORWARD)
    clock.end_step()
    clock.stop()
    assert spent(clock) == {DATA: 2.0, FORWARD: 2.0}


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


@pytest.mark.parametrize("phase", [BACKWARD, FOLD])
def test_a_wait_is_cut_where_it_begins_and_where_it_ends(phase: str, clock: PhaseClock) -> None:
    clock.start()
    clock.cut(phase)
    assert clock.wait() <= clock.wait()
    clock.end_step()
    clock.stop()
    assert spent(clock) == {DATA: 1.0, phase: 2.0, COMMUNICATION: 1.0}


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
