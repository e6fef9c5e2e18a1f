"""Launching ranks from Python: a pool of worker processes, their results, and the culprit if one fails.

A worker stands here from both sides: as its parent sees it, and the process that runs its parent's tasks, and dies with
its parent.

[Note: Half imported] Where an import is interrupted, Python forgets the module but not its parts. The next import finds
these in `sys.modules`, and does not make them attributes of the module again: `module.part` raises AttributeError. So
the worker ends after the task, and the pool starts another one.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist

from ddp_loop.determinism import check_count
from ddp_loop.distributed.cells import CELL, LaunchedCells, cell_sockets, shows_ranks
from ddp_loop.distributed.failures import PeerFailed, Stopped
from ddp_loop.distributed.gloo import keeps_a_group
from ddp_loop.distributed.join import leave_open_worlds
from ddp_loop.distributed.process_group import forget_failed_starts
from ddp_loop.distributed.processes import LineHook, children_except, end_daemons, set_line
from ddp_loop.elastic import (
    GRACE_S,
    LOOPBACK,
    PEER_FAILED_EXIT,
    end_with_parent,
    flush_output,
    host_store,
    is_stopped,
    lacked_memory,
    loopback_variables,
    oom_kills,
)

Result = TypeVar("Result")

_RANKS = "The number of ranks"
_STOP_S = 30.0  # for a checkpoint after Ctrl-C, as torchrun allows
_PARENT_CHECK_S = 1.0
_START_S = 120.0  # 4 workers start in 4 s on two idle cores; on busy ones it may take many times longer
_END_S = 10.0  # for exit functions that tasks registered; without any a worker ends in milliseconds
_LOOK_S = 0.5  # a dead worker's pipes stay open while a process that it forked lives, so it is polled too
_STACK_S = 1.0
_STACK_SILENCE_S = 0.1


class RankFailed(RuntimeError):
    """A rank raised, died or did not return. The message contains the rank, the reason and the traceback.

    The rank's exception, if it could be pickled, is the `__cause__`.

    Attributes:
        rank: the culprit, which is the failed rank that did not fail because of another one.
        traceback: the text of its traceback, or of its stack if it was stuck; empty if it died.
        died: whether its process died, as by a signal.
    """

    def __init__(self, message: str, rank: int, traceback: str, died: bool = False) -> None:
        super().__init__(message, rank, traceback, died)
        self.rank = rank
        self.traceback = traceback
        self.died = died

    def __str__(self) -> str:
        return str(self.args[0])


def launch(
    function: Callable[..., Result], ranks: int, /, *arguments: Any, timeout_s: float | None = None, **keywords: Any
) -> list[Result]:
    """Call `function(*arguments, **keywords)` in each of `ranks` new processes, and return the results in rank order.

    Each process has the environment variables that torchrun sets, so the same function runs under torchrun:

        def train(epochs):
            with dl.join_world(seed=0) as world:
                ...

        if __name__ == "__main__":  # new processes import this file
            losses = dl.launch(train, 4, 20)

    Functions defined in a notebook need `pip install 'ddp_loop[notebook]'`. As under torchrun, each of several ranks
    computes with one thread unless OMP_NUM_THREADS is set. All ranks run on this machine.

    Args:
        function, arguments, keywords: called on each rank with them; they and its result are pickled.
        ranks: the number of processes, 1 or more.
        timeout_s: how long the call may take, in seconds; None is no limit. (Bind a keyword of this name for
            `function` itself by `functools.partial`.)

    Raises:
        RankFailed: a rank raised, died, or did not return in time. The others have been ended too.
        RuntimeError: the processes could not be started.
        TypeError, ValueError: `function` cannot be called or pickled, or `ranks` is below 1.
    """
    with Pool(ranks) as pool:
        return pool.run(function, ranks, *arguments, timeout_s=timeout_s, **keywords)


class Pool:
    """Worker processes for many short tasks: a task costs milliseconds, a start seconds.

        with Pool(4) as pool:
            pool.run(train, 4, 20)
            pool.run(train, 2, 20)

    Workers start when a task first needs them, and end with the pool, or with this process, however it ends. A worker
    that died or was stuck is replaced. Modules that changed since a worker imported them are not imported again. Tasks
    run one at a time; a second thread waits.

    Args:
        size: the largest number of ranks of a task, 1 or more.
        environment: further environment variables of the ranks, such as CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: `size` is below 1.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        self.size = check_count(_RANKS, size)
        self._variables = dict(environment or {})
        self._workers: dict[int, Worker] = {}
        self._turn = threading.Lock()
        self._closed = False
        # Runs before multiprocessing's own exit function, which would wait for the workers.
        atexit.register(self.close)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the living workers, in rank order."""
        workers = dict(self._workers)  # another thread may run a task meanwhile
        return tuple(worker.process_id for _, worker in sorted(workers.items()) if worker.alive)

    def run(
        self,
        function: Callable[..., Result],
        ranks: int,
        /,
        *arguments: Any,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> list[Result]:
        """Call `function` on the first `ranks` workers, as `launch` does; return the results in rank order.

        The ranks have this process's current environment variables, working folder and import path.

        Args:
            function, arguments, keywords: called on each rank with them; they and its result are pickled.
            ranks: the number of ranks, 1 .. size.
            timeout_s: how long the task may take, in seconds; None is no limit.

        Raises:
            RankFailed: a rank raised, died, or did not return in time. The pool can be used again.
            RuntimeError: the workers could not be started.
            TypeError, ValueError: `function` cannot be called or pickled, or `ranks` is not 1 .. size.
        """
        call = pack_call(function, arguments, keywords)
        if check_count(_RANKS, ranks) > self.size:
            raise ValueError(f"A task runs on 1 .. {self.size} ranks of this pool. Got {ranks}. Create a larger Pool.")
        if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):  # NaN too
            raise ValueError(f"timeout_s must be positive, or None for no limit. Got {timeout_s!r}.")
        with self._turn:
            if self._closed:
                raise RuntimeError("A closed pool cannot run tasks. Create a new Pool.")
            self._start(ranks)
            store = host_store()  # a new one for each task, without the keys of the last
            cells = LaunchedCells(shows=shows_ranks())
            try:
                for rank in range(ranks):
                    environment = _environment(rank, ranks, store.port) | self._variables
                    self._workers[rank].send(Task(call, environment, os.getcwd(), sys.path, cells.shows))
                answers = self._collect(timeout_s, cells)
            except BaseException:
                self._interrupt(cells)
                raise
            finally:
                cells.end()
        return _results(answers)

    def close(self) -> None:
        """End the workers. The pool cannot be used again."""
        self._closed = True
        for worker in self._workers.values():
            worker.ask_to_end()
        self._end(self._workers)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, ranks: int) -> None:
        """Start the missing ones of the first `ranks` workers, and wait until all are ready."""
        self._end([rank for rank, worker in self._workers.items() if worker.spent or not worker.alive])
        try:
            for rank in range(ranks):
                if rank not in self._workers:
                    self._workers[rank] = Worker()
            for rank in range(ranks):
                self._workers[rank].wait_until_ready()
        except BaseException:
            self._end(self._busy())
            raise

    def _busy(self) -> dict[int, Worker]:
        """The workers that start or run a task, by their ranks."""
        return {rank: worker for rank, worker in self._workers.items() if not worker.idle}

    def _collect(self, timeout_s: float | None, cells: LaunchedCells) -> dict[int, Answer]:
        """The answers of the ranks; a failure for each rank that did not answer. Shows meanwhile what they show."""
        answers: dict[int, Answer] = {}
        late = f"did not return within {timeout_s} s"
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        waiting = self._busy()
        has_failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait_for_any(waiting.values(), left)
            for rank, worker in sorted(waiting.items()):
                answer = worker.answer()
                cells.take(worker.shown)  # after the answer, before which all was sent
                if answer is None:
                    continue
                del waiting[rank]
                answers[rank] = answer
                if isinstance(answer, Failure) and time.monotonic() + GRACE_S < deadline:
                    late = f"had not ended {GRACE_S:g} s after another rank failed, and was killed"
                    deadline = time.monotonic() + GRACE_S
                    has_failed = True
            if has_failed:  # a stopped rank needs no time: it answers nothing
                stopped = [rank for rank, worker in waiting.items() if worker.is_stopped]
                answers.update({rank: waiting.pop(rank).stuck("did not answer, and was killed") for rank in stopped})
                self._end(stopped)
        answers.update({rank: worker.stuck(late) for rank, worker in waiting.items()})
        self._end(waiting)
        return answers

    def _interrupt(self, cells: LaunchedCells) -> None:
        """Pass Ctrl-C on to the working ranks and let them end; a second Ctrl-C kills them."""
        try:
            for worker in self._busy().values():
                worker.send_signal(signal.SIGINT)
            self._collect(_STOP_S, cells)
        except KeyboardInterrupt as second:
            set_line(second, "ddp_loop: all ranks were ended by a second Ctrl-C")
            sys.excepthook = LineHook(sys.excepthook)
            raise second from None
        finally:
            self._end(self._busy())

    def _end(self, ranks: Iterable[int]) -> None:
        for rank in tuple(ranks):
            self._workers.pop(rank).end()


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script on this rank as its launcher would.

    Raises:
        RuntimeError: it ended by `sys.exit` with an error.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).resolve().parent)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise RuntimeError(f"The script ended by sys.exit({ending.code!r}).") from None
    finally:
        sys.argv, sys.path[:] = before


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """This process's variables and those that torchrun sets, for a store hosted here."""
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return {
        **loopback_variables(),
        **threads,
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def pack_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bytes:
    """A call for new processes.

    Raises:
        TypeError: they cannot get the function and its arguments.
    """
    if not callable(function):
        raise TypeError(f"The first argument must be the function to call on each rank. Got {function!r}.")
    remedy = "Import it from a module, or run: pip install 'ddp_loop[notebook]'."
    try:
        call = pack((function, arguments, keywords))
    except Exception as error:
        if has_cloudpickle():
            remedy = "Make it inside the function."
        raise TypeError(
            f"The function and its arguments are pickled for each rank. These cannot be pickled ({error}). {remedy}"
        ) from error
    if main_is_interactive() and b"__main__" in call and not has_cloudpickle():
        raise TypeError(
            "New processes cannot import what was defined in a notebook or at a prompt. The function is "
            f"{function!r}. {remedy}"
        )
    return call


def _results(answers: dict[int, Answer]) -> list[Any]:
    """The results in rank order.

    Raises:
        RankFailed: there is a failure among the answers.
    """
    results = []
    failures = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, Failure):
            failures[rank] = answer
            continue
        try:
            results.append(pickle.loads(answer.result))
        except Exception as error:
            failures[rank] = Failure(FailurePriority.RAISED, f"returned a value that cannot be unpickled: {error!r}")
    if failures:
        culprit = min(failures, key=lambda rank: failures[rank].blame)  # the lowest of several
        if (names := failures[culprit].names) in answers:
            failures.setdefault(names, Failure(FailurePriority.RAISED, "ended while other ranks waited for it"))
            culprit = names
        failure = failures.pop(culprit)
        raise _rank_failed(culprit, failure, failures) from _cause(failure)
    return results


def _rank_failed(culprit: int, failure: Failure, others: dict[int, Failure]) -> RankFailed:
    lines = [f"rank {culprit} {failure.headline}"]
    if failure.trace:
        lines += ["", failure.trace.rstrip()]
    if others:
        lines += ["", "Other ranks that failed:"]
        lines += [f"  rank {rank} {other.headline.splitlines()[0]}" for rank, other in others.items()]
    for rank, other in others.items():
        if other.blame in (FailurePriority.STUCK, FailurePriority.STUCK_IN_COLLECTIVE):
            lines += ["", f"The stack of rank {rank}:", other.trace.rstrip()]
    return RankFailed("\n".join(lines), culprit, failure.trace, failure.blame is FailurePriority.DIED)


def _cause(failure: Failure) -> BaseException | None:
    with suppress(Exception):  # the message contains its text
        exception = pickle.loads(failure.exception)
        if isinstance(exception, BaseException):
            return exception
    return None


class FailurePriority(IntEnum):
    """Which of several failed ranks is the culprit: the one with the smallest value."""

    DIED = 0
    RAISED = 1
    STUCK = 2
    STUCK_IN_COLLECTIVE = 3  # waits for another rank
    PEER_FAILED = 4  # raised because another rank failed


@dataclass(frozen=True)
class Task:
    """One call, and its environment: the parent's at the time of the call, plus the rank's variables.

    `has_cell` is whether the parent shows in a notebook what the rank shows.
    """

    call: bytes
    environment: dict[str, str]
    folder: str
    path: list[str]
    has_cell: bool


@dataclass(frozen=True)
class Returned:
    """A rank's pickled result. The process ends after a `last` answer."""

    result: bytes
    last: bool = False


@dataclass(frozen=True)
class Failure:
    """How a rank failed: `headline` completes "rank 1 ...", `trace` is a traceback or a stack.

    `exception` is pickled, or empty. `names` is the rank whose failure made it fail.
    """

    blame: FailurePriority
    headline: str
    trace: str = ""
    exception: bytes = b""
    last: bool = False
    names: int | None = None


Answer = Returned | Failure


def main_is_interactive() -> bool:
    """Whether `__main__` is a notebook or a prompt, which a new process cannot import."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


def pack(value: object) -> bytes:
    """Pickle a value, by cloudpickle where pickle cannot and cloudpickle is installed.

    Plain pickle comes first: it stores the names of a script's functions and classes, whereas cloudpickle copies them
    with all the globals they read.

    Raises:
        Exception: whatever the pickling of the value raises.
    """
    if not (main_is_interactive() and has_cloudpickle()):
        try:
            return pickle.dumps(value)
        except Exception:
            if not has_cloudpickle():
                raise
    packed: bytes = importlib.import_module("cloudpickle").dumps(value)
    return packed


def has_cloudpickle() -> bool:
    """Whether functions defined in a notebook can be pickled."""
    return importlib.util.find_spec("cloudpickle") is not None


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # threads of torch and gloo do not survive a fork
        self._tasks, tasks = spawn.Pipe()
        self._stacks, stacks = spawn.Pipe(duplex=False)
        self.shown, cells = cell_sockets()
        self.idle = self.spent = False
        self._oom_kills: int | None = None  # when it got its task
        main_thread = threading.current_thread() is threading.main_thread()
        self._process: SpawnProcess = spawn.Process(
            target=serve, args=(tasks, stacks, cells, os.getpid(), main_thread), name="ddp_loop rank"
        )
        self._process.start()
        self.process_id = self._process.pid or 0
        tasks.close()
        stacks.close()
        cells.close()

    @property
    def alive(self) -> bool:
        try:
            return self._process.is_alive()
        except ValueError:  # another thread has just closed it
            return False

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, and answers nothing."""
        return self.alive and is_stopped(self.process_id)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self.idle:
            wait_for_any([self], deadline - time.monotonic())
            word = self._receive()
            self.idle = isinstance(word, Returned)
            if isinstance(word, Failure):
                raise RuntimeError(
                    f"A worker process {word.headline} before it was ready. Its own message is above. "
                    "New processes import the main script, so put the code that starts them under "
                    '`if __name__ == "__main__":`.'
                )
            if not self.idle and time.monotonic() > deadline:
                raise RuntimeError(f"A worker process was not ready within {_START_S:g} s. Check the machine's load.")

    def send(self, task: Task) -> None:
        self.idle = False
        self._oom_kills = oom_kills()
        with suppress(OSError):  # it has just died, which the answer reports
            self._tasks.send(task)

    def answer(self) -> Answer | None:
        """The outcome of the task; None while it runs."""
        word: Answer | None = self._receive()
        if word is not None:
            self.idle = True
            self.spent = word.last
        return word

    def _receive(self) -> Any:
        alive = self.alive  # read before the pipe: a worker may answer and then die
        try:
            if self._tasks.poll():
                return self._tasks.recv()
        except (EOFError, OSError):
            self._process.join(_STACK_S)
            alive = False
        if alive:
            return None
        if self._process.exitcode == PEER_FAILED_EXIT:
            return Failure(
                FailurePriority.PEER_FAILED, "was ended because another rank failed and it could not be interrupted"
            )
        return Failure(FailurePriority.DIED, _cause_of_death(self._process.exitcode, self._oom_kills))

    def stuck(self, headline: str) -> Failure:
        """The failure of a worker that does not return, with its stack."""
        if self.is_stopped:
            why = f"was stopped, as by SIGSTOP: it {headline}"
            return Failure(FailurePriority.STUCK, why, "(No stack. The process is stopped.)\n")
        self.send_signal(signal.SIGUSR1)
        stack = b""
        timeout_s = _STACK_S
        while self._stacks.poll(timeout_s):
            chunk = os.read(self._stacks.fileno(), 1 << 16)
            if not chunk:
                break
            stack = stack + chunk
            timeout_s = _STACK_SILENCE_S
        text = stack.decode(errors="replace")
        blame = FailurePriority.STUCK_IN_COLLECTIVE if "torch/distributed" in text else FailurePriority.STUCK
        return Failure(blame, headline, text or "(No stack. The process is stuck in the kernel.)\n")

    def send_signal(self, number: signal.Signals) -> None:
        if self.alive:  # also collects a dead process, whose id another one may get
            os.kill(self.process_id, number)

    def ask_to_end(self) -> None:
        if self.idle:
            with suppress(OSError):
                self._tasks.send(None)

    def end(self) -> None:
        if self.idle:
            self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._tasks.close()
        self._stacks.close()
        self.shown.close()


def wait_for_any(workers: Iterable[Worker], timeout_s: float) -> None:
    """Wait until one of the workers may have answered or died, for `timeout_s` or less."""
    sources = [source for worker in workers for source in (worker._tasks, worker._process.sentinel, worker.shown)]
    wait(sources, min(max(timeout_s, 0.0), _LOOK_S))


def _cause_of_death(exit_code: int | None, oom_kills_before: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"died with exit code {exit_code}"
    known = {number.value: number.name for number in signal.Signals}
    died = f"died by signal {-exit_code} ({known.get(-exit_code, 'unnamed')})"
    return f"{died}, for lack of memory" if exit_code == -signal.SIGKILL and lacked_memory(oom_kills_before) else died


def serve(tasks: Connection, stacks: Connection, cells: socket.socket, parent: int, main_thread: bool) -> None:
    """Run tasks until None arrives or the parent closes or dies. This is the target of a worker process.

    Args:
        tasks: receives each `Task`, then None; sends a `Returned` when it is ready, then an `Answer` for each task.
        stacks: SIGUSR1 writes the Python stacks of all threads to it, even of a stuck process.
        cells: sends what tasks show in a notebook.
        parent: the process id of the parent.
        main_thread: whether the parent's main thread started this process.
    """
    # The kernel sends its signal when the parent's *thread* that started this process dies, so it is used for the main
    # thread only. Otherwise a thread of this process watches.
    if not (main_thread and end_with_parent(parent, 1)):
        threading.Thread(target=_watch, args=(parent,), name="ddp_loop-parent-watch", daemon=True).start()
    os.setpgid(0, 0)  # Ctrl-C reaches only the parent, which passes it on once to the working ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A spawned process spawns a DataLoader's workers too: an epoch would start in 3.3 s instead of 0.06 s.
    multiprocessing.set_start_method(None, force=True)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    _print_whole_lines()
    threads = torch.get_num_threads()
    tasks.send(Returned(b""))  # torch is imported
    with suppress(EOFError, ConnectionError):
        while (task := tasks.recv()) is not None:
            answer = _run(task, threads, cells)
            tasks.send(answer)
            if answer.last:
                break
    # Exit functions run, but the interpreter is not finalized, which takes 0.4 s with torch.
    atexit._run_exitfuncs()
    flush_output()
    os._exit(0)


def _print_whole_lines() -> None:
    # Under PYTHONUNBUFFERED, print writes each argument by itself, and the lines of several ranks would mix.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _watch(parent: int) -> None:
    pipe = multiprocessing.parent_process()
    # Another child that the parent forked may hold the pipe open, so the parent's id is checked too.
    while os.getppid() == parent and not wait([pipe.sentinel] if pipe else [], _PARENT_CHECK_S):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _surround(task: Task, threads: int, cells: socket.socket) -> None:
    """Set the environment of the task, whatever an earlier one left."""
    for name in os.environ.keys() - task.environment.keys():
        del os.environ[name]
    os.environ.update(task.environment)
    if task.has_cell:
        os.environ[CELL] = f"{os.getpid()}:{cells.fileno()}"
    sys.path[:] = task.path
    os.chdir(task.folder)
    # torch reads OMP_NUM_THREADS only at import, and a worker runs many tasks.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdigit() and int(asked) else threads)


def _run(task: Task, threads: int, cells: socket.socket) -> Answer:
    answer: Answer
    broken = False
    process = os.getpid()
    children = children_except(set())
    try:
        _surround(task, threads, cells)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        function, arguments, keywords = pickle.loads(task.call)
        result = None
        try:
            result = function(*arguments, **keywords)
        except SystemExit as ending:  # without an error it has no result
            is_error = not isinstance(ending, Stopped) and ending.code not in (None, 0)
            if is_error or os.getpid() != process:
                raise
        leave_open_worlds(None)
        answer = _returned(result)
        _leave_group(failed=False)
    except BaseException as error:
        if os.getpid() != process:
            _end_fork(error)
        # SystemExit with an error and KeyboardInterrupt too: no task may end a worker of the pool.
        with suppress(Exception):  # what ended the task counts
            leave_open_worlds(error)
        _leave_group(failed=True)
        answer = _raised(error)
        broken = _interrupted_an_import(error)
        with suppress(Exception):  # torch's handler of SIGCHLD raises for a worker that was killed
            end_daemons(children_except(children))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        flush_output()
    return replace(answer, last=keeps_a_group() or broken)


def _end_fork(error: BaseException) -> NoReturn:
    """End a process that the task forked, as Python would end it; its parent answers."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    flush_output()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _interrupted_an_import(error: BaseException) -> bool:
    """Whether Ctrl-C, or the failure of another rank, has ended an import. See [Note: Half imported]."""
    if not isinstance(error, KeyboardInterrupt | PeerFailed):
        return False
    modules = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    return any(frame.f_globals.get("__name__") != "__main__" for frame in modules)  # else it is a script


def _returned(result: Any) -> Returned:
    try:
        return Returned(pack(result))
    except Exception as error:
        raise TypeError(
            f"The result of a rank is pickled. This {type(result).__qualname__} cannot be pickled ({error}). "
            "Return numbers, tensors, or containers of them."
        ) from error


def _raised(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the frames of this module do not help the user
    text = "".join(traceback.format_exception(type(error), error, trace))
    is_syntax = isinstance(error, SyntaxError)  # whose first lines show the source
    summary = f"{type(error).__name__}: {error}" if is_syntax else traceback.format_exception_only(error)[0].rstrip()
    exception = b""
    with suppress(Exception):
        exception = pack(error)
    names = error.rank if isinstance(error, PeerFailed) else None
    # gloo raises a plain RuntimeError: "Connection closed by peer" or "Connection reset by peer".
    is_of_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    is_peer = isinstance(error, PeerFailed) or is_of_gloo
    blame = FailurePriority.PEER_FAILED if is_peer else FailurePriority.RAISED
    return Failure(blame, f"raised {summary}", text, exception, names=names)


def _leave_group(*, failed: bool) -> None:
    """Leave a process group that the function did not leave, so that no peer waits and the next task can join.

    Destroying a gloo group closes its connections only with the last reference, and a failure's traceback holds some;
    `abort` closes them at once.
    """
    forget_failed_starts()
    if not dist.is_initialized():
        return
    with suppress(Exception):  # the function has ended, so errors of its group do not matter
        if failed:
            dist.distributed_c10d._get_default_group().abort()
        dist.destroy_process_group()
