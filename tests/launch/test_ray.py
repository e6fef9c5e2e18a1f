"""Scripts under Ray Train, on a local Ray with two workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.harness import until
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.covers("J6")]

RAY_S = 900.0  # to end a hang: 60 s on two idle cores, eight times as much on a machine that is slow and busy
# The update is by hand: a process's first optimizer of torch imports its compiler, half of what a rank's start takes.
SCRIPT = """
import os, sys
import torch
from safetensors.torch import save_file
import ddp_loop as dl

folder, dies = sys.argv[1:]
world = dl.join_world(device="cpu")
model = torch.nn.Linear(4, 1)
data = torch.randn(37, 4, generator=torch.Generator().manual_seed(1))
batches = dl.Batches(data, 8, world, shards=4)
for step in dl.Loop(batches, 2, state={"model": model}, run_dir=f"{folder}/run", save_every=1, progress=False):
    for rows in step:
        step.backward(model(rows).square().mean())
    step.fold()
    with torch.no_grad():
        for one in model.parameters():
            one -= 0.1 * one.grad
    if step.iteration == 4 and world.rank == 1 and dies == "dies" and not os.path.exists(f"{folder}/died"):
        open(f"{folder}/died", "w").close()
        os.kill(os.getpid(), 9)
if world.rank == 0:
    save_file(model.state_dict(), f"{folder}/weights")
    with open(f"{folder}/facts", "w") as file:
        file.write(f"{world.size} {world.why_gloo!r}")
"""


TRIAL = """
import os
import time
import ddp_loop as dl

def train(place, run_dir):
    folder = os.path.dirname(os.path.abspath(__file__))
    open(f"{folder}/begun-{place}", "w").close()
    while not all(os.path.exists(f"{folder}/begun-{one}") for one in (0, 1)):  # one slot alone would wait for ever
        time.sleep(0.01)
    return place
"""
SWEEP = """
function = "train.py:train"
folder = "runs/file"

[space]
place = [0, 1, 2]
"""


def start(*words: str, folder: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    variables |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # the paths of Ray's sockets
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**variables, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=RAY_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_that_dies_is_started_again_and_the_bits_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("alone", "under_ray"):
        (tmp_path / name).mkdir()
    start("train.py", str(tmp_path / "alone"), "lives", folder=tmp_path)
    script = ["train.py", str(tmp_path / "under_ray"), "dies"]
    start(str(ROOT / "launch" / "ray_train.py"), "--workers=2", "--restarts=1", *script, folder=tmp_path)
    assert (tmp_path / "under_ray" / "died").exists()
    assert (tmp_path / "under_ray" / "facts").read_text() == "2 ''"  # sums in shared memory
    assert (tmp_path / "under_ray" / "run" / "starts.jsonl").read_text().count("\n") == 2
    one, other = (load_file(tmp_path / name / "weights") for name in ("alone", "under_ray"))
    assert all(one[name].equal(other[name]) for name in one)


def test_tasks_of_ray_add_slots_to_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRIAL)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
    [driver] = [text for text in snippets if "ray.remote" in text]
    (tmp_path / "driver.py").write_text(driver)
    command = [sys.executable, "-m", "ddp_loop", "sweep", "sweep.toml", "--slots", "1"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as sweep:
        try:
            begun = tmp_path / "begun-0"
            until(lambda: begun.exists() or sweep.poll() is not None, "the first trial has begun", RAY_S)
            start("driver.py", folder=tmp_path)
            assert sweep.wait(RAY_S) == 0
        finally:
            sweep.kill()
    trials = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "file").glob("trials/*/trial.json")]
    assert [trial["status"] for trial in trials] == ["done"] * 3


def test_a_missing_ray_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('No module named ray')")
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "ray_train.py"), "train.py"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=RAY_S,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith("Install it: pip install 'ddp_loop[ray]'.")
