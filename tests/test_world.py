"""Joining, leaving, one rank first, one seed; and a rank's failure that becomes everybody's.

Where a test asks that a fault ends all ranks, they have FAULT_S for it, as the project promises.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from ddp_loop.launching import RankFailed
from tests.harness import OnRanks

FAULT_S = 3.0
TIMEOUT_S = 2.0  # of a world in which a rank does not come


class NeedsTwo(Exception):
    """An exception that can be made only with two arguments."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError("no words")


def caught(function: Callable[..., Any], *arguments: Any) -> tuple[str, str, float]:
    """The type and the text of what a call raises, and the seconds that it took; "" for no exception."""
    began = time.monotonic()
    try:
        function(*arguments)
    except BaseException as error:
        return type(error).__name__, _text(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except LookupError:
        return "(no words)"


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


@pytest.mark.covers("C1", "H1")
@pytest.mark.parametrize("ranks", [1, 2, 3])
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
        assert (world.rank, world.size) == (0, 1)
        assert not dist.is_initialized()
        assert world.sum(torch.tensor(3.0)).item() == 3.0
        assert world.gather("word") == ["word"]


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"RANK and WORLD_SIZE must both be set, or neither; {variable}=1 is set"):
        dl.join_world()


def test_a_rank_outside_of_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"RANK must be in 0 \.\. WORLD_SIZE-1; got RANK=2, WORLD_SIZE=2"):
        dl.join_world()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"threads": 0}, "threads=0"),
        ({"threads": -2}, "threads=-2"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": -1.5}, "timeout_s=-1.5"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "one"}, "seed"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"device": None}, "got None"),
    ],
)
def test_what_a_world_cannot_be_joined_with_is_refused_before_anything_is_changed(
    keywords: dict[str, Any], said: str
) -> None:
    threads, stream = torch.get_num_threads(), random.getstate()
    with pytest.raises(ValueError, match=said):
        dl.join_world(**keywords)
    assert (torch.get_num_threads(), random.getstate()) == (threads, stream)


def join_with(name: str, odd_rank: int, value: Any, usual: Any) -> tuple[str, str, float]:
    def join() -> None:
        with dl.join_world(**{name: value if int(os.environ["RANK"]) == odd_rank else usual}):
            pass

    return caught(join)


@pytest.mark.covers("H1")
@pytest.mark.parametrize(("name", "value", "usual"), [("seed", 1, 0), ("threads", 2, 1), ("timeout_s", 30.0, 60.0)])
def test_ranks_that_disagree_on_seed_or_threads_or_timeout_are_refused_on_all(
    name: str, value: Any, usual: Any, on_ranks: OnRanks
) -> None:
    for kind, text, took_s in on_ranks(3, join_with, name, 1, value, usual):
        assert kind in ("ValueError", "PeerFailed")
        assert "seed, threads and timeout_s must be the same on every rank" in text
        assert took_s < FAULT_S


def join_twice(nested: bool) -> list[float]:
    if not nested:
        with dl.join_world(seed=1) as world:
            one = world.sum(torch.ones(())).item()
        assert not dist.is_initialized()
        with dl.join_world(seed=2) as world:
            return [one, world.sum(torch.ones(())).item()]
    with dl.join_world(seed=1) as outer:
        with dl.join_world(seed=1) as inner:
            one = inner.sum(torch.ones(())).item()
        return [one, outer.sum(torch.ones(())).item()]


@pytest.mark.covers("C1")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_world_is_joined_again_after_it_was_left_or_inside_itself(
    ranks: int, nested: bool, on_ranks: OnRanks
) -> None:
    assert on_ranks(ranks, join_twice, nested) == [[ranks, ranks]] * ranks


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


def come_unless(absent: int) -> tuple[str, str, float]:
    if int(os.environ["RANK"]) == absent:
        return "", "", 0.0
    return caught(lambda: dl.join_world(timeout_s=TIMEOUT_S))


@pytest.mark.covers("D10")
def test_a_rank_that_never_comes_is_an_error_after_the_timeout(on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(3, come_unless, 2)[:2]:
        assert kind == "PeerFailed"
        assert "all 3 ranks must join within timeout_s=2" in text
        assert took_s < TIMEOUT_S + FAULT_S


def miss_a_sum(absent: int) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world(timeout_s=TIMEOUT_S) as world:
            if world.rank == absent:
                store = dist.distributed_c10d._get_default_store()
                store.wait(["the others are done"], timedelta(seconds=30))
                return
            try:
                world.sum(torch.ones(()))
            finally:
                store = dist.distributed_c10d._get_default_store()
                store.set("the others are done", "")

    return caught(work)


@pytest.mark.covers("D10")
def test_a_rank_that_stays_away_from_a_sum_is_an_error_after_the_timeout(on_ranks: OnRanks) -> None:
    kind, text, took_s = on_ranks(2, miss_a_sum, 1)[0]
    assert kind == "PeerFailed"
    assert "slower than timeout_s=2" in text
    assert took_s < TIMEOUT_S + FAULT_S


# -- leaving -----------------------------------------------------------------------------------------------------


def leave_with(error: str) -> tuple[str, bool, int, list[str]]:
    before = torch.get_num_threads()
    closed: list[str] = []
    kind = ""
    try:
        with dl.join_world(threads=before + 1) as world:
            assert torch.get_num_threads() == before + 1
            world.on_leaving(lambda: closed.append("first"))
            world.on_leaving(lambda: closed.append("second"))
            if error:
                raise {"ValueError": ValueError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[
                    error
                ]
    except BaseException as raised:
        kind = type(raised).__name__
    return kind, dist.is_initialized(), torch.get_num_threads() - before, closed


@pytest.mark.covers("C1")
@pytest.mark.parametrize("error", ["", "ValueError", "SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_leaving_cleans_up_also_after_an_exception(ranks: int, error: str, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, leave_with, error) == [(error, False, 0, ["second", "first"])] * ranks


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
        lambda: world.check_same("it", 1),
        lambda: world.agree(None),
        lambda: world.first().__enter__(),
        world.__enter__,
        lambda: dl.Batches(torch.ones(4, 2), 2, world),
    ]
    with dl.join_world() as other:
        batches = dl.Batches(torch.ones(4, 2), 2, other)
    calls.append(lambda: dl.evaluate(model, batches, mean=lambda output: output.mean()))
    return [caught(call)[1] for call in calls]


def test_a_world_that_was_left_is_not_taken_for_a_world_of_one(on_ranks: OnRanks) -> None:
    for said in on_ranks(2, use_after_leaving):
        assert ["this one was left" in text for text in said] == [True] * 9


def leave_early(ranks_that_leave: int) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            world.sum(torch.ones(()))
            if world.rank < ranks_that_leave:
                return
            world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("D10")
def test_a_rank_that_ends_early_without_an_error_leaves_no_peer_waiting(on_ranks: OnRanks) -> None:
    first, *others = on_ranks(3, leave_early, 1)
    assert first[0] == ""
    for kind, text, took_s in others:
        assert kind == "PeerFailed"
        assert "every rank must take part in every collective; rank 0 left the world, without an error" in text
        assert took_s < FAULT_S


# -- one rank's failure ------------------------------------------------------------------------------------------


def fail_in(kind: str) -> tuple[str, str, float]:
    errors: dict[str, Callable[[], BaseException]] = {
        "ValueError": lambda: ValueError("a fault of rank 1"),
        "two arguments": lambda: NeedsTwo(1, 2),
        "mute": Mute,
        "SystemExit 0": lambda: SystemExit(0),
        "SystemExit 3": lambda: SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
        "not of this alphabet": lambda: RuntimeError("\ud800 \0 \U0001f600"),
        "long": lambda: RuntimeError("x" * 10**6),
        "group": lambda: ExceptionGroup("two faults", [ValueError("one"), KeyError("two")]),
    }

    def work() -> None:
        with dl.join_world() as world:
            world.sum(torch.ones(()))
            if world.rank == 1:
                raise errors[kind]()
            world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("kind", "own", "told"),
    [
        ("ValueError", "ValueError", "ValueError: a fault of rank 1"),
        ("two arguments", "NeedsTwo", "NeedsTwo: 1 is not 2"),
        ("mute", "Mute", "Mute: <exception str() failed>"),
        ("SystemExit 0", "SystemExit", "SystemExit: 0"),
        ("SystemExit 3", "SystemExit", "SystemExit: 3"),
        ("KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("GeneratorExit", "GeneratorExit", "GeneratorExit"),
        ("not of this alphabet", "RuntimeError", "RuntimeError: "),
        ("long", "RuntimeError", "RuntimeError: xxx"),
        ("group", "ExceptionGroup", "two faults (2 sub-exceptions)"),
    ],
)
def test_whatever_a_rank_raises_the_others_are_told_it_with_its_traceback(
    kind: str, own: str, told: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(3, fail_in, kind)
    assert results[1][0] == own
    for peer in (0, 2):
        raised, text, took_s = results[peer]
        assert raised == "PeerFailed"
        assert text.startswith("rank 1 failed: ")
        assert told in text
        assert "Traceback (most recent call last)" in text
        assert "in work\n" in text
        assert took_s < FAULT_S


def peers_rank() -> int | None:
    try:
        with dl.join_world() as world:
            if world.rank == 2:
                raise ValueError
            world.sum(torch.ones(()))
    except dl.PeerFailed as error:
        return error.rank
    except ValueError:
        return None
    raise AssertionError("nothing was raised")


@pytest.mark.covers("D10")
def test_the_culprit_is_a_number_too(on_ranks: OnRanks) -> None:
    assert on_ranks(3, peers_rank) == [2, 2, None]


def all_fail() -> NoReturn:
    with dl.join_world() as world:
        raise ValueError(f"rank {world.rank} has it too")


@pytest.mark.covers("D10")
def test_a_fault_of_all_ranks_is_raised_by_each(on_ranks: OnRanks) -> None:
    with pytest.raises(RankFailed, match="rank 0 raised ValueError: rank 0 has it too") as failed:
        on_ranks(3, all_fail)
    assert isinstance(failed.value.__cause__, ValueError)
    assert "rank 2 raised ValueError: rank 2 has it too" in str(failed.value)


def agree_on(problems: dict[int, str]) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            world.agree(ValueError(problems[world.rank]) if world.rank in problems else None)

    return caught(work)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("problems", [{1: "bad"}, {0: "bad", 2: "worse"}, {0: "a", 1: "b", 2: "c"}])
def test_one_ranks_problem_is_raised_by_all(problems: dict[int, str], on_ranks: OnRanks) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, agree_on, problems)):
        if rank in problems:
            assert (kind, text) == ("ValueError", problems[rank])
        else:
            assert (kind, text.split(": ")[0]) == ("PeerFailed", f"rank {min(problems)} failed")
        assert took_s < FAULT_S


# -- one rank first, one rank alone ------------------------------------------------------------------------------


def go_first(folder: str) -> list[list[str]]:
    found = []
    with dl.join_world() as world:
        for turn in range(3):
            with world.first():
                there = sorted(name for name in os.listdir(folder) if name.startswith(f"{turn}-"))
                found.append(there)
                Path(folder, f"{turn}-{world.rank}").touch()
    return found


@pytest.mark.covers("C8")
def test_rank_0_is_through_before_the_others_begin(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = on_ranks(3, go_first, str(tmp_path))
    assert first == [[], [], []]
    for found in others:
        assert [f"{turn}-0" in there for turn, there in enumerate(found)] == [True] * 3
    assert len(os.listdir(tmp_path)) == 9


def go_first_in_two_worlds(folder: str) -> list[bool]:
    found = []
    for number in range(2):
        with dl.join_world() as world, world.first():
            found.append(Path(folder, str(number)).exists())
            Path(folder, str(number)).touch()
    return found


@pytest.mark.covers("C8")
def test_rank_0_is_first_also_in_a_second_world_of_the_same_launcher(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, go_first_in_two_worlds, str(tmp_path)) == [[False, False], [True, True]]


def fail_around_first(where: str) -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            if where == "before" and world.rank == 0:
                raise OSError("no such host")
            if where == "elsewhere" and world.rank == 1:
                raise OSError("no such host")
            if where == "elsewhere" and world.rank == 0:
                world.sum(torch.ones(()))
            with world.first():
                if where == "inside" and world.rank == 0:
                    raise OSError("no such host")
                if where == "leaving" and world.rank == 0:
                    sys.exit(0)

    return caught(work)


@pytest.mark.covers("C8", "D10")
@pytest.mark.parametrize(
    ("where", "culprit", "own"),
    [("inside", 0, "OSError"), ("leaving", 0, "SystemExit"), ("before", 0, "OSError"), ("elsewhere", 1, "OSError")],
)
def test_a_failure_while_others_wait_for_the_first_is_everybodys(
    where: str, culprit: int, own: str, on_ranks: OnRanks
) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, fail_around_first, where)):
        assert kind == (own if rank == culprit else "PeerFailed")
        assert "no such host" in text or own == "SystemExit"
        assert rank == culprit or f"rank {culprit} failed" in text
        assert took_s < FAULT_S


def wait_for_a_slow_first() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world:
            if world.rank == 0:
                dist.distributed_c10d._get_default_store().wait(["gave up"])
                return
            try:
                with world.first(timeout_s=1.0):
                    pass
            finally:
                dist.distributed_c10d._get_default_store().set("gave up", "")

    return caught(work)


@pytest.mark.covers("C8")
def test_the_wait_for_the_first_has_an_end(on_ranks: OnRanks) -> None:
    kind, text, took_s = on_ranks(2, wait_for_a_slow_first)[1]
    assert (kind, text) == ("PeerFailed", "rank 0 must leave its block in timeout_s=1; it did not")
    assert 1.0 <= took_s < 1.0 + FAULT_S


def sum_inside_first() -> tuple[str, str, float]:
    def work() -> None:
        with dl.join_world() as world, world.first():
            world.sum(torch.ones(()))

    return caught(work)


@pytest.mark.covers("C8")
def test_a_collective_inside_first_is_refused_and_does_not_hang(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, sum_inside_first)
    assert first[0] == "RuntimeError"
    assert "inside `with world.first()` the ranks are not at the same place" in first[1]
    assert (second[0], second[1].splitlines()[0][:13]) == ("PeerFailed", "rank 0 failed")
    assert max(first[2], second[2]) < FAULT_S


def print_something(path: str) -> None:
    with dl.join_world() as world, Path(path).joinpath(f"{world.rank}.txt").open("w") as file:
        before, sys.stdout = sys.stdout, file
        try:
            world.print("one line", world.size)
        finally:
            sys.stdout = before


@pytest.mark.covers("C8")
def test_a_line_is_printed_once(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(3, print_something, str(tmp_path))
    assert [tmp_path.joinpath(f"{rank}.txt").read_text() for rank in range(3)] == ["one line 3\n", "", ""]


# -- one seed ----------------------------------------------------------------------------------------------------


def draw(seed: int) -> tuple[float, float, float]:
    with dl.join_world(seed=seed):
        return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.mark.covers("H1")
def test_one_seed_starts_all_generators_alike_on_every_rank(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, draw, 3)
    assert first == second == on_ranks(1, draw, 3)[0]
    assert all(one != other for one, other in zip(first, on_ranks(1, draw, 4)[0], strict=True))


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Observations with noise of all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(5) + random.random() + float(np.random.rand())
        return torch.full((5,), float(index)) / 20 + noise, index % 3


def train_noisily(seed: int) -> dict[str, Any]:
    order, noise = [], []
    with dl.join_world(seed=seed) as world:
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(world.device)
        start = [tensor.tolist() for tensor in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(Noisy(), 8, world, shards=4)
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for inputs, labels in step:
                order.append(labels.tolist())
                noise.append(inputs.tolist())
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()
        end = [tensor.tolist() for tensor in model.parameters()]
    return {"weights": start, "order": order, "noise": noise, "trained": end}


@pytest.mark.covers("H1")
def test_one_seed_fixes_weights_and_order_and_noise_and_dropout(on_ranks: OnRanks) -> None:
    runs = [on_ranks(2, train_noisily, 5) for _ in range(2)]
    assert runs[0] == runs[1]
    others = on_ranks(2, train_noisily, 6)[0]
    for what, value in runs[0][0].items():
        assert value != others[what], f"another seed must give other {what}"


class Shut(nn.Module):
    """Keeps the dropout mask of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.masks: list[tuple[float, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(torch.ones(64), 0.5)
        self.masks.append(tuple(dropped.tolist()))
        return self.weight * x.sum()


def masks_by_shard() -> list[tuple[float, ...]]:
    with dl.join_world(seed=1) as world:
        model = Shut().to(world.device)
        batches = dl.Batches(torch.ones(12, 1), 4, world, shards=4, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows))
            step.fold()
        return model.masks


@pytest.mark.covers("H1")
def test_each_shard_of_each_step_has_dropout_of_its_own_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, masks_by_shard)[0]
    assert len(set(alone)) == len(alone) == 12
    left, right = on_ranks(2, masks_by_shard)
    assert [mask for k in range(3) for mask in (*left[2 * k : 2 * k + 2], *right[2 * k : 2 * k + 2])] == alone


def updates(observations: int, batch_size: int, shards: int | None) -> int:
    with dl.join_world() as world:
        model = nn.Linear(2, 1).to(world.device)
        batches = dl.Batches(torch.ones(observations, 2), batch_size, world, shards=shards)
        made = 0
        for step in dl.Loop(batches, 3, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
            made += 1
        return made


@pytest.mark.covers("D2")
@pytest.mark.parametrize(("observations", "batch_size", "shards"), [(10, 4, None), (1, 4, None), (13, 2, 1), (7, 3, 5)])
def test_every_rank_makes_the_same_number_of_updates_whatever_the_data(
    observations: int, batch_size: int, shards: int | None, on_ranks: OnRanks
) -> None:
    assert on_ranks(3, updates, observations, batch_size, shards) == [3 * -(-observations // batch_size)] * 3
