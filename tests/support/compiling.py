"""Compiling in a worker that others use after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def compiling() -> Iterator[None]:
    """As in a process of its own, which has compiled nothing; leaves no process, thread or variable of the compiler."""
    import torch._dynamo  # here, since each process that collects the tests would wait 3 s for it
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1), patch.dict(os.environ):
        yield
    torch._dynamo.reset()
    tqdm: Any = sys.modules.get("tqdm")
    if tqdm is not None and tqdm.tqdm.monitor is not None:
        tqdm.tqdm.monitor.exit()
        tqdm.tqdm.monitor = None
