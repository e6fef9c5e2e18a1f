"""Checkpoints: written, read again, the old ones removed; and what is left where writing fails."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddp_loop.checkpoint import CheckpointStore, run_id_of, storage
from ddp_loop.checkpoint.serialization import SerializedState, from_tree, to_tree
from ddp_loop.checkpoint.storage import MANIFEST, TENSORS, CorruptCheckpoint
from ddp_loop.cli import list_checkpoints
from tests.faults import kill_while_saving
from tests.support import scripts
from tests.support.serving import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": "r1", "other": [1]}))
    return folder


@pytest.fixture
def checkpoints(run: Path) -> CheckpointStore:
    return CheckpointStore(run, "r1")


def state(value: float) -> SerializedState:
    return to_tree({"model": {"w": torch.full((3, 4), value), "h": torch.ones(5, dtype=torch.float16)}, "n": value})


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


def steps(*iterations: int) -> list[str]:
    return [f"step-{iteration:08d}" for iteration in iterations]


def write(checkpoints: CheckpointStore, iteration: int, score: float | None = None) -> Path:
    return checkpoints.write(state(iteration), iteration=iteration, facts={"at": iteration}, score=score)


@pytest.mark.parametrize("score", [None, 0.25, 0.0, -math.inf, math.nan, 3])
def test_what_is_written_is_read(checkpoints: CheckpointStore, run: Path, score: float | None) -> None:
    facts = {"epoch": 3, "nested": {"a": [1, None, "ü"]}}
    path = checkpoints.write(state(2.5), iteration=123, facts=facts, score=score)
    assert path == run / "checkpoints" / "step-00000123"
    found = checkpoints.read(path)
    assert (found.path, found.iteration, found.facts) == (path, 123, facts)
    assert repr(found.score) == repr(None if score is None else float(score))
    back = from_tree(found.packed)
    assert back["n"] == 2.5
    assert torch.equal(back["model"]["w"], torch.full((3, 4), 2.5))
    assert names(run) == steps(123)
    path = checkpoints.write(to_tree([1, 2]), iteration=0, facts={})
    assert from_tree(checkpoints.read(path).packed) == [1, 2]


def test_the_tensors_are_a_file_of_safetensors_by_their_paths(checkpoints: CheckpointStore) -> None:
    many = {"b": torch.ones(3, dtype=torch.bool), "e": torch.empty(0, 2), "x": torch.randn(7, 2), "é": torch.arange(3)}
    path = checkpoints.write(to_tree({"model": many}), iteration=1, facts={})
    found = load_file(path / TENSORS)
    assert sorted(found) == sorted(f"model.{name}" for name in many)
    assert all(torch.equal(found[f"model.{name}"], one) for name, one in many.items())
    data = (path / TENSORS).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0  # aligned, so that the file can be mapped
    assert all(header[f"model.{name}"]["data_offsets"][0] % one.element_size() == 0 for name, one in many.items())


def test_a_second_checkpoint_of_a_step_gets_a_number(checkpoints: CheckpointStore, run: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        checkpoints.write(state(value), iteration=10**12, facts={})
    assert names(run) == ["step-1000000000000", "step-1000000000000-2", "step-1000000000000-3"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.path.name == "step-1000000000000-3"
    assert from_tree(newest.packed)["n"] == 3.0


def test_the_last_ones_and_the_best_stay(checkpoints: CheckpointStore, run: Path) -> None:
    scores = {1: 0.9, 2: 0.2, 3: math.nan, 4: -math.inf, 5: 0.5, 6: 0.2, 7: None, 8: 0.3}
    for iteration, score in scores.items():
        write(checkpoints, iteration, score)
    assert names(run) == steps(2, 6, 7, 8)
    assert [entry.iteration for entry in checkpoints.entries()] == [8, 7, 6, 2]
    write(checkpoints, 9, 0.1)
    assert names(run) == steps(7, 8, 9)
    write(checkpoints, 4)  # the one just written stays, though newer ones are there
    assert names(run) == steps(4, 7, 8, 9)


def test_a_score_that_is_given_later_counts(checkpoints: CheckpointStore, run: Path) -> None:
    path = write(checkpoints, 1, 5.0)
    before = checkpoints.read(path)
    checkpoints.give_score(path, -2.5)
    found = checkpoints.read(path)
    assert (found.score, found.iteration, dict(found.facts)) == (-2.5, before.iteration, dict(before.facts))
    for iteration in range(2, 7):
        write(checkpoints, iteration, 0.0)
    assert names(run) == steps(1, 4, 5, 6)
    (path / TENSORS).unlink()
    with pytest.raises(CorruptCheckpoint, match=r"tensors\.safetensors is missing"):
        checkpoints.give_score(path, 1.0)
    assert names(run) == steps(1, 4, 5, 6)


def test_a_score_has_room_beside_facts_that_nearly_fill_the_manifest(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(checkpoints, 1, 5.0)
    monkeypatch.setattr(storage, "MANIFEST_BYTES", (path / MANIFEST).stat().st_size + 100)
    checkpoints.give_score(path, 2.5)
    assert checkpoints.read(path).score == 2.5


def test_a_bad_checkpoint_is_neither_counted_among_those_kept_nor_removed(run: Path) -> None:
    checkpoints = CheckpointStore(run, "r1", keep_last=2)
    for iteration in (1, 2, 3):
        write(checkpoints, iteration)
    (run / "checkpoints" / "step-00000003" / MANIFEST).write_bytes(b"")
    write(checkpoints, 4)
    assert names(run) == steps(2, 3, 4)
    write(checkpoints, 5)
    assert names(run) == steps(3, 4, 5)


def test_of_none_or_no_folder_there_is_no_newest(checkpoints: CheckpointStore, run: Path) -> None:
    assert checkpoints.newest() is None
    (run / "checkpoints").mkdir()
    assert checkpoints.newest() is None
    assert checkpoints.entries() == []


def test_what_a_killed_save_left_is_removed_and_nothing_else(checkpoints: CheckpointStore, run: Path) -> None:
    checkpoints.clean()
    write(checkpoints, 1)
    for name in (".saving-5-ab", ".deleting-step-00000001-ab", "mine"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "file").write_text("x")
    (run / "checkpoints" / ".saving-link").symlink_to(run)
    assert checkpoints.newest() is not None
    checkpoints.clean()
    assert names(run) == ["mine", *steps(1)]
    assert (run / "run.json").exists()


def test_removed_folders_are_made_again_but_not_the_runs(checkpoints: CheckpointStore, run: Path) -> None:
    write(checkpoints, 1)
    shutil.rmtree(run / "checkpoints")
    write(checkpoints, 2)
    assert names(run) == steps(2)
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError, match=r"could not be written to .*run/checkpoints \(.*\)\. Make room"):
        write(checkpoints, 3)
    assert not run.exists()


def test_a_link_in_the_place_of_the_folder_is_refused(checkpoints: CheckpointStore, run: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(FileExistsError, match="The checkpoint of step 1 could not be written to "):
        write(checkpoints, 1)
    assert os.listdir(elsewhere) == []
    assert checkpoints.newest() is None


def test_old_ones_that_cannot_be_removed_are_a_warning(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    checkpoints = CheckpointStore(run, "r1", 1, said.append)
    write(checkpoints, 1)
    tokens = iter(["short", "x" * 300])  # a name that is too long: root is refused it too
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(tokens))
    assert checkpoints.read(write(checkpoints, 2)).iteration == 2
    assert ["could not be removed" in line for line in said] == [True]
    assert names(run) == steps(1, 2)
    monkeypatch.undo()
    write(checkpoints, 3)
    assert (len(said), names(run)) == (1, steps(3))


@pytest.mark.parametrize(
    ("facts", "error", "said"),
    [
        ({"a": math.nan}, TypeError, "The facts of a checkpoint must be JSON: "),
        ({"a": torch.ones(1)}, TypeError, "The facts of a checkpoint must be JSON: "),
        ({"a": "x" * (16 << 20)}, ValueError, r"The facts of a checkpoint can have \d+ bytes\. Got"),
    ],
    ids=["NaN", "a tensor", "16 MiB"],
)
def test_facts_that_are_no_json_or_too_many_are_refused(
    checkpoints: CheckpointStore, run: Path, facts: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        checkpoints.write(state(1.0), iteration=1, facts=facts)
    assert names(run) == []


@pytest.mark.parametrize(
    ("text", "found"), [('{"id": "a"}', "a"), ('{"id": 5}', None), ("[]", None), ("{", None), ("[" * 10**5, None)]
)
def test_a_runs_id_is_read_from_its_file(run: Path, text: str, found: str | None) -> None:
    (run / "run.json").write_text(text)
    assert run_id_of(run) == found
    assert run_id_of(run / "none") is None


def test_the_list_says_which_is_next_and_which_is_best(checkpoints: CheckpointStore, run: Path) -> None:
    assert list_checkpoints(run)[0] is False
    for iteration, score in ((100, 0.25), (200, None), (300, 0.5), (400, 0.75)):
        write(checkpoints, iteration, score)
    good, lines = list_checkpoints(run)
    assert good
    assert [line.split()[0] for line in lines] == ["checkpoint", *steps(400, 300, 200, 100)]
    assert lines[1].endswith("0.75   valid, a resumed run starts from here")
    assert lines[3].endswith("-      valid")
    assert lines[4].endswith("0.25   valid, best")
    (run / "checkpoints" / "step-00000400" / TENSORS).write_bytes(b"short")
    good, lines = list_checkpoints(run)
    assert not good
    assert "NOT VALID: tensors.safetensors has 5 bytes" in lines[1]
    assert lines[2].endswith("valid, a resumed run starts from here")


@pytest.mark.parametrize("below", ["", "trials"])
def test_a_folder_of_runs_is_named_with_some_of_them(below: str, tmp_path: Path) -> None:
    for name in "dbcae":
        write_run(tmp_path / below / name, [], status="done")
    (tmp_path / below / "other").mkdir()
    named = ", ".join(str(tmp_path / below / name) for name in "abc")
    with pytest.raises(ValueError, match=re.escape(f"folder of runs: {named} and 2 more. Pass one of them.")):
        list_checkpoints(tmp_path)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_loses_nothing() -> None:
    done = scripts.run("-m", kill_while_saving.__name__, "--times", "10", "--mib", "1", "--without-control")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| checkpoints | 10 | 0 | 0 |" in done.stdout
