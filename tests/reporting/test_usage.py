"""What each rank uses of its machine, in the run folder."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_loop.reporting import usage
from ddp_loop.reporting.usage import UsageLog, processor_s
from tests.support.harness import OnRanks, until
from tests.support.refusals import network
from tests.support.runs import lines_of
from tests.support.training import train as plain_training

CPU = torch.device("cpu")


def train(run: Any, steps: int) -> tuple[list[str], list[str]]:
    """The names of the threads of usage during and after the loop."""
    during = plain_training(network(), run_dir=run, epochs=None, steps=steps, after_fold=lambda *_: usage_threads())
    return during[-1], usage_threads()


def usage_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "ddp_loop usage"]


def usage_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return lines_of(run / "usage" / f"rank-{rank}.jsonl")


def test_each_rank_records_its_usage_until_the_loop_ends_and_without_a_folder_none(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, train, str(tmp_path), 2) == [(["ddp_loop usage"], [])] * 2
    for rank in range(2):
        (line,) = usage_of(tmp_path, rank)  # a run that is shorter than 5 s has its last line
        names = "time elapsed_s iteration processor_percent memory_mib gpu_percent gpu_memory_mib"
        assert " ".join(line) == names
        assert line["iteration"] == 2
        assert abs(time.time() - line["time"]) < 60
        assert 50 < line["memory_mib"] < 1e6
        assert line["processor_percent"] >= 0
        assert (line["gpu_percent"], line["gpu_memory_mib"]) == (None, None)
    assert on_ranks(2, train, None, 2) == [([], [])] * 2


def test_lines_come_while_it_runs_and_those_after_the_checkpoint_are_cut_on_resume(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    on_ranks(2, train, str(tmp_path), 2)
    path = tmp_path / "usage" / "rank-1.jsonl"
    kept = usage_of(tmp_path, 1)
    path.write_text(path.read_text() + json.dumps({**kept[0], "iteration": 3}) + "\n")
    rows = tmp_path / "rows.jsonl"  # the run has lasted 1,000 s; all ranks know it from rank 0
    rows.write_text("".join(json.dumps({**one, "elapsed_s": 1000.0}) + "\n" for one in lines_of(rows)))
    on_ranks(2, train, str(tmp_path), 4)
    lines = usage_of(tmp_path, 1)
    assert [one["iteration"] for one in lines] == [2, 4]
    assert lines[0] == kept[0]
    assert [1000 <= usage_of(tmp_path, rank)[-1]["elapsed_s"] < 1100 for rank in range(2)] == [True, True]


def burn_and_wait(barrier: Any) -> None:
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        math.sqrt(2.0)
    barrier.wait(20)


def test_the_time_of_children_counts_while_they_live_and_when_they_have_ended() -> None:
    fork = multiprocessing.get_context("fork")
    before, barrier = processor_s(), fork.Event()
    child = fork.Process(target=burn_and_wait, args=(barrier,))
    child.start()
    try:
        until(lambda: processor_s() - sum(os.times()[:4]) > 0.2, "the time of a child that lives")
    finally:
        barrier.set()
        child.join()
        child.close()
    assert processor_s() - before > 0.2


def log_of(folder: Path, warnings: list[str]) -> UsageLog:
    return UsageLog(folder, 0, CPU, lambda: 7, time.monotonic(), warnings.append)


def test_a_line_comes_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.01)
    (tmp_path / "run.json").write_text("{}")
    log = log_of(tmp_path, [])
    path = tmp_path / "usage" / "rank-0.jsonl"
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= 3, "three lines")
    log.close()
    log.close()
    lines = usage_of(tmp_path)
    assert [one["time"] for one in lines] == sorted(one["time"] for one in lines)
    assert {one["iteration"] for one in lines} == {7}


def test_a_machine_without_the_run_folder_gets_no_file_and_one_that_cannot_write_it_a_warning(tmp_path: Path) -> None:
    log_of(tmp_path, []).close()
    assert os.listdir(tmp_path) == []
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "usage").write_text("a file")
    warnings: list[str] = []
    log_of(tmp_path, warnings).close()
    assert len(warnings) == 1
    assert "training continues" in warnings[0]


def test_a_gpu_that_cannot_say_its_load_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(utilization=lambda device: 83)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    gpu = torch.device("cuda", 0)
    assert (usage.gpu_percent(gpu), usage.gpu_percent(CPU)) == (83.0, None)
    del module.utilization
    assert usage.gpu_percent(gpu) is None


@pytest.mark.gpu
def test_a_gpu_says_its_load_and_its_memory() -> None:
    tensor = torch.ones(2**20, device="cuda")
    assert usage.memory_mib(tensor.device) >= 4
    assert 0 <= (usage.gpu_percent(tensor.device) or 0) <= 100
