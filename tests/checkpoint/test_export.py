"""`python -m ddp_loop export`: a part of a run's state as a safetensors file."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ddp_loop.checkpoint import REPAIR, explained, export_weights, mebibytes, run_id_of
from ddp_loop.cli import main
from tests.support.trained_runs import NAMES, State, Tied, flip_tensors, train_run

pytestmark = pytest.mark.covers("J9")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def export(run: Path, file: Path | str, *options: str) -> int:
    return main(["export", str(run), "-o", str(file), *options])


@pytest.mark.parametrize(("size", "words"), [(2240, "0.00214"), (5 << 20, "5"), (99 << 20, "99"), (3 << 29, "1,536")])
def test_sizes_have_three_digits_and_no_exponent(size: int, words: str) -> None:
    assert mebibytes(size) == words


def test_a_limit_on_the_size_of_files_is_named_as_the_remedy() -> None:
    said = r"w cannot be written \(File too large\)\. Make room there.* See ulimit -f\."
    with pytest.raises(OSError, match=said), explained("w cannot be written", REPAIR):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found


@pytest.mark.parametrize(
    ("options", "number", "score"), [(["--best"], 1, 1.0), ([], 3, 4.0), (["--checkpoint", NAMES[0]], 0, 3.0)]
)
def test_the_best_weights_are_exported_and_a_model_takes_the_file(
    options: list[str],
    number: int,
    score: float,
    run: Path,
    kept: list[State],
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    epoch = number + 1
    assert export(run, file, *options) == 0
    source = run / "checkpoints" / NAMES[number]
    size = mebibytes(sum(value.nbytes for value in kept[number].values()))
    said = f"{file}: 8 tensors of model, {size} MiB, from {source} (step {3 * epoch}, epoch {epoch}, score {score:g})\n"
    assert tuple(capsys.readouterr()) == (said, "")
    model = Tied()
    model.load_state_dict(load_file(file))
    assert all(torch.equal(one, kept[number][name]) for name, one in model.state_dict().items())
    facts = {"format": "pt", "part": "model", "run": "run", "run_id": str(run_id_of(run))}
    facts |= {"checkpoint": NAMES[number], "iteration": str(3 * epoch), "epoch": str(epoch), "score": str(score)}
    assert metadata_of(file) == facts


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
    with file.open() as before:
        export_weights(run, file, say=print)
        assert before.read() == "old"
    usual = file.with_name("usual")
    usual.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert sorted(os.listdir(file.parent)) == ["model.safetensors", "run", "usual"]


def test_a_file_that_cannot_be_written_is_one_line_and_an_older_one_stays(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("old")
    for output, said in (
        (file.parent / "no" / "model", "No such file or directory). Make room"),
        (run, "Is a directory). Make room there, make it writable, or pass"),
        (file, "No space left on device). Make room there"),
    ):
        if output == file:
            monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert export(run, output) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"ddp_loop export: {output} cannot be written ({said}" in line
    assert (file.read_text(), sorted(os.listdir(file.parent))) == ("old", ["model.safetensors", "run"])


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_it_is_exported(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_tensors(run / "checkpoints" / NAMES[3])
    assert export(run, file) == 0
    printed = capsys.readouterr().err
    assert printed.startswith(f"ddp_loop export: {run}/checkpoints/{NAMES[3]}/tensors.safetensors does not have")
    assert printed.endswith(f"{NAMES[2]} is used instead.\n")
    assert metadata_of(file)["checkpoint"] == NAMES[2]


def test_what_cannot_be_exported_is_one_line(run: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, file, "--part", "optimizer") == 2
    printed = capsys.readouterr()
    assert "has other values too: param_groups. Read it with ddp_loop.load(RUN, 'optimizer'), or" in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not file.exists()


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "pytorch_model.bin", "last.CKPT"])
def test_a_name_for_torch_load_is_refused_and_the_call_that_makes_such_a_file_is_named(
    name: str, run: Path, kept: list[State], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / name
    assert export(run, asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"ddp_loop export: export writes a safetensors file, which torch.load cannot read. Got {asked}."
    )
    named = re.search(r"Pass -o (.*\.safetensors); for torch\.load, then call (torch\.save\(.*\))\.$", line)
    assert named is not None
    assert not asked.exists()
    assert export(run, named[1]) == 0
    exec(f"import safetensors.torch, torch\n{named[2]}")
    assert torch.equal(torch.load(asked)["norm.running_mean"], kept[3]["norm.running_mean"])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("export", "run.json"),
        ("export", f"checkpoints/{NAMES[2]}/tensors.safetensors"),
        ("runs", "rows.jsonl"),
        ("runs", f"checkpoints/{NAMES[2]}/tensors.safetensors"),
    ],
)
def test_no_file_of_a_run_is_replaced(command: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / name).read_bytes()
    assert main([command, str(run), "-o" if command == "export" else "--csv", str(run / name)]) == 2
    assert capsys.readouterr().err == (
        f"ddp_loop {command}: {run / name} is a file of the run in {run}, and would be lost. Name another file.\n"
    )
    assert (run / name).read_bytes() == before


def test_an_older_output_beside_the_run_is_replaced(run: Path) -> None:
    for _ in range(2):
        assert export(run, run / "model.safetensors") == 0
        assert main(["runs", str(run), "--csv", str(run / "table.csv")]) == 0


def test_nested_tensors_have_dotted_names_and_other_parts_are_refused(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, object] = {"a": {"b": torch.ones(2), 3: {"c": torch.zeros(1)}}}
    monkeypatch.setattr("ddp_loop.checkpoint.weights.part_of", lambda *_: values)
    export_weights(run, file, say=print)
    assert {name: one.tolist() for name, one in load_file(file).items()} == {"a.3.c": [0.0], "a.b": [1.0, 1.0]}
    values["b"] = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(ValueError, match=r"A safetensors file cannot have torch\.complex128 \(b\)\. Cast them, and"):
        export_weights(run, file, say=print)
    values.clear()
    with pytest.raises(ValueError, match=r"'model' in .* has no tensor\. Name another part"):
        export_weights(run, file, say=print)
