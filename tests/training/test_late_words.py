"""On a GPU the host waits for no other rank's fold: the control word is read late, and what it guarantees stays.

The ranks' sums of gradients hold up no host here, as with NCCL (`tests.support.launched_sums`), so a fold that returns
while another rank is held before its own did not wait for that rank's word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.both_exchanges import EXCHANGES
from tests.support.comparing import is_same
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.launched_sums import HELD_S, NOTHING_S, Sign, launched
from tests.support.refusals import Refused, loop_over, loss_of, network, samples
from tests.support.runs import checkpoints_of
from tests.support.training import sgd

pytestmark = [pytest.mark.covers("J13"), pytest.mark.on_gpus_too]

STEPS = 6
HELD = 3  # the step in which something happens on rank 1
QUIET: dict[str, Any] = {"check_replicas_every": 0, "on_nonfinite": "allow", "count": 6 * STEPS}


@pytest.fixture
def signs(tmp_path: Path) -> list[str]:
    """Names of pipes."""
    names = [str(tmp_path / f"sign {number}") for number in range(3)]
    for name in names:
        os.mkfifo(name)
    return names


@contextmanager
def signs_in(world: dl.World, names: list[str]) -> Iterator[tuple[Callable[[], None], Sign, Sign, Sign]]:
    """The signs, after what waits for the sums, which on a GPU hold up no host."""
    with ExitStack() as ending:
        late = world.accelerator.is_asynchronous
        settle = ending.enter_context(launched(world)).synchronize if late else lambda: None
        first, second, third = (ending.enter_context(closing(Sign(name))) for name in names)
        yield settle, first, second, third


def give(step: dl.Step, model: nn.Module) -> None:
    for rows in step:
        step.backward(loss_of(model, rows))


# -- what the host waits for ---------------------------------------------------------------------------------


def hold_rank_1_before_one_fold(signs: list[str]) -> list[bool]:
    """Whether rank 0, while rank 1 was held, returned from that fold, came to its next backward, and got past it."""
    seen = []
    with dl.join_world(timeout_s=20) as world, signs_in(world, signs) as (settle, has_folded, is_before, is_past):
        for step in loop_over(world, "", model := network(), **QUIET):
            is_next = world.rank == 0 and step.iteration == HELD + 1
            for rows in step:
                loss = loss_of(model, rows)
                if is_next:
                    is_before.give()
                step.backward(loss)
            if is_next:
                is_past.give()
            if world.rank == 1 and step.iteration == HELD:
                seen = [has_folded.came(), is_before.came(), is_past.came(NOTHING_S)]
            step.fold()
            if world.rank == 0 and step.iteration == HELD:
                has_folded.give()
            else:
                settle()
        return [*seen, is_past.came()] if seen else []


@pytest.mark.one_device(GPU, "on the CPU the word rides in the sum of the gradients")
def test_a_fold_returns_though_another_rank_has_not_come_to_it(signs: list[str], on_ranks: OnRanks) -> None:
    assert on_ranks(2, hold_rank_1_before_one_fold, signs)[1] == [True, True, False, True]


# -- errors that are found after the flag --------------------------------------------------------------------

FOUND = {
    "writes a parameter": "must stay as they are from a step's first shard to its fold",
    "takes a gradient away": "Gradients of a step's shards must stay as they are",
    "raises": "the script's own error",
}
PLACES = [
    ("writes a parameter", "the next step"),
    ("takes a gradient away", "a collective"),
    ("raises", "an evaluation"),
    ("raises", "a checkpoint"),
    ("takes a gradient away", "a checkpoint"),
    ("writes a parameter", "the end of the script"),
    ("raises", "the end of the script"),
]


def err_after_the_last_backward(model: nn.Module, how: str) -> None:
    if how == "writes a parameter":
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    elif how == "takes a gradient away":
        model.zero_grad()
    else:
        raise KeyError("the script's own error")


def go_wrong(world: dl.World, folder: str | None, how: str, place: str, signs: list[str]) -> None:
    late = world.accelerator.is_asynchronous
    steps = HELD if place == "the end of the script" else STEPS
    options = {"run_dir": folder, "count": 6 * steps, "save_every": HELD if place == "a checkpoint" else 100}
    with signs_in(world, signs) as (settle, has_folded, _, _):
        for step in loop_over(world, "", model := network(), **{**QUIET, **options}):
            give(step, model)
            if world.rank == 1 and step.iteration == HELD:
                assert not late or has_folded.came(), "rank 0 waited for the word of this pass"
                err_after_the_last_backward(model, how)
            step.fold()
            if step.iteration != HELD:
                settle()
                continue
            has_folded.give()
            if place == "a collective":
                world.sum(torch.ones(1))
            elif place == "an evaluation":
                dl.evaluate(model, dl.Batches(samples(4), 4, world), loss=loss_of)


@pytest.mark.covers("D10")
@pytest.mark.parametrize(("how", "place"), PLACES)
def test_an_error_after_the_flag_ends_all_ranks_wherever_they_are(
    how: str, place: str, signs: list[str], tmp_path: Path, refused: Refused
) -> None:
    kind = "KeyError" if how == "raises" else "RuntimeError"
    results = refused(2, go_wrong, how, place, signs, kind=kind, said=FOUND[how], by=1)
    stage = "backward" if how == "raises" else "fold"
    assert f"rank 1 failed in {stage} of step {HELD}" in results[0].text, results[0].text
    assert checkpoints_of(tmp_path / "run") == []  # none of a step with an error


def part(world: dl.World, folder: str, signs: list[str]) -> None:
    """Rank 1 takes the mini-batch after the one that the other rank takes."""
    late = world.accelerator.is_asynchronous
    model = network()
    fold = dl.Fold({"model": model}, dict(model.named_parameters(prefix="model")), world, shards=2)
    with signs_in(world, signs) as (_, has_folded, _, _):
        for iteration, loaded in enumerate(dl.Batches(samples(36), 6, world).epoch(1), 1):
            if world.rank == 1 and iteration == HELD:
                continue
            mini_batch = loaded.mini_batch
            fold.open()
            (shard,) = mini_batch.shards
            record = fold.begin_shard(shard)
            loss = loss_of(model, loaded.data(0))
            record.losses.append(loss.detach())
            fold.backward(record, loss, 0.5, last=True)
            fold.end_shard(record)
            if late and world.rank == 1 and iteration == HELD + 1:
                assert has_folded.came(), "rank 0 waited for the word of this pass"
            fold.close(mini_batch, iteration)
            if iteration == HELD:
                has_folded.give()


@pytest.mark.covers("D10")
def test_ranks_at_different_mini_batches_get_an_error(signs: list[str], refused: Refused) -> None:
    refused(2, part, signs, kind="ValueError", said="epoch and position of a step's mini-batch")


# -- what the update depends on is waited for ------------------------------------------------------------------


MISSING = "a parameter without a gradient"


class Varying(nn.Module):
    """Does something new in a forward where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.rest = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.other = nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.double()

    def forward(self, rows: torch.Tensor, news: str) -> torch.Tensor:
        hidden = self.norm(self.linear(rows))
        if news == "a second call":
            hidden = self.norm(hidden)
        if news == "a buffer":
            self.largest: torch.Tensor = torch.maximum(self.largest, rows.max())
        found: torch.Tensor = self.rest(hidden)
        return found if news == MISSING else found + self.other(rows)


NEWS = ("a second call", "a buffer", "a metric", MISSING, "an unfrozen parameter")


def error_of(model: nn.Module, rows: torch.Tensor, news: str) -> torch.Tensor:
    error: torch.Tensor = model(rows, news) - rows.sum(1, keepdim=True)
    return error.square().mean()


def meet_news(
    news: str, on: list[int], exchange: str, signs: list[str] | None = None, is_free: bool = False
) -> tuple[list[torch.Tensor | None], bool]:
    """The gradients after a step in which some ranks have news, with parameters and buffers at the end; and whether,
    with signs, rank 0's fold returned before rank 1 began its own, as if it `is_free` to."""
    with dl.join_world(seed=1, exchange=exchange, timeout_s=20) as world, ExitStack() as ending:
        settle, has_folded, _, _ = ending.enter_context(signs_in(world, signs)) if signs else (None,) * 4
        torch.manual_seed(5)
        model = Varying()
        returned = False
        gradients: list[torch.Tensor | None] = []
        optimizer = sgd(model)
        model.other.requires_grad_(news != "an unfrozen parameter")
        for step in loop_over(world, "", model, optimizer, buffer_reduction=LARGEST, **QUIET):
            is_held = step.iteration == HELD
            is_new = is_held and world.rank in on
            model.other.requires_grad_(news != "an unfrozen parameter" or step.iteration >= HELD)
            for rows in step:
                loss = error_of(model, rows, news if is_new else "")
                metrics: dict[str, Any] = {"extra": loss.detach()} if is_new and news == "a metric" else {}
                step.backward(loss, **metrics)
            if world.rank == 1 and is_held and has_folded is not None:
                returned = has_folded.came(HELD_S if is_free else NOTHING_S)
            step.fold()
            if is_held and has_folded is not None:
                has_folded.give()
            if settle is not None:
                settle()
            if is_held:
                gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
            optimizer.step()
        return [*gradients, *(one.detach().clone() for one in model.state_dict().values())], returned


LARGEST: dict[str, Any] = {"model.largest": "max"}
BY = [
    *((news, [rank]) for news in ("a second call", "a buffer", MISSING) for rank in (0, 1)),
    *((news, [0, 1]) for news in NEWS),
]


@pytest.mark.slow
@pytest.mark.one_device(GPU, "compares with the CPU, where every fold waits")
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("news", "on"), BY)
def test_a_fold_waits_for_the_news_of_a_rank_that_is_in_its_update(
    news: str, on: list[int], exchange: str, signs: list[str], on_ranks: OnRanks, on_cpus: OnRanks
) -> None:
    late = on_ranks(2, meet_news, news, on, exchange)
    known = on_cpus(2, meet_news, news, on, "gloo")
    for (found, _), (wanted, _) in zip(late, known, strict=True):
        assert [one is None for one in found] == [one is None for one in wanted]
        assert is_same(*([one for one in each if one is not None] for each in (found, wanted)))
    # A rank that has all gradients itself does not need those of the other rank.
    is_free = news == MISSING and 0 not in on
    assert on_ranks(2, meet_news, news, on, exchange, signs, is_free)[1][1] == is_free


def change_a_buffer_late(world: dl.World, folder: str) -> None:
    torch.manual_seed(5)
    model = Varying()
    for step in loop_over(world, folder, model, count=36, buffer_reduction=LARGEST):
        for rows in step:
            step.backward(model(rows, "").mean())
            if world.rank == 1 and step.iteration == HELD:
                model.largest += 1.0
        step.fold()


@pytest.mark.one_device(GPU, "on the CPU it is known in the fold")
def test_a_buffer_that_one_rank_changes_first_after_its_last_backward_is_an_error(refused: Refused) -> None:
    refused(2, change_a_buffer_late, kind="RuntimeError", said="for the first time: .*largest", by=1)


# -- requests ----------------------------------------------------------------------------------------------


def stop_at(place: str, folder: str) -> tuple[list[int], str]:
    """The steps that were made, and the digest of the parameters; resumes where the folder has a checkpoint."""
    made = []
    with dl.join_world(seed=1) as world:
        model = network()
        optimizer = sgd(model, 0.9)
        with suppress(dl.Stopped):
            loop = loop_over(world, folder, model, optimizer, count=36, check_replicas_every=0)

            def come_to(here: str) -> None:
                if here == place and world.rank == 1 and loop.iteration == HELD:
                    loop.stop()

            for step in loop:
                for rows in step:
                    come_to("in a shard")
                    step.backward(loss_of(model, rows))
                come_to("after the last backward")
                step.fold()
                come_to("after the fold")
                optimizer.step()
                made.append(step.iteration)
        return made, digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.covers("E5")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("place", ["in a shard", "after the last backward", "after the fold"])
def test_a_stop_comes_at_the_same_step_on_all_ranks(place: str, late: bool, tmp_path: Path, on_ranks: OnRanks) -> None:
    last = HELD if place == "in a shard" or (place == "after the last backward" and not late) else HELD + 1
    stopped = on_ranks(2, stop_at, place, str(tmp_path / "run"))
    assert [made for made, _ in stopped] == [list(range(1, last + 1))] * 2
    resumed = on_ranks(2, stop_at, "never", str(tmp_path / "run"))
    whole = on_ranks(2, stop_at, "never", str(tmp_path / "other"))
    assert [made for made, _ in resumed] == [list(range(last + 1, STEPS + 1))] * 2
    assert len({said for _, said in (*resumed, *whole)}) == 1
