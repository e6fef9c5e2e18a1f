"""The places of a worker, where its trials run.

A slot is a GPU, or a rank on the CPU. A place has as many slots as a trial has ranks. It runs one trial at a time, so
no two trials share a slot.
"""

from __future__ import annotations

import os

from ddp_loop.accelerators import gpu_count, gpu_visibility


def places_of(slots: int | None, ranks: int) -> list[dict[str, str]]:
    """The environment of each place: k GPUs each, or nothing special on the CPU. See [Note: Slots].

    Args:
        slots: their number; by default the GPUs of this machine, or its cores.
        ranks: of each trial, k.

    Raises:
        ValueError: a trial has more ranks than there are slots.
    """
    gpus = gpu_count()
    visibility = gpu_visibility()
    known = [one for one in os.environ.get(visibility, "").split(",") if one] or list(map(str, range(gpus)))
    usual = gpus or len(os.sched_getaffinity(0))
    if gpus and not visibility:
        usual = ranks  # no variable gives a trial GPUs of its own: one trial at a time
    slots = usual if slots is None else slots
    if type(slots) is not int or slots < 1:
        raise ValueError(f"slots must be a whole number, 1 or more. Got {slots!r}.")
    if ranks > slots:
        raise ValueError(
            f"A trial has {ranks} ranks, but there {'is 1 slot' if slots == 1 else f'are {slots} slots'} here. Give "
            "fewer ranks, or more slots."
        )
    if gpus and slots > len(known):
        raise ValueError(f"A slot is a GPU. Got slots={slots}, and this machine has {len(known)}. Give fewer.")
    if gpus and not visibility and slots >= 2 * ranks:
        raise ValueError(
            f"Trials run at the same time on CUDA GPUs alone. Got slots={slots} for trials of {ranks} ranks. Pass "
            f"slots={ranks}: one trial at a time."
        )
    places = [range(first, first + ranks) for first in range(0, slots - ranks + 1, ranks)]
    if gpus:
        return [{visibility: ",".join(known[one] for one in place)} if visibility else {} for place in places]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # several trials share the cores
    return [{"OMP_NUM_THREADS": threads} for _ in places]
