"""A part of a checkpoint, such as the weights of a model, read from a run folder without ranks or the script."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint.atomic_files import explained
from ddp_loop.checkpoint.serialization import from_tree
from ddp_loop.checkpoint.state import JOB
from ddp_loop.checkpoint.storage import (
    CHECKPOINTS,
    NAME,
    Checkpoint,
    CheckpointStore,
    CorruptCheckpoint,
    by_score,
    run_id_of,
)

_TRIES = 50  # each time a running run has removed what was being read, and so has written a newer one
_SHOWN = 6  # names in an error
_COMPILED = "_orig_mod."  # torch.compile puts it before the names of what it compiles


def load(
    run: str | os.PathLike[str], part: str = "model", *, best: bool = False, checkpoint: str | None = None
) -> dict[str, Any]:
    """Load a part of a run's state, such as the weights of its model, from the newest checkpoint of its folder.

    Every tensor is on the CPU. Neither ranks nor a GPU nor the script are needed, and the run may still be training::

        model.load_state_dict(dl.load("runs/digits", best=True))

    All bits of a checkpoint are verified. If the newest one is damaged, a warning names it, and the one before it is
    used; with `best`, the next best. Names lose the prefix that `torch.compile` adds.

    Args:
        run: the folder of `Loop(run_dir=...)`, or the folder of one of its checkpoints.
        part: its name in `Loop(state=...)`.
        best: take the checkpoint with the lowest score; see `Loop.save`.
        checkpoint: take the checkpoint of this name, such as "step-00000120".

    Raises:
        ValueError: no run folder, no such checkpoint or part, no score, or the checkpoint asked for is damaged.
        OSError: it cannot be read now.
    """
    values: dict[str, Any] = part_of(read_checkpoint(run, best=best, name=checkpoint, say=_warn), part)
    return values


def part_of(found: Checkpoint, part: str) -> Any:
    """A part of the job's state in a checkpoint.

    Raises:
        ValueError: the job had no such part.
    """
    job = job_of(found)
    if part not in job:
        raise ValueError(f"{found.path} has no part {part!r}. Its state has {_listed(job)}. Name one of these.")
    return plain_names(job[part])


def job_of(found: Checkpoint) -> dict[str, Any]:
    """The parts of the job's state in a checkpoint, by name."""
    job: dict[str, Any] = from_tree(found.packed)[JOB]
    return job


def plain_names(value: Any) -> Any:
    """A module's state dict with the names of the module before `torch.compile`; any other value as it is."""
    if not isinstance(value, OrderedDict) or not any(_COMPILED in str(name) for name in value):
        return value
    named = OrderedDict((str(name).replace(_COMPILED, ""), one) for name, one in value.items())
    if isinstance(versions := getattr(value, "_metadata", None), Mapping):
        short = {f"{name}.".replace(_COMPILED, "").removesuffix("."): one for name, one in versions.items()}
        named._metadata = short  # type: ignore[attr-defined]
    return named if len(named) == len(value) else value


def read_checkpoint(
    run: str | os.PathLike[str], *, say: Callable[[str], None], best: bool = False, name: str | None = None
) -> Checkpoint:
    """Read a checkpoint from outside of its run, which may be training, and verify every bit of it.

    Args:
        run: a run folder, or the folder of one of its checkpoints.
        say: is given a line about each damaged checkpoint that was passed over.
        best: take the one with the lowest score.
        name: take the one of this name.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged.
        OSError: it cannot be read now.
    """
    store, folder, own = _store_of(Path(run))
    if best and (name or own):
        raise ValueError(f"best and the checkpoint {name or own} exclude each other. Pass one of them.")
    if own and name and own != name:
        raise ValueError(f"{run} is itself a checkpoint, and not {name}. Pass the run folder, or no name.")
    if chosen := name or own:
        return _read_named(store, folder, chosen)
    return _read_first(store, folder, say, best=best)


def _store_of(path: Path) -> tuple[CheckpointStore, Path, str | None]:
    """The checkpoints of a run folder, the folder, and the name of the checkpoint that was given instead of it."""
    given = Path(os.path.abspath(path))
    folder = given
    own = None
    if NAME.fullmatch(given.name) and given.parent.name == CHECKPOINTS:
        folder = given.parent.parent
        own = given.name
    if (run_id := run_id_of(folder)) is None:
        what = "has no run.json with an id" if folder.is_dir() else "is not a folder"
        raise ValueError(f"Checkpoints are in a run folder. {folder} {what}. Pass the folder of Loop(run_dir=...).")
    return CheckpointStore(folder, run_id), folder, own


def _read_named(store: CheckpointStore, folder: Path, name: str) -> Checkpoint:
    path = store.folder / name
    if NAME.fullmatch(name) and os.path.lexists(path):
        try:
            return _read(store, path)
        except CorruptCheckpoint as error:
            if os.path.lexists(path):
                raise ValueError(f"{error.path} {error.what}. Name another one of {_names_in(store)}.") from error
    raise ValueError(f"{folder} has no checkpoint {name}. Name one of {_names_in(store)}.")


def _read_first(store: CheckpointStore, folder: Path, say: Callable[[str], None], *, best: bool) -> Checkpoint:
    """Read the newest checkpoint that is whole, or the best one."""
    damaged: dict[Path, CorruptCheckpoint] = {}
    for _ in range(_TRIES):
        is_changed = False
        for path in _candidates(store, folder, best=best):
            try:
                found = _read(store, path)
            except CorruptCheckpoint as error:
                if is_changed := not os.path.lexists(path):
                    break
                damaged[path] = error
                continue
            for one in damaged.values():
                say(f"{one.path} {one.what}. {found.path.name} is used instead.")
            return found
        if not is_changed:
            break
    if damaged:
        one = next(iter(damaged.values()))
        raise ValueError(f"No checkpoint of {folder} is whole: {one.path} {one.what}. Restore a copy of one.")
    raise ValueError(f"{folder} has no checkpoint. The run saves one after each epoch, or at save_every=.")


def _candidates(store: CheckpointStore, folder: Path, *, best: bool) -> Iterator[Path]:
    """The checkpoints in the order in which they are tried."""
    with explained(f"The checkpoints in {store.folder} cannot be listed now", "Try again when they can be."):
        entries = store.entries()
    if not best or not entries:
        yield from (one.path for one in entries)
        return
    if not (scored := by_score(entries)):
        raise ValueError(
            f"No checkpoint of {folder} has a score, so none is the best. Call loop.save(score) with a validation "
            "loss in the script, or take the newest one."
        )
    yield from (one.path for one in entries if one.problem is not None)  # without a score that can be read
    yield from (one.path for one in scored)


def _read(store: CheckpointStore, path: Path) -> Checkpoint:
    with explained(f"The checkpoint {path} cannot be read now", "Try again when it can be."):
        return store.read(path)


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=5)  # where `load` was called


def _names_in(store: CheckpointStore) -> str:
    return _listed([one.path.name for one in store.entries() if one.problem is None])


def _listed(names: Any) -> str:
    shown = [str(one) for one in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (", ".join(shown[:_SHOWN]) or "none") + more
