"""The blocks of a document, run as a reader would run them: Python on ranks, commands in a shell's place."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ddp_loop.cli import main
from tests.support.documents import text_of


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and its text."""

    language: str
    text: str


@dataclass(frozen=True)
class Ran:
    """What blocks printed on this rank, and after each block the weights of `model` as one list, where it has some."""

    printed: str
    weights: list[list[float]]


def blocks_of(document: str) -> list[Block]:
    """The blocks of a document that are run, in order."""
    found = re.findall(r"^```(python|sh)\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def run_python(folder: str, *texts: str) -> Ran:
    """Run blocks one after the other with the same names, in a folder, on this rank."""
    names: dict[str, object] = {"__name__": "snippet"}
    printed, weights = io.StringIO(), list[list[float]]()
    Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for text in texts:
            exec(compile(text, "snippet", "exec"), names)
            weights.append(_weights_of(names.get("model")))
    return Ran(printed.getvalue(), weights)


def _weights_of(model: object) -> list[float]:
    tensors = [one.detach() for one in model.state_dict().values()] if isinstance(model, nn.Module) else []
    if not tensors or any(hasattr(one, "full_tensor") for one in tensors):  # they are divided over the ranks
        return []
    values: list[float] = torch.cat([one.double().flatten() for one in tensors]).tolist()
    return values


def run_shell(folder: Path, text: str) -> str:
    """Run the lines of a block in a folder; the package's own commands in this process. Each must succeed."""
    printed = io.StringIO()
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["ddp_loop"]:
            with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
                assert main(words[1:]) == 0, line
        elif words:
            subprocess.run(words, cwd=folder, check=True, timeout=60, env=dict(os.environ))
    return printed.getvalue()
