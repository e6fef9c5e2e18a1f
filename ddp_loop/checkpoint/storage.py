"""The checkpoints of a run on the disk, each whole or absent. See [Note: Whole or absent]."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint.atomic_files import (
    DELETING,
    SAVING,
    bytes_of,
    explained,
    is_folder,
    opened,
    remove,
    replacing,
    sync_folder,
    write_new,
)
from ddp_loop.checkpoint.run_folder import no_run, run_id_of
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
MANIFEST_BYTES = 16 << 20
STATE_BYTES = 256 << 20  # parsed, JSON takes ten times the memory
HEADER_BYTES = 100_000_000  # the limit of safetensors
_SEAL_BYTES = 78

NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,12})(?:-([2-9]|[1-9][0-9]{1,8}))?")
DAMAGED = "damaged-"  # a checkpoint that a resumed run refused


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


def mebibytes(size: int) -> str:
    """A number of bytes in MiB, of three digits where it is below 100: 1,431 and 0.00214."""
    mib = size / 2**20
    return f"{mib:,.0f}" if mib >= 99.5 else f"{mib:.3g}"


class CheckpointStore:
    """The checkpoints of a run. Only one process may write at a time.

    Args:
        run: the run folder, which must exist.
        run_id: the id in run.json; checkpoints of other runs are refused.
        keep_last: how many of the newest checkpoints are kept, beside the best one.
        say: is given a line about files that cannot be removed.

    Attributes:
        refused: the corrupt checkpoints that the last `newest` skipped.
    """

    def __init__(self, run: Path, run_id: str, keep_last: int = 3, say: Callable[[str], object] = print) -> None:
        self.folder = Path(os.path.abspath(run)) / CHECKPOINTS
        self.refused: list[CorruptCheckpoint] = []
        self._run_id = run_id
        self._keep = keep_last
        self._say = say
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
        state = _json("The state", packed.structure, STATE_BYTES)
        temporary = self.folder / f"{SAVING}{iteration}-{secrets.token_hex(4)}"
        what = f"The checkpoint of step {iteration} could not be written to {self.folder}"
        with explained(what), ExitStack() as ending:
            ending.callback(shutil.rmtree, temporary, ignore_errors=True)
            if self._has_run and run_id_of(self.folder.parent) != self._run_id:
                raise FileNotFoundError(errno.ENOENT, f"{self.folder.parent} is no longer the folder of this run")
            if not is_folder(self.folder):
                self.folder.mkdir()
                sync_folder(self.folder.parent)
            temporary.mkdir()
            files = {
                TENSORS: write_new(temporary / TENSORS, _parts(packed.tensors)),
                STATE: write_new(temporary / STATE, [state]),
            }
            said = self._head(iteration) | {"score": score, "facts": dict(facts), "files": files}
            write_new(temporary / MANIFEST, [_sealed(said)])
            sync_folder(temporary)
            numbers = [number for one, number in map(_numbers_in, self._names()) if one == iteration]
            path = self.folder / (f"step-{iteration:08d}" + (f"-{max(numbers) + 1}" if numbers else ""))
            temporary.rename(path)
            sync_folder(self.folder)
        try:
            whole = [entry for entry in self.entries() if entry.problem is None]  # a person looks at damaged ones
            best = best_of(whole)
            for entry in whole[self._keep :]:
                if entry is not best and entry.path != path:
                    remove(entry.path)
        except OSError as error:
            self._say(f"Old checkpoints in {self.folder} could not be removed ({error}). Remove them by hand.")
        return path

    def give_score(self, path: Path, score: float) -> None:
        """Write a checkpoint's score, by the rename of a manifest: the checkpoint is whole at every moment.

        Raises:
            OSError: the score cannot be written.
            CorruptCheckpoint: the checkpoint is damaged.
        """
        with _refusing(path), opened(path) as folder:
            said = self._manifest(folder, path.name) | {"score": score}
        del said["sha256"]
        temporary = self.folder / f"{SAVING}{path.name}-{secrets.token_hex(4)}"
        with explained(f"The score of {path} could not be written"):
            with replacing(path / MANIFEST, temporary):
                write_new(temporary, [_sealed(said)])
            sync_folder(path)

    def read(self, path: Path) -> Checkpoint:
        """Read one of the run's checkpoints, and verify every bit of it.

        Raises:
            CorruptCheckpoint: it is damaged, or belongs to another run.
            OSError: it cannot be read now. See [Note: Corrupt or unreadable].
        """
        from safetensors.torch import load

        remedy = "Try again when it can be read. If it never can, move it away; the one before it is then used."
        what = explained(f"The checkpoint {path} cannot be read now", remedy)
        with what, _refusing(path), opened(self.folder), opened(path) as folder:
            said = self._manifest(folder, path.name)
            contents = {}
            for file, form in said["files"].items():
                with _refusing(path / file):
                    contents[file] = bytes_of(folder, file, form["bytes"])
                    if hashlib.sha256(contents[file]).hexdigest() != form["sha256"]:
                        raise ValueError("does not have the SHA-256 in the manifest")
            with _refusing(path / TENSORS):
                tensors = load(contents.pop(TENSORS))
            with _refusing(path / STATE):
                packed = SerializedState(parse(contents[STATE]), tensors)
                from_tree(packed)
        return Checkpoint(path, said["iteration"], said["facts"], said["score"], packed)

    def newest(self, *, best: bool = False) -> Checkpoint | None:
        """Read the newest intact checkpoint, or the best one; `refused` then has those that come before it.

        Raises:
            OSError: it cannot be read now.
        """
        self.refused = []
        with explained(f"The checkpoints in {self.folder} cannot be listed now", "Try again when they can be."):
            paths = [self.folder / name for name in self._names()]
            if best:
                entries = self.entries()
                damaged = [one for one in entries if one.problem is not None]  # without a score that can be read
                paths = [one.path for one in damaged + by_score(entries)]
        for path in paths:
            try:
                return self.read(path)
            except CorruptCheckpoint as error:
                if not os.path.lexists(path):  # its run removed it, and so has written a newer one
                    return self.newest(best=best)
                self.refused.append(error)
        return None

    def set_aside(self) -> list[Path]:
        """Rename the refused checkpoints whose damage only a whole read shows to damaged-..., and return their names.

        Under their old names they would count as the best, and intact ones would be removed in their place.

        Raises:
            OSError: one cannot be renamed.
        """
        counted = {entry.path for entry in self.entries() if entry.problem is None}
        targets = []
        for path in sorted(counted & {path for one in self.refused for path in (one.path, one.path.parent)}):
            target = path.with_name(f"{DAMAGED}{path.name}-{secrets.token_hex(4)}")
            with explained(f"The corrupt checkpoint {path} could not be renamed"):
                path.rename(target)
            targets.append(target)
        return targets

    def entries(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """List all checkpoints, the newest first; without `verify` the large files are not read."""
        found = [self._entry(name, verify) for name in self._names()]
        return [one for one in found if one.problem is None or os.path.lexists(one.path)]  # one may just be removed

    def clean(self) -> None:
        """Remove the files that a killed process left behind. No other process may be writing."""
        try:
            for name in os.listdir(self.folder) if is_folder(self.folder) else ():
                if name.startswith((SAVING, DELETING)):
                    remove(self.folder / name)
        except (OSError, RecursionError) as error:  # deeply nested folders raise the latter
            self._say(f"Files of a killed save in {self.folder} could not be removed. {error}")

    def _names(self) -> list[str]:
        found = os.listdir(self.folder) if is_folder(self.folder) else []
        return sorted(filter(NAME.fullmatch, found), key=_numbers_in, reverse=True)

    def _head(self, iteration: int) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "run": self._run_id, "iteration": iteration}

    def _manifest(self, folder: int, name: str) -> dict[str, Any]:
        """Read an open folder's manifest, and check all that needs no other file's content."""
        path = self.folder / name
        there = set(os.listdir(folder))
        for one in sorted(there ^ {TENSORS, STATE, MANIFEST}):
            raise CorruptCheckpoint(path / one, "does not belong to a checkpoint" if one in there else "is missing")
        with _refusing(path / MANIFEST):
            data = bytes_of(folder, MANIFEST, MANIFEST_BYTES)
            if data[-_SEAL_BYTES:] != _seal(data[:-_SEAL_BYTES]):
                raise ValueError("does not have its own SHA-256")
            said: dict[str, Any] = parse(data)
            for key, one in self._head(_numbers_in(name)[0]).items():
                if said[key] != one:
                    raise ValueError(f"has {key} {str(said[key])[:60]} instead of {one}")
            if said["files"].keys() != {TENSORS, STATE}:  # else it could name other files to open
                raise ValueError(f"lacks the sums of {TENSORS} and {STATE}")
            said["score"] = None if said["score"] is None else float(said["score"])
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
                score = self._manifest(folder, name)["score"]
            if verify:
                self.read(path)
        except CorruptCheckpoint as error:
            problem = f"{error.path.name} {error.what}"
        except OSError as error:
            problem = f"{name} cannot be read now ({error.__cause__ or error})"
        return CheckpointInfo(path, _numbers_in(name)[0], score, size, written, problem)


def store_of(run: Path) -> CheckpointStore:
    """The checkpoints of a run folder, to be read.

    Raises:
        ValueError: it is no run folder; of a folder of runs the message names some.
    """
    run_id = run_id_of(run)
    if run_id is None:
        raise no_run(run, "has no run.json with an id" if run.is_dir() else "is not a folder")
    return CheckpointStore(run, run_id)


def best_of(entries: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the intact checkpoint with the lowest finite score, the oldest one of equals; None without a score."""
    return next(iter(by_score(entries)), None)


def by_score(entries: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the intact checkpoints with a finite score, the lowest first, of equals the oldest."""
    whole = [one for one in entries[::-1] if one.problem is None]
    return sorted((one for one in whole if one.score is not None and math.isfinite(one.score)), key=attrgetter("score"))


def _numbers_in(name: str) -> tuple[int, int]:
    """Parse a folder's name: the iteration, and the number among its checkpoints."""
    iteration, _, number = name.removeprefix("step-").partition("-")
    return int(iteration), int(number or 1)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise every error of the block as CorruptCheckpoint, but one of reading as OSError."""
    try:
        yield
    except CorruptCheckpoint:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's own error
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise
        what = f"{error}" if type(error) is ValueError else f"cannot be read ({type(error).__name__}: {error})"
        raise CorruptCheckpoint(path, what) from error


def _json(what: str, value: Any, most: int) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} of a checkpoint must be JSON: numbers, strings, lists, dicts. {error}.") from error
    if len(data) > most:
        raise ValueError(f"{what} of a checkpoint can have {most} bytes. Got {len(data)}. Keep large data in tensors.")
    return data


def _sealed(said: dict[str, Any]) -> bytes:
    """A manifest as JSON that ends with its own SHA-256."""
    score = said["score"]
    if score is not None and not math.isfinite(score):
        said = said | {"score": str(score)}
    body = _json("The facts", said, MANIFEST_BYTES - _SEAL_BYTES)[:-1]
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file without copies; the widest elements come first, to align all."""
    header = {}
    offset = 0
    parts = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = offset + tensor.nbytes
        header[name] = {"dtype": NATIVE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        parts.append(tensor.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data)
        offset = end
    said = _json("The tensors' names", header, HEADER_BYTES - 8)
    said += b" " * (-len(said) % 8)
    return [len(said).to_bytes(8, "little"), said, *parts]
