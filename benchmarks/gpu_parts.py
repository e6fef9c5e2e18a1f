"""The parts of `python -m benchmarks gpu`, each in a process of its own; its tables come row by row.

    python -m benchmarks.gpu_parts GPUS measure|rehearse PART FILE

GPUS is how many the machine has. In a rehearsal they are fakes, see `tests.fake_cuda`. The tables are appended to FILE.
The exit code is 1 if a line is not as it must be; FILE names it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

import ddp_loop as dl
from benchmarks import order, steps
from benchmarks.gpu_endings import report_endings
from benchmarks.gpu_machine import Machine, Sheet, count_operations, wrong_lines
from benchmarks.gpu_memory import report_memory
from benchmarks.gpu_reads import report_reads
from benchmarks.gpu_saves import report_saves
from benchmarks.gpu_worlds import report_worlds
from benchmarks.measuring import Ratio, Step, compare, joined, synchronized
from examples.surface.train import read_arguments, train

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = ("32-wide MLP", "30 batch norms of 256", "ResNet-18", "6-layer transformer")
NORMED = "30 batch norms of 256"
PAIR_S, NOISE_S, BUCKET_S = 2.0, 1.0, 1.0  # for a row, for one of a way against itself, and for one of buckets
STEPS_SCALE = 0.4  # of the seconds that `benchmarks.steps` takes for a row
SIDES, LARGE = (10, 100, 1000), 200  # of the surface; above LARGE it makes few steps
BUCKETS_MIB = (1, 8, 25, 64)
MOST_OPERATIONS = 1.12  # times the plain loop's, on a GPU, in a step with batch norm
NOT_ON_FAKES = {
    "tests/determinism/test_deterministic.py::test_a_block_is_refused_after_nccl_was_started": "NCCL's timeout",
    "tests/distributed/test_devices.py::test_the_gpus_that_are_not_chosen_get_no_context": "the driver's library",
    "tests/examples/test_surface.py::test_both_devices_start_from_the_same_weights": "a warning of resized outputs",
    "tests/examples/test_surface_benchmark.py::test_the_gpu_is_measured_at_every_size": "a warning of resized outputs",
}
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
        self._sheet.judge(f"`{report.nodeid}`", first)


def gpu_files() -> list[Path]:
    """The files with tests marked for GPUs; others need plugins or extras that a machine may lack."""
    return [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]


def report_tests(machine: Machine, sheet: Sheet) -> None:
    """Run the tests marked for GPUs, those of determinism first: cuBLAS reads its variable once in a process.

    Wrong: each that fails.
    """
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what is installed may differ
    files = sorted(gpu_files(), key=lambda path: (path.parent.name != "determinism", path))
    count = TestCount(sheet)
    words = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--deselect", "tests/project", *map(str, files)]
    for name in NOT_ON_FAKES if machine.rehearsed else ():
        words += ["--deselect", name]
    code = pytest.main(words, plugins=[count])
    results = [f"{number} {what}" for what, number in sorted(count.results.items())]
    sheet.line(f"\n{', '.join(results) or 'No test ran'}.")
    for reason, number in count.reasons.items():
        sheet.line(f"* {number} skipped: {reason}")
    if code not in (0, 1):
        sheet.judge("the tests", f"pytest ended with code {int(code)}")


# -- the step ----------------------------------------------------------------------------------------------


def measure_operations(name: str) -> tuple[float, float]:
    """The operations on the GPU of a step: of `Loop`, with one shard, and of the plain loop."""
    job = steps.JOBS[name]
    with tempfile.TemporaryDirectory() as folder, joined(None, "gpu") as world:
        data = steps.make_data(job, world.device)
        ours = steps.our_step(job, world, data, folder, fused=True, check_replicas_every=0)
        plain = steps.local_step(job, world, data, fused=True)
        for step in (ours, plain):
            for _ in range(12):  # what the first steps check is over
                step()
        return count_operations(ours, 4), count_operations(plain, 4)


def measure_buckets(name: str, scale: float) -> dict[str, Ratio]:
    """Ours, with its own buckets, over DDP with buckets of several sizes."""
    job = steps.JOBS[name]
    with tempfile.TemporaryDirectory() as folder, joined(None, "gpu") as world:
        data, wait = steps.make_data(job, world.device), synchronized(world.device)
        ours = steps.our_step(job, world, data, folder, fused=True)
        return {
            f"ours / tuned DDP, {mib} MiB": compare(
                ours,
                steps.ddp_step(job, world, data, tuned=True, fused=True, bucket_cap_mb=mib),
                pairs=job.pairs,
                steps=job.steps,
                within_s=scale * BUCKET_S,
                wait=wait,
            )
            for mib in BUCKETS_MIB
        }


def report_steps(machine: Machine, sheet: Sheet) -> None:
    """On one rank, and on all GPUs where there are several; then DDP's buckets. Wrong: more operations than may be."""
    with dl.Pool(1) as pool:
        ((ours, plain),) = pool.run(measure_operations, 1, NORMED)
    sheet.head("network | operations on the GPU in a step: ours | plain loop | ratio | limit")
    sheet.row(NORMED, f"{ours:.0f}", f"{plain:.0f}", f"{ours / plain:.2f}", MOST_OPERATIONS)
    problem = f"{ours / plain:.2f} of the plain loop's operations, the limit is {MOST_OPERATIONS}"
    sheet.judge(f"operations of {NORMED}", problem if ours / plain > MOST_OPERATIONS else "")
    sheet.head(RATIO, words=2)
    scale = 0.0 if machine.rehearsed else STEPS_SCALE
    for ranks in dict.fromkeys((1, machine.gpus)):
        with dl.Pool(ranks) as pool:
            for name in NETWORKS[:1] if machine.rehearsed else NETWORKS:
                write_ratios(sheet, name, ranks, pool.run(steps.measure, ranks, name, None, "gpu", scale)[0])
            if ranks > 1:
                name = NETWORKS[0] if machine.rehearsed else "25 M parameters"
                write_ratios(sheet, name, ranks, pool.run(measure_buckets, ranks, name, scale)[0])


def write_ratios(sheet: Sheet, name: str, ranks: int, ratios: dict[str, Ratio]) -> None:
    for what, ratio in ratios.items():
        sheet.row(name, f"{ranks} {'ranks' if ranks > 1 else 'rank'}: {what}", *ratio.columns())


# -- the surface -------------------------------------------------------------------------------------------


def step_ms(device: str, side: int, threads: int, steps_: int) -> float:
    """Milliseconds of a step of the example."""
    words = ["--side", str(side), "--steps", str(steps_), "--threads", str(threads)]
    return 1e3 * train(device, read_arguments(words)).step_s


def report_surface(machine: Machine, sheet: Sheet) -> None:
    """Both devices at each size."""
    sides, many, few = ((10, 32), 12, 12) if machine.rehearsed else (SIDES, 300, 20)
    threads = torch.get_num_threads()
    every = dict.fromkeys((1, threads))
    columns = [f"CPU, {n} thread{'s' * (n > 1)}: ms a step" for n in every]
    ratios = [f"CPU, {n} / GPU" for n in every]
    sheet.head(f"points | {' | '.join([*columns, 'GPU: ms a step', *ratios])}", words=0)
    for side in sides:
        number = few if side > LARGE else many
        cpu = [step_ms("cpu", side, n, number) for n in every]
        gpu = step_ms("gpu", side, 1, number)
        shown = [f"{value:.3f}" for value in (*cpu, gpu)]
        sheet.row(f"{side**2:,}", *shown, *(f"{value / gpu:.2f}" for value in cpu))


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


def report_determinism(machine: Machine, sheet: Sheet) -> None:
    sheet.head(RATIO, words=2)
    name, scale = ("32-wide MLP", 0.0) if machine.rehearsed else ("digit network", 1.0)
    with dl.Pool(1) as pool:
        for device in ("gpu", "cpu"):
            for what, ratio in pool.run(measure_determinism, 1, name, device, scale)[0].items():
                sheet.row(name, what, *ratio.columns())


PARTS: dict[str, Callable[[Machine, Sheet], None]] = {
    "saves": report_saves,
    "tests": report_tests,
    "worlds": report_worlds,
    "reads": report_reads,
    "endings": report_endings,
    "memory": report_memory,
    "steps": report_steps,
    "surface": report_surface,
    "determinism": report_determinism,
}


def main(words: Sequence[str]) -> None:
    gpus, way, part, file = words
    sheet = Sheet(Path(file))
    PARTS[part](Machine(int(gpus), rehearsed=way == "rehearse"), sheet)
    raise SystemExit(1 if wrong_lines(sheet.path.read_text()) else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
