"""Scripts for one device, DDP, Accelerate and Fabric, and the same scripts with ddp_loop: `docs/migrate.md`.

With the whole data as one mini-batch the order of the samples plays no part, so that all of them must give the
same test loss up to float32's rounding: sums of 1,600 terms, four times fed back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import subprocess
import tempfile
from unittest import mock

import pytest
import torch.distributed as dist

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.paths import DOCS, ROOT
from tests.support.scripts import run_here

SCRIPTS = "plain", "ddp", "accelerated", "fabric"
SHOWN = "ddp", "accelerated"  # in the document; the others change alike
TRAINING, TEST = 1600, 197  # images
WHOLE = "--batch-size", str(TRAINING), "--epochs", "4"
FABRIC = {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_NUM_NODES": "1"}  # as `fabric run` does
BOUND = 1e-4  # losses are around 2, float32 has 1e-7 of them

Result = tuple[float, float]  # loss and accuracy on the test images after an epoch


def path_of(side: str, script: str) -> str:
    return f"examples/migrate/{side}/{script}.py"


def difference(script: str, *options: str) -> str:
    """The difference between both versions of a script, by git."""
    command = ["git", "diff", "--no-index", *options, path_of("before", script), path_of("after", script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout


def run_script(side: str, script: str, *arguments: str) -> str:
    """The output of a script on this rank."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = run_here(f"migrate/{side}/{script}.py", *arguments)
        assert set(os.listdir()) <= {"runs"}, "an example writes below its run folder only"
    return printed


def results_in(printed: str) -> list[Result]:
    found = re.findall(r"^Test loss and accuracy: \[(\d+\.\d+), (\d\.\d+)\]$", printed, re.MULTILINE)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


@functools.cache
def results_of_peer(script: str) -> tuple[list[Result], list[Result]]:
    """The results of a script without ddp_loop, with the whole data as one mini-batch and as it is.

    On 2 new ranks, which no other script uses: libraries keep global state.
    """
    with mock.patch.dict(os.environ, FABRIC if script == "fabric" else {}), dl.Pool(2) as pool:
        whole, usual = (pool.run(run_peer, 2, script, *words) for words in (WHOLE, ()))
    return results_in("".join(whole)), results_in("".join(usual))


def run_peer(script: str, *arguments: str) -> str:
    """The output of a script without ddp_loop on this rank, which then has no group and no state of Accelerate's."""
    printed = run_script("before", script, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    if script == "accelerated":
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    return printed


@pytest.fixture(scope="module")
def on_one_device() -> list[Result]:
    """The reference: the results of the plain script."""
    return results_in(run_script("before", "plain", *WHOLE))


def distance(one: list[Result], other: list[Result]) -> float:
    assert len(one) == len(other) == 4
    return max(abs(a - b) for results in zip(one, other, strict=True) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_most_eleven_lines_change(script: str) -> None:
    added, deleted, _ = difference(script, "--numstat").split(maxsplit=2)
    assert 0 < int(added) <= 11
    assert 0 < int(deleted) <= 11


@pytest.mark.parametrize("script", SHOWN)
def test_the_document_shows_this_difference(script: str) -> None:
    changes = difference(script, "--unified=0").split("\n@@", 1)[1]
    lines = [line for line in changes.splitlines() if line.startswith(("+", "-"))]
    blocks = re.findall(r"```diff\n(.*?)```", (DOCS / "migrate.md").read_text(), re.DOTALL)
    shown = [[line for line in block.splitlines() if line.startswith(("+", "-"))] for block in blocks]
    assert lines in shown


def test_the_document_names_each_script() -> None:
    text = (DOCS / "migrate.md").read_text()
    assert [script for script in SCRIPTS if f"`{script}.py`" not in text] == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.slow
def test_the_ddp_loop_script_prints_the_numbers_of_the_plain_one(
    script: str, ranks: int, on_one_device: list[Result], on_ranks: OnRanks
) -> None:
    first, *others = on_ranks(ranks, run_script, "after", script, *WHOLE)
    assert distance(results_in(first), on_one_device) < BOUND
    assert "".join(others) == ""


@pytest.mark.slow
def test_accelerate_gives_the_same_numbers(on_one_device: list[Result]) -> None:
    assert distance(results_of_peer("accelerated")[0], on_one_device) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp", "fabric"])
def test_ddp_and_fabric_train_the_same_and_test_one_image_twice(script: str, on_one_device: list[Result]) -> None:
    # The training is the same, so the losses' sums differ by that of the image which fills the last rank up. DDP's
    # script divides by the images it counts, Fabric's by those there are.
    divisor = TEST + 1 if script == "ddp" else TEST
    peers, _ = results_of_peer(script)
    assert len(peers) == 4
    again = [divisor * peer[0] - TEST * truth[0] for peer, truth in zip(peers, on_one_device, strict=True)]
    assert all(0.01 < loss < 10 for loss in again)
    hits = [divisor * peer[1] - TEST * truth[1] for peer, truth in zip(peers, on_one_device, strict=True)]
    assert all(min(abs(hit), abs(hit - 1)) < 1e-3 for hit in hits)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_both_sides_learn_equally_well_with_mini_batches(script: str, on_ranks: OnRanks) -> None:
    before = results_in(run_script("before", script)) if script == "plain" else results_of_peer(script)[1]
    after = results_in(on_ranks(2, run_script, "after", script)[0])
    assert len(before) == len(after) == 10
    assert min(before[-1][1], after[-1][1]) > 0.88
    assert abs(before[-1][1] - after[-1][1]) < 0.05  # another order of the images


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ddp_loop_script_needs_no_other_library(script: str) -> None:
    text = (ROOT / path_of("after", script)).read_text()
    assert not re.search(r"\b(accelerat|fabric|DistributedDataParallel)", text)
