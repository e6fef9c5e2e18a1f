"""Models that torch itself shares between ranks: refused at once, on every rank, with what to do instead."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, network, samples


def wrapped(kind: str) -> nn.Module:
    model = network()
    if kind == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "DataParallel":
        return nn.DataParallel(model)
    if kind == "FSDPModule":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    if kind == "DDP":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
        return model
    return nn.Sequential(model, nn.SyncBatchNorm(1).double())


class Attribute(nn.Module):
    """A wrapper below a module of the user's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)  # type: ignore[no-any-return]


def loop_over_wrapped(world: dl.World, folder: str, kind: str, below: bool) -> None:
    model = wrapped(kind)
    state = {"model": Attribute(model) if below else model}
    dl.Loop(dl.Batches(samples(8), 8, world), 1, state=state, progress=False)


REMEDIES = {
    "DistributedDataParallel": "Put the wrapped model, wrapped.module, into state",
    "DataParallel": "Put the wrapped model, wrapped.module, into state",
    "FSDPModule": "Leave fully_shard out. A model that is too large .* torchtitan",
    "DDP": r"Leave replicate\(model\) out",
    "SyncBatchNorm": r"dl.sync_batch_norm\(model, world\)",
}


@pytest.mark.covers("J3")
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("kind", REMEDIES)
def test_a_model_that_torch_shares_between_ranks_is_refused(kind: str, below: bool, refused: Refused) -> None:
    said = rf"share a model between ranks themselves.* torch's {kind}, which runs collectives too. .*{REMEDIES[kind]}"
    refused(2, loop_over_wrapped, kind, below, kind="ValueError", said=said, by=ALL)


def evaluate_wrapped(world: dl.World, folder: str, predicts: bool) -> None:
    model, batches = wrapped("DistributedDataParallel"), dl.Batches(samples(9), 3, world, shuffle=False)
    if predicts:
        dl.predict(model, batches)
    else:
        dl.evaluate(model, batches, loss=lambda output, rows: output.mean())


@pytest.mark.parametrize("predicts", [False, True])
def test_a_wrapped_model_is_not_evaluated_either(predicts: bool, refused: Refused) -> None:
    refused(2, evaluate_wrapped, predicts, kind="ValueError", said="DistributedDataParallel", by=ALL)


def train_the_wrapped_one() -> float:
    with dl.join_world() as world:
        wrapper = nn.parallel.DistributedDataParallel(network())
        for step in dl.Loop(dl.Batches(samples(8), 8, world), 1, state={"model": wrapper.module}, progress=False):
            for rows in step:
                step.backward(wrapper.module(rows).mean())
            step.fold()
        return float(step.iteration)


def test_the_remedy_that_the_error_names_works(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_the_wrapped_one) == [1.0, 1.0]
