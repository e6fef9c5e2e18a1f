"""The time of `python -m ddp_loop run` over that of torchrun, from the command to its end, for a script of one line.

    python -m benchmarks launching [PART ...]

Each launch is a process of its own, in the order A B B A. "nothing" is a script that ends at once, so that all of the
time is the launcher's; "a world" joins a world and leaves it. The last row of each is torchrun over itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measuring import LEAST_PAIRS, RANKS, Ratio, print_table

ROOT = Path(__file__).parents[1]
PARTS = {"nothing": "", "a world": "import ddp_loop\nwith ddp_loop.join_world(device='cpu'):\n    pass\n"}
RUN = ("-m", "ddp_loop", "run", f"--ranks={RANKS}")
TORCHRUN = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}")


def seconds_of(launcher: Sequence[str], script: Path) -> float:
    """How long a launch takes.

    Raises:
        CalledProcessError: it failed.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - began


def compare(one: Sequence[str], other: Sequence[str], script: Path, pairs: int = LEAST_PAIRS) -> Ratio:
    """The ratio of two launchers' times, in turn."""
    ones, others = [], []
    for number in range(pairs):
        order = (one, other) if number % 2 == 0 else (other, one)
        first, second = (seconds_of(launcher, script) for launcher in order)
        ones.append(first if number % 2 == 0 else second)
        others.append(second if number % 2 == 0 else first)
    return Ratio.of(ones, others)


def rows(parts: Sequence[str], pairs: int = LEAST_PAIRS) -> Iterator[tuple[str, ...]]:
    """The rows of the report's table."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        for part in parts or PARTS:
            script.write_text(PARTS[part])
            for what, launcher in (("run / torchrun", RUN), ("torchrun / torchrun", TORCHRUN)):
                yield part, what, *compare(launcher, TORCHRUN, script, pairs).columns()


def report(parts: Sequence[str]) -> None:
    """Print the table."""
    print_table("script | what | time: median | quartiles | ms | pairs", rows(parts), words=2)
