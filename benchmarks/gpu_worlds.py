"""The part "worlds" of `python -m benchmarks gpu`: the same weights over NCCL, and over gloo on one GPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.gpu_machine import OWN_BACKENDS, Machine, Sheet, group_of_one, seeing
from ddp_loop.training.buckets import FlatAllReduce, finish_all
from ddp_loop.training.ordered_sum import ReductionOrder


@dataclass(frozen=True)
class WorldPlan:
    """A world to try: its ranks, how many GPUs they see, and whether a group of NCCL sums their gradients."""

    name: str
    ranks: int
    visible: int
    nccl: bool


def plan_worlds(gpus: int) -> list[WorldPlan]:
    """The worlds to try on a machine with so many GPUs.

    Ranks share a GPU only in a world of their own, where they see no other one. NCCL refuses that, so gloo sums; three
    ranks take another way to add their pieces up than two.
    """
    own = [WorldPlan(f"{n} ranks, NCCL", n, n, nccl=True) for n in dict.fromkeys((2, gpus)) if n <= gpus and gpus > 1]
    shared = [WorldPlan(f"{n} ranks on one GPU, gloo", n, 1, nccl=False) for n in (2, 3)]
    return [WorldPlan("1 rank, NCCL", 1, 1, nccl=True), *shared, *own]


def small_network(*, batch_norm: bool) -> nn.Module:
    norm = [nn.BatchNorm1d(24)] if batch_norm else []
    return nn.Sequential(nn.Linear(12, 24), *norm, nn.Tanh(), nn.Linear(24, 10))


@dataclass(frozen=True)
class Training:
    """A training whose weights are compared.

    Attributes:
        bound: for the largest difference; 0 where the bits must be equal.
    """

    build: Callable[[], nn.Module]
    dtype: torch.dtype
    bound: float
    shards: int | None = None
    synced: bool = False


TRAININGS = {
    "no batch norm": Training(lambda: small_network(batch_norm=False), torch.float64, 1e-12),
    "synced batch norm": Training(lambda: small_network(batch_norm=True), torch.float64, 1e-10, synced=True),
    "4 fixed shards, batch norm": Training(lambda: small_network(batch_norm=True), torch.float32, 0.0, shards=4),
}


def weights_of(training: Training, world: dl.World) -> list[float]:
    """All weights after five steps in mini-batches of 50, the last one of 30, which few numbers of ranks divide."""
    torch.manual_seed(0)
    model = training.build().to(world.device, training.dtype)
    if training.synced:
        dl.sync_batch_norm(model, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(230, 12, dtype=training.dtype), torch.randint(10, (230,))
    batches = dl.Batches(data, 50, world, shards=training.shards)
    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, 9, steps=5, state=state, progress=False):
        for rows, labels in step:
            step.backward(cross_entropy(model(rows), labels))
        step.fold()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().cpu().tolist()


def check_sums(world: dl.World) -> None:
    """Make the sums that a world of one leaves out of its steps: NCCL has them with one rank too.

    Raises:
        RuntimeError: a wrong sum.
    """
    plain, shared = (torch.full((4,), 2.0, device=world.device) for _ in range(2))
    two_pieces = ReductionOrder((2,), (0, 1), is_any=False, merges=(0, 0))
    ordered = FlatAllReduce(world, two_pieces, 4, torch.float32, world.device)
    rows = [ordered.empty().fill_(value) for value in (1.0, 2.0)]
    world.sum(plain)
    world.broadcast(shared)
    ordered.start(rows)
    finish_all([ordered], world)
    found = [plain.tolist(), shared.tolist(), rows[0].tolist()]
    if found != [[2.0] * 4, [2.0] * 4, [3.0] * 4]:
        raise RuntimeError(f"A sum, a broadcast and an ordered sum of one rank must give 2, 2 and 3. Got {found}.")


def try_world(backends: str) -> tuple[str, dict[str, list[float]]]:
    """How the ranks exchange values, and the weights of each training.

    Args:
        backends: of a process group that the script makes first; empty where it leaves that to `join_world`.
    """
    with (
        dl.deterministic(seed=None),
        group_of_one(backends) if backends else nullcontext(),
        dl.join_world(device="gpu", share_gpus=True, seed=0) as world,
    ):
        if backends:
            check_sums(world)
        return str(world), {name: weights_of(training, world) for name, training in TRAININGS.items()}


def verdict(training: Training, found: list[float], wanted: list[float]) -> tuple[str, bool]:
    """What is written about two vectors of weights, and whether they are as equal as they must be."""
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (found, wanted))
    difference = float((one - other).abs().max() / other.abs().max())
    if training.bound == 0.0:
        return ("the same bits" if found == wanted else f"OTHER BITS, {difference:.1e}"), found == wanted
    is_equal = difference <= training.bound
    return f"{difference:.1e}{'' if is_equal else f', ABOVE {training.bound:.0e}'}", is_equal


def report_worlds(machine: Machine, sheet: Sheet) -> None:
    """Wrong: a world that fails, or exchanges in another way than it must, and weights that differ by more."""
    sheet.head(f"world | exchange | {' | '.join(TRAININGS)}", words=2 + len(TRAININGS))
    wanted: dict[str, list[float]] = {}
    for visible, alike in groupby(plan_worlds(machine.gpus), lambda plan: plan.visible):
        plans = list(alike)
        with seeing(visible), dl.Pool(max(plan.ranks for plan in plans)) as pool:
            wanted = wanted or pool.run(try_world, 1, "")[0][1]
            for plan in plans:
                report_world(plan, pool, wanted, sheet)


def report_world(plan: WorldPlan, pool: dl.Pool, wanted: dict[str, list[float]], sheet: Sheet) -> None:
    """Write the row of a world, and what is wrong with it."""
    try:
        results = pool.run(try_world, plan.ranks, OWN_BACKENDS if plan.ranks == 1 else "")
    except (RuntimeError, dl.RankFailed) as error:
        traceback.print_exc()
        sheet.judge(plan.name, (str(error).splitlines() or ["no message"])[0])
        return
    said, _ = results[0]
    verdicts = [
        verdict(training, found[name], wanted[name]) for name, training in TRAININGS.items() for _, found in results
    ]
    sheet.row(plan.name, said, *(verdicts[number * plan.ranks][0] for number in range(len(TRAININGS))))
    sheet.judge(plan.name, "" if ("nccl" in said) == plan.nccl else f"the exchange is {said}")
    sheet.judge(plan.name, ", ".join({words for words, is_right in verdicts if not is_right}))
