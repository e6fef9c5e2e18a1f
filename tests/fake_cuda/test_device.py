"""What the fake device shows: planted waits, races between streams, early reads and writes, and what NCCL refuses."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from ddp_loop import accelerators
from ddp_loop.accelerators import HostCopy
from tests.fake_cuda.build import environment
from tests.support.harness import TASK_S, OnRanks

pytestmark = pytest.mark.covers("J18")

WAITING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item": lambda gpu, cpu: gpu[0].item(),
    "truth": lambda gpu, cpu: bool(gpu.any()),
    "equal": lambda gpu, cpu: torch.equal(gpu, gpu),
    "to the host": lambda gpu, cpu: gpu.cpu(),
    "to the GPU": lambda gpu, cpu: cpu.to(gpu.device),
    "copied into it": lambda gpu, cpu: gpu.clone().copy_(cpu),
    "a tensor of numbers": lambda gpu, cpu: torch.tensor([1.0, 2.0], device=gpu.device),
    "a new tensor": lambda gpu, cpu: gpu.new_tensor(1.0),
    "a number at a place": lambda gpu, cpu: gpu.__setitem__(0, 1.0),
    "by a mask": lambda gpu, cpu: gpu[gpu > 0],
    "by an index of the host": lambda gpu, cpu: gpu[torch.tensor([0, 1])],
    "synchronize": lambda gpu, cpu: torch.cuda.synchronize(),
    "an event": lambda gpu, cpu: torch.cuda.current_stream().record_event().synchronize(),
}
FREE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "not blocking": lambda gpu, cpu: cpu.to(gpu.device, non_blocking=True),
    "filled": lambda gpu, cpu: torch.full((), 1.0, device=gpu.device) + gpu.new_full((), 2.0) + 3.0,
    "by a number": lambda gpu, cpu: gpu[1] + gpu[1:].sum(),
    "a number in a slice": lambda gpu, cpu: gpu.__setitem__(slice(0, 1), 1.0),
    "a backward": lambda gpu, cpu: gpu.clone().requires_grad_().square().sum().backward(),
}
TWO_DEVICES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "added": lambda gpu, cpu: gpu + cpu,
    "stacked": lambda gpu, cpu: torch.stack([gpu[0], cpu[0]]),
    "two GPUs": lambda gpu, cpu: gpu + cpu.to("cuda:1"),
}


def count_waits() -> dict[str, int]:
    """How often each makes the host wait; torch copies an index to the device and then waits for it again."""
    from tests.fake_cuda import cuda

    cpu = torch.ones(2)
    found = {}
    for name, function in {**WAITING, **FREE}.items():
        gpu = torch.ones(2, device="cuda")
        with cuda.Waits() as waits:
            function(gpu, cpu)
        assert all(__file__ in place for _, place in waits.found), waits.found
        found[name] = len(waits.found)
    return found


def test_each_wait_of_the_host_is_noted_with_its_place(on_fake_gpus: OnRanks) -> None:
    (found,) = on_fake_gpus(1, count_waits)
    assert {name for name, count in found.items() if count} == set(WAITING)
    assert found["item"] == found["to the host"] == 1


def wait_for_copies() -> list[list[str]]:
    """What is noted of a wait for a copy: the last work of its stream, the same with a later kernel, a synchronized
    event; and what is noted of the first without counting events."""
    from tests.fake_cuda import cuda

    def synchronize(copy: HostCopy) -> None:
        assert copy._event is not None
        copy._event.synchronize()

    cases: list[tuple[bool, bool, Callable[[HostCopy], object]]] = [
        (True, True, HostCopy.wait),
        (True, False, HostCopy.wait),
        (True, True, synchronize),
        (False, True, HostCopy.wait),
    ]
    values, found = torch.ones(2, device="cuda"), []
    for events, is_last, wait in cases:
        with looking_again(), cuda.Waits(events=events) as waits:
            copy = HostCopy(values)
            if not is_last:
                values.add_(1)
            wait(copy)
        found.append(sorted({what for what, _ in waits.found}))
    return found


@contextmanager
def looking_again() -> Iterator[None]:
    """Have waits look at their events again and again, as in a world of several ranks."""
    end = accelerators.check_in_waits(lambda: None)
    try:
        yield
    finally:
        end()


def test_a_wait_for_the_last_launch_is_noted_however_it_is_made(on_fake_gpus: OnRanks) -> None:
    looks, waits = "event.query of the last launch", "event.synchronize of the last launch"
    assert on_fake_gpus(1, wait_for_copies)[0] == [[looks], [], ["event.synchronize", waits], []]


def try_two_devices() -> dict[str, str]:
    found = {}
    for name, function in TWO_DEVICES.items():
        try:
            function(torch.ones(2, device="cuda"), torch.ones(2))
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_tensors_of_two_devices_are_refused(on_fake_gpus: OnRanks) -> None:
    (found,) = on_fake_gpus(1, try_two_devices)
    assert found.keys() == TWO_DEVICES.keys()
    assert all("Expected all tensors to be on the same device" in said for said in found.values()), found


def on_another_stream(*, waits: bool, records: bool = True, waits_back: bool = True) -> list[str]:
    """What is wrong when another stream reads a tensor, and its memory is given back."""
    import fake_cuda_extension as device

    device.errors()
    device.check_order(True)
    try:
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        values = torch.ones(3, device="cuda")
        if waits:
            other.wait_stream(current)
        with torch.cuda.stream(other):
            result = values * 2
        if records:
            values.record_stream(other)
        del values
        if waits_back:
            current.wait_stream(other)
        result += 1
        result.record_stream(current)
        return list(device.errors())
    finally:
        device.check_order(False)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({}, []),
        ({"waits": False}, ["aten::mul", "reads memory that aten::fill_", "does not wait for it"]),
        ({"records": False, "waits_back": False}, ["given back", "aten::mul", "record_stream or a wait is missing"]),
        ({"waits_back": False}, ["aten::add", "memory that aten::mul", "does not wait for it"]),
    ],
)
def test_streams_that_do_not_wait_for_each_other_are_named(
    on_fake_gpus: OnRanks, missing: dict[str, bool], said: list[str]
) -> None:
    (errors,) = on_fake_gpus(1, on_another_stream, **{"waits": True, **missing})
    assert bool(errors) == bool(said)
    assert all(word in "\n".join(errors) for word in said), errors
    assert all(__file__ in error for error in errors)


def copy_late() -> tuple[list[bool], list[bool], list[str]]:
    import fake_cuda_extension as device

    device.errors()
    host = torch.empty(2, pin_memory=True)
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    early = [host.isnan().all().item()]
    looks = []
    while not event.query():
        looks.append(bool(host.isnan().all()))
    early.append(bool((host == 1).all()))
    host.fill_(5)
    host.to("cuda", non_blocking=True)
    host.zero_()  # too early
    torch.cuda.synchronize()
    return [bool(one) for one in early], looks, list(device.errors())


def test_copies_arrive_late_and_read_pinned_memory_late(on_fake_gpus: OnRanks) -> None:
    (found,) = on_fake_gpus(1, copy_late)
    early, looks, errors = found
    assert early == [True, True]
    assert looks
    assert all(looks)
    assert errors == ["pinned memory was written before the copy to the device that reads it was done"]


def try_nccl() -> tuple[bool, bool, dict[str, str]]:
    with dl.join_world(device="gpu"):
        group = dist.distributed_c10d._get_default_group()
        values = torch.ones(4, device="cuda")
        work = group.allreduce([values])
        early = bool(values.isnan().all())
        work.wait()
        refused: dict[str, str] = {}
        given: dict[str, Any] = {
            "with gaps": torch.ones(4, device="cuda")[::2],
            "complex": torch.ones(4, device="cuda", dtype=torch.complex64),
        }
        for name, tensor in given.items():
            try:
                group.allreduce([tensor])
                refused[name] = ""
            except RuntimeError as error:
                refused[name] = str(error)
        return early, values.tolist() == [2.0] * 4, refused


def test_nccl_gives_nothing_before_wait_and_refuses_as_the_real_one_does(on_fake_gpus: OnRanks) -> None:
    for early, is_sum, refused in on_fake_gpus(2, try_nccl):
        assert early
        assert is_sum
        assert "contiguous" in refused["with gaps"]
        assert "data type is not supported" in refused["complex"]


def leave_a_sum_alone() -> str:
    """Rank 0 aborts a sum that rank 1 does not join, and destroys its group, for which rank 1 waits."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=2 * TASK_S))
    group = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    if rank == 0:
        work = group.allreduce([torch.ones(4, device="cuda")])
        group.abort()
        del work
    else:
        store.wait(["left"], timedelta(seconds=2 * TASK_S))
    del group
    dist.destroy_process_group()
    store.set("left", "")
    return "left"


def test_an_aborted_group_of_nccl_is_destroyed_without_a_wait_for_its_sums(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(2, leave_a_sum_alone) == ["left", "left"]


def run_out_of_memory() -> str:
    import fake_cuda_extension as device

    from tests.fake_cuda.cuda import total_bytes

    device.limit_memory(device.memory()[0] + 1000)
    try:
        torch.empty(1000, device="cuda")
        return ""
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        device.limit_memory(total_bytes)


def test_a_limit_of_memory_is_torchs_own_error(on_fake_gpus: OnRanks) -> None:
    assert "CUDA out of memory" in on_fake_gpus(1, run_out_of_memory)[0]


def recur(kind: type[nn.LSTM | nn.GRU]) -> list[float]:
    torch.manual_seed(0)
    on_cpu = kind(5, 7)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    twin = copy.deepcopy(on_gpu)
    rows = torch.randn(3, 2, 5)
    errors = []
    gradients: list[list[torch.Tensor]] = []
    for module in (on_cpu, on_gpu, twin):
        output, _ = module(rows.to(next(module.parameters()).device))
        output.square().sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None])
    for other in gradients[1:]:
        errors += [float((one - two).abs().max()) for one, two in zip(gradients[0], other, strict=True)]
    return errors


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.filterwarnings("ignore")
def test_recurrent_cells_and_deep_copies_compute_what_the_cpu_does(
    on_fake_gpus: OnRanks, kind: type[nn.LSTM | nn.GRU]
) -> None:
    (errors,) = on_fake_gpus(1, recur, kind)
    assert len(errors) == 8
    assert max(errors) < 1e-5  # float32, sums of some ten products


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(2, 8, 3, padding=1), (3, 2, 9, 9)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 8, 3), (3, 2, 9, 9)),
    "max pool": (lambda: nn.MaxPool2d(2), (3, 2, 8, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (3, 2, 9, 9)),
    "layer norm": (lambda: nn.LayerNorm(9), (3, 2, 9)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 9)),
    "activations": (lambda: nn.Sequential(nn.SiLU(), nn.Mish(), nn.GELU()), (3, 9)),
}


def compute_on_both() -> dict[str, bool]:
    """Whether output and gradients have the bits of the CPU."""
    found = {}
    for name, (build, shape) in LAYERS.items():
        bits = []
        for place in ("cpu", "cuda"):
            torch.manual_seed(0)
            layer = build()
            rows = torch.randn(shape)
            layer, rows = layer.to(place), rows.to(place).requires_grad_()
            output = layer(rows)
            output.square().sum().backward()
            gradients = [one.grad for one in (rows, *layer.parameters())]
            bits.append([one.detach().cpu() for one in (output, *gradients) if one is not None])
        found[name] = all(torch.equal(one, other) for one, other in zip(*bits, strict=True))
    return found


def test_layers_have_the_bits_of_the_cpu(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, compute_on_both) == [dict.fromkeys(LAYERS, True)]


def compute_losses() -> list[str]:
    """What torch warns of."""
    rows, wanted = torch.ones(3, 1, device="cuda", requires_grad=True), torch.zeros(3, 1, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in (nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.functional.l1_loss):
            loss(rows, wanted).backward()
    return [str(one.message) for one in caught]


def test_losses_warn_of_nothing(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, compute_losses) == [[]]


def drop_out() -> tuple[bool, bool, bool, list[float]]:
    """Whether dropout repeats with the device's generator, moves it, and leaves the host's as it was."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    values = torch.ones(64, device="cuda", requires_grad=True)
    rest = []
    for seed in (2, None, 2):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        rest.append(nn.functional.dropout(values, 0.75))
    first, second, again = rest
    first.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, first)
    is_left_alone = torch.equal(before, torch.get_rng_state())
    return torch.equal(first, again), torch.equal(first, second), is_left_alone, first.unique().tolist()


def test_dropout_draws_from_the_generator_of_the_device(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, drop_out) == [(True, False, True, [0.0, 4.0])]


def save_and_load() -> list[list[float]]:
    file = io.BytesIO()
    torch.save(
        {"view": torch.arange(6.0, device="cuda").view(2, 3)[:, 1:], "sum": torch.ones(2, device="cuda") + 1}, file
    )
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    return [*loaded["view"].tolist(), loaded["sum"].tolist()]


def count_writes() -> list[int]:
    whole = torch.ones(4, device="cuda")
    parts = [whole[:2], whole[2:]]
    counts = []
    for write in (
        lambda: whole.mul_(2.0),
        lambda: torch._foreach_mul_(parts, 2.0),
        lambda: torch._foreach_copy_(parts, [part + 1 for part in parts]),
        lambda: torch._foreach_copy_(parts, [part.cpu() for part in parts]),
        lambda: torch._foreach_add(parts, 1.0),  # writes nothing
    ):
        before = whole._version
        write()
        counts.append(whole._version - before)
    return counts


def test_writes_of_one_and_of_many_tensors_are_counted_as_on_a_gpu(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, count_writes) == [[1, 2, 2, 2, 0]]


def test_tensors_are_saved_and_loaded(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, save_and_load) == [[[1, 2], [4, 5], [2, 2]]]


RACE = """
import torch

values = torch.ones(3, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    values * 2
"""


@pytest.mark.slow
def test_a_process_writes_what_was_wrong_when_it_ends(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    on_fake_gpus(1, count_waits)  # skips where there is no fake device
    variables = {**os.environ, **environment(1, errors=str(tmp_path))}
    subprocess.run([sys.executable, "-c", RACE], env=variables, cwd=tmp_path, check=True, timeout=120)
    (written,) = tmp_path.iterdir()
    assert "reads memory that aten::fill_" in written.read_text()
