"""A run folder, its page, and a client of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import WAIT_S, Served, row, served, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", [row(k) for k in range(1, 21)], status="stopped", iteration=20)


@pytest.fixture
def page(run: Path) -> Iterator[Served]:
    with served(run) as page:
        yield page


@pytest.fixture
def client(page: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.base, timeout=WAIT_S) as client:
        yield client
