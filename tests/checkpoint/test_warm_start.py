"""`Loop(resume_from=...)`: a new run begins with the weights and the optimizer's state of another one, at step 1."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from ddp_loop.determinism import leaves
from tests.support.harness import OnRanks, caught
from tests.support.runs import checkpoints_of, digests, lines_of, rows_of, status_of
from tests.support.trained_runs import Tied, flip_tensors, rows, train_run

NAMES = [f"step-{iteration:08d}" for iteration in (3, 6, 9, 12)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_run(folder := tmp_path_factory.mktemp("warm") / "run")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def tensors_in(value: object) -> dict[str, Any]:
    return {name: one for name, one in leaves("", value) if isinstance(one, torch.Tensor)}


def started(
    source: str | Path, folder: str | Path | None = None, *, steps: int = 1, lr: float = 0.2, width: int = 4,
    kind: str = "Adam", more: bool = False, compiled: bool = False, names: tuple[str, str] = ("model", "optimizer"),
    **keywords: Any,
) -> tuple[dict[str, str], Mapping[str, Any], list[int]]:  # fmt: skip
    """What a new run has before its first step: digests, the optimizer's state; and the steps that it makes."""
    with dl.join_world(seed=9) as world:
        model = Tied(width)
        used = torch.compile(model, backend="eager") if compiled else model
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=lr)
        state: dict[str, Any] = dict(zip(names, (used, optimizer), strict=True))
        state["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        if more:
            state["average"] = AveragedModel(model)
        batches = dl.Batches(rows(width=width), 8, world, shards=2)
        loop = dl.Loop(
            batches, steps=steps, state=state, run_dir=folder, progress=False, resume_from=source, **keywords
        )
        before, kept, made = digests({"model": model}), optimizer.state_dict(), []
        kept = {"state": {key: {k: v.clone() for k, v in one.items()} for key, one in kept["state"].items()}} | {
            "param_groups": [dict(group) for group in kept["param_groups"]]
        }
        for step in loop:
            for some in step:
                step.backward(model(some).square().mean())
            step.fold()
            optimizer.step()
            made.append(step.iteration)
        return before, kept, made


def same_moments(kept: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    mine, theirs = tensors_in(kept["state"]), tensors_in(there["state"])
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.covers("J10")
@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("which", ["run", "checkpoint"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_new_run_begins_with_the_weights_and_moments_of_another_on_every_rank(
    which: str, ranks: int, run: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    source = run if which == "run" else run / "checkpoints" / NAMES[1]
    weights, optimizer = dl.load(source), dl.load(source, "optimizer")
    for before, kept, made in on_ranks(ranks, started, str(source), str(tmp_path / "new")):
        assert before == digests({"model": weights})
        assert same_moments(kept, optimizer)
        assert made == [1]
    assert rows_of(tmp_path / "new") == [1]


@pytest.mark.covers("J10")
def test_the_settings_of_the_script_stay_and_schedules_begin_anew(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, kept, _ = started(run, lr=0.2)
    assert (kept["param_groups"][0]["lr"], kept["param_groups"][0]["initial_lr"]) == (0.2, 0.2)
    assert float(kept["state"][0]["step"]) == 12
    path = run / "checkpoints" / NAMES[3]
    assert (
        f"ddp_loop: starts with model and optimizer of {path}; schedule starts from scratch\n"
        in capsys.readouterr().out
    )


@pytest.mark.covers("J10")
def test_it_is_recorded_where_the_weights_came_from(run: Path, tmp_path: Path) -> None:
    started(run, tmp_path / "new")
    origin = str(run / "checkpoints" / NAMES[3])
    (start,) = lines_of(tmp_path / "new" / "starts.jsonl")
    assert (start["iteration"], start["fingerprint"]["resumed_from"]) == (0, origin)
    assert json.loads((tmp_path / "new" / "run.json").read_text())["fingerprint"]["resumed_from"] == origin
    assert status_of(tmp_path / "new")["resumed_from"] == origin


@pytest.mark.covers("J10")
def test_a_run_that_resumes_in_its_own_folder_does_not_look_at_the_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, first = started(run, tmp_path / "new", steps=2)
    origin = json.loads((tmp_path / "new" / "run.json").read_text())["fingerprint"]["resumed_from"]
    shutil.rmtree(run)
    weights = dl.load(tmp_path / "new")
    capsys.readouterr()
    before, _, second = started(run, tmp_path / "new", steps=4)
    assert (first, second) == ([1, 2], [3, 4])
    assert before == digests({"model": weights})
    assert "starts with" not in capsys.readouterr().out
    assert rows_of(tmp_path / "new") == [1, 2, 3, 4]
    assert json.loads((tmp_path / "new" / "run.json").read_text())["fingerprint"]["resumed_from"] == origin


def test_a_start_over_begins_with_the_other_weights_again_also_with_its_own(run: Path) -> None:
    weights = dl.load(run)
    before, _, made = started(run, run, resume=False)
    assert (before, made) == (digests({"model": weights}), [1])
    assert checkpoints_of(run) == [1]
    assert (run / "before" / "1" / "checkpoints" / NAMES[3]).is_dir()


def test_parts_that_the_other_run_lacks_begin_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(run, more=True)
    assert "starts with model and optimizer of " in (said := capsys.readouterr().out)
    assert "; schedule and average start from scratch\n" in said


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_compiled_and_plain_models_take_each_others_weights(here: bool, there: bool, tmp_path: Path) -> None:
    train_run(tmp_path / "run", 1, compiled=there)
    assert started(tmp_path / "run", compiled=here)[0] == digests({"model": dl.load(tmp_path / "run")})


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_taken(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = dl.load(run, checkpoint=NAMES[2])
    flip_tensors(run / "checkpoints" / NAMES[3])
    assert started(run)[0] == digests({"model": weights})
    assert f"the SHA-256 in the manifest. {NAMES[2]} is used instead.\n" in capsys.readouterr().out


# -- refusals ----------------------------------------------------------------------------------------------


def refused_start(source: str, folder: str, **keywords: Any) -> str:
    return caught(partial(started, source, folder, **keywords))[1]


@pytest.mark.covers("J10")
@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"width": 5}, r"state\['model'\] does not fit .*: first.weight has shape \(5, 5\), there \(4, 4\); norm"),
        (
            {"kind": "SGD"},
            r"state\['optimizer'\] does not fit .*: it is a SGD, and the one there had no dampening, mom",
        ),
        ({"names": ("net", "optimizer")}, r"has none of the modules in state=: .* has model, optimizer, schedule, no"),
    ],
)
def test_another_structure_is_one_error_on_all_ranks_and_nothing_is_changed(
    keywords: dict[str, Any], said: str, run: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    errors = on_ranks(2, refused_start, str(run), str(tmp_path / "new"), **keywords)
    assert all(re.search(said, one) for one in errors), errors
    assert not (tmp_path / "new").exists()


@pytest.mark.covers("J10")
def test_a_source_without_a_checkpoint_is_one_error_on_all_ranks(tmp_path: Path, on_ranks: OnRanks) -> None:
    errors = on_ranks(2, refused_start, str(tmp_path / "none"), str(tmp_path / "new"))
    assert all("none is not a folder. Pass the folder of Loop(run_dir=...)." in one for one in errors), errors
    assert not (tmp_path / "new").exists()


def another_on_each_rank(folder: str) -> str:
    with dl.join_world() as world:
        model = nn.Linear(4, 4)
        batches = dl.Batches(rows(), 8, world)
        source = f"{folder}/{world.rank}"
        return caught(partial(dl.Loop, batches, 1, state={"model": model}, resume_from=source))[1]


def test_ranks_with_different_sources_are_refused(tmp_path: Path, on_ranks: OnRanks) -> None:
    assert all("resume_from" in one for one in on_ranks(2, another_on_each_rank, str(tmp_path)))


# -- from an earlier checkpoint of the same run -------------------------------------------------------------


@pytest.mark.covers("J10")
def test_a_run_goes_on_from_an_earlier_checkpoint_where_newer_ones_were_moved_away(run: Path, tmp_path: Path) -> None:
    last = dl.load(run)
    branch = Path(shutil.copytree(run, tmp_path / "branch"))
    for name in NAMES[2:]:
        shutil.rmtree(branch / "checkpoints" / name)
    train_run(branch)
    assert digests({"m": dl.load(branch)}) == digests({"m": last})
    assert rows_of(branch) == list(range(1, 13))
    assert checkpoints_of(branch) == [3, 6, 9, 12]
