"""Signals as requests: in a second loop, repeated by a launcher, two and three Ctrl-C, and the handlers afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed import RankFailed
from tests.support.harness import FAULT_S, OnRanks, caught, until
from tests.support.runs import ASKED_S, LONG_S, ask, checkpoints_of, endless, status_of

pytestmark = pytest.mark.covers("E5")

APART_S = 0.4  # Ctrl-C counts twice if it comes again after 0.3 s


# -- repeated requests -----------------------------------------------------------------------------------------


def stop_two_loops() -> list[tuple[int, str | None]]:
    """The second loop is stopped by a Ctrl-C of its own."""
    ended = []
    with dl.join_world() as world:
        for at in (2, 3):
            loop, make = endless(world)
            with suppress(dl.Stopped):
                for step in loop:
                    if step.iteration == at and world.rank == 0:
                        ask("SIGINT", "", loop)
                    make(step)
            ended.append((loop.iteration, loop.stopped))
    return ended


def test_a_loop_after_one_that_was_stopped_begins_anew(on_ranks: OnRanks) -> None:
    expected = [(2, "Ctrl-C at rank 0"), (3, "Ctrl-C at rank 0")]
    assert on_ranks(2, stop_two_loops) == [expected, expected]


def send_the_echo() -> float:
    """A launcher signals rank 1 after all ranks have stopped; a later signal proves that the first ones arrived."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler, before = signal.signal(signal.SIGUSR2, lambda *_: None), signal.set_wakeup_fd(write)
    try:
        with dl.join_world() as world:
            loop, make = endless(world)
            with suppress(dl.Stopped):
                for step in loop:
                    if step.iteration == 2 and world.rank == 0:
                        ask("SIGTERM", "", loop)
                    make(step)
            if world.rank == 1:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                    os.kill(os.getpid(), number)
                assert os.read(read, 1) == bytes([signal.SIGUSR2])
            return float(world.sum(torch.ones(())))
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, handler)
        os.close(read)
        os.close(write)


def test_the_same_request_again_at_another_rank_does_no_harm(on_ranks: OnRanks) -> None:
    assert on_ranks(2, send_the_echo) == [2.0, 2.0]


def press_ctrl_c(times: int, stop_asked: Callable[[], bool]) -> None:
    """Press Ctrl-C as a user does, from a thread of its own."""
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        until(stop_asked, "the request is noticed", ASKED_S)
        time.sleep(APART_S)


def sleep_in_forward(folder: str, times: int) -> None:
    with dl.join_world() as world:
        loop, make = endless(world, run_dir=folder)

        def forward() -> None:
            if step.iteration == 3 and world.rank == world.size - 1:
                keys = threading.Thread(target=press_ctrl_c, args=(times, lambda: world.stops.asked is not None))
                keys.start()
                try:
                    time.sleep(LONG_S)
                except KeyboardInterrupt:
                    if times == 2:
                        keys.join()
                        raise
                    time.sleep(LONG_S)  # ignores the second Ctrl-C

        for step in loop:
            make(step, forward)


def interrupted(folder: str, is_lost: bool) -> tuple[str, str, float]:
    """The first interrupt may arrive while Python enters the sleep again, and be lost."""
    send, sent = signal.pthread_kill, []

    def send_or_lose(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > is_lost:
            send(thread, number)

    with mock.patch("ddp_loop.distributed.watchdog.signal.pthread_kill", send_or_lose):
        found = caught(sleep_in_forward, folder, 2)
    assert found[0] == "PeerFailed" or len(sent) > is_lost
    return found


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_second_ctrl_c_leaves_a_step_that_sleeps(is_lost: bool, on_ranks: OnRanks, tmp_path: Path) -> None:
    (kind, text, took_s), (own, said, _) = on_ranks(2, interrupted, str(tmp_path), is_lost)
    assert (own, said) == ("KeyboardInterrupt", "a second Ctrl-C")
    assert (kind, text.splitlines()[0]) == ("PeerFailed", "rank 1 failed in forward of step 3: " + f"{own}: {said}")
    assert took_s < 2 * APART_S + FAULT_S
    assert (status_of(tmp_path)["status"], checkpoints_of(tmp_path)) == ("failed", [2])


def test_a_third_ctrl_c_ends_a_process_that_ignores_the_second(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died with exit code 130"):
        on_ranks(1, sleep_in_forward, str(tmp_path), 3)


def sleep_after_a_stop(folder: str) -> None:
    with mock.patch("ddp_loop.distributed.signals._ECHO_S", 0.0), dl.join_world() as world:
        loop, make = endless(world, run_dir=folder)
        with suppress(dl.Stopped):
            for step in loop:
                make(step)
                if step.iteration == 3:
                    loop.stop()
        os.kill(os.getpid(), signal.SIGTERM)  # not a repetition of the request: the user wants the process to end
        time.sleep(LONG_S)


@pytest.mark.slow
def test_sigterm_after_a_stop_ends_a_script_that_still_runs(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died with exit code 143"):
        on_ranks(1, sleep_after_a_stop, str(tmp_path))
    assert (status_of(tmp_path)["status"], checkpoints_of(tmp_path)[-1]) == ("stopped", 4)


# -- the wakeup descriptor of another ---------------------------------------------------------------------------


async def handle_a_signal() -> None:
    """An event loop has a handler for a moment, which leaves no wakeup descriptor behind."""
    events = asyncio.get_running_loop()
    events.add_signal_handler(signal.SIGUSR2, print)
    events.remove_signal_handler(signal.SIGUSR2)


async def ask_in_an_event_loop(loop: dl.Loop) -> bool:
    """Ask for a stop while an event loop has the wakeup descriptor; returns whether it still has it."""
    events = asyncio.get_running_loop()
    events.add_signal_handler(signal.SIGUSR2, print)
    ask("SIGTERM", "", loop)
    own = signal.set_wakeup_fd(-1, warn_on_full_buffer=False)
    signal.set_wakeup_fd(own, warn_on_full_buffer=False)
    return bool(own == events._csock.fileno())  # type: ignore[attr-defined]


def stop_beside_an_event_loop(is_over: bool) -> tuple[int, str | None, bool]:
    kept = True
    with dl.join_world() as world:
        loop, make = endless(world)
        with suppress(dl.Stopped):
            for step in loop:
                if step.iteration == 2 and world.rank == 1:
                    if is_over:
                        asyncio.run(handle_a_signal())
                        ask("SIGTERM", "", loop)
                    else:
                        kept = asyncio.run(ask_in_an_event_loop(loop))
                make(step)
    return loop.iteration, loop.stopped, kept


@pytest.mark.parametrize("is_over", [True, False], ids=["that has ended", "that runs"])
def test_a_request_is_heard_beside_an_event_loop_that_handles_signals(is_over: bool, on_ranks: OnRanks) -> None:
    assert on_ranks(2, stop_beside_an_event_loop, is_over) == [(2, "SIGTERM at rank 1", True)] * 2


# -- the handlers before ---------------------------------------------------------------------------------------


async def signals_of_an_event_loop(how: str) -> list[str]:
    """Leave a loop in the given way while an event loop handles a signal; returns what was handled."""
    heard: list[str] = []
    events = asyncio.get_running_loop()
    events.add_signal_handler(signal.SIGUSR2, heard.append, "heard")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with suppress(dl.Stopped), dl.join_world() as world:
            loop, make = endless(world)
            for step in loop:
                make(step)
                assert signal.getsignal(signal.SIGTERM) != before[1]
                if step.iteration == 2:
                    os.kill(os.getpid(), signal.SIGUSR2)
                    if how == "an exception":
                        raise LookupError(how)
                    if how == "a break":
                        break
                    loop.stop()
    except LookupError:
        heard.append(how)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1, warn_on_full_buffer=False) == events._csock.fileno()  # type: ignore[attr-defined]
    signal.set_wakeup_fd(events._csock.fileno(), warn_on_full_buffer=False)  # type: ignore[attr-defined]
    deadline = time.monotonic() + ASKED_S
    while "heard" not in heard and time.monotonic() < deadline:
        await asyncio.sleep(0)
    events.remove_signal_handler(signal.SIGUSR2)
    return sorted(heard)


@pytest.mark.parametrize("how", ["loop.stop()", "a break", "an exception"])
def test_handlers_and_the_wakeup_descriptor_are_put_back(how: str) -> None:
    expected = ["an exception", "heard"] if how == "an exception" else ["heard"]
    assert asyncio.run(signals_of_an_event_loop(how)) == expected
