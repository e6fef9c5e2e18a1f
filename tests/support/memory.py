"""The tensors that are alive, without those that earlier tests in this process left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Hide what the process holds already from the collector, so `living_tensors` neither counts nor walks it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def living_tensors() -> list[torch.Tensor]:
    """The tensors and parameters that the collector sees once it has freed what nothing refers to."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
