"""Weights of the user's own: tokens, or one per sample.

The networks have no batch norm, so one device on the whole mini-batch is the truth; in float64 the bound is 1e-12
relative to the largest element of each tensor: no sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_loop as dl
from ddp_loop.training.rows import as_metric
from ddp_loop.training.validation import check_weight
from tests.support.devices import CPU

pytestmark = pytest.mark.on_gpus_too

LETTERS, LONGEST, SPLITS, MASKED = 7, 9, 20, -100


# -- values on the host, for a loss on a GPU; device "meta" stands for the GPU, and refuses to be mixed as it does ---


class Copies(TorchDispatchMode):
    """Collects what is copied from the host to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and any(not one.is_meta for one in tensors):
            self.seen.append(str(function))
        return result


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([1, 2, 3]), dl.Sum(torch.ones(3)), 2])
def test_a_metric_on_the_host_is_a_number_to_the_device(value: Any) -> None:
    with Copies() as copies:
        assert as_metric("one", value, 3, torch.device("meta")).device.type == "meta"
    assert copies.seen == []


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize("weight", [torch.tensor(3), torch.tensor([2.5]), torch.tensor(0.1, dtype=torch.float64)])
def test_a_weight_on_the_host_is_a_number(weight: torch.Tensor) -> None:
    assert type(checked := check_weight(weight)) is float
    assert checked == weight.to(torch.float64).item()
    for wrong in (torch.tensor(-1.0), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
            check_weight(wrong)
