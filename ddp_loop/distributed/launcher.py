"""Launching ranks from Python: a pool of worker processes, their results, and the culprit if one fails."""

from __future__ import annotations

import atexit
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ddp_loop.distributed.cells import LaunchedCells, shows_ranks
from ddp_loop.distributed.processes import LineHook, set_line
from ddp_loop.distributed.worker import (
    Answer,
    Failure,
    FailurePriority,
    Task,
    Worker,
    has_cloudpickle,
    main_is_interactive,
    pack,
    wait_for_any,
)
from ddp_loop.elastic import GRACE_S, LOOPBACK, host_store, loopback_variables

Result = TypeVar("Result")

_STOP_S = 30.0  # for a checkpoint after Ctrl-C, as torchrun allows


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
        if size < 1:
            raise ValueError(f"There must be at least 1 rank. Got {size}.")
        self.size = size
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
        if not 1 <= ranks <= self.size:
            raise ValueError(f"A task runs on 1 .. {self.size} ranks of this pool. Got {ranks}. Create a larger Pool.")
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, or None for no limit. Got {timeout_s}.")
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
                answers = self._collect(range(ranks), timeout_s, cells)
            except BaseException:
                self._interrupt(range(ranks), cells)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, ranks: int) -> None:
        """Start those of the first `ranks` workers that are missing, and wait until all are ready."""
        gone = [rank for rank, worker in self._workers.items() if not worker.usable]
        self._end(gone)
        try:
            for rank in range(ranks):
                if rank not in self._workers:
                    self._workers[rank] = Worker()
            for rank in range(ranks):
                self._workers[rank].wait_until_ready()
        except BaseException:
            self._end([rank for rank, worker in self._workers.items() if not worker.ready])
            raise

    def _collect(self, ranks: Iterable[int], timeout_s: float | None, cells: LaunchedCells) -> dict[int, Answer]:
        """The answers of these ranks; a failure for each rank that did not answer. Shows meanwhile what they show."""
        answers: dict[int, Answer] = {}
        late = f"did not return within {timeout_s} s"
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        waiting = set(ranks)
        has_failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait_for_any([self._workers[rank] for rank in waiting], left)
            for rank in sorted(waiting):
                answer = self._workers[rank].answer()
                cells.take(self._workers[rank].shown)  # after the answer, before which all was sent
                if answer is None:
                    continue
                waiting.discard(rank)
                answers[rank] = answer
                if isinstance(answer, Failure) and time.monotonic() + GRACE_S < deadline:
                    late = f"had not ended {GRACE_S:g} s after another rank failed, and was killed"
                    deadline = time.monotonic() + GRACE_S
                    has_failed = True
            if has_failed:  # a stopped rank needs no time: it answers nothing
                stopped = {rank for rank in waiting if self._workers[rank].is_stopped}
                answers.update({rank: self._workers[rank].stuck("did not answer, and was killed") for rank in stopped})
                self._end(stopped)
                waiting -= stopped
        answers.update({rank: self._workers[rank].stuck(late) for rank in sorted(waiting)})
        self._end(waiting)
        return answers

    def _interrupt(self, ranks: Iterable[int], cells: LaunchedCells) -> None:
        """Pass Ctrl-C on to the working ranks and let them end; a second Ctrl-C kills them."""
        working = [rank for rank in ranks if rank in self._workers and self._workers[rank].working]
        try:
            for rank in working:
                self._workers[rank].send_signal(signal.SIGINT)
            self._collect(working, _STOP_S, cells)
        except KeyboardInterrupt as second:
            set_line(second, "ddp_loop: all ranks were ended by a second Ctrl-C")
            sys.excepthook = LineHook(sys.excepthook)
            raise second from None
        finally:
            self._end([rank for rank in working if rank in self._workers and self._workers[rank].working])

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
    return (
        loopback_variables()
        | threads
        | dict(os.environ)
        | {
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
    )


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
        culprit = min(failures, key=lambda rank: (failures[rank].blame, rank))
        if failures[culprit].blame is FailurePriority.PEER_FAILED and (names := failures[culprit].names) in answers:
            failures.setdefault(names, Failure(FailurePriority.RAISED, "ended while other ranks waited for it"))
            culprit = names
        raise _rank_failed(culprit, failures) from _cause(failures[culprit])
    return results


def _rank_failed(culprit: int, failures: dict[int, Failure]) -> RankFailed:
    failure = failures[culprit]
    lines = [f"rank {culprit} {failure.headline}"]
    if failure.trace:
        lines += ["", failure.trace.rstrip()]
    others = {rank: other for rank, other in failures.items() if rank != culprit}
    if others:
        lines += ["", "Other ranks that failed:"]
        lines += [f"  rank {rank} {other.headline.splitlines()[0]}" for rank, other in others.items()]
    for rank, other in others.items():
        if other.blame in (FailurePriority.STUCK, FailurePriority.STUCK_IN_COLLECTIVE):
            lines += ["", f"The stack of rank {rank}:", other.trace.rstrip()]
    return RankFailed("\n".join(lines), culprit, failure.trace, failure.blame is FailurePriority.DIED)


def _cause(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        exception = pickle.loads(failure.exception)
    except Exception:
        return None  # the message contains its text
    return exception if isinstance(exception, BaseException) else None
