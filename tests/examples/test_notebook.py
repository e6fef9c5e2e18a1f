"""The example notebook in a kernel: its cells run, and show the progress of loops here and on ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import EXAMPLES, ROOT

CELL_S = 200


def execute(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The outputs of each of these cells, run by this interpreter."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    kernel = folder / "jupyter" / "kernels" / "own"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "own", "language": "python"}))
    for name, value in {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="own", resources={})
    client.resources["metadata"] = {"path": str(folder)}
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def progress_of(outputs: list[Any]) -> list[tuple[str, str]]:
    """The displays of progress in a cell's outputs: HTML and text."""
    shown = [one["data"] for one in outputs if one["output_type"] == "display_data" and "text/html" in one["data"]]
    return [(one["text/html"], one["text/plain"]) for one in shown]


@pytest.mark.covers("J17")
@pytest.mark.slow
def test_the_example_notebook_runs_and_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in codes), "the notebook is stored without outputs"
    cells = {cell["id"]: "".join(cell["source"]) for cell in codes}
    cells["imports"] += "\nEPOCHS, SIZE = 2, 200"
    outputs = dict(zip(cells, execute(list(cells.values()), tmp_path, monkeypatch), strict=True))
    for name, ranks in (("train", "1 rank on"), ("launch", "2 ranks on")):
        ((html, text),) = progress_of(outputs[name])  # one display, in the place of all earlier ones
        assert "Epoch 2 of 2, step 4 of 4" in html
        assert "<span>done</span>" in html
        assert ranks in html
        assert text.startswith("Epoch 2 of 2, step 4 of 4")
    assert "image/png" in outputs["picture"][0]["data"]
    assert "Epoch: 2" in outputs["console"][0]["text"]
    keep = tmp_path / "progress.html"
    keep.write_text("\n".join(progress_of(outputs[name])[0][0] for name in ("train", "launch")))


FAILS = """
import torch, ddp_loop as dl
def train():
    with dl.join_world(seed=0) as world:
        model = torch.nn.Linear(3, 1)
        for step in dl.Loop(dl.Batches(torch.ones(8, 3), 4, world), 5, state={"m": model}):
            for rows in step:
                step.backward(model(rows).mean(), **{"<b>x</b>": torch.ones(len(rows))})
            step.fold()
            if step.iteration == 4:
                raise KeyError("planted")
try:
    CALL
except Exception as error:
    print(type(error).__name__)
"""


KILLED = """
import os, signal, threading
def train():
    with dl.join_world(seed=0) as world:
        model = torch.nn.Linear(3, 1)
        for step in dl.Loop(dl.Batches(torch.ones(8, 3), 4, world), 10**6, state={"m": model}):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
            if step.iteration == 2000:
                os.kill(os.getpid(), signal.SIGKILL)
try:
    dl.launch(train, 1)
except dl.RankFailed as error:
    print(str(error).splitlines()[0])
print(dl.launch(abs, 1, -3))
"""


@pytest.mark.slow
def test_a_loop_that_fails_or_is_killed_ends_its_display_and_names_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [FAILS.replace("CALL", call) for call in ("train()", "dl.launch(train, 2)")]
    *failed, killed = execute([*cells, KILLED], tmp_path, monkeypatch)
    ((html, _),) = progress_of(killed)
    assert "The ranks ended here." in html
    said = "".join(one["text"] for one in killed if one["output_type"] == "stream")
    assert "rank 0 died by signal 9 (SIGKILL)" in said
    assert "[3]" in said
    for outputs in failed:
        ((html, _),) = progress_of(outputs)
        assert "<span>ended</span>" in html
        assert "&lt;b&gt;x&lt;/b&gt;" in html
        assert "<b>x" not in html
