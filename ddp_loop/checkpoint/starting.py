"""How a run was started, as the words of a command that starts it again.

[Note: Started by] `python -m ddp_loop run` leaves its own words in the environment of its ranks. torchrun leaves none,
but it is the parent of its ranks, and Linux shows a process's command. Where that cannot be read, torchrun's command is
made from the number of ranks, without the options of the rendezvous. Without either launcher, a run was started by
Python, which also starts the ranks of `launch`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint.secrets import HIDDEN, hide_secrets, names_of_hidden
from ddp_loop.elastic import START


def start_command(environment: Mapping[str, str] = os.environ, directory: str | None = None) -> dict[str, Any]:
    """The command that starts this run again, without its secrets, as status.json has it. See [Note: Started by].

    Args:
        environment: of this process, by default.
        directory: in which the script was started, where the launcher does not say it.

    Returns:
        Its words as `start`, and the folder that it was typed in as `directory`; None if that folder is gone.
    """
    words, typed_in = _started_by(environment, directory)
    return {"start": hide_secrets(words), "directory": typed_in}


def working_directory() -> str | None:
    """This process's; None if that folder was removed."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _started_by(variables: Mapping[str, str], directory: str | None) -> tuple[Sequence[str], str | None]:
    with suppress(KeyError, ValueError, TypeError):
        left = json.loads(variables[START])
        return [*map(str, left["argv"])], str(left["directory"])
    if "TORCHELASTIC_RUN_ID" in variables:
        if words := _typed(os.getppid()):
            return words, directory
        hosts = variables.get("GROUP_WORLD_SIZE", "1")
        several = [f"--nnodes={hosts}"] if hosts != "1" else []
        ranks = variables.get("LOCAL_WORLD_SIZE", "1")
        return ["torchrun", *several, f"--nproc_per_node={ranks}", *_script()], directory
    found = shutil.which("python") or ""  # a shell's, which may be another one, without torch
    own = sys.executable or found  # an embedded interpreter has none
    is_this_one = os.path.dirname(found) == os.path.dirname(own)
    return ["python" if is_this_one else own, *_script()], directory


def _typed(process: int) -> list[str]:
    """The command of a torchrun; empty for any other process, or where its command cannot be read."""
    with suppress(OSError):
        words = [os.fsdecode(word) for word in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]]
        names = [Path(word).name for word in words[:2]]
        if "torchrun" in names:
            return ["torchrun", *words[names.index("torchrun") + 1 :]]
        if words[1:3] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return words
    return []


def _script() -> list[str]:
    """The script or the module, and its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and sys.argv and sys.argv[0] == spec.origin:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return list(sys.argv)


def way_on(status: Mapping[str, Any], here: str | None = None) -> str:
    """The line for a shell that starts a run again, from its status.json; empty if that does not say it.

    Args:
        status: of the run.
        here: the folder that the shell is in, if that is known.
    """
    words = status.get("start")
    directory = status.get("directory")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return ""
    change = f"cd {shlex.quote(directory)} && " if isinstance(directory, str) and directory != here else ""
    return change + shlex.join(hide_secrets(words))  # an older version kept secrets


def words_to_go_on() -> str:
    """The lines with the command that resumes this run, without its secrets."""
    here = working_directory()
    status = start_command(directory=here)
    words = status["start"]
    if len(words) > 1 and words[1] == shutil.which("ddp_loop"):
        status["start"] = ["ddp_loop", *words[2:]]  # as it was typed
    return "\n".join(filter(None, (f"to go on: {way_on(status, here=here)}", lacks_secret(status))))


def lacks_secret(status: Mapping[str, Any]) -> str:
    """Advice for a command, found by `way_on`, that had a secret, which no file keeps; empty for any other command."""
    if not names_of_hidden(hide_secrets(status.get("start", []))):
        return ""
    return f"The command had a secret, which the run folder does not keep. Type it in place of {HIDDEN}."
