"""A module, a buffer, a parameter counts once, whatever the paths from `state` to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support import reference
from tests.support.comparing import is_same
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

State = dict[str, torch.Tensor]


def rows_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(22, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return rows, rows.sum(1, keepdim=True)


def encoder_and_head() -> tuple[nn.Sequential, nn.Linear]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double(), nn.Linear(4, 1).double()


def train_shared(shards: int | None, twice: bool) -> State:
    with dl.join_world(seed=0) as world:
        encoder, head = encoder_and_head()
        model = nn.Sequential(encoder, head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        if twice:
            state = {"encoder": encoder, "model": model, "optimizer": optimizer, "again": optimizer}
        batches = dl.Batches(rows_and_targets(), 11, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 2, state=state, progress=False, check_replicas_every=1):
            for rows, targets in step:
                step.backward(mse_loss(model(rows), targets))
            step.fold()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_plainly(shards: int) -> State:
    encoder, head = encoder_and_head()
    model = nn.Sequential(encoder, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = mse_loss(model(rows), targets)
        return value, value

    for _ in range(2):
        for mini_batch in zip(*(tensor.split(11) for tensor in rows_and_targets()), strict=True):
            reference.step(model, reference.cut(mini_batch, dl.split_sizes(11, shards)), loss)
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.covers("D4", "J4")
@pytest.mark.parametrize(("ranks", "shards"), [(1, 4), (2, None), (3, 4)])
def test_a_batch_norm_that_two_entries_of_state_reach_moves_once(
    ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    expected = train_plainly(shards or ranks)
    for found in on_ranks(ranks, train_shared, shards, True):
        assert int(found["0.1.num_batches_tracked"]) == 4
        for name, value in found.items():
            assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14), name  # sums of some ten terms


@pytest.mark.covers("D4", "J4")
@pytest.mark.quick_on_gpus
def test_a_shared_module_gives_the_bits_of_one_that_is_named_once(on_ranks: OnRanks) -> None:
    once = on_ranks(2, train_shared, 4, False)[0]
    for found in on_ranks(2, train_shared, 4, True):
        assert is_same(list(found.values()), list(once.values()))


class Level(nn.Module):
    """A floating buffer, and an integer one, that each forward changes."""

    def __init__(self, level: torch.Tensor, count: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("level", level)
        self.register_buffer("count", count)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("level").mul_(0.5).add_(rows.mean())
        self.get_buffer("count").add_(len(rows))
        return self.weight * rows.mean()


def train_levels(rules: dict[str, str]) -> list[float]:
    """Two modules with the same buffers, one of them under two names."""
    with dl.join_world() as world:
        level, count = torch.full((), 4.0, dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        one, other = Level(level, count), Level(level, count)
        state = {"one": one, "both": nn.ModuleList([one, other])}
        batches = dl.Batches(torch.arange(6.0, dtype=torch.float64), 3, world, shuffle=False)
        for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False, check_replicas_every=1):  # type: ignore[arg-type]
            for rows in step:
                step.backward(one(rows) + other(rows))
            step.fold()
        assert one.get_buffer("level") is other.get_buffer("level") is level
        return [float(level), float(count)]


@pytest.mark.covers("D6")
@pytest.mark.parametrize("name", ["one.count", "both.0.count", "both.1.count"])
def test_a_shared_buffer_has_the_rule_of_each_of_its_names(name: str, on_ranks: OnRanks) -> None:
    # Shards of 0, 1 and of 2, then of 3, 4 and of 5; each calls both modules: level / 4 + 1.5 mean.
    level = 4.0
    for first, second in ((0.5, 2.0), (3.5, 5.0)):
        level = level / 4 + 1.5 * (2 * first + second) / 3
    for found in on_ranks(2, train_levels, {name: "first", name.replace("count", "level"): "mean"}):
        assert found == [pytest.approx(level, rel=1e-12), 8.0]


def train_levels_refused(world: dl.World, folder: str) -> None:
    level = Level(torch.zeros(()), torch.zeros((), dtype=torch.int64))
    state = {"one": level, "both": nn.ModuleList([level])}
    rules = {"one.count": "first", "both.0.count": "mean"}
    dl.Loop(dl.Batches(torch.zeros(6), 3, world), 1, state=state, buffer_reduction=rules, progress=False)  # type: ignore[arg-type]


@pytest.mark.covers("D6")
def test_two_rules_for_one_buffer_are_refused(refused: Refused) -> None:
    said = "A buffer has one rule. one.count and both.0.count are one buffer"
    refused(2, train_levels_refused, kind="ValueError", said=said, by=ALL)


def train_local(rules: dict[str, str]) -> float:
    with dl.join_world() as world:
        one = Level(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64))
        state = {"one": one, "both": nn.ModuleList([one])}
        batches = dl.Batches(torch.arange(6.0, dtype=torch.float64), 3, world, shuffle=False)
        for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False, check_replicas_every=1):  # type: ignore[arg-type]
            for rows in step:
                step.backward(one(rows))
            step.fold()
        return float(one.get_buffer("count"))


@pytest.mark.covers("D6")
def test_a_local_buffer_is_local_under_each_of_its_names(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_local, {"both.0.count": "local", "one.level": "mean"}) == [4.0, 2.0]


def share_statistics(shards: int) -> list[torch.Tensor]:
    """Two batch-norm layers on the same running statistics, in the order of their calls."""
    with dl.join_world() as world:
        one, other = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
        other._buffers = one._buffers
        between = nn.Linear(3, 3).double()
        model = nn.Sequential(one, between, other)
        with torch.no_grad():
            between.weight.copy_(torch.eye(3) * 2)
            between.bias.fill_(1.0)
        rows = rows_and_targets()[0]
        for step in dl.Loop(dl.Batches(rows, 11, world, shards=shards), 1, state={"model": model}, progress=False):
            for shard in step:
                step.backward(model(shard).square().mean())
            step.fold()
        return [buffer.clone() for buffer in one.buffers()]


@pytest.mark.covers("D4", "J4")
def test_layers_that_share_their_running_statistics_move_them_in_turn(on_ranks: OnRanks) -> None:
    # Both layers see mean 0 or that of a linear map: what differs between 1 and 4 shards is the second one's input.
    alone = on_ranks(1, share_statistics, 1)[0]
    for found in on_ranks(2, share_statistics, 4):
        assert int(found[2]) == int(alone[2]) == 4
        assert torch.allclose(found[0], alone[0], rtol=1e-9, atol=1e-9)


def share_one_statistic(world: dl.World, folder: str) -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    other.running_mean = one.running_mean
    model = nn.Sequential(one, other)
    dl.Loop(dl.Batches(torch.zeros(8, 3), 8, world), 1, state={"model": model}, progress=False)


def test_layers_that_share_one_of_their_statistics_are_refused(refused: Refused) -> None:
    said = "share all of their running statistics or none. model.1 shares only running_mean with another layer"
    refused(2, share_one_statistic, kind="ValueError", said=said, by=ALL)


def hold_in_a_list(world: dl.World, folder: str, kind: str) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    value: object = {
        "list": [first, second],
        "dict": {"a": {"b": first}},
        "optimizers": [torch.optim.SGD([first.bias])],
    }[kind]
    dl.Loop(dl.Batches(torch.zeros(8, 3), 8, world), 1, state={"models": value, "other": second}, progress=False)


@pytest.mark.parametrize("kind", ["list", "dict", "optimizers"])
def test_modules_in_a_list_of_state_are_refused(kind: str, refused: Refused) -> None:
    said = "Each module and optimizer in state needs a name of its own. 'models' is a"
    refused(2, hold_in_a_list, kind, kind="TypeError", said=said, by=ALL)
