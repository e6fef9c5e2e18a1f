"""The list of mutants fits the code: each line occurs once, and the changed line is valid Python."""

from __future__ import annotations

import ast
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from benchmarks.mutants import CAUGHT, NOTHING, Mutant, Outcome, read_mutants, read_record, write_record
from tests.support.paths import ROOT


def rounds(mutants: list[Mutant]) -> list[list[Mutant]]:
    """Groups of which none changes a line twice: each file is parsed as often as its most mutated line asks for."""
    by_line: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_line[mutant.file, mutant.before].append(mutant)
    most = max(map(len, by_line.values()))
    return [[group[number] for group in by_line.values() if number < len(group)] for number in range(most)]


def test_each_mutant_has_its_line_in_the_current_code(tmp_path: Path) -> None:
    mutants = read_mutants()
    assert [mutant.number for mutant in mutants] == list(range(1, 401))
    for number, group in enumerate(rounds(mutants)):
        folder = tmp_path / str(number)
        for file in {mutant.file for mutant in group}:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
        for mutant in group:
            assert mutant.after != mutant.before
            mutant.apply(folder)
        for file in {mutant.file for mutant in group}:
            ast.parse((folder / file).read_text(), file)


def test_rooms_and_numbers_choose_mutants() -> None:
    chosen = read_mutants(["training", "batch_norm", "1"])
    assert {mutant.room for mutant in chosen} == {"training", "batch_norm", read_mutants(["1"])[0].room}


def test_the_outcome_of_a_mutant_whose_line_was_mended_is_forgotten(tmp_path: Path) -> None:
    outcomes = {one.number: Outcome(one.after, NOTHING, "room", "", 1) for one in read_mutants(["1", "2"])}
    write_record(tmp_path / "record", {1: outcomes[1], 2: replace(outcomes[2], after="pass")})
    assert read_record(tmp_path / "record") == {1: outcomes[1]}


def test_the_record_is_of_mutants_of_the_list() -> None:
    numbers = {mutant.number for mutant in read_mutants()}
    assert {int(number) for number in json.loads(CAUGHT.read_text())} <= numbers
