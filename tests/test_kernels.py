"""Faster kernels on request, and what happens where one of them is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop import kernels
from ddp_loop.accelerators import Accelerator, Cpu, Cuda
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J12")


def decide(lacking: int | None) -> bool:
    """What this rank decides if a rank's device lacks bfloat16."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world() as world:
        patch.setattr(type(world.accelerator), "has_bfloat16", lambda self: world.rank != lacking)
        return dl.use_bfloat16(world)


@pytest.mark.parametrize(("lacking", "expected"), [(None, True), (1, False), (0, False)])
def test_all_ranks_compute_in_fp32_if_one_has_no_bf16(lacking: int | None, expected: bool, on_ranks: OnRanks) -> None:
    assert on_ranks(2, decide, lacking) == [expected] * 2


def test_the_missing_bf16_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert not decide(0)
    said = "bfloat16 is not used: a rank's device has no instructions for it. Training in fp32."
    assert said in capsys.readouterr().out
    assert decide(None)
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({"avx512_bf16": True, "amx_bf16": False}, True), ({"avx512_bf16": False}, False), ({"arm_bf16": True}, True)],
)
def test_a_processor_has_bf16_if_torch_names_an_instruction_for_it(
    capabilities: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "a bf16", **capabilities}, raising=False)
    assert Cpu(torch.device("cpu")).has_bfloat16() is expected


def test_a_torch_that_does_not_list_what_the_processor_can_is_asked_for_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert Cpu(torch.device("cpu")).has_bfloat16() is True


def test_a_gpu_that_emulates_bf16_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not Cuda(torch.device("cuda", 0)).has_bfloat16()
    assert not Accelerator(torch.device("meta")).has_bfloat16()


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cpu", "needs a C[+][+] compiler on a CPU. Found no no-such-compiler. Install it"),
        ("cuda", "needs Triton on a GPU"),
    ],
)
def test_compiling_without_a_compiler_is_refused_before_the_first_step(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    world: Any = SimpleNamespace(accelerator=(Cuda if device == "cuda" else Cpu)(torch.device(device)))
    with pytest.raises(RuntimeError, match=said):
        dl.compile_model(nn.Linear(1, 1), world)
