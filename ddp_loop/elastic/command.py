"""The command `run`: its options, which are torchrun's and `--ranks`, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddp_loop.elastic.loopback import LOOPBACK, loopback_variables
from ddp_loop.elastic.rank import START

_NO_ID = "none"  # torchrun's default
_USAGE = "%(prog)s [--ranks N|gpu] [torchrun's options] SCRIPT [SCRIPT'S ARGUMENTS]"
_DESCRIPTION = """\
Start a script on several ranks of this machine, or of several. Each rank runs SCRIPT with its arguments; options of run
come before SCRIPT. All options of torchrun work too, and most runs need none."""
_EPILOG = """\
Example: {program} run --ranks 4 train.py --epochs 20
Exit codes: 0 all ranks ended well, also after a stop; 1 a rank failed; 2 the command was refused; 130 Ctrl-C outside
of a loop, or a second Ctrl-C."""


def add_run(add: Callable[..., Any]) -> None:
    """List the command in the help of all commands; `run_command` reads what follows it."""
    add("run", lambda options: False, "start a script on several ranks of this machine, or of several", add_help=False)


def run_command(arguments: Sequence[str], typed: Sequence[str] | None = None) -> int:
    """Start the ranks of a script, wait until they have ended, and return the exit code.

    Args:
        arguments: of the command line, after `run`.
        typed: the whole command, as it starts the run again; by default one made of `arguments`.

    Raises:
        ValueError: an option has no such value, or the script does not exist.
    """
    program = program_name()
    options = run_parser().parse_args(arguments)
    _check_script(options)
    asked = options.nproc_per_node
    options.nproc_per_node = _ranks_of(asked)
    _meet_here(options)
    if options.nnodes == "1":
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)
    if "OMP_NUM_THREADS" not in os.environ and options.nproc_per_node != "1":
        os.environ["OMP_NUM_THREADS"] = "1"  # torchrun does the same, with a warning
    start = [*(typed or [sys.executable, "-m", "ddp_loop", "run", *arguments])]
    os.environ[START] = json.dumps({"argv": start, "directory": os.getcwd(), "process": os.getpid()})

    from torch.distributed.run import config_from_args

    from ddp_loop.elastic.agent import run_agent

    gc.freeze()  # torch's objects live to the end
    with tempfile.TemporaryDirectory(prefix="ddp_loop_", ignore_cleanup_errors=True) as scratch:
        if not options.log_dir:
            options.log_dir = scratch  # of the ranks' errors; torchrun leaves its own behind
        try:
            config, entrypoint, words = config_from_args(options)
            tempfile.TemporaryDirectory(dir=options.log_dir).cleanup()  # torch makes one there when it has begun
        except (AssertionError, RuntimeError, OSError) as error:  # of torch's checks, or of the folder
            raise ValueError(f"{error}. Correct the option.") from None
        if not config.monitor_interval > 0:
            raise ValueError(f"--monitor-interval must be above 0 seconds. Got {config.monitor_interval}.")
        if config.rdzv_backend == "static" and not 0 <= options.node_rank < config.max_nodes:
            raise ValueError(
                f"--node-rank must be from 0 to {config.max_nodes - 1}, below --nnodes. Got {options.node_rank}."
            )
        if not options.no_python and not options.run_path:
            words = ["-u", "-m", "ddp_loop.elastic", *words[1:]]  # words[0] is "-u"; see elastic/rank.py
        code = run_agent(config, entrypoint, words)
    if code and asked is None and (hint := _misplaced_ranks(options, program)) is not None:
        sys.stderr.write(hint)
    return code


def _misplaced_ranks(options: argparse.Namespace, program: str) -> str | None:
    """What to say of a failed script that got `--ranks` among its arguments; None without it."""
    words = list(options.training_script_args)
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--ranks"), None)
    if place is None:
        return None
    last = place + (1 if "=" in words[place] else 2)
    typed = [program, "run", *words[place:last], options.training_script, *words[:place], *words[last:]]
    return (
        "ddp_loop run: what follows SCRIPT is the script's, and --ranks is an option of run. If it was meant so: "
        f"{shlex.join(typed).replace(shlex.quote(program), program)}\n"
    )


def program_name() -> str:
    """How this process was called: by the name of the command, or as a module."""
    return "ddp_loop" if Path(sys.argv[0]).name == "ddp_loop" else "python -m ddp_loop"


class _Parser(argparse.ArgumentParser):
    """Argparse's, but its error names the option that was meant, or says that there is no script."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and exit."""
        if message.startswith("the following arguments are required"):
            message = f"SCRIPT is missing. Name it after the options, for example: {self.prog} --ranks 2 train.py"
        typed = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        like = difflib.get_close_matches(typed[1], self._option_string_actions, 1) if typed else []
        super().error(f"{message}. Did you mean {like[0]}?" if like else message)


def run_parser() -> argparse.ArgumentParser:
    """Of the command's options: torchrun's, and its own first."""
    from torch.distributed.run import get_args_parser

    program = program_name()
    parser = _Parser(
        parents=[get_args_parser()],
        add_help=False,  # torchrun's is there
        prog=f"{program} run",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # What follows SCRIPT is the script's. torchrun takes its `--run` for the start of one of its own options.
        allow_abbrev=False,
    )
    own = parser.add_argument_group("options of run")
    own.add_argument(
        "--ranks",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,
        metavar="N|gpu",
        help="number of ranks on this machine (default: its GPUs, or 1); the same as --nproc-per-node",
    )
    positional, optional, *_ = parser._action_groups
    positional.title = "script"
    optional.title = "options of torchrun"
    parser._action_groups = [own, positional, optional]
    parser.set_defaults(default_port=parser.get_default("master_port"))
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    return parser


def _check_script(options: argparse.Namespace) -> None:
    script = options.training_script
    if options.module:
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            raise ValueError(f"There must be a module {script}. None is found. Check its name and PYTHONPATH.")
    elif not options.no_python:
        path = Path(script)
        if not path.exists():
            raise ValueError(f"SCRIPT must be a Python file. {script} does not exist. Check its path.")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise ValueError(f"SCRIPT must be a Python file. {script} is a folder without __main__.py. Name its file.")


def _ranks_of(given: str | None) -> str:
    """The number of ranks on this machine, or a word that torch reads.

    Raises:
        ValueError: it is neither a number above 0 nor such a word, or there is no GPU.
    """
    from ddp_loop.accelerators import gpu_count

    gpus = gpu_count()
    if given is None:
        return str(gpus or 1)
    if given == "gpu" and not gpus:
        raise ValueError("--ranks gpu needs a GPU that torch can see. There is none. Pass a number for CPU ranks.")
    if given in ("gpu", "cpu", "auto", "xpu"):
        return str(gpus) if given == "gpu" else given
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"--ranks must be a whole number, 1 or more, or gpu. Got {given!r}.")
    if 0 < gpus < int(given):
        sys.stderr.write(
            f"ddp_loop: --ranks {given} is more than the GPUs of this machine, {gpus}. Each rank needs one of its own: "
            'pass --ranks gpu, unless the script passes join_world device="cpu" or share_gpus=True.\n'
        )
    return str(int(given))


def _meet_here(options: argparse.Namespace) -> None:
    """Let one machine's ranks meet on the loopback, at a free port, so that two runs do not collide.

    The rendezvous that the options ask for would find this machine alone, so it is left out.
    """
    if options.standalone or options.nnodes in ("1", "1:1"):
        options.rdzv_endpoint = f"{LOOPBACK}:{_own_port(options)}"
        options.nnodes = "1"
        options.node_rank = 0
        options.rdzv_backend = "static"
        if options.rdzv_id == _NO_ID:
            options.rdzv_id = str(uuid.uuid4())
    if options.master_port is None:
        options.master_port = 29500  # as torchrun


def _own_port(options: argparse.Namespace) -> int:
    """The port that the options name for the ranks; 0 where they name none."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if options.standalone or options.rdzv_backend != "static":
        return 0
    if options.rdzv_endpoint:
        return int(parse_rendezvous_endpoint(options.rdzv_endpoint, 0)[1])
    return 0 if options.master_port in (None, options.default_port) else int(options.master_port)
