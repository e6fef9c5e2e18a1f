"""Checks of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ddp_loop.determinism import check_count


def test_a_whole_number_of_any_library_becomes_an_int() -> None:
    values: list[Any] = [3, np.int64(3), np.uint8(3), torch.tensor(3)]
    for value in values:
        found = check_count("steps", value, least=3)
        assert (type(found), found) == (int, 3)
    assert check_count("steps", -5, least=None) == -5


def test_everything_else_is_refused_with_the_remedy() -> None:
    values: list[Any] = [True, False, 3.0, "3", None, np.float64(3), torch.tensor(3.0)]
    for value in values:
        with pytest.raises(ValueError, match=r"^steps must be a whole number\. Got .*\.$"):
            check_count("steps", value, least=None)
    with pytest.raises(ValueError, match=r"^steps must be a whole number, 1 or more\. Got 0\. Pass epochs instead\.$"):
        check_count("steps", 0, remedy="Pass epochs instead.")
