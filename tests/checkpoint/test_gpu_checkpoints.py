"""Run folders of jobs on fake GPUs, whose tensors are longer than a piece of a checksum."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.checkpoint import staging
from ddp_loop.determinism import checksum_all, digest
from tests.support.harness import OnRanks

WIDTH = 200  # 40,000 words in a weight, more than the 16,383 of a piece


def train(folder: str, steps: int, device: str = "gpu") -> tuple[int, str]:
    """The step at which the run ends, and a digest of its weights."""
    with dl.join_world(device=device, seed=0) as world:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(48, WIDTH, generator=generator), torch.randint(4, (48,), generator=generator)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4)).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(data, 12, world, shards=6)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=steps, state=state, run_dir=folder, save_every=2, progress=False)
        for step in loop:
            for rows, labels in step:
                step.backward(cross_entropy(model(rows), labels))
            step.fold()
            optimizer.step()
        return loop.iteration, digest(nn.utils.parameters_to_vector(model.parameters()))


@pytest.mark.covers("D10", "J18")
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 3), (3, 1), (4, 2)])
def test_a_run_resumes_on_another_number_of_gpus_with_the_same_bits(
    on_fake_gpus: OnRanks, tmp_path: Path, before: int, after: int
) -> None:
    whole = on_fake_gpus(1, train, str(tmp_path / "whole"), 8)[0]
    on_fake_gpus(before, train, str(tmp_path / "parts"), 4)
    assert on_fake_gpus(after, train, str(tmp_path / "parts"), 8) == [whole] * after


def train_in_small_blocks(folder: str, steps: int) -> tuple[int, str]:
    with mock.patch.object(staging, "BLOCK_BYTES", 5000), mock.patch.object(staging, "KEPT_BYTES", 0):
        return train(folder, steps)


@pytest.mark.covers("J18")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_copied_in_many_pieces_has_the_state_of_its_step(
    on_fake_gpus: OnRanks, tmp_path: Path, ranks: int
) -> None:
    whole = on_fake_gpus(1, train, str(tmp_path / "whole"), 8)[0]
    on_fake_gpus(ranks, train_in_small_blocks, str(tmp_path / "parts"), 4)
    assert on_fake_gpus(ranks, train, str(tmp_path / "parts"), 8) == [whole] * ranks


@pytest.mark.covers("J18")
def test_a_run_goes_from_gpus_to_the_cpu_and_back(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    on_fake_gpus(2, train, folder, 2)
    assert on_fake_gpus(1, train, folder, 4, "cpu")[0][0] == 4
    assert {steps for steps, _ in on_fake_gpus(2, train, folder, 6)} == {6}


def sums_of_both() -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    counts = (5, 2**14 - 1, 2**14, 50_001, 5_000_000)
    tensors = [torch.randn(count, generator=generator) for count in counts]
    return checksum_all(tensors).tolist(), checksum_all([tensor.cuda() for tensor in tensors]).tolist()


@pytest.mark.covers("J18")
def test_a_gpu_and_the_cpu_have_one_checksum(on_fake_gpus: OnRanks) -> None:
    on_cpu, on_gpu = on_fake_gpus(1, sums_of_both)[0]
    assert on_gpu == on_cpu
