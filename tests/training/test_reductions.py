"""What a shard's values become in the whole mini-batch: means, sums, the loss before a scaler, numbers of the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.training.step import as_metric
from ddp_loop.training.validation import check_weight
from tests.support.comparing import gradients_of
from tests.support.devices import CPU
from tests.support.dispatching import Dispatched
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, Refused, loss_of, network, samples
from tests.support.training import loop_on, train

pytestmark = pytest.mark.on_gpus_too


def scaled_rows(way: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of the rows that the callback gets."""
    seen: list[dict[str, Any]] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=way != "disabled")

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        value = loss_of(model, rows)
        if way == "in parts":
            return scaler.scale(value / 4) + scaler.scale(value) * 3 / 4
        return value if way == "unscaled" else scaler.scale(value)

    train(network(), loss, shards=3, state={"scaler": scaler}, on_row=seen.append)
    return [(row["loss"], row["gradient_norm"]) for row in seen]


@pytest.mark.covers("B10")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("way", ["scaled", "in parts", "unscaled", "disabled"])
def test_rows_have_the_loss_before_a_scaler_scaled_it(way: str, on_ranks: OnRanks) -> None:
    for rows, (loss_found, norm_found) in zip(samples(24).split(6), on_ranks(2, scaled_rows, way)[0], strict=True):
        model = network()
        loss = loss_of(model, rows)
        loss.backward()
        assert loss_found == pytest.approx(loss.item(), rel=BOUND)
        norm = float(nn.utils.get_total_norm(gradients_of(model)))
        assert way == "unscaled" or norm_found == pytest.approx(norm, rel=BOUND)


def test_a_sum_that_is_not_finite_names_its_shard_also_with_weight_0(refused: Refused) -> None:
    said = r"The loss of step 1 is nan, from shard 1 of 2, samples 3, 4, 5 of the data"
    refused(2, add_up_badly, kind="FloatingPointError", said=said)


def add_up_badly(world: dl.World, folder: str) -> None:
    rows = samples(6)
    rows[4] = math.nan
    model = network()
    for step in loop_on(dl.Batches(rows, 6, world, shuffle=False), model):
        for shard in step:
            step.backward(model(shard).square().sum(), reduction="sum", weight=1.0 - world.rank)
        step.fold()


# -- values on the host, for a loss on a GPU; device "meta" stands for the GPU, and refuses to be mixed as it does ---


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize(
    "value", [2.0, 1.5, torch.tensor(2.5), torch.tensor([1, 2, 3]), dl.Sum(torch.tensor(1.5)), dl.Sum(torch.ones(3))]
)
def test_a_metric_on_the_host_is_a_number_to_the_device(value: Any) -> None:
    copied: list[str] = []

    def note(function: Any, arguments: Any, result: Any) -> None:
        """What is copied from the host to the device."""
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and any(not one.is_meta for one in tensors):
            copied.append(str(function))

    with Dispatched(note):
        assert as_metric("one", value, 3, torch.device("meta")).device.type == "meta"
    assert copied == []


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize("weight", [torch.tensor(3), torch.tensor([2.5]), torch.tensor(0.1, dtype=torch.float64)])
def test_a_weight_on_the_host_is_a_number(weight: torch.Tensor) -> None:
    assert type(checked := check_weight(weight)) is float
    assert checked == weight.to(torch.float64).item()
    for wrong in (torch.tensor(-1.0), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
            check_weight(wrong)
