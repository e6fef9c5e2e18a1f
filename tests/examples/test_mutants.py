"""The list of mutants fits the code: each line occurs once, and the changed line is valid Python."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.mutants import read_mutants
from tests.support.paths import ROOT


def test_each_mutant_has_its_line_in_the_current_code(tmp_path: Path) -> None:
    mutants = read_mutants()
    assert len(mutants) == 40
    for mutant in mutants:
        (tmp_path / mutant.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / mutant.file, tmp_path / mutant.file)
        before = (tmp_path / mutant.file).read_text()
        mutant.apply(tmp_path)
        after = (tmp_path / mutant.file).read_text()
        assert after != before
        compile(after, mutant.file, "exec")
