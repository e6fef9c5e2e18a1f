"""Models whose batch norm is synced: converted and back, copied, stored; and ranks that do not call them alike."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import ddp_loop as dl
from ddp_loop.batch_norm import SyncChannel, find_sync_channels, local_batch_norm, sync_batch_norm
from ddp_loop.batch_norm.synced import WORDS, SyncedBatchNorm
from tests.support.devices import CPU, GPU
from tests.support.harness import FAULT_S, OnRanks, caught

pytestmark = [pytest.mark.covers("D5"), pytest.mark.on_gpus_too]


def network() -> nn.Sequential:
    """Every sort of layer, one of them in two places, with other norms between."""
    twice = nn.BatchNorm1d(4, eps=0.01, momentum=None)
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.Sequential(twice, nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False)),
        nn.ModuleDict({"again": twice, "other": nn.BatchNorm3d(2, track_running_stats=False)}),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4),
    ).eval()


def tensors_of(model: nn.Module) -> list[tuple[str, int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(tensor)) for name, tensor in named]


def norms_of(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def facts_of(model: nn.Module) -> list[tuple[Any, ...]]:
    return [(x.num_features, x.eps, x.momentum, x.affine, x.track_running_stats, x.training) for x in norms_of(model)]


# -- converted, and back -----------------------------------------------------------------------------------------------


def test_a_model_is_synced_and_made_local_again_with_the_very_same_tensors() -> None:
    model = network()
    model.get_submodule("1.0").train()
    tensors, facts, keys = tensors_of(model), facts_of(model), list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with dl.join_world() as world:
        assert sync_batch_norm(model, world) is model
        assert [type(layer) for layer in norms_of(model)] == [SyncedBatchNorm] * 4
        assert model.get_submodule("1.0") is model.get_submodule("2.again")
        assert isinstance(model.get_submodule("1.1"), nn.GroupNorm)
        assert (tensors_of(model), facts_of(model), list(model.state_dict())) == (tensors, facts, keys)
        assert len(find_sync_channels([model, model])) == 1
        sync_batch_norm(model, world)  # once more, as after loading a model that was synced
        assert local_batch_norm(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert model.get_submodule("1.0") is model.get_submodule("2.again")
    assert (tensors_of(model), facts_of(model), list(model.state_dict())) == (tensors, facts, keys)
    assert find_sync_channels([model]) == []
    assert not any(name in layer.__dict__ for layer in norms_of(model) for name in ("_channel", "_origin", "_number"))


def test_a_model_that_is_a_layer_itself_is_given_back_as_another() -> None:
    layer = nn.BatchNorm2d(3)
    with dl.join_world() as world:
        synced = sync_batch_norm(layer, world)
        assert isinstance(synced, SyncedBatchNorm)
        assert synced.weight is layer.weight
        with pytest.raises(ValueError, match="expected 4D input"):
            synced(torch.ones(2, 3))
        assert type(local_batch_norm(synced)) is nn.BatchNorm2d


def test_hooks_stay_and_their_handles_still_take_them_away() -> None:
    model, calls = nn.Sequential(nn.BatchNorm1d(2)), []
    handle = model[0].register_forward_hook(lambda layer, inputs, output: calls.append(type(layer).__name__))
    with dl.join_world() as world:
        sync_batch_norm(model, world)
        model(torch.randn(3, 2))
        handle.remove()
        model(torch.randn(3, 2))
    assert calls == ["SyncedBatchNorm"]


class Own(nn.BatchNorm1d):
    """A batch norm whose forward is its own."""


def convert(sort: str) -> tuple[str, str, float]:
    with dl.join_world() as world:
        layers = {
            "lazy": nn.LazyBatchNorm1d(),
            "own": Own(3),
            "other layers": nn.BatchNorm1d(3 + world.rank),
            "lazy on one": nn.LazyBatchNorm1d() if world.rank == 1 else nn.BatchNorm1d(3),
        }
        refused = caught(sync_batch_norm, nn.Sequential(nn.ReLU(), layers[sort]), world)
        assert world.gather(world.rank) == [0, 1]  # all were refused at the same place, and may go on
        return refused


@pytest.mark.parametrize(
    ("sort", "said"),
    [
        ("lazy", "`1` is a lazy one"),
        ("own", "`1` is a Own with its own forward"),
        ("other layers", "the batch-norm layers of a synced model must be the same on every rank. Rank 0 has ['1: 3,"),
        ("lazy on one", "`1` is a lazy one"),
    ],
)
def test_what_cannot_be_synced_is_refused_on_every_rank(sort: str, said: str, on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(2, convert, sort):
        assert kind in ("ValueError", "PeerFailed")
        assert said in text
        assert took_s < FAULT_S


# -- copies ------------------------------------------------------------------------------------------------------------


def copies() -> dict[str, tuple[bool, list[float]]]:
    """Whether each copy is synced, and the mean over all ranks, or of this one, that its first output shows."""
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(1, momentum=1.0)), world)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        found = {}
        for name, one in {
            "deepcopy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "torch.save": torch.load(stored, weights_only=False),
            "local": local_batch_norm(copy.deepcopy(model)),
            "itself": model,
        }.items():
            one(torch.tensor([[0.0], [2.0]]) + 10 * world.rank)
            layer = one.get_submodule("0")
            found[name] = isinstance(layer, SyncedBatchNorm) and layer.is_synced, layer.running_mean.tolist()
        return found


@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
def test_a_copy_stays_synced_and_one_that_was_stored_is_local(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(2, copies)):
        local, synced = (False, [1.0 + 10 * rank]), (True, [6.0])
        assert found == {"deepcopy": synced, "pickle": local, "torch.save": local, "local": local, "itself": synced}


# -- ranks that do not call the layers alike ---------------------------------------------------------------------------

Scenario = Callable[[dl.World, nn.Module], object]


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, requires_grad=True)


def backward_for_forward(world: dl.World, model: nn.Module) -> None:
    output = model(rows(3))
    if world.rank == 2:
        output.sum().backward()
    else:
        model(rows(3))


def another_layer(world: dl.World, model: nn.Module) -> None:
    model.get_submodule("2" if world.rank == 1 else "0")(rows(3))


def one_call_fewer(world: dl.World, model: nn.Module) -> None:
    [channel] = find_sync_channels([model])
    model(rows(3))
    if world.rank != 1:
        model(rows(3))
    channel.send_control()


def another_call(world: dl.World, model: nn.Module) -> None:
    """The backward of the first call, where the others go back through the second."""
    first, second = model.get_submodule("0")(rows(3)), model.get_submodule("0")(rows(2))
    (first if world.rank == 1 else second).sum().backward()


def too_few(world: dl.World, model: nn.Module) -> None:
    model(rows(1 if world.rank == 1 else 0))


MISTAKES: dict[str, tuple[Scenario, str, str]] = {
    "backward": (
        backward_for_forward,
        "RuntimeError",
        "rank 0 is at the forward of layer `0` (call 3 of its pass), rank 2 at the backward of layer `2` (call 2 of "
        "its pass). Every rank must call the layers of a synced model alike",
    ),
    "another layer": (another_layer, "RuntimeError", "`0` (call 1 of its pass), rank 1 at the forward of layer `2`"),
    "one call fewer": (one_call_fewer, "RuntimeError", "(call 3 of its pass), rank 1 at the end of its pass. Every"),
    "another call": (another_call, "RuntimeError", "(call 2 of its pass), rank 1 at the backward of layer `0` (call 1"),
    "one value": (too_few, "ValueError", "1 value per channel when training, over all ranks together. Got [0, 1, 0]"),
}


def make(name: str) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3), nn.GroupNorm(1, 3))
            MISTAKES[name][0](world, sync_batch_norm(model, world))

    return caught(work)


@pytest.mark.one_device(CPU, "an asynchronous device raises at the end of a pass")
@pytest.mark.parametrize("name", list(MISTAKES))
def test_ranks_that_do_not_call_the_layers_alike_all_raise_the_same(name: str, on_ranks: OnRanks) -> None:
    _, kind, said = MISTAKES[name]
    results = on_ranks(3, make, name)
    assert [(one[0], one[1]) for one in results] == [(kind, results[0][1])] * 3
    assert said in results[0][1]
    assert max(took_s for _, _, took_s in results) < FAULT_S


def penalise(parts: int) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            model = sync_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))[:parts], world)
            values = rows(3)
            [slope] = torch.autograd.grad(model(values).square().sum(), values, create_graph=True)
            (slope.norm() - 1).square().backward()

    return caught(work)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_gradient_penalty_through_a_synced_layer_is_refused_with_the_remedy(parts: int, on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(2, penalise, parts):
        assert (kind, took_s < FAULT_S) == ("RuntimeError", True)
        assert "no second derivative" in text
        assert "Use dl.local_batch_norm(model), or a norm without the batch, such as nn.GroupNorm" in text


def slope_alone() -> bool:
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), world)
        values = rows(3)
        [slope] = torch.autograd.grad(model(values).square().sum(), values, create_graph=True)
        return bool(slope.isfinite().all())


def test_a_first_derivative_with_a_graph_is_given(on_ranks: OnRanks) -> None:
    assert on_ranks(2, slope_alone) == [True, True]


def go_on_after_a_mistake() -> list[str]:
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)), world)
        [channel] = find_sync_channels([model])
        before = [buffer.clone() for buffer in model.buffers()]
        said = [caught(too_few, world, model)[0], caught(another_layer, world, model)[0]]
        assert all(map(torch.equal, model.buffers(), before))  # no statistics move in a call that is refused
        output = model(rows(2))
        said.append(caught(output.sum().backward)[0] if world.rank == 1 else caught(model, rows(2))[0])
        channel.send_control(WORDS[1])
        model(rows(2)).sum().backward()
        channel.send_control()
        return said


@pytest.mark.one_device(CPU, "an asynchronous device raises at the end of a pass")
def test_a_pass_after_a_mistake_that_was_caught_is_as_any_other(on_ranks: OnRanks) -> None:
    assert on_ranks(2, go_on_after_a_mistake) == [["ValueError", "RuntimeError", "RuntimeError"]] * 2


def look_late(wrong: int | None, few: int | None) -> tuple[str, str, float]:
    """Send 600 calls, more than are kept; rank 1 is elsewhere in one of them, and another one has a single value."""
    with dl.join_world() as world:
        channel = SyncChannel(world, ["first", "second"], 1)

        def tell() -> None:
            for number in range(600):
                layer = int(number == wrong and world.rank == 1)
                count = world.rank if number == few else 1
                channel.send(layer, number + 1, count, 0, torch.ones(1, dtype=torch.float64))
            channel.check()

        result = caught(tell)
        channel._noted.clear()
        channel.check()  # it was reported above
        return result


@pytest.mark.one_device(GPU, "tests a late error")
@pytest.mark.parametrize(
    ("wrong", "few", "said"),
    [
        (None, None, ""),
        (3, None, "layer `first` (call 4 of its pass), rank 1 at the forward of layer `second`"),
        (599, None, "(call 600 of its pass), rank 1 at"),
        (300, 400, "(call 301 of its pass), rank 1 at"),
        (400, 300, "Got [0, 1] at the forward of layer `first` (call 301 of its pass)"),
    ],
)
def test_the_first_mistake_is_reported_late(wrong: int | None, few: int | None, said: str, on_ranks: OnRanks) -> None:
    for kind, text, _ in on_ranks(2, look_late, wrong, few):
        assert (kind != "") == (said != "")
        assert said in text


# -- messages ----------------------------------------------------------------------------------------------------------


def count_collectives() -> list[int]:
    """The number of sums in a forward and a backward of three layers; the first one's inputs need no gradient."""
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(3))), world)
        usual, lengths = world.start_sum, []

        def counted(tensor: torch.Tensor) -> Any:
            lengths.append(tensor.numel())
            return usual(tensor)

        world.start_sum = counted  # type: ignore[method-assign]
        output = model(rows(2 * world.rank).detach())
        forward = len(lengths)
        output.sum().backward()
        assert len(set(lengths)) == 1  # of one length, whatever they carry
        return [forward, len(lengths) - forward]


def test_a_forward_is_one_collective_and_so_is_a_backward_that_has_somewhere_to_go(on_ranks: OnRanks) -> None:
    assert on_ranks(2, count_collectives) == [[3, 2]] * 2


def tell_zeros() -> list[float]:
    with dl.join_world() as world:
        channel = SyncChannel(world, ["layer"], 2)
        own = torch.tensor([-0.0, 0.0] if world.rank == 1 else [float("-inf"), 0.0])
        _, heard = channel.send(0, 1, 1, 0, own.double())
        return heard.flatten().tolist()


@pytest.mark.quick_on_gpus
def test_what_a_rank_tells_comes_to_all_with_every_bit(on_ranks: OnRanks) -> None:
    expected = ["-inf", "0.0", "-0.0", "0.0"]
    assert [[str(one) for one in heard] for heard in on_ranks(2, tell_zeros)] == [expected] * 2


# -- faults ------------------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """Raises in forward, or in backward, on one rank."""

    def __init__(self, rank: int, place: str) -> None:
        super().__init__()
        self.rank, self.place = rank, place

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.place == "forward" and self.rank == 1:
            raise LookupError("the fault of rank 1")
        if self.place == "backward" and self.rank == 1:
            values.register_hook(self.fail)
        return values

    @staticmethod
    def fail(gradient: torch.Tensor) -> None:
        raise LookupError("the fault of rank 1")


def fail_in(place: str) -> tuple[str, str, float]:
    torch.optim.SGD([nn.Parameter(torch.ones(()))])  # a process's first imports torch._dynamo, for 3 s

    def work() -> None:
        with dl.join_world() as world:
            model = nn.Sequential(nn.BatchNorm1d(3), Faulty(world.rank, place), nn.BatchNorm1d(3))
            sync_batch_norm(model, world)(rows(2)).sum().backward()

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_raises_between_two_layers_ends_the_others(place: str, on_ranks: OnRanks) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, fail_in, place)):
        assert kind == ("LookupError" if rank == 1 else "PeerFailed")
        assert "the fault of rank 1" in text
        assert took_s < FAULT_S


def use_wrongly(sort: str) -> tuple[str, str, float]:
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3)), world)
        if sort == "channels":
            return caught(model, torch.ones(2, 4))
        if sort == "device":
            return caught(model, torch.ones(2, 3, device="meta"))
        if sort == "word":
            return caught(find_sync_channels([model])[0].send_control, "the middle")
    return caught(model, rows(2))


@pytest.mark.one_device("cpu", "the messages name the device")
@pytest.mark.parametrize(
    ("sort", "said"),
    [
        ("channels", r"Layer `0` takes 3 channels, (N, 3, ...). Got (2, 4). Give"),
        ("device", "Layer `0` got values on meta, the world is on cpu. Move"),
        ("word", "A word must be one of ('the end of its pass',"),
        ("left", "This world was left. Call local_batch_norm(model), model.eval(), or"),
    ],
)
def test_a_synced_layer_says_what_it_cannot_take(sort: str, said: str, on_ranks: OnRanks) -> None:
    for kind, text, _ in on_ranks(2, use_wrongly, sort):
        assert kind in ("ValueError", "RuntimeError")
        assert said in text
