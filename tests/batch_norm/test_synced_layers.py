"""Models whose batch norm is synced: converted and back, copied, stored; and ranks that do not call them alike."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import ddp_loop as dl
from ddp_loop.batch_norm import SyncChannel, find_sync_channels, local_batch_norm, sync_batch_norm
from ddp_loop.batch_norm.synced import WORDS, SyncedBatchNorm
from tests.support.devices import CPU, GPU
from tests.support.harness import OnRanks, caught
from tests.support.refusals import Refused

pytestmark = [pytest.mark.covers("D5"), pytest.mark.on_gpus_too]


# -- converted, and back -----------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Every sort of layer, one of them in two places, with other norms between."""
    twice = nn.BatchNorm1d(4, eps=0.01, momentum=None).train()
    return nn.Sequential(
        nn.Sequential(twice, nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False).eval()),
        nn.ModuleDict({"again": twice, "other": nn.BatchNorm3d(2, track_running_stats=False)}),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4),
    )


def facts_of(model: nn.Module) -> list[object]:
    """What a conversion leaves as it is: the tensors and where they are, and each layer's options."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [
        *((name, id(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())),
        *model.state_dict(),
        *((x.num_features, x.eps, x.momentum, x.affine, x.track_running_stats, x.training) for x in layers),
        model.get_submodule("0.0") is model.get_submodule("1.again"),
    ]


def test_a_model_is_synced_and_made_local_again_with_the_very_same_tensors(world: dl.World) -> None:
    model = network()
    facts = facts_of(model)
    kinds = [type(module) for module in model.modules()]
    assert sync_batch_norm(model, world) is model
    expected = [SyncedBatchNorm if issubclass(kind, _BatchNorm) else kind for kind in kinds]
    assert [type(module) for module in model.modules()] == expected
    assert facts_of(model) == facts
    assert len(find_sync_channels([model, model])) == 1
    sync_batch_norm(model, world)  # once more, as after loading a model that was synced
    assert local_batch_norm(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert facts_of(model) == facts
    assert find_sync_channels([model]) == []
    assert not any({"_channel", "_origin", "_number"} & layer.__dict__.keys() for layer in model.modules())


def test_a_model_that_is_a_layer_itself_is_given_back_as_another(world: dl.World) -> None:
    layer = nn.BatchNorm2d(3)
    synced = sync_batch_norm(layer, world)
    assert isinstance(synced, SyncedBatchNorm)
    assert synced.weight is layer.weight
    with pytest.raises(ValueError, match="expected 4D input"):
        synced(torch.ones(2, 3))
    assert type(local_batch_norm(synced)) is nn.BatchNorm2d


def test_hooks_stay_and_their_handles_still_take_them_away(world: dl.World) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    calls = []
    handle = model[0].register_forward_hook(lambda layer, inputs, output: calls.append(type(layer).__name__))
    sync_batch_norm(model, world)
    model(torch.randn(3, 2))
    handle.remove()
    model(torch.randn(3, 2))
    assert calls == ["SyncedBatchNorm"]


def copies() -> dict[str, tuple[bool, list[float]]]:
    """Whether each copy is synced, and the mean over all ranks, or of this one, that its first output shows."""
    with dl.join_world() as world:
        model = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(1, momentum=1.0)), world)
        found = {}
        for name, one in {
            "deepcopy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "local": local_batch_norm(copy.deepcopy(model)),
            "itself": model,
        }.items():
            one(torch.tensor([[0.0], [2.0]]) + 10 * world.rank)
            layer = one.get_submodule("0")
            found[name] = (isinstance(layer, SyncedBatchNorm) and layer.is_synced, layer.running_mean.tolist())
        return found


@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
def test_a_copy_stays_synced_and_one_that_was_stored_is_local(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(2, copies)):
        local = (False, [1.0 + 10 * rank])
        synced = (True, [6.0])
        assert found == {"deepcopy": synced, "pickle": local, "local": local, "itself": synced}


# -- what is refused ---------------------------------------------------------------------------------------------------


class Own(nn.BatchNorm1d):
    """A batch norm whose forward is its own."""


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, requires_grad=True)


def synced(world: dl.World, *layers: nn.Module) -> nn.Module:
    return sync_batch_norm(nn.Sequential(*layers), world)


def penalise(world: dl.World) -> None:
    model = synced(world, nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    values = rows(3)
    [slope] = torch.autograd.grad(model(values).square().sum(), values, create_graph=True)
    assert bool(slope.isfinite().all())  # a first derivative with a graph is given
    (slope.norm() - 1).square().backward()


Attempt = Callable[[dl.World], object]
NO_SECOND = r"no second derivative.*Use dl.local_batch_norm\(model\), or a norm without the batch, such as nn.GroupNorm"
REFUSED: dict[str, tuple[Attempt, str, str]] = {
    "own": (lambda world: synced(world, nn.ReLU(), Own(3)), "ValueError", "`1` is a Own with its own forward"),
    "other layers": (
        lambda world: synced(world, nn.BatchNorm1d(3 + world.rank)),
        "ValueError",
        r"the batch-norm layers of a synced model must be the same on every rank. Rank 0 has \['0: 3,",
    ),
    "lazy on one": (
        lambda world: synced(world, nn.LazyBatchNorm1d() if world.rank == 1 else nn.BatchNorm1d(3)),
        "ValueError",
        "`0` is a lazy one",
    ),
    "a penalty": (penalise, "RuntimeError", NO_SECOND),
}


def attempt(world: dl.World, folder: str, name: str) -> None:
    act, kind, _ = REFUSED[name]
    try:
        act(world)
    finally:
        if kind == "ValueError":  # all were refused at the same place, and may go on
            assert world.gather(world.rank) == [0, 1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_synced_model_cannot_do_is_refused_on_every_rank(name: str, refused: Refused) -> None:
    _, kind, said = REFUSED[name]
    refused(2, attempt, name, kind=kind, said=said, by=None)


# -- ranks that do not call the layers alike ---------------------------------------------------------------------------


def call(world: dl.World, model: nn.Module, others: str, of_rank_1: str) -> None:
    """Call layers by their names, go `back` through the output of a number, or send the `end` of a pass."""
    outputs: list[torch.Tensor] = []
    for word in (of_rank_1 if world.rank == 1 else others).split():
        if word == "end":
            find_sync_channels([model])[0].send_control()
        elif word.startswith("back"):
            outputs[int(word[4:])].sum().backward()
        else:
            outputs.append(model.get_submodule(word)(rows(3)))


def too_few(world: dl.World, model: nn.Module) -> None:
    model(rows(1 if world.rank == 1 else 0))


def use_a_left_world(world: dl.World, model: nn.Module) -> None:
    world.leave()
    model(rows(2))


def calling(others: str, of_rank_1: str) -> Callable[[dl.World, nn.Module], None]:
    return lambda world, model: call(world, model, others, of_rank_1)


WRONG: dict[str, tuple[Callable[[dl.World, nn.Module], object], str]] = {
    "a backward": (
        calling("0 2 0", "0 2 back1"),
        "rank 0 is at the forward of layer `0` (call 3 of its pass), rank 1 at the backward of layer `2` (call 2 of "
        "its pass). Every rank must call the layers of a synced model alike",
    ),
    "another layer": (calling("0", "2"), "`0` (call 1 of its pass), rank 1 at the forward of layer `2`"),
    "the end": (
        calling("0 0 end", "0 end"),
        "rank 0 is at the forward of layer `0` (call 2 of its pass), rank 1 at the end of its pass.",
    ),
    "an order": (
        calling("0 0 back1", "0 0 back0"),
        "(call 2 of its pass), rank 1 at the backward of layer `0` (call 1",
    ),
    "one value": (too_few, "1 value per channel when training, over all ranks together. Got [0, 1, 0]"),
    "channels": (
        lambda world, model: model(torch.ones(2, 4)),
        "Layer `0` takes 3 channels, (N, 3, ...). Got (2, 4). Give",
    ),
    "device": (
        lambda world, model: model(torch.ones(2, 3, device="meta")),
        "Layer `0` got values on meta, the world is on cpu. Move",
    ),
    "word": (
        lambda world, model: find_sync_channels([model])[0].send_control("the middle"),
        "A word must be one of ('the end of its pass',",
    ),
    "left": (use_a_left_world, "This world was left. Call local_batch_norm(model), model.eval(), or"),
}


def go_wrong(world: dl.World, folder: str, what: str, most_rows: int) -> None:
    with mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", most_rows):
        model = synced(world, nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3), nn.GroupNorm(1, 3))
    WRONG[what][0](world, model)


@pytest.mark.covers("J13")
@pytest.mark.one_device(CPU, "an asynchronous device raises at the end of a pass")
@pytest.mark.parametrize("most_rows", [8, 1])
@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_do_not_call_the_layers_alike_or_rightly_all_raise_the_same(
    what: str, most_rows: int, refused: Refused
) -> None:
    said = re.escape(WRONG[what][1])
    results = refused(3, go_wrong, what, most_rows, kind="RuntimeError|ValueError", said=said)
    assert len({(result.kind, result.text) for result in results}) == 1


def go_on_after_a_mistake() -> list[str]:
    with dl.join_world() as world:
        model = synced(world, nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3))
        [channel] = find_sync_channels([model])
        before = [buffer.clone() for buffer in model.buffers()]
        said = [caught(too_few, world, model)[0], caught(call, world, model, "0", "2")[0]]
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


def look_late(wrong: int, few: int) -> tuple[str, str, float]:
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


@pytest.mark.slow
@pytest.mark.one_device(GPU, "tests a late error")
@pytest.mark.parametrize(
    ("wrong", "few", "said"),
    [
        (-1, -1, ""),
        (599, -1, "(call 600 of its pass), rank 1 at"),
        (300, 400, "(call 301 of its pass), rank 1 at"),
        (-1, 300, "Got [0, 1] at the forward of layer `first` (call 301 of its pass)"),
        (400, 300, "Got [0, 1] at the forward of layer `first` (call 301 of its pass)"),
    ],
)
def test_the_first_mistake_is_reported_late(wrong: int, few: int, said: str, on_ranks: OnRanks) -> None:
    for kind, text, _ in on_ranks(2, look_late, wrong, few):
        assert (kind != "") == (said != "")
        assert said in text


# -- messages ----------------------------------------------------------------------------------------------------------


def tell_zeros() -> list[str]:
    with dl.join_world() as world:
        channel = SyncChannel(world, ["layer"], 2)
        own = torch.tensor([-0.0, 0.0] if world.rank == 1 else [float("-inf"), 0.0])
        _, heard = channel.send(0, 1, 1, 0, own.double())
        return [str(one) for one in heard.flatten().tolist()]


@pytest.mark.quick_on_gpus
def test_what_a_rank_tells_comes_to_all_with_every_bit(on_ranks: OnRanks) -> None:
    assert on_ranks(2, tell_zeros) == [["-inf", "0.0", "-0.0", "0.0"]] * 2


class OwnStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "name"), [(OwnStatistics, "OwnStatistics"), (lambda: torch.jit.script(nn.BatchNorm1d(2)), "BatchNorm1d")]
)
def test_a_layer_that_cannot_be_synced_is_not_left_local_without_a_word(
    make: Callable[[], nn.Module], name: str, world: dl.World
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), make())
    with pytest.warns(UserWarning, match=f"leaves {name} as it is.* each shard's"):
        sync_batch_norm(model, world)
