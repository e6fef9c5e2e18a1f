"""What a shard's values become in the whole mini-batch: means, sums, each as it was when it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import ddp_loop as dl
from ddp_loop.training.rows import as_metric
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12  # float64, some sums


def mix(world: dl.World, folder: str, what: str) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=4):
        for number, rows in enumerate(step):
            loss = loss_of(model, rows)
            if what == "in a shard":
                step.backward(loss, more_losses=True)
                step.backward(loss, reduction="sum")
            elif what == "between shards":
                step.backward(loss, reduction="sum" if number else "mean")
            elif what == "between ranks":
                step.backward(loss, reduction="sum" if world.rank else "mean")
            else:
                step.backward(loss, hits=dl.Sum(1) if number else 1)
        step.fold()


@pytest.mark.parametrize("what", ["in a shard", "between shards", "between ranks", "metrics"])
def test_shards_and_losses_with_different_reductions_are_refused(what: str, refused: Refused) -> None:
    said = "All losses of a shard" if what == "in a shard" else "Every shard must come with the same reductions"
    refused(2, mix, what, kind="ValueError", said=said, by=ALL)


def write_again(shards: int) -> list[tuple[float, float, float]]:
    """A script that keeps one tensor for each value, to avoid allocations."""
    with dl.join_world() as world:
        model, found = network(), []
        metric, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for step in loop_over(world, "", model, run_dir=None, shards=shards):
            for rows in step:
                metric.copy_(rows[:, 0].mean())
                weight.fill_(len(rows))
                loss = loss_of(model, rows)
                step.backward(loss, first=metric, weight=weight)
                loss.detach().zero_()
            metric.fill_(1e9)
            weight.fill_(1e9)
            row = step.fold()
            found.append((float(row.loss), float(row.metrics["first"]), float(row.weight)))
        return found


@pytest.mark.covers("D3")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_is_written_again_counts_as_it_was(ranks: int, on_ranks: OnRanks) -> None:
    model = network()
    for result in on_ranks(ranks, write_again, 4):
        for found, rows in zip(result, samples(24).split(6), strict=True):
            expected = (loss_of(model, rows).item(), float(rows[:, 0].mean()), 6.0)
            assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= BOUND


def hold_again() -> float:
    """A script that fills one tensor with the labels of each shard."""
    with dl.join_world() as world:
        model, labels = network(), torch.zeros(2, 1, dtype=torch.float64)
        for step in loop_over(world, "", model, run_dir=None, shards=3, steps=1, epochs=None):
            for rows in step:
                labels.copy_(rows.sum(1, keepdim=True))
                step.hold(model(rows), labels)
            outputs, targets = step.gather()
            step.backward(functional.mse_loss(outputs, targets))
            return float(step.fold().loss)
    return 0.0


def test_what_is_held_counts_as_it_was(on_ranks: OnRanks) -> None:
    expected = loss_of(network(), samples(24)[:6]).item()
    assert all(abs(found - expected) <= BOUND for found in on_ranks(2, hold_again))


def scaled_rows(shards: int, folder: str, way: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of the rows that the callback gets."""
    rows_seen: list[dict[str, Any]] = []
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=way != "disabled")
        for step in loop_over(world, folder, model, optimizer, scaler, shards=shards, on_row=rows_seen.append):
            for rows in step:
                loss = loss_of(model, rows)
                if way == "in parts":
                    step.backward((scaler.scale(loss / 4) + scaler.scale(loss) * 3 / 4) / 1)
                else:
                    step.backward(loss if way == "unscaled" else scaler.scale(loss))
            step.fold()
            if way == "unscaled":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return [(row["loss"], row["gradient_norm"]) for row in rows_seen]


@pytest.mark.covers("B10")
@pytest.mark.parametrize("way", ["scaled", "in parts", "unscaled", "disabled"])
def test_rows_have_the_loss_before_a_scaler_scaled_it(way: str, on_ranks: OnRanks, tmp_path: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = on_ranks(2, scaled_rows, 3, str(tmp_path / way), way)[0]
    for rows, (loss_found, norm_found) in zip(samples(24).split(6), found, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm(gradients_of(model)))
        optimizer.step()
        assert abs(loss_found - loss.item()) <= BOUND * loss.item()
        assert way == "unscaled" or abs(norm_found - norm) <= BOUND * norm


def train_low(dtype: torch.dtype, shards: int, weight: float | None, as_tensor: bool) -> Tensors:
    """Gradients of a float32 network whose loss is given in a narrow dtype."""
    with dl.join_world() as world:
        model = network().float()
        for step in loop_over(world, "", model, run_dir=None, shards=shards, steps=1, epochs=None):
            for number, rows in enumerate(step):
                own = None if weight is None else weight * (1 + number)
                tensor = torch.tensor(own) if as_tensor and own is not None else own
                step.backward(loss_of(model, rows.float()).to(dtype), weight=tensor)
            step.fold()
            return gradients_of(model)
    return []


@pytest.mark.covers("B10")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("weight", "as_tensor"), [(None, False), (1e6, False), (1e6, True)])
@pytest.mark.parametrize("shards", [3, 5])
def test_a_loss_in_a_narrow_dtype_is_scaled_in_float32(
    shards: int, weight: float | None, as_tensor: bool, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    rows = samples(24)[:6].float()
    pieces = rows.split(dl.split_sizes(6, shards))
    weights = [len(piece) if weight is None else weight * (1 + number) for number, piece in enumerate(pieces)]
    whole: list[torch.Tensor] | None = None
    for piece, own in zip(pieces, weights, strict=True):
        model = network().float()
        loss_of(model, piece).to(dtype).backward()
        parts = [gradient * (own / sum(weights)) for gradient in gradients_of(model)]
        whole = parts if whole is None else [a + b for a, b in zip(whole, parts, strict=True)]
    assert whole is not None
    # float32, some products and sums; in the loss's dtype it is 2e-3 and more
    assert distance(same_on_all(on_ranks(1, train_low, dtype, shards, weight, as_tensor)), whole) <= 1e-6
    if weight is None:
        assert distance(same_on_all(on_ranks(2, train_low, dtype, shards, weight, as_tensor)), whole) <= 1e-6


def count_in_an_evaluation(shards: int | None) -> dict[str, float]:
    with dl.join_world() as world:
        batches = dl.Batches(samples(7), 3, world, shards=shards, shuffle=False)
        return dl.evaluate(
            network(), batches, hits=lambda _, rows: dl.Sum(rows[:, 0] > 0), count=lambda _, rows: dl.Sum(len(rows)),
            share=lambda _, rows: rows[:, 0] > 0,
        )  # fmt: skip


@pytest.mark.covers("B8")
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (3, 4)])
def test_sums_of_an_evaluation_add_up(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    hits = int((samples(7)[:, 0] > 0).sum())
    expected = {"hits": hits, "count": 7.0, "share": hits / 7, "samples": 7}
    assert on_ranks(ranks, count_in_an_evaluation, shards) == [expected] * ranks


def sum_in_one_shard(world: dl.World, folder: str) -> None:
    batches = dl.Batches(samples(4), 2, world, shuffle=False)
    dl.evaluate(network(), batches, hits=lambda _, rows: dl.Sum(1) if world.rank else 1)


def test_a_sum_in_one_shard_alone_is_refused(refused: Refused) -> None:
    refused(2, sum_in_one_shard, kind="ValueError", said="hits is a dl.Sum of some", by=ALL)


@pytest.mark.parametrize(
    "value", [1.5, torch.tensor(1.5), torch.ones(3), dl.Sum(torch.tensor(1.5)), dl.Sum(torch.ones(3))]
)
def test_a_metric_goes_to_the_device_of_the_loss(value: Any) -> None:
    """As where a GPU's loss comes with a metric on the CPU; torch's "meta" is the second device of every machine."""
    assert as_metric("m", value, 3, torch.device("meta")).device.type == "meta"
