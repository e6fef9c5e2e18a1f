"""Shapes of jobs that once could not go on, or not to the bit: frozen layers, counts, two loops, lists."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.devices import GPU
from tests.support.harness import OnRanks, caught
from tests.support.refusals import loop_over, network
from tests.support.runs import checkpoints_of, digests, go_by_epochs, rows_of

pytestmark = [pytest.mark.on_gpus_too, pytest.mark.covers("E5")]

STEPS, EPOCHS = 4, 2


def run(
    folder: Path | str, stop_at: int | None = None, *, bad: int = 0, freeze: bool = False, optimizer: Any = None,
    **options: Any,
) -> tuple[dict[str, str], dl.Loop]:  # fmt: skip
    """Two layers, 2 epochs of 4 steps; a row of NaN in step `bad`, the first layer frozen after epoch 1."""
    with dl.join_world(seed=1) as world:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = (optimizer or torch.optim.Adam)(model.parameters(), lr=0.05)
        data = torch.randn(STEPS * 8, 3, generator=torch.Generator().manual_seed(2))
        if bad:
            data[8 * bad - 1] = float("nan")
        state = {"model": model, "optimizer": optimizer}
        batches = dl.Batches(data, 8, world, shards=4, shuffle=False)
        loop = dl.Loop(batches, EPOCHS, state=state, run_dir=folder, **{"progress": False, **options})

        def freeze_if_asked() -> None:
            if freeze:
                model[0].weight.requires_grad_(False)

        go_by_epochs(loop, model, optimizer, stop_at, after_epoch=freeze_if_asked)
        return digests(state), loop


def ended(folder: Path, stop_at: int | None = None, **options: Any) -> tuple[dict[str, str], str | None]:
    """The digests of a run, and why it stopped."""
    found, loop = run(folder, stop_at, **options)
    return found, loop.stopped


@pytest.mark.quick_on_gpus
def test_a_layer_that_was_frozen_meanwhile_stays_so(on_ranks: OnRanks, tmp_path: Path) -> None:
    (whole,) = on_ranks(1, ended, tmp_path / "whole", freeze=True)
    assert whole[1] is None
    assert on_ranks(1, ended, tmp_path / "never") != [whole]
    for at in (2, 4):
        on_ranks(1, ended, tmp_path / str(at), at, freeze=True)
        assert on_ranks(1, ended, tmp_path / str(at), freeze=True) == [whole]


def rates_of(folder: Path | str, stop_at: int | None = None, **options: Any) -> list[float]:
    """The rates after a run whose script holds a group of its optimizer, and a tensor of two others."""
    with dl.join_world(seed=1) as world:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)).to(world.device)
        rate = torch.tensor(0.1)
        groups = [{"params": one.parameters(), "lr": lr} for one, lr in zip(model, (0.1, rate, rate), strict=True)]
        optimizer = torch.optim.SGD(groups, foreach=False)
        first = optimizer.param_groups[0]
        batches = dl.Batches(torch.ones(STEPS * 8, 3), 8, world, shards=4)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 1, state=state, run_dir=folder, progress=False, **options)

        def halve(iteration: int) -> None:
            first["lr"] /= 2
            rate.div_(2)
            if iteration == 3:  # from here on the first group has a tensor, and the last one of its own
                first["lr"] = torch.tensor(first["lr"])
                optimizer.param_groups[2]["lr"] = rate.clone()

        go_by_epochs(loop, model, optimizer, stop_at, after_step=halve)
        return [float(group["lr"]) for group in optimizer.param_groups]


def test_groups_and_rates_of_an_optimizer_that_the_script_holds_go_on(on_ranks: OnRanks, tmp_path: Path) -> None:
    whole = rates_of(tmp_path / "whole")
    assert whole == pytest.approx([0.1 / 16, 0.1 / 16, 0.1 / 8])
    for at in (1, 3):
        rates_of(tmp_path / str(at), at)
        assert on_ranks(2, rates_of, tmp_path / str(at)) == [whole] * 2
    assert rates_of(tmp_path / "warm", resume_from=tmp_path / "whole") == whole


@pytest.mark.slow
def test_skipped_steps_and_the_epochs_mean_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, loop = run(tmp_path / "whole", bad=2, on_nonfinite="skip", progress=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch: 1"))
    assert "1 steps skipped" in line
    run(tmp_path / "parts", 3, bad=2, on_nonfinite="skip")
    again, gone_on = run(tmp_path / "parts", bad=2, on_nonfinite="skip", progress=True)
    assert line in capsys.readouterr().out
    assert (again, gone_on.skipped, loop.skipped) == (whole, 2, 2)


@pytest.mark.one_device(GPU, "tests a late error")
def test_a_step_that_is_found_bad_one_step_late_is_never_kept(on_ranks: OnRanks, tmp_path: Path) -> None:
    ((kind, said, _),) = on_ranks(1, caught, partial(ended, tmp_path, bad=STEPS))
    assert kind == "FloatingPointError"
    assert f"step {STEPS}" in said
    assert checkpoints_of(tmp_path) == []


class Counting(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, call-overload]
        return super().step(closure)


def test_an_optimizer_with_state_of_no_parameter_goes_on(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", optimizer=Counting)
    run(tmp_path / "parts", 3, optimizer=Counting)
    assert run(tmp_path / "parts", optimizer=Counting)[0] == whole


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_its_rows_stay(tmp_path: Path) -> None:
    run(tmp_path)
    rows = rows_of(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        (path / "state.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"None of the 2 checkpoints in .* is intact\. .*resume=False to start over"):
        run(tmp_path)
    assert rows_of(tmp_path) == rows
    run(tmp_path, resume=False)
    assert checkpoints_of(tmp_path) == [4, 8]


def test_checkpoints_without_the_run_they_belong_to_are_refused(tmp_path: Path) -> None:
    run(tmp_path, 3)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"its run\.json is missing or damaged"):
        run(tmp_path)
    assert checkpoints_of(tmp_path) == [3]
    run(tmp_path, resume=False)
    assert checkpoints_of(tmp_path / "before" / "1") == [3]


def test_a_run_folder_is_held_once_also_by_the_name_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with dl.join_world() as world:
        epochs = loop_over(world, str(tmp_path / "run"), network()).epochs()
        next(epochs)  # it is iterated now, and so keeps the folder
        with pytest.raises(RuntimeError, match="is held by another Loop of this process"):
            loop_over(world, str(tmp_path / "link"), network())
