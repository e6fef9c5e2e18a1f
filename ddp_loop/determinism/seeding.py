"""Random streams keyed by the work (seed, step, shard or sample), not by the place where it is done.

[Note: splitmix64] Keys and the numbers of `Draws` are made by one mixing function, which turns a counter into 64 bits
that look random:

    z = state + 0x9E3779B97F4A7C15 * counter
    z = (z xor z >> 30) * 0xBF58476D1CE4E5B9
    z = (z xor z >> 27) * 0x94D049BB133111EB
    z = z xor z >> 31                                  all mod 2^64

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import accelerator_of

_MASK = (1 << 64) - 1
_SIGNED = 1 << 64  # a constant above 2^63, less this, is the int64 with the same bits

_PYTHON = random.seed.__self__  # type: ignore[attr-defined]
_SEED_PYTHON = super(random.Random, _PYTHON).seed  # of an int, `random.seed` without its work for other types

# The purposes of streams; two purposes never share a key.
ORDER, SHARD, STEP, SAMPLE, DRAWS, TRANSFORM, COLLATE, EVALUATION, EPOCH, LOOP = range(1, 11)


def stream_key(*words: int) -> int:
    """A 64-bit key that depends on every word and on their order: splitmix64 folded over the words.

    torch's CPU generator uses only the low 32 bits of a seed. With seed + step, streams of different runs would
    overlap; mixed bits prevent that. See [Note: splitmix64].
    """
    return next_key(0, *words)


@lru_cache(maxsize=64)
def _of_purpose(seed: int, purpose: int) -> int:
    return stream_key(seed, purpose)


def next_key(key: int, *words: int) -> int:
    """`stream_key` of the words that gave `key`, and of more words."""
    for word in words:
        key = (key + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def next_keys(key: int, words: Sequence[int]) -> list[int]:
    """`next_key(key, word)` for each of the words, in a third of the time."""
    keys = np.array(words, dtype=np.int64).astype(np.uint64) + np.uint64((key + 0x9E3779B97F4A7C15) & _MASK)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys ^ (keys >> np.uint64(31))).tolist()  # type: ignore[no-any-return]


def splitmix64(state: int | torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Random 64-bit words, one for each state and counter. See [Note: splitmix64].

    Args:
        state: 64 bits: an int, or int64 of a shape that broadcasts with `counters`.
        counters: int64, of any shape.

    Returns:
        int64, of the broadcast shape, on the device of `counters`.
    """
    if isinstance(state, int):
        state = state - _SIGNED if state >= 2**63 else state
    words: torch.Tensor = counters * (0x9E3779B97F4A7C15 - _SIGNED) + state
    words ^= logical_shift(words, 30)
    words *= 0xBF58476D1CE4E5B9 - _SIGNED
    words ^= logical_shift(words, 27)
    words *= 0x94D049BB133111EB - _SIGNED
    words ^= logical_shift(words, 31)
    return words


def logical_shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 shifted to the right with zeros filled in; torch's own shift repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_streams(key: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, torch's on the CPU and on `device` only.

    Python's takes 3.8 microseconds, NumPy's 1.5, torch's 1.1 (`torch.manual_seed` takes 65 to 130).
    """
    _SEED_PYTHON(key)
    _PYTHON.gauss_next = None
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if device is not None and not (accelerator := accelerator_of(device)).is_host:
        accelerator.seed(key)


def seed_shard(seed: int, step: int, shard: int, device: torch.device, again: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators for one shard of one step.

    The streams depend on (seed, step, shard, again) alone, so a shard draws the same on any number of ranks. `Step`
    calls this before each shard; call it in a step that you write yourself::

        dl.seed_shard(world.seed, iteration, shard.number, world.device)
        loss = loss_function(model(inputs), targets)

    Args:
        seed: of the run, such as `world.seed`.
        step: the number of the step, counted from 1.
        shard: the number of the shard in the mini-batch, 0 .. S - 1.
        device: whose torch generator is seeded, beside the CPU's.
        again: the number of passes that the step made over its shards before this one.
    """
    seed_streams(next_key(_of_purpose(seed, SHARD), step, shard, again), device)


def seed_step(seed: int, step: int, device: torch.device, again: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators for the code after a step's shards.

    The streams depend on (seed, step, again) alone, so all ranks draw the same numbers. `Step.fold` calls this; call
    it in a step that you write yourself.

    Args:
        seed: of the run, such as `world.seed`.
        step: the number of the step, counted from 1.
        device: whose torch generator is seeded, beside the CPU's.
        again: the number of passes that the step made over its shards before this one.
    """
    words = (step, again) if again else (step,)
    seed_streams(next_key(_of_purpose(seed, STEP), *words), device)


def seed_epoch(seed: int, epoch: int, device: torch.device) -> None:
    """Seed the generators for the code before an epoch's first step; a run that resumes inside the epoch repeats it."""
    seed_streams(next_key(_of_purpose(seed, EPOCH), epoch), device)


def seed_evaluated(key: int, position: int, shard: int, device: torch.device) -> None:
    """Seed the generators for shard number `shard` of mini-batch `position` in the evaluation with this key."""
    seed_streams(next_key(key, position, shard), device)


def seed_transform(seed: int, epoch: int, start: int, device: torch.device) -> None:
    """Seed the generators for the transform of the shard whose first sample is number `start` of an epoch."""
    seed_streams(stream_key(seed, TRANSFORM, epoch, start), device)


def permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order of an epoch's samples, (size,) int64: `torch.randperm` seeded by (seed, epoch)."""
    generator = torch.Generator("cpu").manual_seed(stream_key(seed, ORDER, epoch))
    return torch.randperm(size, generator=generator, device="cpu")


def streams(device: torch.device | None = None) -> tuple[Any, ...]:
    """The states of Python's, NumPy's and torch's generators, torch's on the CPU and on `device`."""
    accelerator = None if device is None else accelerator_of(device)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return (*state, accelerator, None if accelerator is None else accelerator.random_state())


def restore_streams(state: tuple[Any, ...]) -> None:
    """Restore the states that `streams` returned."""
    python, numpy, torch_, accelerator, on_device = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_)
    if on_device is not None:
        accelerator.set_random_state(on_device)


@contextmanager
def preserved_streams(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of `streams` when the block ends, also after an exception."""
    state = streams(device)
    try:
        yield
    finally:
        restore_streams(state)
