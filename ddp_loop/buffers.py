"""Buffers that are no batch-norm statistics: alike when a shard starts, pooled by a rule when the step ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_loop.layout import weighted_mean

Policy = Literal["mean", "same", "first", "local"]
POLICIES = ("mean", "same", "first", "local")


@dataclass(slots=True)
class Buffer:
    """One buffer: where it lives, its tensor, what it held when the step opened, and the rule for it.

    A rule is "mean" (weighted by the shards' observations; the default of floating buffers),
    "same" (every shard must change it alike; the default of the others), "first" (the first shard's), or
    "local" (left alone, each rank its own).
    """

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor
    policy: Policy
    opened: torch.Tensor = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.opened = self.tensor.detach().clone()
        self.version = self.tensor._version

    @property
    def silent(self) -> bool:
        """Whether its layer writes it without torch's version counter seeing that, as norm layers' kernels do."""
        return isinstance(self.owner, _NormBase) and self.owner.training

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor that stands in the module now, which is another one if forward assigned it."""
        return self.owner._buffers[self.key]

    @property
    def changed(self) -> bool:
        """Whether it was written since it was last alike on all ranks."""
        return self.silent or self.now is not self.tensor or self.tensor._version != self.version

    def replace(self) -> None:
        """Make it what it was when the step opened, in another tensor: a graph goes on to hold the one it used."""
        self.owner._buffers[self.key] = self.opened.clone()

    @torch.no_grad()
    def put_back(self, value: torch.Tensor) -> None:
        """Make it `value`, in its own tensor."""
        self.owner._buffers[self.key] = self.tensor
        self.tensor.copy_(value)
        self.version = self.tensor._version


def find_buffers(
    modules: Mapping[str, nn.Module], without: set[nn.Module], policies: Mapping[str, Policy]
) -> dict[str, Buffer]:
    """The buffers below `modules`, but those of the modules in `without`, by name, each once.

    Raises:
        ValueError: a policy for a buffer that is not there, or a word that is no policy.
    """
    found: dict[str, Buffer] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for owner_name, owner in module.named_modules(prefix=prefix):
            for key, tensor in owner._buffers.items():
                if tensor is None or owner in without or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{owner_name}.{key}"
                default: Policy = "mean" if tensor.is_floating_point() else "same"
                found[name] = Buffer(name, owner, key, tensor, policies.get(name, default))
    for name, policy in policies.items():
        if name not in found or policy not in POLICIES:
            raise ValueError(
                f"buffers must map a buffer's name to one of {POLICIES}; got {name!r}: {policy!r}; there are "
                f"{sorted(found)}"
            )
    return {name: buffer for name, buffer in found.items() if buffer.policy != "local"}


class Buffers:
    """The `found` buffers of a loop, watched through the shards of a step.

    A floating buffer travels as its value, another one as its change since the step opened, which is small and
    so exact also in float32. Buffers that no shard changed are left alone and do not travel.
    """

    def __init__(self, found: Mapping[str, Buffer]) -> None:
        self.found = dict(found)
        self._doubts: list[tuple[Buffer, torch.Tensor]] = []

    def open(self) -> None:
        """Begin a step: note what each buffer holds, if it was written since the last one.

        Raises:
            ValueError: on a GPU, shards of the last step changed a buffer of the rule "same" differently; asking
                in that step itself would have held the host up.
        """
        self._settle()
        for buffer in self.found.values():
            if buffer.changed:
                tensor = buffer.now
                if tensor is not None and tensor is not buffer.tensor:
                    buffer.tensor = tensor
                buffer.opened = buffer.tensor.detach().clone()
                buffer.version = buffer.tensor._version

    @torch.no_grad()
    def take(self, *, graph_goes_on: bool = False) -> dict[str, torch.Tensor]:
        """End a shard: what it changed, by name; the buffers are put back as they stood when the step opened.

        Where its backward comes later, in other tensors: until the fold, which puts the modules' own back.
        """
        taken: dict[str, torch.Tensor] = {}
        for buffer in self.found.values():
            if not buffer.changed:
                continue
            value = buffer.now
            if value is None or value.shape != buffer.opened.shape:
                raise ValueError(
                    f"a buffer keeps its shape in a step; {buffer.name} had {tuple(buffer.opened.shape)} and has "
                    f'{None if value is None else tuple(value.shape)}: give Loop buffers={{"{buffer.name}": "local"}}'
                )
            taken[buffer.name] = self._travelling(buffer, value.detach().clone())
            if graph_goes_on:
                buffer.replace()
            else:
                buffer.put_back(buffer.opened)
        return taken

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Put back what is changed inside, and only that."""
        before = [(buffer, tensor, tensor.clone(), tensor._version) for buffer in self.found.values()
                  if (tensor := buffer.now) is not None]  # fmt: skip
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, tensor, value, version in before:
                    if buffer.now is not tensor or buffer.silent or tensor._version != version:
                        buffer.owner._buffers[buffer.key] = tensor
                        tensor.copy_(value)

    @staticmethod
    def _travelling(buffer: Buffer, value: torch.Tensor) -> torch.Tensor:
        return value if value.is_floating_point() else value.long() - buffer.opened.long()

    def width(self, names: frozenset[str]) -> int:
        """Columns of a row that carries the buffers `names`."""
        return sum(self.found[name].tensor.numel() for name in names)

    def pack(self, taken: Mapping[str, torch.Tensor], names: frozenset[str], row: torch.Tensor) -> None:
        """Write what a shard took into its row, in the order of names; what it left alone, as it was."""
        pieces = []
        for name in sorted(names):
            buffer = self.found[name]
            value = taken.get(name)
            value = self._travelling(buffer, buffer.opened) if value is None else value
            pieces.append(value.reshape(-1).to(row.dtype))
        if pieces:
            torch.cat(pieces, out=row)

    def put_back(self, names: frozenset[str]) -> None:
        """Make the buffers `names` what they were when the step opened."""
        for name in names:
            self.found[name].put_back(self.found[name].opened)

    @torch.no_grad()
    def apply(
        self,
        rows: torch.Tensor,
        names: frozenset[str],
        share: torch.Tensor,
        full: list[int],
        keep: torch.Tensor | None = None,
    ) -> None:
        """Give the buffers `names` the value that the rule makes of the shards' rows, (S, width).

        Args:
            share: each shard's part of the observations, (S,).
            full: the numbers of the shards that have observations.
            keep: whether they stay as they were, shape (), bool.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        offset = 0
        for name in sorted(names):
            buffer = self.found[name]
            values = rows[:, offset : offset + buffer.tensor.numel()]
            offset += buffer.tensor.numel()
            if buffer.policy == "mean":
                merged = weighted_mean(values, share, guarded=True)
            else:
                merged = values[full[0]]
                if buffer.policy == "same" and len(full) > 1:
                    doubts = values[full]
                    self._doubts.append((buffer, doubts if keep is None else torch.where(keep, 0.0, doubts)))
            merged = merged.reshape(buffer.tensor.shape)
            if not buffer.tensor.is_floating_point():
                merged = buffer.opened.long() + merged.long()
            merged = merged.to(buffer.tensor.dtype)
            buffer.put_back(merged if keep is None else torch.where(keep, buffer.opened, merged))
            buffer.opened.copy_(buffer.tensor)
        if rows.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Raise ValueError if shards changed a buffer of the rule "same" differently."""
        doubts, self._doubts = self._doubts, []
        for buffer, values in doubts:
            if bool((values != values[0]).any()):
                raise ValueError(_differs(buffer, values))


def _differs(buffer: Buffer, values: torch.Tensor) -> str:
    place = int((values != values[0]).any(0).nonzero()[0])
    changes = [f"{float(value):g}" for value in values[:, place]]
    return (
        f'a buffer of the rule "same" must be changed alike by every shard; element {place} of {buffer.name} '
        f"({buffer.tensor.dtype}) was changed by {', '.join(changes)}: keep it a function of the step alone, or "
        f'give Loop buffers={{"{buffer.name}": "first"}} (or "mean" for a floating one, or "local")'
    )
