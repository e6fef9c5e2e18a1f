"""The process of a rank: a script sees what it sees under `python SCRIPT`, and its error is left to the launcher."""

from __future__ import annotations

import json
import os
import py_compile
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_loop.elastic import PEER_FAILED_EXIT
from ddp_loop.elastic.rank import ADVICE, START, leave_advice
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.scripts import run

pytestmark = pytest.mark.covers("J6")

SEES = """
import json, multiprocessing, os, pickle, sys

class Mine:
    pass

def half(number):
    return number / 2

if __name__ == "__main__":
    torch = "torch" in sys.modules
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        halves = pool.map(half, [1, 3])
    main = sys.modules["__main__"]
    json.dump({
        "arguments": sys.argv, "name": __name__, "file": __file__, "package": __package__, "doc": __doc__,
        "spec": getattr(__spec__, "name", None), "path": sys.path[:2], "halves": halves, "torch": torch,
        "globals": sorted({*globals()} - {"__annotations__", "__cached__"}),
        "same": main.__dict__ is globals(), "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
        "builtins": type(__builtins__).__name__, "beside": __import__("helper").NAME, "folder": os.getcwd(),
    }, sys.stdout)
"""


def python(folder: Path, *words: str, error_file: Path | str = "") -> subprocess.CompletedProcess[str]:
    return run(*words, folder=folder, **({"TORCHELASTIC_ERROR_FILE": str(error_file)} if error_file else {}))


def test_advice_may_name_a_folder_whose_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left after a checkpoint, so an error would end the run."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    monkeypatch.setenv(START, "0")
    assert leave_advice(lambda: os.fsdecode(b"runs/M\xfcller"))
    assert (tmp_path / f"error{ADVICE}").read_text() == r"runs/M\udcfcller"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "my lab"
    folder.mkdir()
    (folder / "train.py").write_text(SEES)
    (folder / "helper.py").write_text("NAME = 'beside'\n")
    (folder / "__init__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("words", [("./my lab/../my lab/train.py", "--run", "-m"), ("link.py", "x")])
def test_a_script_sees_what_it_sees_in_python(words: tuple[str, ...], lab: Path) -> None:
    (lab / "link.py").symlink_to(lab / "my lab" / "train.py")
    plain, rank = python(lab, *words), python(lab, "-m", "ddp_loop.elastic", *words)
    assert (plain.returncode, plain.stderr) == (rank.returncode, rank.stderr) == (0, "")
    expected, seen = json.loads(plain.stdout), json.loads(rank.stdout)
    assert (expected["beside"], expected["torch"], expected["pickled"]) == ("beside", False, True)
    for name in ("file", "path"):
        expected[name], seen[name] = ([os.path.normpath(one)] for one in (expected[name][0], seen[name][0]))
    assert seen == expected


def test_a_module_sees_what_it_sees_in_python(lab: Path) -> None:
    words = ("-m", "train", "--run", "--", "x")
    plain, rank = python(lab / "my lab", *words), python(lab / "my lab", "-m", "ddp_loop.elastic", *words)
    assert (plain.returncode, plain.stderr) == (rank.returncode, rank.stderr) == (0, "")
    expected, seen = json.loads(plain.stdout), json.loads(rank.stdout)
    assert expected["spec"] == "train"
    del expected["builtins"], seen["builtins"]  # of the module, or its names, as an interpreter likes
    assert seen == expected


@pytest.mark.parametrize("kind", ["folder", "archive", "compiled"])
def test_a_folder_an_archive_or_compiled_code_is_run(kind: str, lab: Path) -> None:
    (lab / "my lab" / "__main__.py").write_text("import helper, sys\nprint(helper.NAME, sys.argv[1:])\n")
    word = "my lab"
    if kind == "archive":
        word = Path(shutil.make_archive(str(lab / "packed"), "zip", lab / "my lab")).name
    elif kind == "compiled":
        word = "my lab/main.pyc"
        py_compile.compile(str(lab / "my lab" / "__main__.py"), str(lab / word))
    plain, rank = python(lab, word, "x"), python(lab, "-m", "ddp_loop.elastic", word, "x")
    assert (rank.stdout, rank.stderr) == (plain.stdout, plain.stderr) == ("beside ['x']\n", "")


BAD = {
    "error": ("import helper\nhelper.fail()\n", "KeyError: 'rate'"),
    "syntax": ("x = (\n", "SyntaxError: '(' was never closed (bad.py, line 1)"),
    "long": ("raise ValueError('x' * 10**7)\n", "x" * 4000),
}


@pytest.mark.parametrize("way", BAD)
def test_an_error_is_left_to_the_launcher_or_else_printed_as_python_prints_it(way: str, lab: Path) -> None:
    text, line = BAD[way]
    (lab / "bad.py").write_text(text)
    (lab / "helper.py").write_text("def fail():\n    raise KeyError('rate')\n")
    rank = python(lab, "-m", "ddp_loop.elastic", "bad.py", error_file=lab / "error.json")
    assert (rank.returncode, rank.stdout, rank.stderr) == (1, "", "")
    found = json.loads((lab / "error.json").read_text())["message"]
    assert found["message"].splitlines()[-1] == line
    assert found["extraInfo"]["is_shown"] is False
    plain = python(lab, "bad.py").stderr
    printed = plain.replace('"bad.py"', f'"{lab}/bad.py"')
    left = found["extraInfo"]["py_callstack"]
    assert (left[:4000], left[-4000:]) == (printed[:4000], printed[-4000:])
    assert (len(left) < 8200) if way == "long" else (left == printed)
    if way == "error":  # where there is no launcher, or no place for what it reads
        assert python(lab, "-m", "ddp_loop.elastic", "bad.py").stderr == printed
        nowhere = python(lab, "-m", "ddp_loop.elastic", "bad.py", error_file=lab / "none" / "error.json")
        assert nowhere.stderr.endswith(plain[-100:])


def test_the_error_of_a_process_that_the_script_forked_is_printed_and_not_left_as_the_rank_s(lab: Path) -> None:
    (lab / "forks.py").write_text(
        "import os\n"
        "if (child := os.fork()) == 0:\n    raise ValueError('of the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    rank = python(lab, "-m", "ddp_loop.elastic", "forks.py", error_file=lab / "error.json")
    assert (rank.returncode, rank.stdout) == (0, "1\n")
    assert rank.stderr.endswith("ValueError: of the child\n")
    assert not (lab / "error.json").exists()


def test_after_an_error_exit_functions_run_and_the_interpreter_is_not_finalized(lab: Path) -> None:
    (lab / "slow.py").write_text(
        "import atexit, os, sys\n"
        "class Slow:\n    def __del__(self, write=os.write):\n        write(1, b'finalized')\n"
        "slow = Slow()\n"
        "atexit.register(lambda: sys.stdout.write('at exit '))\n"
        "try:\n    raise KeyError\nexcept KeyError:\n    pass\n"
        "if sys.argv[1:]:\n    raise ValueError\n"
    )
    failed = python(lab, "-m", "ddp_loop.elastic", "slow.py", "x", error_file=lab / "error.json")
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "at exit ", "")
    assert (lab / "error.json").exists()
    done = python(lab, "-m", "ddp_loop.elastic", "slow.py", error_file=lab / "error.json")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["at", "exit", "finalized"])


def test_a_hook_of_the_script_is_used(lab: Path) -> None:
    (lab / "own.py").write_text("import sys\nsys.excepthook = lambda *a: print('own', a[0].__name__)\nraise OSError\n")
    rank = python(lab, "-m", "ddp_loop.elastic", "own.py", error_file=lab / "error.json")
    assert (rank.returncode, rank.stdout, rank.stderr) == (1, "own OSError\n", "")
    assert not (lab / "error.json").exists()


@pytest.mark.parametrize(("value", "code", "said"), [(3, 3, ""), ("no data", 1, "no data\n"), (None, 0, "")])
def test_an_exit_is_the_script_s(value: object, code: int, said: str, lab: Path) -> None:
    (lab / "exit.py").write_text(f"import sys\nsys.exit({value!r})\n")
    rank = python(lab, "-m", "ddp_loop.elastic", "exit.py", error_file=lab / "error.json")
    assert (rank.returncode, rank.stderr) == (code, said)


def test_a_rank_ends_with_its_launcher_before_it_joins(lab: Path) -> None:
    (lab / "wait.py").write_text(
        "import os, time\nopen('began', 'x').close()\nwhile not os.path.exists('end'):\n    time.sleep(0.02)\n"
    )
    (lab / "launcher.py").write_text(
        "import json, os, subprocess, sys\n"
        "start = json.dumps({'argv': [], 'directory': '', 'process': os.getpid()})\n"
        "command = [sys.executable, '-m', 'ddp_loop.elastic', 'wait.py']\n"
        "subprocess.run(command, env={**os.environ, 'DDP_LOOP_START': start})\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "launcher.py"], cwd=lab, env=variables, stdout=subprocess.PIPE) as launcher:
        try:
            until((lab / "began").exists, "the rank has begun")
            launcher.send_signal(signal.SIGKILL)
            pipe = launcher.stdout or 0  # which the rank has too
            until(lambda: select.select([pipe], [], [], 0)[0], "the rank has ended")
        finally:
            (lab / "end").touch()
            launcher.kill()
    late = {**variables, "DDP_LOOP_START": json.dumps({"process": launcher.pid})}  # which has ended
    command = [sys.executable, "-m", "ddp_loop.elastic", "wait.py"]
    assert subprocess.run(command, cwd=lab, env=late, timeout=60, check=False).returncode == PEER_FAILED_EXIT
