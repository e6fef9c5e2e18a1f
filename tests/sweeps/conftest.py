"""The servers that sweeps are tried on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer, running_postgres
from tests.support.slurm import Slurm, running_slurm


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; skips where there is none."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of a new database on a PostgreSQL server."""
    return postgres.new_database()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm on this machine; skips where it is not installed."""
    with running_slurm() as slurm:
        yield slurm
