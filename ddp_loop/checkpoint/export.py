"""A part of a checkpoint as a safetensors file, for other programs and machines: `python -m ddp_loop export`."""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint.atomic_files import explained, replacing, sync_folder, write_new
from ddp_loop.checkpoint.storage import Checkpoint, run_id_of
from ddp_loop.checkpoint.weights import part_of, read_checkpoint

_REMEDY = "Make room there, make it writable, or pass another -o FILE."


@dataclass(frozen=True)
class Exported:
    """What was written: where it came from, and how much it is.

    Attributes:
        file, source: its path, and that of the checkpoint.
        facts: the file's metadata.
        tensors, bytes: how many.
    """

    file: Path
    source: Path
    facts: Mapping[str, str]
    tensors: int
    bytes: int

    def __str__(self) -> str:
        facts = [f"step {self.facts['iteration']}", f"epoch {self.facts['epoch']}"]
        facts += [f"score {float(self.facts['score']):.6g}"] if "score" in self.facts else []
        many = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return (
            f"{self.file}: {many} of {self.facts['part']}, {self.bytes / 2**20:.1f} MiB, from {self.source} "
            f"({', '.join(facts)})"
        )


def export_weights(
    run: Path,
    file: Path,
    part: str = "model",
    *,
    say: Callable[[str], None],
    best: bool = False,
    checkpoint: str | None = None,
) -> Exported:
    """Write a part of a run's state to a safetensors file, at once: a reader finds the old file or the new one.

    `model.load_state_dict(safetensors.torch.load_file(file))` reads it. Tensors that share memory are written once for
    each name. The file's metadata have the run, the checkpoint, its iteration, epoch and score.

    Args:
        run, part, best, checkpoint: as in `load`.
        file: to write; an older one is replaced.
        say: is given a line about each damaged checkpoint that was passed over.

    Raises:
        ValueError: as `load`, or the part has other values than tensors.
        OSError: the checkpoint cannot be read, or the file not be written.
    """
    found = read_checkpoint(run, say=say, best=best, name=checkpoint)
    tensors = tensors_of(part_of(found, part), found, part)
    facts = _facts_of(found, part)
    _write(file, tensors, facts)
    return Exported(file, found.path, facts, len(tensors), sum(one.nbytes for one in tensors.values()))


def tensors_of(value: Any, found: Checkpoint, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part by name, each contiguous and with memory of its own.

    Raises:
        ValueError: it has other values.
    """
    leaves = dict(_leaves("", value))
    if other := [name for name, one in leaves.items() if not isinstance(one, torch.Tensor)]:
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise ValueError(
            f"A safetensors file has tensors alone. {part!r} in {found.path} has other values too: {shown or part}. "
            f"Read it with ddp_loop.load(RUN, {part!r}), or export the part of a module."
        )
    if not leaves:
        raise ValueError(f"{part!r} in {found.path} has no tensor. Name another part.")
    memory: set[int] = set()
    own = {}
    for name, tensor in leaves.items():
        dense = tensor.contiguous()
        place = dense.untyped_storage().data_ptr()
        own[name] = dense.clone() if place in memory else dense
        memory.add(place)
    return own


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, one in value.items():
        yield from _leaves(f"{prefix}.{name}" if prefix else str(name), one)


def _facts_of(found: Checkpoint, part: str) -> dict[str, str]:
    folder = found.path.parent.parent
    position = found.facts["position"]
    epoch = position["epoch"] + (position["position"] > 0)  # the one of the last step, counted from 1
    facts = {"format": "pt", "part": part, "run": folder.name, "run_id": run_id_of(folder) or ""}
    facts |= {"checkpoint": found.path.name, "iteration": str(found.iteration), "epoch": str(epoch)}
    if found.score is not None and math.isfinite(found.score):
        facts["score"] = repr(found.score)
    return facts


def _write(file: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save  # `save_file` makes files that only their owner can read

    try:
        content = save(dict(tensors), dict(facts))
    except (SafetensorError, KeyError, ValueError) as error:
        kinds = ", ".join(sorted({str(one.dtype) for one in tensors.values()}))
        raise ValueError(f"A safetensors file cannot have tensors of {kinds}. Cast them, and use save_file.") from error
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    with explained(f"{file} cannot be written", _REMEDY):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        with replacing(file, temporary):
            write_new(temporary, [content])
        sync_folder(file.absolute().parent)
