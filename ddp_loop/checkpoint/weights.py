"""Weights out of a checkpoint: loaded without ranks or the script, as a safetensors file, or for a new run."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_loop.checkpoint.atomic_files import explained, replacing, sync_folder, write_new
from ddp_loop.checkpoint.run_folder import check_output, run_id_of, some_of
from ddp_loop.checkpoint.serialization import SerializedState, from_tree, to_tree
from ddp_loop.checkpoint.state import JOB, numbered, numbered_in, objects_in, read_on_rank_zero, restore_part
from ddp_loop.checkpoint.storage import (
    CHECKPOINTS,
    NAME,
    Checkpoint,
    CheckpointStore,
    CorruptCheckpoint,
    mebibytes,
    store_of,
)
from ddp_loop.distributed import World, listed

Source = str | os.PathLike[str]

_COMPILED = "_orig_mod."  # torch.compile puts it before the names of a module that it compiles
_DIFFERENCES = 4  # in an error
_PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt"})  # the names of files for torch.load
_REMEDY = (
    "Build it as there, or load by hand what fits before the Loop (docs/checkpoints.md). An optimizer under another "
    "name in state= starts from scratch."
)


def load(run: Source, part: str = "model", *, best: bool = False, checkpoint: str | None = None) -> dict[str, Any]:
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

    warn = partial(warnings.warn, category=RuntimeWarning, stacklevel=3)  # where this was called
    values: dict[str, Any] = part_of(read_checkpoint(run, best=best, name=checkpoint, say=warn), part)
    return values


def part_of(found: Checkpoint, part: str) -> Any:
    """A part of the job's state in a checkpoint.

    Raises:
        ValueError: the job had no such part.
    """
    job = job_of(found)
    if part not in job:
        raise ValueError(
            f"{found.path} has no part {part!r}. Its state has {some_of([*job])}. Name one of these, as part= "
            "or --part."
        )
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
    run: Source, *, say: Callable[[str], None], best: bool = False, name: str | None = None
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
    folder = Path(os.path.abspath(run))
    own = None
    if NAME.fullmatch(folder.name) and folder.parent.name == CHECKPOINTS:
        own = folder.name
        folder = folder.parents[1]
    store = store_of(folder)
    chosen = name or own
    if best and chosen:
        raise ValueError(f"best and the checkpoint {chosen} exclude each other. Pass one of them.")
    if own not in (None, chosen):
        raise ValueError(f"{run} is itself a checkpoint, and not {name}. Pass the run folder, or no name.")
    if chosen:
        return _read_named(store, chosen)
    found = store.newest(best=best)
    if found is None:
        raise ValueError(_lack_of(store, best=best))
    for one in store.refused:
        say(f"{one.path} {one.what}. {found.path.name} is used instead.")
    return found


def _read_named(store: CheckpointStore, name: str) -> Checkpoint:
    path = store.folder / name
    if NAME.fullmatch(name) and os.path.lexists(path):
        try:
            return store.read(path)
        except CorruptCheckpoint as error:
            if os.path.lexists(path):
                raise ValueError(f"{error.path} {error.what}. Name another one of {_whole_in(store)}.") from error
    raise ValueError(f"{store.folder.parent} has no checkpoint {name}. Name one of {_whole_in(store)}.")


def _lack_of(store: CheckpointStore, *, best: bool) -> str:
    """Why a run has no newest checkpoint, or no best one."""
    folder = store.folder.parent
    if best and any(one.problem is None for one in store.entries()):
        return (
            f"No checkpoint of {folder} has a score, so none is the best. Call loop.save(score) with a validation "
            "loss in the script, or take the newest one."
        )
    for one in store.refused:
        return f"No checkpoint of {folder} is whole: {one.path} {one.what}. Restore a copy of one."
    return f"{folder} has no checkpoint. The run saves one after each epoch, or at save_every=."


def _whole_in(store: CheckpointStore) -> str:
    return some_of([one.path.name for one in store.entries() if one.problem is None])


def export_weights(
    run: Path,
    file: Path,
    part: str = "model",
    *,
    say: Callable[[str], None],
    best: bool = False,
    checkpoint: str | None = None,
) -> str:
    """Write a part of a run's state to a safetensors file, at once: a reader finds the old file or the new one.

    `model.load_state_dict(safetensors.torch.load_file(file))` reads it. Tensors that share memory are written once for
    each name. The file's metadata have the run, the checkpoint, its iteration, epoch and score.

    Args:
        run, part, best, checkpoint: as in `load`.
        file: to write; an older one is replaced.
        say: is given a line about each damaged checkpoint that was passed over.

    Returns:
        A line about the file.

    Raises:
        ValueError: as `load`, or the part has other values than tensors, or the file's name is one for `torch.load`, or
            the file is one of a run.
        OSError: the checkpoint cannot be read, or the file not be written.
    """
    if file.suffix.lower() in _PICKLED:
        named = file.with_suffix(".safetensors")
        raise ValueError(
            f"export writes a safetensors file, which torch.load cannot read. Got {file}. Pass -o {named}; for "
            f"torch.load, then call torch.save(safetensors.torch.load_file({str(named)!r}), {str(file)!r})."
        )
    check_output(file, ".safetensors")
    found = read_checkpoint(run, say=say, best=best, name=checkpoint)
    tensors = _tensors_of(part_of(found, part), part, found.path)
    folder = found.path.parents[1]
    position = found.facts["position"]
    epoch = position["epoch"] + (position["position"] > 0)  # the one of the last step, counted from 1
    facts = {"format": "pt", "part": part, "run": folder.name, "run_id": run_id_of(folder) or ""}
    facts |= {"checkpoint": found.path.name, "iteration": str(found.iteration), "epoch": str(epoch)}
    origin = f"step {found.iteration}, epoch {epoch}"
    if found.score is not None and math.isfinite(found.score):
        facts["score"] = repr(found.score)
        origin += f", score {found.score:.6g}"
    _write(file, tensors, facts)
    many = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
    mib = mebibytes(sum(one.nbytes for one in tensors.values()))
    return f"{file}: {many} of {part}, {mib} MiB, from {found.path} ({origin})"


def _tensors_of(value: Any, part: str, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a part by name, each contiguous and with memory of its own.

    Raises:
        ValueError: it has other values.
    """
    values = dict(_leaves("", value))
    if other := [name or part for name, one in values.items() if not isinstance(one, torch.Tensor)]:
        raise ValueError(
            f"A safetensors file has tensors alone. {part!r} in {path} has other values too: {some_of(other)}. "
            f"Read it with ddp_loop.load(RUN, {part!r}), or export the part of a module."
        )
    if not values:
        raise ValueError(f"{part!r} in {path} has no tensor. Name another part.")
    memory: set[int] = set()
    own = {}
    for name, tensor in values.items():
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


def _can_be_saved(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"empty": torch.empty(0, dtype=dtype)})
    except Exception:
        return False
    return True


def _write(file: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save  # `save_file` makes files that only their owner can read

    try:
        content = save(dict(tensors), dict(facts))
    except (SafetensorError, KeyError, ValueError) as error:
        unknown = {one.dtype: name for name, one in tensors.items() if not _can_be_saved(one.dtype)}
        which = listed([f"{dtype} ({name})" for dtype, name in unknown.items()])
        raise ValueError(f"A safetensors file cannot have {which or error}. Cast them, and use save_file.") from error
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    with explained(f"{file} cannot be written", "Make room there, make it writable, or pass another -o FILE."):
        with replacing(file, temporary):
            write_new(temporary, [content])
        sync_folder(file.absolute().parent)


def warm_start(
    source: Source, world: World, state: Mapping[str, object], folder: Path | None, *, resume: bool | None
) -> str | None:
    """Give modules and optimizers the values of another run, unless the run in the folder resumes.

    A part of `state` takes the values of the part with its name. An optimizer takes moments, and keeps the script's
    settings, such as the learning rate. Other parts count steps, as schedules do, and start from scratch. Every rank
    must call this.

    Args:
        source: a run folder, of which the newest checkpoint is taken, or the folder of a checkpoint.
        world: from `join_world`.
        state: the job's objects by name.
        folder: the new run's; None without one.
        resume: of `Loop`.

    Returns:
        Where the values came from; None where the run resumes.

    Raises:
        ValueError: no run, no valid checkpoint, no module of its name in `state`, or one of another structure.
        OSError: the checkpoint cannot be read now.
        PeerFailed: another rank raised one of these.
    """
    takers = {name: one for name, one in state.items() if isinstance(one, nn.Module | Optimizer)}

    def read() -> tuple[tuple[str, str, dict[str, list[str]]], SerializedState] | None:
        if folder is not None and resume is not False and any((folder / CHECKPOINTS).glob("step-*")):
            return None
        found = read_checkpoint(source, say=world.say)
        job = job_of(found)
        parts = {name: job[name] for name in takers if name in job}
        if not any(isinstance(takers[name], nn.Module) for name in parts):
            modules = [name for name, one in takers.items() if isinstance(one, nn.Module)]
            raise ValueError(
                f"resume_from={str(source)!r} has none of the modules in state=: {found.path} has "
                f"{', '.join(job)}; state= has {', '.join(modules)}. Use the same names."
            )
        others = [name for name in state if name not in parts]
        fresh = f"; {listed(others)} start{'s' if len(others) == 1 else ''} from scratch" if others else ""
        line = f"starts with {listed(list(parts))} of {found.path}{fresh}"
        return (line, str(found.path), numbered_in(from_tree(found.packed))), to_tree(parts)

    taken = read_on_rank_zero(world, read)
    if taken is None:
        return None
    (line, origin, names), packed = taken
    with world.failing_together(TypeError, ValueError, RuntimeError):
        _check_order(numbered(state), names, origin)
        _restore(takers, from_tree(packed), origin)
    world.say(line)
    return origin


def _check_order(here: Mapping[str, list[str]], there: Mapping[str, list[str]], origin: str) -> None:
    """Raise ValueError if an optimizer has the parameters of the other run in another order."""
    for name in here.keys() & there.keys():
        own, kept = ([one.replace(_COMPILED, "") for one in names[name]] for names in (here, there))
        if own != kept and sorted(own) == sorted(kept):
            number = next(n for n, pair in enumerate(zip(own, kept, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"state[{name!r}] does not fit {origin}: an optimizer's state belongs to its parameters by their "
                f"order, and number {number + 1} is {own[number]}, there {kept[number]}. {_REMEDY}"
            )


def _restore(takers: Mapping[str, object], kept: Mapping[str, Any], origin: str) -> None:
    """Check all parts, and only then change them."""
    fitting: list[tuple[object, Any]] = []
    origins: dict[torch.Tensor, torch.Tensor] = {}  # of parameters, the values there
    for name, values in kept.items():
        taker = takers[name]
        fitted, wrong = (_moments_for if isinstance(taker, Optimizer) else _weights_for)(taker, values)
        if wrong:
            more = f", and {len(wrong) - _DIFFERENCES} more" if len(wrong) > _DIFFERENCES else ""
            what = "; ".join(wrong[:_DIFFERENCES])
            raise ValueError(f"state[{name!r}] does not fit {origin}: {what}{more}. {_REMEDY}")
        fitting.append((taker, fitted))
        if isinstance(taker, nn.Module):
            parameters = dict(taker.named_parameters(remove_duplicate=False))
            origins |= {one: fitted[name] for name, one in parameters.items() if name in fitted}
    for taker, fitted in fitting:
        if isinstance(taker, Optimizer):
            fitted["state"] = _formed(taker, fitted, origins)
        restore_part(taker, fitted, dict(objects_in(taker)))


def _weights_for(module: Any, values: Any) -> tuple[Any, list[str]]:
    """The state dict with the names of this module, and the misfits, in words."""
    own: Mapping[str, Any] = module.state_dict()
    short = plain_names(OrderedDict((name, name) for name in own))
    kept = plain_names(values)
    wrong = [f"{name} is missing there" for name in short if name not in kept]
    wrong += [f"{name} is there alone" for name in kept if name not in short]
    for name, full in short.items():
        here = _shape(own[full])
        there = _shape(kept.get(name))
        if name in kept and here != there:
            wrong.append(f"{name} has shape {here}, there {there}")
    named = OrderedDict((short.get(name, name), one) for name, one in kept.items())
    if hasattr(kept, "_metadata"):
        named._metadata = kept._metadata  # type: ignore[attr-defined]
    return named, wrong


def _moments_for(optimizer: Any, values: Any) -> tuple[Any, list[str]]:
    """The optimizer's state with the settings of this one, and the misfits, in words."""
    own = optimizer.state_dict()["param_groups"]
    kept = values["param_groups"]
    here, there = ([str(len(group["params"])) for group in groups] or ["none"] for groups in (own, kept))
    wrong = [] if here == there else [f"its groups have {listed(here)} parameters, there {listed(there)}"]
    lacking = {setting for group in kept for setting in optimizer.defaults if setting not in group}
    if lacking:
        wrong.append(f"it is a {type(optimizer).__name__}, and the one there had no {listed(sorted(lacking))}")
    pairs = list(zip(own, kept, strict=False))
    stateful = [pair for pair in pairs if any(number in values["state"] for number in pair[1]["params"])]
    for flag in ("amsgrad", "centered", "momentum"):  # settings of torch's optimizers with which they keep more
        if any(mine.get(flag) and not group.get(flag, True) for mine, group in stateful):
            wrong.append(f"it has {flag}, and the one there kept no state for it")
    groups = [{**mine, "params": group["params"]} for mine, group in pairs]
    return {**values, "param_groups": groups}, wrong


def _formed(
    optimizer: Optimizer, kept: Mapping[str, Any], origins: Mapping[torch.Tensor, torch.Tensor]
) -> dict[Any, Any]:
    """The optimizer's state in the memory formats and the dtypes of its parameters, where theirs were others there.

    Torch's fused optimizers on the CPU combine elements by their place in memory, and so took moments of others.
    """
    state = dict(kept["state"])
    for own, there in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        for parameter, number in zip(own["params"], there["params"], strict=True):
            if parameter in origins and isinstance(state.get(number), Mapping):
                origin = origins[parameter]
                state[number] = {key: _like(parameter, origin, key, one) for key, one in state[number].items()}
    return state


def _like(parameter: torch.Tensor, origin: torch.Tensor, name: str, value: Any) -> Any:
    """A value of an optimizer's state, for a parameter with the values of `origin`."""
    if name == "step" or not isinstance(value, torch.Tensor):
        return value
    dtype = parameter.dtype if value.dtype == origin.dtype else value.dtype  # else an optimizer's own, as float32
    if value.shape != parameter.shape:
        return value.to(dtype)
    return torch.empty_like(parameter, dtype=dtype, device=value.device, requires_grad=False).copy_(value)


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return "none" if shape is None else str(tuple(shape))
