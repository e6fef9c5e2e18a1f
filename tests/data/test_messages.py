"""How a worker's shard reaches the process that trains: small tensors by value, large ones in shared memory."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import ddp_loop as dl
from ddp_loop.data import messages
from ddp_loop.data.messages import BY_VALUE, Message, default_collate, widen_pipe
from tests.support.sources import FORKED, Mapped, Pair


def sent(data: Any) -> tuple[Any, bytes]:
    """The data after a pipe, and the bytes in the pipe."""
    message = bytes(ForkingPickler.dumps(Message.of(data)))
    return pickle.loads(message).received(), message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 1, 28, 28)], ids=str)
def test_a_small_tensor_is_copied_with_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(9).abs().to(dtype)
    (found,), message = sent((tensor,))
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    assert torch.equal(found, tensor)
    assert b"storage" not in message  # torch's way, by a file descriptor
    assert not found.is_shared()
    found.zero_()  # may be changed in place, like every shard's data


def test_containers_and_other_values_than_tensors_are_kept() -> None:
    data = {"pair": Pair(torch.ones(2), torch.zeros(2)), "list": [torch.arange(3), "text", None], "number": 3}
    found, message = sent(data)
    assert type(found["pair"]) is Pair
    assert repr(found) == repr(data)
    assert b"storage" not in message


def test_tensors_that_share_their_memory_still_do() -> None:
    tensor = torch.arange(6)
    (one, other, square), _ = sent((tensor, tensor, tensor.view(2, 3)))
    one[0] = 9
    assert other[0] == square[0, 0] == 9


def of_one_array(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two storages that begin at one address, of different sizes."""
    array = np.stack([row.numpy() for row, _ in rows])
    return torch.from_numpy(array[:1]), torch.from_numpy(array), torch.tensor([index for _, index in rows])


def test_storages_that_begin_at_one_address_may_have_different_sizes() -> None:
    start, whole, labels = read(3, collate_fn=of_one_array, **FORKED)[1]
    assert start.tolist() == [[2.0] * 3]
    assert whole.tolist() == [[2.0] * 3, [3.0] * 3]
    assert labels.tolist() == [2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(BY_VALUE + 1, dtype=torch.uint8),
        lambda: torch.zeros(9)[:4],
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(3).expand(2, 3),
        lambda: torch.nn.Parameter(torch.zeros(3)),
        lambda: torch.zeros(3, requires_grad=True),
        lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        lambda: torch.zeros(3, 3).to_sparse(),
        lambda: torch.zeros(0, 4),
    ],
    ids=["large", "part", "transposed", "expanded", "parameter", "needs gradient", "complex", "sparse", "empty"],
)
def test_any_other_tensor_is_sent_as_torch_sends_it(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert Message.of([tensor]).data[0] is tensor


def shaped(floats: int, index: int) -> tuple[torch.Tensor, int]:
    """A tensor full of the number."""
    return torch.full((floats,), float(index)), index


def read(floats: int, **options: Any) -> list[Any]:
    with dl.join_world() as world:
        return list(dl.Batches(Mapped(6, partial(shaped, floats)), 2, world, shuffle=False, **options))


@pytest.mark.parametrize("large", [0, 1])
def test_a_workers_shard_has_the_bits_of_one_read_here(large: int) -> None:
    floats = BY_VALUE // 8 + large  # a shard has two samples of 4 bytes a float
    found = read(floats, **FORKED)
    for (images, labels), (same_images, same_labels) in zip(found, read(floats), strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
        assert images.is_shared() == large
        assert not labels.is_shared()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_thread_that_could_wait_forever_gets_only_short_messages() -> None:
    """torch's thread that pins memory, or one that the user reads in: a worker may die within a long message."""
    found: list[Any] = []
    reads = threading.Thread(target=lambda: found.append(read(3, **FORKED)), daemon=True)
    reads.start()
    reads.join()
    for images, _ in (*found[0], *read(3, pin_memory=True, **FORKED)):
        assert images.is_shared()


def dying(index: int) -> tuple[torch.Tensor, int]:
    """A worker is killed while its first shard, larger than the pipe's buffer, is on its way."""
    if index == 2 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return shaped(BY_VALUE // 8, index)


def test_a_worker_that_dies_within_a_message_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "widen_pipe", lambda loaded: None)
    with dl.join_world() as world:
        batches = dl.Batches(Mapped(6, dying), 2, world, shuffle=False, check_data=False, **FORKED)
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            list(batches)


@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="Linux only")
def test_the_pipe_holds_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: Any = multiprocessing.get_context("fork").Queue()
    widen_pipe(SimpleNamespace(_worker_result_queue=queue))
    assert fcntl.fcntl(queue._writer.fileno(), fcntl.F_GETPIPE_SZ) > BY_VALUE
    widen_pipe(SimpleNamespace())  # a loader without workers
    widened: list[Any] = []
    monkeypatch.setattr(messages, "widen_pipe", widened.append)
    read(3, **FORKED)
    assert [hasattr(one, "_worker_result_queue") for one in widened] == [True]


def modes(index: int) -> int:
    """How many modes intercept every call of torch in this process."""
    return torch._C._len_torch_function_stack()


def test_no_mode_slows_down_a_workers_calls_of_torch(world: dl.World) -> None:
    batches = dl.Batches(Mapped(2, modes), 2, world, check_data=False, **FORKED)
    assert next(batches.epoch(1)).data(0).tolist() == [0, 0]


def test_a_users_change_of_torchs_collate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {torch.Tensor: lambda samples, collate_fn_map=None: "the user's"}
    monkeypatch.setattr("torch.utils.data._utils.collate.default_collate_fn_map", known)
    assert default_collate([torch.zeros(1)]) == "the user's"


def test_samples_that_cannot_be_stacked_are_refused_as_by_torch() -> None:
    for samples in ([torch.zeros(2, 2).to_sparse()] * 2, [torch.zeros(2), torch.zeros(3)]):
        with pytest.raises(RuntimeError) as ours:
            default_collate(samples)
        with pytest.raises(RuntimeError) as torchs:
            torch.utils.data.default_collate(samples)
        assert str(ours.value) == str(torchs.value)
