"""Copies of a state on the host: their memory, every byte, and the few pinned blocks through which a GPU copies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ddp_loop.checkpoint import staging
from ddp_loop.checkpoint.serialization import DTYPES, SerializedState, from_tree, to_tree
from ddp_loop.checkpoint.staging import copy_to_host
from tests.support.harness import OnRanks

BLOCK = 64


def is_same(one: SerializedState, other: SerializedState) -> bool:
    """Whether structures, and the forms and bytes of all tensors, are the same."""
    return one.structure == other.structure and all(
        (one.tensors[name].dtype, one.tensors[name].shape) == (tensor.dtype, tensor.shape)
        and torch.equal(one.tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in other.tensors.items()
    )


def copy_twice() -> tuple[bool, SerializedState]:
    """Whether the second copy has the first one's memory, and the second copy, after which the state went on."""
    w = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    one = copy_to_host(to_tree({"a": torch.ones(3), "b": torch.ones(2), "c": 1}), {})
    memory = one.tensors["a"].data_ptr()
    two = copy_to_host(to_tree({"a": torch.full((3,), 2.0), "b": torch.ones(4), "c": 2, "w": w}), one.tensors)
    with torch.no_grad():
        w.add_(1)
    return two.tensors["a"].data_ptr() == memory, two


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_copies_use_their_memory_again_where_the_form_is_the_same_and_stay_as_they_are(on_ranks: OnRanks) -> None:
    ((is_used_again, two),) = on_ranks(1, copy_twice)
    assert is_used_again
    w = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert is_same(two, to_tree({"a": torch.full((3,), 2.0), "b": torch.ones(4), "c": 2, "w": w}))


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


DTYPE_NAMES = [name for name in DTYPES if not name.startswith(("q", "uint8x"))]
IMAGE = random_bytes(120).view(2, 3, 4, 5)
STATES: dict[str, dict[str, torch.Tensor]] = {
    **{f"{count} bytes": {"a": random_bytes(count)} for count in (0, 1, 63, 64, 65, 127, 128, 129, 192, 500)},
    "pieces of a block": {str(count): random_bytes(count) for count in (60, 4, 64, 1, 63, 65, 30, 0, 200, 7)},
    "many small tensors": {str(number): torch.tensor(float(number)) for number in range(100)},
    "no tensors": {},
    "not contiguous": {
        "turned": random_bytes(90).view(9, 10).t(),
        "channels last": IMAGE.to(memory_format=torch.channels_last),
        "a slice": IMAGE[:, 1, ::2],
        "expanded": random_bytes(3).expand(40, 3),
        "conjugate": torch.complex(torch.arange(9.0), torch.ones(9)).conj(),
    },
    "all dtypes": {name: random_bytes(96) for name in DTYPE_NAMES if name != "bool"} | {"bool": torch.eye(9).byte()},
    "on the host too": {"a": random_bytes(100), "host": random_bytes(101)},
}


def state_on(device: str, name: str) -> dict[str, torch.Tensor]:
    there = {key: one if key == "host" else one.to(device) for key, one in STATES[name].items()}
    return {key: one.view(DTYPES[key]) for key, one in there.items()} if name == "all dtypes" else there


def copy_from_a_gpu(name: str, block: int = BLOCK) -> tuple[list[bool], list[str], int]:
    """Whether two copies of a state are right; what the host waited for; and how many bytes were pinned."""
    import fake_cuda_extension as device

    from tests.fake_cuda import cuda

    found = []
    memory: dict[str, torch.Tensor] = {}
    expected = to_tree(state_on("cpu", name))
    device.reset_peak()
    before = device.pinned_memory()[0]
    waited = []
    for _ in range(2):
        state = to_tree(state_on("cuda", name))
        with mock.patch.object(staging, "BLOCK_BYTES", block), cuda.Waits() as waits:
            copied = copy_to_host(state, memory)
        memory = copied.tensors
        waited += [what for what, _ in waits.found]
        for one in state.tensors.values():
            if one.is_cuda:
                one.zero_()  # the step after a save
        found.append(is_same(copied, expected))
    return found, waited, device.pinned_memory()[1] - before


def copy_each_from_a_gpu() -> dict[str, tuple[list[bool], list[str], int]]:
    return {name: copy_from_a_gpu(name) for name in STATES}


@pytest.mark.covers("J18")
def test_every_byte_of_a_gpus_state_comes_through_a_few_pinned_blocks(on_fake_gpus: OnRanks) -> None:
    (results,) = on_fake_gpus(1, copy_each_from_a_gpu)
    assert results.keys() == STATES.keys()
    for name, (found, waits, pinned) in results.items():
        assert found == [True, True], name
        assert set(waits) <= {"event.synchronize"}, name
        assert pinned <= staging.BLOCKS * BLOCK, name


@pytest.mark.covers("J18")
def test_a_state_of_three_blocks_pins_two(on_fake_gpus: OnRanks) -> None:
    ((found, waits, pinned),) = on_fake_gpus(1, copy_from_a_gpu, "500 bytes", 200)
    assert (found, waits, pinned) == ([True, True], ["event.synchronize"] * 6, 400)


@pytest.mark.gpu
def test_tensors_on_a_gpu_come_back_on_the_cpu() -> None:
    state: dict[str, Any] = {"w": torch.randn(100, 100, device="cuda").t(), "n": torch.ones(3)}
    memory: dict[str, torch.Tensor] = {}
    with mock.patch.object(staging, "BLOCK_BYTES", 1000):
        for _ in range(2):
            kept = copy_to_host(to_tree(state), memory)
            memory = kept.tensors
            assert not kept.tensors["w"].is_pinned()
            assert torch.equal(from_tree(kept)["w"], state["w"].cpu())
            assert torch.equal(from_tree(kept)["n"], state["n"])
