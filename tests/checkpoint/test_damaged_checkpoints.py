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

import pytest
import torch

from ddp_loop.checkpoint import CheckpointStore, storage
from ddp_loop.checkpoint.serialization import from_tree, to_tree
from ddp_loop.checkpoint.storage import MANIFEST, STATE, TENSORS, CorruptCheckpoint
from tests.faults.flip_bits import cut, flip_checkpoints, flipped

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
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def checkpoints(run: Path) -> CheckpointStore:
    return make_run(run)


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
    with pytest.raises(CorruptCheckpoint):
        checkpoints.read(checkpoints.folder / "step-00000002")


def sealed(fields: dict[str, Any]) -> bytes:
    """A valid manifest, computed here independently of the package."""
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def forge(folder: Path, name: str | None = None, data: bytes = b"", **fields: Any) -> None:
    """Put other bytes in the place of a file, with the right size and sums, or other fields into the manifest."""
    said = json.loads((folder / MANIFEST).read_bytes())
    del said["sha256"]
    if name is not None:
        (folder / name).write_bytes(data)
        said["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(sealed(said | fields))


def test_a_forged_manifest_with_the_same_words_is_the_same(newest: Path) -> None:
    before = (newest / MANIFEST).read_bytes()
    forge(newest)
    assert (newest / MANIFEST).read_bytes() == before


def test_every_flipped_bit_and_every_cut_is_seen(tmp_path: Path) -> None:
    state = {"w": torch.randn(64), "n": torch.ones(3)}
    counts = flip_checkpoints(tmp_path, state, 3 * 40, random.Random(0))
    assert {name: dict(one) for name, one in counts.items()} == {name: {"seen": 40} for name in FILES}
    counts = flip_checkpoints(tmp_path / "cut", state, 3 * 10, random.Random(0), cut)
    assert {name: dict(one) for name, one in counts.items()} == {name: {"seen": 10} for name in FILES}


def test_bits_are_flipped_and_flipped_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with flipped(path, random.Random(0)):
        assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    assert path.read_bytes() == bytes(100)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0])
def test_a_file_that_is_too_short_or_too_long_is_refused(
    checkpoints: CheckpointStore, newest: Path, name: str, left: float
) -> None:
    data = (newest / name).read_bytes()
    (newest / name).write_bytes(data + b"\0" if left == 1 else data[: int(left * len(data))])
    assert_refused(checkpoints, name)
    (newest / name).write_bytes(data)
    assert checkpoints.read(newest).iteration == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(checkpoints: CheckpointStore, newest: Path, name: str) -> None:
    (newest / name).unlink()
    assert_refused(checkpoints, name, "is missing")


def test_a_file_too_many_is_named(checkpoints: CheckpointStore, newest: Path) -> None:
    (newest / "more.pt").write_bytes(b"")
    assert_refused(checkpoints, "more.pt", "does not belong to a checkpoint")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", ["r1", "r2"])
def test_a_file_of_another_checkpoint_is_refused(
    checkpoints: CheckpointStore, newest: Path, run: Path, name: str, other: str
) -> None:
    folder = newest.with_name("step-00000001")
    if other != "r1":
        folder = make_run(run.with_name(other), other).folder / "step-00000002"
        torch_file = (folder / TENSORS).read_bytes()
        (folder / TENSORS).write_bytes(torch_file[:-1] + b"\1")  # else two runs may have the same tensors
    shutil.copy(folder / name, newest / name)
    assert_refused(checkpoints, name)


def test_a_folder_of_another_run_is_refused(checkpoints: CheckpointStore, newest: Path, run: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(make_run(run.with_name("other"), "r2").folder / newest.name, newest)
    assert_refused(checkpoints, MANIFEST, "has run r2 instead of r1")


def test_a_folder_of_another_step_is_refused(checkpoints: CheckpointStore, newest: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-00000001"), newest)
    assert_refused(checkpoints, MANIFEST, "has iteration 1 instead of 2")


class Marks:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", [False, True])
def test_a_pickle_in_the_place_of_a_file_is_not_run(
    checkpoints: CheckpointStore, newest: Path, tmp_path: Path, name: str, forged: bool
) -> None:
    data = pickle.dumps(Marks(tmp_path / "marker"))
    if forged and name != MANIFEST:
        forge(newest, name, data)
    else:
        (newest / name).write_bytes(data)
    assert_refused(checkpoints, name)
    assert not (tmp_path / "marker").exists()
    pickle.loads(data)
    assert (tmp_path / "marker").exists()  # it would have


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"run": "r2"}, "has run r2"),
        ({"run": None}, "has run None"),
        ({"iteration": 3}, "has iteration 3"),
        ({"version": 2}, "has version 2 instead of 1"),
        ({"format": "x"}, "has format x"),
        ({"score": "low"}, "could not convert string to float"),
        ({"score": 10**400}, "OverflowError"),
        ({"files": {}}, "the sums of tensors.safetensors"),
        ({"files": [TENSORS, STATE]}, "AttributeError"),
        ({"files": {"../../run.json": {"bytes": 2, "sha256": ""}, STATE: {"bytes": 1, "sha256": ""}}}, "the sums of"),
        ({"files": {"/dev/zero": {"bytes": 2, "sha256": ""}, STATE: {"bytes": 1, "sha256": ""}}}, "the sums of"),
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_refused(
    checkpoints: CheckpointStore, newest: Path, fields: dict[str, Any], said: str
) -> None:
    forge(newest, **fields)
    assert_refused(checkpoints, MANIFEST, said)


@pytest.mark.parametrize("size", [2**60, 10**300, -1, 0])
def test_a_size_is_held_against_the_file_before_anything_is_read(
    checkpoints: CheckpointStore, newest: Path, size: int
) -> None:
    files = json.loads((newest / MANIFEST).read_bytes())["files"]
    files[TENSORS]["bytes"] = size
    forge(newest, files=files)
    assert_refused(checkpoints, TENSORS, f"instead of the manifest's {size}")


def test_an_immense_manifest_is_refused_without_reading_it(checkpoints: CheckpointStore, newest: Path) -> None:
    os.truncate(newest / MANIFEST, 17 << 20)
    assert_refused(checkpoints, MANIFEST, f"has {17 << 20} bytes instead of ")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])
def test_deep_json_is_refused_also_with_the_right_sums(checkpoints: CheckpointStore, newest: Path, text: bytes) -> None:
    forge(newest, STATE, text)
    assert_refused(checkpoints, STATE, "has more than 100 levels")
    (newest / MANIFEST).write_bytes(text + b',"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n')
    assert_refused(checkpoints, MANIFEST, "has more than 100 levels")


def header_of(fields: Any, data: bytes = b"") -> bytes:
    said = json.dumps(fields).encode()
    return len(said).to_bytes(8, "little") + said + data


def form(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("data", "file"),
    [
        (b"", TENSORS),
        (b"\xff" * 16, TENSORS),
        ((2**63).to_bytes(8, "little"), TENSORS),
        (header_of([]), TENSORS),
        (header_of({"w": form("F32", [2**40], 0, 2**42)}), TENSORS),
        (header_of({"w": form("F32", [2], 0, 4)}, bytes(4)), TENSORS),
        (header_of({"w": form("F32", [1], 0, 4), "n": form("F32", [1], 0, 4)}, bytes(4)), TENSORS),
        (header_of({"w": form("F32", [1], 0, 4)}, bytes(8)), TENSORS),
        (header_of({"w": form("F99", [1], 0, 4)}, bytes(4)), TENSORS),
        (header_of({"w": form("F32", [0, 2**63], 0, 0)}), TENSORS),
        (header_of({"w": form("F32", [1], 0, 4)}, bytes(4)), STATE),  # well formed, and not what the state names
        (header_of({"__metadata__": {"a": "b"}}), STATE),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_forged_tensors_are_refused(checkpoints: CheckpointStore, newest: Path, data: bytes, file: str) -> None:
    forge(newest, TENSORS, data)
    assert_refused(checkpoints, file)


@pytest.mark.parametrize(
    "structure",
    [
        *({"pickle": "x"}, {"builtins.eval": ["1"]}, {"tensor": ["w", "float32", [2**40], [1]]}, [1], "x", None),
        *({"dict": [["w", {"tensor": ["../../run.json", "float32", [64], [1]]}]]}, {"float": "zz"}),
    ],
    ids=str,
)
def test_a_forged_state_is_refused(checkpoints: CheckpointStore, newest: Path, structure: Any) -> None:
    forge(newest, STATE, json.dumps(structure).encode())
    assert_refused(checkpoints, STATE)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_regular_files_are_read(
    checkpoints: CheckpointStore, newest: Path, tmp_path: Path, name: str, kind: str
) -> None:
    shutil.move(newest / name, tmp_path / name)
    if kind == "link":
        (newest / name).symlink_to(tmp_path / name)
    elif kind == "device":
        (newest / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(newest / name) if kind == "pipe" else (newest / name).mkdir()  # no process writes to the pipe
    assert_refused(checkpoints, name, "is not a regular file" if (name, kind) == (MANIFEST, "pipe") else "")


def test_a_link_to_a_whole_checkpoint_is_refused(checkpoints: CheckpointStore, newest: Path, tmp_path: Path) -> None:
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert_refused(checkpoints, newest.name)
    newest.unlink()
    newest.write_text("a file")
    assert_refused(checkpoints, newest.name)


@pytest.mark.parametrize("name", ["step-2", "step-00000002-1", "step-000000002", ".saving-2-ab", "step-٠٠٠٠٠٠٠٢"])
def test_a_folder_of_another_name_is_no_checkpoint(checkpoints: CheckpointStore, newest: Path, name: str) -> None:
    shutil.copytree(newest, checkpoints.folder / name)
    found = checkpoints.newest()
    assert found is not None
    assert found.path == newest
    assert len(checkpoints.entries()) == 2


UNREADABLE = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    PermissionError(errno.EACCES, "Permission denied"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.mark.parametrize("place", ["bytes_of", "opened", "from_tree"])
@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: f"{type(error).__name__} {getattr(error, 'errno', '')}")
def test_a_checkpoint_that_cannot_be_read_now_ends_the_start_and_stays(
    error: Exception, place: str, checkpoints: CheckpointStore, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only damage goes back to the one before, which would then be overwritten by other steps."""

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(storage, place, fail)
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


def test_a_refusal_travels_between_processes(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(CorruptCheckpoint(tmp_path / STATE, "is missing")))
    assert (error.path, error.what) == (tmp_path / STATE, "is missing")
