"""One rank's failure becomes everybody's, with its words, within the time that the project promises."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import ddp_loop as dl
from ddp_loop.accelerators import HostCopy
from ddp_loop.distributed import format_error
from ddp_loop.distributed.processes import LineHook, set_line
from ddp_loop.distributed.torch_backend import TorchBackend
from tests.support.harness import FAULT_S, OnRanks, Unspeakable, caught
from tests.support.paths import ROOT

pytestmark = pytest.mark.covers("D10")


class Mute(Exception):
    """An exception without a usable text."""

    def __str__(self) -> str:
        raise LookupError("no words")


RAISED: list[tuple[Callable[[], BaseException], str, str]] = [  # what a rank raises, its kind, what the others say
    (lambda: ValueError("a fault of rank 1"), "ValueError", "ValueError: a fault of rank 1"),
    (lambda: Unspeakable(1, 2), "Unspeakable", "Unspeakable: 1 is not 2"),
    (Mute, "Mute", "Mute: <exception str() failed>"),
    (lambda: SystemExit(0), "SystemExit", "SystemExit: 0, at /"),
    (lambda: SystemExit(3), "SystemExit", "SystemExit: 3, at /"),
    (KeyboardInterrupt, "KeyboardInterrupt", "KeyboardInterrupt"),
    (GeneratorExit, "GeneratorExit", "GeneratorExit"),
    (lambda: RuntimeError("\ud800 \0 \U0001f600"), "RuntimeError", "RuntimeError: "),
    (lambda: ExceptionGroup("two", [ValueError("one"), KeyError("x")]), "ExceptionGroup", "two (2 sub-exceptions)"),
]


def fail_each_way() -> list[tuple[str, str, float]]:
    def work(error: Callable[[], BaseException]) -> None:
        with dl.join_world() as world:
            world.sum(torch.ones(()))
            if world.rank == 1:
                raise error()
            world.sum(torch.ones(()))

    return [caught(work, error) for error, _, _ in RAISED]


def test_whatever_a_rank_raises_the_others_get_with_its_traceback(on_ranks: OnRanks) -> None:
    first, culprit, third = on_ranks(3, fail_each_way)
    assert [kind for kind, _, _ in culprit] == [own for _, own, _ in RAISED]
    for peer in (first, third):
        for (raised, text, took_s), (_, _, told) in zip(peer, RAISED, strict=True):
            assert raised == "PeerFailed"
            assert text.startswith("rank 1 failed: ")
            assert told in text
            assert "Traceback (most recent call last)" in text
            assert "in work\n" in text
            assert took_s < FAULT_S


PROBLEMS = [{1: "bad"}, {0: "bad", 2: "worse"}, {0: "a", 1: "b", 2: "c"}]


def agree() -> list[tuple[str, str, float]]:
    def work(problems: dict[int, str]) -> None:
        with dl.join_world() as world:
            world.raise_if_any_failed(ValueError(problems[world.rank]) if world.rank in problems else None)

    return [caught(work, problems) for problems in PROBLEMS]


def test_one_ranks_problem_is_raised_by_all(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(3, agree)):
        for problems, (kind, text, took_s) in zip(PROBLEMS, found, strict=True):
            if rank in problems:
                assert (kind, text) == ("ValueError", problems[rank])
            else:
                assert (kind, text.split(": ")[0]) == ("PeerFailed", f"rank {min(problems)} failed")
            assert took_s < FAULT_S


def fail_on_rank_1() -> str:
    """The traceback of a rank as the interpreter prints it."""
    try:
        with dl.join_world() as world:
            if world.rank == 1:
                raise ValueError("the labels are bad")
            world.sum(torch.ones(1))
    except (ValueError, dl.PeerFailed):
        return traceback.format_exc()
    raise AssertionError("it did not fail")


def test_a_peers_traceback_has_the_scripts_lines_alone_and_torchrun_gets_the_culprits(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    peer, culprit = on_ranks(2, fail_on_rank_1)
    assert "world.sum(torch.ones(1))" in peer
    assert not re.search(f"gloo|{re.escape(str(ROOT / 'ddp_loop'))}/|another exception|direct cause", peer)
    assert peer.count("\n") < 15
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == "ValueError: the labels are bad"
    assert told["extraInfo"]["py_callstack"] in culprit


def fail_at_length(folder: str | None, letters: int) -> dl.PeerFailed | None:
    """Rank 1 raises a long text, in a run folder or without one."""
    try:
        with dl.join_world() as world:
            model = torch.nn.Linear(1, 1)
            batches = dl.Batches(torch.ones(4, 1), 2, world)
            for _ in dl.Loop(batches, 1, state={"model": model}, run_dir=folder, progress=False):
                if world.rank == 1:
                    raise ValueError("first words " + "ä" * letters + " last words")
                world.store.await_first("never", 20.0, "", 0)
    except ValueError:
        return None
    except dl.PeerFailed as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_text_of_5_mb_is_cut_and_the_run_folder_keeps_the_whole(
    with_folder: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    error, _ = on_ranks(2, fail_at_length, str(tmp_path) if with_folder else None, 5_000_000, timeout_s=30)
    assert error is not None
    assert (error.rank, error.step) == (1, 1)
    said = str(error)
    assert said.startswith("rank 1 failed in step 1: ValueError: first words ä")
    assert said.rstrip().endswith("last words")
    assert re.search(r"\[4\d{6} characters are left out\. The run folder, if there is one, has the whole\.\]", said)
    assert len(said) < 250_000
    kept = list(tmp_path.glob("error.*"))
    assert [path.name for path in kept] == ["error.rank-1.txt"] * with_folder
    assert all(len(path.read_text()) > 5_000_000 for path in kept)


class Torn(Dataset[torch.Tensor]):
    """Its sample 2 cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            try:
                raise LookupError("no such page")
            except LookupError as error:
                raise KeyError("the file is torn") from error
        return torch.ones(3)


def test_an_exception_in_a_worker_is_reported_without_the_workers_traceback() -> None:
    with dl.join_world() as world:
        batches = dl.Batches(Torn(), 2, world, shuffle=False, num_workers=1, check_data=False)
        with pytest.raises(KeyError) as caught_here:
            [loaded.data(0) for loaded in batches.epoch(1)]
    assert format_error(caught_here.value).splitlines() == [
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        "KeyError: 'the file is torn'",
        "while sample 2 of epoch 1 was read",
    ]


def test_a_peer_shows_the_start_and_the_end_of_a_long_text(capsys: pytest.CaptureFixture[str]) -> None:
    error = dl.PeerFailed(f"rank 1 failed: ValueError: first words {'x' * 90_000} last words\n\nTraceback", 1)
    set_line(error, f"ddp_loop: rank 0 was ended in fold of step 3: {error.summary}")
    LineHook(sys.excepthook)(dl.PeerFailed, error, None)
    said = capsys.readouterr().err
    assert said.startswith("ddp_loop: rank 0 was ended in fold of step 3: rank 1 failed: ValueError: first words x")
    assert "characters are left out" in said
    assert len(said) < 2_500


class Never:
    """The event of a device that waits for a killed rank."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host must be able to look for failures")


def end_at_once() -> None:
    with dl.join_world(exchange="gloo"):
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_killed_rank() -> tuple[str, str, float] | None:
    """A child of rank 1's process takes its part, so that the pool sees no failure."""
    if os.environ["RANK"] == "1":
        child = multiprocessing.get_context("fork").Process(target=end_at_once)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        return None

    def wait() -> None:
        with dl.join_world(exchange="gloo"):
            copy = HostCopy(torch.ones(()))
            copy._event = Never()
            copy.wait()

    return caught(wait)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_others_wait_for_their_device_is_named(on_ranks: OnRanks) -> None:
    for found in on_ranks(3, wait_for_a_killed_rank)[::2]:
        assert found is not None
        kind, text, took_s = found
        assert kind == "PeerFailed"
        assert "Rank 1 does not answer (killed" in text
        assert took_s < FAULT_S


class Later(Never):
    """The event of a device that computes for a second, in which the others end."""

    def __init__(self) -> None:
        self._until = time.monotonic() + 1.2

    def query(self) -> bool:
        return time.monotonic() > self._until


def end_well_before_the_others() -> float:
    with dl.join_world(exchange="gloo") as world:
        world.sum(torch.ones(()))
        if world.rank == 0:
            return 0.0
        copy = HostCopy(torch.full((), 7.0))
        copy._event = Later()
        return copy.wait().item()


def test_a_rank_that_has_ended_well_disturbs_no_wait_for_a_device(on_ranks: OnRanks) -> None:
    assert on_ranks(2, end_well_before_the_others) == [0.0, 7.0]


def part_on_the_host() -> tuple[str, str, float]:
    """Rank 0 waits in a step's sum of host tensors, rank 1 elsewhere; the device's backend would wait to the end."""

    def work() -> None:
        with dl.join_world(exchange="gloo", timeout_s=40.0) as world:
            backends = world._collectives._backends
            assert backends is not None
            device = TorchBackend(dist.distributed_c10d._get_default_group())
            world._collectives._backends = replace(backends, device=device)
            if world.rank == 0:
                world.finish(world.start_sum(torch.ones(())))
            else:
                world.gather("elsewhere")

    return caught(work)


@pytest.mark.slow
def test_host_tensors_are_waited_for_in_slices_whatever_the_devices_backend(on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(2, part_on_the_host):
        assert kind == "PeerFailed"
        assert "Every rank must make the same collectives in the same order" in text
        assert took_s < FAULT_S
