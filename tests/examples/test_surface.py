"""The surface example: its grid, its errors, its times, its two devices and its picture."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import mse_loss

from ddp_loop import networks
from ddp_loop.accelerators import Cpu
from examples.surface import train as example
from tests.support.harness import OnRanks
from tests.support.scripts import run_here


def arguments(*given: object) -> Any:
    return example.read_arguments([str(one) for one in given])


def digest(trained: example.Trained) -> str:
    weights = nn.utils.parameters_to_vector(trained.model.parameters()).detach()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


@pytest.fixture(autouse=True)
def keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has other tests to run, with the allocator as it was."""
    monkeypatch.setattr(Cpu, "keep_memory", lambda cpu: None)


# -- the data ----------------------------------------------------------------------------------------------


@pytest.mark.covers("I1")
def test_the_grid_has_40000_rows_and_the_heights_of_peaks() -> None:
    points, heights = example.grid(200)
    assert (points.shape, points.dtype) == ((40_000, 2), torch.float32)
    assert (heights.shape, heights.dtype) == ((40_000, 1), torch.float32)
    assert (round(heights.min().item(), 4), round(heights.max().item(), 4)) == (-6.5487, 8.1059)
    assert points[[0, 1, 200, -1]].tolist() == pytest.approx(
        torch.tensor([[-3, -3], [-3 + 6 / 199, -3], [-3, -3 + 6 / 199], [3, 3]])
    )
    zero = torch.zeros(1)
    assert example.peaks(zero, zero).item() == pytest.approx(3 / math.e - 1 / (3 * math.e))


@pytest.mark.covers("I2")
def test_the_least_error_of_a_relu_end_and_that_of_a_dead_network() -> None:
    _, heights = example.grid(200)
    assert round(heights.square().mean().item(), 4) == 3.7288
    assert round(mse_loss(heights.relu(), heights).item(), 4) == 1.1641


# -- the training ------------------------------------------------------------------------------------------


@pytest.mark.covers("I2")
@pytest.mark.parametrize("linear_end", [False, True])
def test_the_example_has_the_bits_of_a_plain_loop_of_adam_on_the_whole_grid(linear_end: bool) -> None:
    end = ["--linear-end"] if linear_end else []
    trained = example.train("cpu", arguments("--steps", 12, "--side", 20, "--seed", 3, *end))
    torch.manual_seed(3)
    model = networks.surface_network(linear_end)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.08, fused=True)
    points, heights = example.grid(20)
    for _ in range(12):
        optimizer.zero_grad()
        loss = mse_loss(model(points), heights)
        loss.backward()
        optimizer.step()
    assert all(map(torch.equal, trained.model.parameters(), model.parameters()))
    assert trained.error == loss.item()
    assert list(trained.weights) == [1, 10, 12]


@pytest.mark.covers("I2", "B3")
@pytest.mark.parametrize("linear_end", [False, True])
@pytest.mark.slow
def test_a_short_training_comes_near_the_least_error_and_below_it_with_a_linear_end(linear_end: bool) -> None:
    _, heights = example.grid(30)
    least = mse_loss(heights.relu(), heights).item()
    trained = example.train("cpu", arguments("--steps", 300, "--side", 30, *["--linear-end"] * linear_end))
    assert trained.error < least if linear_end else least <= trained.error < 1.1 * least


@pytest.mark.slow
@pytest.mark.covers("I2", "B3")
def test_2000_steps_on_the_whole_grid_come_near_the_least_error() -> None:
    assert 1.1641 <= example.train("cpu", arguments()).error < 1.2


@pytest.mark.covers("I2")
def test_a_network_that_is_dead_at_the_start_is_reported_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    trained = example.train("cpu", arguments("--seed", 1))
    assert round(trained.error, 4) == 3.7288
    assert list(trained.weights) == [1]  # no further step
    assert example.DEAD in capsys.readouterr().out
    assert "--seed" in example.DEAD
    assert "--linear-end" in example.DEAD


@pytest.mark.covers("I2")
def test_a_network_that_dies_while_it_trains_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "peaks", lambda x, y: torch.full_like(x, -1.0))  # no network with a relu end is so low
    trained = example.train("cpu", arguments("--steps", 100, "--side", 10))
    assert (trained.error, list(trained.weights)) == (1.0, [1, 10, 100])
    assert example.DEAD in capsys.readouterr().out


def test_a_linear_end_after_a_dead_layer_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dead_inside(linear_end: bool) -> nn.Sequential:
        model = surface_network(linear_end)
        nn.init.constant_(model.get_parameter("2.bias"), -100.0)
        return model

    surface_network = networks.surface_network
    monkeypatch.setattr(networks, "surface_network", dead_inside)
    example.train("cpu", arguments("--linear-end", "--side", 10))
    assert example.DEAD in capsys.readouterr().out


def test_a_network_that_learns_is_not_reported_as_dead(capsys: pytest.CaptureFixture[str]) -> None:
    example.train("cpu", arguments("--steps", 20, "--side", 10))
    assert "dead" not in capsys.readouterr().out


def train_on_ranks(*given: object) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "keep_memory", lambda cpu: None)
        trained = example.train("cpu", arguments("--steps", 10, "--side", 21, *given))
    return digest(trained), trained.error


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_grid_is_divided_among_ranks_with_the_numbers_of_one_process(ranks: int, on_ranks: OnRanks) -> None:
    whole = train_on_ranks()
    found = on_ranks(ranks, train_on_ranks)
    assert len(set(found)) == 1
    assert found[0][1] == pytest.approx(whole[1], rel=1e-3)
    assert on_ranks(ranks, train_on_ranks, "--shards", 4) == [train_on_ranks("--shards", 4)] * ranks


# -- the times ---------------------------------------------------------------------------------------------


@pytest.mark.covers("I3")
def test_start_up_and_compilation_are_apart_from_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now

    def compiled(model: nn.Module, **how: Any) -> Any:
        later = iter([100.0])  # the first call compiles

        def forward(points: torch.Tensor) -> Any:
            clock.now += next(later, 0.25)
            return model(points)

        clock.now += 10.0
        return forward

    monkeypatch.setattr(example, "time", clock)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("CXX", "true")  # a program that is on every machine
    trained = example.train("cpu", arguments("--steps", 9, "--side", 10, "--compile"))
    assert (trained.start_s, trained.first_s, trained.step_s) == (10.0, 100.0, 0.25)


@pytest.mark.covers("I3")
def test_the_clock_is_read_after_the_device_has_completed_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    monkeypatch.setattr(example, "time", SimpleNamespace(perf_counter=lambda: done.append("read")))
    for device in ("cpu", "cuda:0"):
        world: Any = SimpleNamespace(device=torch.device(device))
        example.seconds(world)
    assert done == ["read", torch.device("cuda:0"), "read"]


# -- the two devices ---------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *given: object) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--steps", "12", "--side", "20", "--folder", str(folder), *map(str, given)]
    )
    example.main()


@pytest.mark.covers("I4", "I7")
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.slow
def test_without_a_gpu_its_part_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call(monkeypatch, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    times = r"start-up \d+\.\d\d s, first step \d+\.\d\d s, 11 more in \d+\.\d\d s, \d+\.\d{3} ms each"
    assert re.fullmatch(rf"1 ranks on cpu, 1 threads each: error \d\.\d{{4}}; {times}", printed[0])
    assert "On these 400 points the error of a dead network is 3." in printed[1]
    assert printed[2:] == ["The GPU's part is left out: torch sees no GPU", str(tmp_path / "surfaces.png")]
    assert (tmp_path / "surfaces.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.covers("I4")
@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_asked_for_alone_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a GPU that torch can see"):
        call(monkeypatch, tmp_path, "--device", "cuda")


@pytest.mark.covers("I4")
@pytest.mark.slow
def test_the_cpu_alone_says_nothing_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call(monkeypatch, tmp_path, "--device", "cpu")
    assert "GPU" not in capsys.readouterr().out


@pytest.mark.covers("I4", "I7", "I8")
def test_both_devices_are_trained_by_the_same_call_compared_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls: list[tuple[str, str]] = []
    train, has_gpu = example.train, torch.cuda.is_available

    def trained_on_the_cpu(device: str, options: Any) -> example.Trained:
        calls.append((device, repr(options)))
        with monkeypatch.context() as patch:  # torch may be built for GPUs, and look for one
            patch.setattr(torch.cuda, "is_available", has_gpu)
            return train("cpu", options)

    drawn: list[Figure] = []
    monkeypatch.setattr(example, "train", trained_on_the_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    call(monkeypatch, tmp_path, "--device", "both")
    assert [device for device, _ in calls] == ["cpu", "gpu"]
    assert calls[0][1] == calls[1][1]
    printed = capsys.readouterr().out
    assert re.findall(r"^Largest difference of a weight after step (\d+): (.+)$", printed, re.M) == [
        ("1", "0"),
        ("10", "0"),
        ("12", "0"),
    ]
    assert re.search(r"^A step on 1 ranks on cpu, .* is \d+\.\d times as fast as on 1 ranks on cpu", printed, re.M)
    panels: Any = drawn[0].axes
    assert [panel.get_title().partition(",")[0] for panel in panels] == ["Peaks", "CPU", "GPU"]
    for panel in panels:
        (surface,) = panel.collections
        assert len(surface.get_array()) == 39 * 39  # the squares between 40 x 40 points


@pytest.mark.covers("I8")
def test_trainings_from_the_same_weights_differ_by_rounding_after_one_step_and_by_more_later() -> None:
    options = ["--steps", 30, "--side", 40]
    one, again, other = (example.train("cpu", arguments(*options, "--shards", shards)) for shards in (1, 1, 3))
    assert example.largest_differences(one, again) == {1: 0.0, 10: 0.0, 30: 0.0}
    after = example.largest_differences(one, other)
    assert list(after) == [1, 10, 30]
    assert after[1] < 1e-4
    assert 0 < after[30] < 1


@pytest.mark.gpu
@pytest.mark.covers("I4", "I8")
def test_both_devices_start_from_the_same_weights() -> None:
    def trainings() -> dict[int, float]:
        cpu, gpu = (example.train(device, arguments("--steps", 10)) for device in ("cpu", "gpu"))
        return example.largest_differences(cpu, gpu)

    assert trainings()[1] < 1e-3


@pytest.mark.slow
@pytest.mark.covers("I4")
def test_the_example_runs_on_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    words = ["--steps", "30", "--side", "40", "--folder", str(tmp_path)]
    (alone,) = on_ranks(1, run_here, "surface/train.py", *words)
    together, other = on_ranks(2, run_here, "surface/train.py", *words)
    found = [re.findall(r"(\d) ranks on \w+, .*: error (\d\.\d{4});", printed) for printed in (alone, together)]
    assert found[0][0][0] == "1"
    assert found[1][0] == ("2", found[0][0][1])
    assert (str(tmp_path) in together, str(tmp_path) in other) == (True, False)  # rank 0 alone draws
