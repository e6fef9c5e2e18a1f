"""A shard on its way from a worker of a `DataLoader` to the process that trains.

[Note: By value] torch sends each tensor of a worker as a file descriptor of shared memory, over a connection made for
it. That takes the process that trains 0.4 ms for 1 KiB and 0.8 for 512 KiB. A copy through the workers' pipe takes 0.1
and 0.5, once the pipe's buffer is larger than a tensor. From 2 MiB on both take the same. So tensors of up to
`BY_VALUE` bytes are copied.

A message that the pipe's buffer cannot hold can be cut off by the death of its worker. In the main thread torch's
handler of SIGCHLD then ends the wait for the rest. Elsewhere nothing does, such as in the thread of `pin_memory=True`,
so there all tensors are sent as torch sends them.

[Note: What cannot be sent] A thread of the worker pickles what it sends. What it cannot pickle it drops, with a
traceback, and the process that trains would wait for it forever.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_loop.accelerators import accelerator_of
from ddp_loop.data.placement import map_tensors, tensors_in

BY_VALUE = 2**19  # bytes
_PIPE = 2**20  # bytes, the most that Linux allows every user; 64 KiB by default


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor that fills its storage, (nbytes,) uint8; tensors of one storage have the same `memory`."""

    memory: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> torch.Tensor:
        """The tensor, in memory of this process."""
        return torch.from_numpy(self.memory).view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """A shard's data as a DataLoader gives them, from a worker or in the process itself.

    Attributes:
        data: of the shard.
        has_copies: whether tensors are sent by value. See [Note: By value].
    """

    data: Any
    has_copies: bool = False

    @classmethod
    def of(cls, data: Any) -> Message:
        """The message with copies of the small tensors in these data."""
        memories: dict[tuple[int, int], np.ndarray[Any, Any]] = {}  # storages of several sizes may begin at one place

        def copied(tensor: Any) -> Any:
            if not _can_be_copied(tensor):
                return tensor
            place = tensor.data_ptr(), tensor.nbytes
            memory = memories.setdefault(place, tensor.view(-1).view(torch.uint8).numpy())
            return _Copied(memory, tensor.dtype, tensor.shape)

        return cls(map_tensors(copied, data), has_copies=True)

    def pin_memory(self) -> Message:
        """The message in pinned memory, which torch asks for. It would refuse data that a data set keeps on a GPU."""
        return Message(pin_memory(self.data)) if _is_on_host(self.data) else self

    def received(self) -> Any:
        """The data, in memory of this process."""
        if not self.has_copies:
            return self.data
        return map_tensors(lambda one: one.tensor() if isinstance(one, _Copied) else one, self.data, _Copied)


def _is_on_host(data: Any) -> bool:
    """Whether no tensor is known to be on a GPU; objects such as a `PackedSequence` name no device."""
    for one in tensors_in(data):
        device = getattr(one, "device", None)
        if isinstance(device, torch.device) and not accelerator_of(device).is_host:
            return False
        if isinstance(one, Mapping) and not _is_on_host(dict(one)):  # with a `to`, as a tokenizer's BatchEncoding
            return False
    return True


def _can_be_copied(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and accelerator_of(tensor.device).is_host
        and not (tensor.requires_grad or tensor.is_complex() or tensor.is_quantized or tensor.is_nested)
        and 0 < tensor.nbytes <= BY_VALUE
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def widen_pipe(loaded: Any) -> None:
    """Give the pipe of a DataLoader's workers a larger buffer, which takes a message in one piece."""
    with suppress(AttributeError, OSError):  # no workers, not on Linux, or the user's limit for all pipes is reached
        fcntl.fcntl(loaded._worker_result_queue._writer.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)


_drop = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def begin_worker(begin: Callable[[int], object] | None, number: int) -> None:
    """The `worker_init_fn` of workers that send messages. See [Note: What cannot be sent].

    Args:
        begin: the user's own.
        number: of the worker.
    """
    Queue._on_queue_feeder_error = _send_an_error  # type: ignore[attr-defined]
    if begin is not None:
        begin(number)


def _send_an_error(queue: Any, error: Exception, dropped: Any) -> None:
    match dropped:
        case (request, ExceptionWrapper() as raised):  # its text has the traceback
            raised.exc_type = RuntimeError
            queue.put((request, raised))
        case (request, Message()):
            problem = TypeError(
                f"A worker sends a shard's data by pickle. These cannot be pickled ({error}). Return tensors, arrays, "
                "numbers and texts from the data set and collate_fn, or leave out num_workers."
            )
            queue.put((request, ExceptionWrapper((TypeError, problem, None), "in a DataLoader's worker")))
        case _:  # of a queue of the user's own
            _drop(error, dropped)


def _stacked(samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = samples[0]
    if first.layout is torch.strided and not first.is_nested and len(samples) * first.nbytes <= BY_VALUE:
        return torch.stack(list(samples))
    stacked: torch.Tensor = collate.collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return stacked  # in a worker, in shared memory


def default_collate(samples: list[Any]) -> Any:
    """torch's `default_collate`, which puts tensors of a worker in shared memory only if they are sent there."""
    known = collate.default_collate_fn_map  # a user may have changed it
    ours = {torch.Tensor: _stacked} if known.get(torch.Tensor) is collate.collate_tensor_fn else {}
    return collate.collate(samples, collate_fn_map=known | ours)
