"""The examples' kernels: bf16, channels last, compiled."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES, ROOT
from tests.support.scripts import run, run_here

pytestmark = pytest.mark.covers("J12")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FASTEST = ["--channels-last", "--precision", "bf16"]


@pytest.mark.slow
def test_the_refusal_is_what_a_user_sees_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(*TORCHRUN, "train.py", "--data", "handwritten", "--compile", folder=EXAMPLES / "digits")
    assert done.returncode != 0
    assert "torch.compile needs a C++ compiler on a CPU. Found no no-such-compiler." in done.stderr


def accuracy_of(output: str) -> float:
    found = re.search(r"Test accuracy: (\d\.\d+) of \d+ images", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
def test_the_example_trains_with_the_fastest_kernels_in_one_process_and_on_two_ranks(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    """The same shards: the same bits."""
    arguments = ["digits/train.py", "--data", "handwritten", "--epochs", "2", "--shards", "2", *FASTEST, "--run-dir"]
    rows = []
    for ranks in (1, 2):
        on_ranks(ranks, run_here, *arguments, str(tmp_path / str(ranks)))
        lines = (tmp_path / str(ranks) / "rows.jsonl").read_text().splitlines()
        rows.append([re.findall(r'"(?:loss|accuracy)": [^,}]*', line) for line in lines])
    assert len(rows[0]) > 20
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


TWO_COMPILED_RUNS = """
import sys, train
arguments = train.read_arguments(sys.argv[1:])
one, other = (train.run(0, arguments) for _ in range(2))
print("differing:", train.compare(one.model, other.model).differing)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_the_autoencoder_takes_the_same_flags_and_two_runs_have_equal_bits() -> None:
    few = ["--images", "400", "--batch-size", "100", "--epochs", "2", "--quiet"]
    done = run("-c", TWO_COMPILED_RUNS, *few, *FASTEST, "--compile", folder=EXAMPLES / "autoencoder")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "differing: 0"
