"""Run folders that are held or that a state does not fit: no run resumes from them."""

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
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks, caught, in_world
from tests.support.refusals import Refused, loop_over, network, network_by_columns, on_this_rank
from tests.support.resuming import train
from tests.support.training import take, train_in


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_run_folder_that_is_a_file_is_refused_with_the_remedy(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "run")
    with (
        dl.join_world() as world,
        pytest.raises(OSError, match=r"File exists.* It is a file, or a link to nothing\. Pass a folder as run_dir"),
    ):
        loop_over(world, str(tmp_path / "run"), network())


def look(folder: str) -> bool:
    return is_running(Path(folder))


def test_the_lock_is_kept_when_the_script_opens_and_closes_its_file(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    with dl.join_world() as world:
        loop_over(world, str(folder), network())
        for use in (lambda: shutil.copytree(folder, tmp_path / "copy"), (folder / "lock").read_bytes, fork):
            use()
            assert on_ranks(1, look, str(folder)) == [True]
            ((kind, text, _),) = on_ranks(1, caught, train, str(folder))
            assert (kind, f"held by process {os.getpid()} on " in text) == ("RuntimeError", True)
            assert on_ranks(1, look, str(folder)) == [True]
    assert not is_running(tmp_path / "copy")
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


def begin(world: dl.World, folder: str) -> None:
    train_in(world, network(), run_dir=folder)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def single() -> nn.Module:
    return network().float()


def begin_with(world: dl.World, folder: str, model: Callable[[], nn.Module], *others: object) -> None:
    loop_over(world, folder, model(), *others)


@pytest.mark.covers("J10")
@pytest.mark.parametrize(
    ("model", "others", "kind", "said"),
    [
        (
            wide,
            (),
            "ValueError",
            r"state\['model'\] does not fit the checkpoint .*size mis.*resume=False to start over",
        ),
        (
            single,
            (),
            "ValueError",
            r"weight is torch\.float32 .* in the checkpoint torch\.float64 .*that dtype and memory format, or .*_from=",
        ),
        (
            network_by_columns,
            (),
            "ValueError",
            r"weight is torch\.float64 with strides \(1, 6\), in .*64 with strides \(4, 1\)\.",
        ),
        (network, ({},), "ValueError", r"the checkpoint \['model'\]\. Pass the same names, or resume=False"),
        (
            network,
            ([1, 2],),
            "TypeError",
            r"state\['other 0'\] is of type list, which a checkpoint cannot keep\. .* into a dict, or remove run_dir=",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(
    model: Any, others: tuple[object, ...], kind: str, said: str, refused: Refused, tmp_path: Path, on_ranks: OnRanks
) -> None:
    on_ranks(1, on_this_rank, begin, str(tmp_path / "run"), ())

    def files() -> dict[Path, bytes]:
        paths = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "lock"]
        return {path: path.read_bytes() for path in paths}

    before = files()
    refused(3, begin_with, model, *others, kind=kind, said=said, by=None)
    assert files() == before


def begin_in_order(world: dl.World, folder: str, reverse: bool) -> None:
    """With an optimizer of all parameters, in either order; two of them have the same shape."""
    model = network()
    adam = torch.optim.Adam([{"params": sorted(model.parameters(), key=torch.Tensor.numel, reverse=reverse)}])
    train_in(world, model, optimizer=adam, run_dir=folder, steps=1)


def test_an_optimizer_with_its_parameters_in_another_order_is_refused_on_all_ranks(
    refused: Refused, tmp_path: Path, on_ranks: OnRanks
) -> None:
    on_ranks(1, on_this_rank, begin_in_order, str(tmp_path / "run"), (False,))
    said = (
        r"belongs to its parameters by their order\. In state\['optimizer'\] number 1 is model\.0\.weight, in the "
        r"checkpoint model\.2\.bias\. Give it its parameters in the same order \(a set"
    )
    refused(3, begin_in_order, True, kind="ValueError", said=said, by=None)


def unfreeze(world: dl.World, folder: str, late: bool, steps: int = 4) -> Tensors:
    """The first layer trains from the third step on; its group is added then, or is there from the start."""
    model = network()
    model[0].requires_grad_(False)
    adam = torch.optim.Adam(model[2].parameters())
    group = {"params": list(model[0].parameters()), "lr": 0.1}
    if not late:
        adam.add_param_group(group)
    for step in loop_over(world, folder, model, adam, epochs=None, steps=steps, shards=3):
        if step.iteration == 3:
            model[0].requires_grad_(True)
            if late:
                adam.add_param_group(group)
        take(step, model)
        adam.step()
    return values_of(model)


def test_a_group_that_an_optimizer_lacks_at_the_resume_is_refused_with_the_remedy(
    refused: Refused, tmp_path: Path, on_ranks: OnRanks
) -> None:
    (whole,) = on_ranks(1, in_world, unfreeze, str(tmp_path / "run"), True)
    said = r"state\['other 0'\] does not fit .* different number of parameter groups.* all groups of add_param_group"
    refused(2, unfreeze, True, kind="ValueError", said=said, by=None)
    for steps in (3, 4):
        found = same_on_all(on_ranks(2, in_world, unfreeze, str(tmp_path / "another"), False, steps))
    assert is_same(found, whole)


def begin_with_more_on_rank_1(world: dl.World, folder: str) -> None:
    loop_over(world, folder, network(), *([{"notes": 1}] if world.rank == 1 else []))


def test_a_state_with_other_names_on_a_rank_is_refused_at_once(refused: Refused) -> None:
    refused(3, begin_with_more_on_rank_1, kind="ValueError", said=r"names of state.*\['model', 'other 0'\]", by=None)
