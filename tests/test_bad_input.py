"""What a user does wrong with a step and a loop, and what is only unusual: one clear error on every rank, or exact.

Where an error is asked for, every rank raises it or PeerFailed with its words, within FAULT_S, as the project
promises; and the run folder holds whole lines only. Exact is within 1e-12 of a plain loop in float64: no sum
here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.harness import OnRanks, open_files

FAULT_S = 3.0
TIMEOUT_S = 20.0  # of the worlds here: what hangs in spite of all ends in a failed test, not in a stuck one
BOUND = 1e-12
ALL = -1  # every rank does it

Scenario = Callable[..., Any]


@dataclass(frozen=True)
class Caught:
    """What a rank raised, and after how many seconds."""

    kind: str
    text: str
    took_s: float


def on_this_rank(scenario: Scenario, folder: str, arguments: tuple[Any, ...], warm: bool = True) -> Caught:
    if warm:
        torch.optim.SGD([nn.Parameter(torch.ones(()))])  # a process's first imports torch._dynamo, for 3 s
    began = time.monotonic()
    try:
        with dl.join_world(timeout_s=TIMEOUT_S) as world:
            scenario(world, folder, *arguments)
    except BaseException as error:
        return Caught(type(error).__name__, str(error), time.monotonic() - began)
    return Caught("", "", time.monotonic() - began)


class Refused:
    """Runs a scenario on ranks and asks that all of them refuse it."""

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self._folder = on_ranks, folder

    def __call__(
        self, ranks: int, scenario: Scenario, *arguments: Any, kind: str, said: str, by: int | None = None
    ) -> list[Caught]:
        """`kind`: of the error, or `one|another`; `by`: the rank that raises it; ALL for all; None for some."""
        results = self._on_ranks(ranks, on_this_rank, scenario, str(self._folder), arguments)
        for rank, result in enumerate(results):
            own, peer = kind.split("|"), ["PeerFailed"]
            allowed = own if by in (ALL, rank) else peer if by is not None else own + peer
            assert result.kind in allowed, f"rank {rank}: {result}"
            assert re.search(said, result.text, re.DOTALL), f"rank {rank}: {result.text}"
            assert result.took_s < FAULT_S
        assert {result.kind for result in results} & set(kind.split("|"))
        assert_whole_lines(self._folder)
        return results


@pytest.fixture
def refused(on_ranks: OnRanks, tmp_path: Path) -> Refused:
    return Refused(on_ranks, tmp_path / "run")


def assert_whole_lines(folder: Path) -> None:
    path = folder / "rows.jsonl"
    if path.is_file() and (text := path.read_text()):
        assert text.endswith("\n")
        for number, line in enumerate(text.splitlines(), 1):
            assert json.loads(line)["iteration"] == number


# -- a small job -------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def observations(count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def loop_over(
    world: dl.World, folder: str, model: nn.Module, *more: object, count: int = 24, shards: int | None = None,
    **keywords: Any,
) -> dl.Loop:  # fmt: skip
    """4 steps of 6 observations."""
    batches = dl.Batches(observations(count), 6, world, shards=shards, shuffle=False)
    state = {"model": model, **{f"other {number}": one for number, one in enumerate(more)}}
    keywords = {"epochs": 1, "progress": False, "run": folder, **keywords}
    return dl.Loop(batches, state=state, **keywords)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(rows), rows.sum(1, keepdim=True))


def mean_of(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return output.mean()


def does_it(world: dl.World, culprit: int) -> bool:
    return culprit in (ALL, world.rank)


# -- an exception in one rank's loop -----------------------------------------------------------------------------


PLACES = ["before the step", "forward", "before fold", "after fold", "evaluate"]


def fail_at(
    world: dl.World, folder: str, place: str, culprit: int, error: type[BaseException], bucket_mib: float = 8.0
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail_here(here: str) -> None:
        if here == place and world.rank == culprit and (step is None or step.iteration == 3):
            raise error("a fault at the third step")

    def metric(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        fail_here("evaluate")
        return output.mean()

    def on_row(row: dict[str, Any]) -> None:
        fail_here("the row")

    step: dl.Step | None = None
    for step in loop_over(world, folder, model, optimizer, on_row=on_row, bucket_mib=bucket_mib):
        fail_here("before the step")
        for rows in step:
            fail_here("forward")
            step.backward(loss_of(model, rows))
        fail_here("before fold")
        step.fold()
        fail_here("after fold")
        optimizer.step()
        dl.evaluate(model, dl.Batches(observations(9), 4, world), mean=metric)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("bucket_mib", [8.0, 1e-5])  # one sum a step; a sum per parameter, begun in backward
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_one_ranks_loop_ends_all(place: str, bucket_mib: float, culprit: int, refused: Refused) -> None:
    said = "a fault at the third step"
    arguments = place, culprit, LookupError, bucket_mib
    results = refused(3, fail_at, *arguments, kind="LookupError", said=said, by=culprit)
    for rank, result in enumerate(results):
        if rank != culprit:
            assert result.text.startswith(f"rank {culprit} failed: LookupError: a fault at the third step")
            assert re.search(r"Traceback \(most recent call last\):\n.*in fail_here\n", result.text, re.DOTALL)


def fail_in_a_new_process(folder: str) -> Caught:
    return on_this_rank(fail_at, folder, ("forward", 1, LookupError), warm=False)


@pytest.mark.covers("D10")
@pytest.mark.slow
def test_an_exception_ends_all_also_where_the_first_optimizer_was_made_since_joining(tmp_path: Path) -> None:
    # It imports torch._dynamo, which keeps references to the process group, and with them the connections.
    first, second = dl.launch(fail_in_a_new_process, 2, str(tmp_path))
    assert (first.kind, second.kind) == ("PeerFailed", "LookupError")
    assert abs(first.took_s - second.took_s) < FAULT_S


@pytest.mark.covers("D10")
def test_an_exception_in_the_callback_of_rank_0_ends_all(refused: Refused) -> None:
    refused(3, fail_at, "the row", 0, LookupError, kind="LookupError", said="a fault at the third step", by=0)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_one_rank_that_is_interrupted_or_exits_ends_all(error: type[BaseException], refused: Refused) -> None:
    refused(2, fail_at, "forward", 1, error, kind=error.__name__, said="a fault at the third step", by=1)


class Unreadable(torch.utils.data.Dataset[torch.Tensor]):
    """Observation 13 cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise OSError("observation 13 is on a bad sector")
        return observations(24)[index]


def read_badly(world: dl.World, folder: str) -> None:
    model = network()
    loop = dl.Loop(dl.Batches(Unreadable(), 6, world, shuffle=False), 1, state={"model": model}, progress=False)
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D10")
def test_an_observation_that_cannot_be_read_ends_all(refused: Refused) -> None:
    refused(3, read_badly, kind="OSError", said="observation 13 is on a bad sector", by=0)


SCRIPT = """
import sys
import torch
import ddp_loop as dl

with dl.join_world(seed=0) as world:
    model = torch.nn.Linear(4, 1).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = dl.Batches(torch.ones(64, 4), 8, world)
    for step in dl.Loop(batches, 2, state=dict(model=model, optimizer=optimizer), run=sys.argv[2]):
        for rows in step:
            step.backward(model(rows).mean())
        if world.rank == 1 and step.iteration == 3:
            if sys.argv[1] == "raise":
                raise LookupError("the fault of rank 1 at step 3")
            sys.exit(0)
        step.fold()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("how", "said"), [("raise", "LookupError: the fault of rank 1 at step 3"), ("exit", "SystemExit: 0")]
)
def test_torchrun_ends_with_a_code_that_is_not_0_and_shows_the_culprit(how: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), how,
         str(tmp_path / "run")],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "rank 1 failed" in ended.stderr or how == "raise"
    assert_whole_lines(tmp_path / "run")


# -- a loop that cannot be made ----------------------------------------------------------------------------------


def make_loop(world: dl.World, folder: str, keywords: dict[str, Any]) -> None:
    loop_over(world, folder, network(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"epochs": 0}, "epochs must be a whole number, 1 or more; got 0"),
        ({"epochs": -3}, "got -3"),
        ({"epochs": 1.5}, r"got 1\.5"),
        ({"epochs": None, "steps": 0}, "steps must be a whole number, 1 or more; got 0"),
        ({"epochs": None}, "a Loop needs an end; give epochs or steps"),
        ({"bucket_mib": 0.0}, "bucket_mib"),
        ({"bucket_mib": -1.0}, "bucket_mib"),
        ({"bucket_mib": float("nan")}, "bucket_mib"),
        ({"buffers": {"model.0.nothing": "mean"}}, r"got 'model\.0\.nothing': 'mean'; there are \[\]"),
    ],
)
def test_a_loop_that_makes_no_sense_is_refused(keywords: dict[str, Any], said: str, refused: Refused) -> None:
    refused(2, make_loop, keywords, kind="ValueError", said=said, by=ALL)


def make_loop_of(world: dl.World, folder: str, state: dict[str, Any]) -> None:
    dl.Loop(dl.Batches(observations(8), 4, world), 1, state=state, run=folder, progress=False)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "state must hold a module or an optimizer with parameters to train"),
        ({"model": nn.Tanh()}, r"got \['model'\] without any"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "parameters to train"),
        ({"model": nn.LazyLinear(2)}, "needs a shape before the Loop is made; model.weight has none: run the model"),
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
    dl.Loop(dl.Batches(observations(8), 4, world), 1, state={"model": model}, run=folder, progress=False)


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
    [({"epochs": 1}, {"epochs": 2}), ({"steps": 2}, {"steps": 3}), ({"bucket_mib": 8.0}, {"bucket_mib": 1e-4})],
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


def use_one_rows(world: dl.World, folder: str, count: int, keywords: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    loop_over(world, folder, model, count=count, **keywords)


@pytest.mark.parametrize(("count", "ranks"), [(24 + 2, 2), (24 + 3, 2), (24 + 1, 1)])
def test_a_shard_of_one_row_under_batch_norm_is_refused_when_the_loop_is_made(
    count: int, ranks: int, refused: Refused
) -> None:
    said = "mini-batch 5 of an epoch has .* observations over .*model.1 is BatchNorm1d: take another batch_size"
    refused(ranks, use_one_rows, count, {}, kind="ValueError", said=said, by=ALL)


def put_a_file_in_the_way(world: dl.World, folder: str, what: str) -> None:
    with world.first():
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


def go_through_twice(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, model := network())
    for _ in range(2):
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()


def test_a_loop_is_gone_through_once(refused: Refused) -> None:
    refused(2, go_through_twice, kind="RuntimeError", said="a Loop is gone through once; .* make another", by=ALL)


# -- a step gone through wrongly ---------------------------------------------------------------------------------


def misuse(world: dl.World, folder: str, how: str, culprit: int, shards: int | None) -> None:
    """At the third step, some ranks do it wrongly."""
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        wrong = how if does_it(world, culprit) and step.iteration == 3 else ""
        go_through(step, model, wrong)
        if wrong == "backward outside":
            step.backward(loss_of(model, observations(3)))
        if wrong == "pass twice":
            next(iter(step))
        if wrong != "no fold":
            step.fold()
        if wrong == "fold twice":
            step.fold()


def go_through(step: dl.Step, model: nn.Module, wrong: str) -> None:
    for rows in step if wrong != "no pass" else ():
        if wrong == "continue":
            continue
        if wrong == "break":
            break
        if wrong.startswith("caught"):
            with suppress(MemoryError):
                if wrong == "caught in backward":
                    explode(step, model, rows)
                raise MemoryError("out of memory")
            continue
        step.backward(loss_of(model, rows), more=wrong == "always more")
        if wrong == "twice":
            step.backward(loss_of(model, rows))
        if wrong == "break after":
            break


def explode(step: dl.Step, model: nn.Module, rows: torch.Tensor) -> None:
    """Run out of memory half way through backward."""
    hidden = model[1](model[0](rows))  # type: ignore[index]
    hidden.register_hook(run_out)
    step.backward(mse_loss(model[2](hidden), rows.sum(1, keepdim=True)))  # type: ignore[index]


def run_out(gradient: torch.Tensor) -> None:
    raise MemoryError("out of memory in backward")


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("continue", r"step\.backward is called for every shard; step 3 left out \[.*\] of its . shards"),
        ("break", r"step\.backward is called for every shard; step 3 left out"),
        ("caught", r"step\.backward is called for every shard; step 3 left out"),
        ("always more", r"step\.backward is called for every shard; step 3 left out"),
        ("no pass", r"fold\(\) comes after a pass over the shards; step 3 had none"),
        ("twice", r"step\.backward is called once for each shard; this call is its second: say more=True"),
        ("backward outside", r"step\.backward is called once for each shard; this call is outside of"),
        ("pass twice", r"each pass over the shards ends with fold\(\); step 3 was gone through again"),
        ("no fold", r"every step ends with step\.fold\(\), before the next one begins; step 3 was left without"),
        ("fold twice", r"fold\(\) comes after a pass over the shards; step 3 had none since its last fold"),
    ],
)
def test_a_step_gone_through_wrongly_is_refused_on_every_rank(
    how: str, said: str, culprit: int, shards: int | None, refused: Refused
) -> None:
    refused(2, misuse, how, culprit, shards, kind="RuntimeError", said=said, by=culprit)


@pytest.mark.parametrize("culprit", [ALL, 1])
def test_a_break_after_the_first_of_several_shards_is_refused(culprit: int, refused: Refused) -> None:
    refused(2, misuse, "break after", culprit, 6, kind="RuntimeError", said="step 3 left out", by=culprit)


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
def test_an_error_of_backward_that_is_caught_is_refused(culprit: int, refused: Refused) -> None:
    said = "step 3 left out"
    refused(2, misuse, "caught in backward", culprit, None, kind="RuntimeError", said=said, by=culprit)


def leave_the_last_step(world: dl.World, folder: str, culprit: int) -> None:
    for step in loop_over(world, folder, model := network()):
        for rows in step:
            step.backward(loss_of(model, rows))
        if not (does_it(world, culprit) and step.iteration == 4):
            step.fold()


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
def test_the_last_step_without_fold_is_refused_too(culprit: int, refused: Refused) -> None:
    refused(2, leave_the_last_step, culprit, kind="RuntimeError", said="step 4 was left without it", by=culprit)


def leave_the_loop_early(world: dl.World, folder: str, culprit: int, then: str) -> None:
    for step in loop_over(world, folder, model := network()):
        if does_it(world, culprit) and step.iteration == 3:
            break
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
    if then == "evaluate":
        dl.evaluate(model, dl.Batches(observations(6), 3, world), mean=mean_of)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("then", ["evaluate", "end"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_that_leaves_the_loop_alone_ends_all_with_an_error(
    culprit: int, then: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    results = on_ranks(2, on_this_rank, leave_the_loop_early, str(tmp_path / "run"), (culprit, then))
    assert results[1 - culprit].kind == "PeerFailed", results
    assert max(result.took_s for result in results) < FAULT_S


@pytest.mark.parametrize("then", ["evaluate", "end"])
def test_all_ranks_may_leave_the_loop_early_together(then: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    results = on_ranks(2, on_this_rank, leave_the_loop_early, str(tmp_path / "run"), (ALL, then))
    assert [result.kind for result in results] == ["", ""], results
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 2


def evaluate_inside(world: dl.World, folder: str, where: str) -> None:
    model = network()
    test = dl.Batches(observations(5), 2, world, shuffle=False)
    # every layer a bucket of its own: the sums of this step begin while backward goes on
    for step in loop_over(world, folder, model, count=19, bucket_mib=1e-5):
        for rows in step:
            if where == "in the shard":
                dl.evaluate(model, test, mean=mean_of)
            step.backward(loss_of(model, rows))
        if where == "before fold":
            dl.evaluate(model, test, mean=mean_of)
        step.fold()


@pytest.mark.parametrize("where", ["in the shard", "before fold"])
def test_evaluation_inside_of_an_unfolded_step_is_refused_where_ranks_could_be_at_different_places(
    where: str, refused: Refused
) -> None:
    refused(3, evaluate_inside, where, kind="RuntimeError", said="fold")


# -- a backward with wrong things --------------------------------------------------------------------------------


BAD_CALLS: dict[str, tuple[Callable[[dl.Step, nn.Module, torch.Tensor], None], str, str]] = {
    "a loss per observation": (
        lambda step, model, rows: step.backward(model(rows).squeeze(1)),
        "ValueError",
        r"a loss must be a tensor of shape \(\).* got shape \(\d,\): take its mean",
    ),
    "a loss of shape (1,)": (lambda s, m, r: s.backward(loss_of(m, r).reshape(1)), "ValueError", r"got shape \(1,\)"),
    "a number as loss": (lambda s, m, r: s.backward(loss_of(m, r).item()), "ValueError", "got float"),  # type: ignore[arg-type]
    "no loss": (lambda s, m, r: s.backward(None), "ValueError", "got NoneType"),  # type: ignore[arg-type]
    "a detached loss": (lambda s, m, r: s.backward(loss_of(m, r).detach()), "ValueError", "must need a gradient"),
    "an integer loss": (lambda s, m, r: s.backward(torch.tensor(3)), "ValueError", "must need a gradient"),
    "a negative weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=-1.0), "ValueError", r"or more; got -1\.0"),
    "a nan weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=float("nan")), "ValueError", "got nan"),
    "an infinite weight": (lambda s, m, r: s.backward(loss_of(m, r), weight=float("inf")), "ValueError", "got inf"),
    "a negative weight in a tensor": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.tensor(-2.0)),
        "ValueError",
        "weight must be a finite number, 0 or more; got",
    ),
    "a nan weight in a tensor": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.tensor(float("nan"))),
        "ValueError",
        "weight must be a finite number, 0 or more; got",
    ),
    "a weight per observation": (
        lambda s, m, r: s.backward(loss_of(m, r), weight=torch.ones(len(r))),
        "ValueError",
        r"weight must be one value; got shape \(\d,\)",
    ),
    "a word as weight": (
        lambda s, m, r: s.backward(loss_of(m, r), weight="2"),  # type: ignore[arg-type]
        "ValueError|TypeError",
        "weight must be",
    ),
    "another reduction": (
        lambda s, m, r: s.backward(loss_of(m, r), reduction="none"),  # type: ignore[arg-type]
        "ValueError",
        '"mean" or "sum"; got \'none\'',
    ),
    "a metric of a wrong shape": (
        lambda s, m, r: s.backward(loss_of(m, r), error=m(r)),
        "ValueError",
        r"a metric must be one value.*error has shape \(\d, 1\)",
    ),
    "a metric for more observations": (
        lambda s, m, r: s.backward(loss_of(m, r), error=torch.ones(len(r) + 1)),
        "ValueError",
        r"error has shape",
    ),
    "a word as metric": (lambda s, m, r: s.backward(loss_of(m, r), error="big"), "ValueError|TypeError", "error"),  # type: ignore[arg-type]
    "no metric": (lambda s, m, r: s.backward(loss_of(m, r), error=None), "ValueError|TypeError", "error"),  # type: ignore[arg-type]
    "torch's own keyword": (lambda s, m, r: s.backward(loss_of(m, r), retain_graph=True), "ValueError", "retain_graph"),
    "a metric with a row's name": (lambda s, m, r: s.backward(loss_of(m, r), epoch=3.0), "ValueError", "epoch"),
    "two weights of one shard": (
        lambda s, m, r: (s.backward(loss_of(m, r), weight=2.0, more=True), s.backward(loss_of(m, r), weight=3.0))[0],  # type: ignore[func-returns-value]
        "ValueError",
        "weight",
    ),
}


def call_badly(world: dl.World, folder: str, how: str, culprit: int) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        for rows in step:
            if does_it(world, culprit) and step.iteration == 3:
                BAD_CALLS[how][0](step, model, rows)
            else:
                step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("culprit", [ALL, 1])
@pytest.mark.parametrize("how", BAD_CALLS)
def test_a_backward_with_wrong_things_is_refused(how: str, culprit: int, refused: Refused) -> None:
    _, kind, said = BAD_CALLS[how]
    refused(2, call_badly, how, culprit, kind=kind, said=said, by=culprit)


def name_metrics(world: dl.World, folder: str, differing: str, at: int) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=4):
        for number, rows in enumerate(step):
            odd = step.iteration == at and (world.rank == 1 if differing == "ranks" else number == 1)
            metrics: dict[str, Any] = {"extra": 1.0} if odd else {"usual": 1.0}
            step.backward(loss_of(model, rows), **metrics)
        step.fold()


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("differing", "by"), [("shards", ALL), ("ranks", None)])
def test_metric_names_that_differ_are_refused(differing: str, by: int | None, at: int, refused: Refused) -> None:
    said = r"every shard must come with the same metrics; .*\['usual'\].*\['extra'\]"
    refused(2, name_metrics, differing, at, kind="ValueError", said=said, by=by)


def order_metrics(world: dl.World, folder: str) -> None:
    model = network()
    for step in loop_over(world, folder, model):
        for rows in step:
            metrics: dict[str, Any] = {"one": 1.0, "two": 2.0} if world.rank else {"two": 2.0, "one": 1.0}
            step.backward(loss_of(model, rows), **metrics)
        found = {name: value.item() for name, value in step.fold().metrics.items()}
        assert found == {"one": 1.0, "two": 2.0}


def test_metrics_in_another_order_are_the_same_metrics(on_ranks: OnRanks, tmp_path: Path) -> None:
    for result in on_ranks(2, on_this_rank, order_metrics, str(tmp_path), ()):
        assert result.kind == "", result


# -- a model that changes while it trains ------------------------------------------------------------------------


def change_in_mid_run(world: dl.World, folder: str, what: str, culprit: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 1))
    batches = dl.Batches(torch.ones(24, 2, 3, 3), 6, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run=folder, progress=False):
        if step.iteration == 3 and does_it(world, culprit):
            if what == "channels_last":
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            elif what == "dtype":
                model.double()
            elif what == "freeze":
                model[2].requires_grad_(False)
            else:
                model[0].requires_grad_(True)
        if step.iteration == 1 and what == "unfreeze":
            model[0].requires_grad_(False)
        for images in step:
            step.backward(model(images.to(model[0].weight.dtype)).mean())
        step.fold()


@pytest.mark.parametrize("culprit", [ALL, 0, 1])
@pytest.mark.parametrize("what", ["channels_last", "dtype"])
def test_a_parameter_that_changes_its_form_in_mid_run_is_refused(what: str, culprit: int, refused: Refused) -> None:
    said = "a parameter keeps its dtype and memory format once training has begun; model.0.weight had"
    refused(2, change_in_mid_run, what, culprit, kind="RuntimeError", said=said, by=culprit)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("what", ["freeze", "unfreeze"])
def test_a_layer_frozen_or_unfrozen_on_one_rank_alone_is_refused(what: str, culprit: int, refused: Refused) -> None:
    said = "same parameters must want a gradient on every rank"
    refused(2, change_in_mid_run, what, culprit, kind="ValueError", said=said)


def embed_sparsely(world: dl.World, folder: str, culprit: int) -> None:
    model = nn.Embedding(5, 3, sparse=does_it(world, culprit))
    batches = dl.Batches(torch.arange(12) % 5, 6, world)
    for step in dl.Loop(batches, 1, state={"model": model}, run=folder, progress=False):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()


@pytest.mark.parametrize("culprit", [ALL, 1])
def test_sparse_gradients_are_refused_with_the_remedy(culprit: int, refused: Refused) -> None:
    said = "gradients must be dense .* make the embedding with sparse=False"
    refused(2, embed_sparsely, culprit, kind="ValueError", said=said, by=culprit)


class Counting(nn.Module):
    """Counts in an integer buffer: its forwards, or the observations that it has seen."""

    seen: torch.Tensor

    def __init__(self, observations: bool) -> None:
        super().__init__()
        self.layer = network()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self._observations = observations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x) if self._observations else 1
        return self.layer(x)  # type: ignore[no-any-return]


def count(world: dl.World, folder: str, each: bool, keywords: dict[str, Any]) -> int:
    model = Counting(each)
    for step in loop_over(world, folder, model, count=23, **keywords):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
    return int(model.seen)


@pytest.mark.covers("D6")
def test_an_integer_buffer_that_shards_change_differently_is_refused_by_name(refused: Refused) -> None:
    said = r'a buffer of the rule "same" must be changed alike .* model\.seen .* was changed by 2, 2, 1, 0?'
    refused(3, count, True, {"shards": 4}, kind="ValueError", said=said, by=ALL)


def count_in_a_world(each: bool, keywords: dict[str, Any]) -> int:
    with dl.join_world() as world:
        return count(world, "", each, {"run": None, **keywords})


@pytest.mark.covers("D6")
@pytest.mark.parametrize(
    ("each", "policy", "expected"),
    [(False, None, [4, 4, 4]), (True, "first", [8, 8, 8]), (False, "first", [4, 4, 4])],
)
def test_integer_buffers_without_batch_norm_are_alike_on_all_ranks(
    each: bool, policy: str | None, expected: list[int], on_ranks: OnRanks
) -> None:
    keywords = {} if policy is None else {"buffers": {"model.seen": policy}}
    assert on_ranks(3, count_in_a_world, each, keywords) == expected


@pytest.mark.covers("D6")
def test_a_word_that_is_no_rule_is_refused(refused: Refused) -> None:
    said = r"to one of .* got 'model\.seen': 'sum'; there are \['model\.seen'\]"
    refused(2, count, False, {"buffers": {"model.seen": "sum"}}, kind="ValueError", said=said, by=ALL)


# -- unusual, and right ------------------------------------------------------------------------------------------


Trained = dict[str, list[float]]


def values_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def plain_steps(model: nn.Module, count: int = 24) -> Iterator[torch.Tensor]:
    """The plain loop's mini-batches, with the gradients of `model` in place."""
    for rows in observations(count).split(6):
        model.zero_grad()
        loss_of(model, rows).backward()
        yield rows


def assert_close(results: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for rank, result in enumerate(results):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert (one - other).abs().max() <= BOUND * max(1.0, float(other.abs().max())), f"rank {rank}"


def train_usually(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in plain_steps(model):
        optimizer.step()
    return values_of(model)


def zero_gradients(where: str, shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, shards=shards, run=None):
            if where == "before the shards":
                optimizer.zero_grad()
            for rows in step:
                if where == "before each backward":
                    optimizer.zero_grad()
                step.backward(loss_of(model, rows))
            if where == "before fold":
                optimizer.zero_grad(set_to_none=step.iteration % 2 == 0)
            step.fold()
            optimizer.step()
            if where == "after the step":
                optimizer.zero_grad(set_to_none=step.iteration % 2 == 0)
        return values_of(model)


@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize("where", ["before the shards", "after the step"])
def test_zero_grad_between_the_steps_changes_nothing(where: str, shards: int | None, on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, zero_gradients, where, shards), train_usually(network()))


def test_zero_grad_before_the_only_shards_backward_changes_nothing(on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, zero_gradients, "before each backward", None), train_usually(network()))


def zero_in_the_step(world: dl.World, folder: str, where: str) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=6):
        for rows in step:
            if where == "before each backward":
                model.zero_grad()
            step.backward(loss_of(model, rows))
        if where == "before fold":
            model.zero_grad()
        step.fold()


@pytest.mark.parametrize("where", ["before each backward", "before fold"])
def test_zero_grad_that_loses_a_shards_gradient_is_refused(where: str, refused: Refused) -> None:
    refused(2, zero_in_the_step, where, kind="RuntimeError", said="zero_grad")


def clip() -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run=None):
            for rows in step:
                step.backward(loss_of(model, rows))
            norm = step.fold().gradient_norm
            clipped = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert abs(float(norm - clipped)) <= BOUND * float(norm)
            optimizer.step()
        return values_of(model)


def test_clipping_after_fold_clips_the_whole_mini_batchs_gradient(on_ranks: OnRanks) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in plain_steps(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_close(on_ranks(3, clip), values_of(model))


def add_a_group(where: str, differing: bool) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, head = network(), nn.Linear(4, 1).double()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(0.5 if differing and world.rank > 0 else 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run=None):
            if step.iteration == 2 and where == "before the shards":
                optimizer.add_param_group({"params": list(head.parameters())})
            for rows in step:
                added = head(rows) if len(optimizer.param_groups) == 2 else 0.0
                step.backward(mse_loss(model(rows) + added, rows.sum(1, keepdim=True)))
            step.fold()
            optimizer.step()
            if step.iteration == 1 and where == "after the step":
                optimizer.add_param_group({"params": list(head.parameters())})
        return values_of(model, head)


def plain_with_a_group() -> list[torch.Tensor]:
    model, head = network(), nn.Linear(4, 1).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, rows in enumerate(observations(24).split(6), 1):
        if number == 2:
            optimizer.add_param_group({"params": list(head.parameters())})
        optimizer.zero_grad()
        added = head(rows) if len(optimizer.param_groups) == 2 else 0.0
        mse_loss(model(rows) + added, rows.sum(1, keepdim=True)).backward()
        optimizer.step()
    return values_of(model, head)


@pytest.mark.parametrize("differing", [False, True])
@pytest.mark.parametrize("where", ["after the step", "before the shards"])
def test_a_group_added_in_mid_run_is_trained_as_in_the_plain_loop(
    where: str, differing: bool, on_ranks: OnRanks
) -> None:
    assert_close(on_ranks(3, add_a_group, where, differing), plain_with_a_group())


def add_a_group_on_one(world: dl.World, folder: str, where: str) -> None:
    model, head = network(), nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loop_over(world, folder, model, optimizer):
        if step.iteration == 2 and world.rank == 1 and where == "before the shards":
            optimizer.add_param_group({"params": list(head.parameters())})
        for rows in step:
            step.backward(mse_loss(model(rows) + head(rows), rows.sum(1, keepdim=True)))
        step.fold()
        if step.iteration == 1 and world.rank == 1 and where == "after the step":
            optimizer.add_param_group({"params": list(head.parameters())})


@pytest.mark.parametrize("where", ["after the step", "before the shards"])
def test_a_group_added_on_one_rank_alone_is_refused(where: str, refused: Refused) -> None:
    refused(2, add_a_group_on_one, where, kind="ValueError", said="same parameters must want a gradient")


def norm_network() -> nn.Sequential:
    model = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(6).double(), model[1], model[2])


def check_copy(model: nn.Module) -> None:
    """A copy is an ordinary module: in training its statistics move as torch moves them."""
    plain = norm_network()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.train()
        one(observations(5))
    for (name, value), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, other), f"{name} of the copy"


def copy_and_move(what: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        copies: list[nn.Module] = []
        for step in loop_over(world, "", model, optimizer, run=None):
            for number, rows in enumerate(step):
                if what == "deepcopy in the shard" and number == 0:
                    copies.append(copy.deepcopy(model))
                step.backward(loss_of(model, rows))
            if what == "deepcopy before fold":
                copies.append(copy.deepcopy(model))
            step.fold()
            optimizer.step()
            if what == "deepcopy":
                copies.append(copy.deepcopy(model))
                copies.append(torch.optim.swa_utils.AveragedModel(model))
            if what == "pickle":
                copies.append(pickle.loads(pickle.dumps(model)))
            if what == "to the same device":
                model.to(world.device).double().train()
            if what == "load_state_dict":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        for other in copies:
            check_copy(other.module if isinstance(other, torch.optim.swa_utils.AveragedModel) else other)
        return [*values_of(model), model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")]


@pytest.mark.parametrize(
    "what",
    ["deepcopy", "pickle", "deepcopy in the shard", "deepcopy before fold", "to the same device", "load_state_dict"],
)
def test_copying_or_moving_the_model_in_mid_run_changes_nothing(what: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, copy_and_move, "nothing")
    assert_close(on_ranks(2, copy_and_move, what), expected[0])


def save_and_load() -> bool:
    with dl.join_world() as world:
        model = norm_network()
        for step in loop_over(world, "", model, run=None):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            saved = copy.deepcopy(model.state_dict())
            norm_network().load_state_dict(saved)
        return all("ddp" not in name for name in saved)


def test_the_models_state_dict_is_a_plain_one(on_ranks: OnRanks) -> None:
    assert on_ranks(2, save_and_load) == [True, True]


def share_a_graph(how: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, run=None, shards=4):
            for rows in step:
                if how == "one trunk":
                    output = model(rows)
                    half = mse_loss(output, rows.sum(1, keepdim=True)) / 2
                    step.backward(half, more=True)
                    step.backward(mse_loss(output, rows.sum(1, keepdim=True)) / 2)
                else:
                    step.backward(loss_of(model, rows) / 2, more=True)
                    step.backward(loss_of(model, rows) / 2)
            step.fold()
            optimizer.step()
        return values_of(model)


@pytest.mark.parametrize("how", ["two forwards", "one trunk"])
def test_several_losses_of_a_shard_add_up(how: str, on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, share_a_graph, how), train_usually(network()))


def two_loops(how: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, other = norm_network(), norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        second = model if how in ("one model", "one after the other") else other
        inner_optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        outer = loop_over(world, "", model, optimizer, run=None)
        if how == "one after the other":
            train_in(outer, model, optimizer)
            train_in(loop_over(world, "", model, inner_optimizer, run=None), model, inner_optimizer)
            return [*values_of(model), model.get_buffer("1.running_mean")]
        inner = iter(loop_over(world, "", second, inner_optimizer, run=None))
        for step in outer:
            for network_, optimizer_, one in ((model, optimizer, step), (second, inner_optimizer, next(inner))):
                for rows in one:
                    one.backward(loss_of(network_, rows))
                one.fold()
                optimizer_.step()
        assert next(inner, None) is None
        return [*values_of(model), model.get_buffer("1.running_mean")]


def train_in(loop: dl.Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()


def plain_norm(rounds: int, again: int) -> list[torch.Tensor]:
    model = norm_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(rounds):
        for rows in observations(24).split(6):
            for _ in range(again):
                optimizer.zero_grad()
                loss_of(model, rows).backward()
                optimizer.step()
    return [*values_of(model), model.get_buffer("1.running_mean")]


@pytest.mark.parametrize(
    ("how", "rounds", "again"), [("one after the other", 2, 1), ("two models", 1, 1), ("one model", 1, 2)]
)
def test_two_loops_do_not_disturb_each_other(how: str, rounds: int, again: int, on_ranks: OnRanks) -> None:
    # one shard in all, so that batch norm sees the whole mini-batch as in the plain loop
    assert_close(on_ranks(1, two_loops, how), plain_norm(rounds, again))


@pytest.mark.parametrize("how", ["one after the other", "two models", "one model"])
def test_two_loops_on_two_ranks_agree(how: str, on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, two_loops, how)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def own_backward_beside() -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, critic = network(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, run=None):
            for rows in step:
                inputs = rows.clone().requires_grad_(True)
                torch.autograd.grad(model(inputs).sum(), inputs)  # a gradient by the inputs, as in a penalty
                critic(rows).sum().backward()
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
        return values_of(model)


def test_gradients_that_are_not_the_steps_are_left_alone(on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, own_backward_beside), train_usually(network()))


def evaluate_between(where: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        test = dl.Batches(observations(5), 2, world, shuffle=False)
        for step in loop_over(world, "", model, optimizer, run=None, bucket_mib=1e-5):
            if where == "before the step":
                dl.evaluate(model, test, mean=mean_of)
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            if where == "after fold":
                dl.evaluate(model, test, mean=mean_of)
            optimizer.step()
        return [*values_of(model), model.get_buffer("1.running_mean")]


@pytest.mark.parametrize("where", ["before the step", "after fold"])
def test_evaluation_between_steps_changes_nothing(where: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(3, evaluate_between, "nowhere")
    assert_close(on_ranks(3, evaluate_between, where), expected[0])


# -- devices -----------------------------------------------------------------------------------------------------


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
        assert result.took_s < FAULT_S
