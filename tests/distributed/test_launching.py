"""Ranks started from Python: results in order, the culprit named, no rank left waiting, no process left running."""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.distributed import PeerFailed, Pool, RankFailed, join_world, launch
from ddp_loop.elastic import process_states
from tests.support.harness import FAULT_S, MOMENT_S, Unspeakable, let_ranks_meet, sum_of_ranks, until
from tests.support.runs import LONG_S
from tests.support.training import mean, take

pytestmark = pytest.mark.covers("C7")


class Unreadable:
    """A value that can be pickled and not unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], NoReturn], tuple[str]]:
        return refuse, ("no such value here",)


def refuse(reason: str) -> NoReturn:
    raise LookupError(reason)


# -- what runs on the ranks ------------------------------------------------------------------------------------


def own_rank() -> int:
    return int(os.environ["RANK"])


def rank_and_arguments(*arguments: Any, **keywords: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    return own_rank(), arguments, keywords


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def forget_the_group() -> int:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


def raise_on(culprits: dict[int, Exception]) -> str:
    if own_rank() in culprits:
        raise culprits[own_rank()]
    return "well"


def fail_while_peers_wait(how: str) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        match how:
            case "signal":
                die_by(signal.SIGKILL)
            case "exit code":
                os._exit(3)
        raise ValueError("negative weight")
    dist.all_reduce(torch.ones(1))


def die_by(number: int) -> None:
    os.kill(os.getpid(), number)


def die_of_memory(counter: str) -> None:
    if counter:
        Path(counter).write_text("oom_kill 2\n")
    if own_rank() == 0:
        die_by(signal.SIGKILL)


def wait_for_ever() -> None:
    threading.Event().wait()


def wait_for_ever_on_1() -> None:
    if own_rank() == 1:
        wait_for_ever()
    dist.init_process_group("gloo")  # waits for rank 1


def raise_on_0_and_wait_on_1() -> None:
    if own_rank() == 0:
        raise ValueError("negative weight")
    wait_for_ever()


def change_the_surroundings(folder: str) -> None:
    os.environ["LEFT_BY_A_TASK"] = "here"
    del os.environ["PATH"]
    sys.path.append(folder)
    os.chdir(folder)


def surroundings() -> tuple[str | None, bool, list[str], str]:
    return os.environ.get("LEFT_BY_A_TASK"), "PATH" in os.environ, sys.path, os.getcwd()


def return_or_raise_on_1(what: str) -> object:
    if own_rank() == 0:
        return 0
    if what == "unspeakable":
        raise Unspeakable(1, 2)
    return threading.Lock() if what == "lock" else Unreadable()


# -- results ---------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order(pool: Pool) -> None:
    assert pool.run(rank_and_arguments, 4, 7, name="x") == [(rank, (7,), {"name": "x"}) for rank in range(4)]
    assert [pool.run(sum_of_ranks, ranks) for ranks in (1, 3, 2, 4)] == [[0], [3] * 3, [1] * 2, [6] * 4]


def test_results_may_be_tensors(pool: Pool) -> None:
    wanted = torch.ones(300_000, dtype=torch.float64)  # 2.4 MB: more than a pipe holds
    assert all(torch.equal(one, wanted) for one in pool.run(torch.ones, 2, 300_000, dtype=torch.float64))


@pytest.mark.slow
def test_launch_starts_new_processes_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    results = launch(variables, 2, "RANK", "SEEN_BY_RANKS")
    assert results == [["0", "yes"], ["1", "yes"]]
    # That the two processes are gone is checked after every test.


def test_a_rank_gets_the_variables_that_torchrun_gives(pool: Pool) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    elastic = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    results = pool.run(variables, 2, *names, *elastic)
    assert results == [[rank, rank, "2", "2", "0", "127.0.0.1", "True", "0"] for rank in ("0", "1")]


def test_several_ranks_compute_with_one_thread_each_as_under_torchrun(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert pool.run(torch.get_num_threads, 2) == [1, 1]
    assert pool.run(variables, 2, "OMP_NUM_THREADS") == [["1"], ["1"]]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert pool.run(torch.get_num_threads, 2) == [2, 2]


def test_a_task_finds_the_surroundings_of_its_caller_whatever_an_earlier_one_left(pool: Pool, tmp_path: Path) -> None:
    pool.run(change_the_surroundings, 2, str(tmp_path))
    assert pool.run(surroundings, 2) == [(None, True, sys.path, os.getcwd())] * 2


def test_a_process_group_left_behind_does_not_disturb_the_next_task(pool: Pool) -> None:
    assert pool.run(forget_the_group, 2) == [2, 2]
    assert pool.run(forget_the_group, 3) == [3, 3, 3]


def fail_to_start(joins_then: bool) -> tuple[bool, int]:
    """Rank 1 makes a process group that the others do not; then perhaps all join a world."""
    has_failed = False
    if own_rank() == 1:
        with suppress(dist.DistStoreError):
            dist.init_process_group("gloo", timeout=timedelta(seconds=1))
        has_failed = not dist.is_initialized()
    return has_failed, join_and_count() if joins_then else 0


def join_and_count() -> int:
    with join_world(timeout_s=20) as world:
        return int(world.sum(torch.ones(1)))


def test_a_group_that_one_rank_could_not_start_disturbs_no_later_world(pool: Pool) -> None:
    assert pool.run(fail_to_start, 2, True) == [(False, 2), (True, 2)]
    assert pool.run(fail_to_start, 2, False) == [(False, 0), (True, 0)]
    assert pool.run(join_and_count, 2) == [2, 2]


def forget_the_world(folder: str) -> int:
    """Train without a `with`, as a script may."""
    world, model = join_world(), torch.nn.Linear(1, 1)
    batches = dl.Batches(torch.ones(4, 1), 2, world, shards=2)
    loop = dl.Loop(batches, 2, state={"model": model}, run_dir=folder, progress=False)
    for epoch in loop.epochs():
        for step in epoch:
            take(step, model, mean)
        break
    return loop.iteration


def left_of_a_world() -> tuple[bool, list[str]]:
    threads = [one.name for one in threading.enumerate() if "ddp_loop" in one.name]
    return "ddp_loop" in sys.excepthook.__module__, threads


def forget_the_world_and_fail() -> None:
    world = join_world()
    if world.rank == 1:
        raise LookupError("no such word")
    world.sum(torch.ones(1))


def test_a_task_that_does_not_leave_its_world_leaves_it_at_its_end(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(forget_the_world, 2, str(tmp_path)) == [2, 2]
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "left"
    assert pool.run(left_of_a_world, 2) == [(False, [])] * 2
    assert pool.run(forget_the_world, 2, str(tmp_path), timeout_s=20) == [2, 2]  # the run folder is free again
    with pytest.raises(RankFailed, match="rank 1 raised LookupError: no such word"):
        pool.run(forget_the_world_and_fail, 2, timeout_s=20)
    assert pool.run(left_of_a_world, 2) == [(False, [])] * 2


def process_and_modules() -> tuple[int, int]:
    return os.getpid(), len(sys.modules)


def test_a_task_on_a_warm_pool_starts_no_process_and_imports_nothing(pool: Pool) -> None:
    assert pool.run(own_rank, 4) == [0, 1, 2, 3]  # a rank that has had a task is warm
    before = pool.run(process_and_modules, 4)
    assert pool.run(own_rank, 4) == [0, 1, 2, 3]
    assert pool.run(process_and_modules, 4) == before


# -- faults ----------------------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_rank_its_traceback_and_itself(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 2 raised ValueError: negative weight") as caught:
        pool.run(raise_on, 3, {2: ValueError("negative weight")})
    failed = caught.value
    assert failed.rank == 2
    assert "in raise_on" in failed.traceback
    assert failed.traceback in str(failed) + "\n"
    assert isinstance(failed.__cause__, ValueError)
    assert pool.run(own_rank, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("errors", "last"),
    [
        ({1: ValueError("one\nin two lines"), 2: KeyError("two")}, "  rank 2 raised KeyError: 'two'"),
        ({0: PeerFailed("rank 1 failed\nbecause"), 1: ValueError("negative weight")}, "PeerFailed: rank 1 failed"),
    ],
)
def test_of_several_the_lowest_rank_that_failed_by_itself_is_the_culprit_and_the_others_are_listed(
    errors: dict[int, Exception], last: str, pool: Pool
) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(raise_on, 3, errors)
    assert caught.value.rank == 1
    assert str(caught.value).splitlines()[-1].endswith(last)


def test_a_rank_that_raises_frees_those_that_wait_for_it(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 1 raised ValueError: negative weight") as caught:
        pool.run(fail_while_peers_wait, 3, "raise")
    assert time.monotonic() - start < FAULT_S
    assert "rank 0 raised RuntimeError" in str(caught.value)
    assert "rank 2 raised RuntimeError" in str(caught.value)
    assert pool.run(sum_of_ranks, 3) == [3, 3, 3]


@pytest.mark.parametrize(
    ("how", "said"), [("signal", r"died by signal 9 \(SIGKILL\)"), ("exit code", "died with exit code 3")]
)
@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_replaced(pool: Pool, how: str, said: str) -> None:
    before = pool.run(os.getpid, 3)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=f"^rank 1 {said}") as caught:
        pool.run(fail_while_peers_wait, 3, how)
    assert time.monotonic() - start < FAULT_S
    assert caught.value.rank == 1
    after = pool.run(os.getpid, 3)
    assert [before[rank] == after[rank] for rank in range(3)] == [True, False, True]
    assert pool.run(sum_of_ranks, 3) == [3, 3, 3]


def stop_in_a_world() -> None:
    let_ranks_meet(device="cpu")
    with join_world(device="cpu", timeout_s=6) as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.sum(torch.ones(1))


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_with_what_the_others_know(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(stop_in_a_world, 2)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("rank 1 was stopped, as by SIGSTOP: it did not answer, and was killed\n")
    assert "rank 0 raised ddp_loop.distributed.failures.PeerFailed" in str(caught.value)
    assert "Rank 1 does not answer (killed, stopped" in str(caught.value)
    assert "memory" not in str(caught.value).partition("Other ranks")[0]
    assert pool.run(own_rank, 2) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
def test_a_rank_that_was_killed_lacked_memory_if_the_kernel_has_counted_it(
    pool: Pool, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 1\n")  # a test cannot use up the machine's memory
    monkeypatch.setattr(process_states, "_PROC", tmp_path)
    monkeypatch.setattr(process_states, "_CGROUPS", tmp_path)
    with pytest.raises(RankFailed) as caught:
        pool.run(die_of_memory, 2, str(tmp_path / "vmstat") if counted else "")
    line = str(caught.value).splitlines()[0]
    assert line == "rank 0 died by signal 9 (SIGKILL)" + (", for lack of memory" if counted else "")


@pytest.mark.slow
def test_a_rank_that_died_between_two_tasks_is_replaced(pool: Pool) -> None:
    victim = pool.run(os.getpid, 2)[1]
    handle = os.pidfd_open(victim)
    os.kill(victim, signal.SIGKILL)
    assert select.select([handle], [], [], FAULT_S)[0] == [handle]
    os.close(handle)
    assert pool.run(own_rank, 2) == [0, 1]


HALF = """
import %s.part
from pathlib import Path
from time import sleep
begun = Path(__file__).with_name("begun")
if not begun.exists():
    begun.touch()
    sleep(%g)
"""


def import_it(name: str, begun: Path | None = None) -> int:
    """The value of a part of the package. With a file, rank 0 raises while rank 1 imports the package."""
    if begun is None:
        return int(importlib.import_module(name).part.VALUE)
    with join_world() as world:
        if world.rank == 0:
            until(begun.exists, "the import has begun", MOMENT_S)
            raise ValueError("negative weight")
        importlib.import_module(name)
    return 0


@pytest.mark.parametrize("how", ["error_of_another_rank", "ctrl_c"])
def test_a_worker_whose_import_was_interrupted_is_replaced(
    how: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"ended_by_{how}"  # a name for each, since the workers keep what they have imported
    package.mkdir()
    (package / "__init__.py").write_text(HALF % (package.name, LONG_S))
    (package / "part.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path)
    begun = package / "begun"
    if how == "ctrl_c":

        def press() -> None:
            until(begun.exists, "the import has begun", MOMENT_S)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(import_it, 1, package.name)
    else:
        with pytest.raises(RankFailed, match=r"^rank 0 raised ValueError: negative weight"):
            pool.run(import_it, 2, package.name, begun)
    assert pool.run(import_it, 2, package.name) == [5, 5]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_line_where_it_hangs(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 did not return within 5 s") as caught:
        pool.run(wait_for_ever_on_1, 2, timeout_s=5)
    failed = caught.value
    assert failed.rank == 1  # and not rank 0, which waits for it
    assert "test_launching.py" in failed.traceback
    assert "in wait_for_ever\n" in failed.traceback
    assert "rank 0 did not return within 5 s" in str(failed)
    assert "in init_process_group" in str(failed)
    assert pool.run(sum_of_ranks, 2) == [1, 1]


@pytest.mark.slow
def test_a_rank_that_does_not_end_after_anothers_failure_is_ended(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 0 raised ValueError: negative weight") as caught:
        pool.run(raise_on_0_and_wait_on_1, 2, timeout_s=60.0)
    assert time.monotonic() - start < FAULT_S
    assert "rank 1 had not ended 2 s after another rank failed, and was killed" in str(caught.value)
    assert "in wait_for_ever\n" in str(caught.value)
    assert pool.run(own_rank, 2) == [0, 1]


def test_an_end_of_the_interpreter_with_an_error_is_an_exception_like_others(pool: Pool) -> None:
    for code in (3, "no data"):
        with pytest.raises(RankFailed, match=rf"^rank 0 raised SystemExit: {code}"):
            pool.run(sys.exit, 1, code)
    assert pool.run(own_rank, 1) == [0]


def exit_well(where: str) -> int:
    with dl.join_world() as world:
        total = int(world.sum(torch.ones(())))
        if where == "inside the world":
            sys.exit(0)
    if where == "after it" or world.rank == 1:
        sys.exit()
    return total


def test_an_end_of_the_interpreter_without_an_error_ends_a_rank_well(pool: Pool) -> None:
    for where, results in {"inside the world": [None] * 2, "after it": [None] * 2, "on one rank": [2, None]}.items():
        assert pool.run(exit_well, 2, where) == results, where
    assert pool.run(own_rank, 2) == [0, 1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lock", r"raised TypeError: .*This lock cannot be pickled .*\. Return numbers"),
        ("unreadable", "returned a value that cannot be unpickled: .*no such value"),
        ("unspeakable", "raised .*Unspeakable: 1 is not 2"),
    ],
)
def test_what_cannot_be_pickled_or_unpickled_is_an_error_of_its_rank(what: str, said: str, pool: Pool) -> None:
    with pytest.raises(RankFailed, match=f"^rank 1 {said}") as caught:
        pool.run(return_or_raise_on_1, 2, what)
    assert what == "lock" or caught.value.__cause__ is None


def test_a_failure_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(RankFailed("rank 1 died", 1, "trace")))
    assert (str(copy), copy.rank, copy.traceback) == ("rank 1 died", 1, "trace")


# -- bad input -------------------------------------------------------------------------------------------------


def test_what_no_rank_can_run_is_refused_before_a_process_starts(pool: Pool) -> None:
    with Pool(1) as closed:
        pass
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        *((partial(pool.run, own_rank, n), ValueError, f"1 or more. Got {n!r}.") for n in (0, -1, True)),
        (partial(pool.run, own_rank, 9), ValueError, "on 1 .. 8 ranks of this pool. Got 9."),
        (partial(pool.run, own_rank, 1, timeout_s=0), ValueError, "timeout_s must be positive, or None for no limit."),
        (partial(pool.run, own_rank, 1, timeout_s="9"), ValueError, "for no limit. Got '9'."),  # type: ignore[arg-type]
        (partial(pool.run, own_rank, 1, timeout_s=math.nan), ValueError, "timeout_s must be positive, or None"),
        (partial(launch, own_rank, 0), ValueError, "must be a whole number, 1 or more. Got 0."),
        (partial(launch, own_rank, "2"), ValueError, "1 or more. Got '2'."),  # type: ignore[arg-type]
        (partial(launch, 3, 2), TypeError, "must be the function to call on each rank. Got 3"),  # type: ignore[arg-type]
        (partial(launch, rank_and_arguments, 2, threading.Lock()), TypeError, "These cannot be pickled (cannot pickle"),
        (partial(closed.run, own_rank, 1), RuntimeError, "A closed pool cannot run tasks. Create a new Pool"),
    ]
    for call, error, said in refused:
        with pytest.raises(error, match=re.escape(said)):
            call()


def test_a_function_without_a_name_runs_with_cloudpickle(pool: Pool) -> None:
    pytest.importorskip("cloudpickle", reason="needs the extra ddp_loop[notebook]")
    three = 3
    assert pool.run(lambda: three, 2) == [3, 3]
    lock = threading.Lock()
    with pytest.raises(TypeError, match=re.escape("lock' object). Make it inside the function.")):
        pool.run(lambda: lock, 2)
