"""The benchmark of the surface example measures what it says, and leaves out what needs a GPU where there is none."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import surface
from examples.surface.train import grid

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
@pytest.mark.parametrize("way", surface.ALONE.values())
def test_a_process_that_ends_is_reported(way: str) -> None:
    said = pytest.raises(RuntimeError, match=rf"^The process of {way} ended\.$")
    with said, surface.process_of(way, threads=0) as step:
        step()


@pytest.mark.covers("I5")
@pytest.mark.usefixtures("small", "no_gpu")
@pytest.mark.slow
def test_sizes_are_measured_on_the_cpu_and_the_gpu_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    surface.report_sizes()
    rows = rows_in(capsys.readouterr().out.partition("| points")[2])
    assert [(row[0], *row[2:]) for row in rows] == [("16", surface.LEFT_OUT, ""), ("64", surface.LEFT_OUT, "")]
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.covers("I5")
def test_the_gpu_is_measured_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    surface.report_sizes()
    rows = rows_in(capsys.readouterr().out.partition("| points")[2])
    assert [row[0] for row in rows] == [f"{side**2:,}" for side in surface.SIDES]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
