"""Graphs on a CPU, for tests without a GPU: the work of a call as a list of operations, done again on the same memory.

[Note: What is alike] As with a CUDA graph, recording does nothing: every storage that was there before holds the same
bits after it, the random numbers too, and what the operations returned holds NaN. A replay runs no Python of the
function; it does the recorded operations with the same numbers on the same storages, draws from the generator as it is
then, and leaves torch's version counters. An operation that reads a value on the host, or whose shape depends on
values, raises, as in a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_loop.accelerators import Recorded
from tests.support.device_modes import AsynchronousCpu, cpu_as

aten = torch.ops.aten
HOST_READS = frozenset(
    (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
)
UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing"


@dataclass(slots=True)
class Operation:
    """One operation, its inputs, and the tensors that receive its new outputs; None for views and what it wrote."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[torch.Tensor | None]

    def do(self) -> None:
        found = self.function(*self.arguments, **self.keywords)
        for here, there in zip(self.outputs, tree_leaves(found), strict=True):
            if here is not None:
                here.copy_(there)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Recording(TorchDispatchMode):
    """Notes each operation; afterwards every earlier storage is what it was. See [Note: What is alike]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function in HOST_READS:
            raise RuntimeError(UNSUPPORTED)
        given = tensors_in((arguments, keywords))
        for one in given:
            if (place := storage_of(one)) not in self._made and place not in self._before:
                self._before[place] = one, bytes_of(one).clone()
        found = function(*arguments, **keywords)
        theirs = set(map(storage_of, given))
        new: list[torch.Tensor | None] = []
        for one in tree_leaves(found):
            is_new = isinstance(one, torch.Tensor) and storage_of(one) not in theirs
            new.append(one.detach() if is_new else None)
        self._made.update((storage_of(one), one) for one in new if one is not None)
        if function._schema.is_mutable or any(one is not None for one in new):
            held = tuple(arguments), dict(keywords)
            self.operations.append(Operation(function, *held, new))
        return found

    def undo(self) -> None:
        """Restore what was there before, and spoil what was made."""
        for one, value in self._before.values():
            bytes_of(one).copy_(value)
        for made in self._made.values():
            if made.is_floating_point():
                made.fill_(torch.nan)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


class CpuGraphRecorder:
    """Records graphs of a CPU's work. As with a pool of CUDA memory, none comes after all of its graphs are gone."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Replay] = weakref.WeakSet()
        self._has_recorded = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, function: Callable[[], Recorded]) -> tuple[Recorded, Callable[[], None]]:
        if self._has_recorded and not self._graphs:
            raise RuntimeError("The memory pool has outlived its graphs.")
        drawn, recording = torch.get_rng_state(), Recording()
        try:
            with recording:
                found = function()
        finally:
            with torch.no_grad():
                recording.undo()
            torch.set_rng_state(drawn)
        graph = Replay(recording.operations)
        self._graphs.add(graph)
        self._has_recorded = True
        return found, graph


class Replay:
    """Does recorded operations again."""

    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def __call__(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():  # leaves the version counters
            for one in self._operations:
                one.do()


class GraphCpu(AsynchronousCpu):
    """A CPU that answers as a GPU does, and has graphs."""

    def graph_recorder(self) -> CpuGraphRecorder:
        return CpuGraphRecorder()


def cpu_graphs() -> AbstractContextManager[None]:
    """Have this process's CPU record graphs."""
    return cpu_as(GraphCpu)
