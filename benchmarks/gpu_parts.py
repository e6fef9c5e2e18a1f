"""The parts of `python -m benchmarks gpu`, each in a process of its own; its tables come row by row.

    python -m benchmarks.gpu_parts GPUS PART FILE

GPUS is how many the machine has; with 0 the part is rehearsed. Its tables are appended to FILE.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

import ddp_loop as dl
from benchmarks import order, steps, surface
from benchmarks.gpu_machine import Machine, Sheet, answering
from benchmarks.gpu_reads import report_reads
from benchmarks.gpu_worlds import report_worlds
from benchmarks.measuring import Ratio, Step, compare, joined, synchronized
from examples.surface.train import read_arguments, train

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = ("32-wide MLP", "digit network", "ResNet-18", "6-layer transformer")
PAIR_S, NOISE_S = 6.0, 3.0  # for a row, and for one of a way against itself
STEPS_SCALE = 0.6  # of the seconds that `benchmarks.steps` takes for a row
RATIO = "network | what | median | quartiles | ms | pairs"


# -- tests -------------------------------------------------------------------------------------------------


class TestCount:
    """A plugin of pytest that counts results, and writes a line for each failure as it comes."""

    __test__ = False

    def __init__(self, sheet: Sheet) -> None:
        self._sheet, self.results = sheet, Counter[str]()
        self.reasons = Counter[str]()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed(report)
        elif report.skipped:
            self.results["skipped"] += 1
            self.reasons[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
        elif report.when == "call":
            self.results["passed"] += 1

    def _failed(self, report: Any) -> None:
        self.results["failed"] += 1
        crash = getattr(report.longrepr, "reprcrash", None)
        first = (str(crash.message if crash else report.longrepr).strip() or "no message").splitlines()[0]
        self._sheet.line(f"* `{report.nodeid}` failed: {first}")


def gpu_files() -> list[Path]:
    """The files with tests marked for GPUs; others need plugins or extras that a machine may lack."""
    return [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]


def report_tests(machine: Machine, sheet: Sheet) -> int:
    """Run the tests marked for GPUs, those of determinism first: cuBLAS reads its variable once in a process."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what is installed may differ
    files = sorted(gpu_files(), key=lambda path: (path.parent.name != "determinism", path))
    count = TestCount(sheet)
    words = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--deselect", "tests/project", *map(str, files)]
    code = pytest.main(words, plugins=[count])
    results = [f"{number} {what}" for what, number in sorted(count.results.items())]
    sheet.line(f"\n{', '.join(results) or 'No test ran'}.")
    for reason, number in count.reasons.items():
        sheet.line(f"* {number} skipped: {reason}")
    return int(code)


# -- the step ----------------------------------------------------------------------------------------------


def networks(machine: Machine) -> list[str]:
    """The networks to measure."""
    return [name for name in steps.JOBS if name in (NETWORKS if machine.gpus else NETWORKS[:1])]


def report_steps(machine: Machine, sheet: Sheet) -> int:
    """On one rank; on all GPUs where there are several, or on two rehearsed ranks."""
    sheet.head(RATIO, words=2)
    scale = STEPS_SCALE if machine.gpus else 0.0
    for ranks in dict.fromkeys((1, machine.gpus or 2)):
        with dl.Pool(ranks) as pool:
            for name in networks(machine):
                ratios = machine.run(pool, ranks, steps.measure, name, None, machine.device, scale)[0]
                for what, ratio in ratios.items():
                    sheet.row(name, f"{ranks} {'ranks' if ranks > 1 else 'rank'}: {what}", *ratio.columns())
    return 0


# -- the surface -------------------------------------------------------------------------------------------


def step_ms(device: str, side: int, threads: int, steps_: int) -> float:
    """Milliseconds of a step of the example."""
    words = ["--side", str(side), "--steps", str(steps_), "--threads", str(threads)]
    return 1e3 * train(device, read_arguments(words)).step_s


def report_surface(machine: Machine, sheet: Sheet) -> int:
    """Both devices at each size; then eager steps over captured ones, of a plain loop and of `Loop`."""
    late = machine.gpus == 0
    sides, many, few = ((10, 32), 12, 12) if late else (surface.SIDES, 300, 20)
    threads = torch.get_num_threads()
    every = dict.fromkeys((1, threads))
    columns = [f"CPU, {n} thread{'s' * (n > 1)}: ms a step" for n in every]
    ratios = [f"CPU, {n} / GPU" for n in every]
    sheet.head(f"points | {' | '.join([*columns, 'GPU: ms a step', *ratios])}", words=0)
    for side in sides:
        number = few if side > surface.SIDE else many
        cpu = [step_ms("cpu", side, n, number) for n in every]
        gpu = answering(late, step_ms, machine.device, side, 1, number)
        shown = [f"{value:.3f}" for value in (*cpu, gpu)]
        sheet.row(f"{side**2:,}", *shown, *(f"{value / gpu:.2f}" for value in cpu))
    return 0


# -- determinism -------------------------------------------------------------------------------------------


def measure_determinism(name: str, device: str, scale: float) -> dict[str, Ratio]:
    """Steps inside a deterministic block over steps outside, and the noise."""
    job = order.JOBS[name]
    with ExitStack() as ending, joined(None, device) as world:
        inside, outside, again = (order.loop_step(job, world, ending) for _ in range(3))

        def several(step: Step, *, is_deterministic: bool) -> Step:
            def block() -> None:
                with dl.deterministic(seed=None) if is_deterministic else nullcontext():
                    for _ in range(job.steps):
                        step()

            return block

        one, other = several(inside, is_deterministic=True), several(outside, is_deterministic=False)
        noise, wait = several(again, is_deterministic=False), synchronized(world.device)
        where = str(world.device) if device == "gpu" else "CPU, 1 thread"
        return {
            f"{where}: deterministic / not": compare(
                one, other, pairs=job.pairs, steps=1, within_s=scale * PAIR_S, wait=wait
            ),
            f"{where}: not / not": compare(noise, other, pairs=job.pairs, steps=1, within_s=scale * NOISE_S, wait=wait),
        }


def report_determinism(machine: Machine, sheet: Sheet) -> int:
    sheet.head(RATIO, words=2)
    name, scale = ("digit network", 1.0) if machine.gpus else ("32-wide MLP", 0.0)
    with dl.Pool(1) as pool:
        for device in dict.fromkeys((machine.device, "cpu")):
            for what, ratio in machine.run(pool, 1, measure_determinism, name, device, scale)[0].items():
                sheet.row(name, what, *ratio.columns())
    return 0


PARTS: dict[str, Callable[[Machine, Sheet], int]] = {
    "tests": report_tests,
    "worlds": report_worlds,
    "steps": report_steps,
    "reads": report_reads,
    "surface": report_surface,
    "determinism": report_determinism,
}


def main(words: Sequence[str]) -> None:
    gpus, part, file = words
    raise SystemExit(min(1, PARTS[part](Machine(int(gpus)), Sheet(Path(file)))))


if __name__ == "__main__":
    main(sys.argv[1:])
