"""The part "memory" of `python -m benchmarks gpu`: bytes of a GPU for each parameter of a network."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks.gpu_machine import Machine, Sheet, group_of_one
from benchmarks.jobs import ddp_tuning
from benchmarks.measuring import drop_reducers

LAYERS = 8  # a bucket has the size of a layer
STEPS = 12  # with the comparisons of the replicas after steps 1 and 10


def limit_of(ranks: int, pieces: int) -> float:
    """The most bytes for each parameter at any moment of steps with so many fixed shards on a rank, 0 without them.

    Weights and gradients take 8 bytes in any loop. Buckets on their way, the sums of the replicas' checks and the
    inputs take less than 5. Each further sum that is kept takes 4: up to two ranks add pieces up as they come, which
    takes a sum for each level of the tree. More ranks keep all pieces.
    """
    sums = pieces if ranks > 2 else pieces.bit_length()
    return 13.0 + 4.0 * (max(sums, 1) - 1)


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def bytes_per_parameter(width: int, shards: int | None, *, ddp: bool = False) -> tuple[float, float]:
    """After the steps, and at their peak."""
    with dl.join_world(device="gpu", share_gpus=True, seed=0) as world:
        bucket_mib = width * width * 4 / 2**20
        layer = nn.Linear(width, width, device=world.device)
        layer(torch.ones(4, width, device=world.device)).sum().backward()  # cuBLAS takes 64 MiB for itself
        del layer
        before = torch.cuda.memory_allocated(world.device)
        model = network(width).to(world.device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
        torch.cuda.reset_peak_memory_stats(world.device)
        if ddp:
            tuning = {"bucket_cap_mb": bucket_mib, **ddp_tuning()}
            rows = torch.ones(4, width, device=world.device)
            with group_of_one("cpu:gloo,cuda:nccl") if world.size == 1 else nullcontext():
                wrapped = DistributedDataParallel(model, **tuning)
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    wrapped(rows).square().mean().backward()
                    optimizer.step()
                drop_reducers()
        else:
            batches = dl.Batches((torch.ones(16 * world.size, width),), 8 * world.size, world, shards=shards)
            state = {"model": model, "optimizer": optimizer}
            options = {"steps": STEPS, "bucket_cap_mib": bucket_mib, "progress": False}
            for step in dl.Loop(batches, state=state, **options):  # type: ignore[arg-type]
                for (rows,) in step:
                    step.backward(model(rows).square().mean())
                step.fold()
                optimizer.step()
        now, peak = torch.cuda.memory_allocated(world.device), torch.cuda.max_memory_allocated(world.device)
        return (now - before) / parameters, (peak - before) / parameters


def report_memory(machine: Machine, sheet: Sheet) -> None:
    """One shard a rank, and fixed shards. Wrong: more at the peak than the limit that is said."""
    ranks, width = machine.gpus, 256 if machine.rehearsed else 2048
    sheet.head(f"{machine.sharing(ranks)} | bytes a parameter after steps | at the peak | limit")
    with dl.Pool(ranks) as pool:
        for name, shards, pieces in (
            ("one shard a rank", None, 0),
            (f"{ranks} fixed shards", ranks, 1),
            (f"{4 * ranks} fixed shards", 4 * ranks, 4),
        ):
            found = pool.run(bytes_per_parameter, ranks, width, shards)
            steady, peak = (max(values) for values in zip(*found, strict=True))
            limit = limit_of(ranks, pieces)
            sheet.row(name, f"{steady:.1f}", f"{peak:.1f}", f"{limit:.1f}")
            sheet.judge(f"memory, {name}", "" if peak <= limit else f"{peak:.1f} bytes, the limit is {limit:.1f}")
        found = pool.run(bytes_per_parameter, ranks, width, None, ddp=True)
        sheet.row("DDP", *(f"{max(values):.1f}" for values in zip(*found, strict=True)), "")
