"""The jobs' scripts as a user runs them, under torchrun in fresh processes: start and memory; and their lines."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable
from pathlib import Path

from benchmarks.jobs import write_material
from benchmarks.jobs.variants import VARIANTS
from benchmarks.measuring import RANKS, Ratio

ROOT = Path(__file__).parents[1]
SCRIPT_S = 600.0
WITHOUT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def run_script(name: str, *arguments: str) -> str:
    """What the script of a variant prints under torchrun."""
    variant = VARIANTS[name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    script = ["-m", f"benchmarks.jobs.{variant.script}", *(["--tuned"] if variant.tuned else [])]
    command = [*torchrun, *script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SCRIPT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def told(output: str, what: str) -> float:
    """The number in the line `what: number` of a script's output."""
    found = re.search(rf"^{what}: ([\d.]+)", output, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the script must print a line `{what}: ...`; it printed:\n{output}")
    return float(found[1])


def start_up(one: str = "ours", other: str = "DDP", *, pairs: int = 10) -> Ratio:
    """From the start of torchrun to the end of the first step: one variant over another, A B B A."""
    ones: list[float] = []
    others: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder) / "material"
        write_material("digits", material)
        for number in range(-1, pairs):  # the first pair warms the files' cache
            for name, times in ((one, ones), (other, others))[:: 1 if number % 2 == 0 else -1]:
                began = time.time()
                output = run_script(name, "--first-step-only", "--material", str(material))
                times.append(told(output, "first step") - began)
    del ones[0], others[0]
    return Ratio.of(ones, others)


def peak_memory(names: Iterable[str], network: str, *, repeats: int = 5) -> dict[str, list[float]]:
    """MiB of the rank that took most, in each of some runs of an epoch, sorted; the variants by turns."""
    peaks: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder) / "material"
        write_material(network, material)
        for _ in range(repeats):
            for name, runs in peaks.items():
                output = run_script(name, "--epochs", "1", "--peak-memory", "--material", str(material))
                runs.append(told(output, "peak memory"))
    return {name: sorted(runs) for name, runs in peaks.items()}


def count_lines(source: str) -> int:
    """The lines with code: not blank, no comment alone, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def lines_of_code() -> dict[str, int]:
    """The lines with code of each script, by the first variant that it serves."""
    folder = ROOT / "benchmarks" / "jobs"
    return {
        name: count_lines((folder / f"{variant.script}.py").read_text())
        for name, variant in VARIANTS.items()
        if not variant.tuned
    }
