"""What a Loop demands of its arguments, said before anything begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ddp_loop.batches import Batches
from ddp_loop.finite import NOT_FINITE
from ddp_loop.replicas import find_modules
from ddp_loop.syncing import Talk


def check_state(state: object) -> dict[str, object]:
    """The job's state as a dict of its own, if it is a mapping by name.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"state must be a dict of what the job is made of, by name; got {type(state).__name__}: "
            "state=dict(model=model, optimizer=optimizer)"
        )
    return dict(state)


def check_extent(batches: Batches, epochs: int | None, steps: int | None, bucket_mib: float) -> None:
    """Raise ValueError unless the loop has an end, and its buckets a size."""
    if not bucket_mib > 0:
        raise ValueError(f"bucket_mib must be a size in MiB, more than 0; got {bucket_mib}")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
    if epochs is None and steps is None:
        raise ValueError("a Loop needs an end; give epochs or steps")
    if not batches.ends and steps is None:
        raise ValueError("an epoch of these data never ends; give Batches a length, or Loop its steps")


def check_rule(not_finite: str) -> None:
    """Raise ValueError unless there is such a rule for losses and gradients that are not finite."""
    if not_finite not in NOT_FINITE:
        raise ValueError(f"not_finite must be one of {NOT_FINITE}; got {not_finite!r}")


def check_interval(check_replicas: object) -> None:
    """Raise ValueError unless it is a number of steps, or 0."""
    if isinstance(check_replicas, bool) or not isinstance(check_replicas, int) or check_replicas < 0:
        raise ValueError(
            "check_replicas must be a whole number, the steps from one comparison of all ranks to the next, or 0 for "
            f"none; got {check_replicas!r}"
        )


def check_synced(batches: Batches, talks: Sequence[Talk]) -> None:
    """Raise ValueError if a rank has several shards under synced batch norm."""
    if talks and batches.shards > batches.world.size:
        raise ValueError(
            "synced batch norm normalises by what all ranks compute at the same time, so that a rank can have one "
            f"shard; got {batches.shards} shards on {batches.world.size} ranks: leave shards= out, or "
            "local_batch_norm(model), whose running statistics are those of the whole mini-batch all the same"
        )


def check_rows(batches: Batches, state: Mapping[str, object]) -> None:
    """Raise ValueError if a shard of one observation would meet BatchNorm1d, which cannot normalise one value."""
    layers = [
        name
        for prefix, module in find_modules(state).items()
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, nn.BatchNorm1d) and layer.training
    ]
    positions = [0] if batches.steps is None else sorted({0, batches.steps - 1})
    for position in positions:
        sizes = batches.sizes(position)
        if layers and 1 in sizes:
            raise ValueError(
                f"batch norm needs more than one value per channel; mini-batch {position + 1} of an epoch has "
                f"{sum(sizes)} observations over {len(sizes)} shards, so that one has a single row, and {layers[0]} "
                "is BatchNorm1d: take another batch_size or fewer shards, drop_last=True, or allow_one_row=True if "
                "its inputs have positions, (N, C, L)"
            )
