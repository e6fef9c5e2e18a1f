"""What rank 0 learns of a run: rows in order, lines, files, and silence when that is asked for."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.reporting import reporter as progress_rows
from ddp_loop.reporting.jsonl import line_of
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import network
from tests.support.runs import lines_of, rows_of
from tests.support.training import train as plain_training

EPOCHS = 3


def train(
    run: str | None, progress: bool, fail_at: int = 0, batch_size: int = 7, batch_s: float = 0.0
) -> tuple[list[dict[str, Any]], list[tuple[float, float]], list[int], list[torch.Tensor]]:
    """The rows that the callback got, each step's own row, how many rows were there after each step, the weights."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world(seed=0) as world:
        patch.setattr(progress_rows, "BATCH_S", batch_s)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(make_data((6,), 40), batch_size, world)
        rows: list[dict[str, Any]] = []
        own, there = [], []
        state = {"model": model, "optimizer": optimizer}
        on_row = rows.append if run is not None or progress else None
        for step in dl.Loop(batches, EPOCHS, state=state, run_dir=run, on_row=on_row, progress=progress):
            for inputs, labels in step:
                if step.iteration == fail_at:
                    raise KeyError("planted")
                logits = model(inputs)
                step.backward(cross_entropy(logits, labels), accuracy=logits.argmax(1) == labels)
            row = step.fold()
            optimizer.step()
            own.append((float(row.loss), float(row.metrics["accuracy"])))
            there.append(len(rows))
        return rows, own, there, [p.detach().clone() for p in model.parameters()]


@pytest.mark.covers("E1")
def test_rows_reach_a_callback_on_rank_0_and_the_file_in_order(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = on_ranks(3, train, str(tmp_path / "new"), False)
    rows, own, there, _ = first
    assert [row["iteration"] for row in rows] == list(range(1, 6 * EPOCHS + 1))
    assert [row["epoch"] for row in rows] == [1] * 6 + [2] * 6 + [3] * 6
    assert [row["samples"] for row in rows] == ([7] * 5 + [5]) * EPOCHS
    assert [(row["loss"], row["accuracy"]) for row in rows] == own
    # A row is complete when its step is over, and is handed on while the next one's sums are under way.
    assert there == list(range(6 * EPOCHS))
    assert all(other[0] == [] and other[1] == own for other in others)
    written = lines_of(tmp_path / "new" / "rows.jsonl")
    assert all(row.pop("samples_per_s") > 0 for row in rows)  # it follows from the others
    assert written == rows
    elapsed = [row["elapsed_s"] for row in written]
    assert elapsed == sorted(elapsed)


def test_rows_of_quick_steps_come_several_at_once_and_an_epochs_last_without_delay(on_ranks: OnRanks) -> None:
    rows, own, there, _ = on_ranks(3, train, None, True, 0, 7, 1e9)[0]
    assert [(row["loss"], row["accuracy"]) for row in rows] == own
    assert there == [0] * 6 + [6] * 6 + [12] * 6


def test_rows_that_were_made_before_an_exception_are_in_the_file(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed, match="planted"):
        on_ranks(2, train, str(tmp_path), False, 9)
    assert rows_of(tmp_path) == list(range(1, 9))


@pytest.mark.covers("E2")
@pytest.mark.slow
def test_an_epochs_line_has_the_mean_over_its_samples_from_rank_0_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows, *_ = dl.launch(train, 2, str(tmp_path), True)[0]
    said = capfd.readouterr().out.splitlines()
    expected = ["2 ranks on cpu, sums over shared memory"]
    for epoch in range(1, EPOCHS + 1):
        own = [row for row in rows if row["epoch"] == epoch]
        loss, accuracy = (sum(row[key] * row["samples"] for row in own) / 40 for key in ("loss", "accuracy"))
        expected.append(f"Epoch: {epoch}, Loss: {loss:.4f}, Accuracy: {accuracy:.4f}")
    assert said == expected


@pytest.mark.covers("B6")
def test_a_quiet_run_prints_nothing_and_writes_nothing_and_has_the_same_weights(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = train(None, False)[3]
    heard = capfd.readouterr()
    assert (heard.out, heard.err, list(tmp_path.iterdir())) == ("", "", [])
    loud = train(str(tmp_path / "run"), True)[3]
    assert "Epoch: 3" in capfd.readouterr().out
    assert all(torch.equal(one, other) for one, other in zip(quiet, loud, strict=True))


def test_the_line_is_what_json_would_write_with_null_for_what_is_not_finite() -> None:
    place = {"epoch": 1, "iteration": 2, "samples": 3}
    for value in (0.1, 1e-30, -2.0, 1e300, 3.0, float("nan")):
        found = json.loads(line_of(place, {"loss": value, "accuracy": 0.25}, 0.5))
        expected = {**place, "loss": value if isfinite(value) else None, "accuracy": 0.25, "elapsed_s": 0.5}
        assert found == expected


def weigh(run: str, capture: str, weights: float | None) -> tuple[list[dict[str, Any]], list[float], str]:
    """Samples 1 and 9 and so on weigh what they are, and their loss is 0 but for 9; or all weigh the same."""
    with dl.join_world() as world, Path(capture + str(world.rank)).open("w+") as file, redirect_stdout(file):
        model = nn.Linear(1, 1).double()
        rows: list[dict[str, Any]] = []
        own = []
        data = torch.tensor([[1.0], [9.0], [2.0], [4.0]], dtype=torch.float64)
        batches = dl.Batches(data, 1, world, shuffle=False)
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        for step in dl.Loop(batches, 1, state=state, run_dir=run, on_row=rows.append):
            for inputs in step:
                value = 10.0 * float(inputs == 9)
                weight = float(inputs.sum()) if weights is None else weights
                step.backward(0 * model(inputs).sum() + value, weight=torch.tensor(weight), value=value)
            own.append(float(step.fold().weight))
        file.seek(0)
        return rows, own, file.read()


FIRST = "2 ranks on cpu, sums over shared memory\n"


@pytest.mark.covers("D11", "E2")
def test_an_epochs_line_is_weighted_as_the_losses_are(on_ranks: OnRanks, tmp_path: Path) -> None:
    (rows, own, said), other = on_ranks(2, weigh, str(tmp_path / "run"), str(tmp_path / "said"), None)
    assert said == f"{FIRST}Epoch: 1, Loss: {90 / 16:.4f}, Value: {90 / 16:.4f}\n"
    assert own == other[1] == [row["weight"] for row in rows] == [1.0, 9.0, 2.0, 4.0]
    assert [line["weight"] for line in lines_of(tmp_path / "run" / "rows.jsonl")] == own


@pytest.mark.covers("D11")
def test_an_epoch_whose_weights_are_all_0_has_no_loss(on_ranks: OnRanks, tmp_path: Path) -> None:
    (_, own, said), _ = on_ranks(2, weigh, str(tmp_path / "run"), str(tmp_path / "said"), 0.0)
    assert (said, own) == (f"{FIRST}Epoch: 1, Loss: nan, Value: nan\n", [0.0] * 4)


def test_without_weights_a_rows_weight_is_its_samples() -> None:
    assert plain_training(network(), batch_size=7, after_fold=lambda _, row: float(row.weight)) == [7, 7, 7, 3]
