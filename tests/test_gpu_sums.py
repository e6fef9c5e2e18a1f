"""Sums in tree order on fake GPUs: when their parts are launched, in how many launches, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed.backend import PieceOrder
from tests.support.gpu_steps import AFTER_ALL_WORK
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")

WIDTH, LAYERS = 8, 6
SHARDS = 6
STEPS = 14  # the checks of a loop's first steps are over in the last one
SHARES: dict[int, tuple[int, ...] | None] = {
    1: None,
    2: (2, 1),
    3: None,
}  # else two ranks have two pieces, in any order
MIB_OF_A_LAYER = (WIDTH * WIDTH + WIDTH) * 4 / 2**20


@dataclass(frozen=True)
class Ran:
    """Steps on one rank.

    Attributes:
        during, after: NCCL's operations in a step, those launched before the first layer has its gradient and the rest.
        waits: the places where the host waited for the device in that step.
        errors: of the order of streams.
        weights: the last ones.
    """

    during: list[str]
    after: list[str]
    waits: list[str]
    errors: list[str]
    weights: list[float]


def network(device: torch.device, layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).to(device)


def loop_of(world: dl.World, model: nn.Module, shards: int, mib: float, **options: Any) -> dl.Loop:
    generator = torch.Generator().manual_seed(0)
    weight = next(model.parameters())
    data = torch.randn(4 * shards, weight.shape[1], generator=generator).to(weight.dtype)
    shares = SHARES[world.size] if shards == SHARDS else None
    batches = dl.Batches(data, 2 * shards, world, shards=shards, shares=shares, shuffle=False)
    options = {"state": {"model": model}, "steps": STEPS, "check_replicas_every": 0, **options}
    return dl.Loop(batches, progress=False, bucket_cap_mib=mib, **options)


def steps_of(
    world: dl.World, model: nn.Sequential, shards: int, mib: float, noted: Any = None, **options: Any
) -> Iterator[dl.Step]:
    """Steps of a network; `noted` is called before the first layer has its gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for step in loop_of(world, model, shards, mib, state=state, **options):
        for rows in step:
            first = model[0](rows)
            if noted is not None:
                first.register_hook(lambda gradient: noted())
            step.backward(model[1:](first).float().square().mean())
        step.fold()
        optimizer.step()
        yield step


def train(device: str, dtype: torch.dtype) -> list[float]:
    with dl.join_world(device=device, seed=0) as world:
        model = network(world.device).to(dtype)
        list(steps_of(world, model, SHARDS, MIB_OF_A_LAYER, reduce_dtype=torch.float32))
        weights: list[float] = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().tolist()
        return weights


def launch(dtype: torch.dtype) -> Ran:
    """Note what is launched in the last step."""
    import fake_cuda_extension as device

    from tests.fake_cuda import cuda

    device.errors()
    device.check_order(True)
    seen: list[str] = []
    during: list[str] = []

    def note() -> None:
        seen.extend(device.nccl_log())
        during[:] = seen

    try:
        with dl.join_world(device="gpu", seed=0) as world:
            model = network(world.device).to(dtype)
            steps = steps_of(world, model, SHARDS, MIB_OF_A_LAYER, note, reduce_dtype=torch.float32)
            for _ in range(STEPS - 1):
                next(steps)
            with cuda.Waits() as waits:
                device.nccl_log()
                seen.clear()
                next(steps)
                seen.extend(device.nccl_log())
            list(steps)
            weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().tolist()
    finally:
        device.check_order(False)
    found = [f"{what}: {place}" for what, place in waits.found if what not in AFTER_ALL_WORK]
    return Ran(during, seen[len(during) :], found, list(device.errors()), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_are_added_up_and_gathered_while_backward_goes_on(
    on_fake_gpus: OnRanks, ranks: int, dtype: torch.dtype
) -> None:
    of_ranks = on_fake_gpus(ranks, launch, dtype)
    assert [one.waits for one in of_ranks] == [[]] * ranks
    assert [one.errors for one in of_ranks] == [[]] * ranks
    for one in of_ranks:
        during, after = ([line.split()[0] for line in part] for part in (one.during, one.after))
        assert during == [
            "all-to-all",
            *["all-gather", "all-to-all"] * (LAYERS - 2),
        ]  # each bucket but the first layer's
        assert after == ["all-gather", "all-to-all", "all-gather"]  # the last bucket has the tail
    operations = [[line.split()[0] for line in (*one.during, *one.after)] for one in of_ranks]
    assert all(one == operations[0] for one in operations)
    assert all(one.weights == on_fake_gpus(1, train, "cpu", dtype)[0] for one in of_ranks)


def count_launches() -> tuple[list[int], list[bool]]:
    """The launches by which a rank adds up and sends its part of eight pieces; whether the bits are the tree's."""
    import fake_cuda_extension as device

    with dl.join_world(device="gpu", seed=0) as world:
        order = PieceOrder((4, 4), (0, 1, 0, 2, 0, 1, 0, 3), is_any=False)
        pieces = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        launches, is_same = [], []
        whole = world.flat_sum(order, 64, torch.float32, world.device)
        assert whole is not None
        for _ in range(2):
            rows = list(pieces[4 * world.rank : 4 * world.rank + 4].to(world.device))
            world.finish(world.start(lambda _, rows=rows: whole.arrive(rows), world.device))  # type: ignore[misc]
            before = device.launches()
            work = world.start(lambda _: whole.reduce(), world.device)
            launches.append(device.launches() - before)
            world.finish(work)
            whole.collect()
            sums = pieces
            while len(sums) > 1:
                sums = sums[0::2] + sums[1::2]
            is_same.append(torch.equal(rows[0].cpu(), sums[0]))
        return launches, is_same


def test_the_additions_of_one_level_of_the_tree_are_one_launch(on_fake_gpus: OnRanks) -> None:
    for launches, is_same in on_fake_gpus(2, count_launches):
        assert launches == [4, 4]  # 3 levels, and the all-gather
        assert is_same == [True, True]


def measure(shards: int) -> tuple[float, float]:
    """Bytes of the device for a parameter: between two steps, and at most in a step.

    The last one is none that compares the parameters' bits, which takes up to 84 MB for any network.
    """
    import fake_cuda_extension as device

    gc.collect()  # what another test left in cycles
    empty, _ = device.memory()
    with dl.join_world(device="gpu", seed=0) as world:
        model = network(world.device, layers=8, width=256)
        count = sum(parameter.numel() for parameter in model.parameters())
        for _ in steps_of(world, model, shards, count * 4 / 8 / 2**20 * 1.01, steps=5):
            steady, peak = device.memory()
            device.reset_peak()
        return (steady - empty) / count, (peak - empty) / count


@dataclass(frozen=True)
class Held:
    """What a rank holds of the tree.

    Attributes:
        sums: side by side; the gradients that autograd makes for a shard before the last one count as one.
        pieces: to send.
        received: of all ranks' pieces, as a part of the gradients.
    """

    sums: int
    pieces: int
    received: float

    @property
    def most(self) -> float:
        """Bytes for a parameter, as docs/benchmarks/fake_gpu.md has it: weights, sums, what is a bucket's alone."""
        sent = self.pieces if self.pieces > 1 else 0
        return 4 * (1 + self.sums + BUCKET * (2 + sent + self.received))


BUCKET = 1 / 8  # of all parameters
ACTIVATIONS = 0.2  # bytes for a parameter: two samples of a shard, and the data
IN_MEMORY: dict[int, list[Held]] = {
    3: [Held(1, 1, 1)] * 3,
    6: [Held(2, 1, 5 / 3), Held(2, 2, 5 / 3), Held(2, 2, 5 / 3)],
    12: [Held(2, 2, 7 / 3), Held(3, 3, 7 / 3), Held(3, 2, 7 / 3)],
}


@pytest.mark.slow
@pytest.mark.parametrize("shards", IN_MEMORY)
def test_a_step_takes_the_memory_of_ddp_and_of_the_tree_and_of_a_bucket(on_fake_gpus: OnRanks, shards: int) -> None:
    for (steady, peak), held in zip(on_fake_gpus(3, measure, shards), IN_MEMORY[shards], strict=True):
        assert 8 <= steady <= 8 + ACTIVATIONS  # weights and gradients: as DDP with gradients as views into its buckets
        assert peak <= held.most + ACTIVATIONS
        assert peak >= 4 * (1 + held.sums)  # it is what takes the memory


def leave_early(when: str) -> str:
    """Train; rank 1 leaves the third step. Returns the error."""
    with dl.join_world(device="gpu", seed=0) as world:
        model = network(world.device)
        try:
            for step in loop_of(world, model, SHARDS, MIB_OF_A_LAYER):
                leaves = step.iteration == 3 and world.rank == 1
                if leaves and when == "before its shards":
                    return ""
                for rows in step:
                    step.backward(model(rows).square().mean())
                    if leaves and when == "between its shards":
                        return ""
                if leaves:
                    return ""
                step.fold()
        except dl.PeerFailed as error:
            return str(error)
        raise AssertionError("no rank left")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("when", ["before its shards", "between its shards", "after its shards"])
def test_a_rank_that_leaves_makes_the_collectives_that_the_others_wait_for(
    on_fake_gpus: OnRanks, ranks: int, when: str
) -> None:
    for rank, said in enumerate(on_fake_gpus(ranks, leave_early, when)):
        assert rank == 1 or (said.startswith("rank 1 failed") and "it left the loop in s" in said), said


def look_at_early_sums() -> list[bool]:
    """Whether the sum of each layer but the first two is still under way when the first one's gradient is made."""
    with dl.join_world(device="gpu", seed=0) as world:
        model = network(world.device)
        seen: list[bool] = []

        def note() -> None:
            grads = [one.grad for one in model.parameters() if one.dim() == 2][2:]
            seen[:] = [grad is not None and bool(grad.isnan().all()) for grad in grads]

        list(steps_of(world, model, world.size, MIB_OF_A_LAYER, note, ordered=False))
        return seen


def test_nothing_waits_for_a_sum_of_one_collective_during_backward(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(3, look_at_early_sums) == [[True] * (LAYERS - 2)] * 3
