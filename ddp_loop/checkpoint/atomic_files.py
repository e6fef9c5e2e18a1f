"""Files written whole and flushed to the disk; files read without following links."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

REPAIR = "Make room there, make it writable, or put it back."
_PRIVATE = 0o600
_open_private = partial(os.open, mode=_PRIVATE)
SAVING = ".saving-"
DELETING = ".deleting-"  # prefixes of names that a kill can leave behind


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a folder, which must not be a link, and yield its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def bytes_of(folder: int, name: str, most: int) -> bytes:
    """Read a regular file of at most so many bytes. Links are not followed, pipes are not waited for."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is not a regular file")
        if found.st_size > most:
            raise ValueError(f"has {found.st_size} bytes instead of at most {most}")
        data = file.read(found.st_size)
        if len(data) != found.st_size or file.read(1):
            raise ValueError(f"does not end after {found.st_size} bytes")
    return data


def read_start(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Read the first bytes of a regular file. Pipes are not waited for.

    Args:
        path: of the file.
        most: bytes.
        follow: whether the path may be a link.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        return file.read(min(most, found.st_size))


def read_text(path: Path, most: int) -> str:
    """Read the start of a text of a user, which must not be a link: so many letters at most.

    Raises:
        OSError: as `read_start`.
    """
    return read_start(path, 4 * most, follow=False).decode(errors="replace").strip()[:most]


def write_new(path: Path, parts: list[bytes | memoryview]) -> dict[str, int | str]:
    """Write and flush a new file; a thread computes its SHA-256 meanwhile, as both release the interpreter's lock."""
    sha = hashlib.sha256()
    summing = threading.Thread(target=lambda: any(map(sha.update, parts)), name=f"SHA-256 of {path.name}")
    summing.start()
    try:
        with path.open("xb", buffering=1 << 20) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    finally:
        summing.join()
    return {"bytes": sum(len(part) for part in parts), "sha256": sha.hexdigest()}


def is_folder(path: Path) -> bool:
    """Whether a path is a folder and not a link to one.

    Raises:
        OSError: the path cannot be looked up now, which `Path.is_dir` takes for no folder.
    """
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync_folder(folder: Path, *files: str) -> None:
    """Flush files of a folder, as far as they exist, and its names to the disk. It may be a link."""
    for path in (*(folder / name for name in files), folder):
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot, and need not
                    raise
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder, or a file of its name; a kill meanwhile leaves no partial checkpoint."""
    if not path.name.startswith((SAVING, DELETING)):
        path = path.rename(path.with_name(f"{DELETING}{path.name}-{secrets.token_hex(4)}"))
        sync_folder(path.parent)
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a file or folder, which identify it under any name.

    Raises:
        OSError: it does not exist.
    """
    found = path.stat()
    return found.st_dev, found.st_ino


def write_atomic(path: Path, value: object, *, is_private: bool = False) -> None:
    """Write JSON so that a reader finds the old file or the new one, also after a loss of power.

    Args:
        path: of the file.
        value: to be written.
        is_private: whether the file is for its owner alone.
    """
    write_text_atomic(path, json.dumps(value, indent=1), is_private=is_private)


def write_text_atomic(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write UTF-8 text as `write_atomic` writes JSON."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    opener = _open_private if is_private else None
    with replacing(path, temporary), open(temporary, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[None]:
    """Move the file that the block writes to its place; it is removed if that fails."""
    try:
        yield
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def open_private(path: Path) -> BinaryIO:
    """Open a file, which is for its owner alone, to be read and appended to."""
    file = open(path, "a+b", opener=_open_private)  # noqa: SIM115  # the caller closes it
    with suppress(OSError):  # it was made by an older version, or is another user's
        os.fchmod(file.fileno(), _PRIVATE)
    return file


@contextmanager
def explained(what: str, remedy: str = REPAIR) -> Iterator[None]:
    """Raise an OSError of the block as one whose message has the failed work, the cause and the remedy."""
    try:
        yield
    except OSError as error:
        if remedy == REPAIR and not isinstance(error, FileNotFoundError):  # what is not there may be lost
            remedy += " Earlier lines and checkpoints are intact."
        limit = " See ulimit -f." if error.errno == errno.EFBIG else ""
        raise type(error)(error.errno, f"{what} ({error.strerror or error}). {remedy}{limit}") from error
