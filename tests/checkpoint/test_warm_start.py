"""`Loop(resume_from=...)`: a new run begins with the weights and the optimizer's state of another one, at step 1."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import ddp_loop as dl
from tests.support.harness import OnRanks, caught
from tests.support.refusals import loop_over, loss_of, network, network_by_columns
from tests.support.runs import checkpoints_of, digests, go_by_epochs, lines_of, rows_of, status_of
from tests.support.trained_runs import NAMES, Tied, flip_tensors, rows, train_run

pytestmark = pytest.mark.covers("J10")


def started(
    source: str | Path | None, folder: str | Path | None = None, *, steps: int = 1, width: int = 4, kind: str = "Adam",
    more: bool = False, compiled: bool = False, is_reversed: bool = False, settings: dict[str, Any] | None = None,
    names: tuple[str, str] = ("model", "optimizer"), **keywords: Any,
) -> tuple[dict[str, str], Mapping[str, Any], list[int]]:  # fmt: skip
    """What a new run has before its first step: digests, the optimizer's state; and the steps that it makes."""
    with dl.join_world(seed=9) as world:
        model = Tied(width)
        made = list[int]()
        used = torch.compile(model, backend="eager") if compiled else model
        optimizer = getattr(torch.optim, kind)(
            [*model.parameters()][:: -1 if is_reversed else 1], lr=0.2, **(settings or {})
        )
        state: dict[str, Any] = dict(zip(names, (used, optimizer), strict=True))
        state["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        if more:
            state["average"] = AveragedModel(model)
        batches = dl.Batches(rows(width=width), 8, world, shards=2)
        loop = dl.Loop(
            batches, steps=steps, state=state, run_dir=folder, progress=False, resume_from=source, **keywords
        )
        before = digests({"model": model})
        kept = deepcopy(optimizer.state_dict())
        go_by_epochs(loop, model, optimizer, after_step=made.append)
        return before, kept, made


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(("ranks", "which"), [(1, ""), (3, f"checkpoints/{NAMES[1]}")])
def test_a_new_run_begins_with_the_weights_and_moments_of_another_on_every_rank(
    ranks: int, which: str, run: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    weights = dl.load(run / which)
    moments = dl.load(run / which, "optimizer")["state"]
    for before, kept, made in on_ranks(ranks, started, str(run / which), str(tmp_path / "new")):
        assert before == digests({"model": weights})
        assert digests(kept["state"]) == digests(moments)
        assert made == [1]
    assert rows_of(tmp_path / "new") == [1]


def test_the_settings_of_the_script_stay_and_schedules_begin_anew_and_the_source_is_recorded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    origin = str(run / "checkpoints" / NAMES[3])
    _, kept, _ = started(run, new)
    assert (kept["param_groups"][0]["lr"], kept["param_groups"][0]["initial_lr"]) == (0.2, 0.2)
    assert float(kept["state"][0]["step"]) == 12
    said = f"ddp_loop: starts with model and optimizer of {origin}; schedule starts from scratch\n"
    assert said in capsys.readouterr().out
    (start,) = lines_of(new / "starts.jsonl")
    assert (start["iteration"], start["fingerprint"]["resumed_from"]) == (0, origin)
    assert json.loads((new / "run.json").read_text())["fingerprint"]["resumed_from"] == origin
    assert status_of(new)["resumed_from"] == origin


def test_a_run_that_resumes_in_its_own_folder_does_not_look_at_the_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert started(run, new, steps=2)[2] == [1, 2]
    begun = (new / "run.json").read_text()
    shutil.rmtree(run)
    weights = dl.load(new)
    capsys.readouterr()
    before, _, made = started(run, new, steps=4)
    assert (before, made) == (digests({"model": weights}), [3, 4])
    assert "starts with" not in capsys.readouterr().out
    assert rows_of(new) == [1, 2, 3, 4]
    origin = json.loads(begun)["fingerprint"]["resumed_from"]
    assert json.loads((new / "run.json").read_text())["fingerprint"]["resumed_from"] == origin


def test_a_start_over_begins_with_the_other_weights_again_also_with_its_own(run: Path) -> None:
    weights = dl.load(run)
    before, _, made = started(run, run, resume=False)
    assert (before, made) == (digests({"model": weights}), [1])
    assert checkpoints_of(run) == [1]
    assert (run / "before" / "1" / "checkpoints" / NAMES[3]).is_dir()


def test_parts_that_the_other_run_lacks_begin_anew_and_a_damaged_checkpoint_is_not_taken(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = dl.load(run, checkpoint=NAMES[2])
    flip_tensors(run / "checkpoints" / NAMES[3])
    assert started(run, more=True)[0] == digests({"model": weights})
    said = capsys.readouterr().out
    assert f"the SHA-256 in the manifest. {NAMES[2]} is used instead.\n" in said
    assert "starts with model and optimizer of " in said
    assert "; schedule and average start from scratch\n" in said


@pytest.mark.parametrize(("here", "there"), [(False, True), (True, False)])
def test_compiled_and_plain_models_take_each_others_weights(here: bool, there: bool, tmp_path: Path) -> None:
    train_run(tmp_path / "run", 1, compiled=there)
    assert started(tmp_path / "run", compiled=here)[0] == digests({"model": dl.load(tmp_path / "run")})


def weights_after(folder: str, source: str | None, form: str, fused: bool = False) -> list[torch.Tensor]:
    """The weights after a step of Adam, which may begin with another run's; in a memory format or a dtype."""
    with dl.join_world(seed=9) as world:
        model = network_by_columns() if form == "columns" else network()
        model = model.float() if form == "single" else model
        adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused, foreach=False)
        for step in loop_over(world, folder, model, adam, steps=1, resume_from=source):
            for rows in step:
                step.backward(loss_of(model, rows.to(next(model.parameters()).dtype)))
            step.fold()
            adam.step()
        return [one.detach().double() for one in model.parameters()]


@pytest.mark.parametrize(("form", "fused"), [("columns", True), ("single", False)])
def test_moments_take_the_memory_format_and_the_dtype_of_their_parameters(
    form: str, fused: bool, tmp_path: Path
) -> None:
    source = str(tmp_path / "source")
    weights_after(source, None, "rows")
    expected = weights_after(str(tmp_path / "rows"), source, "rows", fused)
    found = weights_after(str(tmp_path / "other"), source, form, fused)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "said"), [("RMSprop", "it has momentum, and the one there kept no state for it"), ("SGD", "")]
)
def test_momentum_begins_where_the_other_run_kept_none_unless_an_optimizer_needs_it(
    kind: str, said: str, tmp_path: Path
) -> None:
    started(None, tmp_path / "source", kind=kind)
    error = caught(partial(started, tmp_path / "source", kind=kind, settings={"momentum": 0.9}))[1]
    assert said in error if said else error == ""


# -- refusals ----------------------------------------------------------------------------------------------


def refused_start(source: str, folder: str, **keywords: Any) -> str:
    return caught(partial(started, source, folder, **keywords))[1]


@pytest.mark.parametrize(
    ("source", "keywords", "said"),
    [
        (
            "run",
            {"width": 5},
            r"state\['model'\] does not fit .*: first.weight has shape .5, 5.*by hand what fits .*checkpoints.md\)",
        ),
        (
            "run",
            {"kind": "SGD"},
            r"state\['optimizer'\] does not fit .*: it is a SGD, and the one there had no dampening, mom.* scratch\.",
        ),
        (
            "run",
            {"settings": {"amsgrad": True}},
            r"state\['optimizer'\] does not fit .*: it has amsgrad, and the one there kept no state for it",
        ),
        (
            "run",
            {"is_reversed": True},
            r"state\['optimizer'\] does not fit .* by their order, and number 1 is model\.\w+\.\w+, there model\.first",
        ),
        (
            "run",
            {"names": ("net", "optimizer")},
            r"has none of the modules in state=: .* has model, optimizer, schedule, no",
        ),
        ("none", {}, r"none is not a folder\. Pass the folder of Loop\(run_dir=\.\.\.\)\."),
    ],
)
def test_a_source_that_does_not_fit_is_one_error_on_all_ranks_and_nothing_is_changed(
    source: str, keywords: dict[str, Any], said: str, run: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    errors = on_ranks(2, refused_start, str(run.with_name(source)), str(tmp_path / "new"), **keywords)
    assert all(re.search(said, one) for one in errors), errors
    assert not (tmp_path / "new").exists()


def another_on_each_rank(folder: str) -> str:
    with dl.join_world() as world:
        return caught(partial(loop_over, world, "", network(), run_dir=None, resume_from=f"{folder}/{world.rank}"))[1]


def test_ranks_with_different_sources_are_refused(tmp_path: Path, on_ranks: OnRanks) -> None:
    assert all("resume_from" in one for one in on_ranks(2, another_on_each_rank, str(tmp_path)))


# -- from an earlier checkpoint of the same run -------------------------------------------------------------


def test_a_run_goes_on_from_an_earlier_checkpoint_where_newer_ones_were_moved_away(run: Path, tmp_path: Path) -> None:
    last = dl.load(run)
    branch = Path(shutil.copytree(run, tmp_path / "branch"))
    for name in NAMES[2:]:
        shutil.rmtree(branch / "checkpoints" / name)
    train_run(branch)
    assert digests({"m": dl.load(branch)}) == digests({"m": last})
    assert rows_of(branch) == list(range(1, 13))
    assert checkpoints_of(branch) == [3, 6, 9, 12]
