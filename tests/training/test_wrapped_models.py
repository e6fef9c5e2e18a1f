"""Models that torch itself shares between ranks: refused at once, on every rank, with what to do instead."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, mean_of, network, samples
from tests.support.training import take


def wrapped(kind: str) -> nn.Module:
    model = network()
    if kind == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "DataParallel":
        return nn.DataParallel(model)
    if kind == "SyncBatchNorm":
        return nn.SyncBatchNorm(1).double()
    if kind == "DDP":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def use_wrapped(world: dl.World, folder: str, kind: str, use: str) -> None:
    model = wrapped(kind)
    batches = dl.Batches(samples(9), 3, world, shuffle=False)
    if use == "predict":
        dl.predict(model, batches)
    elif use == "evaluate":
        dl.evaluate(model, batches, loss=mean_of)
    else:
        loop_over(world, folder, model if use == "train" else nn.ModuleDict({"inner": model}))


REMEDIES = {
    "DistributedDataParallel": "Put the wrapped model, wrapped.module, into state",
    "DataParallel": "Put the wrapped model, wrapped.module, into state",
    "FSDPModule": "Leave fully_shard out. A model that is too large .* torchtitan",
    "DDP": r"Leave replicate\(model\) out",
    "SyncBatchNorm": r"dl.sync_batch_norm\(model, world\)",
}
WRAPPER = next(iter(REMEDIES))


@pytest.mark.covers("J3")
@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *((kind, "train what has it") for kind in REMEDIES),
        *((WRAPPER, use) for use in ("train", "evaluate", "predict")),
    ],
)
def test_a_model_that_torch_shares_between_ranks_is_refused(kind: str, use: str, refused: Refused) -> None:
    said = rf"share a model between ranks themselves.* torch's {kind}, which runs collectives too. .*{REMEDIES[kind]}"
    refused(2, use_wrapped, kind, use, kind="ValueError", said=said)


def train_the_wrapped_one() -> int:
    with dl.join_world() as world:
        wrapper = nn.parallel.DistributedDataParallel(network())
        for step in loop_over(world, "", wrapper.module):
            take(step, wrapper.module)
        return step.iteration


def test_the_remedy_that_the_error_names_works(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_the_wrapped_one) == [4, 4]
