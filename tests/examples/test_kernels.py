"""The digit example's kernels: bf16, channels last, compiled; and what it does where one of them is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.accelerators import Accelerator, Cpu, Cuda
from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES, ROOT
from tests.support.scripts import load, run

pytestmark = pytest.mark.covers("J12")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FASTEST = ["--channels-last", "--precision", "bf16"]


def asks_for(precision: str, lacking: int | None) -> bool:
    """What the example decides on this rank if a rank's device lacks bfloat16."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world() as world:
        patch.setattr(type(world.accelerator), "has_bfloat16", lambda self: world.rank != lacking)
        return load("digits/train").uses_bf16(precision, world)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("precision", "lacking", "expected"),
    [("bf16", None, True), ("bf16", 1, False), ("bf16", 0, False), ("fp32", 0, False)],
)
def test_all_ranks_compute_in_fp32_if_one_has_no_bf16(
    precision: str, lacking: int | None, expected: bool, on_ranks: OnRanks
) -> None:
    assert on_ranks(2, asks_for, precision, lacking) == [expected] * 2


def test_the_missing_bf16_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert not asks_for("bf16", 0)
    assert "--precision bf16 is not used: a rank's device has no bfloat16 kernels. Training in fp32." in (
        capsys.readouterr().out
    )
    assert not asks_for("fp32", 0)
    assert capsys.readouterr().out == ""


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
    [("cpu", "needs a C[+][+] compiler. Found no no-such-compiler. Install it"), ("cuda", "needs Triton on a GPU")],
)
def test_compiling_without_a_compiler_is_refused_before_the_first_step(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    example = load("digits/train")
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=said):
        example.compiled(nn.Linear(1, 1), SimpleNamespace(device=torch.device(device)))


@pytest.mark.slow
def test_the_refusal_is_what_a_user_sees_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(*TORCHRUN, "train.py", "--data", "handwritten", "--compile", folder=EXAMPLES / "digits")
    assert done.returncode != 0
    assert "--compile needs a C++ compiler. Found no no-such-compiler." in done.stderr


def accuracy_of(output: str) -> float:
    found = re.search(r"Test accuracy: (\d\.\d+) of \d+ images", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
def test_the_example_trains_with_the_fastest_kernels_in_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    """The same shards: the same bits."""
    arguments = ["train.py", "--epochs", "1", "--shards", "2", *FASTEST, "--run-dir"]
    rows = []
    for name, command in (("alone", arguments), ("together", [*TORCHRUN, *arguments])):
        done = run(*command, str(tmp_path / name), folder=EXAMPLES / "digits")
        assert done.returncode == 0, done.stderr
        assert accuracy_of(done.stdout) > 0.9
        lines = (tmp_path / name / "rows.jsonl").read_text().splitlines()
        rows.append([re.findall(r'"(?:loss|accuracy)": [^,}]*', line) for line in lines])
    assert len(rows[0]) == 71
    assert all(rows[0])
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_the_example_trains_compiled() -> None:
    done = run("train.py", "--data", "handwritten", "--epochs", "5", "--compile", *FASTEST, folder=EXAMPLES / "digits")
    assert done.returncode == 0, done.stderr
    assert accuracy_of(done.stdout) > 0.9


def test_make_train_takes_the_fastest_kernels() -> None:
    assert f"KERNELS ?= {' '.join(FASTEST)}\n" in (ROOT / "Makefile").read_text()
