"""The ways to do the job, by name, and how each is set up in a world of ranks that is there already."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import ddp_loop as dl
from benchmarks.jobs import Job, Material
from benchmarks.jobs.ours import Ours


@dataclass(frozen=True)
class Variant:
    """A script of this folder, the class in it, whether it is tuned by `--tuned`, and the package that it needs."""

    script: str
    job: str
    tuned: bool = False
    needs: str = "torch"


VARIANTS = {
    "ours": Variant("ours", "Ours"),
    "DDP": Variant("ddp", "Ddp"),
    "DDP, tuned": Variant("tuned", "Tuned"),
    "Accelerate": Variant("accelerated", "Accelerated", needs="accelerate"),
    "Accelerate, tuned": Variant("accelerated", "Accelerated", tuned=True, needs="accelerate"),
    "Fabric": Variant("fabric", "Fabricated", needs="lightning_fabric"),
    "Fabric, tuned": Variant("fabric", "Fabricated", tuned=True, needs="lightning_fabric"),
}


def installed() -> list[str]:
    """The names of the variants whose package is there."""
    return [name for name, variant in VARIANTS.items() if find_spec(variant.needs)]


def set_up(name: str, world: dl.World, material: Material) -> Job:
    """The job with a copy of the network, in a world that is joined. Every rank must call this."""
    model = copy.deepcopy(material.model)
    if name == "ours":
        return Ours(world, model, material.train, material.test, 10**6)
    job: Job = set_up_peer(name, Material(model, material.train, material.test))
    return job


def set_up_peer(name: str, material: Material) -> Any:
    """Another library's job, with this very network; it can also `step` on tensors. Every rank must call this.

    Accelerate and Fabric take the process group that is there.
    """
    variant = VARIANTS[name]
    options = {"tuned": True} if variant.tuned else {}
    make = getattr(import_module(f"benchmarks.jobs.{variant.script}"), variant.job)
    return make(material.model, material.train, material.test, **options)


def mean_over_ranks(job: Any, value: torch.Tensor) -> torch.Tensor:
    """The mean of `value` over the ranks, by the function of the job's library. Every rank must call this."""
    if hasattr(job, "accelerator"):
        return torch.as_tensor(job.accelerator.reduce(value, reduction="mean"))
    if hasattr(job, "fabric"):
        return torch.as_tensor(job.fabric.all_reduce(value, reduce_op="mean"))
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()
