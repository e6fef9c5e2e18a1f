"""Checks of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ddp_loop.determinism import check_count


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.uint8(3), torch.tensor(3)], ids=["int", "int64", "uint8", "torch"]
)
def test_a_whole_number_of_any_library_becomes_an_int(value: Any) -> None:
    found = check_count("steps", value, least=3)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [True, False, 3.0, "3", None, np.float64(3), torch.tensor(3.0)], ids=str)
def test_everything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^steps must be a whole number\. Got .*\.$"):
        check_count("steps", value, least=None)


def test_a_number_below_the_least_is_refused_with_the_remedy() -> None:
    assert check_count("steps", -5, least=None) == -5
    assert check_count("steps", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"^steps must be a whole number, 1 or more\. Got 0\. Pass epochs instead\.$"):
        check_count("steps", 0, remedy="Pass epochs instead.")
