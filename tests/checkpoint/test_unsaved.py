"""The end of a process whose run was not saved whole, with `on_save_error="warn"`: code 74 and one last line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run

pytestmark = pytest.mark.covers("E5")

SCRIPT = """
import atexit, resource, sys
import torch
import ddp_loop as dl

def limit(number):  # of bytes in a file, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))

mode = sys.argv[1]
atexit.register(lambda: print("at exit"))
with dl.join_world(device="cpu") as world:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = dl.Batches(torch.ones(6, 1), 2, world)
    state = dict(model=model, optimizer=optimizer)
    for step in dl.Loop(batches, 2, state=state, run_dir="run", on_save_error="warn", progress=False):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()
        optimizer.step()
        if step.iteration == 4:
            limit(0)
        if step.iteration == 5 and mode == "healed":
            limit(resource.RLIM_INFINITY)
    print("after the loop")
if mode == "raise":
    raise ValueError("after the run")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("healed", 0), ("full", 74), ("raise", 1)])
def test_a_run_that_is_not_saved_whole_ends_with_another_code_and_says_what_is_missing(
    mode: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run("train.py", mode, folder=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "after the loop" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "at exit"
    assert ("was not saved whole" in ended.stderr) == (mode == "full")
    if mode == "full":
        last = ended.stderr.splitlines()[-1]
        lost = 6 - len((tmp_path / "run" / "rows.jsonl").read_text().splitlines())
        assert last.startswith(f"ddp_loop: {tmp_path}/run was not saved whole. It lacks {lost} of the rows, ")
        assert " the checkpoint of step 6, " in last
        assert " the status 'done', and has " in last  # the checkpoint of step 3, if it was written by then
        assert last.endswith(" Then start the script again.")
        assert "done" not in (tmp_path / "run" / "status.json").read_text()
