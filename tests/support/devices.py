"""The two kinds of device that a test of ranks runs on: the CPU, and a fake GPU for each rank (`tests.fake_cuda`).

A test, or a file by its `pytestmark`, marked `on_gpus_too` runs on each; the fixture `device_kind` says on which.
Marked `one_device(kind, reason)` it runs on that one alone, whatever its file says.

[Note: On a GPU] A task is the same function on both. What it makes there without naming a device lies on its rank's
GPU, as after `torch.set_default_device`; `join_world` takes the GPU by itself. What it returns comes back on the host.
The process of pytest has no fake GPU, so a marked test without ranks runs on the CPU alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from ddp_loop.distributed import sharing_gpus
from tests.support.both_exchanges import EXCHANGES, GLOO
from tests.support.harness import Result, run_cleanly

CPU, GPU = KINDS = ("cpu", "gpu")


class MadeOnGpu(TorchFunctionMode):
    """What is made inside without a device lies on this one. Numbers of a generator are drawn where it is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = dict(keywords or {})
        if function not in _device_constructors() or given.get("device") is not None:
            return function(*arguments, **given)
        generator = given.get("generator")
        given["device"] = self._device if generator is None else generator.device
        return function(*arguments, **given).to(self._device)


def kinds_of(test: pytest.Item) -> tuple[str, ...]:
    """The kinds of device that a test is to run on."""
    if not {"on_ranks", "refused"} & set(getattr(test, "fixturenames", ())):
        return (CPU,)
    if test.get_closest_marker("gpu") is not None:
        return (CPU,)  # the ranks take the machine's own GPUs
    if (alone := test.get_closest_marker("one_device")) is not None:
        kind, _ = alone.args
        return (kind,)
    return KINDS if test.get_closest_marker("on_gpus_too") else (CPU,)


def ways_of(test: pytest.Item) -> dict[str, list[Any]]:
    """The values of the fixtures `device_kind` and `exchange` for which a test is to run.

    GPUs have one exchange for the sums, so there it runs over the usual one.
    """
    kinds, has_exchanges = kinds_of(test), test.get_closest_marker("both_exchanges") is not None
    if kinds == (CPU,):
        return {"exchange": list(EXCHANGES)} if has_exchanges else {}
    if not has_exchanges:
        return {"device_kind": list(kinds)}
    return {
        "device_kind,exchange": [(kind, name) for kind in kinds for name in EXCHANGES if (kind, name) != (GPU, GLOO)]
    }


def run_on_cpu(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Run a task on a rank. Ranks may share the GPUs of this machine, if there are any."""
    with sharing_gpus():
        return run_cleanly(function, *arguments, **keywords)


def run_on_gpu(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Run a task on a rank with a fake GPU; see [Note: On a GPU]."""
    with MadeOnGpu(torch.device("cuda", int(os.environ["LOCAL_RANK"]))):
        result = run_cleanly(function, *arguments, **keywords)
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)  # type: ignore[no-any-return]
