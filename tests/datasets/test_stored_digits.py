"""The digit example on images in files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_loop.datasets import LabelledImages
from ddp_loop.networks import digit_classifier
from tests.support.files import numbered_folder, write_mnist
from tests.support.harness import FAULT_S, OnRanks, caught
from tests.support.paths import EXAMPLES
from tests.support.scripts import load, run


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Run the digit example in this process, for one epoch on data in a folder."""

    def train(data: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(data), "--epochs", "1", "--device", "cpu"])
        load("digits/train").main()

    return train


@pytest.mark.covers("A2")
def test_the_digit_example_trains_on_a_folder_of_images(
    example: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example(numbered_folder(tmp_path, 20, 20, 20, side=9))
    out = capsys.readouterr().out
    assert "54 training and 6 test images" in out
    assert re.search(r"Epoch: 1, Loss: \d.*\nTest accuracy: [01]\.\d+ of 6 images", out)


@pytest.mark.covers("A5")
def test_the_digit_example_trains_on_idx_files_and_tests_on_their_own_test_set(
    example: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example(write_mnist(tmp_path, largest=11, packed=True))
    out = capsys.readouterr().out
    assert "30 training and 7 test images" in out
    assert re.search(r"Epoch: 1, Loss: \d.*\nTest accuracy: [01]\.\d+ of 7 images", out)


def end_of_example(data: str) -> tuple[str, str, float]:
    arguments, sys.argv = sys.argv, ["train.py", "--data", data, "--epochs", "1", "--device", "cpu"]
    try:
        return caught(load("digits/train").main)
    finally:
        sys.argv = arguments


@pytest.mark.covers("A2", "A5", "D10")
def test_the_digit_example_refuses_bad_data_with_one_line_on_every_rank(tmp_path: Path, on_ranks: OnRanks) -> None:
    write_mnist(tmp_path / "small", side=20)
    for data, message in [
        (tmp_path / "mnsit", f"Got {tmp_path}/mnsit (No such file or directory). Check its name"),
        (tmp_path / "small", f"needs images of 28x28 pixels. Got 20x20 in {tmp_path}/small. Resize them"),
    ]:
        for kind, text, took_s in on_ranks(2, end_of_example, str(data)):
            assert kind == "SystemExit"
            assert text.startswith("--data must be digits, handwritten or a folder. ")
            assert message in text
            assert "\n" not in text
            assert took_s < FAULT_S


@pytest.mark.covers("A2")
@pytest.mark.slow
def test_the_digit_example_ends_with_one_line_and_an_exit_code() -> None:
    done = run("train.py", "--data", "mnsit", folder=EXAMPLES / "digits")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Got mnsit (No such file or directory)" in done.stderr


@pytest.mark.covers("A2")
def test_labelled_images_and_the_digit_network_take_other_numbers_of_channels_and_classes() -> None:
    colour = LabelledImages(torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert colour.tensors[0].shape == (2, 3, 4, 5)
    assert [part.images.shape[1] for part in colour.split(0.5)] == [3, 3]
    assert digit_classifier(classes=3)(torch.zeros(2, 1, 28, 28)).shape == (2, 3)
