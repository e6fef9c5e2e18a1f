"""`make matrix`: which Pythons and torches are tried, and with which packages."""

import argparse
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests import matrix
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_oldest_pair_is_the_oldest_that_the_package_allows() -> None:
    oldest = matrix.PAIRS[0]
    assert PROJECT["requires-python"] == f">={oldest.python}"
    torch = next(one for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert oldest.torch.startswith(torch.removeprefix("torch>="))


def test_the_readme_names_the_pairs() -> None:
    text = (ROOT / "README.md").read_text()
    pattern = r"Python (3\.\d+) and (3\.\d+) with torch (2\.\d+).*?Python (3\.\d+) with torch (2\.\d+)"
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None
    assert (found[1], found[2], found[4]) == tuple(pair.python for pair in matrix.PAIRS)
    assert all(pair.torch.startswith(found[3]) for pair in matrix.PAIRS[:2])


def test_a_pair_gets_all_packages_but_torch_and_what_torch_limits() -> None:
    text = "# a line\nsetuptools==84.2.1\ntorch==2.13.0\nnumpy==2.4.6  # fast\ntorchmetrics==1.9.0\n"
    assert matrix.requirements(text) == ["numpy==2.4.6", "torchmetrics==1.9.0", "setuptools>=77"]


def test_a_python_is_found_by_its_version() -> None:
    assert matrix.find_python(f"{sys.version_info.major}.{sys.version_info.minor}") is not None
    assert matrix.find_python("3.99") is None


def test_a_python_that_is_not_there_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--pairs", "3.99:2.11.0"]) == 0
    assert capsys.readouterr().out == "python3.99-torch-2.11.0: skipped, this machine has no Python 3.99\n"


def test_a_shim_that_fails_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.find_python("3.98") is None


@pytest.mark.parametrize("text", ["3.11", "3.11:", ":2.11"])
def test_a_pair_needs_both_versions(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be PYTHON:TORCH"):
        matrix.pair_of(text)
