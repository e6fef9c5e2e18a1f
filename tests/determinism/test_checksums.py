"""Checksums of all dtypes: each flipped bit changes them, strides do not."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from ddp_loop.determinism import checksum, checksum_all
from ddp_loop.determinism.digests import _odd, _of_pieces, _of_rows, digest, words
from tests.support.dispatching import Dispatched

pytestmark = pytest.mark.covers("D10")

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (1,), (3,), (2, 5), (7, 1, 3), (4, 3, 5, 2)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; bool has random values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def by_hand(tensor: torch.Tensor, length: int) -> int:
    """[Note: The sum] with Python's integers; `length` is K."""
    data = tensor.contiguous().reshape(-1)
    raw = b"" if not data.numel() else bytes(data.view(torch.uint8).tolist())
    found = np.frombuffer(raw + b"\0" * (-len(raw) % 4), dtype=np.int32).tolist()
    inner, outer = _odd(length, 0, tensor.device).tolist(), _odd(len(found) // length + 1, 1, tensor.device).tolist()
    total: int = sum(inner[place % length] * outer[place // length] * word for place, word in enumerate(found))
    return (total + 2**63) % 2**64 - 2**63


def test_the_checksum_is_the_sum_in_the_note() -> None:
    for shape, dtype in product(SHAPES, DTYPES):
        tensor = drawn(shape, dtype)
        found = checksum(tensor)
        assert (found.shape, found.dtype) == ((), torch.int64)
        assert found.item() == by_hand(tensor, 2**14 - 1), (shape, dtype)


def test_a_large_tensor_is_summed_in_pieces() -> None:
    for count in (2**14 - 2, 2**14 - 1, 2**14, 3 * (2**14 - 1), 50_001):
        tensor, odd = drawn((count,), torch.float32), drawn((4 * count - 3,), torch.uint8)
        assert checksum(tensor).item() == by_hand(tensor, 2**14 - 1)
        assert checksum(odd).item() == by_hand(odd, 2**14 - 1)
        weights = _odd(2**14 - 1, 0, tensor.device)
        pieces = _of_pieces(words(tensor), weights).tolist()
        for rows in (1, 2, 256):
            assert _of_rows(words(tensor), weights, rows).tolist() == pieces  # as in a kernel


def test_all_weights_are_odd_and_different() -> None:
    for stream in (0, 1):
        weights = _odd(100_000, stream, torch.device("cpu"))
        assert bool((weights & 1).all())
        assert len(weights.unique()) == 100_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_each_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = drawn((3, 5), dtype)
    seen = {checksum(tensor).item()}
    for place, bit in product(range(tensor.nbytes), range(8)):
        flipped = tensor.clone()
        flipped.reshape(-1).view(torch.uint8)[place] ^= 1 << bit
        seen.add(checksum(flipped).item())
    assert len(seen) == 1 + 8 * tensor.nbytes  # all are different


def test_a_flipped_bit_anywhere_in_a_large_tensor_changes_it() -> None:
    tensor = torch.zeros(100_003)
    before = checksum(tensor).item()
    for place in (0, 16_382, 16_383, 65_536, 100_002):
        for bit in range(32):
            tensor.view(torch.int32)[place] = 1 << bit if bit < 31 else -(2**31)
            assert checksum(tensor).item() != before
            tensor[place] = 0
    assert checksum(tensor).item() == before


def test_every_swap_of_two_values_changes_it() -> None:
    values = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, -0.0, 1.5, 4.0])  # signs and powers of two differ in few bits
    before = checksum(values).item()
    for first, second in combinations(range(len(values)), 2):
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        assert checksum(swapped).item() != before


def test_multiplying_or_shifting_all_values_changes_it() -> None:
    values = drawn((2**20,), torch.float32).nan_to_num(1.0, 1.0, 1.0).clamp(1e-3, 1e3)
    seen = {checksum(values * factor).item() for factor in (1, 2, 4, 8, 0.5, -1, -2)}
    seen |= {checksum(values.roll(shift)).item() for shift in (1, 2, 16)}
    assert len(seen) == 10


def test_strides_and_offsets_do_not_matter() -> None:
    image, odd = drawn((4, 3, 5, 2), torch.float32), drawn((41,), torch.uint8)
    assert checksum(image.contiguous(memory_format=torch.channels_last)).item() == checksum(image).item()
    assert checksum(image.mT).item() != checksum(image).item()
    for view in (
        image.mT,
        image[1:, :, ::2],
        *(odd[start : start + 8] for start in range(20)),  # of whole words, which 15 of them do not start at
        odd[:16:2],
        drawn((5,), torch.complex64).conj(),
        torch.ones(1).expand(3),
    ):
        own = view.resolve_conj().clone(memory_format=torch.contiguous_format)
        assert checksum(view).item() == checksum(own).item()


@pytest.mark.parametrize("large", [False, True])
def test_the_work_is_linear_in_the_number_of_small_tensors(large: bool) -> None:
    def count(tensors: int) -> tuple[int, int]:
        """The operations, and the elements that they take and give."""
        sizes: list[int] = []

        def note(function: Any, arguments: Any, result: Any) -> None:
            is_view = any(
                one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns
            )
            found = () if is_view else tree_leaves((arguments, result))
            sizes.append(sum(one.numel() for one in found if isinstance(one, torch.Tensor)))

        given = [torch.ones(7) for _ in range(tensors)] + [torch.ones(2**18)] * large
        with Dispatched(note):
            checksum_all(given)
        return len(sizes), sum(sizes)

    for none, few, many in zip(count(0 if large else 1), count(100), count(1600), strict=True):
        assert 16 * (few - none) * 0.9 <= many - none <= 16 * (few - none) * 1.1


def test_checksums_of_many_tensors_are_those_of_each() -> None:
    tensors = [drawn(shape, dtype, seed) for seed, shape in enumerate(SHAPES) for dtype in DTYPES]
    tensors += [drawn((count,), torch.float32, count) for count in (1000, 16_383, 40_000, 9000, 9000)]
    found = checksum_all(tensors)
    assert found.tolist() == [checksum(tensor).item() for tensor in tensors]
    assert checksum_all([]).shape == (0,)


def test_tensors_that_need_gradients_are_read_only() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    found = checksum(weight)
    assert not found.requires_grad
    assert weight._version == 0
    assert words(weight).data_ptr() == weight.data_ptr()  # not copied


@pytest.mark.gpu
def test_a_gpu_gives_the_same_checksums() -> None:
    tensors = [drawn(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    tensors += [drawn((count,), torch.float32) for count in (2**14 - 1, 2**14, 50_001, 9_000_001)]
    assert checksum_all([tensor.cuda() for tensor in tensors]).tolist() == checksum_all(tensors).tolist()


# -- digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_has_every_bit_of_a_tensor_its_type_and_its_shape() -> None:
    rows = torch.zeros(50, 60)
    changed = rows.clone()
    changed[25, 30] = -0.0  # in the middle of what is too large to be printed, and equal to 0
    others: list[torch.Tensor | float | str | bytes | None] = [
        changed, rows.reshape(60, 50), rows.double(), rows.int(), rows[:0], rows[0, 0], "", b"", 0.0, 0, None,
    ]  # fmt: skip
    assert len({digest(rows), *(digest(other) for other in others)}) == 1 + len(others)
    assert digest(rows) == digest(rows.t().clone().t()) == digest(rows.clone().requires_grad_())
