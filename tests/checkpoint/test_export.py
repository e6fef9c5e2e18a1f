"""`python -m ddp_loop export`: a part of a run's state as a safetensors file."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ddp_loop.checkpoint import export_weights, run_id_of
from ddp_loop.checkpoint.storage import Checkpoint
from ddp_loop.checkpoint.weights import read_checkpoint
from ddp_loop.cli import main
from tests.support.trained_runs import Tied, flip_tensors, train_run

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    folder = tmp_path_factory.mktemp("export") / "run"
    return folder, train_run(folder)[0]


@pytest.fixture
def run(trained: tuple[Path, list[State]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found


@pytest.mark.covers("J9")
def test_the_best_weights_are_exported_and_a_model_takes_the_file(
    run: Path, trained: tuple[Path, list[State]], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "-o", str(file), "--best"]) == 0
    said = capsys.readouterr()
    source = run / "checkpoints" / "step-00000006"
    assert said.out == f"{file}: 8 tensors of model, 0.0 MiB, from {source} (step 6, epoch 2, score 1)\n"
    assert said.err == ""
    model = Tied()
    model.load_state_dict(load_file(file))
    assert all(torch.equal(one, trained[1][1][name]) for name, one in model.state_dict().items())
    facts = {"format": "pt", "part": "model", "run": "run", "run_id": str(run_id_of(run))}
    assert metadata_of(file) == {
        **facts, "checkpoint": "step-00000006", "iteration": "6", "epoch": "2", "score": "1.0",
    }  # fmt: skip


@pytest.mark.covers("J9")
@pytest.mark.parametrize(("options", "epoch"), [([], 3), (["--checkpoint", "step-00000003"], 0)])
def test_the_newest_and_a_named_checkpoint_are_exported(
    options: list[str], epoch: int, run: Path, trained: tuple[Path, list[State]], file: Path
) -> None:
    assert main(["export", str(run), "-o", str(file), *options]) == 0
    assert torch.equal(load_file(file)["norm.running_mean"], trained[1][epoch]["norm.running_mean"])


def test_tensors_that_share_memory_are_there_under_each_name(run: Path, file: Path) -> None:
    export_weights(run, file, say=print)
    found = load_file(file)
    assert torch.equal(found["first.weight"], found["last.weight"])
    assert sorted(found) == sorted(Tied().state_dict())


def test_dtypes_and_strides_survive(tmp_path: Path, file: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.BatchNorm1d(4))
    model[0].register_buffer("wide", torch.arange(16.0).reshape(1, 4, 2, 2).to(memory_format=torch.channels_last))
    model.forward = lambda rows: model[1](model[0](rows.bfloat16()).float())  # type: ignore[method-assign]
    train_run(tmp_path / "run", 1, model=model)
    export_weights(tmp_path / "run", file, say=print)
    found = load_file(file)
    assert found["0.weight"].dtype == torch.bfloat16
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(found["0.wide"], torch.arange(16.0).reshape(1, 4, 2, 2))


def test_an_older_file_is_replaced_at_once_and_others_may_read_it(run: Path, file: Path) -> None:
    file.write_text("old")
    before = file.open()
    export_weights(run, file, say=print)
    assert before.read() == "old"
    before.close()
    usual = file.with_name("usual")
    usual.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert sorted(os.listdir(file.parent)) == ["model.safetensors", "run", "usual"]


@pytest.mark.covers("J9")
def test_a_file_that_cannot_be_written_is_one_line_and_an_older_one_stays(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(output: Path) -> str:
        assert main(["export", str(run), "-o", str(output)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no/model cannot be written (No such file or directory). Make room" in refused(file.parent / "no" / "model")
    assert f"{run} cannot be written (Is a directory). Make room there, make it writable, or pass" in refused(run)
    file.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert f"ddp_loop export: {file} cannot be written (No space left on device). Make room there" in refused(file)
    assert (file.read_text(), sorted(os.listdir(file.parent))) == ("old", ["model.safetensors", "run"])


@pytest.mark.covers("J9")
def test_a_part_with_other_values_is_refused_with_the_way_to_read_it(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "-o", str(file), "--part", "optimizer"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "A safetensors file has tensors alone. 'optimizer' in" in line
    assert "has other values too: param_groups. Read it with ddp_loop.load(RUN, 'optimizer'), or export" in line
    assert main(["export", str(run), "-o", str(file), "--part", "net"]) == 2
    assert "has no part 'net'. Its state has model, optimizer, schedule, notes." in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.covers("J9")
def test_a_run_without_a_checkpoint_is_one_line(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    for path, said in (
        (run, f"{run} has no checkpoint. The run saves one"),
        (tmp_path / "none", "is not a folder. Pa"),
    ):
        assert main(["export", str(path), "-o", str(file)]) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_it_is_exported(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_tensors(run / "checkpoints" / "step-00000012")
    assert main(["export", str(run), "-o", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"ddp_loop export: {run}/checkpoints/step-00000012/tensors.safetensors does not have")
    assert printed.err.endswith("step-00000009 is used instead.\n")
    assert metadata_of(file)["checkpoint"] == "step-00000009"


def test_dtypes_that_the_format_does_not_have_are_refused(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(found: Checkpoint, part: str) -> dict[str, torch.Tensor]:
        return {part: torch.zeros(2, dtype=torch.complex128)}

    monkeypatch.setattr("ddp_loop.checkpoint.weights.part_of", other)
    with pytest.raises(ValueError, match=r"A safetensors file cannot have tensors of torch\.complex128\. Cast them"):
        export_weights(run, file, say=print)


def test_nested_tensors_have_dotted_names_and_a_part_without_any_is_refused(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_checkpoint(run, say=print).path.name == "step-00000012"
    values: dict[str, object] = {"a": {"b": torch.ones(2), 3: {"c": torch.zeros(1)}}}
    monkeypatch.setattr("ddp_loop.checkpoint.weights.part_of", lambda *_: values)
    export_weights(run, file, say=print)
    assert {name: one.tolist() for name, one in load_file(file).items()} == {"a.3.c": [0.0], "a.b": [1.0, 1.0]}
    values.clear()
    with pytest.raises(ValueError, match=r"'model' in .* has no tensor\. Name another part"):
        export_weights(run, file, say=print)
