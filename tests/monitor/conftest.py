"""A run folder, its page, a client of the page, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.browsing import CHROMIUM, OPTIONS, WIDE, Visit
from tests.support.serving import Served, served, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", 20, status="stopped")


@pytest.fixture
def page(run: Path) -> Iterator[Served]:
    with served(run) as page:
        yield page


@pytest.fixture
def client(page: Served) -> Iterator[httpx.Client]:
    with page.client() as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a file."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Any]:
    """Open a page: `visit(page, size, scheme)`; it must make no outside request and log no error."""
    visits: list[Visit] = []

    def go(page: Served, size: tuple[int, int] = WIDE, scheme: str = "light") -> Visit:
        visits.append(Visit(browser, size, scheme))
        page.visitors.callback(visits[-1].context.close)
        return visits[-1].open(page)

    yield go
    assert [one.outward for one in visits] == [[]] * len(visits)
    assert [one.complaints for one in visits] == [[]] * len(visits)


@pytest.fixture
def show(visit: Any) -> Iterator[Any]:
    """Serve the page of a folder until the test ends, and open it: `show(folder, size, scheme)`."""
    with ExitStack() as pages:
        yield lambda folder, *how, **more: visit(pages.enter_context(served(folder)), *how, **more)
