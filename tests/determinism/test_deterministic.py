"""The deterministic block: settings are set and restored, refused operations are named, bits are equal."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils import deterministic as torch_deterministic

import ddp_loop as dl
from ddp_loop import datasets, networks
from ddp_loop.determinism import deterministic, require_pinned
from ddp_loop.determinism.settings import require_unstarted
from tests.support.harness import OnRanks
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("H3")

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}
SWITCHED = {
    "algorithms": True,
    "warn only": False,
    "fill": True,
    "inductor": True,
    "cudnn deterministic": True,
    "cudnn benchmark": False,
    **VARIABLES,
}


def inductor() -> Any:
    """Its settings; here, since each process that collects the tests would wait 3 s for the compiler."""
    from torch._inductor import config

    return config


def settings() -> dict[str, object]:
    """The current value of every setting."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch_deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # a property
        "inductor": inductor().deterministic,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        **{name: os.environ.get(name) for name in VARIABLES},
    }


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting as in a new process, whatever the environment; restored after the test."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch_deterministic, "fill_uninitialized_memory", True)


FORMER: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "as Python starts": lambda patch: None,
    "algorithms": lambda patch: torch.use_deterministic_algorithms(True),
    "warnings": lambda patch: torch.use_deterministic_algorithms(True, warn_only=True),
    "warn only, switched off": lambda patch: torch.use_deterministic_algorithms(False, warn_only=True),
    "memory is not filled": lambda patch: patch.setattr(torch_deterministic, "fill_uninitialized_memory", False),
    "inductor alone": lambda patch: setattr(inductor(), "deterministic", True),
    "cudnn is deterministic": lambda patch: patch.setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn measures": lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "an empty variable": lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ""),
    "an algorithm of NCCL": lambda patch: patch.setenv("NCCL_ALGO", "Ring"),
    "a protocol of NCCL": lambda patch: patch.setenv("NCCL_PROTO", "Simple"),
    "no NVLS": lambda patch: patch.setenv("NCCL_NVLS_ENABLE", "0"),
}


@pytest.mark.parametrize("former", FORMER)
def test_the_block_sets_and_restores_every_setting(former: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMER[former](monkeypatch)
    try:
        before = settings()
        with deterministic():
            assert settings() == SWITCHED
        assert settings() == before
        with pytest.raises(KeyError), deterministic():
            raise KeyError
        assert settings() == before
        with deterministic():
            with deterministic():
                assert settings() == SWITCHED
            assert settings() == SWITCHED
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_that_are_already_deterministic_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    with deterministic():
        assert settings() == {**SWITCHED, "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "ring"}


def test_the_block_yields_the_settings_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic() as former, deterministic() as inner:
        assert (former.algorithms, former.cudnn_benchmark) == (False, True)
        assert former.environment == dict.fromkeys(VARIABLES)
        assert "cudnn_benchmark=True" in str(former)
        assert (inner.algorithms, inner.cudnn_benchmark, inner.environment) == (True, False, VARIABLES)
        with pytest.raises(FrozenInstanceError):
            former.algorithms = True  # type: ignore[misc]


# -- random streams ----------------------------------------------------------------------------------------


def fail_after(kept: list[tuple[float, ...]], *drawn: tuple[float, ...]) -> None:
    kept.extend(drawn)
    raise KeyError


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_the_generators_are_seeded_and_restored_after_the_block() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    undisturbed = [draw() for _ in range(2)]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with deterministic(seed=3):
        first = draw()
        with deterministic(seed=4):
            other = draw()
        second = draw()
    assert draw() == undisturbed[0]
    again: list[tuple[float, ...]] = []
    with pytest.raises(KeyError), deterministic(seed=3):
        fail_after(again, draw(), draw())
    assert draw() == undisturbed[1]
    assert again == [first, second]
    assert not set(first) & set(other)


def test_without_a_seed_the_generators_continue_through_the_block() -> None:
    with deterministic(seed=1):
        plain = [draw() for _ in range(3)]
    with deterministic(seed=1):
        through = [draw()]
        with deterministic(seed=None):
            through.append(draw())
        through.append(draw())
    assert through == plain


# -- what is refused ---------------------------------------------------------------------------------------


def put() -> None:
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))


def unpool() -> None:
    nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long), [2, 2])


@pytest.mark.parametrize(("operation", "name"), [(put, "put_"), (unpool, "max_unpooling2d_forward_out")])
def test_a_nondeterministic_operation_raises_with_its_name_and_the_remedy(
    operation: Callable[[], None], name: str
) -> None:
    raises = pytest.raises(RuntimeError, match=f"{name} does not have a deterministic implementation")
    with raises as raised, deterministic(), deterministic():
        operation()
    (note,) = raised.value.__notes__
    assert f"allows only operations that give the same bits twice; {name} may not. Use another" in note
    operation()  # allowed again after the block


def test_other_errors_leave_the_block_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="planted") as raised, deterministic():
        raise RuntimeError("planted")
    assert not hasattr(raised.value, "__notes__")


CONTRADICTING = {
    "CUBLAS_WORKSPACE_CONFIG": [":4096:2"],
    "NCCL_ALGO": ["NVLS", "Ring,Tree", "^NVLS"],
    "NCCL_PROTO": ["LL128"],
    "NCCL_NVLS_ENABLE": ["2"],
}


def test_what_contradicts_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.get_rng_state()
    for name, value in ((name, value) for name, values in CONTRADICTING.items() for value in values):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            before = settings()
            message = rf"needs {name}={VARIABLES[name]}.*\. Got {name}={re.escape(value)}. Unset it"
            with pytest.raises(ValueError, match=message):
                deterministic().__enter__()
            assert settings() == before
    seeds: list[Any] = ["0", 1.0, True, 2**64, -(2**63) - 1]
    for seed in seeds:
        with pytest.raises(ValueError, match="seed must be a whole number"):
            deterministic(seed).__enter__()
    assert settings() == dict.fromkeys(SWITCHED, False) | dict.fromkeys(VARIABLES) | {"fill": True}
    assert torch.equal(torch.get_rng_state(), stream)


def test_nccl_must_not_have_been_started_before_the_block() -> None:
    require_unstarted("cpu:gloo")
    with pytest.raises(RuntimeError, match=r"with no NCCL_ALGO, no NCCL_PROTO, no NCCL_NVLS_ENABLE. Enter"):
        require_unstarted("cpu:gloo,cuda:nccl")
    with deterministic():
        require_unstarted("cpu:gloo,cuda:nccl")  # a block inside a block
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_ALGO", "Tree")
            with pytest.raises(RuntimeError, match=r"started with NCCL_ALGO=Tree. Enter deterministic\(\) before"):
                require_unstarted("cuda:nccl")


def test_a_group_over_nccl_that_starts_in_the_block_needs_its_variables() -> None:
    require_pinned("cuda:nccl")  # no block
    torch.use_deterministic_algorithms(True)
    require_pinned("cuda:nccl")  # a user's own setting is not a block
    torch.use_deterministic_algorithms(False)
    with deterministic():
        require_pinned("cpu:gloo,cuda:nccl")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_PROTO", "LL")
            require_pinned("gloo")
            with pytest.raises(RuntimeError, match=r"NCCL starts with NCCL_ALGO=Ring, .*\. Got NCCL_PROTO=LL. Do not"):
                require_pinned("cpu:gloo,cuda:nccl")
            torch.use_deterministic_algorithms(True, warn_only=True)
            require_pinned("cpu:gloo,cuda:nccl")


@pytest.mark.gpu
def test_a_block_is_refused_after_nccl_was_started() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"Enter deterministic\(\) before join_world"):
            deterministic().__enter__()
    finally:
        dist.destroy_process_group()


# -- the same bits -----------------------------------------------------------------------------------------


def hash_of(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def train(world: dl.World) -> str:
    """The SHA-256 of a digit network, trained with dropout for four steps."""
    model = nn.Sequential(nn.Dropout(0.2), networks.digit_classifier()).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = dl.Batches(datasets.digits(size=60), 20, world)
    for step in loop_on(batches, model, optimizer, epochs=9, steps=4):
        for images, labels in step:
            step.backward(cross_entropy(model(images), labels))
        step.fold()
        optimizer.step()
    return hash_of([*model.parameters(), *model.buffers()])


def train_thrice(seed: int | None, device: str = "cpu") -> list[str]:
    """Train twice in blocks inside one world, and once in a block around a world."""
    hashes = []
    with dl.join_world(device=device) as world:
        for _ in range(2):
            with deterministic(seed):
                hashes.append(train(world))
    with deterministic(seed), dl.join_world(device=device) as world:
        torch.manual_seed(0 if seed is None else seed)  # join_world has seeded with 0
        hashes.append(train(world))
    return hashes


@pytest.mark.slow
def test_two_trainings_give_equal_bits_in_a_block_and_different_ones_without_a_seed(on_ranks: OnRanks) -> None:
    first, other = on_ranks(2, train_thrice, 7)
    assert len(set(first)) == 1
    assert other == first
    free = on_ranks(2, train_thrice, None)[0]
    assert free[0] != free[1]
    assert first[0] not in free


@pytest.mark.gpu
def test_two_runs_of_training_give_equal_bits_on_a_gpu() -> None:
    with deterministic(7):  # before the process's first matrix product, when torch reads the variable
        assert len(set(train_thrice(7, "gpu"))) == 1


@pytest.mark.gpu
def test_the_generators_of_a_gpu_are_restored_after_the_block_too() -> None:
    torch.cuda.manual_seed_all(5)
    undisturbed = torch.rand(3, device="cuda").tolist()
    torch.cuda.manual_seed_all(5)
    with deterministic(1):
        first = torch.rand(3, device="cuda").tolist()
    with deterministic(1):
        assert torch.rand(3, device="cuda").tolist() == first != undisturbed
    assert torch.rand(3, device="cuda").tolist() == undisturbed


def infer_repeatedly() -> list[str]:
    with deterministic(), dl.join_world(device="cpu") as world:
        model = nn.Sequential(nn.Dropout(0.5), networks.digit_classifier())
        batches = dl.Batches(datasets.digits(size=60), 25, world, shuffle=False)
        return [hash_of([dl.predict(model, batches)]) for _ in range(3)]


@pytest.mark.covers("H6")
def test_repeated_inference_gives_equal_bits(on_ranks: OnRanks) -> None:
    for ranks in (1, 2):
        hashes = [name for _ in range(2) for names in on_ranks(ranks, infer_repeatedly) for name in names]
        assert len(hashes) == 2 * 3 * ranks
        assert len(set(hashes)) == 1
