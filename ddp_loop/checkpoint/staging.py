"""Copies of a serialized state in the host's memory, from a GPU through a few blocks of pinned memory.

[Note: Blocks] A GPU copies to pinned memory while the host continues, and to other memory only while it waits, at a
fraction of the speed. But torch keeps pinned memory that was freed, so to pin all of a large state would take as much
of the host for good. So the tensors' bytes, one after another, are cut into pieces of a block. The GPU copies a piece
into one block while the host copies the piece before it out of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ddp_loop.accelerators import Accelerator, Event, accelerator_of, wait_for
from ddp_loop.checkpoint.serialization import SerializedState

BLOCK_BYTES = 32 << 20
BLOCKS = 2

Pair = tuple[torch.Tensor, torch.Tensor]  # on the host, and on a device


def copy_to_host(packed: SerializedState, memory: Mapping[str, torch.Tensor]) -> SerializedState:
    """Copy the tensors to the CPU, completely.

    Args:
        packed: the state.
        memory: the tensors of an earlier copy, which is not needed any more. Those of the same form are overwritten,
            since mapping fresh pages takes longer than the copy.
    """
    copied = {}
    pairs: dict[torch.device, list[Pair]] = {}
    for name, tensor in packed.tensors.items():
        own = memory.get(name)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copied[name] = own
        pairs.setdefault(tensor.device, []).append((own, tensor))
    with torch.no_grad():
        for device, copies in pairs.items():
            accelerator = accelerator_of(device)
            if accelerator.is_gpu:
                _copy_through_blocks(accelerator, copies)
                continue
            here, there = zip(*copies, strict=True)
            if (event := accelerator.start_copies(here, there)) is not None:
                wait_for(event)
    return SerializedState(packed.structure, copied)


def _copy_through_blocks(accelerator: Accelerator, pairs: Sequence[Pair]) -> None:
    """Copy each second tensor, on the device, into the first one, on the host. See [Note: Blocks]."""
    size = min(BLOCK_BYTES, sum(tensor.nbytes for _, tensor in pairs))
    like = torch.empty(size, dtype=torch.uint8, device="meta")
    unused: list[torch.Tensor] = []
    under_way: deque[tuple[Event | None, torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...]]] = deque()

    def finish_first() -> None:
        event, block, staged, here = under_way.popleft()
        if event is not None:
            wait_for(event)
        torch._foreach_copy_(here, staged)
        unused.append(block)

    for group in _cut(pairs, size):
        here, there = zip(*group, strict=True)
        if len(under_way) == BLOCKS:
            finish_first()
        block = unused.pop() if unused else accelerator.empty_on_host(like)
        lengths = [len(one) for one in there]
        staged = list(block[: sum(lengths)].split_with_sizes(lengths))
        under_way.append((accelerator.start_copies(staged, there), block, staged, here))
    while under_way:
        finish_first()


def _cut(pairs: Iterable[Pair], most: int) -> Iterator[list[Pair]]:
    """The tensors as bytes, in groups of up to `most` bytes."""
    group: list[Pair] = []
    room = most
    for own, tensor in pairs:
        target = own.reshape(-1).view(torch.uint8)
        source = tensor.reshape(-1).view(torch.uint8)
        while len(source):
            length = min(room, len(source))
            group.append((target[:length], source[:length]))
            target = target[length:]
            source = source[length:]
            room -= length
            if room == 0:
                yield group
                group = []
                room = most
    if group:
        yield group
