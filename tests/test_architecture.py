"""The house plan, checked: floors, sizes, public names, and an import without side effects."""

import ast
import inspect
import json
import operator
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddp_loop

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_loop"
DESIGN = (ROOT / "docs" / "design.md").read_text()
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOP = ("__init__", "__main__")

COLLECTIVES = ("join_world", "Loop", "Step.fold", "evaluate", "predict", "Batches")
OPTIONAL = {
    *("matplotlib", "PIL", "sklearn", "cloudpickle", "rich", "tyro"),
    *("starlette", "uvicorn", "tensorboard", "optuna", "submitit", "httpx", "playwright"),
}


def floors_of(design: str) -> dict[str, int]:
    """Module -> floor, from the rows under `| floor | module | the one idea |`."""
    table = re.search(r"^\| floor \| module \|.*\n\|[-:| ]+\n((?:\|.*\n?)+)", design, re.MULTILINE)
    if table is None:
        raise ValueError("docs/design.md has no table that begins with | floor | module |")
    floors = {}
    for row in table[1].splitlines():
        floor, modules = row.split("|")[1:3]
        floors.update({module: int(floor) for module in re.findall(r"`(\w+)`", modules)})
    return floors


def public_names_of(design: str) -> set[str]:
    """The backticked names of the section headed "Public names"."""
    section = re.search(r"^(#+) (?:[\d.]+ )?Public names *\n(.*?)(?=^#|\Z)", design, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError('docs/design.md has no heading "Public names"')
    return set(re.findall(r"`(\w+)`", section[2]))


def module_of(path: Path) -> str:
    """The name of a module in the table; the package is flat, so the file of a sub-package has none there."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules of ddp_loop that a source imports, in functions too; the package is `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"ddp_loop.{base}".rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "ddp_loop":
                first = rest.partition(".")[0]
                found.add(first if first in modules else "__init__")
    return found


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, as "file:line name", with its number of lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{path.name}:{node.lineno} {node.name}", lines


def docstring_of(name: str) -> str:
    """The docstring of a public object, its lines joined; a dataclass's generated one does not count."""
    thing = operator.attrgetter(name)(ddp_loop)
    text = " ".join((thing.__doc__ or "").split())
    return "" if inspect.isclass(thing) and text.startswith(f"{thing.__name__}(") else text


def test_the_floors_are_read_from_the_table() -> None:
    table = "| floor | module | the one idea |\n|--:|---|---|\n| 2 | `a`, `b` | `c` d |\n| 0 | `e` | f |\n"
    assert floors_of(f"# Title\n\n{table}\n| 9 | `g` | another table |\n") == {"a": 2, "b": 2, "e": 0}


def test_the_public_names_are_read_from_their_section() -> None:
    text = "## A\n`no`\n## 3. Public names\n\n* `Loop`: a loop\n* `launch`, `evaluate`\n\n## B\n`neither`\n"
    assert public_names_of(text) == {"Loop", "launch", "evaluate"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import ddp_loop.world", {"world"}),
        ("import ddp_loop", {"__init__"}),
        ("from ddp_loop import world, join_world", {"world", "__init__"}),
        ("from ddp_loop.world import World", {"world"}),
        ("from . import world", {"world"}),
        ("from .world import World", {"world"}),
        ("def f():\n    from .world import World", {"world"}),
        ("import torch\nfrom ddp_loop_else import x", set()),
    ],
)
def test_every_way_to_import_a_module_is_seen(line: str, found: set[str]) -> None:
    assert imports_of(line, {"world", "loop"}) == found


def test_the_floors_name_the_modules_that_exist() -> None:
    assert set(floors_of(DESIGN)) == {module_of(path) for path in SOURCES}


def test_the_package_itself_stands_on_the_top_floor_alone() -> None:
    floors = floors_of(DESIGN)
    assert {module for module, floor in floors.items() if floor == max(floors.values())} == set(TOP)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_module_imports_only_from_floors_below_its_own(path: Path) -> None:
    floors = floors_of(DESIGN)
    module = module_of(path)
    imported = imports_of(path.read_text(), set(floors))
    assert {name for name in imported if floors[name] >= floors[module]} == set()


def test_modules_are_short() -> None:
    lines = {module_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert statistics.median(lines.values()) < 150
    assert {name: n for name, n in lines.items() if n > 400} == {}


def test_a_function_fits_on_a_screen() -> None:
    functions = dict(pair for path in SOURCES for pair in functions_of(path))
    assert {name: n for name, n in functions.items() if n > 60} == {}


def test_user_errors_raise_instead_of_asserting() -> None:
    # `python -O` drops assert statements, and their message is seldom the rule, what came, the remedy.
    found = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_module_is_a_drawer_for_the_rest() -> None:
    drawers = re.compile(r"_?(utils?|common|helpers?|misc)")
    assert [path.name for path in SOURCES if drawers.fullmatch(path.stem)] == []


def test_the_public_names_are_those_of_the_document() -> None:
    assert set(ddp_loop.__all__) == public_names_of(DESIGN)
    assert len(ddp_loop.__all__) == len(set(ddp_loop.__all__))


@pytest.mark.parametrize("name", ddp_loop.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    assert docstring_of(name)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_says_that_every_rank_must_call_it(name: str) -> None:
    assert "Every rank must call this." in docstring_of(name)


# Run in an interpreter of its own. torch and numpy come first: only what ddp_loop adds is its own.
IMPORT = """
import gc, json, os, random, sys, threading, time
import numpy, torch

def state():
    tasks = "/proc/self/task"
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "system threads": len(os.listdir(tasks)) if os.path.isdir(tasks) else None,
        "environment": dict(os.environ),
        "torch's random state": torch.get_rng_state().tolist(),
        "numpy's random state": str(numpy.random.get_state()),
        "python's random state": str(random.getstate()),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_initialized(),
    }

before, modules = state(), set(sys.modules)
gc.freeze()  # to look through torch's objects takes 85 ms, and falls to whoever allocates next
start = time.process_time()
import ddp_loop
seconds = time.process_time() - start
after = state()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "seconds": seconds,
}))
"""


@pytest.fixture(scope="module")
def fresh_import(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `import ddp_loop` did in a fresh interpreter, compiled as after an installation: the quickest of 3."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("compiled"))
    results: list[dict[str, Any]] = []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=variables,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    return min(results[1:], key=lambda result: result["seconds"])


def test_importing_the_package_changes_nothing_around_it(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["changed"] == []


def test_importing_the_package_imports_nothing_optional(fresh_import: dict[str, Any]) -> None:
    assert set(fresh_import["modules"]) & OPTIONAL == set()


def test_importing_the_package_is_quick(fresh_import: dict[str, Any]) -> None:
    # Processor time, not the clock: other processes on the machine do not count. 0.15 s is what the
    # project promises on top of torch and numpy; it takes some 0.05.
    assert fresh_import["seconds"] < 0.15
