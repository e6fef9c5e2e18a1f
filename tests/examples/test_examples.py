"""The examples, run as a user runs them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES
from tests.support.scripts import load, run, run_here


def by_hand_and_by_loop(shards: int | None) -> tuple[str, str]:
    example = load("by_hand")
    return example.train(False, 200, 1, shards), example.train(True, 200, 1, shards)


@pytest.mark.covers("B4")
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 3), (2, None), (2, 5), (3, None)])
def test_the_step_by_hand_gives_the_bits_of_the_loop(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    for by_hand, by_loop in on_ranks(ranks, by_hand_and_by_loop, shards):
        assert len(by_hand) == 64
        assert by_hand == by_loop


@pytest.mark.covers("D12")
def test_the_four_ways_to_aggregate_batch_norm_state_give_their_four_numbers() -> None:
    numbers = load("pooled_statistics").aggregate()
    assert {way: round(number, 10) for way, number in numbers.items()} == {
        "plain weighted mean of variances": 1.15,
        "pooled moving averages": 1.1725,
        "pooled batch statistics": 1.375,
        "the whole mini-batch": 1.375,
    }


@pytest.mark.covers("D12")
@pytest.mark.slow
def test_the_four_numbers_are_printed() -> None:
    done = run("pooled_statistics.py", folder=EXAMPLES)
    assert re.findall(r"(\d\.\d{4})$", done.stdout, re.MULTILINE) == ["1.1500", "1.1725", "1.3750", "1.3750"]


@pytest.mark.slow
@pytest.mark.covers("A1", "B1", "B4", "E2")
def test_the_digit_example_trains_on_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    folder = EXAMPLES / "digits"
    arguments = ["--epochs", "1", "--shards", "2", "--run-dir"]
    alone = run("train.py", *arguments, str(tmp_path / "alone"), folder=folder)
    assert alone.returncode == 0, alone.stderr
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *arguments]
    together = run(*torchrun, str(tmp_path / "together"), folder=folder)
    assert together.returncode == 0, together.stderr
    pattern = r"Epoch: 1, Loss: (\d\.\d+), Accuracy: (0\.\d+)\nTest accuracy: (0\.\d+|1\.0+) of 1000 images"
    found = [re.search(pattern, done.stdout) for done in (alone, together)]
    assert all(found), alone.stdout + together.stdout
    # The same shards; only float32 rounding differs, amplified over 71 steps.
    losses = [float(match[1]) for match in found if match]
    accuracies = [float(match[3]) for match in found if match]
    assert abs(losses[0] - losses[1]) < 0.01
    assert min(accuracies) > 0.9
    for name in ("alone", "together"):
        assert (tmp_path / name / "rows.jsonl").read_text().count("\n") == 71


@pytest.mark.slow
def test_the_digit_example_trains_on_real_handwriting(on_ranks: OnRanks) -> None:
    (printed,) = on_ranks(1, run_here, "digits/train.py", "--data", "handwritten", "--epochs", "5")
    accuracy = re.search(r"Test accuracy: (\d\.\d+) of 185 images", printed)
    assert accuracy is not None, printed
    assert float(accuracy[1]) > 0.9


def run_alone_and_on_two_ranks(on_ranks: OnRanks, script: str, *arguments: str, runs: Path) -> list[str]:
    """The output of an example on one rank, and on two."""
    printed = []
    for ranks, name in ((1, "alone"), (2, "together")):
        first, *others = on_ranks(ranks, run_here, script, *arguments, "--run-dir", str(runs / name))
        assert "".join(others) == ""
        printed.append(first)
    return printed


@pytest.mark.slow
@pytest.mark.covers("D11")
def test_the_language_model_learns_the_same_in_one_process_and_on_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--sentences", "480", "--shards", "2"]
    alone, together = run_alone_and_on_two_ranks(on_ranks, "tokens.py", *arguments, runs=tmp_path)
    assert "480 training and 200 test sentences of 22 to" in alone
    assert "1 ranks on " in alone
    assert "2 ranks on " in together
    found = [re.findall(r"^Test perplexity: (\d+\.\d+)$", text, re.MULTILINE) for text in (alone, together)]
    assert [len(lines) for lines in found] == [3, 3], alone + together
    perplexities = [[float(number) for number in lines] for lines in found]
    for before, between, after in perplexities:
        assert before > 20  # of 30 letters
        assert before > between > after
        assert after < 3
    # The same shards; only float32 rounding differs, amplified over 30 steps.
    assert all(abs(one - other) < 0.01 * one for one, other in zip(*perplexities, strict=True))
    last = re.findall(r"^Epoch: 2, Loss: (\d+\.\d+)$", alone + together, re.MULTILINE)
    assert len(last) == 2
    for loss in map(float, last):  # the mean over the epoch's tokens, between the losses before and after the epoch
        assert math.log(perplexities[0][2]) < loss < math.log(perplexities[0][1])
    assert (tmp_path / "together" / "rows.jsonl").read_text().count("\n") == 2 * 15


@pytest.mark.slow
@pytest.mark.covers("B10")
def test_the_generator_learns_the_same_in_one_process_and_on_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    arguments = ["--epochs", "10", "--points", "4000", "--shards", "2"]
    printed = run_alone_and_on_two_ranks(on_ranks, "gan.py", *arguments, runs=tmp_path)
    pattern = r"^Epoch: (\d+), Energy distance: (-?\d+\.\d+), Clusters: (\d) of 8, Near one: (\d\.\d+)$"
    found = [re.findall(pattern, text, re.MULTILINE) for text in printed]
    assert [[line[0] for line in lines] for lines in found] == [["0", "10"]] * 2, "".join(printed)
    for before, after in found:
        assert float(before[1]) > 1  # all points near the centre of the ring
        assert float(after[1]) < 0.4
    # The same shards and noise; two competing networks amplify rounding more than one.
    assert abs(float(found[0][1][1]) - float(found[1][1][1])) < 0.1
    assert (tmp_path / "together" / "rows.jsonl").read_text().count("\n") == 10 * 16


@pytest.mark.slow
@pytest.mark.covers("H7")
@pytest.mark.parametrize(
    ("script", "arguments", "resumed"),
    [
        ("ppo/train.py", ["--updates", "6", "--environments", "10", "--shards", "4"], ["--updates", "3"]),
        ("diffusion/train.py", ["--epochs", "2", "--points", "1000", "--shards", "4"], ["--epochs", "1"]),
    ],
)
def test_weights_have_the_same_bits_on_any_ranks_and_after_a_resume(
    on_ranks: OnRanks, tmp_path: Path, script: str, arguments: list[str], resumed: list[str]
) -> None:
    """Environments of a shard, averaged weights, and the noise that both draw."""

    def train(ranks: int, folder: str, *more: str) -> dict[str, torch.Tensor]:
        words = ["--device", "cpu", *arguments, "--run-dir", str(tmp_path / folder), *more]
        on_ranks(ranks, run_here, script, *words)
        [*_, newest] = sorted((tmp_path / folder / "checkpoints").iterdir())
        return load_file(newest / "tensors.safetensors")

    alone = train(1, "alone")
    train(3, "resumed", *resumed)
    found = train(2, "resumed")
    assert found.keys() == alone.keys()
    assert all(found[name].equal(alone[name]) for name in alone)


@pytest.mark.slow
def test_the_pole_falls_less_often_and_the_spirals_come_nearer(on_ranks: OnRanks) -> None:
    (played,) = on_ranks(1, run_here, "ppo/train.py", "--updates", "20", "--device", "cpu")
    falls = [float(number) for number in re.findall(r"Falls in 1,000 steps: (\d+\.\d)", played)]
    assert len(falls) == 2, played
    assert falls[-1] < 15  # 45 by chance
    (made,) = on_ranks(1, run_here, "diffusion/train.py", "--epochs", "20", "--device", "cpu")
    near = [float(number) for number in re.findall(r"averaged weights: (\d+\.\d+)", made)]
    assert len(near) == 2, made
    assert near[-1] < 0.007  # 0.011 for a cloud of the same spread
