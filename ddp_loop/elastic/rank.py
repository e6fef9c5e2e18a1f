"""The process of a rank: the script as `__main__`, and its uncaught error left to the launcher, which prints it once.

A script that fails before `join_world`, for example in its imports, fails on all ranks alike. So a `sys.excepthook` is
there before the script begins. Torch is not imported here: the script may set variables that torch reads.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import json
import linecache
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from ddp_loop.elastic.process_states import INTERRUPTED_EXIT, PEER_FAILED_EXIT

START = "DDP_LOOP_START"  # in the ranks' environment: how `run` was started
_FILE = "TORCHELASTIC_ERROR_FILE"  # where the agent looks for a rank's error
ADVICE = ".advice"  # added to the name of that file
_REPORTED = "_ddp_loop_is_reported"  # of an exception
MOST_LETTERS = 8000  # of an error that a launcher prints
_PR_SET_PDEATHSIG = 1
_advising = threading.Lock()  # a checkpoint that is written meanwhile changes the advice
_OUTSIDE = (__file__, runpy.__file__, "<frozen runpy>", os.path.join(os.path.dirname(__file__), "__main__.py"))


def end_with_parent(parent: int, code: int) -> bool:
    """Have the kernel kill this process when the parent's thread that started it dies; False where it cannot.

    Args:
        parent: its process id.
        code: ends this process if the parent has died meanwhile.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        return False
    if os.getppid() != parent:
        os._exit(code)
    return True


def run_as_main(words: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does, or a module as `python -m MODULE ARGUMENTS` does.

    Args:
        words: the script and its arguments, or "-m", the module and its arguments.
    """
    with suppress(KeyError):  # without a launcher
        end_with_parent(json.loads(os.environ[START])["process"], PEER_FAILED_EXIT)
    sys.excepthook = show_unless_reported
    atexit.register(_end_if_reported)  # the first one runs last
    os.register_at_fork(after_in_child=lambda: os.environ.pop(_FILE, None))  # its error is not the rank's
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(words[0])
    sys.argv[:] = words
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    if pkgutil.get_importer(path) is not None or path.endswith(".pyc"):  # a folder or an archive, with a __main__
        runpy.run_path(path, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it would raise in the interpreter's end
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def show_unless_reported(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught exception to the launcher, or print it if that is not possible; a `sys.excepthook`."""
    trace = begin_at_script(error)
    if is_reported(error):
        return
    if isinstance(error, Exception):  # it was raised outside of a world
        shorten_refusal(error)
        is_syntax = isinstance(error, SyntaxError)  # whose last lines show the source
        line = f"{kind.__name__}: {error}" if is_syntax else "".join(traceback.format_exception_only(error)).strip()
        leave_error(error, line, "".join(traceback.format_exception(error)), is_shown=False)
    elif isinstance(error, KeyboardInterrupt):  # no loop has taken it
        leave_error(error, "was ended by Ctrl-C", "", is_shown=False)
    if not is_reported(error):
        sys.__excepthook__(kind, error, trace)


def begin_at_script(error: BaseException) -> TracebackType | None:
    """The traceback of an uncaught exception from now on: without the lines that started the script."""
    trace = error.__traceback__
    while trace is not None and is_outside(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace
    return trace


def shorten_refusal(error: BaseException) -> None:
    """Leave out the last lines of a traceback where a `raise` of this package made the error, with its remedy.

    An error of another kind, as of a bug or of a dataset, keeps all lines.
    """
    script = None
    innermost = None
    trace = error.__traceback__
    while trace is not None:
        # It is between a block and what its context manager raises.
        if trace.tb_frame.f_globals.get("__name__") != "contextlib":
            innermost = trace
            script = script if is_of_package(trace) else trace
        trace = trace.tb_next
    if script is None or innermost is None or script is innermost:
        return
    line = linecache.getline(innermost.tb_frame.f_code.co_filename, innermost.tb_lineno)
    if line.lstrip().startswith("raise "):
        script.tb_next = None
        if error.__cause__ is not None and str(getattr(error.__cause__, "strerror", error.__cause__)) in str(error):
            error.__cause__ = None  # whose words the error has


def is_of_package(trace: TracebackType) -> bool:
    """Whether a frame of a traceback is of the package, and not of what starts the script."""
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.startswith("ddp_loop.") and not name.startswith("ddp_loop.elastic.")


def is_outside(file: str) -> bool:
    """Whether the code of a file starts the script, so that its lines say nothing of it."""
    return file in _OUTSIDE


def _end_if_reported() -> None:
    """End a process that failed, without finalizing the interpreter: that takes 0.4 s with torch, on busy cores 3 s."""
    error = getattr(sys, "last_value", None)  # an exception that the script has not caught
    if isinstance(error, Exception | KeyboardInterrupt) and is_reported(error):
        flush_output()
        os._exit(1 if isinstance(error, Exception) else INTERRUPTED_EXIT)


def flush_output(last: str = "") -> None:
    """Flush what this process printed, with a last line on the standard error."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, last)):
        with suppress(AttributeError, OSError, ValueError):  # it is closed, or its reader is gone
            stream.write(text)
            stream.flush()


def open_missing_streams() -> None:
    """Give a process that was started without a standard stream, as some daemons are, the null device in its place.

    Else the next file that is opened would get the stream's number, and with it what libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: the missing stream's
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w", closefd=False))


def is_reported(error: BaseException) -> bool:
    """Whether the launcher prints this exception."""
    return getattr(error, _REPORTED, False)


def leave_error(
    error: BaseException, line: str, text: str, *, is_shown: bool, where: str = "", is_peer: bool = False
) -> None:
    """Write an error to the file that the launcher reads, torchrun or `run`; nothing where there is none.

    Args:
        error: which is reported from then on, unless `is_shown`.
        line, text: its last line, and its traceback.
        is_shown: whether this rank prints it.
        where: the rank's stage, such as " in forward of step 12".
        is_peer: whether another rank failed.
    """
    path = os.environ.get(_FILE)
    now = time.time()
    if not path:
        return
    # torchrun calls the failure with the smallest whole second the cause. A peer without a file gets the second of
    # torchrun's clock, which can be this one. So this error is dated a second back.
    facts: dict[str, object] = {"py_callstack": cut_text(text), "timestamp": str(int(now) - 1)}
    if not is_shown:
        facts |= {"at": now, "where": where, "is_peer": is_peer, "is_shown": False}
    with suppress(OSError):
        _write_whole(path, json.dumps({"message": {"message": cut_text(line), "extraInfo": facts}}))
        if not is_shown:
            setattr(error, _REPORTED, True)


def cut_text(text: str, most: int = MOST_LETTERS) -> str:
    """The text without its middle if it has more letters: the kind of an error stays, and its last words."""
    if len(text) <= most:
        return text
    half = most // 2
    left_out = f"[{len(text) - most} characters are left out. The run folder, if there is one, has the whole.]"
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"


def leave_advice(advice: Callable[[], str]) -> bool:
    """Leave the launcher `run` what it is to print if a rank fails, such as how to go on; the last one counts.

    Args:
        advice: returns it. Threads come one after the other, so that the last one has what the others knew.

    Returns:
        Whether there is such a launcher.
    """
    path = os.environ.get(_FILE)
    if not path or START not in os.environ:
        return False
    with suppress(OSError), _advising:
        _write_whole(f"{path}{ADVICE}", advice())
    return True


def _write_whole(path: str, text: str) -> None:
    """Write a file of which a rank that is killed meanwhile leaves no half."""
    # The name of a folder may have bytes that are no UTF-8.
    with open(f"{path}.new", "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
