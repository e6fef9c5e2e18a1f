"""A step that is iterated wrongly, and a backward with wrong arguments: one clear error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.devices import CPU
from tests.support.harness import OnRanks
from tests.support.refusals import (
    ALL,
    MOST_S,
    Refused,
    does_it,
    loop_over,
    loss_of,
    mean_of,
    network,
    on_this_rank,
    samples,
)

pytestmark = pytest.mark.on_gpus_too


def misuse(world: dl.World, folder: str, how: str, culprit: int, shards: int | None) -> None:
    """At the third step, some ranks do it wrongly."""
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        wrong = how if does_it(world, culprit) and step.iteration == 3 else ""
        go_through(step, model, wrong)
        if wrong == "backward outside":
            step.backward(loss_of(model, samples(3)))
        if wrong == "pass twice":
            next(iter(step))
        if wrong != "no fold":
            step.fold()
        if wrong == "fold twice":
            step.fold()


def use_an_old_step(world: dl.World, folder: str, how: str, culprit: int) -> None:
    """Inside the second step's pass, some ranks use the first step."""
    model, old = network(), None
    for step in loop_over(world, folder, model):
        for rows in step:
            step.backward(loss_of(model, rows))
            if old is not None and does_it(world, culprit):
                if how == "fold":
                    old.fold()
                if how == "iterate":
                    next(iter(old))
        step.fold()
        old = step


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["fold", "iterate"])
@pytest.mark.parametrize("culprit", [0, ALL])
def test_an_old_step_does_not_close_the_pass_of_the_next_one(
    how: str, culprit: int, ranks: int, refused: Refused
) -> None:
    said = r"Only the newest step of a loop can be iterated and folded\. Step 1 is over"
    refused(ranks, use_an_old_step, how, culprit, kind="RuntimeError", said=said, by=culprit)


def go_through(step: dl.Step, model: nn.Module, wrong: str) -> None:
    for rows in step if wrong != "no pass" else ():
        if wrong == "continue":
            continue
        if wrong == "break":
            break
        if wrong.startswith("caught"):
            with suppress(MemoryError):
                if wrong == "caught in backward":
                    explode(step, model, rows)
                raise MemoryError("out of memory")
            continue
        step.backward(loss_of(model, rows), more_losses=wrong == "always more")
        if wrong == "twice":
            step.backward(loss_of(model, rows))
        if wrong == "break after":
            break


def explode(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
    """Run out of memory half way through backward."""
    hidden = model[1](model[0](rows))  # type: ignore[index]
    hidden.register_hook(run_out)
    step.backward(mse_loss(model[2](hidden), rows.sum(1, keepdim=True)))  # type: ignore[index]


def run_out(gradient: torch.Tensor) -> None:
    raise MemoryError("out of memory in backward")


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("continue", r"step\.backward must be called for every shard. Step 3 left out \[.*\] of its . shards"),
        ("break", r"step\.backward must be called for every shard. Step 3 left out"),
        ("caught", r"step\.backward must be called for every shard. Step 3 left out"),
        ("always more", r"step\.backward must be called for every shard. Step 3 left out"),
        ("no pass", r"fold\(\) must come after a pass over the shards. Step 3 had none"),
        ("twice", r"step\.backward must be called once for each shard. It was called a second time. Pass more_losses="),
        ("backward outside", r"step\.backward must be called once for each shard. It was called outside of"),
        ("pass twice", r"Each pass over the shards must end with fold\(\). Step 3 was iterated again"),
        ("no fold", r"Every step must end with step\.fold\(\), before the next one begins. Step 3 was left without"),
        ("fold twice", r"fold\(\) must come after a pass over the shards. Step 3 had none since its last fold"),
    ],
)
@pytest.mark.quick_on_gpus
def test_a_step_that_is_iterated_wrongly_is_refused_on_every_rank(
    how: str, said: str, culprit: int, shards: int | None, refused: Refused
) -> None:
    refused(2, misuse, how, culprit, shards, kind="RuntimeError", said=said, by=culprit)


@pytest.mark.parametrize("culprit", [ALL, 1])
def test_a_break_after_the_first_of_several_shards_is_refused(culprit: int, refused: Refused) -> None:
    refused(2, misuse, "break after", culprit, 6, kind="RuntimeError", said="Step 3 left out", by=culprit)


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
def test_an_error_of_backward_that_is_caught_is_refused(culprit: int, refused: Refused) -> None:
    said = "Step 3 left out"
    refused(2, misuse, "caught in backward", culprit, None, kind="RuntimeError", said=said, by=culprit)


def leave_the_last_step(world: dl.World, folder: str, culprit: int) -> None:
    for step in loop_over(world, folder, model := network()):
        for rows in step:
            step.backward(loss_of(model, rows))
        if not (does_it(world, culprit) and step.iteration == 4):
            step.fold()


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
def test_the_last_step_without_fold_is_refused_too(culprit: int, refused: Refused) -> None:
    refused(2, leave_the_last_step, culprit, kind="RuntimeError", said="Step 4 was left without it", by=culprit)


def leave_the_loop_early(world: dl.World, folder: str, culprit: int, then: str) -> None:
    for step in loop_over(world, folder, model := network()):
        if does_it(world, culprit) and step.iteration == 3:
            break
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
    if then == "evaluate":
        dl.evaluate(model, dl.Batches(samples(6), 3, world), mean=mean_of)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("then", ["evaluate", "end"])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.slow
def test_one_rank_that_leaves_the_loop_alone_ends_all_with_an_error(
    culprit: int, then: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    results = on_ranks(2, on_this_rank, leave_the_loop_early, str(tmp_path / "run"), (culprit, then))
    assert results[1 - culprit].kind == "PeerFailed", results
    assert max(result.took_s for result in results) < MOST_S


@pytest.mark.parametrize("then", ["evaluate", "end"])
def test_all_ranks_may_leave_the_loop_early_together(then: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    results = on_ranks(2, on_this_rank, leave_the_loop_early, str(tmp_path / "run"), (ALL, then))
    assert [result.kind for result in results] == ["", ""], results
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 2


def evaluate_inside(world: dl.World, folder: str, where: str) -> None:
    model = network()
    test = dl.Batches(samples(5), 2, world, shuffle=False)
    # every layer a bucket of its own: the sums of this step begin while backward goes on
    for step in loop_over(world, folder, model, count=19, bucket_cap_mib=1e-5):
        for rows in step:
            if where == "in the shard":
                dl.evaluate(model, test, mean=mean_of)
            step.backward(loss_of(model, rows))
        if where == "before fold":
            dl.evaluate(model, test, mean=mean_of)
        step.fold()


@pytest.mark.parametrize("where", ["in the shard", "before fold"])
def test_evaluation_inside_of_an_unfolded_step_is_refused_where_ranks_could_be_at_different_places(
    where: str, refused: Refused
) -> None:
    refused(3, evaluate_inside, where, kind="RuntimeError", said="fold")


BAD_CALLS: dict[str, tuple[Callable[[dl.Step, nn.Module, torch.Tensor], None], str, str]] = {
    "a loss per sample": (
        lambda step, model, rows: step.backward(model(rows).squeeze(1)),
        "ValueError",
        r"A loss must be a tensor of shape \(\).* Got shape \(\d,\). Take its mean",
    ),
    "a loss of shape (1,)": (lambda s, m, r: s.backward(loss_of(m, r).reshape(1)), "ValueError", r"Got shape \(1,\)"),
    "a number as loss": (lambda s, m, r: s.backward(loss_of(m, r).item()), "ValueError", "Got float"),  # type: ignore[arg-type]
    "no loss": (lambda s, m, r: s.backward(None), "ValueError", "Got NoneType"),  # type: ignore[arg-type]
    "a detached loss": (lambda s, m, r: s.backward(loss_of(m, r).detach()), "ValueError", "must need a gradient"),
    "an integer loss": (lambda s, m, r: s.backward(torch.tensor(3)), "ValueError", "must need a gradient"),
    "a negative weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=-1.0), "ValueError", r"or more. Got -1\.0"),
    "a nan weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=float("nan")), "ValueError", "Got nan"),
    "an infinite weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=float("inf")), "ValueError", "Got inf"),
    "a negative weight in a tensor": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.tensor(-2.0)),
        "ValueError",
        "weight must be a finite number, 0 or more. Got",
    ),
    "a nan weight in a tensor": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.tensor(float("nan"))),
        "ValueError",
        "weight must be a finite number, 0 or more. Got",
    ),
    "another weight in a tensor": (
        lambda s, m, r: (
            s.backward(loss_of(m, r), weight=torch.tensor(2.0), more_losses=True),  # type: ignore[func-returns-value]
            s.backward(loss_of(m, r), weight=torch.tensor(3.0)),  # type: ignore[func-returns-value]
        )[0],
        "ValueError",
        "All losses of a shard must have the same weight. Got 3.* after 2",
    ),
    "a weight per sample": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.ones(len(r))),
        "ValueError",
        r"weight must be one value. Got shape \(\d,\)",
    ),
    "a word as weight": (
        lambda s, m, r: s.backward(loss_of(m, r), weight="2"),  # type: ignore[arg-type]
        "ValueError|TypeError",
        "weight must be",
    ),
    "another reduction": (
        lambda s, m, r: s.backward(loss_of(m, r), reduction="none"),  # type: ignore[arg-type]
        "ValueError",
        '"mean" or "sum". Got \'none\'',
    ),
    "a metric of a wrong shape": (
        lambda s, m, r: s.backward(loss_of(m, r), error=m(r)),
        "ValueError",
        r"A metric must be one value.*error has shape \(\d, 1\)",
    ),
    "a metric for more samples": (
        lambda s, m, r: s.backward(loss_of(m, r), error=torch.ones(len(r) + 1)),
        "ValueError",
        r"error has shape",
    ),
    "a word as metric": (lambda s, m, r: s.backward(loss_of(m, r), error="big"), "ValueError|TypeError", "error"),  # type: ignore[arg-type]
    "no metric": (lambda s, m, r: s.backward(loss_of(m, r), error=None), "ValueError|TypeError", "error"),  # type: ignore[arg-type]
    "torch's own keyword": (lambda s, m, r: s.backward(loss_of(m, r), retain_graph=True), "ValueError", "retain_graph"),
    "a metric with a row's name": (lambda s, m, r: s.backward(loss_of(m, r), epoch=3.0), "ValueError", "epoch"),
    "two weights of one shard": (
        lambda s, m, r: (
            s.backward(loss_of(m, r), weight=2.0, more_losses=True),  # type: ignore[func-returns-value]
            s.backward(loss_of(m, r), weight=3.0),  # type: ignore[func-returns-value]
        )[0],
        "ValueError",
        "weight",
    ),
}


def weigh_two_losses() -> list[torch.Tensor]:
    """Two losses of each shard, with equal weights in two tensors."""
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, "", model, run_dir=None):
            for rows in step:
                step.backward(loss_of(model, rows) / 4, weight=torch.tensor(float(len(rows))), more_losses=True)
                step.backward(loss_of(model, rows) * 3 / 4, weight=torch.tensor(float(len(rows))))
            step.fold()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def test_two_losses_of_a_shard_with_equal_weights_in_tensors_add_up(on_ranks: OnRanks) -> None:
    model = network()
    loss_of(model, samples(24)[18:]).backward()
    for found in on_ranks(2, weigh_two_losses):
        for one, expected in zip(found, model.parameters(), strict=True):
            assert torch.allclose(one, expected.grad, rtol=1e-12, atol=1e-14)  # type: ignore[arg-type]


def call_badly(world: dl.World, folder: str, how: str, culprit: int) -> None:
    model, has_weights = network(), how.endswith("weight in a tensor")
    for step in loop_over(world, folder, model):
        for rows in step:
            if does_it(world, culprit) and step.iteration == 3:
                BAD_CALLS[how][0](step, model, rows)
            else:
                step.backward(loss_of(model, rows), weight=len(rows) if has_weights else None)
        step.fold()


@pytest.mark.parametrize("culprit", [ALL, 1])
@pytest.mark.parametrize("how", BAD_CALLS)
def test_a_backward_with_wrong_things_is_refused(how: str, culprit: int, late: bool, refused: Refused) -> None:
    _, kind, said = BAD_CALLS[how]
    by = culprit
    if late and how.endswith("weight in a tensor"):  # its value is seen in the next step, and by all ranks
        by, kind, said = ALL, "FloatingPointError", r"The loss of step 3 is nan\. Look at the weights: each"
    refused(2, call_badly, how, culprit, kind=kind, said=said, by=by)


def name_metrics(world: dl.World, folder: str, differing: str, at: int) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=4):
        for number, rows in enumerate(step):
            odd = step.iteration == at and (world.rank == 1 if differing == "ranks" else number == 1)
            metrics: dict[str, Any] = {"extra": 1.0} if odd else {"usual": 1.0}
            step.backward(loss_of(model, rows), **metrics)
        step.fold()


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("differing", "by"), [("shards", ALL), ("ranks", None)])
def test_metric_names_that_differ_are_refused(differing: str, by: int | None, at: int, refused: Refused) -> None:
    said = r"Every shard must come with the same metrics. .*\['usual'\].*\['extra'\]"
    refused(2, name_metrics, differing, at, kind="ValueError", said=said, by=by)


def give_weights(world: dl.World, folder: str, differing: str, at: int, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        for number, rows in enumerate(step):
            odd = step.iteration == at and (world.rank == 1 if "rank" in differing else number == 1)
            has_weight = odd != differing.endswith("without")
            step.backward(loss_of(model, rows), weight=torch.tensor(5.0) if has_weight else None)
        step.fold()


@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("differing", ["a rank with", "a rank without", "a shard with", "a shard without"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_weight_of_some_shards_alone_is_refused(
    ranks: int, differing: str, at: int, shards: int | None, refused: Refused
) -> None:
    if "shard" in differing and shards is None:
        shards = 6  # a rank has a single one otherwise
    said = (
        r"Every shard of a mini-batch must come with a weight, or none\. .* has one, .* has none\. Give step.backward"
    )
    refused(ranks, give_weights, differing, at, shards, kind="ValueError", said=said)


@pytest.mark.both_exchanges
@pytest.mark.one_device(CPU, "GPUs have an exchange of their own")
def test_either_exchange_refuses_a_weight_of_a_single_rank(refused: Refused) -> None:
    refused(2, give_weights, "a rank with", 3, None, kind="ValueError", said="rank 1 has one, rank 0 has none")


def change_weights() -> list[float]:
    """All ranks alike give weights in some steps alone; of a mini-batch of two samples one of three ranks has none."""
    with dl.join_world() as world:
        model, found = network(), []
        batches = dl.Batches(samples(14), 6, world, shuffle=False)
        for step in dl.Loop(batches, 2, state={"model": model}, progress=False):
            for rows in step:
                weight = float(rows[0, 0].square()) if step.iteration in (2, 3, 5) else None
                step.backward(loss_of(model, rows), weight=weight)
            found.append(float(step.fold().weight))
        return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_may_come_and_go_from_step_to_step(ranks: int, on_ranks: OnRanks) -> None:
    def weight(first: int, count: int) -> float:
        sizes = dl.split_sizes(count, ranks)
        starts = [first + sum(sizes[:rank]) for rank in range(ranks) if sizes[rank]]
        return sum(float(samples(14)[start, 0].square()) for start in starts)

    expected = [6.0, weight(6, 6), weight(12, 2), 6.0, weight(6, 6), 2.0]
    for found in on_ranks(ranks, change_weights):
        assert found == pytest.approx(expected, rel=1e-12)


def order_metrics(world: dl.World, folder: str) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        for rows in step:
            metrics: dict[str, Any] = {"one": 1.0, "two": 2.0} if world.rank else {"two": 2.0, "one": 1.0}
            step.backward(loss_of(model, rows), **metrics)
        found = {name: value.item() for name, value in step.fold().metrics.items()}
        assert found == {"one": 1.0, "two": 2.0}


def test_metrics_in_another_order_are_the_same_metrics(on_ranks: OnRanks, tmp_path: Path) -> None:
    for result in on_ranks(2, on_this_rank, order_metrics, str(tmp_path), ()):
        assert result.kind == "", result
