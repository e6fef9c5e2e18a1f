"""Every example on one, two and three fake GPUs, as a user starts it: it ends well, and its streams are in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tqdm  # type: ignore[import-untyped]

from tests.fake_cuda.build import environment
from tests.support.files import write_mnist
from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES
from tests.support.scripts import run_here

pytestmark = [pytest.mark.covers("J18"), pytest.mark.slow]

SCRIPT_S = 300.0
SMALL = {
    "by_hand.py": "",
    "gan.py": "--epochs 1 --points 512 --run-dir run",
    "tokens.py": "--epochs 1 --sentences 64 --run-dir run",
    "diffusion/train.py": "--epochs 1 --points 512 --run-dir run",
    "ppo/train.py": "--updates 2 --environments 6 --time 8 --passes 2 --run-dir run",
    "autoencoder/train.py": "--epochs 1 --images 400 --batch-size 100 --folder run",
    "finetune/train.py": "--epochs 1 --texts 48 --run-dir run",
    "digits/train.py": "--data images --epochs 1 --batch-size 16 --run-dir run",
    "sequences/train.py": "--epochs 1 --sequences 40 --run-dir run",
    "surface/train.py": "--device cuda --steps 20 --side 20 --folder run",
    "migrate/after/plain.py": "--epochs 1",
    "migrate/after/ddp.py": "--epochs 1",
    "migrate/after/accelerated.py": "--epochs 1",
    "migrate/after/fabric.py": "--epochs 1",
    "migrate/after/dcgan.py": "--epochs 1 --images 64",
    "migrate/after/gpt.py": "--max-iters 4 --eval-interval 2",
    "migrate/after/imagenet.py": "--epochs 1 --images 64",
    "migrate/after/vae.py": "--epochs 1 --images 64",
    "migrate/after/language_model.py": "--epochs 1",
    "migrate/after/sine_waves.py": "--steps 1 --length 12",
    "migrate/after/detection.py": "--epochs 1 --images 16",
    "migrate/after/simclr.py": "--epochs 1 --images 40 --batch-size 16",
}
WITHOUT_GPU = {"pooled_statistics.py": "its numbers are those of the CPU: it joins no world"}


def run_in_order(script: str, words: str, folder: str) -> list[str]:
    """Run an example on this rank; what was wrong with the order of streams and with late copies."""
    import fake_cuda_extension as device

    device.errors()
    before = device.launches()
    device.check_order(True)
    try:
        with (
            contextlib.chdir(folder),
            mock.patch.object(tqdm.tqdm, "monitor_interval", 0),  # `datasets` would leave its thread to the rank
        ):
            run_here(script, *words.split())
    finally:
        device.check_order(False)
    assert device.launches() > before + 20, "it did not run on the fake GPU"
    return list(device.errors())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("script", SMALL)
def test_an_example_runs_on_gpus_and_its_streams_are_in_order(
    on_fake_gpus: OnRanks, tmp_path: Path, script: str, ranks: int
) -> None:
    write_mnist(tmp_path / "images", sizes=(64, 24))
    assert on_fake_gpus(ranks, run_in_order, script, SMALL[script], str(tmp_path)) == [[]] * ranks


def test_a_sweep_gives_each_trial_a_gpu_and_its_streams_are_in_order(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    on_fake_gpus(1, os.getpid)  # skips where there are no fake GPUs
    (tmp_path / "errors").mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "sweep" / "train.py"), "--images", "40", "--slots", "2", "--folder", "run"],
        env={**os.environ, **environment(2, errors=str(tmp_path / "errors"))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = [path.read_text() for path in (tmp_path / "errors").iterdir()]
    assert errors
    assert not any(errors), errors


def test_every_example_is_tried_or_has_its_reason() -> None:
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    others = {name for name in scripts if name.startswith("migrate/before/")}  # without ddp_loop
    others.add("finetune/with_accelerate.py")
    assert scripts - others == {*SMALL, *WITHOUT_GPU, "sweep/train.py"}
