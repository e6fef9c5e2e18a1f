"""What `python -m ddp_loop run` refuses in one line, and what belongs to the script."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from ddp_loop.cli import main
from ddp_loop.elastic.agent import Agent
from ddp_loop.elastic.command import _meet_here, _misplaced_ranks, _ranks_of, run_parser
from tests.support.documents import text_of

pytestmark = pytest.mark.covers("J6")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["none.py"], "SCRIPT must be a Python file. none.py does not exist. Check its path."),
        (["."], "SCRIPT must be a Python file. . is a folder without __main__.py. Name its file."),
        (["-m", "no_such_module.train"], "There must be a module no_such_module.train. None is found."),
        (["--ranks", "0", __file__], "--ranks must be a whole number, 1 or more, or gpu. Got '0'."),
        (["--nproc-per-node", "-1", __file__], "--ranks must be a whole number, 1 or more, or gpu. Got '-1'."),
        (["--max-restarts=-1", __file__], "max_restarts must be >= 0. Correct the option."),
        (["--nnodes=2:1", __file__], "min_nodes must be > 0 and <= max_nodes"),
        (["--nnodes=1:2:3", __file__], 'nnodes=1:2:3 is not in "MIN:MAX" format. Correct the option.'),
        (["--nnodes=2", "--node-rank=2", __file__], "--node-rank must be from 0 to 1, below --nnodes. Got 2."),
        (["--nnodes=1:2", "--node-rank=-1", __file__], "--node-rank must be from 0 to 1, below --nnodes. Got -1."),
        (["--monitor-interval=0", __file__], "--monitor-interval must be above 0 seconds. Got 0.0."),
        (["--log-dir", __file__, __file__], f"log_dir: {__file__} is a file"),
        (["--log-dir=/proc/self", __file__], "[Errno 2] No such file or directory: '/proc/self/"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"ddp_loop run: {line}")
    assert said.err.count("\n") == 1


NO_SCRIPT = "SCRIPT is missing. Name it after the options, for example: python -m ddp_loop run --ranks 2 train.py\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], NO_SCRIPT),
        (["--ranks", "2"], NO_SCRIPT),
        (["--ranks"], "argument --ranks: expected one argument\n"),
        (["--rank", "2", __file__], "unrecognized arguments: --rank. Did you mean --ranks?\n"),
        (["--rank=2", __file__], "unrecognized arguments: --rank=2. Did you mean --ranks?\n"),
        (["--nproc_per_nod", "2", __file__], "--nproc_per_nod. Did you mean --nproc_per_node?\n"),
        (["--frobnicate", __file__], "unrecognized arguments: --frobnicate\n"),
    ],
)
def test_no_script_and_half_an_option_are_refused_with_the_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["run", *arguments])
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: python -m ddp_loop run [--ranks N|gpu]" in printed
    assert printed.endswith(said)


def test_what_follows_the_script_belongs_to_it() -> None:
    words = ["--run", "x", "--ranks", "9", "--role", "cook", "-m", "--", "-h"]
    options = run_parser().parse_args(["--ranks", "2", "train.py", *words])
    assert (options.training_script, options.training_script_args) == ("train.py", words)
    assert (options.nproc_per_node, options.role, options.module) == ("2", "default", False)


def test_two_dashes_give_a_script_its_option_under_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """The row of docs/launching.md."""
    row = next(line for line in text_of("docs/launching.md").splitlines() if line.startswith("| the script's `--run`"))
    for option in ("--run", "--max", "--log"):
        assert f"`{option}`" in row
        if sys.version_info < (3, 12):  # argparse of newer Pythons leaves it to the script
            with pytest.raises(SystemExit):
                torchrun.parse_args(["--nproc_per_node=2", "train.py", option, "x"])
            assert f"ambiguous option: {option} could match" in capsys.readouterr().err
        options = torchrun.parse_args(["--nproc_per_node=2", "--", "train.py", option, "x"])
        assert (options.training_script, options.training_script_args) == ("train.py", [option, "x"])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--ranks", "2"], "python -m ddp_loop run --ranks 2 train.py"),
        (["--lr", "0.1 x", "--ranks=2", "-v"], "python -m ddp_loop run --ranks=2 train.py --lr '0.1 x' -v"),
        (["--rank", "2"], None),
    ],
)
def test_ranks_after_a_script_that_failed_are_moved_before_it(words: list[str], meant: str | None) -> None:
    hint = _misplaced_ranks(run_parser().parse_args(["train.py", *words]), "python -m ddp_loop")
    assert (hint or "").endswith(f"If it was meant so: {meant}\n" if meant else "")
    assert (hint is None) == (meant is None)


def test_ranks_are_the_gpus_by_default_or_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [0]
    monkeypatch.setattr("ddp_loop.accelerators.gpu_count", lambda: gpus[0])
    assert (run_parser().parse_args(["train.py"]).nproc_per_node, _ranks_of(None), _ranks_of("3")) == (None, "1", "3")
    with pytest.raises(ValueError, match="--ranks gpu needs a GPU that torch can see"):
        _ranks_of("gpu")
    gpus[0] = 4
    assert (_ranks_of(None), _ranks_of("gpu"), _ranks_of("4")) == ("4", "4", "4")
    assert capsys.readouterr().err == ""
    assert _ranks_of("5") == "5"  # a script may compute on the CPU, or share GPUs
    assert capsys.readouterr().err.startswith("ddp_loop: --ranks 5 is more than the GPUs of this machine, 4.")


@pytest.mark.parametrize(
    ("options", "backend", "endpoint"),
    [
        ([], "static", "127.0.0.1:0"),
        (["--standalone", "--master-port=29600"], "static", "127.0.0.1:0"),
        (["--master-port=29600"], "static", "127.0.0.1:29600"),
        (["--nnodes=1:1", "--rdzv-endpoint=a:29601"], "static", "127.0.0.1:29601"),
        (["--nnodes=1:1", "--rdzv-endpoint=a", "--node-rank=1"], "static", "127.0.0.1:0"),
        (["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1"], "static", "127.0.0.1:0"),
        (["--nnodes=2", "--master-addr=10.0.0.1"], "static", ""),
        (["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1"], "c10d", "a:1"),
    ],
)
def test_ranks_of_one_machine_meet_on_the_loopback(options: list[str], backend: str, endpoint: str) -> None:
    parsed = run_parser().parse_args([*options, "train.py"])
    _meet_here(parsed)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint) == (backend, endpoint)
    assert parsed.node_rank == 0
    assert parsed.master_port == (29600 if "--master-port=29600" in options else 29500)


def test_a_run_has_the_users_id_or_one_of_its_own() -> None:
    given, *others = [run_parser().parse_args([*option, "train.py"]) for option in (["--rdzv-id=job"], [], [])]
    for each in (given, *others):
        _meet_here(each)
    assert given.rdzv_id == "job"
    assert len({"none", *(each.rdzv_id for each in others)}) == 3


def run(script: Path, text: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    script.write_text(f"import sys\n{text}\n")
    return main(["run", *words])


def test_a_run_ends_with_code_0_also_where_the_script_has_ranks_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick, so that `make matrix` tries it too: each version of torch calls the agent in its own way."""
    script = tmp_path / "train.py"
    words = "--ranks=2", str(script), "--ranks", "3"
    assert run(script, "sys.stdout.write('made\\n')", *words, monkeypatch=monkeypatch) == 0
    printed, said = capfd.readouterr()
    assert (printed.split(), said) == (["made", "made"], "")


def test_ranks_after_a_script_that_failed_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    assert run(script, "sys.exit(1)", str(script), "--ranks", "2", monkeypatch=monkeypatch) == 1
    assert "--ranks is an option of run" in capfd.readouterr().err


@pytest.mark.parametrize(("ranks", "given", "counted"), [("2", None, "1"), ("1", None, "all"), ("2", "3", "3")])
def test_threads_are_as_the_user_has_set_them_or_else_one_of_several_ranks(
    ranks: str, given: str | None, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    writes = f"echo ${{OMP_NUM_THREADS:-all}} > '{tmp_path}/'$RANK"
    assert main(["run", "--ranks", ranks, "--no-python", "sh", "-c", writes]) == 0
    assert [path.read_text().strip() for path in tmp_path.iterdir()] == [counted] * int(ranks)


def test_an_agent_whose_shutdown_takes_no_timeout_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of torch 2.11 does not."""
    sent = []

    def shutdown(agent: Agent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        sent.append(death_sig)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    agent = object.__new__(Agent)
    agent._shutdown()
    agent._shutdown(signal.SIGHUP)
    agent._shutdown(signal.SIGINT)
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
