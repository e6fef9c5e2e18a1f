"""The benchmark of the surface example measures what it says, and leaves out what needs a GPU where there is none."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import surface
from benchmarks.measuring import compare
from ddp_loop.accelerators import Cpu
from examples.surface.train import grid
from tests.support.harness import OnRanks, child_processes

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "SIDE", 8)
    monkeypatch.setattr(surface, "SIDES", (4, 8))


def rows_in(printed: str) -> list[list[str]]:
    """The cells of a table's rows."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:] if line]


@pytest.mark.covers("I6")
@pytest.mark.usefixtures("small")
def test_resident_data_are_measured_against_two_data_loaders() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = surface.measure_reading()
    assert list(found) == [f"{device}: resident / {name}" for name in ("DataLoader", "DataLoader by a batch sampler")]
    assert all(ratio.median > 0 and ratio.pairs == 20 for ratio in found.values())


def weights_of(job: surface.Job) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(job[0].parameters()).detach()


def test_plain_steps_train_alike_on_resident_data_and_from_a_loader() -> None:
    jobs = [surface.make_job(CPU) for _ in range(3)]
    untrained = weights_of(jobs[2])
    rows = TensorDataset(*grid(8))
    for step in surface.resident_step(CPU, 8, jobs[0]), surface.plain_step(jobs[1], CPU, DataLoader(rows, len(rows))):
        step()
        step()
    assert torch.equal(weights_of(jobs[0]), weights_of(jobs[1]))
    assert not torch.equal(weights_of(jobs[0]), untrained)


@pytest.mark.slow
def test_each_way_trains_in_a_process_of_its_own() -> None:
    for way in surface.ALONE.values():
        before = child_processes()
        with surface.process_of(way) as step:
            step()
            step()  # raises if the process has not trained
            assert len(child_processes() - before) == 1
        assert child_processes() == before


def measure_small() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:  # the ranks of the tests have other tests to run
        patch.setattr(surface, "SIDE", 8)
        patch.setattr(Cpu, "keep_memory", lambda cpu: None)
        patch.setattr(surface, "compare", lambda one, other, **_: compare(one, other, pairs=2, steps=1))
        return list(surface.measure_together())


@pytest.mark.slow
def test_ranks_of_one_thread_are_measured_against_one_process_of_as_many(on_ranks: OnRanks) -> None:
    assert (
        on_ranks(2, measure_small)
        == [["2 ranks of 1 thread: ours / plain, 1 process of 2 threads", "1 process of 2 threads: plain / plain"]] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", surface.ALONE.values())
def test_a_process_that_ends_is_reported(way: str) -> None:
    said = pytest.raises(RuntimeError, match=rf"^The process of {way} ended\.$")
    with said, surface.process_of(way, threads=0) as step:
        step()


@pytest.mark.covers("I5")
@pytest.mark.usefixtures("small", "no_gpu")
def test_sizes_are_measured_on_the_cpu_and_the_gpu_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    surface.report_sizes()
    rows = rows_in(capsys.readouterr().out.partition("| points")[2])
    assert [(row[0], *row[2:]) for row in rows] == [("16", surface.LEFT_OUT, ""), ("64", surface.LEFT_OUT, "")]
    assert all(float(row[1]) > 0 for row in rows)


def test_the_sizes_go_from_100_to_1_000_000_points() -> None:
    assert [side**2 for side in (surface.SIDES[0], surface.SIDES[-1])] == [100, 1_000_000]
    assert 200 in surface.SIDES


@pytest.mark.gpu
@pytest.mark.covers("I5")
def test_the_gpu_is_measured_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    surface.report_sizes()
    rows = rows_in(capsys.readouterr().out.partition("| points")[2])
    assert [row[0] for row in rows] == [f"{side**2:,}" for side in surface.SIDES]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
