"""`examples/finetune`: a language model of transformers with LoRA, equal to one process on any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_loop.distributed import Pool
from tests.support.paths import EXAMPLES
from tests.support.scripts import run, run_here

pytestmark = [pytest.mark.slow, pytest.mark.covers("D11")]

FOLDER = EXAMPLES / "finetune"
JOB = ["finetune/train.py", "--epochs", "1", "--texts", "96", "--device", "cpu"]


@pytest.fixture(scope="module")
def pool_of_three() -> Iterator[Pool]:
    """Ranks of this file alone: tqdm, which transformers imports, leaves a thread. They import transformers once."""
    with Pool(3) as pool:
        pool.run(os.getpid, 3)
        yield pool


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "rows.jsonl").read_text().splitlines()]


def greet(*folders: str) -> tuple[int, list[torch.Tensor]]:
    """The parameters of exported models, and the logits of each for a greeting."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    tokens = AutoTokenizer.from_pretrained(folders[0])("The gradient", return_tensors="pt")["input_ids"]
    assert tokens.numel()
    return models[0].num_parameters(), [model(tokens).logits.detach() for model in models]


def test_losses_are_those_of_one_process_on_two_and_three_ranks(pool_of_three: Pool, tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        pool_of_three.run(run_here, ranks, *JOB, "--dropout", "0", "--run-dir", str(tmp_path / str(ranks)))
    alone, *others = [losses(tmp_path / str(ranks)) for ranks in (1, 2, 3)]
    assert len(alone) == 6
    assert alone[-1] < alone[0] - 0.2  # it learns
    for together in others:
        assert together == pytest.approx(alone, rel=0, abs=1e-6 * alone[0])


def test_fixed_shards_give_the_same_bits_and_weights_come_home(pool_of_three: Pool, tmp_path: Path) -> None:
    """With dropout and in bfloat16; transformers loads what was exported."""
    found = []
    for ranks in (1, 2, 3):
        options = ["--shards", "4", "--precision", "bf16", "--export", str(tmp_path / f"weights-{ranks}")]
        pool_of_three.run(run_here, ranks, *JOB, *options, "--run-dir", str(tmp_path / str(ranks)))
        found.append(losses(tmp_path / str(ranks)))
    assert found[1] == found[0]
    assert found[2] == found[0]
    files = {(tmp_path / f"weights-{ranks}" / "model.safetensors").read_bytes() for ranks in (1, 2, 3)}
    assert len(files) == 1
    ((number, (one, other)),) = pool_of_three.run(greet, 1, str(tmp_path / "weights-1"), str(tmp_path / "weights-3"))
    assert number > 30_000
    assert one.equal(other)


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
