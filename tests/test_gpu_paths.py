"""Steps on fake GPUs: the host waits for none, streams are in order, and the weights are the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.gpu_steps import AFTER_ALL_WORK, SCENARIOS, remembering, require_like_the_cpu, run
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")

# The results are read once, at the end.
ALLOWED = {"evaluate": 1, "predict": 0, "predict, shuffled": 0, "confusion_matrix": 1, "update_bn": 0}


def is_same_arithmetic(name: str, ranks: int) -> bool:
    """Whether a GPU adds the same numbers in the same order as the CPU does.

    Synced batch norm has other kernels there. Without fixed shards three ranks' sums may have another order.
    """
    return ranks == 1 or (name != "synced batch norm" and (ranks == 2 or name != "one shard a rank"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_step_makes_the_host_wait_for_a_gpu_and_its_weights_are_those_of_the_cpu(
    on_fake_gpus: OnRanks, name: str, ranks: int
) -> None:
    require_like_the_cpu(on_fake_gpus(ranks, run, name), is_same_arithmetic(name, ranks))


def buffers_left(rule: str, *, on_host: bool) -> list[list[float]]:
    with dl.join_world(device="gpu", seed=0) as world:
        steps = remembering(world, on_host=on_host, on_nonfinite=rule, shards=world.size)
        for _ in range(3):
            model = next(steps)
        steps.close()
        return [buffer.reshape(-1).tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rule", ["raise", "skip"])
def test_buffers_on_the_host_beside_parameters_on_a_gpu_are_those_on_the_gpu(
    on_fake_gpus: OnRanks, rule: str, ranks: int
) -> None:
    wanted = on_fake_gpus(ranks, buffers_left, rule, on_host=False)
    assert on_fake_gpus(ranks, buffers_left, rule, on_host=True) == wanted


def wait_in_evaluations() -> dict[str, list[str]]:
    """What makes the host wait in each evaluation of a data set in seven mini-batches."""
    from tests.fake_cuda import cuda

    with dl.join_world(device="gpu", seed=0) as world:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(70, 8, generator=generator), torch.randint(4, (70,), generator=generator)
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Linear(8, 4), norm, nn.Linear(4, 4), norm, nn.BatchNorm1d(4)).to(world.device)
        batches, shuffled = dl.Batches(data, 10, world, shuffle=False), dl.Batches(data, 10, world)

        def number(logits: torch.Tensor, labels: torch.Tensor) -> float:
            return 1.0

        kinds: dict[str, Callable[[], object]] = {
            "evaluate": lambda: dl.evaluate(model, batches, loss=cross_entropy, hits=hits, number=number),
            "predict": lambda: dl.predict(model, batches),
            "predict, shuffled": lambda: dl.predict(model, shuffled),
            "confusion_matrix": lambda: dl.confusion_matrix(model, batches, classes=4),
            "update_bn": lambda: dl.update_bn(model, batches),
        }
        found = {}
        for name, evaluate in kinds.items():
            for _ in range(2):
                evaluate()  # compares the data once; then the data move
            with cuda.Waits() as waits:
                evaluate()
            found[name] = [f"{what}: {place}" for what, place in waits.found if what not in AFTER_ALL_WORK]
        return found


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_shard_of_an_evaluation_makes_the_host_wait(on_fake_gpus: OnRanks, ranks: int) -> None:
    for found in on_fake_gpus(ranks, wait_in_evaluations):
        assert {name: len(waits) for name, waits in found.items()} == ALLOWED, found


def peaks_of_evaluations() -> tuple[int, int]:
    """Bytes at the peak of an evaluation above its start: by default, and with one shard per rank."""
    with dl.join_world(device="gpu", seed=0) as world:
        data = torch.randn(4096, 8), torch.randint(4, (4096,))
        model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 4)).to(world.device)
        found = []
        for shards in (None, world.size):
            batches = dl.Batches(data, 2048, world, shuffle=False, shards=shards)
            dl.evaluate(model, batches, loss=cross_entropy)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            dl.evaluate(model, batches, loss=cross_entropy)
            found.append(torch.cuda.max_memory_allocated() - before)
        return found[0], found[1]


@pytest.mark.covers("B8")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_needs_no_more_memory_than_with_a_shard_per_rank(on_fake_gpus: OnRanks, ranks: int) -> None:
    for peak, with_a_shard in on_fake_gpus(ranks, peaks_of_evaluations):
        assert 0 < peak < with_a_shard
