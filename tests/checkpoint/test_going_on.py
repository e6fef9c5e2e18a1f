"""Going on with a run: more epochs or steps, a changed script or argument; what is refused as another run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import RunFolder, storage
from ddp_loop.reporting.run_records import total_steps
from tests.support.refusals import loop_over, network
from tests.support.resuming import EPOCHS, STEPS, different, train
from tests.support.runs import checkpoints_of, digests, go_by_epochs, lines_of, rows_of, status_of

# torch does not know that the optimizer stepped in another process, where a run resumes at the end of the first epoch.
pytestmark = [pytest.mark.covers("J10"), pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")]

STARTS = "starts.jsonl"


def files_of(run: Path) -> dict[str, bytes]:
    """What a refused start leaves as it is."""
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "lock"}


def small(
    folder: Path, *, lr: float = 0.1, period: int = 10, stop_at: int | None = None, seed: int = 1, number: int = 20,
    after_step: Callable[[int], None] = lambda iteration: None, cut: Mapping[str, Any] = {}, **options: Any,
) -> tuple[list[int], dict[str, str], float]:  # fmt: skip
    """The steps that a small job of 2 epochs makes, its weights, and its learning rate at the end."""
    with dl.join_world(seed=seed) as world:
        model = nn.Linear(3, 4)
        made = list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, period)
        data = torch.randn(number, 3, generator=torch.Generator().manual_seed(2))
        batches = dl.Batches(data, **{"batch_size": 4, "world": world, "shards": 2, **cut})
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        options = {"epochs": None if "steps" in options else 2, "progress": False, **options}
        loop = dl.Loop(batches, state=state, run_dir=folder, **options)

        def note(iteration: int) -> None:
            schedule.step()
            made.append(iteration)
            after_step(iteration)

        go_by_epochs(loop, model, optimizer, stop_at, after_step=note)
        return made, digests({"model": model}), optimizer.param_groups[0]["lr"]


def notices(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("ddp_loop: ")]


def test_more_epochs_go_on_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("", epochs=EPOCHS + 1)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--run-dir={tmp_path}", "--epochs", "2"])
    train(str(tmp_path))
    assert notices(capsys) == []
    monkeypatch.setattr(sys, "argv", ["train.py", f"--run-dir={tmp_path}", "--epochs", "3"])
    again = train(str(tmp_path), epochs=EPOCHS + 1)
    assert again.made == whole.made[EPOCHS * STEPS :]
    assert different(whole, again) == []
    assert rows_of(tmp_path) == whole.made
    assert (status_of(tmp_path)["status"], status_of(tmp_path)["epochs"]) == ("done", EPOCHS + 1)
    run_dir = f"--run-dir={tmp_path}"
    changes = f"arguments: was '{run_dir} --epochs 2', is '{run_dir} --epochs 3'; epochs: was 2, is 3"
    assert notices(capsys) == [f"ddp_loop: {tmp_path} continues with changes: {changes}."]


@pytest.mark.parametrize("first", [3, 5])  # inside an epoch of 5 steps, and at its end
def test_more_steps_go_on_from_the_end(first: int, tmp_path: Path) -> None:
    _, whole, _ = small(tmp_path / "whole", steps=9)
    assert small(tmp_path / "parts", steps=first)[0] == list(range(1, first + 1))
    assert small(tmp_path / "parts", steps=9)[:2] == (list(range(first + 1, 10)), whole)


def test_a_changed_script_continues_with_one_notice_and_every_start_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, script = tmp_path / "run", tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    script.write_text("a = 1\n")
    small(run, epochs=3, stop_at=2)
    script.write_text("a = 1  # a comment\n")
    small(run, epochs=3, stop_at=4)
    assert notices(capsys) == [f"ddp_loop: {run} continues with changes: the script's content has changed."]
    small(run, epochs=3)
    assert notices(capsys) == []  # the run is that of the new script now
    starts = lines_of(run / STARTS)
    assert [one["iteration"] for one in starts] == [0, 2, 4]
    assert [one["changed"] for one in starts] == [[], ["the script's content has changed"], []]
    assert [(one["ranks"], one["command"], one["device"]) for one in starts] == [(1, ["train.py"], "cpu")] * 3
    first, second, third = (one["fingerprint"]["the script's content"] for one in starts)
    assert (first != second, second == third) == (True, True)


def test_a_changed_learning_rate_is_said_and_that_of_the_checkpoint_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path, stop_at=3)
    _, _, rate = small(tmp_path, lr=0.5, period=7)
    (notice,) = notices(capsys)
    assert "optimizer.param_groups.0.lr: was 0.1, is 0.5; " in notice
    assert "schedule.step_size: was 10, is 7" in notice
    held, remedy = notice.split(" The checkpoint's values stay for ")[1].split(". To use ")
    assert {"optimizer.param_groups.0.lr", "schedule.step_size"} <= set(held.replace(" and", ",").split(", "))
    assert remedy == "the script's, assign them after the Loop."
    assert rate == pytest.approx(0.01)  # 0.1, divided by 10 after 10 steps


def test_many_changes_are_one_short_notice(tmp_path: Path) -> None:
    for value in (1, 2):
        held = RunFolder(tmp_path, {}, None, dict.fromkeys("abcdefgh", value))
        held.close()
    assert held.notice.endswith("; f: was 1, is 2; and 2 more.")


def test_what_changed_is_not_said_where_nothing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["train.py", argument])
        with dl.join_world() as world:  # left before the first checkpoint
            loop_over(world, str(tmp_path), network())
    assert "continues with changes" not in capsys.readouterr().out
    assert [one["iteration"] for one in lines_of(tmp_path / STARTS)] == [0, 0]


# -- another run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"number": 17}, "samples: was 20, is 17"),
        ({"cut": {"batch_size": 5}}, "batch_size: was 4, is 5"),
        ({"cut": {"drop_last": True}}, "drop_last: was False, is True"),
        ({"cut": {"shuffle": False}}, "shuffle: was True, is False"),
        ({"cut": {"shards": 3}}, "shards: was 2, is 3"),
        ({"seed": 4}, "seed: was 1, is 4"),
    ],
    ids=str,
)
def test_another_run_is_refused_with_the_remedy(
    keywords: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path, stop_at=3)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=said) as refused:
        small(tmp_path, **keywords)
    assert f"{tmp_path} has another run (status: stopped)" in str(refused.value)
    assert "resume=False to start over (its files move to before/), or another run_dir=." in str(refused.value)
    resumes = not said.startswith(("samples", "batch_size", "drop_last"))
    assert ("resume=True" in str(refused.value)) == resumes
    if resumes:
        assert small(tmp_path, stop_at=5, resume=True, **keywords)[0] == [4, 5]
        assert f"ddp_loop: {tmp_path} continues with changes: {said}." in capsys.readouterr().out
    else:  # the position in an epoch means nothing there
        with pytest.raises(ValueError, match=said):
            small(tmp_path, resume=True, **keywords)
        assert files_of(tmp_path) == before


# -- its folder ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_relative_path_stays_that_folder_when_the_script_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    _, whole, _ = small(tmp_path / "whole", save_every=2, progress=True)
    small(Path("run"), save_every=2, progress=True, after_step=lambda _: os.chdir(tmp_path / "elsewhere"))
    assert os.listdir(tmp_path / "elsewhere") == []
    files, expected = (set(os.listdir(tmp_path / name)) for name in ("run", "whole"))
    of_long_runs = {"usage", "ranks.jsonl"}  # not there where a run took less than a second
    assert files - of_long_runs == expected - of_long_runs  # pictures, too
    assert rows_of(tmp_path / "run") == list(range(1, 11))
    assert checkpoints_of(tmp_path / "run") == [6, 8, 10]
    assert status_of(tmp_path / "run")["status"] == "done"
    monkeypatch.chdir(tmp_path)
    assert small(Path("run"))[:2] == ([], whole)


@pytest.mark.parametrize("spelled", ["other/../run/", "link"])
def test_a_path_spelled_differently_is_the_same_run(
    spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.setattr(sys, "argv", ["train.py", "run"])
    small(tmp_path / "run", stop_at=3)
    monkeypatch.setattr(sys, "argv", ["train.py", spelled])
    assert small(Path(spelled))[0][0] == 4
    assert notices(capsys) == []  # the path is no change
    assert rows_of(tmp_path / "run") == list(range(1, 11))


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_no_checkpoint_is_read_or_written_through_a_link(kind: str, tmp_path: Path) -> None:
    """As if the folder had been moved to a larger disk: no checkpoint would be found, and the run begin anew."""
    run = tmp_path / "run"
    RunFolder(run, {}, None).close()
    if kind == "file":
        (run / "checkpoints").touch()
    else:
        (run / "checkpoints").symlink_to(tmp_path / "nowhere" if kind == "dangling link" else tmp_path)
    before = files_of(run)
    for resume in (None, True):
        with pytest.raises(ValueError, match=f"must be a folder of its own, .* It is a {kind.split()[-1]}\\. Move"):
            RunFolder(run, {}, resume)
    assert files_of(run) == before
    RunFolder(run, {}, False).close()
    assert os.path.lexists(run / "before" / "1" / "checkpoints")


@pytest.mark.parametrize("removed", ["", "step-00000003"])
def test_a_run_whose_checkpoints_were_removed_is_refused(removed: str, tmp_path: Path) -> None:
    told = []
    small(tmp_path, stop_at=2)
    small(tmp_path, stop_at=3, after_step=lambda _: told.append(status_of(tmp_path)["checkpoint"]))
    assert told == ["step-00000002"]  # also while it is running
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    shutil.rmtree(tmp_path / "checkpoints" / removed)
    before = files_of(tmp_path)
    for resume in (None, True):
        with pytest.raises(ValueError, match=r"had the checkpoint step-00000003, but .*/checkpoints has none\. .*"):
            small(tmp_path, resume=resume)
    assert files_of(tmp_path) == before
    assert small(tmp_path, resume=False)[0][0] == 1


@pytest.mark.parametrize(
    ("place", "function", "name", "said"),
    [
        (Path, "read_bytes", "run.json", r"run.json cannot be read now \(Stale file handle\)\. Start again when"),
        (os, "lstat", "checkpoints", r"checkpoints cannot be listed now \(Stale file handle\)\. Try again when"),
        (storage, "bytes_of", "tensors.safetensors", r"00007 cannot be read now \(Stale file handle\)\. Try again"),
    ],
)
def test_a_run_that_cannot_be_read_now_is_neither_begun_anew_nor_gone_back_from(
    place: object, function: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, stop_at=7, save_every=3)
    before = files_of(tmp_path)
    usual = getattr(place, function)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if name in [os.path.basename(one) for one in arguments[:2] if isinstance(one, str | Path)]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return usual(*arguments, **keywords)

    with monkeypatch.context() as broken:
        broken.setattr(place, function, fail)
        with pytest.raises(OSError, match=said):
            small(tmp_path)
    assert files_of(tmp_path) == before
    assert checkpoints_of(tmp_path) == [3, 6, 7]
    assert small(tmp_path)[0] == [8, 9, 10]


# -- a finished run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"epochs": 2}, {"epochs": 2}, "the 10 steps of epochs=2. Raise epochs="),
        ({"epochs": 4, "steps": 7}, {"epochs": 4, "steps": 7}, "the 7 steps of steps=7. Raise steps="),
        ({"epochs": 2}, {"epochs": 1}, "10 steps, and epochs=1 asks for 5. Raise epochs="),
        ({"epochs": 2}, {"steps": 7}, "10 steps, and steps=7 asks for 7. Raise steps="),
    ],
)
def test_a_finished_run_says_that_it_is_finished_and_how_to_go_on(
    first: dict[str, Any], then: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, weights, _ = small(tmp_path, **first)
    assert small(tmp_path, **then)[:2] == ([], weights)
    status = status_of(tmp_path)
    assert status["status"] == "done"
    assert total_steps(status) == status["iteration"]  # not fewer than it has made
    start_over = " to train further, or pass resume=False to start over (its files move to before/)."
    assert notices(capsys)[-1] == f"ddp_loop: {tmp_path} is finished: it has made {said}{start_over}"


def test_half_a_line_of_a_killed_start_stays_alone_and_a_start_that_cannot_be_recorded_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path, stop_at=3)
    with (tmp_path / STARTS).open("a") as file:
        file.write('{"at": 1')
    small(tmp_path, stop_at=5)
    first, half, last = (tmp_path / STARTS).read_text().splitlines()
    assert (json.loads(first)["iteration"], half, json.loads(last)["iteration"]) == (0, '{"at": 1', 3)
    (tmp_path / STARTS).unlink()
    (tmp_path / STARTS).mkdir()
    assert small(tmp_path)[0][0] == 6
    (said,) = notices(capsys)
    assert f"{tmp_path / STARTS} could not be written" in said
