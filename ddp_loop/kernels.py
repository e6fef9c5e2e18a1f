"""Faster kernels, where all ranks can use them: bfloat16 and compiled code."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from torch import nn

from ddp_loop.distributed import World


def use_bfloat16(world: World) -> bool:
    """Whether all ranks' devices have instructions for bfloat16. Every rank must call this.

    Rank 0 prints a line if one has none. With ranks of different precisions a run's numbers would depend on where each
    rank runs::

        bf16 = dl.use_bfloat16(world)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
            logits = model(images).float()

    Args:
        world: from `join_world`.
    """
    if all(world.gather(world.accelerator.has_bfloat16())):
        return True
    world.say("bfloat16 is not used: a rank's device has no instructions for it. Training in fp32.")
    return False


def compile_model(model: nn.Module, world: World) -> nn.Module:
    """`torch.compile` with code for each size of shard, so that bits do not depend on the sizes that came before.

    The Loop's state keeps `model` itself::

        forward = dl.compile_model(model, world)

    Args:
        model: with its parameters on the world's device.
        world: from `join_world`.

    Raises:
        RuntimeError: there is no C++ compiler on the CPU, or no Triton on a GPU.
    """
    program = os.environ.get("CXX", "g++")
    if world.accelerator.is_host and shutil.which(program) is None:
        raise RuntimeError(
            f"torch.compile needs a C++ compiler on a CPU. Found no {program}. Install it, or set CXX to another one."
        )
    if world.accelerator.needs_triton and find_spec("triton") is None:
        raise RuntimeError("torch.compile needs Triton on a GPU. It is not installed. Run pip install triton.")
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]
