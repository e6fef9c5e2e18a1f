"""What a row holds, that each comes once and in order, and the files of a run folder beside the rows."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.determinism import digest
from ddp_loop.reporting import OnRow
from ddp_loop.reporting import throughput as paces
from ddp_loop.reporting.throughput import Throughput, TrainingLength, as_clock, slowest
from ddp_loop.sinks import csv_sink, read_csv, tensorboard_sink
from ddp_loop.training import gradients
from ddp_loop.training.validation import OnNonFinite
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, network
from tests.support.runs import go_by_epochs, lines_of, status_of
from tests.support.training import train as plain_training

ROWS, EVALUATIONS, RANKS = "rows.jsonl", "evaluations.jsonl", "ranks.jsonl"
MANY = 10_000


# -- order and completeness ------------------------------------------------------------------------------------


def go_on(folder: str, stop_at: int, fail_at: int) -> list[int]:
    """The iterations that the callback was given, of as many steps as it is let make."""
    with dl.join_world(seed=0) as world:
        model = nn.ParameterList([torch.ones(())])
        seen: list[int] = []
        sinks: list[OnRow] = [lambda row: seen.append(row["iteration"]), csv_sink(f"{folder}/sink.csv")]
        batches = dl.Batches(torch.ones(3 * 2500), 3, world)
        options: dict[str, Any] = {"run_dir": folder, "save_every": 1500, "progress": False, "check_replicas_every": 0}
        loop = dl.Loop(batches, steps=MANY, state={"model": model}, on_row=sinks, **options)
        try:
            for step in loop:
                for rows in step:
                    step.backward(model[0] * rows[0])
                step.fold()
                if step.iteration == stop_at:
                    loop.stop()
                if step.iteration == fail_at:
                    raise LookupError("planted")
        except (LookupError, dl.Stopped):
            loop.close()  # the world is left cleanly
        return seen


@pytest.mark.covers("E1", "E3")
@pytest.mark.slow
def test_10000_rows_of_3_ranks_come_in_order_none_lost_none_twice_also_resumed(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    stopped = on_ranks(3, go_on, str(tmp_path), 2200, 0)[0]  # takes effect in the fold of the next step
    failed = on_ranks(3, go_on, str(tmp_path), 0, 3100)[0]  # a checkpoint of step 3000 is there
    ended = on_ranks(3, go_on, str(tmp_path), 0, 0)[0]
    assert stopped == list(range(1, 2202))
    assert failed == list(range(2202, 3101))
    assert ended == list(range(3001, MANY + 1))
    assert [row["iteration"] for row in lines_of(tmp_path / ROWS)] == list(range(1, MANY + 1))
    assert [int(row["iteration"]) for row in read_csv(tmp_path / "sink.csv")] == list(range(1, MANY + 1))
    elapsed = [row["elapsed_s"] for row in lines_of(tmp_path / ROWS)]
    assert elapsed == sorted(elapsed)


# -- what a row holds ------------------------------------------------------------------------------------------


def train(
    folder: str | None,
    sizes: tuple[int, ...] = (7, 6),
    weights: bool = False,
    groups: int = 1,
    on_row: Any = (),
    progress: bool = False,
    norm_each: int = 2**20,
    on_nonfinite: OnNonFinite = "raise",
) -> tuple[list[float], list[dict[str, Any]], str]:
    """Each step's gradient norm by its `.grad`s, the rows, and a digest of the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_NORM_EACH", norm_each)
        with dl.join_world(seed=0) as world:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            parts = [{"params": model[2 * n].parameters(), "lr": 0.1 / (n + 1)} for n in range(2)]
            optimizer = torch.optim.SGD(model.parameters() if groups == 1 else parts, lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            rows: list[dict[str, Any]] = []
            receivers = None if on_row is None else [*on_row, rows.append]
            state = {"model": model, "optimizer": optimizer}
            batches = dl.Batches(make_data((6,), 40), sizes[0], world)
            norms = []
            options: dict[str, Any] = {"progress": progress, "on_nonfinite": on_nonfinite}
            for step in dl.Loop(batches, 1, state=state, run_dir=folder, on_row=receivers, **options):
                for inputs, labels in step:
                    loss = cross_entropy(model(inputs), labels)
                    weight = torch.tensor(float(len(inputs) ** 2)) if weights else None
                    step.backward(loss, weight=weight, half=0.5)
                step.fold()
                squares = [float((one.grad.double() ** 2).sum()) for one in model.parameters() if one.grad is not None]
                norms.append(sum(squares) ** 0.5)
                optimizer.step()
                schedule.step()
            return norms, rows, digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.covers("E3")
@pytest.mark.parametrize("weights", [False, True])
def test_a_row_has_the_norm_of_the_whole_mini_batchs_gradients_and_the_rate(
    weights: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    norms, rows, _ = on_ranks(3, train, str(tmp_path), (7,), weights)[0]
    assert [row["gradient_norm"] for row in rows] == pytest.approx(norms, rel=1e-12)  # another order of the sum
    assert [row["learning_rate"] for row in rows] == [0.1 / 2**n for n in range(6)]
    assert all(row["samples_per_s"] > 0 for row in rows)
    written = lines_of(tmp_path / ROWS)
    names = ["epoch", "iteration", "samples", *(["weight"] if weights else []), "loss", "half", "learning_rate"]
    assert list(written[0]) == [*names, "gradient_norm", "elapsed_s"]
    assert written == [{name: row[name] for name in written[0]} for row in rows]


def test_each_group_of_the_optimizer_has_its_rate(on_ranks: OnRanks) -> None:
    _, rows, _ = on_ranks(2, train, None, (7,), False, 2)[0]
    rates = [(row["learning_rate"], row["learning_rate_1"]) for row in rows]
    assert rates == [(0.1 / 2**n, 0.05 / 2**n) for n in range(6)]


def test_a_large_networks_norm_is_computed_in_every_kth_row_unless_the_guard_asks_for_it(on_ranks: OnRanks) -> None:
    each = 83 // 3  # 83 gradients, so k is 3
    norms, rows, _ = on_ranks(2, train, None, (7,), False, 1, (), False, each)[0]
    assert [row["gradient_norm"] for row in rows] == pytest.approx(norms, rel=1e-12)
    norms, rows, _ = on_ranks(2, train, None, (7,), False, 1, (), False, each, "allow")[0]
    assert [row.get("gradient_norm") for row in rows] == [
        pytest.approx(norm, rel=1e-12) if n % 3 == 0 else None for n, norm in enumerate(norms)
    ]


def test_the_norm_is_right_in_the_step_in_which_parameters_are_unfrozen(on_ranks: OnRanks) -> None:
    told, norms = on_ranks(2, unfreeze)[0]
    assert told == pytest.approx(norms, rel=1e-12)


def unfreeze() -> tuple[list[float], list[float]]:
    model = network()
    model[0].requires_grad_(False)
    rows: list[dict[str, Any]] = []

    def norm(step: dl.Step, result: dl.StepResult) -> float:
        squares = [float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None]
        model[0].requires_grad_(step.iteration > 1)
        return math.sqrt(sum(squares))

    norms = plain_training(model, after_fold=norm, on_row=rows.append)
    return [row["gradient_norm"] for row in rows], norms


def take_name(name: str) -> None:
    with dl.join_world() as world:
        model = nn.Linear(1, 1)
        for step in dl.Loop(dl.Batches(torch.ones(4, 1), 4, world), 1, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows).mean(), **{name: 1.0})  # type: ignore[arg-type]


def test_a_metric_cannot_have_a_name_of_the_rows_own() -> None:
    for name in ("learning_rate", "gradient_norm", "samples_per_s", "skipped", "unused_samples"):
        with pytest.raises(ValueError, match=name):
            take_name(name)


def give_no_callable(world: dl.World, folder: str) -> None:
    loop_over(world, folder, network(), on_row=[print, "rows.csv"] if world.rank == 0 else None)


def test_a_receiver_that_cannot_be_called_is_refused_on_all_ranks(refused: Refused) -> None:
    refused(2, give_no_callable, kind="TypeError", said="on_row must be a callable that takes a row", by=0)


# -- beside the rows -------------------------------------------------------------------------------------------


def compute(seconds: float) -> None:
    """Some work that takes so long."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def with_a_slow_rank(folder: str, slow: int) -> None:
    with pytest.MonkeyPatch.context() as patch, dl.join_world(seed=0) as world:
        for name in ("TELL_S", "_FIRST_S", "GATHER_S"):
            patch.setattr(paces, name, 0.05)
        model = nn.Linear(1, 1)
        batches = dl.Batches(torch.ones(6, 1), 6, world)
        for step in dl.Loop(batches, 100, state={"model": model}, run_dir=folder, progress=False, save_every=100):
            for rows in step:
                if world.rank == slow:
                    compute(0.01)
                step.backward(model(rows).mean())
            step.fold()


@pytest.mark.covers("E3")
@pytest.mark.slow
def test_the_slow_rank_is_seen_in_the_ranks_paces(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(3, with_a_slow_rank, str(tmp_path), 2)
    lines = lines_of(tmp_path / RANKS)
    assert len(lines) >= 3
    assert [line["iteration"] for line in lines] == sorted(line["iteration"] for line in lines)
    assert lines[-1]["elapsed_s"] > lines[0]["elapsed_s"]
    whole = [line["ranks"] for line in lines if len(line["ranks"]) == 3]
    assert [[one["rank"] for one in ranks] for ranks in whole] == [[0, 1, 2]] * len(whole)
    assert all(set(one) == {"rank", "step_s", "wait_s", "memory_mib"} for ranks in whole for one in ranks)
    assert all(one["memory_mib"] > 50 for ranks in whole for one in ranks)  # torch alone takes that
    assert all(one["step_s"] > 0.009 for ranks in whole for one in ranks)
    assert [slowest(ranks) for ranks in whole].count(2) > len(whole) / 2


def test_equal_ranks_have_no_slow_one() -> None:
    def pace(rank: int, wait_s: float) -> dict[str, float]:
        return {"rank": rank, "step_s": 0.1, "wait_s": wait_s}

    assert slowest([pace(0, 0.0)]) is None
    assert slowest([pace(0, 0.004), pace(1, 0.0)]) is None
    assert slowest([pace(0, 0.03), pace(1, 0.0), pace(2, 0.02)]) == 1


def evaluate_everywhere(folder: str, stop_at: int, save_every: int | None) -> list[tuple[int, float]]:
    """Evaluate in the middle and at the end of each epoch; returns (iteration, mean) of each evaluation."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(5)
        data = torch.randn(20, 2, generator=generator).double()
        held_out = dl.Batches(data, 5, world, shuffle=False)
        made = []

        def evaluate(iteration: int = 0) -> None:
            if iteration % 2 == 0:
                result = dl.evaluate(model, held_out, mean=lambda output, rows: output.squeeze(1))
                made.append((loop.iteration, result["mean"]))

        state = {"model": model, "optimizer": optimizer}
        batches = dl.Batches(data, 5, world, shards=3)
        loop = dl.Loop(batches, 3, state=state, run_dir=folder, progress=False, save_every=save_every)
        go_by_epochs(loop, model, optimizer, stop_at, after_step=evaluate, after_epoch=evaluate)
        return made


@pytest.mark.parametrize(("stop_at", "save_every"), [(0, None), (3, None), (4, None), (5, 1), (6, 3), (12, None)])
@pytest.mark.slow
def test_each_evaluation_is_recorded_once_also_when_the_run_resumes(
    stop_at: int, save_every: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    if stop_at:
        on_ranks(3, evaluate_everywhere, str(tmp_path), stop_at, save_every)
    on_ranks(2, evaluate_everywhere, str(tmp_path), 0, save_every)
    made = on_ranks(2, evaluate_everywhere, str(tmp_path / "whole"), 0, save_every)[0]
    lines = lines_of(tmp_path / EVALUATIONS)
    assert [at for at, _ in made] == [2, 4, 4, 6, 8, 8, 10, 12, 12]  # the end of an epoch repeats its last step
    assert [line["iteration"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert [line["mean"] for line in lines] == pytest.approx(list(dict(made).values()), rel=1e-12)  # sums of 3 ranks
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert list(lines[0]) == ["epoch", "iteration", "mean", "samples", "elapsed_s"]
    elapsed = [line["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)


def test_a_finished_run_that_is_started_again_notes_no_evaluation_twice(on_ranks: OnRanks, tmp_path: Path) -> None:
    first = on_ranks(2, evaluate_everywhere, str(tmp_path), 0, None)[0]
    assert [at for at, _ in on_ranks(2, evaluate_everywhere, str(tmp_path), 0, None)[0]] == [12]
    assert {line["iteration"]: line["mean"] for line in lines_of(tmp_path / EVALUATIONS)} == dict(first)
    assert len(lines_of(tmp_path / EVALUATIONS)) == 6


@pytest.mark.parametrize(
    ("extent", "told"),
    [
        ({"epochs": 2}, (2, 4, None)),
        ({"epochs": None, "steps": 3}, (None, 4, 3)),
        ({"epochs": 3, "steps": 5}, (3, 4, 5)),
    ],
)
def test_the_status_says_how_far_the_run_goes(extent: Any, told: tuple[Any, ...], tmp_path: Path) -> None:
    running = plain_training(network(), run_dir=tmp_path, after_fold=lambda *_: status_of(tmp_path), **extent)
    for status, name in ((running[-1], "running"), (status_of(tmp_path), "done")):
        assert status["status"] == name
        assert (status["epochs"], status["steps_per_epoch"], status["steps"]) == told


def test_a_run_that_begins_anew_moves_these_files_too(tmp_path: Path) -> None:
    plain_training(network(), run_dir=tmp_path)
    for name in (EVALUATIONS, RANKS):
        (tmp_path / name).write_text("")
    plain_training(network(), run_dir=tmp_path, resume=False)
    assert {EVALUATIONS, RANKS, ROWS} <= {one.name for one in (tmp_path / "before" / "1").iterdir()}
    assert not (tmp_path / EVALUATIONS).exists()


# -- the same bits ---------------------------------------------------------------------------------------------


@pytest.mark.covers("E6", "H8", "B6")
def test_the_weights_are_the_same_bits_with_everything_on_and_off(on_ranks: OnRanks, tmp_path: Path) -> None:
    sinks: list[OnRow] = [
        csv_sink(tmp_path / "rows.csv"), tensorboard_sink(tmp_path / "board", 0.0)
    ]  # fmt: skip
    on = on_ranks(3, train, str(tmp_path / "run"), (7,), False, 1, sinks, True)
    off = on_ranks(3, train, None, (7,), False, 1, None)
    assert len({one[2] for one in (*on, *off)}) == 1


# -- numbers ---------------------------------------------------------------------------------------------------


def test_samples_per_second_are_of_the_last_seconds() -> None:
    rate = Throughput(10.0, window_s=4.0)
    told = [rate.take(10.0 + second, 100 if second <= 10 else 300) for second in range(1, 21)]
    assert told[:10] == [100.0] * 10
    assert told[-5:] == [300.0] * 5
    assert Throughput(1.0).take(1.0, 5) == 0.0


def test_the_time_that_is_left_follows_from_the_steps_made_here() -> None:
    extent = TrainingLength(epochs=5, steps_per_epoch=20, after=40)
    assert extent.whole == 100
    assert extent.left_s(50, passed_s=5.0) == 25.0
    assert extent.left_s(40, passed_s=5.0) is None
    assert TrainingLength(epochs=5).left_s(3, 1.0) is None
    assert TrainingLength(epochs=5, steps_per_epoch=20, steps=30).whole == 30
    assert [as_clock(seconds) for seconds in (7.4, 760, 10800)] == ["0:07", "12:40", "3:00:00"]
