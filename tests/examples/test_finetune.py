"""`examples/finetune`: a language model of transformers with LoRA, equal to one process on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES
from tests.support.scripts import run

pytestmark = [pytest.mark.slow, pytest.mark.covers("D11")]

FOLDER = EXAMPLES / "finetune"
JOB = ["train.py", "--epochs", "1", "--texts", "96", "--device", "cpu"]
GREETING = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in sys.argv[1:])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokens = tokenizer("The gradient", return_tensors="pt")["input_ids"]
assert tokens.numel() and torch.equal(one(tokens).logits, other(tokens).logits)
print(sum(parameter.numel() for parameter in one.parameters()))
"""


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "rows.jsonl").read_text().splitlines()]


def train(ranks: int, folder: Path, *arguments: str) -> list[float]:
    done = run(
        "-m", "ddp_loop", "run", "--ranks", str(ranks), *JOB, "--run-dir", str(folder), *arguments, folder=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder)


def test_losses_are_those_of_one_process_on_three_ranks(tmp_path: Path) -> None:
    alone = train(1, tmp_path / "1", "--dropout", "0")
    assert len(alone) == 6
    assert alone[-1] < alone[0] - 0.2  # it learns
    together = train(3, tmp_path / "3", "--dropout", "0")
    assert together == pytest.approx(alone, rel=0, abs=1e-6 * alone[0])


def test_fixed_shards_give_the_same_bits_and_weights_come_home(tmp_path: Path) -> None:
    """With dropout and in bfloat16; transformers loads what was exported."""
    found = []
    for ranks in (1, 2, 3):
        options = ["--shards", "4", "--precision", "bf16", "--export", str(tmp_path / f"weights-{ranks}")]
        found.append(train(ranks, tmp_path / str(ranks), *options))
    assert found[1] == found[0]
    assert found[2] == found[0]
    files = {(tmp_path / f"weights-{ranks}" / "model.safetensors").read_bytes() for ranks in (1, 2, 3)}
    assert len(files) == 1
    said = run("-c", GREETING, str(tmp_path / "weights-1"), str(tmp_path / "weights-3"), folder=tmp_path)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) > 30_000


def test_accelerates_mean_of_means_has_another_gradient() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "with_accelerate.py"]
    done = run(*torchrun, folder=FOLDER)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("2 ranks"))
    off = float(line.split("gradient ")[1].split(" %")[0])
    assert off > 1, line


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "peft.py").write_text("raise ImportError('No module named peft')")
    done = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; runpy.run_path('train.py')",
        folder=FOLDER,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith("No module named peft. pip install 'ddp_loop[finetune,metrics]'")
