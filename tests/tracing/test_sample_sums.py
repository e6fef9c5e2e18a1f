"""Sums of samples: the same for any shards, different for a different sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddp_loop.tracing.sample_sums import first_other, sums_of_samples

INPUTS, LABELS = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(1)), torch.arange(7)


def whole(data: Any, sizes: list[int]) -> dict[str, torch.Tensor]:
    """The sums of all shards, concatenated; `data(start, end)` returns a shard's data."""
    found: list[dict[str, torch.Tensor]] = []
    start = 0
    for size in sizes:
        found.append(sums_of_samples(data(start, start + size), size))
        start += size
    return {name: torch.cat([each[name] for each in found]) for name in found[0] if all(name in one for one in found)}


FORMS: dict[str, Any] = {
    "tensor": lambda start, end: INPUTS[start:end],
    "tuple": lambda start, end: (INPUTS[start:end], LABELS[start:end]),
    "list": lambda start, end: [INPUTS[start:end], LABELS[start:end]],
    "dict": lambda start, end: {"x": INPUTS[start:end], "more": (LABELS[start:end], "word")},
    "lists of samples": lambda start, end: (
        [INPUTS[at, :, : 1 + at % 4] for at in range(start, end)],
        [{"boxes": INPUTS[at, : 1 + at % 2], "label": LABELS[at]} for at in range(start, end)],
    ),
}


@pytest.mark.covers("H9")
@pytest.mark.parametrize("form", FORMS)
def test_the_sums_do_not_depend_on_the_shards(form: str) -> None:
    one = whole(FORMS[form], [7])
    assert one
    for sizes in ([4, 3], [2, 2, 2, 1], [1] * 7):
        other = whole(FORMS[form], sizes)
        assert [name for name in one if name in other and first_other(one[name], other[name]) is not None] == []


INDEX = torch.tensor(2)


@pytest.mark.covers("H9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_different_sample_is_found_and_rounding_is_none(dtype: torch.dtype) -> None:
    one = INPUTS.flatten(1).to(dtype)
    sums = sums_of_samples(one, 7)["part"]
    for change in (
        one.index_fill(1, INDEX, 0.5),
        one + 1e-4,
        one.flip(1),  # the same values in other places
        -one,
        one.index_fill(1, INDEX, math.nan),
        one.index_fill(1, INDEX, math.inf),
    ):
        other = sums_of_samples(torch.cat([one[:3], change[3:5], one[5:]]), 7)["part"]
        assert first_other(sums, other) == 3
        assert first_other(other, other) is None
    assert first_other(sums, sums_of_samples(one * 3 / 3 + torch.finfo(dtype).eps / 10, 7)["part"]) is None


def test_a_different_integer_is_found() -> None:
    one = torch.full((4, 1000), 255, dtype=torch.uint8)
    other = one.clone()
    other[2, 7] = 254
    assert first_other(*(sums_of_samples(each, 4)["part"] for each in (one, other))) == 2


def test_data_without_a_row_per_sample_are_not_compared() -> None:
    assert sums_of_samples((torch.ones(3), "word", None, torch.tensor(1.0), torch.eye(7).to_sparse()), 7) == {}
    padded = [sums_of_samples(torch.nn.functional.pad(INPUTS, (0, more)), 7)["part"] for more in (0, 2)]
    assert first_other(*padded) is None
