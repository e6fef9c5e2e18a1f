"""What the tests share: how a task is sent to ranks, and what a test must not leave behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

import ddp_loop as dl

Result = TypeVar("Result")

# What the project promises: a fault on one rank ends all within 3 s. The campaigns of tests/faults hold it to that,
# alone on a machine. Tests run beside others, and must only tell such an end from a timeout, which is 20 s or more in
# their worlds. On an idle machine `FAULT_S=3 python -m pytest ...` holds the tests to the promise too.
FAULT_S = float(os.environ.get("FAULT_S", 18 if "PYTEST_VERSION" in os.environ else 3))
TASK_S = 300.0  # the longest tasks take seconds; a shared machine may be thirty times slower
MOMENT_S, LOOK_S = 60.0, 0.02  # how long to wait for what takes a moment, and how often to look
DESCRIPTORS = "/proc/self/fd"  # links to the open files of this process
MODULES_TO_FREEZE = 100
THREAD_END_S = MOMENT_S  # a thread needs a moment to end after the request

# Set by pytest, by torch when it likes, and by scikit-learn when it is first imported.
VARIABLES_OF_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


class OnRanks(Protocol):
    """The fixture `on_ranks`: results of `function(*arguments, **keywords)` on `ranks` gloo ranks, in order.

    The function must be at the top level of a test file. It makes its own process group, with `join_world`.
    """

    def __call__(
        self,
        ranks: int,
        function: Callable[..., Result],
        /,
        *arguments: Any,
        timeout_s: float = TASK_S,
        **keywords: Any,
    ) -> list[Result]: ...


_frozen_modules = 0  # how many modules this process had imported when it last froze their objects
MADE_BY_OTHERS = frozenset({"build", "dist", "runs", "lightning_logs"})  # as `.gitignore` has them


@dataclass(frozen=True)
class Surroundings:
    """What a test, or a task on a rank, finds and must leave as it was."""

    environment_variable: frozenset[tuple[str, str]]
    thread: frozenset[threading.Thread]
    child_process: frozenset[int]
    file_in_the_working_folder: frozenset[str]
    open_file_in_the_working_folder: frozenset[str]
    process_group: frozenset[str]
    torch_setting: frozenset[tuple[str, object]]


def look_around() -> Surroundings:
    """The surroundings now; some 0.3 ms."""
    return Surroundings(
        environment_variable=frozenset(item for item in os.environ.items() if item[0] not in VARIABLES_OF_OTHERS),
        thread=frozenset(thread for thread in threading.enumerate() if thread.is_alive()),
        child_process=child_processes(),
        file_in_the_working_folder=frozenset(filter(_is_watched, os.listdir())),
        open_file_in_the_working_folder=open_files(Path.cwd()),
        process_group=frozenset({"the default one"} if dist.is_initialized() else ()),
        torch_setting=frozenset(
            {
                ("default dtype", torch.get_default_dtype()),
                ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
                ("gradients", torch.is_grad_enabled()),
            }
        ),
    )


def _is_watched(name: str) -> bool:
    """Whether only a test can make a file of this name in the working folder; `make` and editors make others."""
    return not name.startswith((".", "__")) and name not in MADE_BY_OTHERS


def left_behind(before: Surroundings, allowed_processes: Collection[int] = ()) -> list[str]:
    """A line for each thing that is here now and was not before.

    Args:
        before: what `look_around` said.
        allowed_processes: ids of child processes that may stay: those of the pool of ranks.
    """
    if threads := set(threading.enumerate()) - before.thread:
        gc.collect()  # contextlib of Python 3.13 leaves a raised exception, and all that its frames hold, in a cycle
        for thread in threads:
            thread.join(THREAD_END_S)
    after = look_around()
    lines = []
    for field in fields(Surroundings):
        new = getattr(after, field.name) - getattr(before, field.name)
        if field.name == "child_process":
            new = {f"{pid}: {command_of(pid)}" for pid in new if pid not in allowed_processes}
            new = {line for line in new if "multiprocessing.resource_tracker" not in line}
        lines += [f"{field.name.replace('_', ' ')}: {thing}" for thing in sorted(new, key=str)]
    removed = dict(before.environment_variable).keys() - dict(after.environment_variable).keys()
    return lines + [f"environment variable removed: {name}" for name in sorted(removed)]


def until(holds: Callable[[], Any], what: str, within_s: float = MOMENT_S) -> Any:
    """Poll until something holds; returns it. On a timeout the error names what it waited for."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(LOOK_S)
    return found


@contextmanager
def held_ports(number: int) -> Iterator[list[int]]:
    """Ports of this machine for servers that get theirs as an argument.

    A socket is bound to each and does not listen: the kernel gives the port to no process that asks for any, and lets a
    server have it that asks for it by number with SO_REUSEADDR, as servers do.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]


def count_calls(function: Callable[[], Any]) -> Counter[str]:
    """How often a function calls others, by their names: its work in Python, whatever else the machine does."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            counts[frame.f_code.co_name if event == "call" else argument.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counts


def child_processes() -> frozenset[int]:
    """The ids of this process's children; without /proc, of those that multiprocessing started."""
    started = {child.pid for child in multiprocessing.active_children() if child.pid}
    listed: set[int] = set()
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended since
            listed.update(int(pid) for pid in children.read_text().split())
    return frozenset(started | listed)


def command_of(process_id: int) -> str:
    """The command line of a process, or what is known of it; one that is being started has none for a moment."""
    folder, deadline = Path(f"/proc/{process_id}"), time.monotonic() + MOMENT_S
    try:
        while not (command := (folder / "cmdline").read_text().replace("\0", " ").strip()):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" or time.monotonic() > deadline:
                return "ended, not waited for"
            time.sleep(LOOK_S)
    except OSError:
        return "unknown"
    return command


def open_files(folder: Path) -> frozenset[str]:
    """The files below `folder` that this process holds open, without those of installed packages.

    The environment may lie in the working folder, and a library keeps what it reads there: matplotlib its fonts.
    """
    inside, installed = f"{folder}/", f"{sys.prefix}/"
    found = set()
    for descriptor in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        try:
            target = os.readlink(f"{DESCRIPTORS}/{descriptor}")
        except OSError:
            continue  # closed since: the folder listing itself
        if target.startswith(inside) and not target.startswith(installed):  # paths as objects take 2 ms of each test
            found.add(target)
    return frozenset(found)


def let_ranks_meet(**options: Any) -> None:
    """Join and leave a world with the usual timeout, so that a shorter one of the next world counts no late start."""
    with dl.join_world(**options):
        pass


def freeze_what_is_imported() -> None:
    """Spare garbage collections what many new modules hold: torch's objects took them a fifth of the tests' time."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + MODULES_TO_FREEZE:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def run_cleanly(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Call the function on a rank, and fail if it left something behind there."""
    freeze_what_is_imported()
    before = look_around()
    result = function(*arguments, **keywords)
    left = left_behind(before)
    if left:
        raise AssertionError(f"a task must leave its rank as it was; {function.__name__} left: {'; '.join(left)}")
    return result


def in_world(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """`function(world, ...)` in a world that is joined for it."""
    with dl.join_world() as world:
        return function(world, *arguments, **keywords)


def caught(function: Callable[..., Any], *arguments: Any) -> tuple[str, str, float]:
    """The type and the text of what a call raises, and the seconds that it took; "" for no exception."""
    began = time.monotonic()
    try:
        function(*arguments)
    except BaseException as error:
        return type(error).__name__, _text(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except LookupError:
        return "(no words)"


def sum_of_ranks() -> float:
    """The smallest task of all: every rank learns the sum of their numbers."""
    dist.init_process_group("gloo")
    try:
        total = torch.tensor(float(dist.get_rank()), dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()
    finally:
        dist.destroy_process_group()


class Unspeakable(Exception):
    """An exception that cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")
