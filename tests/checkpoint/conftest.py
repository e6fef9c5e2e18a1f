"""A run of four scored checkpoints, whose weights are taken out of its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.trained_runs import State, train_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    folder = tmp_path_factory.mktemp("weights") / "run"
    return folder, train_run(folder)


@pytest.fixture
def run(trained: tuple[Path, list[State]], tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def kept(trained: tuple[Path, list[State]]) -> list[State]:
    """The state of its model after each epoch."""
    return trained[1]
