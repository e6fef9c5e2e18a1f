"""The fixtures that the other tests rely on: a failure of theirs would hide failures elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_loop.distributed import RankFailed
from tests.support import harness
from tests.support.harness import OnRanks, Surroundings, held_ports, left_behind, look_around
from tests.support.paths import TESTS

pytest_plugins = ["pytester"]

CONFTEST = TESTS / "conftest.py"
WAIT = "import sys; sys.stdin.read()"  # until its standard input is closed


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Surroundings:
    """The surroundings of a test that then leaves something behind, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHANGED", "before")
    return look_around()


def sum_and_threads(value: float) -> tuple[float, int]:
    dist.init_process_group("gloo")
    total = torch.tensor(value * (1 + dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item(), torch.get_num_threads()


def leave_the_group_open() -> None:
    dist.init_process_group("gloo")


def leave_a_variable() -> None:
    os.environ["LEFT_ON_A_RANK"] = "here"


def test_a_function_of_a_test_file_runs_on_ranks_with_one_thread_each(on_ranks: OnRanks) -> None:
    assert on_ranks(3, sum_and_threads, 0.5) == [(3.0, 1)] * 3


@pytest.mark.slow
def test_more_ranks_than_usual_come_when_a_test_asks(on_ranks: OnRanks) -> None:
    assert on_ranks(6, sum_and_threads, 1.0) == [(21.0, 1)] * 6


def test_a_task_that_leaves_its_process_group_open_fails(on_ranks: OnRanks) -> None:
    with pytest.raises(RankFailed, match="leave_the_group_open left: process group: the default one"):
        on_ranks(2, leave_the_group_open)


def test_a_task_that_leaves_a_variable_fails(on_ranks: OnRanks) -> None:
    with pytest.raises(RankFailed, match=r"leave_a_variable left: environment variable: .*LEFT_ON_A_RANK"):
        on_ranks(1, leave_a_variable)


def test_nothing_is_found_where_nothing_was_left(before: Surroundings) -> None:
    assert left_behind(before) == []


def test_an_environment_variable_is_found(before: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "after")
    assert left_behind(before) == ["environment variable: ('CHANGED', 'after')"]
    monkeypatch.delenv("CHANGED")
    assert left_behind(before) == ["environment variable removed: CHANGED"]


def test_a_thread_is_found_and_one_that_ends_by_itself_is_not(before: Surroundings) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    with mock.patch.object(harness, "THREAD_END_S", 0.1):
        assert [line.partition(",")[0] for line in left_behind(before)] == ["thread: <Thread(forgotten"]
    release.set()
    assert left_behind(before) == []


def test_a_child_process_is_found_however_it_was_started(before: Surroundings) -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as process:
        (line,) = left_behind(before)
        assert line.startswith(f"child process: {process.pid}: ")
        assert left_behind(before, {process.pid}) == []
    assert left_behind(before) == []


def test_the_resource_tracker_of_multiprocessing_may_stay(before: Surroundings) -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    assert left_behind(before) == []
    del lock


def test_a_file_in_the_working_folder_is_found_and_whether_it_is_open(before: Surroundings, tmp_path: Path) -> None:
    path = tmp_path / "forgotten.txt"
    with path.open("w"):
        assert left_behind(before) == [
            "file in the working folder: forgotten.txt",
            f"open file in the working folder: {path}",
        ]
    assert left_behind(before) == ["file in the working folder: forgotten.txt"]


def test_an_open_file_of_an_installed_package_may_stay(
    before: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    (tmp_path / "environment").mkdir()
    with (tmp_path / "environment" / "font.ttf").open("w"):
        assert left_behind(before) == ["file in the working folder: environment"]


def test_a_process_group_is_found(before: Surroundings) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert left_behind(before) == ["process group: the default one"]
    dist.destroy_process_group()


def test_a_changed_setting_of_torch_is_found(before: Surroundings) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert left_behind(before) == ["torch setting: ('default dtype', torch.float64)"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_held_port_is_for_the_server_that_asks_for_it_by_number() -> None:
    with held_ports(1) as [port]:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_test_that_leaves_something_fails_and_a_gpu_test_is_skipped_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a GPU\nfilterwarnings = error\n")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import os
        import pytest

        def test_leaves_a_variable():
            os.environ["CHANGED"] = "after"

        def test_leaves_nothing():
            pass

        @pytest.mark.gpu
        def test_needs_a_gpu():
            raise AssertionError
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=2, errors=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*a test must leave its surroundings as they were; left:",
            "*environment variable: ('CHANGED', 'after')",
            "SKIPPED*needs a GPU: torch.cuda.is_available() is False on this machine",
        ]
    )
