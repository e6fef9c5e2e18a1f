"""The checkpoints of a run on the disk, each whole or absent. See [Note: Whole or absent]."""

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

# [Note: Whole or absent] A checkpoint is written to a folder of another name, its files and the folder are flushed to
# the disk (fsync), and one rename makes it a checkpoint. Only then are older ones removed, by a rename first. A kill at
# any moment leaves whole checkpoints, and folders whose names begin with a dot. SHA-256 sums in the manifest, one of
# itself included, reveal later changes: torch.load accepted 996 of 1,000 files with a flipped bit. Each file is opened
# once, so the bytes that are summed are those that are parsed.

# [Note: Corrupt or unreadable] A wrong sum, size or form is damage, and the checkpoint before it is used. An error
# while reading (EIO, ESTALE, no memory, no permission) may be gone at the next start, and going back would overwrite a
# checkpoint that is intact. So it ends the start.

CHECKPOINTS = "checkpoints"  # in a run folder
TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = "ddp_loop checkpoint"
VERSION = 1
ITERATIONS = 10**12
MANIFEST_BYTES = 16 << 20
STATE_BYTES = 256 << 20  # parsed, JSON takes ten times the memory
HEADER_BYTES = 100_000_000  # the limit of safetensors

NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,12})(?:-([2-9]|[1-9][0-9]{1,8}))?")


_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}  # other kinds of files


class CorruptCheckpoint(ValueError):
    """A checkpoint is damaged, or belongs to another run.

    Attributes:
        path: the file, or the folder.
        what: the damage, as the end of a sentence about `path`.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return f"A checkpoint is corrupt: {self.path} {self.what}. The one before it is used."


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read: its path, and the arguments of `CheckpointStore.write`."""

    path: Path
    iteration: int
    facts: Mapping[str, Any]
    score: float | None
    packed: SerializedState


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's folder; `bytes` is the size of its files, `problem` describes damage."""

    path: Path
    iteration: int
    score: float | None
    bytes: int
    written_s: float  # Unix time
    problem: str | None


class CheckpointStore:
    """The checkpoints of a run. Only one process may write at a time.

    Args:
        run: the run folder, which must exist.
        run_id: the id in run.json; checkpoints of other runs are refused.
        keep_last: how many of the newest checkpoints are kept, beside the best one.

    Attributes:
        last_warning: an error of `clean`, or of the last `write` once the checkpoint was durable; None without one.
        refused: the corrupt checkpoints that the last `newest` skipped.
    """

    def __init__(self, run: Path, run_id: str, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1. Got {keep_last}.")
        self.folder = Path(os.path.abspath(run)) / CHECKPOINTS
        self.last_warning: str | None = None
        self.refused: list[CorruptCheckpoint] = []
        self._run_id = run_id
        self._keep = keep_last
        self._has_run = run_id_of(run) == run_id

    def write(
        self, packed: SerializedState, *, iteration: int, facts: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Write a checkpoint that survives a loss of power once this returns, and remove old ones.

        Args:
            packed: the state, which must not change meanwhile.
            iteration: names the folder; a second checkpoint of an iteration gets a number.
            facts: JSON values.
            score: lower is better; the checkpoint with the lowest finite score is kept.

        Raises:
            OSError: it cannot be written; earlier checkpoints are intact.
            ValueError, TypeError: the facts or the state are too large, or are not JSON values.
        """
        iteration = operator.index(iteration)
        score = None if score is None else float(score)
        if not 0 <= iteration <= ITERATIONS:
            raise ValueError(f"An iteration must be from 0 to {ITERATIONS}. Got {iteration}.")
        state = _json("The state", packed.structure, STATE_BYTES)
        head = {"format": FORMAT, "version": VERSION, "run": self._run_id, "iteration": iteration}
        head |= {"score": score if score is None or math.isfinite(score) else str(score), "facts": dict(facts)}
        temporary = self.folder / f"{SAVING}{iteration}-{secrets.token_hex(4)}"
        self.last_warning = None
        what = f"The checkpoint of step {iteration} could not be written to {self.folder}"
        with explained(what, REPAIR), ExitStack() as ending:
            ending.callback(shutil.rmtree, temporary, ignore_errors=True)
            self._check_run()
            if not is_folder(self.folder):
                self.folder.mkdir()
                sync_folder(self.folder.parent)
            temporary.mkdir()
            files = {TENSORS: write_new(temporary / TENSORS, _parts(packed.tensors))}
            files |= {STATE: write_new(temporary / STATE, [state])}
            manifest = _json("The facts", head | {"files": files}, MANIFEST_BYTES - 100)
            write_new(temporary / MANIFEST, [_sealed(manifest[:-1])])
            sync_folder(temporary)
            path = self.folder / self._free_name(iteration)
            temporary.rename(path)
            sync_folder(self.folder)
        try:
            self._prune(path)
        except OSError as error:
            self.last_warning = f"Old checkpoints in {self.folder} could not be removed ({error}). Remove them by hand."
        return path

    def give_score(self, path: Path, score: float) -> None:
        """Write a checkpoint's score, by the rename of a manifest: the checkpoint is whole at every moment.

        Raises:
            OSError: the score cannot be written.
            CorruptCheckpoint: the checkpoint is damaged.
        """
        with _refusing(path), opened(path) as folder:
            said = self._manifest(folder, path.name)
        said |= {"score": score if math.isfinite(score) else str(score)}
        del said["sha256"]
        temporary = self.folder / f"{SAVING}{path.name}-{secrets.token_hex(4)}"
        with explained(f"The score of {path} could not be written", REPAIR):
            try:
                write_new(temporary, [_sealed(_json("The facts", said, MANIFEST_BYTES - 100)[:-1])])
                temporary.rename(path / MANIFEST)
                sync_folder(path)
            finally:
                with suppress(OSError):
                    temporary.unlink()

    def _check_run(self) -> None:
        """Raise FileNotFoundError if the run folder was removed or replaced."""
        if self._has_run and run_id_of(self.folder.parent) != self._run_id:
            raise FileNotFoundError(errno.ENOENT, f"{self.folder.parent} is no longer the folder of this run")

    def read(self, path: Path) -> Checkpoint:
        """Read one of the run's checkpoints, and verify every bit of it.

        Raises:
            CorruptCheckpoint: it is damaged, or belongs to another run.
            OSError, MemoryError: it cannot be read now. See [Note: Corrupt or unreadable].
        """
        from safetensors.torch import load

        name = path.name
        if Path(os.path.abspath(path)).parent != self.folder or not NAME.fullmatch(name):
            raise CorruptCheckpoint(path, f"is not a checkpoint in {self.folder}")
        with _refusing(path), opened(self.folder), opened(self.folder / name) as folder:
            said = self._manifest(folder, name)
            contents = {}
            for file, form in said["files"].items():
                with _refusing(path / file):
                    most = STATE_BYTES if file == STATE else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
                    contents[file] = bytes_of(folder, file, most, form["bytes"])
                    if hashlib.sha256(contents[file]).hexdigest() != form["sha256"]:
                        raise CorruptCheckpoint(path / file, "does not have the SHA-256 in the manifest")
            with _refusing(path / TENSORS):
                tensors = load(contents.pop(TENSORS))
            with _refusing(path / STATE):
                packed = SerializedState(parse(contents[STATE]), tensors)
                from_tree(packed)
        return Checkpoint(path, said["iteration"], said["facts"], _score_of(said["score"]), packed)

    def newest(self) -> Checkpoint | None:
        """Read the newest intact checkpoint; `refused` then has the newer ones.

        Raises:
            OSError: it cannot be read now.
        """
        self.refused = []
        with explained(f"The checkpoints in {self.folder} cannot be listed now", "Start again when they can be."):
            names = self._names()
        for name in names:
            try:
                return self.read(self.folder / name)
            except CorruptCheckpoint as error:
                self.refused.append(error)
            except (OSError, MemoryError) as error:
                number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
                why = os.strerror(number) if number else error
                raise OSError(
                    number,
                    f"The newest checkpoint {self.folder / name} cannot be read now ({why}). Start again when it can "
                    "be read. If it never can, move it away; the one before it is then used.",
                ) from error
        return None

    def entries(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """List all checkpoints, the newest first; without `verify` the large files are not read."""
        found = [self._entry(name, verify) for name in self._names()]
        return [one for one in found if one.problem is None or os.path.lexists(one.path)]  # one may just be removed

    def clean(self) -> None:
        """Remove what a killed process left behind. No other process may be writing."""
        self.last_warning = None
        try:
            for name in os.listdir(self.folder) if is_folder(self.folder) else ():
                if name.startswith((SAVING, DELETING)):
                    remove(self.folder / name)
        except (OSError, RecursionError) as error:  # deeply nested folders raise the latter
            self.last_warning = f"Files of a killed save in {self.folder} could not be removed. {error}"

    def _names(self) -> list[str]:
        found = os.listdir(self.folder) if is_folder(self.folder) else []
        return sorted(filter(NAME.fullmatch, found), key=_numbers_in, reverse=True)

    def _free_name(self, iteration: int) -> str:
        numbers = [number for one, number in map(_numbers_in, self._names()) if one == iteration]
        return f"step-{iteration:08d}" + (f"-{max(numbers) + 1}" if numbers else "")

    def _manifest(self, folder: int, name: str) -> dict[str, Any]:
        """Read an open folder's manifest, and check all that needs no other file's content."""
        path = self.folder / name
        there = set(os.listdir(folder))
        for one in sorted(there ^ {TENSORS, STATE, MANIFEST}):
            raise CorruptCheckpoint(path / one, "does not belong to a checkpoint" if one in there else "is missing")
        with _refusing(path / MANIFEST):
            data = bytes_of(folder, MANIFEST, MANIFEST_BYTES)
            if data != _sealed(data[: -len(_sealed(b""))]):
                raise ValueError("does not have its own SHA-256")
            said = _checked(parse(data), self._run_id, _numbers_in(name)[0])
        for file, form in said["files"].items():
            with _refusing(path / file):
                size = os.stat(file, dir_fd=folder, follow_symlinks=False).st_size
                if size != form["bytes"]:
                    raise ValueError(f"has {size} bytes instead of the manifest's {form['bytes']}")
        return said

    def _entry(self, name: str, verify: bool) -> CheckpointInfo:
        path = self.folder / name
        score = None
        size = 0
        written = 0.0
        problem = None
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
        except (OSError, MemoryError) as error:
            problem = f"{name} cannot be read now ({type(error).__name__}: {error})"
        return CheckpointInfo(path, _numbers_in(name)[0], score, size, written, problem)

    def _prune(self, written: Path) -> None:
        """Remove old checkpoints except the best one; damaged ones are left for a person to look at."""
        entries = self.entries()
        whole = [entry for entry in entries if entry.problem is None]
        best = best_of(entries)
        for entry in whole[self._keep :]:
            if entry is not best and entry.path != written:
                remove(entry.path)


def run_id_of(run: Path) -> str | None:
    """Return the id in run.json; None if it cannot be read."""
    try:
        with opened(Path(os.path.realpath(run))) as folder:
            content = parse(bytes_of(folder, "run.json", MANIFEST_BYTES))
    except (OSError, ValueError):
        return None
    found = content.get("id") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def best_of(entries: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the intact checkpoint with the lowest finite score, the oldest one of equals; None without a score."""
    return next(iter(by_score(entries)), None)


def by_score(entries: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the intact checkpoints with a finite score, the lowest first, of equals the oldest."""
    scored = [one for one in entries[::-1] if one.problem is None and one.score is not None]
    return sorted((one for one in scored if math.isfinite(one.score or 0.0)), key=lambda one: one.score or 0.0)


def _numbers_in(name: str) -> tuple[int, int]:
    """Parse a folder's name: the iteration, and the number among its checkpoints."""
    iteration, _, number = name.removeprefix("step-").partition("-")
    return int(iteration), int(number or 1)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise every error of the block as CorruptCheckpoint, but not one of reading."""
    try:
        yield
    except (CorruptCheckpoint, MemoryError):
        raise
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise CorruptCheckpoint(path, f"cannot be read ({type(error).__name__}: {error})") from error
    except Exception as error:
        if "can't allocate memory" in str(error):  # torch's own error
            raise MemoryError(str(error)) from error
        what = f"{error}" if type(error) is ValueError else f"cannot be read ({type(error).__name__}: {error})"
        raise CorruptCheckpoint(path, what) from error


def _checked(content: Any, run_id: str, iteration: int) -> dict[str, Any]:
    """Return a manifest of the right form, run and iteration; it cannot name other files to open."""
    manifest: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
    for key, one in {"format": FORMAT, "version": VERSION, "run": run_id, "iteration": iteration}.items():
        if type(manifest.get(key)) is not type(one) or manifest[key] != one:
            raise ValueError(f"has {key} {str(manifest.get(key))[:60]} instead of {one}")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {TENSORS, STATE} or not isinstance(manifest.get("facts"), dict):
        raise ValueError(f"lacks facts, or the sums of {TENSORS} and {STATE}")
    if any(not isinstance(form, dict) or type(form.get("bytes")) is not int for form in files.values()):
        raise ValueError("has a size that is not a number")
    _score_of(manifest.get("score"))
    return manifest


def _score_of(score: Any) -> float | None:
    if score is None or type(score) in (int, float) or score in ("nan", "inf", "-inf"):
        return score if score is None else float(score)
    raise ValueError(f"has a score that is not a number: {str(score)[:60]}")


def _json(what: str, value: Any, most: int) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} of a checkpoint must be JSON: numbers, strings, lists, dicts. {error}.") from error
    if len(data) > most:
        raise ValueError(f"{what} of a checkpoint can have {most} bytes. Got {len(data)}. Keep large data in tensors.")
    return data


def _sealed(body: bytes) -> bytes:
    """End a JSON object, given without its last bracket, with its own SHA-256."""
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file without copies; the widest elements come first, to align all."""
    header = {}
    offset = 0
    parts = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NATIVE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        parts.append(tensor.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data)
        offset = end
    said = _json("The tensors' names", header, HEADER_BYTES - 8)
    said += b" " * (-len(said) % 8)
    return [len(said).to_bytes(8, "little"), said, *parts]
