"""What a rank or its DataLoader's worker starts during a Loop can be ended as usual; workers are needed until then."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import MOMENT_S, OnRanks
from tests.support.runs import LONG_S, endless, status_of

NUMBERS = [signal.SIGINT, signal.SIGTERM]
SLEEP = [sys.executable, "-c", f"import time; print(flush=True); time.sleep({LONG_S})"]


Started = subprocess.Popen[bytes] | BaseProcess


def start_program(**options: Any) -> Started:
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    process.stdout.readline()  # Python has installed its handlers
    process.stdout.close()
    return process


def start_process() -> Started:
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    process = fork.Process(target=sleep, args=(begun,), daemon=True)
    process.start()
    assert begun.wait(MOMENT_S)
    return process


def sleep(begun: Event) -> None:
    begun.set()
    time.sleep(LONG_S)


STARTS: dict[str, Callable[[], Started]] = {
    "Popen": start_program,
    "Popen with preexec_fn": lambda: start_program(preexec_fn=os.setsid),
    "multiprocessing": start_process,
}


def ends_by(process: Started, number: signal.Signals) -> bool:
    """Whether it is ended by a signal."""
    assert process.pid is not None
    os.kill(process.pid, number)
    if isinstance(process, BaseProcess):
        process.join(MOMENT_S)
        ended = not process.is_alive()
    else:
        with suppress(subprocess.TimeoutExpired):
            process.wait(MOMENT_S)
        ended = process.returncode is not None
    if not ended:
        process.kill()
    return ended


def end_what_a_step_starts(how: str) -> list[bool]:
    ended = []
    with dl.join_world() as world:
        loop, make = endless(world)
        for step in loop:
            ended += [ends_by(STARTS[how](), number) for number in NUMBERS]
            make(step)
            break
    return ended


@pytest.mark.parametrize("how", STARTS)
def test_what_a_rank_starts_in_a_loop_can_be_ended(how: str, on_ranks: OnRanks) -> None:
    assert on_ranks(1, end_what_a_step_starts, how) == [[True, True]]


class Starting(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is how a process that the worker starts ends; the worker sends both signals to itself."""

    def __init__(self, how: str) -> None:
        self._how, self.has_loop = how, False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.has_loop:  # the ranks' data are compared
            return torch.zeros(2)
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        return torch.tensor([float(ends_by(STARTS[self._how](), number)) for number in NUMBERS])


def read_from_a_worker(how: str) -> list[list[float]]:
    with dl.join_world() as world:
        data = Starting(how)
        batches = dl.Batches(data, 1, world, num_workers=1)
        data.has_loop = True
        model = torch.nn.Linear(2, 1)
        seen = []
        for step in dl.Loop(batches, 1, state={"m": model}, progress=False):
            for rows in step:
                seen += rows.tolist()
                step.backward(model(rows).mean())
            step.fold()
        return seen


@pytest.mark.parametrize("how", ["Popen", "Popen with preexec_fn"])
def test_what_a_worker_starts_can_be_ended_and_the_worker_lives_on(how: str, on_ranks: OnRanks) -> None:
    assert on_ranks(1, read_from_a_worker, how) == [[[1.0, 1.0]] * 4]


def fork_in_a_step(how: str, run: str) -> tuple[int, int]:
    """The exit code of a process that rank 1 forks inside a step, and the steps of the loop."""
    code = -1
    with dl.join_world() as world:
        model = torch.nn.Linear(3, 1)
        batches = dl.Batches(torch.ones(8, 3), 4, world, num_workers=1, multiprocessing_context="fork")
        loop = dl.Loop(batches, 2, state={"m": model}, progress=False, run_dir=run)
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
            if step.iteration == 3 and world.rank == 1:
                child = os.fork()
                if child == 0:
                    if how == "an error":
                        raise ValueError("of the child")
                    sys.exit(7 if how == "sys.exit(7)" else 0)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            step.fold()
    return code, loop.iteration


@pytest.mark.parametrize(("how", "code"), [("an error", 1), ("sys.exit(7)", 7), ("sys.exit(0)", 0)])
def test_a_process_that_a_rank_forked_ends_by_itself_and_the_run_goes_on(
    how: str, code: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, fork_in_a_step, how, str(tmp_path)) == [(-1, 4), (code, 4)]
    assert status_of(tmp_path)["status"] == "done"
