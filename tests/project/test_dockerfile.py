"""No Docker runs here: what the Dockerfile names must be there."""

from __future__ import annotations

import re
import tomllib

from tests.support.paths import ROOT


def test_the_dockerfile_names_extras_targets_and_scripts_that_are_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    [extras] = re.findall(r'"\.\[(.*)\]"', text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    assert all((ROOT / script).is_file() for script in re.findall(r"examples/\S+\.py", text))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([a-z-]+) JOBS", text)) <= set(targets)
    assert re.search("apt-get install .* git make$", text, re.MULTILINE)  # tests count changed lines by git
    assert re.findall(r"--target (\w+)", text) == re.findall(r"AS (\w+)", text)[1:]
