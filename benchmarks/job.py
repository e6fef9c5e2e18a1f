"""The whole digit job, 20 epochs on two ranks: ours with faster kernels over the script with DDP, time and accuracy.

    python -m benchmarks job [WAY ...]

Each run is the script as a user starts it, under torchrun in fresh processes, timed from there to its end. The seed
gives the start weights and the order. All ways train with one seed before the next; every other seed goes through them
in the reverse order. A run takes minutes, so each finished one is kept in build/job/, by commit. A call begins no run
that would end after CALL_S seconds; call again until it says that nothing is left.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.jobs import write_material
from benchmarks.measuring import print_table
from benchmarks.scripts import ROOT, run_script

WAYS = {
    "DDP": ("DDP",),
    "ours": ("ours",),
    "ours, channels_last": ("ours", "--channels-last"),
    "ours, bf16, channels_last": ("ours", "--bf16", "--channels-last"),
}
BASE = "DDP"
SEEDS = range(5)
EPOCHS = 20
CALL_S = 540.0
Run = dict[str, float]  # "seconds" and "accuracy"


def folder() -> Path:
    """Where the runs of this commit are kept."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ROOT / "build" / "job" / (done.stdout.strip() or "no-commit")


def train(way: str, seed: int) -> Run:
    """Run the job's script once."""
    with tempfile.TemporaryDirectory() as scratch:
        material = Path(scratch) / "material"
        write_material("digits", material, seed)
        began = time.perf_counter()
        script, *options = WAYS[way]
        given = ["--material", str(material), "--seed", str(seed), "--epochs", str(EPOCHS)]
        output = run_script(script, *options, *given)
        seconds = time.perf_counter() - began
    found = re.search(r"^test: .*'accuracy': ([\d.]+)", output, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"The script must print the accuracy on the test data. It printed:\n{output}")
    return {"seconds": seconds, "accuracy": float(found[1])}


def complete(
    ways: Sequence[str], kept: Path, run: Callable[[str, int], Run] = train, clock: Callable[[], float] = time.monotonic
) -> dict[tuple[str, int], Run]:
    """The kept runs, and as many of the others as end within CALL_S seconds; at least one."""
    began, longest, runs = clock(), 0.0, {}
    for seed in SEEDS:
        for way in ways if seed % 2 == 0 else ways[::-1]:
            file = kept / f"{list(WAYS).index(way)}-{seed}.json"
            if file.exists():
                runs[way, seed] = json.loads(file.read_text())
            elif clock() - began + longest < CALL_S:
                before = clock()
                runs[way, seed] = run(way, seed)
                longest = max(longest, clock() - before)
                kept.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(runs[way, seed]))
    return runs


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; NaN for fewer than two values."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def rows(ways: Iterable[str], runs: dict[tuple[str, int], Run]) -> Iterator[tuple[object, ...]]:
    """A row for each way; ratios and differences to DDP are over the seeds that both have."""
    for way in ways:
        mine = {seed: runs[way, seed] for seed in SEEDS if (way, seed) in runs}
        if not mine:
            continue
        accuracies = [run["accuracy"] for run in mine.values()]
        both = [(run, runs[BASE, seed]) for seed, run in mine.items() if (BASE, seed) in runs]
        ratios = [one["seconds"] / other["seconds"] for one, other in both]
        mean, error = mean_and_error(accuracies)
        gap, gap_error = mean_and_error([one["accuracy"] - other["accuracy"] for one, other in both] or [math.nan])
        yield (
            way,
            len(mine),
            f"{statistics.median(run['seconds'] for run in mine.values()):.0f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else "",
            f"{mean:.4f} +- {error:.4f}",
            f"{min(accuracies):.4f} to {max(accuracies):.4f}",
            f"{gap:+.4f} +- {gap_error:.4f}",
        )


def report(names: Iterable[str]) -> None:
    """Print the table of the runs so far, after some more of them; the base is always among them."""
    ways = [way for way in WAYS if way == BASE or way in (list(names) or WAYS)]
    runs = complete(ways, folder())
    head = "way | seeds | seconds | time over DDP: median (range) | accuracy: mean | range | accuracy over DDP"
    print_table(head, rows(ways, runs))
    left = len(ways) * len(SEEDS) - len(runs)
    print(f"{left} runs are left: call again." if left else "No run is left. Accuracies are means and standard errors.")
