"""A world that is joined without `with` is left when the interpreter exits; the peers report what ended it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from tests.support.harness import OnRanks, caught
from tests.support.paths import ROOT
from tests.support.scripts import SCRIPT_S, StartPython, run, write

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


@pytest.mark.slow
def test_a_script_without_with_exits_cleanly(start_python: StartPython, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start_python("-X", "dev", *launcher, write(tmp_path, TRAINS), str(tmp_path / "run"))
    out, errors = process.communicate(timeout=SCRIPT_S)
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == ["0 is done", "1 is done"]
    assert (tmp_path / "run" / "rows.jsonl").read_text().count("\n") == 3
    assert "destroy_process_group" not in errors
    assert "Traceback" not in errors


FAILS = TRAINS.replace(
    "        for rows in step:\n",
    """        if world.rank == 1 and step.iteration == 2:
            if sys.argv[2:]:
                sys.exit(0)
            raise KeyError("no such word")
        for rows in step:
""",
)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("words", "error"),
    [((), "KeyError: 'no such word'"), (("exit",), "it left the loop in step 2")],
)
@pytest.mark.slow
def test_under_torchrun_a_rank_that_fails_has_the_last_words_and_its_peers_one_short_error(
    words: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    ended = run(*launcher, write(tmp_path, FAILS), "run", *words, folder=tmp_path)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1
    for peer in (0, 2):
        assert f"rank {peer} was ended in fold of step 2: rank 1 failed in data of step 2: {error}" in said
    assert "gloo" not in said
    assert "another exception occurred" not in said
    assert f"{ROOT / 'ddp_loop'}/" not in said  # no line of the package: the error is the script's
    summary = said[said.index("Root Cause") :]
    assert words or "rank      : 1" in summary  # a rank that exits with 0 fails the others alone
    assert words or summary.rstrip("= \n").endswith(error)
    assert len(said) < 7000


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
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined by {dist.get_rank()}", "")
    store.wait([f"joined by {rank}" for rank in range(dist.get_world_size())])  # it may still connect to this rank
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


COUNTS_FROZEN = """
import gc, importlib, sys
sys.ps1 = ">>> "
import ddp_loop.distributed
print(gc.get_freeze_count() < 1000)  # from 3.12 on Python begins with some
del sys.ps1
importlib.reload(ddp_loop.distributed.join)
print(gc.get_freeze_count() > 100_000)
"""


def test_collections_leave_torch_s_objects_out_but_in_an_interactive_process() -> None:
    ended = run("-c", COUNTS_FROZEN)
    assert (ended.stdout, ended.stderr) == ("True\nTrue\n", "")
