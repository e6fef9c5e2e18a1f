"""What a rank finds on its own host: versions, digests of the code and of data, the free disk, its GPUs."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddp_loop.accelerators import all_gpus, reaches
from ddp_loop.distributed import RankEnv, machine_of

_PACKAGE = Path(__file__).parents[1]
_WHOLE = 64 * 2**20  # bytes of a file that are read whole
_PIECES = 256
_PIECE = 64 * 2**10  # of a larger one: a number, and bytes
_FILES = 256  # of a folder, whose contents are read
_DRIVER = Path("/proc/driver/nvidia/version")
_SHOWN = 12  # letters of a digest


@dataclass(frozen=True)
class Facts:
    """What a rank found.

    Attributes:
        rank, machine: its number, and what tells its machine from the others.
        host: the name of the machine.
        address: where the other ranks connect; without a port where the rank cannot listen, and then with the reason.
        versions: of each thing whose versions must be equal, by its name.
        digests: of the code and of the data, by their names.
        free_bytes: on the disk of the run folder; None without a folder.
        count_of_gpus: the number of its GPUs.
        no_peer_access: pairs of GPUs, by index.
        problem: what could not be found, in words.
    """

    rank: int
    machine: str
    host: str
    address: tuple[str, int] = ("", 0)
    versions: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    free_bytes: float | None = None
    count_of_gpus: int = 0
    no_peer_access: list[tuple[int, int]] = field(default_factory=list)
    problem: str = ""


def facts_of(place: RankEnv, run: Path | None, data: Path | None, script: Path | None) -> Facts:
    """The facts of this rank, without its address.

    Args:
        place: of this rank.
        run: the run folder, which need not be there yet.
        data: a file or a folder.
        script: of the run.
    """
    problem = ""
    digests = {"code of ddp_loop": digest_of(_PACKAGE, "*.py", whole=True)}
    for name, path in (("script", script), ("data", data)):
        if path is not None:
            try:
                digests[name] = digest_of(path)
            except OSError as error:
                problem = f"The {name} cannot be read ({error}). Check --{name}."
    gpus = list(enumerate(all_gpus()))
    return Facts(
        place.rank,
        machine_of(place),
        socket.gethostname(),
        versions=versions(),
        digests=digests,
        free_bytes=None if run is None else free_bytes(run),
        count_of_gpus=len(gpus),
        no_peer_access=[(a, b) for a, one in gpus for b, other in gpus if a != b and not reaches(one, other)],
        problem=problem,
    )


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts."""
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "ddp_loop": str(sys.modules[_PACKAGE.name].__version__),
        "driver": driver_version() or "none",
    }


def driver_version() -> str:
    """The version of the GPUs' driver; empty without one."""
    with suppress(OSError):
        if found := re.search(r"\b\d{3,}\.[\d.]+", _DRIVER.read_text()):
            return found[0]
    return ""


def digest_of(path: Path, pattern: str = "*", *, whole: bool = False) -> str:
    """The first letters of the SHA-256 of a file, or of the names, sizes and contents of a folder's files.

    Of a folder with more than 256 files the contents of 256 count, evenly spread; of a file larger than 64 MiB 256
    pieces of 64 KiB.

    Args:
        path: of the file or the folder.
        pattern: of the names in a folder.
        whole: read everything.

    Raises:
        OSError: it cannot be read.
    """
    files = [path] if not path.is_dir() else sorted(one for one in path.rglob(pattern) if one.is_file())
    sizes = [one.stat().st_size for one in files]
    read = set(range(len(files)) if whole else _spread(len(files), _FILES))
    found = hashlib.sha256()
    for number, (one, size) in enumerate(zip(files, sizes, strict=True)):
        name = one.relative_to(path).as_posix() if path.is_dir() else ""
        found.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        for part in _parts(one, size, whole) if number in read else ():
            found.update(part)
    return found.hexdigest()[:_SHOWN]


def _parts(path: Path, size: int, whole: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        if whole or size <= _WHOLE:
            while part := file.read(_PIECE):
                yield part
            return
        for at in _spread(size - _PIECE + 1, _PIECES):
            file.seek(at)
            yield file.read(_PIECE)


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` of the numbers 0 .. length - 1, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [number * (length - 1) // (most - 1) for number in range(most)]


def free_bytes(folder: Path) -> float | None:
    """The free bytes where a folder is, or will be; None if unknown."""
    with suppress(OSError):
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        return float(shutil.disk_usage(there).free)
    return None


@contextmanager
def shared_file(path: Path) -> Iterator[str]:
    """Write an empty file into the run folder, which is made for this time if it is not there.

    Yields why it cannot be written, or nothing. At the end what was made is removed.
    """
    run = path.parent
    made = False
    problem = ""
    try:
        made = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        problem = f"The run folder {run} cannot be written ({error})."
    try:
        yield problem
    finally:
        with suppress(OSError):
            path.unlink()
        with suppress(OSError):
            if made:
                run.rmdir()
