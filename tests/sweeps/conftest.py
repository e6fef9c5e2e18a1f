"""Servers for sweeps, and warm processes for quick sweeps: a new process takes seconds to import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.sweeps import running
from tests.support.postgres import PostgresServer, running_postgres

PLACES, RANKS = 2, 2


@pytest.fixture(scope="session")
def warm_pools(pool: Pool) -> Iterator[list[Pool]]:
    """Pools of two ranks for two places."""
    pools = [Pool(RANKS) for _ in range(PLACES)]
    for number, one in enumerate(pools):
        one.run(os.getpid, RANKS - number)  # the second one is used for single ranks
    yield pools
    for one in pools:
        one.close()


@pytest.fixture
def warm(warm_pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps of this process run on the warm pools; for tests that kill no rank."""
    free: SimpleQueue[Pool] = SimpleQueue()
    for one in warm_pools:
        free.put(one)

    class Lent:
        def __init__(self, size: int, environment: Mapping[str, str]) -> None:
            self._pool = warm_pools[0] if size == RANKS else free.get_nowait()

        @property
        def process_ids(self) -> tuple[int, ...]:
            return self._pool.process_ids

        def run(self, function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
            return self._pool.run(function, ranks, *arguments)

        def close(self) -> None:
            free.put(self._pool)

    monkeypatch.setattr(running, "Pool", Lent)
    monkeypatch.setattr(running, "_CHECK_S", 0.0)  # so that requests take effect at once


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; skips where there is none."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of a new database on a PostgreSQL server."""
    return postgres.new_database()
