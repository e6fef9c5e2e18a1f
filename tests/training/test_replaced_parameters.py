"""Parameters and modules that others take the place of in mid-run, recognised by identity."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12  # float64, some sums


def head(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(6, 1).double()


def replace(model: nn.Sequential, how: str, number: int) -> None:
    """Put other parameters of the same number and shapes into the model."""
    if how == "head":
        model[2] = head(number)
    elif how == "assign":
        model.load_state_dict(deepcopy(model.state_dict()), assign=True)
    elif how == "parameter":
        model[2].weight = nn.Parameter(head(number).weight.detach() * 2)
    else:  # a normalised head: a module with statistics of its own comes with it
        model[2] = nn.Sequential(nn.BatchNorm1d(6).double(), head(number))


def train(how: str, shards: int | None, differing: bool = False, at: str = "before the shards") -> Tensors:
    with dl.join_world(seed=0) as world:
        model = network()
        batches = dl.Batches(samples(24), 6, world, shards=shards, shuffle=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            if step.iteration == 3 and at == "before the shards":
                replace(model, how, 5 + world.rank * differing)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
            if step.iteration == 2 and at == "after the step":
                replace(model, how, 5 + world.rank * differing)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return [*values_of(model), *(one.double() for one in model.buffers())]


def train_plainly(how: str, pieces: int = 1) -> Tensors:
    """One process. With several shards batch norm is that of each shard, and its statistics are pooled by hand."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate(samples(24).split(6), 1):
        if number == 3:
            replace(model, how, 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return [*values_of(model), *(one.double() for one in model.buffers())]


@pytest.mark.covers("J4")
@pytest.mark.parametrize("at", ["before the shards", "after the step"])
@pytest.mark.parametrize("how", ["head", "assign", "parameter"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 2), (2, None), (3, 7)])
@pytest.mark.quick_on_gpus
def test_replaced_parameters_are_folded_like_the_ones_before(
    how: str, at: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    found = same_on_all(on_ranks(ranks, train, how, shards, False, at))
    assert distance(found, train_plainly(how)) <= BOUND


@pytest.mark.covers("J4")
def test_a_layer_of_batch_norm_that_comes_in_mid_run_is_watched_like_the_others(on_ranks: OnRanks) -> None:
    (one,) = on_ranks(1, train, "norm", 2)
    for ranks in (2, 3):
        assert distance(same_on_all(on_ranks(ranks, train, "norm", 2)), one) <= BOUND
    counted = [value for value in one if value.dim() == 0]
    assert counted == [torch.tensor(2.0, dtype=torch.float64)]  # steps, not shards


@pytest.mark.covers("J4")
@pytest.mark.parametrize("at", ["before the shards", "after the step"])
def test_parameters_that_differ_between_ranks_are_rank_0s_before_their_first_use(at: str, on_ranks: OnRanks) -> None:
    found = same_on_all(on_ranks(2, train, "head", None, True, at))
    assert distance(found, train_plainly("head")) <= BOUND


def add_another(differing: bool) -> Tensors:
    with dl.join_world(seed=0) as world:
        model, other = network(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(samples(24), 6, world, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
            if step.iteration == 2:
                nn.init.constant_(other.weight, 0.5 + world.rank * differing)
                nn.init.zeros_(other.bias)
                optimizer.add_param_group({"params": list(other.parameters())})
            for rows in step:
                output = model(rows) + (other(rows) if step.iteration > 1 else 0)
                step.backward(mse_loss(output, rows.sum(1, keepdim=True)))
            step.fold()
            optimizer.step()
        return values_of(model, other)


@pytest.mark.covers("J4")
def test_an_added_group_has_rank_0s_values_in_its_first_gradient(on_ranks: OnRanks) -> None:
    assert distance(same_on_all(on_ranks(2, add_another, True)), same_on_all(on_ranks(2, add_another, False))) == 0


def activations_made_anew() -> int:
    """Modules without parameters may come and go in each forward, on a rank without a shard they do not."""

    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1).double()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.activation = nn.Tanh()
            return self.activation(self.layer(rows))  # type: ignore[no-any-return]

    with dl.join_world(seed=0) as world:
        model, folds = Anew(), set()
        loop = dl.Loop(dl.Batches(samples(4), 1, world), 1, state={"model": model}, progress=False)
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            folds.add(id(loop.fold))
        return len(folds)


def test_modules_without_tensors_change_nothing(on_ranks: OnRanks) -> None:
    assert on_ranks(2, activations_made_anew) == [1, 1]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.get_buffer("shift")


class Growing(nn.Module):
    """Makes or replaces a part of itself in its third forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self._how, self._forwards = network(), how, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._forwards += 1
        if self._forwards == 3:
            self.grow()
        return self.layer(rows) * getattr(self, "scale", 1.0)  # type: ignore[no-any-return]

    def grow(self) -> None:
        if self._how == "made":
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        elif self._how == "replaced":
            self.layer[2].weight = nn.Parameter(head(7).weight.detach())
        elif self._how == "module":
            self.layer[2] = head(7)
        elif self._how == "buffer":
            self.layer.append(Shift())
        else:
            del self.layer[2].bias
            self.layer[2].bias = None  # type: ignore[assignment]


IN_FORWARD = {
    "made": r"model\.scale is new or was replaced in between",
    "replaced": r"model\.layer\.2\.weight is new or was replaced in between",
    "module": r"model\.layer\.2\.weight is new or was replaced in between",
    "buffer": r"model\.layer\.3\.shift is new or was replaced in between",
    "removed": r"One was removed in between",
}


def grow_in_forward(world: dl.World, folder: str, how: str, shards: int | None, count: int) -> None:
    model = Growing(how)
    for step in loop_over(world, folder, model, count=count, shards=shards, epochs=4):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("J4")
@pytest.mark.parametrize("how", IN_FORWARD)
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 4), (2, None), (2, 4), (3, None), (3, 7)])
@pytest.mark.quick_on_gpus
def test_a_parameter_that_a_forward_makes_or_replaces_is_refused_in_that_step(
    how: str, ranks: int, shards: int | None, refused: Refused
) -> None:
    said = f"must stay the same ones.* {IN_FORWARD[how]}.*Make it before the Loop, by one forward"
    refused(ranks, grow_in_forward, how, shards, 24, kind="RuntimeError", said=said)


@pytest.mark.covers("J4")
@pytest.mark.parametrize("how", ["made", "buffer"])
def test_it_is_refused_beside_a_rank_without_a_shard(how: str, refused: Refused) -> None:
    refused(2, grow_in_forward, how, None, 1, kind="RuntimeError", said=IN_FORWARD[how], by=0)


def call_functionally() -> Tensors:
    """A forward may put other tensors into the model's place, if it takes them away again."""
    with dl.join_world(seed=0) as world:
        model = network()
        for step in loop_over(world, "", model, run_dir=None):
            for rows in step:
                doubled = {name: 2 * one for name, one in model.named_parameters()}
                output = torch.func.functional_call(model, doubled, (rows,))
                step.backward(mse_loss(output, rows.sum(1, keepdim=True)))
            step.fold()
        return values_of(model)


def test_a_functional_call_is_no_replacement(on_ranks: OnRanks) -> None:
    assert distance(same_on_all(on_ranks(2, call_functionally)), values_of(network())) == 0


class Lazy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = network()
        norm = nn.LazyBatchNorm1d(affine=False) if kind == "statistics" else nn.LazyBatchNorm1d()
        self.lazy = nn.LazyLinear(1) if kind == "linear" else norm
        self.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.lazy(self.layer(rows))  # type: ignore[no-any-return]


def begin_lazily(world: dl.World, folder: str, kind: str) -> None:
    model = Lazy(kind)
    for step in loop_over(world, folder, model):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("kind", ["linear", "norm", "statistics"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lazy_module_without_shapes_is_refused_as_the_loop_begins(ranks: int, kind: str, refused: Refused) -> None:
    said = r"needs a shape before the Loop is made\. model\.lazy\.\w+ has none\. Run the model once on one sample"
    refused(ranks, begin_lazily, kind, kind="ValueError", said=said, by=ALL)
