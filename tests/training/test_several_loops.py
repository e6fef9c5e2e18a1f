"""Several Loops of a script, one in another or one after the other: whose evaluations are recorded, and which."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.elastic.rank import ADVICE, START
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, mean_of, network, on_this_rank, samples
from tests.support.runs import lines_of
from tests.support.training import take


def train_a_probe(world: dl.World, folder: str | None, leave_at: int = 0) -> None:
    probe = network()
    for step in loop_over(world, folder, probe):
        take(step, probe)
        if step.iteration == leave_at:
            break


def evaluate(world: dl.World, model: nn.Module) -> None:
    dl.evaluate(model, dl.Batches(samples(7), 3, world, shuffle=False), mean=mean_of)


def recorded(folder: Path) -> list[tuple[int, int]]:
    path = folder / "evaluations.jsonl"
    return [(line["epoch"], line["iteration"]) for line in lines_of(path)] if path.exists() else []


@pytest.mark.parametrize("leave_at", [0, 2])
@pytest.mark.parametrize("has_folder", [False, True])
def test_after_an_inner_loop_evaluations_are_the_outer_ones_again(
    has_folder: bool, leave_at: int, tmp_path: Path
) -> None:
    model = network()
    with dl.join_world() as world:
        evaluations = 0
        for epoch in loop_over(world, str(tmp_path / "outer"), model, epochs=2).epochs():
            for step in epoch:
                take(step, model)
                if step.iteration == 6:
                    train_a_probe(world, None, leave_at)
                    assert (world.stage, world.step) == ("optimizer", 6)
                    evaluate(world, model)
            for _ in range(2):
                train_a_probe(world, str(tmp_path / f"inner-{evaluations}") if has_folder else None, leave_at)
                evaluations += 1
            evaluate(world, model)
        train_a_probe(world, None)
        nn.init.ones_(next(model.parameters()))
        evaluate(world, model)  # none is open
    assert recorded(tmp_path / "outer") == [(1, 4), (2, 6), (2, 8)]
    assert not any(recorded(folder) for folder in tmp_path.glob("inner-*"))


@pytest.mark.parametrize("at_once", [False, True])
def test_of_loops_that_are_made_first_each_gets_its_own_evaluations(at_once: bool, tmp_path: Path) -> None:
    models = [network(), network()]
    with dl.join_world() as world:
        loops = [loop_over(world, str(tmp_path / str(n)), model) for n, model in enumerate(models)]
        evaluate(world, models[0])  # before either begins the newest one's
        if at_once:
            for steps in zip(*loops, strict=True):
                for step, model in zip(steps, models, strict=True):
                    take(step, model)
            nn.init.ones_(next(models[1].parameters()))
            evaluate(world, models[1])
        else:
            for loop, model in zip(loops, models, strict=True):
                for step in loop:
                    take(step, model)
                nn.init.ones_(next(model.parameters()))
                evaluate(world, model)
    assert recorded(tmp_path / "0") == ([] if at_once else [(1, 4)])
    assert recorded(tmp_path / "1") == [(0, 0), (1, 4)]


# -- evaluations of a random model, in a run that resumes ----------------------------------------------------


class Noise(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.randn_like(rows)


def noisy_means(folder: Path, *, has_probe: bool = False, leave_after: int = 0, **extent: Any) -> list[Any]:
    """The evaluations in a run's folder, two after each epoch, the second one after an inner loop if there is one."""
    with dl.join_world(seed=3) as world:
        model = network()
        noisy = nn.Sequential(model, Noise())
        for epoch in loop_over(world, str(folder), model, **extent).epochs():
            for step in epoch:
                take(step, model)
            evaluate(world, noisy)
            if has_probe:
                train_a_probe(world, None)
                assert (world.stage, world.step) == ("", 4 * epoch.number)
            evaluate(world, noisy)
            if epoch.number == leave_after:
                break
        assert world.step == (4 if leave_after else 0)
    return [(line["iteration"], line["mean"]) for line in lines_of(folder / "evaluations.jsonl")]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"epochs": 1}, {"epochs": 2}),
        ({"epochs": 2, "leave_after": 1}, {"epochs": 2}),
        ({"epochs": None, "steps": 6}, {"epochs": None, "steps": 6}),
        ({"epochs": 2, "has_probe": True, "leave_after": 1}, {"epochs": 2, "has_probe": True}),
    ],
    ids=["one more epoch", "left between epochs", "finished by steps", "with an inner loop"],
)
def test_a_resumed_run_repeats_random_evaluations(first: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    whole = noisy_means(tmp_path / "whole", **then)
    assert [at for at, _ in whole] == [4, 4, then.get("steps", 8), then.get("steps", 8)]
    assert len({mean for _, mean in whole}) == 4
    noisy_means(tmp_path / "parts", **first)
    assert noisy_means(tmp_path / "parts", **then) == whole


# -- two phases in one folder --------------------------------------------------------------------------------


def after_epochs_of_phases(folder: Path, leave_at: int = 0) -> list[tuple[int, int]]:
    """After which epochs of a first loop of one epoch, and a second one of three, the script's lines ran."""
    lines: list[tuple[int, int]] = []
    with dl.join_world() as world:
        model = network()
        for phase, epochs in ((1, 1), (2, 3)):
            for epoch in loop_over(world, str(folder), model, epochs=epochs).epochs():
                for step in epoch:
                    take(step, model)
                    if step.iteration == leave_at:
                        return lines
                lines.append((phase, epoch.number))
    return lines


def test_the_first_of_two_loops_does_not_repeat_the_lines_after_an_epoch_of_the_second(tmp_path: Path) -> None:
    assert after_epochs_of_phases(tmp_path, leave_at=10) == [(1, 1), (2, 1), (2, 2)]
    assert after_epochs_of_phases(tmp_path) == [(2, 2), (2, 3)]
    assert after_epochs_of_phases(tmp_path) == [(2, 3)]


# -- random numbers --------------------------------------------------------------------------------------------

Draws = list[tuple[str, int, float]]  # where, in which loop, and the number


def noise(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.rand(len(rows))


def draws_of_loops(folder: str | None, leave_in: int = -1) -> tuple[Draws, list[int]]:
    """Numbers of a script with three loops in a row, each with an inner loop after its first step, and their seeds.

    It is left in the second step of loop number `leave_in`; then the result is what came before.
    """
    drawn: Draws = []
    seeds: list[int] = []

    def run(name: str, number: int, steps: int) -> Iterator[dl.Step]:
        model = network()
        to = None if folder is None or name == "inner" else f"{folder}/{number}"
        loop = loop_over(world, to, model, epochs=None, steps=steps, save_every=1)
        seeds.append(loop.seed)
        for step in loop:
            for rows in step:
                drawn.append((f"{name} shard", number, torch.rand(()).item()))
                step.backward(loss_of(model, rows))
            step.fold()
            if step.iteration == 1:
                error = dl.evaluate(nn.Identity(), whole, error=noise)["error"]
                drawn.append((f"{name} evaluation", number, error))
            drawn.append((f"{name} step", number, torch.rand(()).item()))
            yield step

    with dl.join_world(seed=3) as world:
        whole = dl.Batches(samples(6), 6, world, shuffle=False)
        for number in range(3):
            for step in run("outer", number, 4):
                if step.iteration == 1:
                    list(run("inner", number, 2))
                if (number, step.iteration) == (leave_in, 2):
                    return drawn, seeds
            drawn.append(("after", number, torch.rand(()).item()))
    return drawn, seeds


def test_each_loop_of_a_script_draws_numbers_of_its_own(on_ranks: OnRanks) -> None:
    [(drawn, seeds)] = on_ranks(1, draws_of_loops, None)
    assert seeds[0] == 3
    assert len(set(seeds)) == len(seeds) == 6
    assert len({number for *_, number in drawn}) == len(drawn) == 3 * (4 * 2 + 2 * 2 + 2 + 1)
    assert on_ranks(1, draws_of_loops, None) == [(drawn, seeds)]
    of_two = [[one for one in found if "shard" not in one[0]] for found, _ in on_ranks(2, draws_of_loops, None)]
    assert of_two == [[one for one in drawn if "shard" not in one[0]]] * 2


def seeds_in_blocks() -> list[int]:
    """The seeds of a loop, of two in each of two blocks, and of one after these."""
    seeds = []
    with dl.join_world(seed=3) as world:
        seeds.append(loop_over(world, None, network()).seed)
        for _ in range(2):
            with dl.deterministic(7):
                seeds += [loop_over(world, None, network()).seed for _ in range(2)]
        seeds.append(loop_over(world, None, network()).seed)
    return seeds


def test_loops_are_counted_anew_in_each_seeded_block(on_ranks: OnRanks) -> None:
    [[first, *in_blocks, last], other] = on_ranks(2, seeds_in_blocks)
    assert in_blocks[:2] == in_blocks[2:]
    assert in_blocks[0] == first == 3
    assert in_blocks[1] == last != first
    assert other == [first, *in_blocks, last]


def test_a_script_of_several_loops_that_resumes_draws_what_the_whole_one_does(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    [(whole, _)] = on_ranks(1, draws_of_loops, None)
    [(before, _)] = on_ranks(1, draws_of_loops, str(tmp_path), 1)
    [(rest, _)] = on_ranks(1, draws_of_loops, str(tmp_path))
    assert set(before) < set(whole)
    assert set(rest) < set(whole)
    assert {*before, *rest} == {*whole}


# -- where a failure is said to be, and how to go on ---------------------------------------------------------

FAILS_AT = 3  # a step of an inner loop


class Ended(BaseException):
    """An error that is no Exception."""


def handed_on(steps: Iterable[dl.Step]) -> Iterator[dl.Step]:
    """As a progress bar hands steps on."""
    for step in steps:  # noqa: UP028
        yield step


def train_inner(world: dl.World, folder: str, how: str, **saving: Any) -> None:
    inner = network()
    loop: Iterable[dl.Step] = loop_over(world, folder, inner, **saving)
    for step in handed_on(loop) if how == "handed on" else loop:
        take(step, inner)
        if how and step.iteration == FAILS_AT:
            if "break" in how:
                break
            try:
                raise {"Ended": Ended, "caught": ArithmeticError}.get(how, ValueError)
            except ValueError:
                raise  # its traceback has the line above alone
    if how == "break, raise":
        raise ValueError


def train_outer(world: dl.World, folder: str, how: str, meets: bool = False, **saving: Any) -> None:
    """The second inner loop fails on rank 0, or the outer one after the inner one was left."""
    outer = network()
    for step in loop_over(world, f"{folder}/outer", outer, epochs=2, save_every=2 if saving else None):
        take(step, outer)
        if step.iteration == 3:
            train_inner(world, f"{folder}/inner-1", "")
        elif step.iteration == 4:
            with suppress(ArithmeticError):
                train_inner(world, f"{folder}/inner-2", how if world.rank == 0 else "", **saving)
            if meets:
                world.gather(0)
            raise ValueError


INSIDE = ("raise", "handed on", "Ended")
AFTER = ("break", "break, raise", "caught")


@pytest.mark.parametrize("how", [*INSIDE, *AFTER])
def test_a_failure_is_said_to_be_in_the_loop_where_it_happened(how: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, Ended)), dl.join_world() as world:
        train_outer(world, str(tmp_path), how)
    place = FAILS_AT if how in INSIDE else 4
    for folder in ("outer", "inner-2"):
        status = json.loads((tmp_path / folder / "status.json").read_text())
        assert (status["status"], status["stage"], status["step"]) == ("failed", "optimizer", place)


@pytest.mark.parametrize("how", ["raise", "break"])
def test_other_ranks_name_the_inner_loop_that_a_rank_left(how: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    _, other = on_ranks(2, on_this_rank, train_outer, str(tmp_path), (how, True))
    assert other.kind == "PeerFailed"
    assert other.text.startswith(f"rank 0 failed in optimizer of step {FAILS_AT}: ")


@pytest.mark.parametrize(
    ("how", "saving", "advice"),
    [
        ("raise", {}, "{0}/inner-2 has no checkpoint yet."),
        ("raise", {"save_every": 2}, "The checkpoint step-00000002 is in {0}/inner-2."),
        (
            "raise",
            {"save_every": 9},
            "{0}/inner-2 has no checkpoint yet. The checkpoint step-00000002 is in {0}/outer.",
        ),
        ("break", {"save_every": 2}, "The checkpoint step-00000002 is in {0}/outer."),
    ],
)
def test_the_advice_is_on_a_run_that_failed_and_not_on_one_that_ended_before(
    how: str, saving: dict[str, Any], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv(START, "[]")
    with pytest.raises(ValueError, match=r"^$"), dl.join_world() as world:
        train_outer(world, str(tmp_path), how, **saving)
    first, *others = (tmp_path / f"error.json{ADVICE}").read_text().splitlines()
    assert first == advice.format(tmp_path)
    assert [line.partition(":")[0] for line in others] == ["to go on"] * ("is in" in advice)


def test_advice_that_a_checkpoint_changes_meanwhile_is_left_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv(START, "[]")
    with dl.join_world() as world:
        writer = threading.Thread(target=world.advise)

        def without_checkpoint() -> str:
            if writer.ident is None:
                writer.start()
                writer.join(0.2)  # it waits for this thread
                world.advice = lambda: "with a checkpoint"
            return "without one"

        world.advice = without_checkpoint
        world.advise()
        writer.join()
        assert (tmp_path / f"error.json{ADVICE}").read_text() == "with a checkpoint"
