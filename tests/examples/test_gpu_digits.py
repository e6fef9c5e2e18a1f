"""The digit example on fake GPUs: killed in the middle, and continued on other ranks and on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from ddp_loop.determinism import digest
from tests.fake_cuda.build import environment
from tests.support.files import write_mnist
from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES
from tests.support.runs import checkpoints_of, rows_of
from tests.support.scripts import load

pytestmark = pytest.mark.covers("D10", "J18")

MINI_BATCH, SHARDS, STEPS, EPOCHS = 24, 4, 3, 3
KILLED_AT = 5  # in the second epoch; the first one's checkpoint is there
SCRIPT_S = 300.0
# Runs a script, one rank of which kills itself after so many steps, once the first checkpoint has been written.
KILLING = """
import os, pathlib, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

rank, left, checkpoints = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])

def count(*arguments):
    global left
    left -= 1
    if left == 0 and os.environ.get("RANK", "0") == rank:
        while not any(checkpoints.glob("step-*")):
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def arguments(folder: Path, run: str, ranks: int, device: str, epochs: int) -> list[str]:
    """Of the example: the mini-batch and the shards are the same on all ranks and devices."""
    batch_size = MINI_BATCH // ranks if device == "gpu" else MINI_BATCH
    data = ["--data", str(folder / "images"), "--device", device, "--run-dir", str(folder / run), "--quiet"]
    return [*data, "--epochs", str(epochs), "--batch-size", str(batch_size), "--shards", str(SHARDS)]


def bits_of(folder: Path, run: str) -> dict[str, str]:
    """Digests of the last checkpoint of a run that is complete: weights, statistics and momentum."""
    last = STEPS * EPOCHS
    assert rows_of(folder / run) == list(range(1, last + 1))
    tensors = load_file(folder / run / "checkpoints" / f"step-{last:08}" / "tensors.safetensors")
    return {name: digest(tensor) for name, tensor in tensors.items() if name.startswith("job.")}


def train_here(given: list[str]) -> list[str]:
    """Run the example on this rank, and say what was wrong with the order of streams and late copies."""
    import fake_cuda_extension as device

    device.errors()
    device.check_order(True)
    try:
        with mock.patch.object(sys, "argv", ["train.py", *given]):
            load("digits/train").main()
    finally:
        device.check_order(False)
    return list(device.errors())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With images of noise for some steps an epoch."""
    write_mnist(tmp_path / "images", sizes=(MINI_BATCH * STEPS, 24))
    return tmp_path


@pytest.mark.slow
def test_the_digit_job_has_the_bits_of_the_cpu_on_1_and_2_and_4_gpus_in_turn(
    on_fake_gpus: OnRanks, folder: Path
) -> None:
    on_fake_gpus(1, train_here, arguments(folder, "whole", 1, "cpu", EPOCHS))
    for epochs, ranks in enumerate((1, 2, 4), 1):
        found = on_fake_gpus(ranks, train_here, arguments(folder, "parts", ranks, "gpu", epochs))
        assert found == [[]] * ranks
    assert bits_of(folder, "parts") == bits_of(folder, "whole")


def launch_and_kill(folder: Path, ranks: int, killed: int) -> subprocess.CompletedProcess[str]:
    """Train through the launcher, until one rank is killed."""
    (folder / "killing.py").write_text(KILLING)
    script = [str(folder / "killing.py"), str(killed), str(KILLED_AT), str(folder / "parts" / "checkpoints")]
    script += [str(EXAMPLES / "digits" / "train.py"), *arguments(folder, "parts", ranks, "gpu", EPOCHS)]
    (folder / "errors").mkdir()
    return subprocess.run(
        [sys.executable, "-m", "ddp_loop", "run", "--ranks", str(ranks), *script],
        env={**os.environ, **environment(ranks, errors=str(folder / "errors"))},
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "killed", "after", "device"),
    [(1, 0, 2, "gpu"), (2, 1, 4, "gpu"), (4, 3, 1, "cpu")],
)
def test_a_digit_job_whose_rank_is_killed_goes_on_elsewhere_with_the_same_bits(
    on_fake_gpus: OnRanks, folder: Path, before: int, killed: int, after: int, device: str
) -> None:
    on_fake_gpus(1, train_here, arguments(folder, "whole", 1, "gpu", EPOCHS))
    ended = launch_and_kill(folder, before, killed)
    assert ended.returncode != 0
    assert before == 1 or f"rank {killed}" in ended.stderr, ended.stderr
    assert checkpoints_of(folder / "parts") == [STEPS]
    found = on_fake_gpus(after, train_here, arguments(folder, "parts", after, device, EPOCHS))
    assert found == [[]] * after
    assert bits_of(folder, "parts") == bits_of(folder, "whole")
    assert not any(path.read_text() for path in (folder / "errors").iterdir())
