"""What a first script gets wrong: an error with the remedy on every rank, whether one rank or all do it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, does_it, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

INNER_LOOP = r"A Loop yields steps, .* Write `for step in loop:`, and inside it `for images, labels in step:`"


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    rows = samples(24)
    return rows, rows.sum(1, keepdim=True)


# -- taking a Loop for a DataLoader ------------------------------------------------------------------------------


def pass_a_data_loader(world: dl.World, folder: str, culprit: int) -> None:
    model, batches = network(), dl.Batches(samples(24), 6, world)
    loader: Any = DataLoader(TensorDataset(samples(24)), batch_size=6)
    dl.Loop(loader if does_it(world, culprit) else batches, 1, state={"model": model}, progress=False)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("culprit", [ALL, 1])
def test_a_loop_over_a_data_loader_names_batches(culprit: int, refused: Refused) -> None:
    said = r"Got DataLoader\. Pass dl\.Batches\(loader\.dataset, loader\.batch_size, world\)"
    refused(2, pass_a_data_loader, culprit, kind="TypeError", said=said, by=culprit)


def take_steps_for_data(world: dl.World, folder: str, how: str, shards: int | None, culprit: int) -> None:
    model = network()
    loop: Any = dl.Loop(dl.Batches(pairs(), 6, world, shards=shards), 1, state={"model": model}, progress=False)
    if not does_it(world, culprit):
        for step in loop:
            for rows, wanted in step:
                step.backward(mse_loss(model(rows), wanted))
            step.fold()
    elif how == "unpacked":
        for rows, wanted in loop:
            mse_loss(model(rows), wanted).backward()
    elif how == "as a tensor":
        for rows in loop:
            model(rows)
    else:
        for batch in loop:
            model(batch["rows"])


@pytest.mark.covers("D10")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("culprit", [ALL, 1])
@pytest.mark.parametrize("shards", [None, 4, 6])  # of 2 ranks: not enough values, as many as parts, too many
@pytest.mark.parametrize("how", ["unpacked", "as a tensor", "by a key"])
def test_a_loop_without_the_inner_loop_is_refused(how: str, shards: int | None, culprit: int, refused: Refused) -> None:
    kind = "ValueError|TypeError|AttributeError"
    refused(2, take_steps_for_data, how, shards, culprit, kind=kind, said=INNER_LOOP, by=culprit)


def fail_otherwise(world: dl.World, folder: str, where: str) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        if where == "before the shards":
            raise ValueError("a schedule's own")
        for rows in step:
            if where == "in forward":
                raise TypeError("the model's own")
            step.backward(loss_of(model, rows))
        step.fold()
        raise KeyError("after the fold")


@pytest.mark.parametrize("where", ["before the shards", "in forward", "after the fold"])
def test_other_errors_of_a_script_get_no_remedy(where: str, refused: Refused) -> None:
    kind, said = "ValueError|TypeError|KeyError", "own$|after the fold.$"
    assert "A Loop yields" not in refused(1, fail_otherwise, where, kind=kind, said=said, by=ALL)[0].text


def call_the_losss_own_backward(world: dl.World, folder: str, culprit: int, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        for rows in step:
            loss = loss_of(model, rows)
            if does_it(world, culprit) and step.iteration == 2:
                loss.backward()
            else:
                step.backward(loss)
        step.fold()


@pytest.mark.covers("D10")
@pytest.mark.parametrize("culprit", [ALL, 1])
@pytest.mark.parametrize("shards", [None, 6])
def test_the_losss_own_backward_names_that_of_the_step(culprit: int, shards: int | None, refused: Refused) -> None:
    said = r"Replace loss\.backward\(\) by step\.backward\(loss\)\.$"
    refused(2, call_the_losss_own_backward, culprit, shards, kind="RuntimeError", said=said, by=culprit)


# -- lengths -----------------------------------------------------------------------------------------------------


def lengths(world: dl.World) -> list[int | None]:
    batches, state = dl.Batches(samples(10), 4, world), {"model": network()}
    loops = [
        dl.Loop(batches, epochs, steps=steps, state=state, progress=False)
        for epochs, steps in ((2, None), (2, 5), (2, 50), (None, 7))
    ]
    assert all(loop.batches is batches for loop in loops)
    return [batches.length, len(loops[0].batches), *map(len, loops)]


def test_a_loop_and_its_batches_have_lengths() -> None:
    with dl.join_world() as world:
        assert lengths(world) == [10, 3, 6, 5, 6, 7]
        endless = dl.Batches(lambda index: torch.ones(1), 4, world)
        state = {"model": network()}
        assert len(dl.Loop(endless, steps=9, state=state, progress=False)) == 9
        with pytest.raises(TypeError, match="len\\(\\) is not defined"):
            len(dl.Loop(dl.Batches(iter_of_ones(), 4, world), 1, state=state, progress=False))


class iter_of_ones:  # noqa: N801
    """A stream."""

    def __iter__(self) -> Any:
        return iter([torch.ones(4)] * 3)


def last_iteration(folder: str, stop_at: int | None) -> tuple[int, int]:
    with dl.join_world() as world:
        loop, iteration = loop_over(world, folder, model := network(), epochs=2), 0
        with suppress(dl.Stopped):
            for step in loop:
                iteration = step.iteration
                for rows in step:
                    step.backward(loss_of(model, rows))
                if iteration == stop_at:
                    loop.stop()
                step.fold()
        return iteration, len(loop)


def test_the_length_of_a_resumed_loop_is_that_of_the_whole_run(tmp_path: Path) -> None:
    assert last_iteration(str(tmp_path), 3) == (3, 8)
    assert last_iteration(str(tmp_path), None) == (8, 8)


# -- numbers of NumPy --------------------------------------------------------------------------------------------


def with_numpys_numbers(world: dl.World, folder: str) -> list[int]:
    one: Any = np.int64
    model = network()
    batches = dl.Batches(samples(24), one(6), world, shards=one(2), seed=one(1))
    keywords: Any = {"steps": one(3), "save_every": one(2), "keep_last": one(2), "check_replicas_every": one(2)}
    loop = dl.Loop(batches, one(2), state={"model": model}, progress=False, run_dir=folder, **keywords)
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows), weight=one(3))
        step.fold()
    return [loop.iteration, len(loop), dl.EarlyStopping(model, one(3)).patience, dl.split_sizes(one(4), one(3))[0]]


def run_with_numpys_numbers(folder: str) -> list[int]:
    with dl.join_world(seed=np.int64(1), threads=np.int64(1)) as world:  # type: ignore[arg-type]
        return with_numpys_numbers(world, folder)


def test_integers_of_numpy_are_whole_numbers(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, run_with_numpys_numbers, str(tmp_path)) == [[3, 3, 3, 2]] * 2
    with dl.deterministic(seed=np.int64(3)):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("keywords", [{"epochs": True}, {"epochs": np.float64(2.0)}, {"steps": "3"}])
def test_other_numbers_are_not(keywords: dict[str, Any], refused: Refused) -> None:
    refused(1, make_loop, keywords, kind="ValueError", said="must be a whole number, 1 or more", by=ALL)


def make_loop(world: dl.World, folder: str, keywords: dict[str, Any]) -> None:
    loop_over(world, folder, network(), **keywords)


# -- optimizers --------------------------------------------------------------------------------------------------


def divide_the_optimizer(world: dl.World, folder: str, kind: str, culprit: int) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    from torch.distributed.tensor import Shard, distribute_tensor

    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "zero":
        divided: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    elif kind == "local sgd":
        divided = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4))
    else:
        mesh = init_device_mesh("cpu", (world.size,))
        divided = torch.optim.SGD([nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))], 0.1)
    state = {"model": model, "optimizer": divided if does_it(world, culprit) else optimizer}
    dl.Loop(dl.Batches(samples(24), 6, world), 1, state=state, progress=False)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("culprit", [ALL, 1])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("zero", r"'optimizer' is torch's ZeroRedundancyOptimizer, .* Pass the optimizer inside it, such as"),
        ("local sgd", r"'optimizer' is torch's PostLocalSGDOptimizer, .* Pass the optimizer inside it, such as"),
        ("a part of a parameter", r"optimizer\.0\.0 is a DTensor, a part of one\. Build .* torchtitan"),
    ],
)
@pytest.mark.slow  # the first import of these parts of torch takes seconds
def test_optimizers_that_are_divided_over_the_ranks_are_refused(
    kind: str, said: str, culprit: int, refused: Refused
) -> None:
    refused(2, divide_the_optimizer, kind, culprit, kind="ValueError", said=said, by=culprit)


def first_line(folder: str, keys: tuple[str, ...], capture: Callable[[], str]) -> str:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parts = {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
        state = {"model": model, **{key: parts[key] for key in keys}}
        dl.Loop(dl.Batches(samples(24), 6, world), 1, state=state, run_dir=folder or None, progress=False)
        return capture()


@pytest.mark.parametrize(
    ("keys", "notices"), [((), 1), (("schedule",), 1), (("optimizer",), 0), (("optimizer", "schedule"), 0)]
)
def test_a_run_whose_state_has_no_optimizer_gets_one_notice(
    keys: tuple[str, ...], notices: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = first_line(str(tmp_path), keys, lambda: capfd.readouterr().out)
    assert said.count("state has no optimizer, so checkpoints keep none") == notices
    assert "state has no optimizer" not in first_line("", (), lambda: capfd.readouterr().out)  # nothing is kept


# -- weights, scalers --------------------------------------------------------------------------------------------


def fold_weights(weight: Any, factor: float = 1.0) -> list[str]:
    with dl.join_world() as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = network()
        for step in loop_over(world, "", model, shards=2, run_dir=None):
            for rows in step:
                given = weight if step.iteration in (2, 3) else 1.0
                step.backward(factor * loss_of(model, rows), weight=given)
            step.fold()
        return [str(one.message) for one in told if "weights of a mini-batch" in str(one.message)]


@pytest.mark.one_device("cpu", "a GPU's weights are not read")
@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0.0)])
def test_a_mini_batch_whose_weights_are_all_0_is_warned_about_once(weight: Any) -> None:
    (told,) = fold_weights(weight)
    assert "first in step 2" in told
    assert "Pass step.backward a weight above 0" in told
    assert fold_weights(1.0) == []


@pytest.mark.one_device("cpu", "a GPU's weights are not read")
def test_a_loss_of_exactly_0_is_not_taken_for_one_without_weights() -> None:
    assert fold_weights(2.0, factor=0.0) == []


def skip_with_an_unknown_scaler(world: dl.World, folder: str) -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in loop_over(world, folder, model, optimizer, on_nonfinite="skip"):
        for rows in step:
            loss = loss_of(model, rows)
            step.backward(scaler.scale(loss * float("inf") if step.iteration == 2 else loss))
        step.fold()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.one_device("cpu", "on a GPU the gradients stay, and the scaler finds them")
def test_skipping_with_a_scaler_outside_of_the_state_names_it(refused: Refused) -> None:
    said = r"No inf checks were recorded .* Pass Loop state=dict\(.*scaler=scaler\)"
    refused(2, skip_with_an_unknown_scaler, kind="AssertionError", said=said, by=ALL)


# -- names in another order --------------------------------------------------------------------------------------


def name_in_another_order(world: dl.World, folder: str, what: str, culprit: int) -> None:
    names = ["b", "a"] if does_it(world, culprit) else ["a", "b"]
    batches = dl.Batches(samples(24), 6, world, shuffle=False)
    if what == "state":
        dl.Loop(batches, 1, state={name: network() for name in names}, progress=False)
    else:
        functions: dict[str, Any] = dict.fromkeys(names, lambda output, rows: output.mean())
        dl.evaluate(network(), batches, **functions)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("state", r"another order: number 1 is [ab]\.0\.weight on rank \d and [ab]\.0\.weight on rank \d\. Sort them"),
        ("metrics", r"Rank 0 has \['a', 'b'\], rank 1 has \['b', 'a'\]\. Pass the same, in the same order"),
    ],
)
def test_names_in_another_order_on_a_rank_are_named(what: str, said: str, refused: Refused) -> None:
    refused(2, name_in_another_order, what, 1, kind="ValueError", said=said, by=ALL)


def run_out_of_memory(world: dl.World, folder: str, kind: type[Exception]) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        for rows in step:
            if world.rank == 1 and step.iteration == 2:
                raise kind("2 GiB are not to be had.")
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_names_more_shards(kind: type[Exception], refused: Refused) -> None:
    said = r"2 GiB are not to be had.*More shards need less memory: Batches\(\.\.\., shards=8\)"
    refused(2, run_out_of_memory, kind, kind=kind.__name__, said=said, by=1)
