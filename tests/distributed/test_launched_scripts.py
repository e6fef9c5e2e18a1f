"""Scripts and notebooks that start ranks: what they print, and how they end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.harness import MOMENT_S
from tests.support.scripts import SCRIPT_S, StartPython, write

pytestmark = pytest.mark.covers("C7")


SCRIPT = """
import os, sys
from ddp_loop.distributed import launch

def place():
    for stream in (sys.stdout, sys.stderr) * int(os.environ.get("TIMES_PRINTED", "1")):
        print("on rank", os.environ["RANK"], file=stream)
    return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
"""


@pytest.mark.slow
def test_functions_of_a_script_run_and_their_lines_are_seen_and_do_not_mix(
    start_python: StartPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unbuffered, as containers and CI often set it, a print writes each of its words by itself.
    monkeypatch.setenv("TIMES_PRINTED", "300")
    guarded = SCRIPT + 'if __name__ == "__main__":\n    print(launch(place, 2))\n'
    out, errors = start_python("-u", write(tmp_path, guarded)).communicate(timeout=SCRIPT_S)
    lines = ["on rank 0"] * 300 + ["on rank 1"] * 300
    assert sorted(errors.splitlines()) == lines
    assert sorted(out.splitlines()) == ["['0 of 2', '1 of 2']", *lines]


@pytest.mark.slow
def test_a_script_without_a_guard_gets_an_error_that_says_so(start_python: StartPython, tmp_path: Path) -> None:
    out, errors = start_python(write(tmp_path, SCRIPT + "print(launch(place, 1))\n")).communicate(timeout=SCRIPT_S)
    assert out == ""
    assert "A worker process died with exit code 1 before it was ready" in errors.splitlines()[-1]
    assert 'put the code that starts them under `if __name__ == "__main__":`' in errors.splitlines()[-1]


@pytest.mark.slow
def test_functions_of_a_notebook_run_with_cloudpickle(start_python: StartPython) -> None:
    pytest.importorskip("cloudpickle", reason="needs the extra ddp_loop[notebook]")
    # `python -c` is like a notebook in what matters: no other process can import its functions.
    out, errors = start_python("-c", SCRIPT + "print(launch(place, 1))\n").communicate(timeout=SCRIPT_S)
    assert (out, errors) == ("on rank 0\n['0 of 1']\n", "on rank 0\n")


@pytest.mark.slow
def test_functions_of_a_notebook_without_cloudpickle_get_the_install_command(start_python: StartPython) -> None:
    without = "import sys; sys.modules['cloudpickle'] = None\n"
    _, errors = start_python("-c", without + SCRIPT + "launch(place, 1)\n").communicate(timeout=SCRIPT_S)
    assert errors.splitlines()[-1].startswith("TypeError: New processes cannot import what was defined in a notebook")
    assert errors.splitlines()[-1].endswith("pip install 'ddp_loop[notebook]'.")


@pytest.mark.slow
def test_ctrl_c_in_the_parent_reaches_a_rank_once_and_lets_it_end_well(
    start_python: StartPython, tmp_path: Path
) -> None:
    # A suite that runs in the background of a shell finds Ctrl-C ignored, and so would the script.
    script = """
import signal, threading
from ddp_loop.distributed import launch

def wait():
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print("checkpoint written", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch(wait, 1)
"""
    process = start_python(write(tmp_path, script))
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=SCRIPT_S)
    assert out == "checkpoint written\n"
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_no_rank_outlives_a_parent_that_is_killed(start_python: StartPython, tmp_path: Path) -> None:
    # One pool starts in the main thread, where the kernel ends the ranks; the other in a thread that has ended by
    # the time of its second task, so that only a watch on the parent can tell.
    script = """
import os, threading
from ddp_loop.distributed import Pool

def wait():
    print("waiting", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    first, second = Pool(1), Pool(1)
    first.run(os.getpid, 1)
    starter = threading.Thread(target=second.run, args=(os.getpid, 1))
    starter.start()
    starter.join()
    for pool in (first, second):
        threading.Thread(target=pool.run, args=(wait, 1)).start()
"""
    process = start_python(write(tmp_path, script))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
    process.kill()
    # The pipes end when the last process that holds them has ended; else this raises TimeoutExpired.
    assert process.communicate(timeout=MOMENT_S) == ("", "")


@pytest.mark.slow
def test_the_same_function_runs_under_torchrun(start_python: StartPython, tmp_path: Path) -> None:
    script = """
import sys
from tests.support.harness import sum_of_ranks

if __name__ == "__main__":
    sys.stdout.write(f"{sum_of_ranks()}\\n")  # torchrun's workers write each piece of a print by itself
"""
    process = start_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", write(tmp_path, script))
    )
    out, errors = process.communicate(timeout=SCRIPT_S)
    assert out == "1.0\n1.0\n", errors
