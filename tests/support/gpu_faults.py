"""Faults that the code for GPUs once had, put back into a process, to see that a rehearsal of `make gpu` finds them.

A process with fake GPUs that is started with `named(...)` in its environment has these faults. The numbers are those
under which the project found them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

Result = TypeVar("Result")
VARIABLE = "PLANTED_GPU_FAULTS"  # read as a process with fake GPUs starts: `tests.fake_cuda.build`


@dataclass(frozen=True)
class Edit:
    """A piece of a function's source, and what takes its place.

    Attributes:
        place: such as "ddp_loop.evaluation:_total", or a class's method.
    """

    place: str
    before: str
    after: str

    def function(self) -> FunctionType:
        """The function, without what decorates it."""
        module, _, names = self.place.partition(":")
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        function: FunctionType = inspect.unwrap(found)
        return function

    def source(self) -> str:
        """The changed source of the function, at its line of the file.

        Raises:
            ValueError: the function does not have the piece once.
        """
        lines, first = inspect.getsourcelines(self.function())
        source = textwrap.dedent("".join(lines))
        if (count := source.count(self.before)) != 1:
            raise ValueError(f"{self.place} has {self.before!r} {count} times: mend {__name__}")
        return "from __future__ import annotations" + "\n" * (first - 1) + source.replace(self.before, self.after)

    def apply(self) -> Callable[[], None]:
        """Change the function in this process. Returns what changes it back."""
        function = self.function()
        before, made = function.__code__, dict(function.__globals__)
        exec(compile(self.source(), before.co_filename, "exec"), made)
        function.__code__ = inspect.unwrap(made[function.__name__]).__code__
        return lambda: setattr(function, "__code__", before)


FAULTS: dict[int, tuple[Edit, ...]] = {
    # A GPU's checksum has other pieces than the host's.
    1: (
        Edit(
            "ddp_loop.determinism.digests:checksum_all",
            "    checksums: dict[int, torch.Tensor] = {}\n",
            "    checksums: dict[int, torch.Tensor] = {}\n"
            "    _WORDS = 2**14 - 1 if accelerator_of(tensors[0].device).is_host else 2**22 - 1\n",
        ),
    ),
    # Numbers written into a GPU's tensor one by one make the host wait, in each layer with synced batch norm,
    2: (
        Edit(
            "ddp_loop.batch_norm.synced:SyncChannel.send",
            "row[column].fill_(number)",
            "row[column] = number",
        ),
    ),
    # in each shard with a number as weight,
    3: (Edit("ddp_loop.training.rows:Rows.fill", "mine[row, 0].fill_(", "mine[row, 0] = ("),),
    # and in each shard of an evaluation; so does an index from the host's memory.
    7: (
        Edit(
            "ddp_loop.evaluation:evaluate",
            "output, others = (forward",
            "torch.empty(1, device=world.device)[0] = 1.0\n            output, others = (forward",
        ),
        Edit("ddp_loop.evaluation:predict", "whole[sent(at, world.device)]", "whole[at.to(world.device)]"),
    ),
    # A socket that NCCL closes counts as a dead peer.
    4: (
        Edit(
            "ddp_loop.distributed.process_group:ProcessGroups.__init__",
            "accelerator_of(bound).connect(default, self._timeout)",
            "accelerator_of(bound).connect(default, self._timeout)\n"
            "                self.connections = _new_sockets(self._before)",
        ),
    ),
    # NCCL's watchdog ends the process when the host would name the culprit.
    5: (Edit("ddp_loop.accelerators:Cuda.connect", "backend._set_default_timeout(timeout + _WATCHDOG_LATER)", "pass"),),
    # One shard on one GPU is the whole mini-batch, and yet each of its buffers is restored and merged, one by one.
    6: (
        Edit("ddp_loop.training.step:Fold.__init__", "is_whole=shards == world.size == 1", "is_whole=False"),
        Edit(
            "ddp_loop.batch_norm.pooled:LayerGroup.move",
            "torch._foreach_copy_(olds, list(now.split(self.sizes)))",
            "[one.copy_(value) for one, value in zip(olds, now.split(self.sizes))]",
        ),
    ),
    # A rank that leaves shuts NCCL's sockets.
    8: (
        Edit(
            "ddp_loop.distributed.process_group:ProcessGroups.leave",
            "cut(accepted(self.connections))",
            "cut(accepted(_new_sockets(self._before)))",
        ),
    ),
    # Data lie on a GPU before it is known what a step needs.
    9: (Edit("ddp_loop.data.placement:at_first", "if not is_limited(device):", "if True:"),),
    # A large state is copied to memory that is not pinned.
    10: (Edit("ddp_loop.checkpoint.staging:copy_to_host", "if accelerator.is_gpu:", "if False:"),),
    # With several pieces nothing is added up before the end of backward.
    11: (
        Edit(
            "ddp_loop.distributed.torch_backend:TorchFlatSum.__init__",
            "self.reduces_early = not (order.is_any or backend.holds_up_host)",
            "self.reduces_early = False",
        ),
    ),
    # No other accelerator can be asked for.
    13: (
        Edit(
            "ddp_loop.accelerators:current_kind",
            'return "" if found is None else found.type',
            'return "cuda" if found is not None and found.type == "cuda" else ""',
        ),
    ),
    # Gradients in bfloat16 are added up in bfloat16, whatever is asked for.
    14: (
        Edit(
            "ddp_loop.training.buckets:dtype_of_sums",
            "return dtype if reduce_dtype is None else torch.promote_types(dtype, reduce_dtype)",
            "return dtype",
        ),
    ),
    # A test for GPUs wants another command than the code says.
    15: (
        Edit(
            "ddp_loop.distributed.devices:describe_devices",
            "ddp_loop run --ranks {ranks}",
            "torchrun --nproc_per_node={ranks}",
        ),
    ),
}


def plant() -> None:
    """Have the faults in this process that its environment names."""
    for number in os.environ[VARIABLE].split(","):
        for edit in FAULTS[int(number)]:
            edit.apply()


def run_with_fault(fault: int, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Call a function in a process that has one of the faults for so long."""
    undo = [edit.apply() for edit in FAULTS[fault]]
    try:
        return function(*arguments, **keywords)
    finally:
        for one in undo:
            one()


def named(faults: Iterable[int]) -> dict[str, str]:
    """The variable by which a process with fake GPUs, and those that it starts, have these faults."""
    return {VARIABLE: ",".join(map(str, faults))}
