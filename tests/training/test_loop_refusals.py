"""A loop that cannot be made is refused, on every rank alike, though one rank alone makes it so."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_loop as dl
from tests.support.harness import OnRanks, caught, open_files
from tests.support.refusals import ALL, Refused, does_it, loop_over, mean_of, network, samples
from tests.support.training import loop_on

Make = Callable[[dl.World, str], object]
COUNT = 26  # samples: the last mini-batch has 2
START = {"iteration": 0, "epoch": 0, "position": 0}
pytestmark = pytest.mark.covers("D6", "D10")


def over(
    make_model: Callable[[], nn.Module] = network, more: Callable[[Any], list[object]] = lambda model: [], *,
    logged: str = "a", value: object = 1.0, place: dict[str, int] = START, **keywords: Any,
) -> Make:  # fmt: skip
    """Make a loop, log a mean over the ranks, and go to a place."""

    def make(world: dl.World, folder: str) -> None:
        model = make_model()
        loop = loop_over(world, folder, model, *more(model), **{"count": COUNT, **keywords})
        loop.log({logged: value}, over="ranks")
        loop.load_state_dict(place)

    return make


def over_state(make_state: Callable[[dl.World], Any]) -> Make:
    def make(world: dl.World, folder: str) -> None:
        dl.Loop(dl.Batches(samples(COUNT), 6, world, shuffle=False), 1, state=make_state(world), progress=False)

    return make


def save_as(score: Any) -> Make:
    return lambda world, folder: loop_over(world, folder, network(), count=COUNT).save(score)


def over_loader(world: dl.World, folder: str) -> None:
    loader: Any = DataLoader(TensorDataset(samples(COUNT)), batch_size=6)
    loop_on(loader, network())


def with_memory(memory: torch.Tensor, *more: Any, **keywords: Any) -> Make:
    def make_model() -> nn.Module:
        model = network()
        model.register_buffer("memory", memory)
        return model

    return over(make_model, *more, **keywords)


def zero_redundancy(world: dl.World) -> dict[str, object]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)}


def parted_parameter(world: dl.World) -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    part = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return {"model": network(), "optimizer": torch.optim.SGD([part], 0.1)}


def with_one_shared_mean() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    return model


def hooked() -> nn.Module:
    model = network()
    model[0].get_parameter("weight").register_hook(torch.clone)
    return model


def single_samples() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()


WHOLE = "must be a whole number, 1 or more. Got "
SIZE = "bucket_cap_mib must be a size in MiB, more than 0"
NO_RULE = r"to one of .* Got 'memory': 'sum'. The buffers are \[\]"
NOT_TRAINED = "state must hold a module or an optimizer with parameters to train"
FROZEN = rf"{NOT_TRAINED}. All \d of \['model'\] have requires_grad=False. Set it to True for some"
REDUCED = "reduce_dtype must be torch.float32, torch.float64 or None"
NO_NAME = "Each module and optimizer in state needs a name of its own. 'other 0' is a"
ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
NO_DICT = r"state must be a dict .* Pass state=dict\(model="
REFUSED: dict[str, tuple[Make, str]] = {
    "no epochs": (over(epochs=0), f"epochs {WHOLE}0"),
    "half an epoch": (over(epochs=1.5), rf"{WHOLE}1\.5"),
    "epochs that are a bool": (over(epochs=True), WHOLE),
    "no steps": (over(epochs=None, steps=0), f"steps {WHOLE}0"),
    "no end": (over(epochs=None), "A Loop needs an end. Pass epochs or steps"),
    "a folder without a name": (over(run_dir=""), "run_dir must name a folder. Got ''. Pass None"),
    "buckets without room": (over(bucket_cap_mib=0.0), SIZE),
    "buckets in words": (over(bucket_cap_mib="25"), f"{SIZE}. Got '25'"),
    "buckets of nan": (over(bucket_cap_mib=nan), SIZE),
    "a rule that is none": (over(on_nonfinite="ignore"), "on_nonfinite must be one of .* Got 'ignore'"),
    "the text of a command line": (over(resume="False"), "resume must be True, False or None. Got 'False'"),
    "checkpoints after no step": (over(save_every=0), f"save_every {WHOLE}0"),
    "no checkpoint that stays": (over(keep_last=0), f"keep_last {WHOLE}0"),
    "no checkpoint that stays in no folder": (over(run_dir=None, keep_last=0), f"keep_last {WHOLE}0"),
    "checkpoints after no time": (over(save_every_s=0.0), "save_every_s must be a positive number of seconds"),
    "a time in words": (over(save_every_s="3"), "save_every_s must be a positive number of seconds. Got '3'"),
    "a file as a score": (save_as("model.pt"), r"a score, which is a number, or none\. Got 'model\.pt'\. .* run_dir="),
    "values as a score": (save_as({"loss": 1.0}), r"which is a number, or none\. Got \{'loss': 1\.0\}"),
    "another way to bear errors": (over(on_save_error="ignore"), "on_save_error must be one of .* Got 'ignore'"),
    "an unknown buffer": (over(buffer_reduction={"memory": "sum"}), NO_RULE),
    "a sparse buffer": (
        with_memory(torch.eye(3).to_sparse()),
        r"model\.memory is torch\.sparse_coo\. Keep it as a plain attribute",
    ),
    "an expanded buffer": (
        with_memory(torch.zeros(1).expand(3, 2)),
        r"model\.memory is expanded\. Register it as tensor\.clone",
    ),
    "a buffer without values": (
        with_memory(torch.empty(3, device="meta")),
        r"model\.memory is on the meta device\. Give it values first",
    ),
    "an empty state": (over_state(lambda world: {}), NOT_TRAINED),
    "nothing to train": (over(nn.Tanh), r"Got \['model'\] without any"),
    "a frozen model": (over(lambda: network().requires_grad_(False)), FROZEN),
    "a lazy model": (over(lambda: nn.LazyLinear(2)), "needs a shape before the Loop is made. model.weight has none"),
    "lazy statistics": (over(lambda: nn.Sequential(network(), nn.LazyBatchNorm1d(affine=False))), r"model\.1\.\w+ has"),
    "a buffer's two rules": (
        with_memory(
            torch.ones(1),
            lambda model: [model],
            buffer_reduction={"model.memory": "first", "other 0.memory": "mean"},
        ),
        "A buffer has one rule. model.memory and other 0.memory are one buffer",
    ),
    "one shared statistic": (
        over(with_one_shared_mean, shards=2, allow_single_sample_shards=True),
        "share all of their running statistics or none. model.1 shares only running_mean with another layer",
    ),
    "modules in a list": (over(more=lambda model: [[*model]]), NO_NAME),
    "modules in a dict": (over(more=lambda model: [{"a": {"b": model}}]), NO_NAME),
    "a list in itself": (over(more=lambda model: [ENDLESS]), r"state\['other 0'\] has too many levels, or contains"),
    "an optimizer in a list": (over(more=lambda model: [[torch.optim.SGD(model.parameters())]]), NO_NAME),
    **{f"sums in {dtype}": (over(reduce_dtype=dtype), REDUCED) for dtype in (torch.bfloat16, "float32")},
    **{
        f"a place, {place}": (over(place=place), "Got .* (Use the data and the batch_size|Pass that dict)")
        for place in (
            {"iteration": 5, "epoch": 1, "position": 2},
            {"iteration": 5, "epoch": 0, "position": 6},
            {"iteration": -1, "epoch": 0, "position": -1},
            {},
        )
    },
    "a mean of a word": (over(value="x"), "loop.log takes numbers"),
    "a mean of a huge number": (over(value=10**400), "Got a whole number beyond 1.8e308 for 'a'"),
    "a class in state": (over(more=lambda model: [nn.Linear]), "'other 0' is Linear. Pass an instance"),
    "a model as state": (over_state(lambda world: network()), NO_DICT),
    "single samples under batch norm": (
        over(single_samples, shards=2),
        "Mini-batch 5 of an epoch has 2 samples over 2 shards.*model.1 is BatchNorm1d. Change batch_size, .* or nodes",
    ),
    "a hook": (
        over(hooked, shards=2),
        r"hook on a parameter.* model\.0\.weight has one of register_hook\..* after step\.fold\(\)",
    ),
    "a data loader": (over_loader, r"Got DataLoader\. Pass dl\.Batches\(loader\.dataset, loader\.batch_size, world\)"),
}
DIVIDED: dict[str, tuple[Make, str]] = {
    "ZeRO": (
        over_state(zero_redundancy),
        "'optimizer' is torch's ZeroRedundancyOptimizer, .* Pass the optimizer inside it, such as",
    ),
    "a part of a parameter": (
        over_state(parted_parameter),
        r"optimizer\.0\.0 is a DTensor, a part of one\. Build .* torchtitan",
    ),
}


def make_wrongly(world: dl.World, folder: str, how: str, culprit: int) -> None:
    make = (REFUSED | DIVIDED)[how][0] if does_it(world, culprit) else over()
    make(world, folder)


@pytest.mark.parametrize("how", REFUSED)
def test_a_loop_that_makes_no_sense_is_refused(how: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=REFUSED[how][1]), dl.join_world() as world:
        REFUSED[how][0](world, str(tmp_path))


@pytest.mark.parametrize("how", ["no epochs", "nothing to train", "a hook", "a mean of a word"])
def test_a_loop_that_one_rank_alone_cannot_make_is_refused_on_all(how: str, refused: Refused) -> None:
    refused(2, make_wrongly, how, 1, kind="ValueError|TypeError", said=REFUSED[how][1], by=1)


def imported() -> None:
    """The parts of torch that the next test needs: these take seconds, in which another rank could fail first."""
    import torch.distributed.device_mesh
    import torch.distributed.optim
    import torch.distributed.tensor  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize("how", DIVIDED)
def test_optimizers_that_are_divided_over_the_ranks_are_refused(how: str, refused: Refused, on_ranks: OnRanks) -> None:
    on_ranks(2, imported)
    refused(2, make_wrongly, how, ALL, kind="ValueError", said=DIVIDED[how][1])


# -- what differs between ranks ------------------------------------------------------------------------------------


def by_name(*names: str) -> Make:
    return over(lambda: nn.ModuleDict({name: nn.Linear(3, 3) for name in names}))


def over_tied(tie: bool) -> Make:
    def make_model() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tie:
            model[1].weight = model[0].weight
        return model

    return over(make_model)


def over_names(*names: str) -> Make:
    return over_state(lambda world: {name: network() for name in names})


def evaluate(metric: Callable[..., object]) -> Make:
    return lambda world, folder: dl.evaluate(network(), dl.Batches(samples(24), 6, world), a=metric)  # type: ignore[arg-type]


STRUCTURE = "state must have the same structure on every rank"
SAME = "must be the same on every rank"
DIFFERENCES: dict[str, tuple[Make, Make, str]] = {
    "a shape": (over(lambda: nn.Linear(4, 1)), over(lambda: nn.Linear(4, 2)), STRUCTURE),
    "a dtype": (over(lambda: nn.Linear(4, 1)), over(lambda: nn.Linear(4, 1).double()), STRUCTURE),
    "a buffer": (over(), with_memory(torch.ones(1)), STRUCTURE),
    "an order": (by_name("a", "b"), by_name("b", "a"), STRUCTURE),
    "a layout": (
        over(lambda: nn.Conv2d(4, 4, 3)),
        over(lambda: nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)),  # type: ignore[call-overload]
        STRUCTURE,
    ),
    "a tie": (over_tied(False), over_tied(True), STRUCTURE),
    "names": (
        over_names("a", "b"),
        over_names("b", "a"),
        r"another order: number 1 is [ab]\.0\.weight on rank \d and [ab]\.0\.weight on rank \d\. Sort them",
    ),
    "reductions": (
        evaluate(mean_of),
        evaluate(lambda output, rows: dl.Sum(1)),
        r"must be of one kind in every shard. a is a dl\.Sum and a mean",
    ),
    "logged names": (over(), over(logged="b"), "the names in loop.log"),
    "steps": (over(steps=2), over(steps=3), SAME),
    "bucket_cap_mib": (over(), over(bucket_cap_mib=1e-4), SAME),
    "reduce_dtype": (over(), over(reduce_dtype=torch.float64), "reduce_dtype"),
    "on_nonfinite": (over(), over(on_nonfinite="allow"), SAME),
    "buffer_reduction": (
        with_memory(torch.ones(1), buffer_reduction={"model.memory": "mean"}),
        with_memory(torch.ones(1), buffer_reduction={"model.memory": "local"}),
        f"buffer_reduction.* {SAME}",
    ),
}


def make_differently(world: dl.World, folder: str, what: str) -> None:
    usual, other, _ = DIFFERENCES[what]
    make = other if world.rank == 2 else usual
    make(world, folder)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_loops_that_differ_between_ranks_are_refused_on_all(what: str, refused: Refused) -> None:
    refused(3, make_differently, what, kind="ValueError", said=DIFFERENCES[what][2])


# -- the run folder ----------------------------------------------------------------------------


def put_something_in_the_way(world: dl.World, folder: str, what: str) -> None:
    if world.rank == 0 and what == "a file":
        Path(folder).write_text("in the way")
    elif world.rank == 0:
        Path(folder, "rows.jsonl").mkdir(parents=True)
    loop_over(world, folder, network())


@pytest.mark.parametrize(("what", "kind"), [("a file", "FileExistsError"), ("rows.jsonl", "IsADirectoryError")])
def test_a_run_folder_that_cannot_be_made_is_refused_on_all(what: str, kind: str, refused: Refused) -> None:
    refused(3, put_something_in_the_way, what, kind=kind, said="run", by=0)


def refuse_on_rank_1(folder: str) -> None:
    with dl.join_world() as world:
        loop_over(world, folder, network() if world.rank == 0 else nn.Tanh())


def open_rows(folder: str) -> tuple[str, list[str]]:
    """What was raised, and the files of the run folder that this rank holds open after that."""
    kind, _, _ = caught(refuse_on_rank_1, folder)
    return kind, [path for path in open_files(Path(folder)) if path.endswith("rows.jsonl")]


def test_rank_0_holds_no_file_open_when_another_rank_refuses_the_loop(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, open_rows, str(tmp_path)) == [("PeerFailed", []), ("ValueError", [])]
