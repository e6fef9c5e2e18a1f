"""The parts of `python -m benchmarks gpu`, each in a process of its own; its tables come row by row.

    python -m benchmarks.gpu_parts GPUS PART FILE

GPUS is how many the machine has; with 0 the part is rehearsed. Its tables are appended to FILE.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks import order, steps, surface
from benchmarks.jobs import ddp_tuning
from benchmarks.measuring import Ratio, Step, compare, joined, synchronized
from ddp_loop.accelerators import accelerator_of
from ddp_loop.training.flat_all_reduce import FlatAllReduce
from ddp_loop.training.ordered_sum import ReductionOrder
from examples.surface.train import read_arguments, train
from tests.support.device_modes import ASYNCHRONOUS, device_mode_of

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[1]
NETWORKS = ("32-wide MLP", "digit network", "ResNet-18", "6-layer transformer")  # the first words of their names
PAIR_S, NOISE_S = 6.0, 3.0  # for a row, and for one of a way against itself
STEP_LINES = 3  # at most so many places of host synchronisations in a row
RATIO = "network | what | median | quartiles | ms | pairs"


@dataclass(frozen=True)
class Sheet:
    """The file for a part's tables; ranks write there too."""

    path: Path

    def line(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\n")

    def head(self, head: str, words: int = 1) -> None:
        """Begin a table, its first columns words and the others numbers."""
        columns = head.split(" | ")
        self.line(f"\n| {head} |\n|{'|'.join(['---'] * words + ['--:'] * (len(columns) - words))}|")

    def row(self, *cells: object) -> None:
        self.line(f"| {' | '.join(str(cell) for cell in cells)} |")


@dataclass(frozen=True)
class Machine:
    """A machine with so many GPUs; with none, the CPU answers late, and sizes are small."""

    gpus: int

    @property
    def device(self) -> str:
        """In `join_world`'s words."""
        return "gpu" if self.gpus else "cpu"

    @property
    def backends(self) -> str:
        """Of a process group of one rank, as `join_world` makes it for ranks with GPUs of their own."""
        return "cpu:gloo,cuda:nccl" if self.gpus else "gloo"

    def run(self, pool: dl.Pool, ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call a function on ranks of this machine."""
        return pool.run(answering, ranks, self.gpus == 0, function, *arguments)


def answering(late: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function where this process's CPU answers late, or as it is."""
    with device_mode_of(ASYNCHRONOUS) if late else nullcontext():
        return function(*arguments)


@contextmanager
def group_of_one(backends: str) -> Iterator[None]:
    """A process group of this process alone, as a script may make it before `join_world`."""
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


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


def report_tests(machine: Machine, sheet: Sheet) -> int:
    """Run the tests marked for GPUs, those of determinism first: cuBLAS reads its variable once in a process."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what is installed may differ
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in path.read_text()]
    files += [path for path in (ROOT / "tests").rglob("test_*.py") if "marks=pytest.mark.gpu)" in path.read_text()]
    first = sorted(dict.fromkeys(files), key=lambda path: (path.parent.name != "determinism", path))
    count = TestCount(sheet)
    words = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--deselect", "tests/project", *map(str, first)]
    code = pytest.main(words, plugins=[count])
    results = [f"{number} {what}" for what, number in sorted(count.results.items())]
    sheet.line(f"\n{', '.join(results) or 'No test ran'}.")
    for reason, number in count.reasons.items():
        sheet.line(f"* {number} skipped: {reason}")
    return int(code)


# -- worlds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldPlan:
    """A world to try: its ranks, how many GPUs they see, and whether a group of NCCL sums their gradients."""

    name: str
    ranks: int
    visible: int
    nccl: bool


def plan_worlds(gpus: int) -> list[WorldPlan]:
    """The worlds to try on a machine with so many GPUs.

    Ranks share a GPU only in a world of their own, where they see no other one. NCCL refuses that, so gloo sums; three
    ranks take another way to add their pieces up than two.
    """
    if gpus == 0:
        return [WorldPlan("1 rank, rehearsed", 1, 0, nccl=False), WorldPlan("2 ranks, rehearsed", 2, 0, nccl=False)]
    own = [WorldPlan(f"{n} ranks, NCCL", n, n, nccl=True) for n in dict.fromkeys((2, gpus)) if n <= gpus and gpus > 1]
    shared = [WorldPlan(f"{n} ranks on one GPU, gloo", n, 1, nccl=False) for n in (2, 3)]
    return [WorldPlan("1 rank, NCCL", 1, 1, nccl=True), *shared, *own]


@contextmanager
def seeing(gpus: int) -> Iterator[None]:
    """Processes that start here see the first so many of this machine's GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    numbers = before.split(",") if before else [str(number) for number in range(gpus)]
    os.environ[name] = ",".join(numbers[:gpus])
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def small_network(*, batch_norm: bool) -> nn.Module:
    norm = [nn.BatchNorm1d(24)] if batch_norm else []
    return nn.Sequential(nn.Linear(12, 24), *norm, nn.Tanh(), nn.Linear(24, 10))


@dataclass(frozen=True)
class Training:
    """A training whose weights are compared.

    Attributes:
        bound: for the largest difference; 0 where the bits must be equal.
    """

    build: Callable[[], nn.Module]
    dtype: torch.dtype
    bound: float
    shards: int | None = None
    synced: bool = False


TRAININGS = {
    "no batch norm": Training(lambda: small_network(batch_norm=False), torch.float64, 1e-12),
    "synced batch norm": Training(lambda: small_network(batch_norm=True), torch.float64, 1e-10, synced=True),
    "4 fixed shards, batch norm": Training(lambda: small_network(batch_norm=True), torch.float32, 0.0, shards=4),
}


def weights_of(training: Training, world: dl.World) -> list[float]:
    """All weights after five steps in mini-batches of 50, the last one of 30, which few numbers of ranks divide."""
    torch.manual_seed(0)
    model = training.build().to(world.device, training.dtype)
    if training.synced:
        dl.sync_batch_norm(model, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(230, 12, dtype=training.dtype), torch.randint(10, (230,))
    batches = dl.Batches(data, 50, world, shards=training.shards)
    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, 9, steps=5, state=state, progress=False):
        for rows, labels in step:
            step.backward(cross_entropy(model(rows), labels))
        step.fold()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().cpu().tolist()


def check_sums(world: dl.World) -> None:
    """Make the sums that a world of one leaves out of its steps: NCCL has them with one rank too.

    Raises:
        RuntimeError: a wrong sum.
    """
    plain, shared = (torch.full((4,), 2.0, device=world.device) for _ in range(2))
    two_pieces = ReductionOrder((0, 0), (2,), (0, 1), is_any=False)
    ordered = FlatAllReduce(world, two_pieces, 4, torch.float32, world.device)
    rows = [ordered.empty().fill_(value) for value in (1.0, 2.0)]
    world.sum(plain)
    world.broadcast(shared)
    ordered.start(rows)
    ordered.fold()
    ordered.finish()
    found = [plain.tolist(), shared.tolist(), rows[0].tolist()]
    if found != [[2.0] * 4, [2.0] * 4, [3.0] * 4]:
        raise RuntimeError(f"A sum, a broadcast and an ordered sum of one rank must give 2, 2 and 3. Got {found}.")


def try_world(device: str, backends: str) -> tuple[str, dict[str, list[float]]]:
    """How the ranks exchange values, and the weights of each training.

    Args:
        backends: of a process group that the script makes first; empty where it leaves that to `join_world`.
    """
    with (
        dl.deterministic(seed=None),
        group_of_one(backends) if backends else nullcontext(),
        dl.join_world(device=device, seed=0) as world,
    ):
        if backends:
            check_sums(world)
        return str(world), {name: weights_of(training, world) for name, training in TRAININGS.items()}


def verdict(training: Training, found: list[float], wanted: list[float]) -> tuple[str, bool]:
    """What is written about two vectors of weights, and whether they are as equal as they must be."""
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (found, wanted))
    difference = float((one - other).abs().max() / other.abs().max())
    if training.bound == 0.0:
        return ("the same bits" if found == wanted else f"OTHER BITS, {difference:.1e}"), found == wanted
    is_equal = difference <= training.bound
    return f"{difference:.1e}{'' if is_equal else f', ABOVE {training.bound:.0e}'}", is_equal


def report_worlds(machine: Machine, sheet: Sheet) -> int:
    sheet.head(f"world | exchange | {' | '.join(TRAININGS)}", words=2 + len(TRAININGS))
    with seeing(1) if machine.gpus else nullcontext(), dl.Pool(1) as pool:
        ((_, wanted),) = machine.run(pool, 1, try_world, machine.device, "")
    failures = 0
    for plan in plan_worlds(machine.gpus):
        backends = machine.backends if plan.ranks == 1 else ""
        try:
            with seeing(plan.visible) if machine.gpus else nullcontext(), dl.Pool(plan.ranks) as pool:
                results = machine.run(pool, plan.ranks, try_world, machine.device, backends)
        except (RuntimeError, dl.RankFailed) as error:
            traceback.print_exc()
            sheet.row(
                plan.name, "FAILED", (str(error).splitlines() or ["no message"])[-1], *[""] * (len(TRAININGS) - 1)
            )
            failures += 1
            continue
        said, _ = results[0]
        verdicts = [
            verdict(training, found[name], wanted[name]) for name, training in TRAININGS.items() for _, found in results
        ]
        shown = [verdicts[number * plan.ranks][0] for number in range(len(TRAININGS))]
        is_right = all(fine for _, fine in verdicts) and ("nccl" in said) == plan.nccl
        sheet.row(plan.name, said if is_right else f"{said}: NOT AS IT MUST BE", *shown)
        failures += not is_right
    return failures


# -- the step ----------------------------------------------------------------------------------------------


def networks(machine: Machine) -> list[str]:
    """The networks to measure, of those that `benchmarks.steps` has."""
    wanted = NETWORKS if machine.gpus else NETWORKS[:1]
    return [name for name in steps.JOBS if name in wanted or (name.startswith("ResNet-18") and machine.gpus)]


def measure_step(name: str, device: str, scale: float) -> dict[str, Ratio]:
    """The ratios of one network: to the plain loop on one rank, to DDP on more.

    Args:
        scale: of the time that a row takes.
    """
    job = steps.JOBS[name]
    with tempfile.TemporaryDirectory() as folder, joined(None, device) as world:
        data, wait = steps.make_data(job, world.device), synchronized(world.device)

        def ratio(one: Step, other: Step, within_s: float) -> Ratio:
            return compare(one, other, pairs=job.pairs, steps=job.steps, within_s=scale * within_s, wait=wait)

        ours = steps.our_step(job, world, data, folder, fused=True)
        if world.size == 1:
            plain, again = (steps.local_step(job, world, data, fused=True) for _ in range(2))
            return {
                "1 rank: ours / plain loop": ratio(ours, plain, PAIR_S),
                "plain / plain": ratio(again, plain, NOISE_S),
            }
        static, tuned, again = (
            steps.ddp_step(job, world, data, tuned=True, static_graph=is_static, fused=True)
            for is_static in (True, False, False)
        )
        graphs = ratio(static, tuned, NOISE_S)
        faster = static if world.gather(graphs.median)[0] < 1 else tuned
        ranks = f"{world.size} ranks"
        return {
            f"{ranks}: tuned DDP, static graph / tuned DDP": graphs,
            f"{ranks}: ours / tuned DDP": ratio(ours, faster, PAIR_S),
            f"{ranks}: tuned DDP / tuned DDP": ratio(again, tuned, NOISE_S),
        }


def report_steps(machine: Machine, sheet: Sheet) -> int:
    """On one rank; on all GPUs where there are several, or on two rehearsed ranks."""
    sheet.head(RATIO, words=2)
    for ranks in dict.fromkeys((1, machine.gpus or 2)):
        with dl.Pool(ranks) as pool:
            for name in networks(machine):
                ratios = machine.run(pool, ranks, measure_step, name, machine.device, 1.0 if machine.gpus else 0.0)[0]
                for what, ratio in ratios.items():
                    sheet.row(name, what, *ratio.columns())
    return 0


# -- host synchronisations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step whose host synchronisations are counted.

    Attributes:
        reads: whether it reads its loss, which must be counted.
        on_host: whether the data stay in the host's memory: as tensors that the script copies, or "samples" of a data
            set.
        weighted: whether each shard comes with a weight of its own, on the device.
    """

    shards: int | None = None
    synced: bool = False
    reads: bool = False
    on_host: str = ""
    weighted: bool = False
    options: tuple[tuple[str, str], ...] = ()


CASES = {
    "as it is": Case(),
    "4 fixed shards": Case(shards=4),
    "4 shards, weights on the device": Case(shards=4, weighted=True),
    "synced batch norm": Case(synced=True),
    'on_nonfinite="skip"': Case(options=(("on_nonfinite", "skip"),)),
    "tensors in the host's memory": Case(on_host="tensors"),
    "samples of a data set": Case(on_host="samples"),
    "a script that reads its loss": Case(reads=True),
}


def our_case(case: Case, job: steps.Job, world: dl.World, folder: str) -> Step:
    """A step of a `Loop` with rows, metrics and a run folder."""
    model, optimizer = steps.make(job, world.device, fused=True)
    if case.synced:
        dl.sync_batch_norm(model, world)
    data: Any = steps.make_data(job)
    if case.on_host == "samples":
        data = list(zip(*data, strict=True))
    devices = "cpu" if case.on_host == "tensors" else None
    batches = dl.Batches(data, job.mini_batch, world, shards=case.shards, devices=devices)
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = dict(case.options)
    loop = iter(dl.Loop(batches, 10**6, state=state, run_dir=folder, save_every=10**9, progress=False, **options))

    def step() -> None:
        step = next(loop)
        for inputs, labels in step:
            inputs, labels = (part.to(world.device, non_blocking=True) for part in (inputs, labels))
            logits = model(inputs)
            loss = cross_entropy(logits, labels)
            if case.reads:
                loss.item()
            weight = (labels > 0).sum() if case.weighted else None
            step.backward(loss, weight=weight, accuracy=steps.hits(logits, labels))
        step.fold()
        optimizer.step()

    return step


def place_of(file: str, line: int) -> str:
    """The innermost line of ours that is being executed, or what was noted if there is none."""
    mine = {__file__, sys.modules[accelerator_of.__module__].__file__}
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "support" not in path.parts and ".venv" not in path.parts:
            if frame.name in ("place_of", "note", "see", "host_reads") and frame.filename in mine:
                continue
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return f"{Path(file).name}:{line}"


def count_reads(step: Step, steps_: int, device: torch.device) -> Counter[str]:
    """The places at which so many steps make the host wait, after as many of warm-up."""
    for _ in range(steps_):
        step()
    places = Counter[str]()

    def note(file: str, line: int) -> None:
        places[place_of(file, line)] += 1

    with accelerator_of(device).host_reads(note):
        for _ in range(steps_):
            step()
    return places


def said(places: Counter[str], steps_: int) -> tuple[str, str]:
    """The number in a step, and the places with most of them."""
    most = [f"`{place}` {number / steps_:g}" for place, number in places.most_common(STEP_LINES)]
    return f"{places.total() / steps_:g}", ", ".join(most)


def measure_reads(sheet: Sheet, device: str, backends: str, mini_batch: int) -> list[str]:
    """Write a row for each case and for DDP; returns the cases that are not as they must be."""
    job = replace(steps.JOBS["32-wide MLP, batch norm"], mini_batch=mini_batch)
    epoch, wrong = -(-steps.SAMPLES // mini_batch), []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder, group_of_one(backends), joined(None, device) as world:
            places = count_reads(our_case(case, job, world, folder), epoch, world.device)
            sheet.row(f"ours: {name}", *said(places, epoch))
            if case.reads and places.total() < epoch:
                wrong.append(name)
    with group_of_one(backends), joined(None, device) as world:
        data = steps.make_data(job, world.device)
        for what, tuned in (("DDP", False), ("tuned DDP", True)):
            model, optimizer = steps.make(job, world.device, fused=True)
            wrapped = DistributedDataParallel(model, **ddp_tuning() if tuned else {})
            take = steps.mine(world, data, mini_batch)

            def step(
                wrapped: nn.Module = wrapped, optimizer: torch.optim.Optimizer = optimizer, take: Any = take
            ) -> None:
                inputs, labels = take()
                optimizer.zero_grad()
                loss = cross_entropy(wrapped(inputs), labels)
                loss.backward()
                optimizer.step()

            sheet.row(f"{what}, without a log", *said(count_reads(step, epoch, world.device), epoch))
    return wrong


def report_reads(machine: Machine, sheet: Sheet) -> int:
    """On one rank with a process group."""
    sheet.head("step | in a step | places, and how often in a step")
    mini_batch = steps.MINI_BATCH if machine.gpus else steps.SAMPLES // 4
    with dl.Pool(1) as pool:
        (wrong,) = machine.run(pool, 1, measure_reads, sheet, machine.device, machine.backends, mini_batch)
    for name in wrong:
        sheet.line(f"\nNot counted: {name}.")
    return len(wrong)


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
    sheet.head("what | median | quartiles | ms | pairs")
    if late:
        sheet.row("eager / captured", surface.LEFT_OUT, "", "", "")
    else:
        for what, ratio in surface.measure_capture().items():
            sheet.row(what, *ratio.columns())
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
