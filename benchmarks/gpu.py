"""What needs a GPU, in at most 8 minutes, written to docs/benchmarks/gpu.md as it comes.

    python -m benchmarks gpu [PART ...]

The parts run one after another, each in a process of its own that is ended at its time limit. The report is written
again after each row, so a run that is cut off leaves what it has measured. The exit code is 1 if a part failed or came
to its limit, or one of its lines is not as it must be; the report and the last lines of the output name it. Without a
GPU every part is rehearsed on two fake GPUs and on one, with small sizes, and the report goes to
build/gpu-rehearsal.md.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_machine import wrong_lines
from benchmarks.measuring import hardware
from tests.fake_cuda.build import NoFakeCuda, environment

ROOT = Path(__file__).resolve().parents[1]
REPORT, REHEARSAL = ROOT / "docs" / "benchmarks" / "gpu.md", ROOT / "build" / "gpu-rehearsal.md"
TOTAL_S = 480.0
REHEARSED_GPUS = (2, 1)
IDLE_S = 0.5  # until a fake NCCL closes connections of its own
_REHEARSAL_LIMIT = 5  # times a part's limit: a rehearsal may run beside other work
_LOOK_S = 0.2  # between two looks at what a part has written
_TAIL = 25  # lines of a failed part's output


@dataclass(frozen=True)
class Part:
    """A part's heading, its time limit, and what its tables show."""

    title: str
    limit_s: float
    text: str


PARTS = {
    "saves": Part(
        "Checkpoints",
        60,
        "A run is saved half way and resumed in a new world; wrong unless it has the bits of a run without a break. "
        "The digit job is killed after its first checkpoint and started again; wrong unless it resumes and ends. A "
        "step that saves 1 GiB, to the end of the device's work; wrong if it takes a second more than others.",
    ),
    "tests": Part(
        "Tests that need a GPU",
        60,
        "The tests marked `gpu`, one process, without pytest's plugins. Wrong: each that fails.",
    ),
    "worlds": Part(
        "Worlds",
        55,
        "Networks trained for five steps, against one process on the same device. In float64, with one shard per rank, "
        "the largest difference of a weight over the largest weight; with four fixed shards, in float32, whether all "
        "bits are the same. Wrong: other bits, or a difference above 1e-12 (1e-10 with synced batch norm).",
    ),
    "reads": Part(
        "Host synchronisations",
        40,
        "How often a call makes the host wait for the device: a step, over an epoch after an epoch of warm-up, and an "
        'evaluation of ten mini-batches. Counted with `torch.cuda.set_sync_debug_mode("warn")`, by the innermost line '
        "outside of torch. A wait for an event, as for a value of an earlier step, is not counted. Wrong: another "
        "number than 0. A script that reads its loss has 1, `evaluate`, which returns numbers, may have 1 a call, and "
        "`update_bn` 3 a call.",
    ),
    "endings": Part(
        "Failures and pauses",
        125,
        "A rank runs out of memory, is killed, and hangs in a world with a timeout of 10 s; wrong unless the output "
        "names it. Meanwhile another run has steps of more than a second and a pause in which NCCL closes idle "
        "connections; wrong unless it ends well, without a warning of NCCL.",
    ),
    "memory": Part(
        "Memory",
        20,
        "The most memory that a rank takes, for each float32 parameter; SGD without momentum. Wrong: more than the "
        "limit, which `benchmarks/gpu_memory.py` explains.",
    ),
    "steps": Part(
        "The step against DDP",
        70,
        "The whole step of `Loop`, as in [the step on CPU ranks](steps.md): one rank over the plain loop, and with "
        "several GPUs over DDP that is tuned as there, and with buckets of several sizes. Blocks A B B A, the device "
        'synchronised at both ends; "ms" has the medians of both sides. Wrong: more operations on the GPU than the '
        "limit; the times are not judged.",
    ),
    "surface": Part("The surface example", 20, "A step of `examples/surface` on both devices. Not judged."),
    "determinism": Part(
        "The cost of determinism",
        30,
        "Steps in a block of `deterministic()` over the same steps outside of one. Not judged.",
    ),
}


@dataclass
class Outcome:
    """What came of a part: its state in words, its seconds, its tables, and the end of its output if it failed."""

    state: str = "not begun"
    seconds: float = 0.0
    tables: str = ""
    tail: str = ""

    @property
    def has_failed(self) -> bool:
        return self.state.startswith(("failed", "cut off"))  # what hangs is cut off


def run_part(
    command: Sequence[str],
    limit_s: float,
    folder: Path,
    note: Callable[[Outcome], None],
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a part's command, which gets the file for its tables as a last argument, and end it at its limit.

    Args:
        variables: of its environment, beside those of this process.
        note: called with what there is, whenever the tables have grown.
    """
    sheet, log = folder / "tables.md", folder / "output.txt"
    sheet.write_text("")
    outcome, began = Outcome("running"), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(sheet)],
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - began < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                if (tables := sheet.read_text()) != outcome.tables:
                    outcome.tables = tables
                    note(outcome)
        finally:
            _end(process)
    outcome.seconds, outcome.tables = time.monotonic() - began, sheet.read_text()
    if code is None:
        outcome.state = f"cut off after {limit_s:.0f} s"
    else:
        outcome.state = f"failed, exit code {code}" if code else "done"
    if outcome.state != "done":
        outcome.tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with the ranks that it started: they have its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    commands: Mapping[str, Sequence[str]],
    target: Path,
    heading: str,
    parts: Mapping[str, Part] = PARTS,
    total_s: float = TOTAL_S,
    variables: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Outcome]:
    """Run parts one after another, none past its limit and all within `total_s`, and keep the report up to date.

    Args:
        commands: by part.
        heading: the report's first lines.
        variables: by part, of its environment.
    """
    outcomes = {name: Outcome() for name in commands}
    deadline = time.monotonic() + total_s
    target.parent.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        limit_s = min(parts[name].limit_s, deadline - time.monotonic())
        if limit_s <= 0:
            outcomes[name].state = f"left out: the {total_s:.0f} s were over"
            continue

        def note(outcome: Outcome, name: str = name) -> None:
            outcomes[name] = outcome
            target.write_text(document(heading, outcomes, parts))

        note(Outcome("running"))
        with tempfile.TemporaryDirectory() as folder:
            note(run_part(command, limit_s, Path(folder), note, (variables or {}).get(name)))
        print(f"{name}: {outcomes[name].state}, {outcomes[name].seconds:.0f} s", flush=True)
        for line in wrong_lines(outcomes[name].tables):
            print(f"  wrong: {line}", flush=True)
    target.write_text(document(heading, outcomes, parts))
    return outcomes


def document(heading: str, outcomes: Mapping[str, Outcome], parts: Mapping[str, Part] = PARTS) -> str:
    """The report: the heading, a line for each part, and each part's tables."""
    rows = [f"| {parts[name].title} | {one.state} | {one.seconds:.0f} |" for name, one in outcomes.items()]
    lines = [heading, "", "| part | result | seconds |", "|---|---|--:|", *rows]
    for name, one in outcomes.items():
        lines += ["", f"## {parts[name].title}", "", parts[name].text]
        lines += [f"\n{one.state[0].upper()}{one.state[1:]}."] * (one.state != "done")
        lines += ["", one.tables.strip()] if one.tables.strip() else []
        lines += ["\nThe end of its output:\n", "```", one.tail, "```"] if one.tail else []
    return "\n".join(lines) + "\n"


def versions() -> str:
    """The GPUs, their driver, and the versions of what runs on them, in a line."""
    count = torch.cuda.device_count()
    names = dict.fromkeys(torch.cuda.get_device_name(number) for number in range(count))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    return f"{count} x {', '.join(names)}, driver {_driver()}, {libraries}; {hardware()}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
        return said[0] if said else "unknown"
    return "unknown"


def heading_of(gpus: int, names: Sequence[str]) -> str:
    """The report's first lines, on a machine with so many GPUs."""
    command = " ".join(["python -m benchmarks gpu", *names])
    facts = [f"Command: `{command}`  ", f"Hardware: {versions() if gpus else hardware()}.  "]
    date = f"Date: {datetime.date.today()}."
    if gpus:
        return "\n".join(["# What needs a GPU", "", *facts, date])
    text = "No GPU was there, and no figure here says anything about one: the GPUs are those of `tests/fake_cuda`."
    return "\n".join(["# A rehearsal of what needs a GPU", "", text, "", *facts, date])


def report(names: Iterable[str]) -> None:
    """Run these parts, by default all, and write the report.

    Raises:
        SystemExit: 1, if a part failed.
    """
    names = list(names)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    outcomes = measure(names, gpus) if gpus else rehearse(names)
    if any(one.has_failed for one in outcomes.values()):
        raise SystemExit(1)


def command_of(gpus: int, way: str, name: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_parts", str(gpus), way, name]


def measure(names: list[str], gpus: int) -> dict[str, Outcome]:
    """These parts, by default all. A few of them share the time that all may take: a machine can be slow."""
    print(f"Measures on {gpus} GPUs, into {REPORT.relative_to(ROOT)}.", flush=True)
    commands = {name: command_of(gpus, "measure", name) for name in names or PARTS}
    longer = TOTAL_S / sum(PARTS[name].limit_s for name in commands)
    parts = {name: replace(PARTS[name], limit_s=PARTS[name].limit_s * longer) for name in commands}
    return run_all(commands, REPORT, heading_of(gpus, names), parts)


def rehearse(names: list[str]) -> dict[str, Outcome]:
    """All parts on two fake GPUs, then on one.

    Raises:
        SystemExit: why there are no fake GPUs.
    """
    print(f"No GPU is there: a rehearsal, into {REHEARSAL.relative_to(ROOT)}.", flush=True)
    parts, commands, variables = {}, {}, {}
    for gpus in REHEARSED_GPUS:
        try:
            fakes = environment(gpus, shared="1", idle_s=str(IDLE_S))
        except NoFakeCuda as why:
            raise SystemExit(f"No rehearsal: {why}.") from None
        for name in names or PARTS:
            on = f"{name}, {gpus} fake GPU{'s' if gpus > 1 else ''}"
            title = f"{PARTS[name].title}, on {gpus} fake GPU{'s' if gpus > 1 else ''}"
            parts[on] = replace(PARTS[name], title=title, limit_s=_REHEARSAL_LIMIT * PARTS[name].limit_s)
            commands[on], variables[on] = command_of(gpus, "rehearse", name), fakes
    total_s = len(REHEARSED_GPUS) * _REHEARSAL_LIMIT * TOTAL_S
    return run_all(commands, REHEARSAL, heading_of(0, names), parts, total_s, variables)
