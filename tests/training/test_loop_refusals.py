"""A loop that cannot be made is refused, on every rank alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks, open_files
from tests.support.refusals import (
    ALL,
    MOST_S,
    Caught,
    Refused,
    loop_over,
    loss_of,
    network,
    samples,
)


def make_loop(world: dl.World, folder: str, keywords: dict[str, Any]) -> None:
    loop_over(world, folder, network(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"epochs": 0}, "epochs must be a whole number, 1 or more. Got 0"),
        ({"epochs": -3}, "Got -3"),
        ({"epochs": 1.5}, r"Got 1\.5"),
        ({"epochs": None, "steps": 0}, "steps must be a whole number, 1 or more. Got 0"),
        ({"epochs": None}, "A Loop needs an end. Pass epochs or steps"),
        ({"bucket_cap_mib": 0.0}, "bucket_cap_mib"),
        ({"bucket_cap_mib": -1.0}, "bucket_cap_mib"),
        ({"bucket_cap_mib": float("nan")}, "bucket_cap_mib"),
        ({"buffer_reduction": {"model.0.nothing": "mean"}}, r"Got 'model\.0\.nothing': 'mean'. The buffers are \[\]"),
    ],
)
def test_a_loop_that_makes_no_sense_is_refused(keywords: dict[str, Any], said: str, refused: Refused) -> None:
    refused(2, make_loop, keywords, kind="ValueError", said=said, by=ALL)


class Remembering(nn.Linear):
    """A layer with a buffer of an unusual kind."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(4, 1)
        self.register_buffer("memory", memory)


def make_loop_with_buffer(world: dl.World, folder: str, kind: str) -> None:
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "expanded": torch.zeros(1).expand(3, 2),
        "meta": torch.empty(3, device="meta"),
    }
    loop_over(world, folder, Remembering(kinds[kind]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sparse", r"model\.memory is torch\.sparse_coo\. Keep it as a plain attribute"),
        ("expanded", r"model\.memory is expanded\. Register it as tensor\.clone"),
        ("meta", r"model\.memory is on the meta device\. Give it values first"),
    ],
)
def test_a_buffer_that_is_no_dense_tensor_is_refused_by_name(
    ranks: int, kind: str, said: str, refused: Refused
) -> None:
    refused(ranks, make_loop_with_buffer, kind, kind="ValueError", said=said, by=ALL)


def make_loop_of(world: dl.World, folder: str, state: dict[str, Any]) -> None:
    dl.Loop(dl.Batches(samples(8), 4, world), 1, state=state, run_dir=folder, progress=False)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "state must hold a module or an optimizer with parameters to train"),
        ({"model": nn.Tanh()}, r"Got \['model'\] without any"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "parameters to train"),
        ({"model": nn.LazyLinear(2)}, "needs a shape before the Loop is made. model.weight has none. Run the model"),
    ],
)
def test_state_without_parameters_to_train_is_refused(state: dict[str, Any], said: str, refused: Refused) -> None:
    refused(2, make_loop_of, state, kind="ValueError", said=said, by=ALL)


@pytest.mark.parametrize("state", [None, nn.Linear(2, 2), [nn.Linear(2, 2)]])
def test_state_that_is_no_dict_is_refused_with_the_remedy(state: Any, refused: Refused) -> None:
    refused(2, make_loop_of, state, kind="ValueError|TypeError", said="state=dict", by=ALL)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "usual": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
    "another shape": lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)),
    "another dtype": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(),
    "a layer less": lambda: nn.Sequential(nn.Linear(4, 4)),
    "a buffer more": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.BatchNorm2d(1, affine=False)),
    "another order": lambda: two_names("b", "a"),
    "usual order": lambda: two_names("a", "b"),
    "usual layout": lambda: nn.Conv2d(4, 4, 3),
    "another layout": lambda: nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "tied": lambda: tied(True),
    "not tied": lambda: tied(False),
}


def two_names(one: str, other: str) -> nn.Module:
    return nn.ModuleDict({one: nn.Linear(3, 3), other: nn.Linear(3, 3)})


def tied(tie: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if tie:
        model[1].weight = model[0].weight
    return model


def differ(world: dl.World, folder: str, usual: str, other: str, odd_rank: int) -> None:
    model = MODELS[other if world.rank == odd_rank else usual]()
    dl.Loop(dl.Batches(samples(8), 4, world), 1, state={"model": model}, run_dir=folder, progress=False)


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ("usual", "another shape"),
        ("usual", "another dtype"),
        ("usual", "a layer less"),
        ("usual", "a buffer more"),
        ("usual order", "another order"),
        ("usual layout", "another layout"),
        ("not tied", "tied"),
    ],
)
def test_models_of_another_structure_on_one_rank_are_refused_on_all(
    usual: str, other: str, odd_rank: int, refused: Refused
) -> None:
    said = "state must have the same structure on every rank"
    refused(3, differ, usual, other, odd_rank, kind="ValueError", said=said, by=ALL)


def ask_differently(world: dl.World, folder: str, usual: dict[str, Any], other: dict[str, Any]) -> None:
    for step in loop_over(world, folder, model := network(), **(usual if world.rank else other)):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize(
    ("usual", "other"),
    [({"epochs": 1}, {"epochs": 2}), ({"steps": 2}, {"steps": 3}), ({"bucket_cap_mib": 8.0}, {"bucket_cap_mib": 1e-4})],
)
def test_loops_that_differ_between_ranks_are_refused(
    usual: dict[str, Any], other: dict[str, Any], refused: Refused
) -> None:
    refused(2, ask_differently, usual, other, kind="ValueError", said="must be the same on every rank")


def train_only_on_some(world: dl.World, folder: str) -> None:
    model = network()
    model[0].requires_grad_(world.rank != 1)
    for step in loop_over(world, folder, model):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


def test_a_layer_frozen_on_one_rank_from_the_start_is_refused(refused: Refused) -> None:
    refused(3, train_only_on_some, kind="ValueError", said="same parameters must want a gradient on every rank")


def use_single_samples(world: dl.World, folder: str, count: int, keywords: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    loop_over(world, folder, model, count=count, **keywords)


@pytest.mark.parametrize(("count", "ranks"), [(24 + 2, 2), (24 + 3, 2), (24 + 1, 1)])
def test_a_shard_of_one_sample_under_batch_norm_is_refused_when_the_loop_is_made(
    count: int, ranks: int, refused: Refused
) -> None:
    said = "Mini-batch 5 of an epoch has .* samples over .*model.1 is BatchNorm1d. Change batch_size"
    refused(ranks, use_single_samples, count, {}, kind="ValueError", said=said, by=ALL)


def put_a_file_in_the_way(world: dl.World, folder: str, what: str) -> None:
    with world.rank_zero_first():
        if what == "a file" and world.rank == 0:
            Path(folder).write_text("in the way")
        elif world.rank == 0:
            Path(folder, "rows.jsonl").mkdir(parents=True)
    loop_over(world, folder, network())


@pytest.mark.parametrize("what", ["a file", "a folder named rows.jsonl"])
def test_a_run_folder_that_cannot_be_made_is_refused_on_all(what: str, refused: Refused) -> None:
    kind = "FileExistsError" if what == "a file" else "IsADirectoryError"
    refused(3, put_a_file_in_the_way, what, kind=kind, said=r"run", by=0)


def open_rows(folder: str) -> list[str]:
    """The files of the run folder that this rank holds open after a Loop was refused."""
    try:
        with dl.join_world() as world:
            loop_over(world, folder, network() if world.rank == 0 else nn.Tanh())
    except (ValueError, dl.PeerFailed):
        return [path for path in open_files(Path(folder)) if path.endswith("rows.jsonl")]
    raise AssertionError("it was not refused")


def test_rank_0_holds_no_file_open_when_another_rank_refuses_the_loop(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, open_rows, str(tmp_path)) == [[], []]


def iterate_twice(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network())
    for _ in range(2):
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()


def test_a_loop_is_iterated_once(refused: Refused) -> None:
    refused(2, iterate_twice, kind="RuntimeError", said="A Loop can be iterated once, .* Create a new Loop", by=ALL)


def want_a_gpu() -> Caught:
    began = time.monotonic()
    try:
        with dl.join_world(device="gpu"):
            pass
    except ValueError as error:
        return Caught(type(error).__name__, str(error), time.monotonic() - began)
    raise AssertionError("it was not refused")


@pytest.mark.covers("B7")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_on_every_rank(on_ranks: OnRanks) -> None:
    for result in on_ranks(3, want_a_gpu):
        assert 'device="gpu" needs a GPU' in result.text
        assert result.took_s < MOST_S
