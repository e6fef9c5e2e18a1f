"""The fake device as an extension of torch has it: `npu:N` tensors by PrivateUse1, and the backend "hccl" for them.

Nothing of torch is replaced here: the device registers itself as torch asks it of extensions.
"""

from __future__ import annotations

import os
import types
from datetime import timedelta
from typing import Any

import fake_cuda_extension as device
import torch
import torch.distributed as dist

from tests.fake_cuda.waits import place, tell

count = int(os.environ["FAKE_CUDA_DEVICES"])


class Npu(types.ModuleType):
    """`torch.npu`: what torch asks of such a module."""

    def is_available(self) -> bool:
        return count > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return count

    def current_device(self) -> int:
        return int(device.device())

    def set_device(self, index: int) -> None:
        device.set_device(index)

    def manual_seed(self, seed: int) -> None:
        device.generator(device.device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(count):
            device.generator(index).manual_seed(seed)

    def get_rng_state(self, of: Any = "npu") -> torch.Tensor:
        return device.generator(torch.device(of).index or 0).get_state()  # type: ignore[no-any-return]

    def set_rng_state(self, state: torch.Tensor, of: Any = "npu") -> None:
        device.generator(torch.device(of).index or 0).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _hccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return device.nccl(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", Npu("torch.npu"))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("hccl", _hccl, devices=["npu"])
device.limit_memory(80 * 2**30)
device.on_wait(lambda what: tell(what, place()))
device.on_place(place)
