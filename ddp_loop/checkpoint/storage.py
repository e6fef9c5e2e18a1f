"""Checkpoints: everything needed to go on, whole on the disk or not there at all. See [Note: Whole or absent]."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import operator
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint.atomic_files import (
    DELETING,
    REPAIR,
    SAVING,
    bytes_of,
    explained,
    is_folder,
    opened,
    remove,
    sync_folder,
    write_new,
)
from ddp_loop.checkpoint.serialization import NATIVE, SerializedState, from_tree, parse

# [Note: Whole or absent] A checkpoint is written to a folder of another name, each file and the folder are brought to
# the disk (fsync), and one rename makes it a checkpoint; only then are older ones removed, by a rename first. So a kill
# at any moment leaves whole checkpoints and, beside them, folders that begin with a dot. What a disk changes later, the
# manifest's SHA-256 sums show, its own included: of 1,000 flipped bits torch.load took 996 without a word. The bytes
# that are summed are those that are parsed, from a file opened once.

CHECKPOINTS = "checkpoints"  # in a run folder
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
FORMAT, VERSION = "ddp_loop checkpoint", 1
ITERATIONS = 10**12
MANIFEST_BYTES = 16 << 20
STATE_BYTES = 256 << 20  # as JSON values it takes ten times the memory
HEADER_BYTES = 100_000_000  # what safetensors reads

NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,12})(?:-([2-9]|[1-9][0-9]{1,8}))?")
WORDS = dict(zip(NATIVE, ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"), strict=True))


class CorruptCheckpoint(ValueError):
    """A checkpoint is not as it was written.

    Attributes:
        path: the file, or the folder.
        what: what is wrong with it.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path, self.what = path, what

    def __str__(self) -> str:
        return f"a checkpoint must be as it was written; {self.path} {self.what}: the one before it is used"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was read: the arguments of `CheckpointStore.write`, and where."""

    path: Path
    iteration: int
    facts: Mapping[str, Any]
    score: float | None
    packed: SerializedState


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's folder; `bytes` is what its files take, `problem` what is wrong with it."""

    path: Path
    iteration: int
    score: float | None
    bytes: int
    written_s: float  # since the epoch
    problem: str | None


class CheckpointStore:
    """The checkpoints of a run; one process at a time may write.

    Args:
        run: the run folder, which must be there.
        run_id: what run.json says; checkpoints of other runs are refused.
        keep_last: how many of the last ones stay, beside the best.

    Attributes:
        last_warning: what went wrong in `clean`, or in the last `write` after the checkpoint was safe, or None.
        refused: what the last `newest` passed over.
    """

    def __init__(self, run: Path, run_id: str, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise ValueError(f"at least the last checkpoint is kept; got keep_last={keep_last}: give 1 or more")
        self.folder = Path(os.path.abspath(run)) / CHECKPOINTS
        self.last_warning: str | None = None
        self.refused: list[CorruptCheckpoint] = []
        self._run_id, self._keep = run_id, keep_last
        self._is_named = run_id_of(run) == run_id  # in its run.json

    def write(
        self, packed: SerializedState, *, iteration: int, facts: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Write a checkpoint; when this returns, it lasts through a loss of power. Then older ones are removed.

        Args:
            packed: must not change meanwhile.
            iteration: the folder's name; a second one of the same iteration gets a number.
            facts: JSON values.
            score: the checkpoint with the lowest finite one is kept.

        Raises:
            OSError: it could not be written; those before are as they were.
            ValueError, TypeError: the facts or the state are too large, or no JSON values.
        """
        iteration, score = operator.index(iteration), None if score is None else float(score)
        if not 0 <= iteration <= ITERATIONS:
            raise ValueError(f"an iteration is a number from 0 to {ITERATIONS}; got {iteration}")
        state = _json("the state", packed.structure, STATE_BYTES)
        head = {"format": FORMAT, "version": VERSION, "run": self._run_id, "iteration": iteration}
        head |= {"score": score if score is None or math.isfinite(score) else str(score), "facts": dict(facts)}
        temporary = self.folder / f"{SAVING}{iteration}-{secrets.token_hex(4)}"
        self.last_warning = None
        with explained(f"A checkpoint could not be written to {self.folder}", REPAIR), ExitStack() as ending:
            ending.callback(shutil.rmtree, temporary, ignore_errors=True)
            self._check_run()
            if not is_folder(self.folder):
                self.folder.mkdir()
                sync_folder(self.folder.parent)
            temporary.mkdir()
            files = {TENSORS: write_new(temporary / TENSORS, _parts(packed.tensors))}
            files |= {STATE: write_new(temporary / STATE, [state])}
            manifest = _json("the facts", head | {"files": files}, MANIFEST_BYTES - 100)
            write_new(temporary / MANIFEST, [_sealed(manifest[:-1])])
            sync_folder(temporary)
            path = self.folder / self._free_name(iteration)
            temporary.rename(path)
            sync_folder(self.folder)
        try:
            self._prune(path)
        except OSError as error:
            self.last_warning = f"old checkpoints in {self.folder} could not be removed ({error}): remove them by hand"
        return path

    def give_score(self, path: Path, score: float) -> None:
        """Give a checkpoint its score: by one rename of a manifest, so it is whole at every moment.

        Raises:
            OSError: it could not be written.
            CorruptCheckpoint: it is not as it was written.
        """
        with _refusing(path), opened(path) as folder:
            said = self._manifest(folder, path.name)
        said |= {"score": score if math.isfinite(score) else str(score)}
        del said["sha256"]
        temporary = self.folder / f"{SAVING}{path.name}-{secrets.token_hex(4)}"
        with explained(f"The score of {path} could not be written", REPAIR):
            try:
                write_new(temporary, [_sealed(_json("the facts", said, MANIFEST_BYTES - 100)[:-1])])
                temporary.rename(path / MANIFEST)
                sync_folder(path)
            finally:
                with suppress(OSError):
                    temporary.unlink()

    def _check_run(self) -> None:
        """Raise FileNotFoundError if the run folder is no longer there, or another one stands in its place."""
        if self._is_named and run_id_of(self.folder.parent) != self._run_id:
            raise FileNotFoundError(errno.ENOENT, f"{self.folder.parent} is no longer the folder of this run")

    def read(self, path: Path) -> Checkpoint:
        """Read one of the run's checkpoints, and check every bit of it.

        Raises:
            CorruptCheckpoint: it is not as it was written, or of another run.
        """
        from safetensors.torch import load

        name = path.name
        if Path(os.path.abspath(path)).parent != self.folder or not NAME.fullmatch(name):
            raise CorruptCheckpoint(path, f"is no checkpoint in {self.folder}")
        with _refusing(path), opened(self.folder), opened(self.folder / name) as folder:
            said, contents = self._manifest(folder, name), {}
            for file, form in said["files"].items():
                with _refusing(path / file):
                    most = STATE_BYTES if file == STATE else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
                    contents[file] = bytes_of(folder, file, most, form["bytes"])
                    if hashlib.sha256(contents[file]).hexdigest() != form["sha256"]:
                        raise CorruptCheckpoint(path / file, "has another SHA-256 than the manifest says")
            with _refusing(path / TENSORS):
                tensors = load(contents.pop(TENSORS))
            with _refusing(path / STATE):
                packed = SerializedState(parse(contents[STATE]), tensors)
                from_tree(packed)
        return Checkpoint(path, said["iteration"], said["facts"], _score_of(said["score"]), packed)

    def newest(self) -> Checkpoint | None:
        """The newest one that is as it was written; `refused` then has those that are newer."""
        self.refused = []
        for name in self._names():
            try:
                return self.read(self.folder / name)
            except CorruptCheckpoint as error:
                self.refused.append(error)
        return None

    def entries(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """All checkpoints, the newest first; without `verify` the sums of the large files are not looked at."""
        found = [self._entry(name, verify) for name in self._names()]
        return [one for one in found if one.problem is None or os.path.lexists(one.path)]  # else removed meanwhile

    def clean(self) -> None:
        """Remove what a killed process left; only where no other one writes."""
        self.last_warning = None
        try:
            for name in os.listdir(self.folder) if is_folder(self.folder) else ():
                if name.startswith((SAVING, DELETING)):
                    remove(self.folder / name)
        except (OSError, RecursionError) as error:  # the latter of folders in folders
            self.last_warning = f"what a killed save left in {self.folder} could not be removed: {error}"

    def _names(self) -> list[str]:
        found = os.listdir(self.folder) if is_folder(self.folder) else []
        return sorted(filter(NAME.fullmatch, found), key=_place, reverse=True)

    def _free_name(self, iteration: int) -> str:
        numbers = [number for one, number in map(_place, self._names()) if one == iteration]
        return f"step-{iteration:08d}" + (f"-{max(numbers) + 1}" if numbers else "")

    def _manifest(self, folder: int, name: str) -> dict[str, Any]:
        """The manifest of an open folder, after all checks that need no other file's bytes."""
        path = self.folder / name
        there = set(os.listdir(folder))
        for one in sorted(there ^ {TENSORS, STATE, MANIFEST}):
            raise CorruptCheckpoint(path / one, "does not belong there" if one in there else "is missing")
        with _refusing(path / MANIFEST):
            data = bytes_of(folder, MANIFEST, MANIFEST_BYTES)
            if data != _sealed(data[: -len(_sealed(b""))]):
                raise ValueError("has another SHA-256 than it says itself")
            said = _checked(parse(data), self._run_id, _place(name)[0])
        for file, form in said["files"].items():
            with _refusing(path / file):
                size = os.stat(file, dir_fd=folder, follow_symlinks=False).st_size
                if size != form["bytes"]:
                    raise ValueError(f"takes {size} bytes, and the manifest says {form['bytes']}")
        return said

    def _entry(self, name: str, verify: bool) -> CheckpointInfo:
        path, score, size, written, problem = self.folder / name, None, 0, 0.0, None
        try:
            with _refusing(path), opened(path) as folder:
                forms = {one: os.stat(one, dir_fd=folder, follow_symlinks=False) for one in os.listdir(folder)}
                size = sum(form.st_size for form in forms.values())
                written = forms[MANIFEST].st_mtime if MANIFEST in forms else 0.0
                score = _score_of(self._manifest(folder, name)["score"])
            if verify:
                self.read(path)
        except CorruptCheckpoint as error:
            problem = f"{error.path.name} {error.what}"
        return CheckpointInfo(path, _place(name)[0], score, size, written, problem)

    def _prune(self, written: Path) -> None:
        """Remove all but the last checkpoints and the best; what is not whole is left for a person."""
        entries = self.entries()
        whole = [entry for entry in entries if entry.problem is None]
        best = best_of(entries)
        for entry in whole[self._keep :]:
            if entry is not best and entry.path != written:
                remove(entry.path)


def run_id_of(run: Path) -> str | None:
    """A run's id, as run.json has it; None if there is none that can be read."""
    try:
        with opened(run) as folder:
            said = parse(bytes_of(folder, "run.json", MANIFEST_BYTES))
    except (OSError, ValueError):
        return None
    found = said.get("id") if isinstance(said, dict) else None
    return found if isinstance(found, str) else None


def best_of(entries: list[CheckpointInfo]) -> CheckpointInfo | None:
    """The whole one with the lowest finite score; of equal ones the first."""
    scored = [one for one in entries if one.problem is None and one.score is not None and math.isfinite(one.score)]
    return min(reversed(scored), key=lambda one: one.score or 0.0, default=None)


def _place(name: str) -> tuple[int, int]:
    """Iteration and number that a name says."""
    iteration, _, number = name.removeprefix("step-").partition("-")
    return int(iteration), int(number or 1)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Whatever a bad file leads to is one thing: a bad file."""
    try:
        yield
    except CorruptCheckpoint:
        raise
    except ValueError as error:
        raise CorruptCheckpoint(path, f"{error}") from error
    except Exception as error:
        raise CorruptCheckpoint(path, f"cannot be read ({type(error).__name__}: {error})") from error


def _checked(said: Any, run_id: str, iteration: int) -> dict[str, Any]:
    """A manifest, if it has the right form, run and iteration; what it says names no file to open."""
    said = dict(said) if isinstance(said, dict) else {}  # which then has no format
    for key, one in {"format": FORMAT, "version": VERSION, "run": run_id, "iteration": iteration}.items():
        if type(said.get(key)) is not type(one) or said[key] != one:
            raise ValueError(f"says {key} {str(said.get(key))[:60]}, and it must be {one}")
    files = said.get("files")
    if not isinstance(files, dict) or set(files) != {TENSORS, STATE} or not isinstance(said.get("facts"), dict):
        raise ValueError(f"must have facts, and the sums of {TENSORS} and {STATE}")
    if any(not isinstance(form, dict) or type(form.get("bytes")) is not int for form in files.values()):
        raise ValueError("has a size that is no number")
    _score_of(said.get("score"))
    checked: dict[str, Any] = said
    return checked


def _score_of(said: Any) -> float | None:
    if said is None or type(said) in (int, float) or said in ("nan", "inf", "-inf"):
        return said if said is None else float(said)
    raise ValueError(f"has a score that is no number: {str(said)[:60]}")


def _json(what: str, value: Any, most: int) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} of a checkpoint must be JSON values; {error}: give numbers, words, lists") from error
    if len(data) > most:
        raise ValueError(f"{what} of a checkpoint take at most {most} bytes; got {len(data)}: keep numbers in tensors")
    return data


def _sealed(body: bytes) -> bytes:
    """A JSON object but for its last bracket, ended with the SHA-256 of itself."""
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """The bytes of a safetensors file, without a copy: the widest elements first, so that all are aligned."""
    header, offset, parts = {}, 0, []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        parts.append(tensor.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data)
        offset = end
    said = _json("the tensors' names", header, HEADER_BYTES - 8)
    said += b" " * (-len(said) % 8)
    return [len(said).to_bytes(8, "little"), said, *parts]
