"""The wheel and the source distribution: what they contain, and what works with each extra alone.

A wheel is installed into an empty folder. An interpreter then runs with that folder, and without the packages that the
core or the extra under test does not require: they look as if they were not installed.
"""

from __future__ import annotations

import functools
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
import importlib.abc, importlib.metadata, importlib.util, json, os, re, sys

cases = json.load(sys.stdin)
hidden, distributions, _ = cases[""]
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
import torch  # takes seconds: once, with the packages of the core alone, and not in each of the forks

def say(statement):
    import ddp_loop
    for name in ddp_loop.__all__:
        getattr(ddp_loop, name)
    from ddp_loop import cli
    print(ddp_loop.__file__)
    try:
        exec(statement, {"cli": cli})
    except ImportError as error:
        print(f"ImportError: {error}")
    else:
        print("works")

for name, (hidden, distributions, statement) in cases.items():
    if not os.fork():
        with open(f"said-{name}", "w") as sys.stdout:
            say(statement)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files under version control."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    target = tmp_path_factory.mktemp("dist")
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


def test_a_clone_is_installed_as_a_path_so_that_its_own_folder_beside_a_script_hides_nothing(
    source: Path, tmp_path: Path
) -> None:
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, timeout=300, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert [name for name in opened.namelist() if ".dist-info/" not in name] == [
            f"__editable__.ddp_loop-{PROJECT['version']}.pth"
        ]


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


installed = functools.cache(importlib.metadata.packages_distributions)  # a second of work


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
    for module, distributions in installed().items():
        names = {re.sub(r"[-_.]+", "-", one).lower() for one in distributions}
        if not names & needed and "ddp-loop" not in names:
            hidden.append(module)
            others |= names
    return hidden, sorted(others)


def say_with(site: Path, folder: Path, extras: dict[str, str | None]) -> dict[str, str]:
    """What the statement of each case says in an interpreter with this extra, or with the core alone."""
    cases = {name: (*hidden_with(extra), CASES.get(name, "")) for name, extra in {"": None, **extras}.items()}
    packages = [one for one in sys.path if one.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=folder, env={"PYTHONPATH": ":".join([str(site), *packages]), "HOME": str(folder)},
        input=json.dumps(cases), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = {}
    for name in extras:
        where, _, text = (folder / f"said-{name}").read_text().partition("\n")
        assert Path(where).is_relative_to(site)
        said[name] = text.strip()
    return said


def test_each_extra_of_a_user_has_a_case() -> None:
    assert set(CASES) == set(PROJECT["optional-dependencies"]) - NOT_A_USERS


def test_an_extra_alone_is_enough_for_what_it_is_for(site: Path, tmp_path: Path) -> None:
    assert say_with(site, tmp_path, {extra: extra for extra in CASES}) == dict.fromkeys(CASES, "works")


def test_without_it_the_error_names_the_extra(site: Path, tmp_path: Path) -> None:
    for extra, said in say_with(site, tmp_path, dict.fromkeys(CASES)).items():
        assert said.startswith("ImportError: "), extra
        assert extra not in NAMED or f"ddp_loop[{extra}]" in said
