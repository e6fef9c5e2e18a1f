"""What a run reports stays right, and no report stops a rank, whatever receivers, disk and terminal do."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.monitor.run_list import RunList
from ddp_loop.reporting.jsonl import JsonlWriter
from ddp_loop.reporting.rows import EpochMeans, RowMeta
from ddp_loop.reporting.terminal import Terminal
from ddp_loop.reporting.throughput import TrainingLength
from ddp_loop.sinks import csv_sink, read_csv
from tests.support.harness import OnRanks
from tests.support.paths import ROOT
from tests.support.refusals import network
from tests.support.runs import lines_of, status_of
from tests.support.training import train as plain_training
from tests.support.training import train_in

# -- rows ------------------------------------------------------------------------------------------------------


def train(
    folder: str, dtype: torch.dtype = torch.float32, scale: float = 1.0, on_row: Any = None
) -> tuple[list[float], list[dict[str, Any]]]:
    """Each step's loss, of a script that adds it up in the place where it was given it, and the rows."""
    with dl.join_world(seed=0) as world:
        weight = nn.Parameter(torch.full((4,), 0.5, dtype=dtype))
        batches = dl.Batches(torch.arange(1.0, 25.0).reshape(24, 1), 4, world)
        state = {"o": torch.optim.SGD([weight], lr=0.0)}
        loop = dl.Loop(batches, 1, state=state, run_dir=folder, progress=False, on_row=on_row)
        losses, total = list[float](), None
        for step in loop:
            for rows in step:
                step.backward((weight.sum().abs() * rows).mean() * scale)
            loss = step.fold().loss
            losses.append(float(loss))
            total = loss if total is None else total.add_(loss)
    return losses, lines_of(Path(folder) / "rows.jsonl") if world.rank == 0 else []


SIZES = [
    *((torch.float32, 1.0), (torch.float32, 1e20), (torch.float32, 1e-24), (torch.float64, 1.0)),
    *((torch.complex128, 1.0), (torch.complex64, 1e20), (torch.complex64, 1e-24)),
]


def train_in_sizes(folder: str) -> list[tuple[list[float], list[dict[str, Any]]]]:
    return [train(f"{folder}/{number}", *each) for number, each in enumerate(SIZES)]


def test_the_norm_is_right_also_where_squares_have_no_room_and_what_a_script_does_to_its_loss_is_not_told(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for losses, rows in on_ranks(2, train_in_sizes, str(tmp_path))[0]:
        assert [row["loss"] for row in rows] == losses  # |4 * 0.5| * mean, and each of the 4 gradients is the mean
        assert [row["gradient_norm"] for row in rows] == pytest.approx(losses, rel=1e-6)


def train_nothing() -> list[float]:
    empty, outside, told = nn.Parameter(torch.zeros(0)), torch.ones((), requires_grad=True), list[float]()

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return empty.sum() + outside * rows.sum()

    plain_training(nn.ParameterList([empty]), loss, on_row=lambda row: told.append(row["gradient_norm"]))
    return told


def test_parameters_without_elements_have_a_norm_of_0(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_nothing)[0] == [0.0] * 4


def refuse_the_second(row: dict[str, float]) -> None:
    if row["iteration"] == 2:
        raise LookupError("planted")


def fail_in_a_receiver(folder: str) -> list[int]:
    seen: list[int] = []
    with pytest.raises(LookupError):
        train(folder, on_row=[lambda row: seen.append(int(row["iteration"])), refuse_the_second])
    return seen


def test_a_receiver_that_raises_keeps_no_row_from_the_file(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(1, fail_in_a_receiver, str(tmp_path))[0][:2] == [1, 2]
    told = status_of(tmp_path)
    assert told["status"] == "failed"
    rows = [row["iteration"] for row in lines_of(tmp_path / "rows.jsonl")]
    # It may be raised while a step waits for its sums, which has no row then.
    assert rows in (list(range(1, told["step"])), list(range(1, told["step"] + 1)))


def test_an_epoch_that_a_run_goes_on_in_has_the_rows_of_before() -> None:
    epoch, said = EpochMeans(), list[str]()
    for number, loss in enumerate([8.0, None, 1.0, 2.0], 1):
        epoch.recall({"epoch": 1 + number // 3, "iteration": number, "samples": 4, "loss": loss})
    shown = Terminal(said.append, TrainingLength(), 0.0, None, epoch)
    shown.take(RowMeta(2, 5, 8, 0.5, True), {"loss": 3.0})
    shown.take(RowMeta(3, 6, 8, 0.6, True), {"loss": 5.0})
    assert said == ["Epoch: 2, Loss: 2.2500", "Epoch: 3, Loss: 5.0000"]


# -- files -----------------------------------------------------------------------------------------------------


def add_line(file: JsonlWriter, iteration: int) -> None:
    file.add(json.dumps({"iteration": iteration}) + "\n")
    file.flush()


def test_another_runs_folder_in_the_place_is_not_written_to(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    run.mkdir()
    journal = JsonlWriter(run / "ranks.jsonl", 0, said.append, "drop")
    add_line(journal, 1)
    run.rename(tmp_path / "moved")
    run.mkdir()
    add_line(journal, 2)
    add_line(journal, 3)
    assert os.listdir(run) == []
    assert lines_of(tmp_path / "moved" / "ranks.jsonl") == [{"iteration": 1}]
    assert len(said) == 1
    assert "another folder took the place of its folder" in said[0]


def fail_in_a_replaced_folder(folder: str) -> None:
    """Rank 0 fails when the run folder has another name, and an empty one has its own."""

    def replace() -> None:
        Path(folder).rename(f"{folder}, moved")
        Path(folder).mkdir()

    def fail(*_: object) -> None:
        world.on_rank_zero(replace)
        if world.rank == 0:
            raise LookupError("planted")

    with dl.join_world() as world:
        train_in(world, network(), run_dir=folder, after_fold=fail)


def test_no_rank_writes_how_it_ended_into_another_runs_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed, match="planted"):
        on_ranks(2, fail_in_a_replaced_folder, str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == []


def test_a_table_on_a_disk_that_was_full_has_each_row_once(tmp_path: Path) -> None:
    sink = csv_sink(tmp_path / "rows.csv")
    for number in range(1, 4):
        sink({"iteration": number, "loss": 0.5})
    sink.flush()
    for number in range(4, 8):
        sink({"iteration": number, "loss": 0.5})
    size, (soft, hard) = (tmp_path / "rows.csv").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, hard))  # no file of this process grows beyond it
    try:
        with pytest.raises(OSError, match="File too large"):
            sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.close()
    assert [int(row["iteration"]) for row in read_csv(tmp_path / "rows.csv")] == list(range(1, 8))


# -- the terminal, the page ------------------------------------------------------------------------------------


def test_a_terminal_that_is_gone_raises_nothing() -> None:
    gone = Mock(side_effect=OSError(5, "Input/output error"))
    for shows in (False, True):
        said: list[str] = []
        terminal = Terminal(said.append, TrainingLength(), 0.0, SimpleNamespace(draw=gone))
        if shows:
            terminal.take(RowMeta(1, 1, 4, 0.5, True), {"loss": 1.0})
        terminal.close("stopped after step 1")
        assert said[-1] == "stopped after step 1"
    assert gone.called


def test_a_folder_named_by_dots_has_a_key_of_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one" / "two")
    runs = RunList([Path(".."), Path(".")])
    runs.look()
    assert list(runs.folders()) == ["one", "two"]


@pytest.mark.slow
def test_a_script_without_standard_input_has_its_page(tmp_path: Path) -> None:
    script = f"""
import os, signal, urllib.request
from pathlib import Path
from ddp_loop.monitor import start_page
lines = []
process = start_page(Path({str(tmp_path)!r}), lines.append)
link = lines[0].removeprefix("Page: ").partition("#")[0]
try:
    print(urllib.request.urlopen(link, timeout=60).status)
finally:
    os.kill(process, signal.SIGTERM)
    os.waitpid(process, 0)
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 0<&-', sys.executable, script],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr
