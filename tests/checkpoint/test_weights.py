"""`ddp_loop.load`: weights from a run folder, without ranks or the script, also while the run is training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from ddp_loop.checkpoint import CheckpointStore, run_id_of, weights
from ddp_loop.checkpoint.storage import Checkpoint
from tests.support.paths import ROOT
from tests.support.trained_runs import NAMES, State, Tied, flip_tensors, train_run

pytestmark = pytest.mark.covers("J9")


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_newest_the_best_and_a_named_checkpoint_are_loaded_to_the_bit(run: Path, kept: list[State]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert same(dl.load(run), kept[3])
    assert same(dl.load(str(run), best=True), kept[1])
    assert same(dl.load(run, checkpoint=NAMES[0]), kept[0])
    assert same(dl.load(run / "checkpoints" / NAMES[2]), kept[2])
    model = Tied()
    assert str(model.load_state_dict(dl.load(run))) == "<All keys matched successfully>"
    assert same(model.state_dict(), kept[3])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before  # the lock, too


def test_other_parts_are_loaded_with_their_numbers(run: Path) -> None:
    optimizer = torch.optim.Adam(Tied().parameters(), lr=0.7)
    optimizer.load_state_dict(dl.load(run, "optimizer"))
    assert (optimizer.param_groups[0]["lr"], int(optimizer.state_dict()["state"][0]["step"])) == (0.05, 12)
    assert dl.load(run, "notes") == {"rows": 0}
    assert dl.load(run, "schedule", checkpoint=NAMES[0])["step_size"] == 100


@pytest.mark.slow
def test_neither_a_process_group_nor_the_script_is_needed(run: Path, kept: list[State]) -> None:
    code = (
        "import sys, torch, ddp_loop as dl; state = dl.load(sys.argv[1], best=True); "
        "assert not torch.distributed.is_initialized(); print(state['last.bias'].tolist(), state['last.bias'].device)"
    )
    lonely = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False,
        cwd=run.parent, env={**lonely, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{kept[1]['last.bias'].tolist()} cpu\n", "")


def test_each_part_has_memory_of_its_own(run: Path) -> None:
    loaded = dl.load(run)
    assert loaded["first.weight"].untyped_storage().nbytes() == loaded["first.weight"].nbytes
    loaded["first.weight"].zero_()
    assert dl.load(run)["first.weight"].any()


def test_names_that_torch_compile_made_longer_are_the_models(tmp_path: Path) -> None:
    kept = train_run(tmp_path, 1, compiled=True)
    assert any("_orig_mod." in name for name in weights.job_of(weights.read_checkpoint(tmp_path, say=print))["model"])
    loaded = dl.load(tmp_path)
    assert list(loaded) == list(kept[0])
    assert loaded._metadata.keys() == Tied().state_dict()._metadata.keys()  # type: ignore[attr-defined]
    model = Tied()
    model.load_state_dict(loaded)
    assert same(model.state_dict(), kept[0])


def test_a_copied_run_folder_is_enough(run: Path, kept: list[State], tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    shutil.copy(run / "run.json", tmp_path / "copy")
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")
    assert same(dl.load(tmp_path / "copy", best=True), kept[1])
    assert json.loads((run / "run.json").read_text())["id"] == run_id_of(tmp_path / "copy")


# -- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "best", "damaged"), [("tensors.safetensors", False, 3), ("manifest.json", True, 1)])
def test_a_damaged_checkpoint_is_warned_of_and_the_next_one_used(
    file: str, best: bool, damaged: int, run: Path, kept: list[State]
) -> None:
    (run / "checkpoints" / NAMES[damaged] / file).write_text("{")
    said = f"{NAMES[damaged]}/{file} (has|does not have).* {NAMES[2]} is used instead"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert same(dl.load(run, best=best), kept[2])
    assert [Path(one.filename).name for one in warned] == ["test_weights.py"]


# -- a run that is training --------------------------------------------------------------------------------


def removing(monkeypatch: pytest.MonkeyPatch, run: Path, newer: list[Path]) -> list[str]:
    """Put a newer checkpoint in the place of each one that is read, as a run with keep_last=1 does; the names read."""
    usual = CheckpointStore.read
    read = list[str]()

    def read_late(store: CheckpointStore, path: Path) -> Checkpoint:
        read.append(path.name)
        if newer:
            shutil.rmtree(path)
            one = newer.pop(0)
            one.rename(run / "checkpoints" / one.name)
        return usual(store, path)

    monkeypatch.setattr(CheckpointStore, "read", read_late)
    return read


@pytest.mark.parametrize("best", [False, True])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_followed_by_a_newer_one(
    best: bool, run: Path, kept: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(run, run_id_of(run) or "")
    for name, score in zip(NAMES, (9.0, 8.0, 7.0, 6.0), strict=True):
        store.give_score(store.folder / name, score)
    later = [(store.folder / name).rename(run / name) for name in NAMES[1:]]
    read = removing(monkeypatch, run, later)
    assert same(dl.load(run, best=best), kept[3])
    assert read == NAMES


def test_a_named_checkpoint_that_the_run_removes_meanwhile_is_refused_as_missing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing(monkeypatch, run, [(run / "checkpoints" / NAMES[3]).rename(run / NAMES[3])])
    with pytest.raises(ValueError, match=rf"has no checkpoint {NAMES[2]}\. Name one of {NAMES[3]}, {NAMES[1]}"):
        dl.load(run, checkpoint=NAMES[2])


@pytest.mark.slow
def test_weights_can_be_loaded_while_the_run_writes_and_removes_checkpoints(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tests.support.trained_runs import train_run\n"
        "train_run(sys.argv[1], 20, tuple(range(20, 0, -1)), keep_last=1, save_every=1)\n"
    )
    loads = 0
    refused = []
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], cwd=ROOT) as training:
        while training.poll() is None:
            try:
                dl.load(tmp_path / "run", best=loads % 2 == 1)
                loads += 1
            except ValueError as error:
                refused.append(str(error))
    early = ("has no checkpoint", "is not a folder", "has no run.json", "has a score")
    assert [one for one in refused if not any(word in one for word in early)] == []
    assert (training.returncode, loads > 3) == (0, True)
    dl.load(tmp_path / "run", best=True)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "keywords", "said"),
    [
        (
            "",
            {"part": "net"},
            rf"{NAMES[3]} has no part 'net'\. Its state has model, optimizer, schedule, notes\. Name .* part=",
        ),
        ("", {"checkpoint": "step-00000099"}, rf"has no checkpoint step-00000099\. Name one of {NAMES[3]}, {NAMES[2]}"),
        ("", {"checkpoint": "../../../etc"}, r"has no checkpoint \.\./\.\./\.\./etc\. Name one of"),
        ("", {"checkpoint": NAMES[0], "best": True}, f"best and the checkpoint {NAMES[0]} exclude each other"),
        (f"checkpoints/{NAMES[1]}", {"checkpoint": NAMES[0]}, f"is itself a checkpoint, and not {NAMES[0]}"),
        (f"checkpoints/{NAMES[1]}", {"best": True}, f"best and the checkpoint {NAMES[1]} exclude each other"),
        ("checkpoints", {}, r".*/checkpoints has no run\.json.*Pass the folder of"),
        ("none", {}, r".*/none is not a folder.*Pass the folder of"),
        ("run.json", {}, r".*/run\.json is not a folder"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(place: str, keywords: dict[str, Any], said: str, run: Path) -> None:
    with pytest.raises(ValueError, match=said):
        dl.load(run / place, **keywords)


def test_what_has_no_whole_checkpoint_or_no_score_is_refused(run: Path, tmp_path: Path) -> None:
    train_run(tmp_path / "unscored", 1, scores=())
    with pytest.raises(ValueError, match=r"No checkpoint of .* has a score, so none is the best\. Call loop\.save\(sc"):
        dl.load(tmp_path / "unscored", best=True)
    for name in NAMES:
        flip_tensors(run / "checkpoints" / name)
    with pytest.raises(ValueError, match=rf"{NAMES[1]}/tensors\.safetensors does not have .* Name another"):
        dl.load(run, checkpoint=NAMES[1])
    with pytest.raises(ValueError, match=rf"No checkpoint of .* is whole: .*{NAMES[3]}/.* Restore a copy"):
        dl.load(run)
    shutil.rmtree(run / "checkpoints")
    for best in (False, True):
        with pytest.raises(ValueError, match=r"has no checkpoint\. The run saves one after each epoch"):
            dl.load(run, best=best)
