"""One job, written with each library: the digit network, mini-batches of 128 over all CPU ranks, SGD with momentum.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.jobs.ours --epochs 1

Here is what the scripts share, so that they hold only what their library asks for: the arguments, the network and
the data, the report. The others' scripts must not pay for ddp_loop's import, so nothing here imports it at the top:
with `--material FILE` network and data come from a file, and they never do.
"""

from __future__ import annotations

import argparse
import inspect
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

MINI_BATCH = 128
RATE, MOMENTUM = 0.01, 0.9
NETWORKS = ("digits", "mlp")


class Job(Protocol):
    """The job in one library's hands. Every rank must call its methods."""

    def epoch(self) -> dict[str, float]:
        """Train an epoch; the "loss" and "accuracy" that a user of the library would log, and the "samples"."""

    def evaluate(self) -> dict[str, float]:
        """The "accuracy" on the test data, and the number of "samples" that it is over."""


class StepByStep(Job, Protocol):
    """A job whose library takes a step on whatever tensors it is given."""

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on this rank's shard; its mean loss and its number of right answers."""


@dataclass(frozen=True)
class Material:
    """What a job is made of: a network that has its start weights, training and test data."""

    model: nn.Module
    train: TensorDataset
    test: TensorDataset


def make_material(network: str, seed: int = 0) -> Material:
    """The digit network with 9,000 and 1,000 drawn digits, or the largest of benchmarks.steps with rows of noise.

    Args:
        network: one of NETWORKS.
        seed: of the start weights; the digits are the same ones.
    """
    from ddp_loop import datasets, networks

    torch.manual_seed(seed)
    if network == "digits":
        parts = (TensorDataset(*part.tensors) for part in datasets.digits(seed=0).split(0.9))
        return Material(networks.digit_classifier(), *parts)
    from benchmarks.steps import JOBS, SAMPLES

    job = JOBS["25 M parameters"]
    noise = TensorDataset(torch.randn(SAMPLES, *job.shape), torch.randint(10, (SAMPLES,)))
    return Material(job.build(), noise, TensorDataset(*noise[:100]))


def write_material(network: str, file: Path, seed: int = 0) -> None:
    material = make_material(network, seed)
    torch.save((material.model, material.train.tensors, material.test.tensors), file)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--network", choices=NETWORKS, default="digits")
    parser.add_argument("--material", type=Path, metavar="FILE", help="network and data, from write_material")
    parser.add_argument("--seed", type=int, default=0, help="of the start weights and the order, in ours and in ddp")
    parser.add_argument("--channels-last", action="store_true", help="in ours only")
    parser.add_argument("--bf16", action="store_true", help="in ours only")
    parser.add_argument("--tuned", action="store_true", help="with what DDP can be tuned by, where it is a keyword")
    parser.add_argument("--first-step-only", action="store_true", help="make one step, print the time, and end")
    parser.add_argument("--peak-memory", action="store_true", help="print the most memory that a rank ever took")
    return parser.parse_args()


def read_material(arguments: argparse.Namespace) -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """The network, training and test data. For a first step only there are data for one step."""
    if arguments.material is None:
        material = make_material(arguments.network, arguments.seed)
    else:
        model, train, test = torch.load(arguments.material, weights_only=False)
        material = Material(model, TensorDataset(*train), TensorDataset(*test))
    train = TensorDataset(*material.train[:MINI_BATCH]) if arguments.first_step_only else material.train
    return material.model, train, material.test


def ddp_tuning() -> dict[str, Any]:
    """DDP's keywords for gradients that share the buckets' memory, and no buffers sent.

    static_graph is not among them: it spares a search for unused parameters, which is off by default.
    """
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 renamed the second of these
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {"gradient_as_bucket_view": True, quiet: False}


def show(job: Job, arguments: argparse.Namespace) -> None:
    """Train and evaluate, and print what comes out, from rank 0. Every rank must call this."""
    for epoch in range(1, arguments.epochs + 1):
        values = job.epoch()
        if arguments.first_step_only:
            _say(f"first step: {time.time()}")
            return
        _say(f"epoch {epoch}: {values}")
    _say(f"test: {job.evaluate()}")
    if arguments.peak_memory:
        _say(f"peak memory: {_peak_mib()} MiB")


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _peak_mib() -> float:
    """The most memory of any rank."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = torch.tensor(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return cast(float, peak.item())
