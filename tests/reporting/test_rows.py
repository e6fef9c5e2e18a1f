"""What a row holds, that each comes once and in order, and the files of a run folder beside the rows."""

from __future__ import annotations

import json
import math
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.determinism import digest
from ddp_loop.reporting import exports, read_run, reporter
from ddp_loop.reporting import throughput as paces
from ddp_loop.reporting.jsonl import line_of
from ddp_loop.reporting.sink_calls import OnRow
from ddp_loop.reporting.throughput import Throughput, TrainingLength, as_clock, slowest
from ddp_loop.sinks import csv_sink, read_csv, tensorboard_sink
from ddp_loop.sinks.points import Point, PointSink
from ddp_loop.sweeps.folders import Objective, ObjectiveReader
from ddp_loop.training import gradients
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, network
from tests.support.runs import go_by_epochs, lines_of, status_of
from tests.support.training import take
from tests.support.training import train as plain_training

ROWS, EVALUATIONS, RANKS = "rows.jsonl", "evaluations.jsonl", "ranks.jsonl"
MANY = 4_000


# -- order and completeness ------------------------------------------------------------------------------------


def go_on(folder: str, stop_at: int, fail_at: int) -> list[int]:
    """The iterations that the callback was given, of as many steps as it is let make."""
    with dl.join_world(seed=0) as world:
        model = nn.ParameterList([torch.ones(())])
        seen: list[int] = []
        sinks: list[OnRow] = [lambda row: seen.append(row["iteration"]), csv_sink(f"{folder}/sink.csv")]
        batches = dl.Batches(torch.ones(3 * 2500), 3, world)
        loop = dl.Loop(
            batches, steps=MANY, state={"model": model}, on_row=sinks, run_dir=folder, save_every=1500, progress=False,
            check_replicas_every=0,
        )  # fmt: skip
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
def test_4000_rows_of_3_ranks_come_in_order_none_lost_none_twice_also_resumed(
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
    weights: bool = False,
    groups: int = 1,
    on_row: Any = (),
    norm_each: int = 2**20,
    batch_s: float = 0.0,
    epochs: int = 1,
    **options: Any,
) -> SimpleNamespace:
    """The rows that a callback got, how many after each step; each step's loss, metric, weight, norm of `.grad`s."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world(seed=0) as world:
        patch.setattr(gradients, "_NORM_EACH", norm_each)
        patch.setattr(reporter, "BATCH_S", batch_s)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        parts = [{"params": model[2 * n].parameters(), "lr": 0.1 / (n + 1)} for n in range(2)]
        optimizer = torch.optim.SGD(model.parameters() if groups == 1 else parts, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        found = SimpleNamespace(rows=list[dict[str, Any]](), own=[], norms=[], there=[])
        options = {"progress": False, "on_row": None if on_row is None else [*on_row, found.rows.append], **options}
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        for step in dl.Loop(dl.Batches(make_data((6,), 40), 7, world), epochs, state=state, run_dir=folder, **options):
            for inputs, labels in step:
                logits = model(inputs)
                weight = torch.tensor(float(len(inputs) ** 2)) if weights else None
                step.backward(cross_entropy(logits, labels), weight=weight, accuracy=logits.argmax(1) == labels)
            result = step.fold()
            found.own.append((float(result.loss), float(result.metrics["accuracy"]), float(result.weight)))
            found.norms.append(norm_of(model))
            optimizer.step()
            schedule.step()
            found.there.append(len(found.rows))
        found.weights = digest(torch.cat([one.detach().flatten() for one in model.parameters()]))
        return found


def values_of(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["loss"], row["accuracy"], row.get("weight", row["samples"])


def norm_of(model: nn.Module) -> float:
    return math.sqrt(sum(float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None))


@pytest.mark.covers("E1", "E3")
@pytest.mark.parametrize(("weights", "groups"), [(False, 1), (True, 2)])
def test_rows_reach_a_callback_on_rank_0_and_the_file_in_order_with_norms_and_rates(
    weights: bool, groups: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    first, *others = on_ranks(3, train, str(tmp_path / "new"), weights, groups, epochs=2)
    rows = first.rows
    assert [(row["epoch"], row["iteration"]) for row in rows] == [(1 + n // 6, n + 1) for n in range(12)]
    assert [row["samples"] for row in rows] == ([7] * 5 + [5]) * 2
    assert list(map(values_of, rows)) == first.own
    assert [row["gradient_norm"] for row in rows] == pytest.approx(first.norms, rel=1e-12)  # another order of the sum
    rates = {"learning_rate": 0.1} | ({"learning_rate_1": 0.05} if groups == 2 else {})
    for name, rate in rates.items():
        assert [row[name] for row in rows] == [rate / 2**n for n in range(12)]
    # A row is complete when its step is over, and is handed on while the next one's sums are under way.
    assert first.there == list(range(12))
    assert all((other.rows, other.own) == ([], first.own) for other in others)
    written = lines_of(tmp_path / "new" / ROWS)
    names = ["epoch", "iteration", "samples", *(["weight"] if weights else []), "loss", "accuracy", *rates]
    assert list(written[0]) == [*names, "gradient_norm", "elapsed_s"]
    assert all(row.pop("samples_per_s") > 0 for row in rows)  # it follows from the others
    assert written == rows
    elapsed = [row["elapsed_s"] for row in written]
    assert elapsed == sorted(elapsed)


def test_rows_of_quick_steps_come_several_at_once_and_an_epochs_last_without_delay(on_ranks: OnRanks) -> None:
    found = on_ranks(3, train, None, batch_s=1e9, epochs=3, progress=True)[0]
    assert list(map(values_of, found.rows)) == found.own
    assert found.there == [0] * 6 + [6] * 6 + [12] * 6


@pytest.mark.covers("B6")
def test_a_quiet_run_prints_nothing_and_writes_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, on_row=None)
    heard = capfd.readouterr()
    assert (heard.out, heard.err, list(tmp_path.iterdir())) == ("", "", [])
    train(None, progress=True)
    assert "Epoch: 1" in capfd.readouterr().out


def test_a_large_networks_norm_is_computed_in_every_kth_row_unless_the_guard_asks_for_it(on_ranks: OnRanks) -> None:
    for on_nonfinite, every in (("raise", 1), ("allow", 3)):  # 83 gradients
        found = on_ranks(2, train, None, norm_each=83 // 3, on_nonfinite=on_nonfinite)[0]
        assert [row.get("gradient_norm") for row in found.rows] == [
            pytest.approx(norm, rel=1e-12) if n % every == 0 else None for n, norm in enumerate(found.norms)
        ]


def test_the_line_is_what_json_would_write_with_null_for_what_is_not_finite() -> None:
    place = {"epoch": 1, "iteration": 2, "samples": 3}
    for value in (0.1, 1e-30, -2.0, 1e300, 3.0, float("nan")):
        found = json.loads(line_of(place, {"loss": value, "accuracy": 0.25}, 0.5))
        expected = {**place, "loss": value if math.isfinite(value) else None, "accuracy": 0.25, "elapsed_s": 0.5}
        assert found == expected


class KeptPoints(PointSink):
    """Keeps what a service would get."""

    def __init__(self, every_s: float) -> None:
        super().__init__(every_s)
        self.points: list[Point] = []

    def _send(self, points: list[Point]) -> None:
        self.points += points


def make_unlike_steps(run: str, weighted: tuple[int, ...], every: int) -> tuple[str, dict[str, Any]]:
    """Steps of which some have a second pass and some a metric; returns what is printed, and what a service gets.

    Args:
        weighted: the passes with weights of their own.
        every: of so many steps one has a second pass.
    """
    with redirect_stdout(StringIO()) as said, dl.join_world() as world:
        model = nn.Linear(1, 1).double()
        sink = KeptPoints(1e9)
        data = torch.ones(22, 1, dtype=torch.float64)  # the last of 8 steps has one sample, so one rank has none
        loop = dl.Loop(dl.Batches(data, 3, world), 1, state={"model": model}, run_dir=run, on_row=sink.__call__)
        for step in loop:
            kind = 1.0 + step.iteration % 4
            for number in range(1, 2 + (step.iteration % every == 0)):
                metrics: dict[str, Any] = (
                    {"late": kind} if number == 2 else {"acc": 1.0} if step.iteration % 2 == 0 else {}
                )
                for inputs in step:
                    loss = 0 * model(inputs).sum() + (8.0 * kind if number == 2 else step.iteration)
                    weight = kind**number * len(inputs) if number in weighted else None
                    step.backward(loss, weight=weight, **metrics)
                step.fold()
        sink.flush()
        return said.getvalue(), dict(sink.points[-1].values) if sink.points else {}


def means_of_unlike_steps(weighted: tuple[int, ...], every: int, first: int = 1) -> dict[str, float]:
    """The means over the steps from the first one on."""
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for k in range(first, 9):
        kind = 1.0 + k % 4
        values = {"loss": float(k)} | ({"acc": 1.0} if k % 2 == 0 else {})
        values |= {"loss_2": 8 * kind, "late": kind} if k % every == 0 else {}
        for name, value in values.items():
            number = 2 if name in ("loss_2", "late") else 1
            weight = (3 if k < 8 else 1) * (kind**number if number in weighted else 1)
            totals[name] = totals.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return {name: total / weights[name] for name, total in totals.items()}


@pytest.mark.covers("D11", "E2")
@pytest.mark.parametrize("weighted", [(), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("every", [1, 4])
def test_an_epochs_mean_is_over_the_steps_that_have_the_value_by_the_weights_of_its_pass(
    weighted: tuple[int, ...], every: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (printed, sent), other = on_ranks(2, make_unlike_steps, str(run), weighted, every)
    assert other == ("", {})
    head, line = [one for one in printed.splitlines() if not one.startswith("ddp_loop: ")]
    assert head == "2 ranks on cpu, sums over shared memory"
    means = means_of_unlike_steps(weighted, every)
    said = dict(part.split(": ") for part in line.lower().split(", "))
    assert said == {"epoch": "1", **{name: f"{mean:.4f}" for name, mean in means.items()}}
    later = means_of_unlike_steps(weighted, every, first=2)  # the first row was sent at once
    assert {name: value for name, value in sent.items() if name in later} == pytest.approx(later)
    assert set(sent) - set(later) == {"gradient_norm", "samples_per_s"}
    record = read_run(run, for_table=True)
    assert {name: mean.last for name, mean in record.epoch_means.items()} == pytest.approx(means)
    assert set(record.rows) == set(means)
    assert set(exports._panels(run, lines_of(run / ROWS))) == {*means, "gradient_norm"}
    for name, mean in means.items():
        reader = ObjectiveReader(run, Objective(name))
        reader.poll()
        assert reader.value == pytest.approx(mean)
        assert "weight" not in reader.missing()


def add_up(run: str, steps: int) -> str:
    """Go on with an epoch of mini-batches of 4, 4 and 2 samples, of sums and means; returns what was printed last."""
    with redirect_stdout(StringIO()) as said, dl.join_world() as world:
        model = nn.Linear(1, 1).double()
        data = torch.ones(10, 1, dtype=torch.float64)
        for step in dl.Loop(dl.Batches(data, 4, world), steps=steps, state={"model": model}, run_dir=run):
            for inputs in step:
                ones = (0 * model(inputs) + 1).sum()
                step.backward(ones, reduction="sum", seen=dl.Sum(ones.detach()), size=float(step.samples))
            step.fold()
            for inputs in step:
                step.backward(0 * model(inputs).sum() + 3, twice=dl.Sum(torch.tensor(2.0 * len(inputs))))
            step.fold()
        return said.getvalue().strip().split("\n")[-1]


@pytest.mark.covers("D11", "E2")
def test_over_an_epoch_sums_add_up_in_the_line_in_runs_and_in_a_sweep(on_ranks: OnRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # It resumes inside of the epoch, and then without a step left.
    _, said, _ = [on_ranks(2, add_up, str(run), steps)[0] for steps in (1, 3, 3)]
    assert said == "Epoch: 1, Loss: 10.0000, Seen: 10.0000, Size: 3.6000, Loss_2: 3.0000, Twice: 20.0000"
    totals = {"loss": 10.0, "seen": 10.0, "size": 3.6, "loss_2": 3.0, "twice": 20.0}
    means = {"loss": 3.6, "seen": 3.6, "size": 3.6, "loss_2": 3.0, "twice": 7.2}  # of an older version's sums
    for expected in (totals, means):
        found = read_run(run, for_table=True).epoch_means
        assert {name: mean.last for name, mean in found.items()} == pytest.approx(expected)
        for name, value in expected.items():
            reader = ObjectiveReader(run, Objective(name))
            reader.poll()
            assert reader.value == pytest.approx(value)
        run = run.rename(tmp_path / "old")
        (run / "status.json").write_text(json.dumps({**status_of(run), "sums": None}))


def test_a_passs_weight_is_in_its_row_if_this_pass_or_an_earlier_one_has_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    for weighted in ((), (1,), (2,)):
        run = tmp_path / f"run {weighted}"
        on_ranks(2, make_unlike_steps, str(run), weighted, 4)
        found = {row["iteration"]: row["loss_2_weight"] for row in lines_of(run / ROWS) if "loss_2_weight" in row}
        assert found == ({4: 3.0, 8: 1.0} if weighted else {})  # of kind 1


def unfreeze() -> tuple[list[float], list[float]]:
    model = network()
    model[0].requires_grad_(False)
    rows: list[dict[str, Any]] = []

    def norm(step: dl.Step, result: dl.StepResult) -> float:
        model[0].requires_grad_(step.iteration > 1)
        return norm_of(model)

    norms = plain_training(model, after_fold=norm, on_row=rows.append)
    return [row["gradient_norm"] for row in rows], norms


def test_the_norm_is_right_in_the_step_in_which_parameters_are_unfrozen(on_ranks: OnRanks) -> None:
    told, norms = on_ranks(2, unfreeze)[0]
    assert told == pytest.approx(norms, rel=1e-12)


def take_name(name: str) -> None:
    with dl.join_world() as world:
        for step in loop_over(world, None, model := network()):
            take(step, model, **{name: 1.0})  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("stop_at", "save_every"),
    [pytest.param(3, None, marks=pytest.mark.slow), (5, 1), pytest.param(12, None, marks=pytest.mark.slow)],
)
def test_each_evaluation_is_recorded_once_also_when_the_run_resumes_or_is_started_again(
    stop_at: int, save_every: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    on_ranks(3, evaluate_everywhere, str(tmp_path), stop_at, save_every)
    on_ranks(2, evaluate_everywhere, str(tmp_path), 0, save_every)
    lines = lines_of(tmp_path / EVALUATIONS)
    assert [at for at, _ in on_ranks(2, evaluate_everywhere, str(tmp_path), 0, save_every)[0]] == [12]
    assert lines_of(tmp_path / EVALUATIONS) == lines
    made = on_ranks(2, evaluate_everywhere, str(tmp_path / "whole"), 0, save_every)[0]
    assert [at for at, _ in made] == [2, 4, 4, 6, 8, 8, 10, 12, 12]  # the end of an epoch repeats its last step
    assert [line["iteration"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert [line["mean"] for line in lines] == pytest.approx(list(dict(made).values()), rel=1e-12)  # sums of 3 ranks
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert list(lines[0]) == ["epoch", "iteration", "mean", "samples", "elapsed_s"]
    elapsed = [line["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)


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


def test_a_run_that_begins_anew_moves_its_files_away(tmp_path: Path) -> None:
    plain_training(network(), run_dir=tmp_path, trace=True)
    files = {ROWS, EVALUATIONS, RANKS, "trace", "console", "usage"}
    for name in (EVALUATIONS, RANKS):
        (tmp_path / name).write_text("")
    plain_training(network(), run_dir=tmp_path, resume=False)
    assert files <= {one.name for one in (tmp_path / "before" / "1").iterdir()}
    assert files & {one.name for one in tmp_path.iterdir()} == {ROWS, "console", "usage"}
    assert [row["iteration"] for row in lines_of(tmp_path / ROWS)] == [1, 2, 3, 4]


# -- the same bits ---------------------------------------------------------------------------------------------


@pytest.mark.covers("E6", "H8", "B6")
def test_the_weights_are_the_same_bits_with_everything_on_and_off(on_ranks: OnRanks, tmp_path: Path) -> None:
    sinks: list[OnRow] = [csv_sink(tmp_path / "rows.csv"), tensorboard_sink(tmp_path / "board", 0.0)]
    on = on_ranks(3, train, str(tmp_path / "run"), on_row=sinks, progress=True)
    off = on_ranks(3, train, None, on_row=None)
    assert len({one.weights for one in (*on, *off)}) == 1


# -- numbers ---------------------------------------------------------------------------------------------------


def test_samples_per_second_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "WINDOW_S", 4.0)
    rate = Throughput(10.0)
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
