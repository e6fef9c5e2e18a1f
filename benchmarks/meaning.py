"""What the numbers mean where nothing divides: each library against one process on the very same samples.

Three ranks. For loss, gradient and statistics a mini-batch of 7 samples lies on them as 3, 2 and 2; every
library is given these same shards, so that what is seen is the weighting alone. For the epoch (100 samples) and
the evaluation (1,000) each goes its own way, by its own loader. All in float64, errors relative.

A loss can be reported in three ways: as rank 0 has it (what most examples print), as the mean of the ranks' means (one
reduction), or by sums and counts added up by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddp_loop as dl
from benchmarks.jobs import Material
from benchmarks.jobs.variants import mean_over_ranks, set_up, set_up_peer

RANKS = 3
SIZES = (3, 2, 2)
TRAINED, EVALUATED = 100, 1000
WEIGHTED = "DDP, weighted by hand"

Losses = tuple[float, float, float]  # of rank 0, mean of the ranks', by sums and counts


@dataclass(frozen=True)
class Numbers:
    """What a step gives, of the whole mini-batch."""

    losses: Losses
    gradient: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor


@dataclass(frozen=True)
class Meaning:
    """How far a library's numbers lie from the truth, relative to it; and how many samples it went over."""

    losses: Losses
    gradient: float
    running_mean: float
    running_var: float
    trained: int
    evaluated: int
    accuracy: float


def make_material(samples: int, test: int) -> Material:
    """A small network with batch norm, and data whose samples differ in scale; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    scales = 1 + 3 * torch.rand(samples + test, 1, generator=generator, dtype=torch.float64)
    inputs = scales * torch.randn(samples + test, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (samples + test,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    cut = [samples, test]
    parts = zip(inputs.split(cut), labels.split(cut), strict=True)
    return Material(model, *(TensorDataset(*part) for part in parts))


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def true_step(material: Material) -> Numbers:
    """One process: each shard by its share of the samples, statistics of all that went into the layer."""
    model = copy.deepcopy(material.model)
    inputs, labels = material.train.tensors
    with torch.no_grad():
        values = model.get_submodule("0")(inputs)
    total = torch.zeros((), dtype=torch.float64)
    for rows, answers in zip(inputs.split(SIZES), labels.split(SIZES), strict=True):
        loss = cross_entropy(model(rows), answers) * len(rows) / len(inputs)
        loss.backward()
        total += loss.detach()
    mean, var = 0.1 * values.mean(0), 0.9 + 0.1 * values.var(0, correction=1)
    return Numbers((total.item(),) * 3, gradient_of(model), mean, var)


def true_accuracy(material: Material) -> float:
    model = copy.deepcopy(material.model).eval()
    inputs, labels = material.test.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).double().mean())


def statistics_of(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")


def our_step(world: dl.World, material: Material) -> Numbers:
    model = copy.deepcopy(material.model)
    batches = dl.Batches(material.train, sum(SIZES), world, shuffle=False)
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
        for rows, answers in step:
            step.backward(cross_entropy(model(rows), answers))
        loss = step.fold().loss.item()
    return Numbers((loss,) * 3, gradient_of(model), *statistics_of(model))


def peer_step(name: str, material: Material) -> Numbers:
    model = copy.deepcopy(material.model)
    job = set_up_peer("DDP" if name == WEIGHTED else name, Material(model, material.train, material.test))
    rank = dist.get_rank()
    rows, answers = (tensor.split(SIZES)[rank] for tensor in material.train.tensors)
    loss, _ = weighted_step(job, rows, answers) if name == WEIGHTED else job.step(rows, answers)
    counted = mean_over_ranks(job, torch.stack([loss * len(rows), loss.new_tensor(len(rows))]))
    losses = loss.item(), mean_over_ranks(job, loss).item(), (counted[0] / counted[1]).item()
    return Numbers(losses, gradient_of(model), *statistics_of(model))


def weighted_step(job: Any, rows: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of DDP whose user takes care of unequal shards: the mean over ranks is made one over samples."""
    size = torch.tensor(len(rows))
    dist.all_reduce(size)
    job.optimizer.zero_grad()
    logits = job.model(rows)
    loss = cross_entropy(logits, answers)
    (loss * len(rows) * dist.get_world_size() / size).backward()
    return loss.detach(), (logits.argmax(1) == answers).sum()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def distances(ones: Losses, others: Losses) -> Losses:
    first, second, third = (abs(one / other - 1) for one, other in zip(ones, others, strict=True))
    return first, second, third


def measure(names: Iterable[str]) -> dict[str, Meaning]:
    """Each library's errors, as rank 0 sees them; run by `launch`."""
    found = {}
    with dl.join_world(device="cpu") as world:
        few, many = make_material(sum(SIZES), 1), make_material(TRAINED, EVALUATED)
        truth, accuracy = true_step(few), true_accuracy(many)
        for name in names:
            numbers = our_step(world, few) if name == "ours" else peer_step(name, few)
            way = "DDP" if name == WEIGHTED else name
            result = set_up(way, world, many).evaluate()
            found[name] = Meaning(
                distances(numbers.losses, truth.losses),
                distance(numbers.gradient, truth.gradient),
                distance(numbers.running_mean, truth.running_mean),
                distance(numbers.running_var, truth.running_var),
                int(set_up(way, world, many).epoch()["samples"]),
                int(result["samples"]),
                abs(result["accuracy"] / accuracy - 1),
            )
    return found


def meaning(names: Iterable[str]) -> dict[str, Meaning]:
    """The errors of these ways to do the job (of `VARIANTS`, and `WEIGHTED`), on three fresh ranks."""
    return dl.launch(measure, RANKS, list(names))[0]
