"""The pool of ranks that the tests share, and what is asked of every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

import ddp_loop as dl
from ddp_loop.distributed import Pool
from ddp_loop.sweeps import running
from tests.fake_cuda.build import NoFakeCuda, environment
from tests.support.both_exchanges import exchange_of
from tests.support.devices import CPU, GPU, run_on_cpu, run_on_gpu, ways_of
from tests.support.harness import (
    TASK_S,
    OnRanks,
    Result,
    freeze_what_is_imported,
    left_behind,
    look_around,
    run_cleanly,
)
from tests.support.paths import ROOT
from tests.support.refusals import Refused
from tests.support.skips import refuse_unknown_skip
from tests.support.slurm import Slurm, running_slurm
from tests.support.tiers import ALL_ITEMS, combinations, mark_tiers

USUAL_RANKS = 3
MOST_RANKS = 8
NPUS = 4
SWEEP_RANKS = 2
settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("search", settings.get_profile("fixed"), derandomize=False, max_examples=500)
settings.load_profile("fixed")
# torch asks DNS for the name of 127.0.0.1 at each connection to a store, and waits 5 s for a lost answer: where one in
# 50 is lost, one task in ten was late. Ranks of a pool do not ask; other processes wait for a second.
NO_DNS = {"RES_OPTIONS": "attempts:0"}
POOLS: list[Pool] = []  # of this process, whose workers stay from test to test


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--known-skips`, which continuous integration gives."""
    parser.addoption("--known-skips", action="store_true", help="fail a test that is skipped for an unknown reason")


def pytest_configure() -> None:
    """Set what this process and all that it starts shall have."""
    (ROOT / "build").mkdir(exist_ok=True)  # one process builds the fake GPU there while another runs a test
    os.environ["OMP_NUM_THREADS"] = "1"  # 1 and 2 threads give different bits
    os.environ["RES_OPTIONS"] = "timeout:1"
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: processes of tests inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests in the modes and over the exchanges that they ask for."""
    for names, values in ways_of(metafunc.definition).items():
        metafunc.parametrize(names, values, indirect=True)


LONGEST = "test_gpu_benchmark.py", "test_ray.py"


def needs_no_fakes(item: pytest.Item) -> bool:
    """Whether a test starts no ranks with fake GPUs or NPUs."""
    parameters = {} if (callspec := getattr(item, "callspec", None)) is None else callspec.params
    fixtures = getattr(item, "fixturenames", ())
    return parameters.get("device_kind") != GPU and not any(
        name.startswith(("fake_", "on_fake_", "on_gpus")) for name in fixtures
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say of each test which tier it is in, before `-m` chooses.

    Tests on fake GPUs come first: of several processes mostly one then starts ranks with such devices. Before them come
    the longest, so that no process waits in the end for another one that has just begun with them.
    """
    beyond = combinations(items)
    chosen = (item for item in items if item not in beyond)
    items[:] = sorted(chosen, key=lambda item: (item.path.name not in LONGEST, needs_no_fakes(item)))
    config.stash[ALL_ITEMS] = list(items)
    mark_tiers(items)


def pytest_collection_finish() -> None:
    """Free collections of what all test files have imported."""
    freeze_what_is_imported()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--known-skips`, hold a skip against `tests.support.skips`."""
    report = yield
    if item.config.getoption("--known-skips"):
        refuse_unknown_skip(report)
    return report


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 workers; 3 are started at once by the first test that asks, the others when needed."""
    with Pool(MOST_RANKS, NO_DNS) as pool:
        POOLS.append(pool)
        pool.run(os.getpid, USUAL_RANKS)
        yield pool


@pytest.fixture
def device_kind(request: pytest.FixtureRequest) -> str:
    """On which kind of device the ranks of this test are; see `tests.support.devices`."""
    kind: str = getattr(request, "param", CPU)
    return kind


@pytest.fixture(autouse=True)
def exchange(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """How the ranks of this test exchange values; see `tests.support.exchanges`. None where the test does not ask."""
    name: str | None = getattr(request, "param", None)
    with nullcontext() if name is None else exchange_of(name):
        yield name


@pytest.fixture
def late(device_kind: str) -> bool:
    """Whether values come late, as on a GPU."""
    return device_kind == GPU


@pytest.fixture
def on_ranks(device_kind: str, request: pytest.FixtureRequest) -> OnRanks:
    """Run a function of the test file on ranks: `results = on_ranks(3, function, argument)`."""
    chosen: OnRanks = request.getfixturevalue("on_cpus" if device_kind == CPU else "on_gpus")
    return chosen


@pytest.fixture
def on_gpus(fake_gpu_pool: tuple[Pool, dict[str, str]]) -> OnRanks:
    """`on_ranks` with a fake GPU for each rank, where all that a task makes lies; see `tests.support.devices`."""
    return _on_pool(run_on_gpu, *fake_gpu_pool)


@pytest.fixture
def on_cpus(pool: Pool) -> OnRanks:
    """`on_ranks` on the CPU."""
    return _on_pool(run_on_cpu, pool, {})


def _with_fakes(kind: str, ranks: int) -> Iterator[tuple[Pool, dict[str, str]]]:
    try:
        variables = environment(ranks, kind) | NO_DNS
    except NoFakeCuda as why:
        pytest.skip(str(why))
    with Pool(ranks, variables) as pool:
        POOLS.append(pool)
        yield pool, variables


@pytest.fixture(scope="session")
def fake_gpu_pool() -> Iterator[tuple[Pool, dict[str, str]]]:
    """Workers with fake GPUs, and the variables that give a process some; skips where these cannot be built."""
    yield from _with_fakes("cuda", MOST_RANKS)


@pytest.fixture(scope="session")
def fake_npu_pool() -> Iterator[tuple[Pool, dict[str, str]]]:
    """The same device under the name that an extension of torch gives it."""
    yield from _with_fakes("npu", NPUS)


def _on_pool(runner: Callable[..., Any], pool: Pool, variables: dict[str, str]) -> OnRanks:
    def run(
        ranks: int,
        function: Callable[..., Result],
        /,
        *arguments: Any,
        timeout_s: float = TASK_S,
        **keywords: Any,
    ) -> list[Result]:
        with mock.patch.dict(os.environ, variables):  # of the workers that are started now
            return pool.run(runner, ranks, function, *arguments, timeout_s=timeout_s, **keywords)

    return run


@pytest.fixture
def on_fake_gpus(fake_gpu_pool: tuple[Pool, dict[str, str]]) -> OnRanks:
    """Run a function of the test file on ranks with a fake GPU each; see `tests.fake_cuda`."""
    return _on_pool(run_cleanly, *fake_gpu_pool)


@pytest.fixture
def on_fake_npus(fake_npu_pool: tuple[Pool, dict[str, str]]) -> OnRanks:
    """Run a function of the test file on ranks with a device `npu:N` each; see `tests.fake_cuda.npu`."""
    return _on_pool(run_cleanly, *fake_npu_pool)


@pytest.fixture
def refused(on_ranks: OnRanks, tmp_path: Path) -> Refused:
    """Ask that all ranks refuse a scenario: `refused(3, scenario, kind="ValueError", said="must be")`."""
    return Refused(on_ranks, tmp_path / "run")


@pytest.fixture
def world() -> Iterator[dl.World]:
    """A world of this process alone."""
    with dl.join_world() as world:
        yield world


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test after which something is there that was not there before."""
    before = look_around()
    yield
    allowed = {process for pool in POOLS for process in pool.process_ids}  # a test may have had one replaced
    left = left_behind(before, allowed)
    if left:
        pytest.fail("a test must leave its surroundings as they were; left:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def warm_pools(pool: Pool) -> Iterator[list[Pool]]:
    """Pools for two places of a sweep, the usual one and one more rank: a new process takes seconds to import torch."""
    with Pool(1) as other:
        other.run(os.getpid, 1)
        yield [pool, other]


@pytest.fixture
def warm(warm_pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps of this process run on the warm pools; for tests that kill no rank."""
    free: SimpleQueue[Pool] = SimpleQueue()
    for one in warm_pools:
        free.put(one)

    class Lent:
        def __init__(self, size: int, environment: Mapping[str, str]) -> None:
            self._pool = warm_pools[0] if size == SWEEP_RANKS else free.get_nowait()

        @property
        def process_ids(self) -> tuple[int, ...]:
            return self._pool.process_ids

        def run(self, function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
            return self._pool.run(function, ranks, *arguments)

        def close(self) -> None:
            free.put(self._pool)

    monkeypatch.setattr(running, "Pool", Lent)
    monkeypatch.setattr(running, "_CHECK_S", 0.0)  # so that requests take effect at once


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm on this machine; skips where it is not installed."""
    with running_slurm() as slurm:
        yield slurm
