"""The benchmark on fake GPUs, small, and the table that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fake_gpu
from benchmarks.measuring import Ratio
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J18")

COUNTS = fake_gpu.Counts(400.0, 0.0, 1.0, 4.8)
RATIO = Ratio(1.25, 1.2, 1.3, 5.0, 4.0, 10)


def test_the_network_has_the_parameters_of_resnet_50() -> None:
    shapes = [parameter.shape for parameter in fake_gpu.resnet50(64).parameters()]
    assert len(shapes) == 161
    assert sum(len(shape) == 4 for shape in shapes) == 53


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_steps_of_ddp_and_ours_are_counted_and_timed(on_fake_gpus: OnRanks, ranks: int) -> None:
    names = [fake_gpu.PLAIN, "DDP", "ddp_loop"]
    found = on_fake_gpus(ranks, fake_gpu.measure, names, 2, 1, 0.0)[0]
    assert list(found) == names
    plain = found[fake_gpu.PLAIN][0]
    assert plain.launches > 300
    assert plain.peak > 3  # weights, gradients and momentum
    for counts, ratio in found.values():
        assert counts.waits == 0
        assert counts.launches >= plain.launches
        assert counts.peak >= plain.peak
        assert min(ratio.median, ratio.one_ms, ratio.other_ms) > 0


def test_the_table_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "fake_gpu.md"
    document.write_text(f"Before.\n\n{fake_gpu.BEGIN}old\n{fake_gpu.END}\nAfter.\n")
    monkeypatch.setattr(fake_gpu, "REPORT", document)
    monkeypatch.setattr(fake_gpu, "measure_on", lambda ranks: {"ddp_loop": (COUNTS, RATIO)})
    fake_gpu.report([])
    text = document.read_text()
    assert text.startswith(f"Before.\n\n{fake_gpu.BEGIN}Command: `python -m benchmarks fake-gpu`")
    assert text.endswith(f"{fake_gpu.END}\nAfter.\n")
    assert "old" not in text
    assert "| 2 | ddp_loop | 400 | 0 | 1 | 4.8 | 1.250 | 1.200 to 1.300 | 5.000 / 4.000 | 10 |" in text
    assert capsys.readouterr().out.strip() in text
