"""Early stopping: when it stops, which weights it keeps, on every rank and across a checkpoint."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.early_stopping import EarlyStopping
from tests.support.comparing import same_on_all
from tests.support.harness import FAULT_S, OnRanks, caught

pytestmark = pytest.mark.covers("B5")


@pytest.mark.parametrize(
    ("losses", "patience", "stops_after", "best"),
    [
        ([5, 4, 3, 2, 1, 0], 1, None, 6),
        ([5, 5], 1, 2, 1),  # equal is not an improvement
        ([3, 2, 2.5, 2.1, 1, 1.5, 1.4, 1.3], 3, 8, 5),  # two in a row are allowed
        ([3, 4, 2, 4, 4], 2, 5, 3),
        ([math.nan, math.nan, 1.0, math.nan, math.nan, math.nan], 3, 6, 3),
        ([math.nan, math.inf], 2, 2, 0),
        ([1, -math.inf, 0, 0], 2, 4, 2),
        ([torch.tensor(2.0), torch.tensor(1.0), torch.tensor(1.0)], 1, 3, 2),
    ],
)
def test_it_stops_when_the_loss_has_not_improved_patience_times_in_a_row(
    losses: list[Any], patience: int, stops_after: int | None, best: int
) -> None:
    watch = EarlyStopping(nn.Linear(1, 1), patience)
    said = [watch.should_stop(loss) for loss in losses]
    assert said == [number == stops_after for number in range(1, len(losses) + 1)]
    assert (watch.losses, watch.best) == (len(losses), best)
    assert watch.best_loss == (losses[best - 1] if best else math.inf)


class Counting(nn.Module):
    """A parameter, a buffer, and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.words: list[str] = []

    def get_extra_state(self) -> list[str]:
        return self.words

    def set_extra_state(self, state: list[str]) -> None:
        self.words = list(state)

    def become(self, number: int) -> None:
        with torch.no_grad():
            self.weight.fill_(number)
        self.get_buffer("seen").fill_(number)
        self.words.append(str(number))

    def told(self) -> tuple[float, int, str]:
        return float(self.weight.detach().mean()), int(self.get_buffer("seen")), "".join(self.words)


def test_the_best_weights_and_buffers_are_restored_or_the_last_ones_stay() -> None:
    model = Counting()
    watch = EarlyStopping(model, 9)
    for number, loss in enumerate([3.0, 1.0, 2.0], 1):
        model.become(number)
        watch.should_stop(loss)
    assert model.told() == (3, 3, "123")
    watch.restore_best()
    assert model.told() == (2, 2, "12")
    model.become(7)
    watch.should_stop(0.5)
    model.become(8)
    watch.restore_best()
    assert model.told() == (7, 7, "127")


def test_the_copy_reuses_its_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    watch = EarlyStopping(model)
    places = []
    for loss in (3.0, 2.0, 1.0):
        watch.should_stop(loss)
        places.append({name: kept.data_ptr() for name, kept in watch.state_dict()["kept"].items()})
    assert places[0] == places[1] == places[2]
    assert not set(places[0].values()) & {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert all(kept.device == model[0].weight.device for kept in watch.state_dict()["kept"].values())


def test_a_layer_with_a_new_shape_is_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    watch = EarlyStopping(model)
    watch.should_stop(2.0)
    model[0] = nn.Linear(4, 2)
    watch.should_stop(1.0)
    assert watch.state_dict()["kept"]["0.weight"].shape == (2, 4)
    watch.restore_best()


def test_it_continues_from_a_checkpoint() -> None:
    model = Counting()
    watch = EarlyStopping(model, 2)
    for number, loss in enumerate([3.0, 1.0, 2.0], 1):
        model.become(number)
        watch.should_stop(loss)
    file = io.BytesIO()
    torch.save(watch.state_dict(), file)
    other_model = Counting()
    other = EarlyStopping(other_model, 2)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert (other.losses, other.best, other.best_loss) == (3, 2, 1.0)
    assert other.should_stop(1.5)
    other.restore_best()
    assert other_model.told() == (2, 2, "12")
    fresh = EarlyStopping(other_model)
    fresh.load_state_dict(EarlyStopping(model).state_dict())
    assert (fresh.losses, fresh.best, fresh.best_loss) == (0, 0, math.inf)


def train(patience: int, own_losses: bool) -> tuple[int, list[torch.Tensor], list[torch.Tensor], float]:
    """The last step, the weights before and after restoring, and the validation loss of the restored ones."""
    with dl.join_world(device="cpu", seed=3) as world:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.2)  # too large to converge
        inputs = torch.randn(40, 4)
        targets = inputs.prod(1, keepdim=True)
        batches = dl.Batches((inputs[:30], targets[:30]), 10, world)
        validation = dl.Batches((inputs[30:], targets[30:]), 4, world, shuffle=False)
        watch = EarlyStopping(model, patience)

        def error(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return (outputs - wanted).square().mean(1)

        state = {"model": model, "optimizer": optimizer, "patience": watch}
        for step in dl.Loop(batches, 100, state=state, progress=False):
            for rows, wanted in step:
                step.backward(error(model(rows), wanted).mean())
            step.fold()
            optimizer.step()
            if step.iteration % 2 == 0:
                loss = dl.evaluate(model, validation, loss=error)["loss"]
                own = step.iteration * (2 * world.rank - 1)  # falls on rank 0, rises on rank 1
                if watch.should_stop(own if own_losses else loss):
                    break
        last = [parameter.detach().clone() for parameter in model.parameters()]
        watch.restore_best()
        loss = dl.evaluate(model, validation, loss=error)["loss"]
        assert loss == watch.best_loss
        best = [parameter.detach().clone() for parameter in model.parameters()]
        return step.iteration, last, best, loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_stop_at_the_same_step_with_the_same_weights(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, train, 3, False)
    assert len({(step, loss) for step, _, _, loss in results}) == 1
    assert results[0][0] < 300
    last, best = same_on_all([result[1] for result in results]), same_on_all([result[2] for result in results])
    assert not all(map(torch.equal, last, best))


@pytest.mark.slow
def test_a_rank_that_stops_by_its_own_loss_is_reported_to_the_others(on_ranks: OnRanks) -> None:
    results = on_ranks(2, caught, train, 2, True)
    assert {name for name, _, _ in results} <= {"PeerFailed"}
    assert any("left the loop" in text for _, text, _ in results)
    assert max(took_s for _, _, took_s in results) < FAULT_S


def test_what_is_no_patience_no_model_no_loss_and_no_best_loss_is_refused() -> None:
    patiences: list[Any] = [0, -1, 2.0, True, None]
    for patience in patiences:
        with pytest.raises(ValueError, match=r"patience must be a whole number, 1 or more\. Got"):
            EarlyStopping(nn.Linear(1, 1), patience)
    for model in (5, nn.Linear):
        with pytest.raises(TypeError, match=r"takes a model, a torch\.nn\.Module, first\. Got (int|type)\."):
            EarlyStopping(model)  # type: ignore[arg-type]
    watch = EarlyStopping(nn.Linear(1, 1))
    losses: list[Any] = [{"loss": 1.0}, None, torch.ones(2), "nothing"]
    for loss in losses:
        with pytest.raises(TypeError, match=r"A validation loss must be one number\. Got .*Select one by its name"):
            watch.should_stop(loss)
    watch.should_stop(math.nan)
    with pytest.raises(RuntimeError, match=r"None of the 1 validation losses was finite\. Call should_stop"):
        watch.restore_best()


def test_the_weights_of_another_model_are_refused() -> None:
    watch = EarlyStopping(nn.Linear(2, 1))
    watch.should_stop(1.0)
    for model, said in [
        (nn.Linear(3, 1), r"weight is torch.float32 \(1, 2\) in the state and torch.float32 \(1, 3\) in the model"),
        (nn.Linear(2, 1, bias=False), r"bias is torch.float32 \(1,\) in the state and nothing in the model"),
    ]:
        other = EarlyStopping(model)
        with pytest.raises(ValueError, match=said):
            other.load_state_dict(watch.state_dict())
        assert other.losses == 0
