"""Checkpoints that are not as they were written, by chance or on purpose: refused and named; the one before is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop.checkpoint import CheckpointStore, storage, store_of
from ddp_loop.checkpoint.serialization import from_tree, to_tree
from ddp_loop.checkpoint.storage import MANIFEST, STATE, TENSORS
from ddp_loop.reporting.run_table import records_below
from tests.faults.flip_bits import cut, flip_checkpoints, flipped
from tests.support.runs import go_by_epochs

FILES = (TENSORS, STATE, MANIFEST)


def make_run(run: Path, run_id: str = "r1") -> CheckpointStore:
    """A run with two checkpoints."""
    run.mkdir()
    checkpoints = CheckpointStore(run, run_id)
    for iteration in (1, 2):
        state = {"w": torch.full((64,), float(iteration)), "momentum": torch.ones(3), "n": iteration, run_id: "x"}
        checkpoints.write(to_tree(state), iteration=iteration, facts={"epoch": iteration}, score=0.5)
    return checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return make_run(tmp_path / "run")


@pytest.fixture
def newest(checkpoints: CheckpointStore) -> Path:
    return checkpoints.folder / "step-00000002"


def assert_refused(checkpoints: CheckpointStore, file: str, said: str = "") -> None:
    """The newest is refused with its file named, and the one before it is used."""
    found = checkpoints.newest()
    assert found is not None
    assert found.iteration == 1
    assert from_tree(found.packed)["n"] == 1
    (refused,) = checkpoints.refused
    assert refused.path.name == file
    assert said in str(refused)
    assert str(refused).endswith(". The one before it is used.")


def sealed(body: bytes) -> bytes:
    """A valid manifest of a JSON object without its last bracket, computed here independently of the package."""
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def forge(folder: Path, name: str | None = None, data: bytes = b"", **fields: Any) -> None:
    """Put other bytes in the place of a file, with the right size and sums, or other fields into the manifest."""
    if name == MANIFEST:
        (folder / MANIFEST).write_bytes(data)
        return
    said = json.loads((folder / MANIFEST).read_bytes())
    del said["sha256"]
    if name is not None:
        (folder / name).write_bytes(data)
        said["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(sealed(json.dumps(said | fields, separators=(",", ":")).encode()[:-1]))


def test_a_forged_manifest_with_the_same_words_is_the_same(newest: Path) -> None:
    before = (newest / MANIFEST).read_bytes()
    forge(newest)
    assert (newest / MANIFEST).read_bytes() == before


def test_every_flipped_bit_and_every_cut_is_seen(tmp_path: Path) -> None:
    state = {"w": torch.randn(64), "n": torch.ones(3)}
    for name, damage in (("flip", flipped), ("cut", cut)):
        counts = flip_checkpoints(tmp_path / name, state, 3 * 20, random.Random(0), damage)
        assert {name: dict(one) for name, one in counts.items()} == {name: {"seen": 20} for name in FILES}


# -- files -----------------------------------------------------------------------------------------------------


def emptied(replace: Callable[[Path], object]) -> Callable[[Path], object]:
    """Put something in the place of a file, which is removed."""

    def replaced(file: Path) -> None:
        file.unlink()
        replace(file)

    return replaced


DAMAGES: dict[str, Callable[[Path], object]] = {
    "is longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "is missing": Path.unlink,
    "of another step": lambda file: shutil.copy(file.parent.with_name("step-00000001") / file.name, file),
    "a link": lambda file: file.symlink_to(file.rename(file.parents[3] / file.name)),
    "a pipe": emptied(os.mkfifo),  # no process writes to it
    "a folder": emptied(Path.mkdir),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_the_one_written_is_named(
    checkpoints: CheckpointStore, newest: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](newest / name)
    said = {("a pipe", MANIFEST): "is not a regular file", ("is missing", name): "is missing"}
    assert_refused(checkpoints, name, said.get((damage, name), ""))
    error = checkpoints.refused[0]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # from a rank to another


def test_a_file_too_many_is_named(checkpoints: CheckpointStore, newest: Path) -> None:
    (newest / "more.pt").write_bytes(b"")
    assert_refused(checkpoints, "more.pt", "does not belong to a checkpoint")


def test_an_immense_manifest_is_refused_without_reading_it(checkpoints: CheckpointStore, newest: Path) -> None:
    os.truncate(newest / MANIFEST, 17 << 20)
    assert_refused(checkpoints, MANIFEST, f"has {17 << 20} bytes instead of ")


@pytest.mark.parametrize("kind", ["a link to it", "a file", "of another run", "of another step"])
def test_another_folder_in_its_place_is_refused(checkpoints: CheckpointStore, newest: Path, kind: str) -> None:
    whole = newest.rename(newest.parents[2] / "elsewhere")
    if kind == "a link to it":
        newest.symlink_to(whole)
    elif kind == "a file":
        newest.touch()
    elif kind == "of another run":
        shutil.copytree(make_run(newest.parents[2] / "other", "r2").folder / newest.name, newest)
    else:
        shutil.copytree(newest.with_name("step-00000001"), newest)
    said = {"of another run": "has run r2 instead of r1", "of another step": "has iteration 1 instead of 2"}.get(kind)
    assert_refused(checkpoints, newest.name if said is None else MANIFEST, said or "")


@pytest.mark.parametrize("name", ["step-2", "step-00000002-1", "step-000000002", ".saving-2-ab", "step-٠٠٠٠٠٠٠٢"])
def test_a_folder_of_another_name_is_no_checkpoint(checkpoints: CheckpointStore, newest: Path, name: str) -> None:
    shutil.copytree(newest, checkpoints.folder / name)
    found = checkpoints.newest()
    assert found is not None
    assert found.path == newest
    assert len(checkpoints.entries()) == 2


# -- contents with the right sums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_a_file_is_not_run(
    checkpoints: CheckpointStore, newest: Path, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "marker"

    class Marks:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
            return os.mkdir, (str(marker),)

    data = pickle.dumps(Marks())
    forge(newest, name, data)
    assert_refused(checkpoints, name)
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # it would have


def sums(size: int) -> dict[str, object]:
    return {"bytes": size, "sha256": ""}


@pytest.mark.parametrize(
    ("fields", "file", "said"),
    [
        ({"run": None}, MANIFEST, "has run None"),
        ({"version": 2}, MANIFEST, "has version 2 instead of 1"),
        ({"format": "x"}, MANIFEST, "has format x"),
        ({"score": "low"}, MANIFEST, "could not convert string to float"),
        ({"score": 10**400}, MANIFEST, "OverflowError"),
        ({"files": {}}, MANIFEST, "the sums of tensors.safetensors"),
        ({"files": [TENSORS, STATE]}, MANIFEST, "AttributeError"),
        ({"files": {"../../run.json": sums(2), STATE: sums(2)}}, MANIFEST, "the sums of"),
        ({"files": {TENSORS: sums(2**60), STATE: sums(2)}}, TENSORS, f"instead of the manifest's {2**60}"),
        ({"files": {TENSORS: sums(-1), STATE: sums(2)}}, TENSORS, "instead of the manifest's -1"),
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_refused(
    checkpoints: CheckpointStore, newest: Path, fields: dict[str, Any], file: str, said: str
) -> None:
    forge(newest, **fields)
    assert_refused(checkpoints, file, said)


def header_of(fields: Any, data: bytes = b"") -> bytes:
    said = json.dumps(fields).encode()
    return len(said).to_bytes(8, "little") + said + data


def form(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("name", "data", "file"),
    [
        (TENSORS, b"", TENSORS),
        (TENSORS, (2**63).to_bytes(8, "little"), TENSORS),
        (TENSORS, header_of([]), TENSORS),
        (TENSORS, header_of({"w": form("F32", [2**40], 0, 2**42)}), TENSORS),
        (TENSORS, header_of({"w": form("F32", [2], 0, 4)}, bytes(4)), TENSORS),
        (TENSORS, header_of({"w": form("F99", [1], 0, 4)}, bytes(4)), TENSORS),
        # Well formed, and not what the state names.
        (TENSORS, header_of({"w": form("F32", [1], 0, 4)}, bytes(4)), STATE),
        (TENSORS, header_of({"__metadata__": {"a": "b"}}), STATE),
        (STATE, b'{"pickle": "x"}', STATE),
        (STATE, b'{"tensor": ["w", "float32", [1099511627776], [1]]}', STATE),
        (STATE, b"[1]", STATE),
        (STATE, b"[" * 100_000, STATE),
        (MANIFEST, sealed(b"[" * 100_000), MANIFEST),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_forged_tensors_states_and_manifests_are_refused(
    checkpoints: CheckpointStore, newest: Path, name: str, data: bytes, file: str
) -> None:
    forge(newest, name, data)
    assert_refused(checkpoints, file, "has more than 100 levels" if data.startswith(b"[[") else "")


# -- what cannot be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("bytes_of", OSError(errno.EIO, "Input/output error")),
        ("opened", OSError(errno.ESTALE, "Stale file handle")),
        ("opened", PermissionError(errno.EACCES, "Permission denied")),
        ("from_tree", MemoryError()),
        ("from_tree", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
    ],
    ids=repr,
)
def test_a_checkpoint_that_cannot_be_read_now_ends_the_start_and_stays(
    place: str, error: Exception, checkpoints: CheckpointStore, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only damage goes back to the one before, which would then be overwritten by other steps."""
    with monkeypatch.context() as broken:
        broken.setattr(storage, place, mock.Mock(side_effect=error))
        said = rf"The checkpoint {newest} cannot be read now \(.*\)\. Try again .* move it away; the one"
        with pytest.raises(OSError, match=said):
            checkpoints.newest()
        assert checkpoints.refused == []
        (problem, _) = [one.problem for one in checkpoints.entries(verify=True)]
        assert "cannot be read now" in (problem or "")
    found = checkpoints.newest()
    assert found is not None
    assert found.iteration == 2


def test_where_none_is_good_all_are_named(checkpoints: CheckpointStore) -> None:
    for iteration, name in ((1, STATE), (2, TENSORS)):
        path = checkpoints.folder / f"step-{iteration:08d}" / name
        path.write_bytes(bytes(path.stat().st_size))
    assert checkpoints.newest() is None
    assert [one.path.name for one in checkpoints.refused] == [TENSORS, STATE]
    assert [entry.problem for entry in checkpoints.entries()] == [None, None]  # sizes and manifests alone
    assert all("does not have the SHA-256" in (entry.problem or "") for entry in checkpoints.entries(verify=True))


def train(run: Path, epochs: int, scores: dict[int, float]) -> int:
    """Train one step an epoch, save with these scores, and return the step after which the run resumed."""
    with dl.join_world(device="cpu") as world:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(torch.ones(4, 2), 4, world)
        loop = dl.Loop(batches, epochs, state={"model": model}, run_dir=run, keep_last=2, progress=False)
        resumed = loop.iteration

        def save() -> None:
            if loop.iteration in scores:
                loop.save(scores[loop.iteration])

        go_by_epochs(loop, model, optimizer, after_epoch=save)
    return resumed


def test_a_damaged_one_with_the_best_score_costs_no_intact_one_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its name it was the best and one of those kept, also in later starts, and step 2 was removed for it."""
    run = tmp_path / "run"
    assert train(run, 3, {1: 0.5, 2: 0.2, 3: 0.1}) == 0
    folder = run / "checkpoints"
    tensors = folder / "step-00000003" / TENSORS
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    assert train(run, 5, {5: 0.3}) == 2
    said = capsys.readouterr().out
    assert f"{tensors} does not have the SHA-256" in said
    assert "The one before it is used" in said
    assert train(run, 8, {}) == 5
    kept = {entry.iteration: entry.score for entry in store_of(run).entries(verify=True) if entry.problem is None}
    assert kept == {8: None, 7: None, 2: 0.2}
    [damaged] = folder.glob("damaged-step-00000003-*")
    assert (damaged / TENSORS).exists()
    (scores,) = [one.scores["score"] for one in records_below(run)]
    assert (scores.best, scores.best_at) == (0.2, 2)


def test_only_damage_that_a_listing_does_not_show_is_renamed(checkpoints: CheckpointStore) -> None:
    """Others count neither as the best nor as kept: one of a newer version must keep its name."""
    for iteration, name in ((3, STATE), (4, MANIFEST)):
        path = checkpoints.write(to_tree({"n": iteration}), iteration=iteration, facts={}) / name
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.iteration == 2
    assert len(checkpoints.refused) == 2
    [renamed] = checkpoints.set_aside()
    assert renamed.name.startswith("damaged-step-00000003-")
    assert sorted(os.listdir(checkpoints.folder)) == [
        renamed.name,
        *(f"step-0000000{number}" for number in (1, 2, 4)),
    ]
