"""Faults that the code for GPUs once had, put back into a process, to see that a rehearsal of `make gpu` finds them.

A process that is started with `environment_of(...)` has fake GPUs and these faults. The numbers are those under which
the project found them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from tests.fake_cuda.build import environment

VARIABLE = "PLANTED_GPU_FAULTS"
START = f"""import os
if os.environ.get("FAKE_CUDA"):
    import tests.fake_cuda.cuda, tests.fake_cuda.kernels
    from tests.support.gpu_faults import put_back
    for number in os.environ["{VARIABLE}"].split(","):
        put_back(int(number))
"""


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

    def apply(self) -> None:
        """Change the function in this process."""
        function = self.function()
        made = dict(function.__globals__)
        exec(compile(self.source(), function.__code__.co_filename, "exec"), made)
        function.__code__ = inspect.unwrap(made[function.__name__]).__code__


FAULTS: dict[int, tuple[Edit, ...]] = {
    # A GPU's checksum has other pieces than the host's.
    1: (
        Edit(
            "ddp_loop.determinism.digests:checksum_all",
            "    found: dict[int, torch.Tensor] = {}\n",
            "    found: dict[int, torch.Tensor] = {}\n"
            "    _WORDS = 2**14 - 1 if accelerator_of(tensors[0].device).is_host else 2**22 - 1\n",
        ),
    ),
    # Numbers written into a GPU's tensor one by one make the host wait, in each layer with synced batch norm,
    2: (
        Edit(
            "ddp_loop.batch_norm.synced:SyncChannel.send",
            "own[column : column + 1].fill_(number)",
            "own[column] = number",
        ),
    ),
    # in each shard with a number as weight,
    3: (Edit("ddp_loop.training.slots:_write", "place.fill_(weight)", "place[0] = weight"),),
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
            "self._connect(default, self._bound)",
            "self._connect(default, self._bound)\n            self.connections = _new_sockets(self._before)",
        ),
    ),
    # NCCL's watchdog ends the process when the host would name the culprit.
    5: (Edit("ddp_loop.accelerators:Cuda.connect", "backend._set_default_timeout(timeout + _WATCHDOG_LATER)", "pass"),),
    # A rank that leaves shuts NCCL's sockets.
    8: (
        Edit(
            "ddp_loop.distributed.process_group:ProcessGroups.leave",
            "cut(accepted(self.connections))",
            "cut(accepted(_new_sockets(self._before)))",
        ),
    ),
    # A test for GPUs wants another command than the code says.
    15: (
        Edit(
            "ddp_loop.distributed.devices:describe_devices",
            "-m ddp_loop run --ranks {ranks}",
            "--nproc_per_node={ranks}",
        ),
    ),
}


def put_back(number: int) -> None:
    """Have one of the faults in this process."""
    for edit in FAULTS[number]:
        edit.apply()


def environment_of(faults: Iterable[int], folder: Path, devices: int, **settings: str) -> dict[str, str]:
    """The variables of a process with fake GPUs and faults.

    Args:
        faults: their numbers.
        folder: gets a file that the interpreter reads at its start.
        devices, settings: of `environment`.
    """
    (folder / "sitecustomize.py").write_text(START)
    variables = environment(devices, **settings)
    paths = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
    return {**variables, "PYTHONPATH": paths, VARIABLE: ",".join(map(str, faults))}
