"""The two ways in which the ranks of one machine exchange values; a test marked `both_exchanges` runs over each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

EXCHANGE = "DDP_LOOP_EXCHANGE"  # which the ranks of a pool and of torchrun have too
MEMORY, GLOO = EXCHANGES = ("memory", "gloo")


def add_exchange(parser: argparse.ArgumentParser) -> None:
    """The option `--exchange` of a campaign; `use_exchange` follows it."""
    parser.add_argument("--exchange", choices=EXCHANGES, default=MEMORY)


def use_exchange(said: argparse.Namespace) -> None:
    """Have all ranks that this process starts exchange values so."""
    os.environ[EXCHANGE] = said.exchange


@contextmanager
def exchange_of(name: str) -> Iterator[None]:
    """Have the ranks that are started or given a task here exchange values so."""
    before = os.environ.get(EXCHANGE)
    os.environ[EXCHANGE] = name
    try:
        yield
    finally:
        del os.environ[EXCHANGE]
        if before is not None:
            os.environ[EXCHANGE] = before
