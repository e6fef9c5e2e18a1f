"""The wheel and the source distribution: what they contain, and what works with each extra alone.

A wheel is installed into an empty folder. An interpreter then runs with that folder, and without the packages that the
core or the extra under test does not require: they look as if they were not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

CASES = {  # what an extra is for, as a statement that needs its packages
    "completion": "cli.completion_of('bash')",
    "digits": "from ddp_loop import datasets; datasets.digits(size=10, cache=False)",
    "finetune": "import transformers, peft, datasets",
    "handwritten": "from ddp_loop import datasets; datasets.handwritten()",
    "metrics": "import torchmetrics",
    "mlflow": "from ddp_loop import sinks; sinks.mlflow_sink()",
    "monitor": "from ddp_loop.monitor.server import check_installed; check_installed()",
    "notebook": "import cloudpickle",
    "plots": "from ddp_loop import plots; plots._make_figure(1, 1)",
    "ray": "import tensorboardX, msgpack",  # Ray itself brings a psutil of its own, which is hidden here
    "slurm": "from submitit import SlurmExecutor",
    "sweep": "from ddp_loop.sweeps.storage import require_optuna; require_optuna()",
    "tensorboard": "from ddp_loop import sinks; sinks.tensorboard_sink('board')",
    "terminal": "import rich.live",
    "wandb": "from ddp_loop import sinks; sinks.wandb_sink()",
}
NAMED = set(CASES) - {
    "finetune",
    "metrics",
    "notebook",
    "ray",
    "slurm",
    "terminal",
}  # whose statement names the extra where it lacks
NOT_A_USERS = {"dev", "docs", "peers"}

PROGRAM = """
import importlib.abc, importlib.metadata, importlib.util, json, re, sys

hidden, distributions, statement = json.loads(sys.argv[1])
from_name = importlib.metadata.Distribution.from_name

def visible(name):
    if re.sub(r"[-_.]+", "-", name).lower() in distributions:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

importlib.metadata.Distribution.from_name = visible

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Hidden())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in hidden else find(name, *more)
import ddp_loop
for name in ddp_loop.__all__:
    getattr(ddp_loop, name)
from ddp_loop import cli
print(ddp_loop.__file__)
try:
    exec(statement)
except ImportError as error:
    print(f"ImportError: {error}")
else:
    print("works")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution, built from the files under version control alone."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [archive] = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, archive


def tracked() -> set[str]:
    """The package's files under version control."""
    listed = subprocess.run(["git", "ls-files", "ddp_loop"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split() if (ROOT / name).is_file()}


def test_the_wheel_has_the_whole_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        [metadata] = [wheel.read(name).decode() for name in names if name.endswith("METADATA")]
    ours = {name for name in names if ".dist-info/" not in name}
    assert ours == tracked()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"Version: {PROJECT['version']}" in metadata
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


def test_the_source_distribution_builds_the_same_package(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.fixture(scope="module")
def site(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, str(built[0])], check=True, timeout=300)
    return folder


def needed_by(requirements: list[str]) -> set[str]:
    """The distributions that these requirements bring, by their normalised names."""
    found, waiting = set[str](), [Requirement(one) for one in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        one = waiting.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        found.add(name)
        for extra in ("", *one.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                inner = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            waiting += [
                other
                for other in map(Requirement, inner)
                if other.marker is None or other.marker.evaluate({"extra": extra})
            ]
    return found


def hidden_with(extra: str | None) -> tuple[list[str], list[str]]:
    """The modules, and the names, of all installed packages that the core and an extra do not bring."""
    extras = PROJECT["optional-dependencies"]
    asked = list(PROJECT["dependencies"])
    waiting = [] if extra is None else list(extras[extra])
    while waiting:
        one = waiting.pop()
        if inner := re.fullmatch(r"ddp_loop\[(.*)\]", one):
            waiting += [other for name in inner[1].split(",") for other in extras[name]]
        else:
            asked.append(one)
    needed = needed_by(asked)
    hidden, others = list[str](), set[str]()
    for module, distributions in importlib.metadata.packages_distributions().items():
        names = {re.sub(r"[-_.]+", "-", one).lower() for one in distributions}
        if not names & needed and "ddp-loop" not in names:
            hidden.append(module)
            others |= names
    return hidden, sorted(others)


def run_with(site: Path, extra: str | None, statement: str) -> str:
    arguments = json.dumps([*hidden_with(extra), statement])
    packages = [one for one in sys.path if one.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, arguments],
        cwd=site, env={"PYTHONPATH": ":".join([str(site), *packages]), "HOME": str(site)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, _, said = done.stdout.partition("\n")
    assert Path(where).is_relative_to(site)
    return said.strip()


def test_each_extra_of_a_user_has_a_case() -> None:
    assert set(CASES) == set(PROJECT["optional-dependencies"]) - NOT_A_USERS


@pytest.mark.parametrize("extra", sorted(CASES))
def test_an_extra_alone_is_enough_for_what_it_is_for(extra: str, site: Path) -> None:
    assert run_with(site, extra, CASES[extra]) == "works"


@pytest.mark.parametrize("extra", sorted(CASES))
def test_without_it_the_error_names_the_extra(extra: str, site: Path) -> None:
    said = run_with(site, None, CASES[extra])
    assert said.startswith("ImportError: ")
    if extra in NAMED:
        assert f"ddp_loop[{extra}]" in said
