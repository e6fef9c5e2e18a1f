"""Joining and leaving a world.

Where a test asks that a fault ends all ranks, they have FAULT_S for it, as the project promises.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.harness import FAULT_S, OnRanks, caught, let_ranks_meet

TIMEOUT_S = 2.0  # of a world in which a rank does not come


# -- joining -----------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    with dl.join_world(seed=4, timeout_s=7) as world:
        return {
            "rank": world.rank,
            "size": world.size,
            "device": str(world.device),
            "seed": world.seed,
            "timeout_s": world.timeout_s,
            "threads": torch.get_num_threads(),
            "sum": world.sum(torch.tensor([1.0, float(world.rank)])).tolist(),
            "gather": world.gather(f"rank {world.rank}"),
            "broadcast": world.broadcast(torch.tensor([world.rank + 1])).item(),
        }


def means() -> list[float]:
    with dl.join_world() as world:
        mine = torch.arange(world.rank + 1, dtype=torch.float32)
        uneven = world.mean(mine.mean(), len(mine))
        only_first = world.mean(3.5 if world.rank == 0 else float("nan"), world.rank == 0)
        return [uneven, only_first, world.mean(1.0, 0)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mean_over_the_ranks_is_weighted_and_a_weight_of_0_adds_nothing(ranks: int, on_ranks: OnRanks) -> None:
    every = [number for rank in range(ranks) for number in range(rank + 1)]
    for uneven, only_first, of_nothing in on_ranks(ranks, means):
        assert uneven == pytest.approx(sum(every) / len(every), abs=1e-15)
        assert only_first == 3.5
        assert np.isnan(of_nothing)


@pytest.mark.covers("C1", "H1")
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_a_launcher_and_a_world_of_one_run_the_same_lines(ranks: int, on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(ranks, facts)):
        assert found == {
            "rank": rank,
            "size": ranks,
            "device": "cuda:0" if torch.cuda.is_available() else "cpu",
            "seed": 4,
            "timeout_s": 7,
            "threads": 1,
            "sum": [ranks, sum(range(ranks))],
            "gather": [f"rank {other}" for other in range(ranks)],
            "broadcast": 1,
        }


@pytest.mark.covers("C1")
def test_without_a_launcher_it_is_a_world_of_one() -> None:
    with dl.join_world(device="cpu") as world:
        assert (world.rank, world.size, dist.is_initialized()) == (0, 1, False)
        assert (world.sum(torch.tensor(3.0)).item(), world.gather("word")) == (3.0, ["word"])


@pytest.mark.parametrize(
    ("keywords", "variables", "said"),
    [
        ({}, {"RANK": "1"}, "RANK and WORLD_SIZE must both be set, or neither. RANK=1 is set"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE need MASTER_ADDR and MASTER_PORT"),
        *(({"threads": number}, {}, f"threads must be a whole number, 1 or more. Got {number}") for number in (0, 1.5)),
        *(({"timeout_s": number}, {}, f"timeout_s={number}") for number in (0, -1.5, float("nan"), float("inf"))),
        *(({"seed": value}, {}, "seed must be a whole number") for value in (1.5, "one", True, None, 2**64)),
        ({"device": None}, {}, "Got None"),
    ],
)
def test_what_a_world_cannot_be_joined_with_is_refused_before_anything_is_changed(
    keywords: dict[str, Any], variables: dict[str, str], said: str
) -> None:
    threads, stream = torch.get_num_threads(), random.getstate()
    with mock.patch.dict(os.environ, variables), pytest.raises(ValueError, match=re.escape(said)):
        dl.join_world(**keywords)
    assert (torch.get_num_threads(), random.getstate()) == (threads, stream)


def join_for_long() -> int:
    with dl.join_world(timeout_s=1e300) as world:
        return world.size


def test_ranks_that_may_wait_for_ever_meet(on_ranks: OnRanks) -> None:
    assert on_ranks(2, join_for_long) == [2, 2]


def join_apart() -> list[tuple[str, str, float]]:
    """Rank 1 passes another value than the others."""

    def join(name: str, own: Any, usual: Any) -> None:
        with dl.join_world(**{name: own if os.environ["RANK"] == "1" else usual}):
            pass

    return [caught(join, *one) for one in APART]


APART = [("seed", 1, 0), ("threads", 2, 1), ("timeout_s", 30.0, 60.0)]


@pytest.mark.covers("H1")
def test_ranks_that_disagree_on_seed_or_threads_or_timeout_are_refused_on_all(on_ranks: OnRanks) -> None:
    for found in on_ranks(3, join_apart):
        for (name, _, usual), (kind, text, took_s) in zip(APART, found, strict=True):
            assert kind in ("ValueError", "PeerFailed")
            assert f"{name} of join_world must be the same on every rank. Rank 0 has {name}={usual}" in text
            assert took_s < FAULT_S


def join_often() -> list[float]:
    def total(world: dl.World) -> float:
        return world.sum(torch.ones(())).item()

    with dl.join_world(seed=1) as world:
        found = [total(world)]
    assert not dist.is_initialized()
    with dl.join_world(seed=2) as outer:
        with dl.join_world(seed=2) as inner:
            found.append(total(inner))
        return [*found, total(outer)]


@pytest.mark.covers("C1")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_world_is_joined_again_after_it_was_left_or_inside_itself(ranks: int, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, join_often) == [[ranks] * 3] * ranks


def join_after_a_failure() -> list[str]:
    said = []
    for culprit in (1, 0):
        try:
            with dl.join_world() as world:
                if world.rank == culprit:
                    raise ValueError(f"the fault of rank {culprit}")
                world.sum(torch.ones(()))
        except (ValueError, dl.PeerFailed) as error:
            said.append(f"{type(error).__name__} {str(error).splitlines()[0]}")
    with dl.join_world() as world:
        said.append(str(world.sum(torch.ones(())).item()))
    return said


@pytest.mark.covers("D10")
def test_the_next_world_knows_nothing_of_the_failure_of_the_last(on_ranks: OnRanks) -> None:
    first, second = (f"the fault of rank {culprit}" for culprit in (1, 0))
    peer = "PeerFailed rank {} failed: ValueError: {}"
    assert on_ranks(2, join_after_a_failure) == [
        [peer.format(1, first), f"ValueError {second}", "2.0"],
        [f"ValueError {first}", peer.format(0, second), "2.0"],
    ]


def come_unless_last() -> tuple[str, str, float]:
    return caught(lambda: os.environ["RANK"] == "2" or dl.join_world(timeout_s=TIMEOUT_S))


@pytest.mark.covers("D10")
@pytest.mark.slow
def test_a_rank_that_never_comes_is_an_error_after_the_timeout(on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(3, come_unless_last)[:2]:
        assert kind == "PeerFailed"
        assert "All 3 ranks must join within timeout_s=2" in text
        assert "Nothing came from ranks [2]." in text
        assert took_s < TIMEOUT_S + FAULT_S


def miss_a_sum() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world(timeout_s=TIMEOUT_S) as world:
            store = dist.distributed_c10d._get_default_store()
            if world.rank == 1:
                store.wait(["the others are done"], timedelta(seconds=30))
                return
            try:
                world.sum(torch.ones(()))
            finally:
                store.set("the others are done", "")

    let_ranks_meet()
    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_sum_is_an_error_after_the_timeout(on_ranks: OnRanks) -> None:
    kind, text, took_s = on_ranks(2, miss_a_sum)[0]
    assert kind == "PeerFailed"
    assert "every rank must reach every collective within timeout_s=2" in text
    assert "Rank 1 is still outside of a loop" in text
    assert "in miss_a_sum" in text, "the stack where it hangs"
    assert took_s < TIMEOUT_S + FAULT_S


# -- leaving -----------------------------------------------------------------------------------------------------


def leave_with(errors: list[type[BaseException] | None]) -> list[tuple[str, bool, int, list[str]]]:
    before, found = torch.get_num_threads(), []
    for error in errors:
        closed: list[str] = []

        def leave(error: type[BaseException] | None, closed: list[str]) -> None:
            with dl.join_world(threads=before + 1) as world:
                assert torch.get_num_threads() == before + 1
                world.on_leaving(lambda: closed.append("first"))
                world.on_leaving(lambda: closed.append("second"))
                if error is not None:
                    raise error

        kind, _, _ = caught(leave, error, closed)
        found.append((kind, dist.is_initialized(), torch.get_num_threads() - before, closed))
    return found


@pytest.mark.covers("C1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_leaving_cleans_up_also_after_an_exception(ranks: int, on_ranks: OnRanks) -> None:
    found = on_ranks(ranks, leave_with, [None, ValueError, SystemExit, KeyboardInterrupt])
    kinds = ("", "ValueError", "SystemExit", "KeyboardInterrupt")
    assert found == [[(kind, False, 0, ["second", "first"]) for kind in kinds]] * ranks


def test_all_is_closed_also_if_one_closer_raises() -> None:
    closed: list[str] = []

    def refuse() -> NoReturn:
        raise OSError("no space left")

    threads = torch.get_num_threads()
    world = dl.join_world(device="cpu", threads=threads + 1)
    world.on_leaving(lambda: closed.append("first"))
    world.on_leaving(refuse)
    with pytest.raises(OSError, match="no space left"), world:
        pass
    assert closed == ["first"]
    assert torch.get_num_threads() == threads


def use_after_leaving() -> list[str]:
    with dl.join_world() as world:
        pass
    model = nn.Linear(2, 1)
    calls: list[Callable[[], object]] = [
        lambda: world.sum(torch.ones(())),
        lambda: world.gather(1),
        lambda: world.broadcast(torch.ones(())),
        lambda: world.require_equal("it", 1),
        lambda: world.raise_if_any_failed(None),
        lambda: world.rank_zero_first().__enter__(),
        world.__enter__,
        lambda: dl.Batches(torch.ones(4, 2), 2, world),
    ]
    with dl.join_world() as other:
        batches = dl.Batches(torch.ones(4, 2), 2, other)
    calls.append(lambda: dl.evaluate(model, batches, mean=lambda output: output.mean()))
    return [caught(call)[1] for call in calls]


def test_a_world_that_was_left_is_not_taken_for_a_world_of_one(on_ranks: OnRanks) -> None:
    for said in on_ranks(2, use_after_leaving):
        assert ["A world cannot be used after it was left" in text for text in said] == [True] * 9


def leave_early() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            world.sum(torch.ones(()))
            if world.rank > 0:
                world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("D10")
def test_a_rank_that_ends_early_without_an_error_leaves_no_peer_waiting(on_ranks: OnRanks) -> None:
    first, *others = on_ranks(3, leave_early)
    assert first[0] == ""
    for kind, text, took_s in others:
        assert kind == "PeerFailed"
        assert "Rank 0 left the world without an error" in text
        assert took_s < FAULT_S


# -- what cannot be summed -----------------------------------------------------------------------------------------


@pytest.mark.covers("D10")
def test_what_cannot_be_summed_is_refused_with_the_remedy() -> None:
    leaf = torch.ones(3, requires_grad=True)
    refused: list[tuple[Any, type[Exception], str]] = [
        (3.0, TypeError, "Got float. Pass torch.as_tensor(value, device=world.device)"),
        (np.ones(3), TypeError, "Got ndarray. Pass torch.as_tensor"),
        (torch.eye(3).to_sparse(), ValueError, "sparse_coo. Pass tensor.to_dense"),
        (leaf, ValueError, "Pass tensor.detach()"),
        (2 * leaf, ValueError, "step.gather for a loss of the whole"),
    ]
    with dl.join_world(device="cpu") as world:
        for value, error, said in refused:
            with pytest.raises(error, match=re.escape(said)):
                world.sum(value)


def sum_of_parameters() -> list[float]:
    with dl.join_world() as world, torch.no_grad():
        parameter = nn.Parameter(torch.full((2,), world.rank + 1.0))
        assert world.sum(parameter) is parameter
        return world.broadcast(parameter).tolist()


def test_a_parameter_is_summed_without_a_graph(on_ranks: OnRanks) -> None:
    assert on_ranks(2, sum_of_parameters) == [[3.0, 3.0]] * 2


def sum_of_numbers() -> str:
    """The error of a total of Python numbers, which is whole on the rank that has none."""
    with dl.join_world(exchange="memory") as world, pytest.raises(RuntimeError) as refused:
        world.sum(torch.tensor(sum([0.5][world.rank :])))
    return str(refused.value)


def test_sums_of_another_dtype_are_refused_with_the_remedy(on_ranks: OnRanks) -> None:
    for text in on_ranks(2, sum_of_numbers):
        assert "rank 0 is at a sum of torch.float32 (), rank 1 is at a sum of torch.int64 ()" in text
        assert "with tensors of one shape and dtype" in text


def sum_in_inference_mode() -> list[float]:
    with dl.join_world() as world:
        found: list[float] = []
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                found.append(world.sum(torch.ones(3)).sum().item())
                found += world.gather(1.0)
        return found


def test_inference_mode_around_collectives_leaves_later_ones_as_they_are(on_ranks: OnRanks) -> None:
    assert on_ranks(2, sum_in_inference_mode) == [[6.0, 1.0, 1.0] * 3] * 2
