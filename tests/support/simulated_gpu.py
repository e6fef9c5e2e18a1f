"""A GPU that is simulated on the CPU: tensors on `simulated:0`, whose values lie in the host's memory.

[Note: What it shows] The package takes the paths of a GPU, its own class `Cuda` included. An operation on tensors of
two devices raises, as on a GPU; where torch copies an index or a single value it is allowed. Noted is each operation
after which the host waits for a GPU: a read of a value, a copy from or to the host that is not `non_blocking`, and what
needs the number of nonzero elements. Copies to the host come late, see `device_modes`. Not simulated: streams, NCCL,
speed, and kernels that only a GPU has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ddp_loop.accelerators import KINDS, Cuda, accelerator_of
from ddp_loop.distributed import join, process_group
from ddp_loop.distributed.backend import Work
from ddp_loop.distributed.gloo import GlooBackend
from tests.support.device_modes import Mark, SlowCopy

aten = torch.ops.aten
NAME = "simulated"  # torch's type of device for other people's hardware, so named
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
SAME_DEVICE = {aten.stack.default, aten.stack.out, aten.cat.default, aten.cat.out}  # here a single value counts too


class GpuTensor(torch.Tensor):
    """A tensor on the simulated GPU; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )
        made.held = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GpuTensor({self.held})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mode = SimulatedGpu.active
        if mode is None:
            raise RuntimeError(f"{function} ran on a simulated GPU after its block.")
        return mode.run(function, args, kwargs or {})


class SimulatedGpu(TorchDispatchMode):
    """Runs operations on simulated tensors; see [Note: What it shows]."""

    active: ClassVar[SimulatedGpu | None] = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note: Callable[[str, int], None] = lambda file, line: None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return self.run(function, arguments, keywords or {})

    def run(self, function: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        found = [one for one in tree_flatten((arguments, keywords))[0] if isinstance(one, torch.Tensor)]
        on_gpu = [one for one in found if isinstance(one, GpuTensor)]
        device = keywords.get("device")
        target = None if device is None else torch.device(device)
        if not on_gpu and (target is None or target.type != NAME):
            return function(*arguments, **keywords)
        self._check(function, arguments, keywords, found, on_gpu)
        if target is not None and target.type == NAME:
            keywords = {**keywords, "device": torch.device("cpu")}
        keywords = {name: value for name, value in keywords.items() if name != "pin_memory"}
        inner = [tree_map(_inner, part) for part in (arguments, keywords)]
        result = function(*inner[0], **inner[1])
        goes_home = target is not None and target.type == "cpu" and function is aten._to_copy.default
        if goes_home or (function in READS and not isinstance(result, torch.Tensor)):
            return result
        if function in COPIES and not isinstance(_first(arguments), GpuTensor):
            return arguments[0]
        wrapped = tree_map(lambda one: GpuTensor(one) if isinstance(one, torch.Tensor) else one, result)
        return return_and_correct_aliasing(function, arguments, keywords, wrapped)

    def _check(
        self, function: Any, arguments: Any, keywords: Any, found: list[torch.Tensor], on_gpu: list[GpuTensor]
    ) -> None:
        others = [one for one in found if not isinstance(one, GpuTensor)]
        if function in READS:
            self._noted()
        elif function is aten._to_copy.default:
            source, target = arguments[0].device.type, torch.device(keywords.get("device") or arguments[0].device).type
            if source != target and not keywords.get("non_blocking"):
                self._noted()
        elif function in COPIES:
            blocks = not (keywords.get("non_blocking") or (len(arguments) > 2 and arguments[2]))
            if others and on_gpu and blocks:
                self._noted()
        elif function in INDEXED:
            if others or any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in arguments[1]):
                self._noted()
        elif (
            on_gpu
            and (other := next((one for one in others if one.dim() or function in SAME_DEVICE), None)) is not None
        ):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found simulated:0 and cpu in {function}, "
                f"shapes {[tuple(one.shape) for one in on_gpu]} and {tuple(other.shape)}."
            )

    def _noted(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
        ):
            frame = frame.f_back
        self.note(frame.f_code.co_filename, frame.f_lineno)


class Factories(TorchFunctionMode):
    """Has tensors that are made of numbers copied to the device where `SimulatedGpu` sees it."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            if function is torch.Tensor.new_tensor:
                keywords = {"device": arguments[0].device, "dtype": arguments[0].dtype, **keywords}
                function, arguments = torch.tensor, arguments[1:]
            device = torch.device(keywords.get("device") or "cpu")
            if device.type == NAME and not isinstance(arguments[0], torch.Tensor):
                return function(*arguments, **{**keywords, "device": "cpu"}).to(device)
        return function(*arguments, **keywords)


def _first(arguments: Any) -> Any:
    first = arguments[0]
    return first[0] if isinstance(first, list | tuple) and first else first


class SimulatedCuda(Cuda):
    """`Cuda` without what only a real one has."""

    has_batch_norm_kernels = False

    def __str__(self) -> str:
        return f"{self.device}: simulated"

    def activate(self) -> None:
        pass

    def identity(self) -> str:
        return f"GPU-{os.environ.get('RANK', '0')}"

    def process_group(self, identities: Sequence[str]) -> tuple[str, torch.device | None]:
        return f"cpu:gloo,{NAME}:gloo", None

    def has_bfloat16(self) -> bool:
        return True

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def start_copies(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> Any:
        return SlowCopy(here, list(map(_inner, there)))

    def mark(self) -> Any:
        return Mark()

    def seconds(self, first: Any, last: Any) -> float:
        return float(last.at - first.at)

    @contextmanager
    def host_reads(self, note: Callable[[str, int], None]) -> Iterator[None]:
        mode = SimulatedGpu.active
        assert mode is not None
        mode.note = note
        try:
            yield
        finally:
            mode.note = lambda file, line: None

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)

    def random_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def memory_held(self) -> float:
        return 0.0

    def memory_free(self) -> float:
        return 2.0**40


def _inner(one: Any) -> Any:
    """A tensor's values in the host's memory; anything else as it is."""
    return one.held if isinstance(one, GpuTensor) else one


class SimulatedGloo(GlooBackend):
    """gloo, for the values of simulated tensors."""

    def start_sum(self, tensor: torch.Tensor, what: str) -> Work:
        return super().start_sum(_inner(tensor), what)

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Work:
        return super().start_exchange(_inner(received), _inner(sent), from_each, to_each)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Work:
        return super().start_gather(_inner(whole), _inner(part), what)

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Work:
        return super().start_broadcast(_inner(tensor), what)


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """This rank has a GPU, which is simulated: every world that it joins is on `simulated:0`."""
    _register()
    KINDS[NAME] = SimulatedCuda
    accelerator_of.cache_clear()
    mode = SimulatedGpu.active = SimulatedGpu()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data` cannot take a subclass
    try:
        with (
            mock.patch.object(join, "choose_device", return_value=torch.device(NAME, 0)),
            mock.patch.object(process_group, "GlooBackend", SimulatedGloo),
            mode,
            Factories(),
        ):
            yield mode
    finally:
        SimulatedGpu.active = None
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        del KINDS[NAME]
        accelerator_of.cache_clear()
        SlowCopy.under_way.clear()


@cache
def _register() -> None:
    """Register the type of device with torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME)
