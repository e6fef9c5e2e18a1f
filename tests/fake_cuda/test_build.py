"""Where the fake device cannot be built, its tests are skipped with one line that says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import _with_fakes
from tests.fake_cuda import build
from tests.fake_cuda.build import NoFakeCuda

pytestmark = pytest.mark.covers("J18")

LINKER_SAYS = "ld: error: cannot find -lc10"


@pytest.fixture(autouse=True)
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "build", build.build.__wrapped__)
    monkeypatch.setattr(torch.version, "cuda", None)  # as on a CPU build, also where these tests run on another one


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)


def failing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: "/bin/false")


def failing_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.ROOT / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{LINKER_SAYS}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda program: str(compiler))


def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (no_compiler, "needs a C++ compiler, and there is no g++ here (Debian: g++)"),
        (failing_compiler, f"does not compile with torch {torch.__version__}"),
        (failing_linker, f"does not compile with torch {torch.__version__}: {LINKER_SAYS}"),
        (cuda_build, "needs a CPU build of torch"),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_test_is_skipped_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, kind: str, lacks: object, said: str
) -> None:
    assert callable(lacks)
    lacks(monkeypatch)
    with pytest.raises(NoFakeCuda) as missing:
        build.environment(2, kind)
    assert said in str(missing.value)
    assert "\n" not in str(missing.value)
    with pytest.raises(pytest.skip.Exception, match="the fake GPU "):
        next(_with_fakes(kind, 2))
