"""The house plan, checked: sizes, public names, an import without side effects, and where tests lie."""

import ast
import functools
import inspect
import json
import operator
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddp_loop
from tests.support.paths import DOCS, ROOT, TESTS
from tests.support.scripts import run

PACKAGE = ROOT / "ddp_loop"
DESIGN = (DOCS / "design.md").read_text()
SOURCES = sorted(PACKAGE.rglob("*.py"))

ROOMS = {
    *("training", "batch_norm", "data", "datasets", "distributed"),
    *(
        "checkpoint",
        "reporting",
        "monitor",
        "determinism",
        "profiling",
        "sweeps",
        "tracing",
        "elastic",
        "hosts",
        "sinks",
    ),
}
BESIDE_THE_ROOMS = {"examples", "launch", "project", "support", "faults", "fake_cuda"}  # folders of the tests

COLLECTIVES = ("join_world", "Loop", "Step.fold", "evaluate", "predict", "Batches")
OPTIONAL = {
    *("matplotlib", "PIL", "sklearn", "cloudpickle", "rich"),
    *("optuna", "submitit", "starlette", "uvicorn", "tensorboard", "httpx", "playwright"),
    *("mlflow", "wandb", "torchmetrics", "IPython"),
}


def public_names_of(design: str) -> set[str]:
    """The backticked names of the section headed "Public names"."""
    section = re.search(r"^(#+) (?:[\d.]+ )?Public names *\n(.*?)(?=^#|\Z)", design, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError('docs/design.md has no heading "Public names"')
    return set(re.findall(r"`(\w+)`", section[2]))


def module_of(path: Path) -> str:
    """The name of a module below the package: "data/shards"."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def modules_of_tests_in(source: str) -> set[str]:
    """The test modules that a source imports, in functions and in scripts that it writes too."""
    found = set(re.findall(r"^[ \t]*(?:from|import) (tests\.[\w.]*\btest_\w+)", source, re.MULTILINE))
    for package, names in re.findall(r"^[ \t]*from (tests[\w.]*) import (\([^)]*|.*)", source, re.MULTILINE):
        if package not in found:
            found |= {f"{package}.{name}" for name in re.findall(r"\btest_\w+", names)}
    return found


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of a file's tree, which several tests walk."""
    return list(ast.walk(ast.parse(path.read_text())))


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, as "file:line name", with its number of lines."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{path.name}:{node.lineno} {node.name}", lines


def docstring_of(name: str) -> str:
    """The docstring of a public object, its lines joined; a dataclass's generated one does not count."""
    thing = operator.attrgetter(name)(ddp_loop)
    text = " ".join((thing.__doc__ or "").split())
    return "" if inspect.isclass(thing) and text.startswith(f"{thing.__name__}(") else text


def test_the_public_names_are_read_from_their_section() -> None:
    text = "## A\n`no`\n## 3. Public names\n\n* `Loop`: a loop\n* `launch`, `evaluate`\n\n## B\n`neither`\n"
    assert public_names_of(text) == {"Loop", "launch", "evaluate"}


def test_no_module_is_a_fragment() -> None:
    faces_and_stubs = {path for path in SOURCES if path.name in ("__init__.py", "__main__.py")}
    lines = {module_of(path): len(path.read_text().splitlines()) for path in SOURCES if path not in faces_and_stubs}
    assert {name: n for name, n in lines.items() if n < 40} == {}


def test_a_function_fits_on_a_screen() -> None:
    functions = dict(pair for path in SOURCES for pair in functions_of(path))
    assert {name: n for name, n in functions.items() if n > 60} == {}


def classes_of(path: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            yield f"{module_of(path)}:{node.name}", node


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that the methods of a class assign."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def arguments_of(node: ast.ClassDef) -> int:
    """The number of arguments of a class's constructor, without `self`."""
    made = [each.args for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return max([len(each.posonlyargs) + len(each.args) + len(each.kwonlyargs) - 1 for each in made], default=0)


def is_packed(node: ast.AST) -> bool:
    """Whether an assignment is two or more on one line: neither a swap nor the parts of one value."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    [target, *others] = node.targets
    if others or not isinstance(target, ast.Tuple):
        return False
    return set(map(ast.unparse, target.elts)).isdisjoint(map(ast.unparse, node.value.elts))


def test_a_swap_is_not_packed() -> None:
    def found(line: str) -> bool:
        return is_packed(ast.parse(line).body[0])

    assert found("a, self.b = c, 1")
    assert not any(
        map(found, ["a, b = b, a", "a, b = c", "A, B = BOTH = (1, 2)", "a = 1, 2", "one, self.b = self.b, 0"])
    )


def test_no_class_has_15_attributes() -> None:
    # Each of these is to become smaller. Nothing is added here.
    large = {"checkpoint/checkpointer:Checkpointer", "data/batches:Batches", "distributed/world:World"}
    assert {name for path in SOURCES for name, node in classes_of(path) if len(attributes_of(node)) > 14} == large


def test_no_constructor_has_more_than_8_arguments() -> None:
    # The first two are the faces of the package. Nothing is added to the others.
    large = {"training/loop:Loop", "data/batches:Batches"}
    large |= {"data/sequences:SequenceBatches", "training/step:Fold"}
    assert {name for path in SOURCES for name, node in classes_of(path) if arguments_of(node) > 8} == large


def test_no_line_packs_two_assignments() -> None:
    # Functions of 60 lines, which are to become shorter. Nothing is added here.
    packed = {"evaluation", "tracing/trace"}
    found = {module_of(path) for path in SOURCES for node in nodes_of(path) if is_packed(node)}
    assert found == packed


def test_user_errors_raise_instead_of_asserting() -> None:
    # `python -O` drops assert statements, and their message is seldom the rule, what came, the remedy.
    found = [
        f"{path.name}:{node.lineno}" for path in SOURCES for node in nodes_of(path) if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_module_is_a_drawer_for_the_rest() -> None:
    drawers = re.compile(r"_?(utils?|common|helpers?|misc)")
    assert [path.name for path in SOURCES if drawers.fullmatch(path.stem)] == []


def test_no_example_hides_a_module_of_the_standard_library() -> None:
    # Python looks for modules in a script's own folder first, for those that torch imports too.
    found = [path.name for path in (ROOT / "examples").rglob("*.py") if path.stem in sys.stdlib_module_names]
    assert found == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from tests.data.test_batches import draw", {"tests.data.test_batches"}),
        ("import tests.test_plots as plots", {"tests.test_plots"}),
        ("from tests.data import test_batches", {"tests.data.test_batches"}),
        ("from tests.data import (\n    test_batches,\n)", {"tests.data.test_batches"}),
        ("def f():\n    from tests import test_plots", {"tests.test_plots"}),
        ('SCRIPT = """\nfrom tests.data.test_batches import draw\n"""', {"tests.data.test_batches"}),
        ("from tests.support.harness import OnRanks\nfrom tests.faults import bad_disks", set()),
    ],
)
def test_every_way_to_import_a_test_module_is_seen(line: str, found: set[str]) -> None:
    assert modules_of_tests_in(line) == found


def test_no_test_imports_from_a_test_module() -> None:
    # What two of them need is in tests/support: a test module can be renamed, split, and run alone.
    imported = {
        path.relative_to(TESTS).as_posix(): modules_of_tests_in(path.read_text()) for path in TESTS.rglob("*.py")
    }
    del imported["project/test_architecture.py"]  # the examples above
    del imported["test_planted_gpu_faults.py"]  # each fault must fail a test of another module
    assert {name: modules for name, modules in imported.items() if modules} == {}


def test_the_folders_of_the_tests_are_the_rooms() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == ROOMS | BESIDE_THE_ROOMS
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - ROOMS == set()
    assert [name for name in folders if not (TESTS / name / "__init__.py").is_file()] == []


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
import json, os, random, sys, threading
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
import ddp_loop
alone = {name for name in set(sys.modules) - modules if name.startswith("ddp_loop.")}
for name in ddp_loop.__all__:
    if name not in ("TrialResult", "sweep"):  # of a sweep, which a rank does not need
        getattr(ddp_loop, name)
after = state()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "alone": sorted(alone),
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "rooms": sorted({name.split(".")[1] for name in sys.modules if name.startswith("ddp_loop.")}),
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """What `import ddp_loop`, and the first use of each name that a rank may need, did in a fresh interpreter."""
    done = run("-c", IMPORT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_importing_the_package_changes_nothing_around_it(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["changed"] == []


@pytest.mark.slow
def test_importing_the_package_imports_no_room_before_it_is_used(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["alone"] == []


def test_importing_the_package_does_not_import_torch() -> None:
    found = "import sys, ddp_loop; print({'torch', 'numpy'} & set(sys.modules))"
    assert run("-c", found).stdout == "set()\n"


def test_importing_the_package_imports_nothing_optional(fresh_import: dict[str, Any]) -> None:
    assert set(fresh_import["modules"]) & OPTIONAL == set()


def test_importing_the_package_leaves_out_what_no_rank_needs(fresh_import: dict[str, Any]) -> None:
    assert {"training", "distributed"} <= set(fresh_import["rooms"])
    assert set(fresh_import["rooms"]) & {"sweeps", "hosts", "monitor", "cli"} == set()


def test_the_public_names_are_those_that_the_package_offers() -> None:
    assert set(ddp_loop.__all__) <= set(dir(ddp_loop))
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = ddp_loop.nothing


@pytest.mark.parametrize(("typed", "meant"), [("use_bf16", "use_bfloat16"), ("evalute", "evaluate")])
def test_a_misspelt_public_name_is_answered_once(typed: str, meant: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute") as caught:
        getattr(ddp_loop, typed)
    shown = "".join(traceback.format_exception(caught.value))  # Python knows hints too
    assert re.findall("Did you mean.*", shown) == [f"Did you mean {meant!r}?"]
