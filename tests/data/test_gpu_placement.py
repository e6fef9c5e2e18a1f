"""When data move to a fake GPU: once it is known how much memory a step leaves. See [Note: Placement]."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ddp_loop as dl
from ddp_loop.accelerators import Cuda
from ddp_loop.data import ReadAhead
from ddp_loop.data.streams import StreamReader
from ddp_loop.determinism import digest
from tests.support.dispatching import Dispatched
from tests.support.harness import OnRanks
from tests.support.sources import Encoding, Mapped
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A9", "J18")

FEATURES, WIDTH, BATCH = 8, 1024, 64
UNUSED = 2000  # bytes of a sample that no network takes: large data with few samples
BYTES = 4 * FEATURES + 8 + UNUSED  # of a sample


def data_of(samples: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(samples, FEATURES, generator=generator), torch.arange(samples) % 4
    return rows, labels, torch.zeros(samples, UNUSED, dtype=torch.uint8)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels)


def network(world: dl.World) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(world.device)


def place_of(batches: dl.Batches) -> str:
    return batches._reader.place.type  # type: ignore[union-attr]


class Run:
    """A run of some steps, and what it found in each.

    Attributes:
        places: of the data, in each step.
        arrivals: the copies from the host to the GPU in each step, and before it.
        weights: a digest of the last ones.
        peak: bytes of the device that the steps took.
    """

    def __init__(self, world: dl.World, data: Any, steps: int = 4, **options: Any) -> None:
        import fake_cuda_extension as device

        gc.collect()
        device.reset_peak()
        before = device.memory()[0]
        self.model = network(world)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, fused=True)
        self.batches = dl.Batches(data, BATCH, world, **options)
        self.places, self.arrivals = list[str](), list[int]()
        arrived: list[bool] = []

        def note(function: Any, arguments: Any, result: Any) -> None:
            if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
                source = arguments[0] if function is torch.ops.aten._to_copy.default else arguments[1]
                arrived.append(source.is_cpu and result.is_cuda)

        with Dispatched(note):
            for step in loop_on(self.batches, self.model, optimizer, epochs=None, steps=steps):
                for rows, *others in step:
                    step.backward(loss_of(self.model(rows), *others))
                step.fold()
                optimizer.step()
                self.places.append(place_of(self.batches))
                self.arrivals.append(sum(arrived))
                arrived.clear()
        self.weights = digest(nn.utils.parameters_to_vector(self.model.parameters()))
        self.peak = device.memory()[1] - before


def train_in_little_memory() -> tuple[list[str], bool]:
    """Data that would fit into half of the free memory before the first step, and not beside it."""
    from tests.fake_cuda import cuda

    with dl.join_world(device="gpu", seed=0) as world:
        peak = max(world.gather(Run(world, data_of(4 * BATCH)).peak))
        data = data_of(int(0.65 * peak) // BYTES)
        with cuda.limited(int(1.5 * peak)):
            on_gpu = Run(world, data)
    with dl.join_world(device="cpu", seed=0) as world:
        return on_gpu.places, on_gpu.weights == Run(world, data).weights


@pytest.mark.slow
def test_data_that_do_not_fit_beside_a_step_stay_on_the_host(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, train_in_little_memory) == [(["cpu"] * 4, True)] * 2


def train_with_small_data(options: dict[str, Any]) -> tuple[list[str], list[int], bool]:
    with dl.join_world(device="gpu", seed=0) as world:
        on_gpu = Run(world, data_of(3 * BATCH), 8, **options)  # an epoch has 3 steps
    with dl.join_world(device="cpu", seed=0) as world:
        return on_gpu.places, on_gpu.arrivals, on_gpu.weights == Run(world, data_of(3 * BATCH), 8, **options).weights


@pytest.mark.parametrize("options", [{"shards": 4}, {"shuffle": False}, {"partition": "local", "shards": 2}])
def test_small_data_are_on_the_gpu_after_the_first_step(on_fake_gpus: OnRanks, options: dict[str, Any]) -> None:
    for places, arrivals, is_same in on_fake_gpus(2, train_with_small_data, options):
        assert places == ["cpu"] + ["cuda"] * 7
        assert is_same
        new_order = int(options.get("shuffle", True))  # of an epoch
        assert arrivals[2:] == [0, new_order, 0, 0, new_order, 0]


def evaluate_in_little_memory() -> dict[str, list[str]]:
    """Where data are after evaluations, of which each needs more memory than a step."""
    from tests.fake_cuda import cuda

    found: dict[str, list[str]] = {}
    with dl.join_world(device="gpu", seed=0) as world:

        def batches_of(samples: int) -> dl.Batches:
            return dl.Batches(data_of(samples), 16 * BATCH, world, shuffle=False, shards=world.size)

        peak = max(world.gather(peak_of(batches_of(48 * BATCH))))
        size = int(0.6 * peak) // BYTES
        with cuda.limited(int(1.5 * peak)):
            run = Run(world, data_of(size // 2))
            found["trained"] = [place_of(run.batches)]
            for name, samples in (("large", size), ("small", BATCH)):
                batches = batches_of(samples)
                found[name] = [place_of(batches)]
                for _ in range(3):
                    dl.evaluate(run.model, batches, loss=loss_of)
                    found[name].append(place_of(batches))
    return found


def peak_of(batches: dl.Batches) -> int:
    """Bytes that an evaluation takes."""
    import fake_cuda_extension as device

    model = network(batches.world)
    gc.collect()
    device.reset_peak()
    before = int(device.memory()[0])
    dl.evaluate(model, batches, loss=loss_of)
    return int(device.memory()[1]) - before


@pytest.mark.slow
def test_a_larger_evaluation_runs_beside_data_that_moved_and_its_own_move_in_a_second_one(
    on_fake_gpus: OnRanks,
) -> None:
    expected = {"trained": ["cuda"], "large": ["cpu"] * 4, "small": ["cpu", "cpu", "cuda", "cuda"]}
    assert on_fake_gpus(2, evaluate_in_little_memory) == [expected] * 2


def look_before_training() -> list[str]:
    found = []
    with dl.join_world(device="gpu", seed=0) as world:
        model, batches = network(world), dl.Batches(data_of(5 * BATCH), BATCH, world)
        next(batches.epoch(1)).data(0)
        next(batches.epoch(1)).data(0)
        dl.evaluate(model, batches, loss=loss_of)
        for step in loop_on(batches, model, epochs=None, steps=2):
            found.append(place_of(batches))
            for rows, *others in step:
                step.backward(loss_of(model(rows), *others))
            step.fold()
    return found


def test_a_look_at_the_data_and_an_evaluation_before_training_move_nothing(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, look_before_training) == [["cpu", "cuda"]] * 2


def resume_at_a_small_mini_batch() -> list[str]:
    with dl.join_world(device="gpu", seed=0) as world:
        batches = dl.Batches(data_of(2 * BATCH + 1), BATCH, world)
        ahead, found = ReadAhead(batches), []
        for epoch, start in ((1, 2), (2, 0)):
            with ahead.epoch(epoch, start):
                while ahead.take() is not None:
                    found.append(place_of(batches))
        return found


def test_a_step_with_few_samples_does_not_show_what_a_step_needs(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, resume_at_a_small_mini_batch) == [["cpu", "cpu", "cuda", "cuda"]]


def move_where_others_did() -> tuple[list[str], bool]:
    """Memory that was free is taken before the data have moved."""
    from tests.fake_cuda import cuda

    with dl.join_world(device="gpu", seed=0) as world:
        peak = Run(world, data_of(4 * BATCH)).peak
        data = data_of(2 * peak // BYTES)
        with cuda.limited(int(1.5 * peak)), mock.patch.object(Cuda, "memory_free", return_value=1e18):
            run = Run(world, data)
        return run.places, run.arrivals[2] > 0


def test_data_that_find_no_memory_stay_on_the_host(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, move_where_others_did) == [(["cpu"] * 4, True)]


def give_data_of_a_gpu() -> list[str]:
    from tests.fake_cuda import cuda

    with dl.join_world(device="gpu", seed=0) as world:
        data = tuple(part.to(world.device) for part in data_of(1000))
        with cuda.limited(1000 * BYTES):
            return [place_of(dl.Batches(data, BATCH, world)), place_of(dl.Batches(data, BATCH, world, devices="cpu"))]


def test_data_of_a_gpu_stay_there(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, give_data_of_a_gpu) == [["cuda", "cpu"]]


def held(device: torch.device) -> Mapped:
    """A small data set that the script keeps on a device."""
    return Mapped(6, torch.arange(12.0, device=device).view(6, 2).__getitem__)


ROWS = [[float(value) for value in range(8)], [8.0, 9.0, 10.0, 11.0]]


def read_a_data_set(kept: str, place: str | None, workers: int = 0) -> list[tuple[str, list[float], bool]]:
    """Of each shard the device, the rows, and whether they are pinned."""
    with dl.join_world(device="gpu", seed=0) as world:
        data = held(torch.device(kept))
        batches = dl.Batches(data, 4, world, shuffle=False, devices=place, num_workers=workers)
        found = [(str(rows.device), rows.flatten().tolist(), rows.is_pinned()) for rows in batches]
        assert not isinstance(batches._reader, StreamReader)
        assert kept == "cuda" or batches._reader.fingerprint()
        return found


@pytest.mark.parametrize(("place", "found"), [(None, "cuda:0"), ("cpu", "cpu")])
def test_a_data_set_may_keep_its_samples_on_the_gpu(on_fake_gpus: OnRanks, place: str | None, found: str) -> None:
    (shards,) = on_fake_gpus(1, read_a_data_set, "cuda", place)
    assert [shard[:2] for shard in shards] == [(found, rows) for rows in ROWS]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_the_host_is_pinned_and_has_a_fingerprint(workers: int, on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, read_a_data_set, "cpu", "cpu", workers) == [[("cpu", rows, True) for rows in ROWS]]


def encoded(samples: list[torch.Tensor]) -> Encoding:
    return Encoding({"data": torch.cat(samples)})


def packed(samples: list[torch.Tensor]) -> PackedSequence:
    return pack_sequence([torch.cat(samples)])


def encoded_on_gpu(samples: list[torch.Tensor]) -> Encoding:
    return encoded(samples).to(torch.device("cuda"))


def read_objects(collate_fn: Any, workers: int) -> tuple[list[str], list[list[float]]]:
    with dl.join_world(device="gpu", seed=0) as world:
        data = held(torch.device("cpu"))
        shards = dl.Batches(data, 4, world, shuffle=False, collate_fn=collate_fn, num_workers=workers)
        rows = [one["data"] if isinstance(one, Encoding) else one.data for one in shards]
        return [str(one.device) for one in rows], [one.tolist() for one in rows]


@pytest.mark.parametrize(("collate_fn", "workers"), [(encoded, 0), (encoded, 1), (encoded_on_gpu, 0), (packed, 0)])
def test_shards_that_are_objects_without_a_device_arrive_on_the_gpu(
    collate_fn: Any, workers: int, on_fake_gpus: OnRanks
) -> None:
    assert on_fake_gpus(1, read_objects, collate_fn, workers) == [(["cuda:0"] * 2, ROWS)]


def free_after_a_peak() -> bool:
    """Whether memory counts as free before a peak, at it and after it."""
    from ddp_loop.accelerators import accelerator_of
    from tests.fake_cuda import cuda

    with dl.join_world(device="gpu", seed=0) as world, cuda.limited(1000):
        accelerator = accelerator_of(world.device)
        found = [accelerator.memory_free()]
        for count in (600, 0):
            held = torch.empty(count, dtype=torch.uint8, device=world.device)
            found.append(accelerator.memory_free())
            del held
        return found == [1000, 400, 400]


def test_what_a_step_takes_again_is_not_free(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, free_after_a_peak) == [True]
