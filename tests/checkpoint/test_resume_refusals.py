"""States from which a run does not resume, and that the tests of resuming notice what is not restored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import RunFolder, is_running
from ddp_loop.checkpoint import state as restoring
from ddp_loop.data import position as positions
from ddp_loop.distributed import ReplicaMismatch
from tests.support.harness import OnRanks, caught
from tests.support.refusals import Refused, loop_over, loss_of, network
from tests.support.resuming import different, train


def test_a_second_process_is_refused_and_told_who_holds_the_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with dl.join_world() as world:
        loop_over(world, folder, network())
        for kind, text, _ in on_ranks(2, caught, train, folder):
            assert kind in ("RuntimeError", "PeerFailed")
            assert f"{folder} is held by process {os.getpid()} on " in text
    assert on_ranks(1, caught, train, folder, 1)[0][0] == "ValueError"  # it is free, and a run of something else


def test_a_run_folder_that_is_a_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with (
        dl.join_world() as world,
        pytest.raises(OSError, match=r"File exists.* It is a file\. Pass a folder as run_dir"),
    ):
        loop_over(world, str(tmp_path / "run"), network())


def look(folder: str) -> bool:
    return is_running(Path(folder))


@pytest.mark.parametrize("use", ["copied", "read", "forked"])
def test_the_lock_is_kept_when_the_script_opens_and_closes_its_file(
    use: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with dl.join_world() as world:
        loop_over(world, str(folder), network())
        if use == "copied":
            shutil.copytree(folder, tmp_path / "copy")
            assert not is_running(tmp_path / "copy")
        elif use == "read":
            (folder / "lock").read_bytes()
        else:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        assert on_ranks(1, look, str(folder)) == [True]
        ((kind, text, _),) = on_ranks(1, caught, train, str(folder))
        assert (kind, f"held by process {os.getpid()} on " in text) == ("RuntimeError", True)
        assert on_ranks(1, look, str(folder)) == [True]
    assert on_ranks(1, look, str(folder)) == [False]


def test_a_forked_process_holds_no_lock(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held = RunFolder(folder, {}, None)
    (reading, writing), (there, here) = os.pipe(), os.pipe()
    child = os.fork()  # as a DataLoader's worker, which may outlive a killed rank
    if child == 0:
        os.close(writing)
        os.write(here, b".")
        os.read(reading, 1)
        os._exit(0)
    try:
        os.read(there, 1)
        assert str(folder / "lock") not in [os.readlink(one) for one in Path(f"/proc/{child}/fd").iterdir()]
        held.close()
        assert on_ranks(1, look, str(folder)) == [False]
        RunFolder(folder, {}, None).close()
    finally:
        for descriptor in (reading, writing, there, here):
            os.close(descriptor)
        os.waitpid(child, 0)


def begin(folder: str) -> None:
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, folder, model):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()


def another_model(world: dl.World, folder: str) -> None:
    loop_over(world, folder, nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)).double())


def another_name(world: dl.World, folder: str) -> None:
    model = network()
    loop_over(world, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def no_state_dict(world: dl.World, folder: str) -> None:
    loop_over(world, folder, network(), [1, 2])


@pytest.mark.parametrize(
    ("scenario", "kind", "said"),
    [
        (
            another_model,
            "ValueError",
            r"state\['model'\] does not fit the checkpoint .*size mis",
        ),
        (another_name, "ValueError", r"the checkpoint \['model'\]\. Pass the same names, or resume=False"),
        (
            no_state_dict,
            "TypeError",
            r"state\['other 0'\] is a list, which a checkpoint cannot keep\. .* put it into a dict, or remove run_dir=",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks(
    scenario: Callable[..., Any], kind: str, said: str, refused: Refused, tmp_path: Path, on_ranks: OnRanks
) -> None:
    on_ranks(1, begin, str(tmp_path / "run"))
    refused(3, scenario, kind=kind, said=said)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["step-00000004"]


def leave_out(name: str) -> Callable[..., Any]:
    """The usual way to put one object back, but for this one."""
    usual = restoring.restore_part

    def put_back(value: Any, kept: Any) -> None:
        if type(value).__name__ != name:
            usual(value, kept)

    return put_back


def one_further(self: positions.LoopPosition, state: dict[str, int]) -> None:
    self.iteration, self.epochs, self.at = state["iteration"], state["epoch"], state["position"] + 1
    self.resumed_at = self.iteration


MUTATIONS: dict[str, tuple[object, str, Any]] = {
    "the generators": (restoring, "restore_random_state", lambda state, device: None),
    "the position": (positions.LoopPosition, "resume_from", one_further),
    **{
        f"the {name}": (restoring, "restore_part", leave_out(name))
        for name in ("AdamW", "AveragedModel", "CosineAnnealingLR", "GradScaler", "EarlyStopping", "dict")
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_comparison_of_two_runs_sees_what_is_not_put_back(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("")
    train(str(tmp_path), 7)  # in the second epoch, so that the patience and the schedule were at work
    place, name, mutated = MUTATIONS[what]
    monkeypatch.setattr(place, name, mutated)
    try:
        seen = different(whole, train(str(tmp_path))) != []
    except ReplicaMismatch:
        seen = True  # by the package itself, which takes checksums of what it put back
    assert seen
