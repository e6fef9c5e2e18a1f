"""Run folders of jobs on fake GPUs, whose tensors are longer than a piece of a checksum."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import checkpointer, staging
from ddp_loop.determinism import checksum_all
from tests.support.gpu_runs import train
from tests.support.harness import OnRanks
from tests.support.training import mean_square, sgd, take

pytestmark = pytest.mark.covers("J18")


def train_in_small_blocks(folder: str, steps: int) -> tuple[int, str]:
    with mock.patch.object(staging, "BLOCK_BYTES", 5000), mock.patch.object(checkpointer, "KEPT_BYTES", 0):
        return train(folder, steps)


@pytest.mark.covers("D10")
def test_a_checkpoint_copied_in_many_pieces_has_the_state_of_its_step_on_another_number_of_gpus(
    on_fake_gpus: OnRanks, tmp_path: Path
) -> None:
    whole = on_fake_gpus(1, train, str(tmp_path / "whole"), 8)[0]
    on_fake_gpus(2, train_in_small_blocks, str(tmp_path / "parts"), 4)
    assert on_fake_gpus(3, train, str(tmp_path / "parts"), 8) == [whole] * 3


def test_a_run_goes_from_gpus_to_the_cpu_and_back(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    on_fake_gpus(2, train, folder, 2)
    assert on_fake_gpus(1, train, folder, 4, "cpu")[0][0] == 4
    assert {steps for steps, _ in on_fake_gpus(2, train, folder, 6)} == {6}


class Average:
    """A mean of weights of a script's own, which keeps the tensors that it gets."""

    def __init__(self, model: nn.Module) -> None:
        weights = [(one.detach().clone(), 0) for one in model.parameters()]
        self.kept: dict[str, Any] = {"weights": weights, "count": Counter(steps=0)}

    def update(self, model: nn.Module) -> None:
        pairs = zip(self.kept["weights"], model.parameters(), strict=True)
        self.kept["weights"] = [((mean + one.detach()) / 2, number + 1) for (mean, number), one in pairs]
        self.kept["count"]["steps"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def train_with_average(folder: str, steps: int, device: str = "gpu") -> tuple[list[float], int]:
    with dl.join_world(device=device, seed=0) as world:
        model = nn.Linear(4, 1).to(world.device)
        average = Average(model)
        batches = dl.Batches(torch.ones(12, 4), 6, world, shards=2)
        state = {"model": model, "average": average}
        optimizer = sgd(model)
        for step in dl.Loop(batches, steps=steps, state=state, run_dir=folder, progress=False):
            take(step, model, mean_square)
            optimizer.step()
            average.update(model)
        return average.kept["weights"][0][0].flatten().tolist(), average.kept["count"]["steps"]


def test_tensors_of_a_scripts_own_object_come_back_to_its_gpu(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    whole = on_fake_gpus(1, train_with_average, str(tmp_path / "whole"), 6)[0]
    on_fake_gpus(2, train_with_average, str(tmp_path / "parts"), 2)
    on_fake_gpus(1, train_with_average, str(tmp_path / "parts"), 4, "cpu")
    assert on_fake_gpus(2, train_with_average, str(tmp_path / "parts"), 6) == [whole] * 2


def sums_of_both() -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    counts = (5, 2**14 - 1, 2**14, 50_001, 5_000_000)
    tensors = [torch.randn(count, generator=generator) for count in counts]
    return checksum_all(tensors).tolist(), checksum_all([tensor.cuda() for tensor in tensors]).tolist()


def test_a_gpu_and_the_cpu_have_one_checksum(on_fake_gpus: OnRanks) -> None:
    on_cpu, on_gpu = on_fake_gpus(1, sums_of_both)[0]
    assert on_gpu == on_cpu


def launches_of_sums() -> list[int]:
    import fake_cuda_extension as device

    found = []
    for tensors in ([torch.ones(9_000_001, device="cuda")], [torch.ones(8, device="cuda") for _ in range(100)]):
        before = device.launches()
        checksum_all(tensors)
        found.append(device.launches() - before)
    return found


def test_the_checksums_of_a_state_are_few_launches(on_fake_gpus: OnRanks) -> None:
    of_large, of_small = on_fake_gpus(1, launches_of_sums)[0]
    assert of_large <= 50
    assert of_small <= 150


def waits_of_sums() -> tuple[list[tuple[str, str]], bool]:
    """Where the host waits for checksums of a GPU's weights and the host's counts, and whether each is right."""
    from tests.fake_cuda import cuda

    on_host = [torch.tensor(float(count)) for count in range(1, 20)]
    tensors = [one for count in on_host for one in (torch.ones(8, device="cuda"), count)]
    with cuda.Waits() as waits:
        found = checksum_all(tensors)
    return waits.found, found.tolist() == checksum_all([tensor.cpu() for tensor in tensors]).tolist()


def test_no_checksum_of_the_hosts_tensors_makes_it_wait_for_a_gpu(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, waits_of_sums) == [([], True)]
