"""A world that is joined without `with` is left when the interpreter exits; the peers report what ended it."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop import join_world
from tests.support.harness import FAULT_S, OnRanks, caught
from tests.support.scripts import SCRIPT_S, StartPython, write


def fail_outside_of_with() -> tuple[str, str, float]:
    """What the interpreter does with an uncaught exception, done here on rank 1."""
    told: list[type[BaseException]] = []
    usual = sys.excepthook
    sys.excepthook = lambda kind, error, trace: told.append(kind)  # torch puts one of its own around it
    try:
        world = dl.join_world()
        assert sys.excepthook.__module__ == join_world.__module__
        if world.rank == 1:
            try:
                raise KeyError("no such word")
            except KeyError as error:
                sys.excepthook(KeyError, error, error.__traceback__)
            assert told == [KeyError]
        result = caught(world.sum, torch.ones(1))
        world.leave()
        assert sys.excepthook.__module__ != join_world.__module__
        assert not dist.is_initialized()
        return result
    finally:
        sys.excepthook = usual


@pytest.mark.covers("D10")
def test_an_uncaught_exception_is_reported_on_the_peers(on_ranks: OnRanks) -> None:
    first, second, third = on_ranks(3, fail_outside_of_with)
    for kind, text, took_s in (first, third):
        assert (kind, "rank 1" in text, "no such word" in text) == ("PeerFailed", True, True), text
        assert took_s < FAULT_S
    assert second[0] == "RuntimeError"  # it left the world


TRAINS = """
import sys

import torch

import ddp_loop as dl

world = dl.join_world()
model = torch.nn.Linear(3, 1)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
loop = dl.Loop(dl.Batches(torch.ones(6, 3), 2, world), 5, state=state, run_dir=sys.argv[1], progress=False)
for epoch in loop.epochs():
    for step in epoch:
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()
    break
sys.stdout.write(f"{world.rank} is done\\n")  # one write, even where PYTHONUNBUFFERED makes print write word by word
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_script_without_with_exits_cleanly(ranks: int, start_python: StartPython, tmp_path: Path) -> None:
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    process = start_python("-X", "dev", *launcher, write(tmp_path, TRAINS), str(tmp_path / "run"))
    out, errors = process.communicate(timeout=SCRIPT_S)
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == [f"{rank} is done" for rank in range(ranks)]
    assert (tmp_path / "run" / "rows.jsonl").read_text().count("\n") == 3
    assert "destroy_process_group" not in errors
    assert "Traceback" not in errors


FAILS = TRAINS.replace(
    "        for rows in step:\n",
    """        if world.rank == 1 and step.iteration == 2:
            raise KeyError("no such word")
        for rows in step:
""",
)


@pytest.mark.parametrize("by_with", [False, True])
@pytest.mark.slow
def test_the_peer_of_a_failed_rank_prints_one_short_error(
    by_with: bool, start_python: StartPython, tmp_path: Path
) -> None:
    text = FAILS
    if by_with:
        before, after = FAILS.split("world = dl.join_world()\n")
        text = before + "with dl.join_world() as world:\n" + indent(after, "    ")
    logs = tmp_path / "logs"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3"]
    process = start_python(*launcher, f"--log-dir={logs}", write(tmp_path, text), str(tmp_path / "run"))
    process.communicate(timeout=SCRIPT_S)
    (peer,), (culprit,) = ([one.read_text() for one in logs.glob(f"*/*/{rank}/stderr.log")] for rank in range(2))
    assert "Traceback" in culprit
    assert "rank 0 was ended in fold of step 2: rank 1 failed in data of step 2: KeyError: 'no such word'\n" in peer
    assert "Traceback" not in peer
    assert "gloo" not in peer


@pytest.mark.slow
def test_a_script_without_with_that_raises_ends_as_any_other(start_python: StartPython, tmp_path: Path) -> None:
    process = start_python(write(tmp_path, TRAINS + "raise KeyError('no such word')\n"), str(tmp_path / "run"))
    out, errors = process.communicate(timeout=SCRIPT_S)
    assert process.returncode == 1
    assert out == "0 is done\n"
    error, _, advice = errors.splitlines()[-3:]
    assert (error, advice.partition(":")[0]) == ("KeyError: 'no such word'", "to go on")
    assert errors.count("Traceback") == 1
    assert (tmp_path / "run" / "rows.jsonl").read_text().count("\n") == 3


def join_a_group_without_a_cpu() -> tuple[str, str, float]:
    dist.init_process_group("cuda:gloo")
    try:
        return caught(dl.join_world)
    finally:
        dist.destroy_process_group()


def test_a_group_of_the_users_own_must_reach_the_cpu(on_ranks: OnRanks) -> None:
    for kind, text, _ in on_ranks(2, join_a_group_without_a_cpu):
        assert kind == "ValueError"
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in text


def join_a_group_of_the_users_own() -> float:
    dist.init_process_group()
    try:
        with dl.join_world() as world:
            total = float(world.sum(torch.ones(1)))
        return total + float(dist.get_rank())  # the group is still there
    finally:
        dist.destroy_process_group()


def test_a_group_of_the_users_own_is_used_and_stays(on_ranks: OnRanks) -> None:
    assert on_ranks(2, join_a_group_of_the_users_own) == [2.0, 3.0]
