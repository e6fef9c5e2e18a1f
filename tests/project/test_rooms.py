"""The rooms of the package: which may import which, by their faces alone, and without circles."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "ddp_loop"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TABLE = re.compile(r"^\| (`.+`) \| .+ \| ?(.*?) ?\|$", re.MULTILINE)


def allowed_by(design: str) -> dict[str, set[str]]:
    """Room -> the rooms that it may import, from the table under `| room | what lives there | may import |`."""
    _, _, section = design.partition("| room | what lives there | may import |")
    table = [(re.findall(r"`(\w+)`", rooms), right) for rooms, right in TABLE.findall(section.partition("\n\n")[0])]
    everything = {room for rooms, _ in table for room in rooms}
    return {
        room: everything if right == "everything" else set(re.findall(r"`(\w+)`", right))
        for rooms, right in table
        for room in rooms
    }


def room_of(module: str) -> str:
    """The folder or file below the package: "data" of "ddp_loop.data.shards"; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def module_of(path: Path) -> str:
    """The dotted name of a file; a face is called as its room is."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__") if path.parent != PACKAGE else name


def imports_of(source: str, modules: set[str]) -> Iterator[str]:
    """The modules of the package that a source imports, in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "ddp_loop")
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "ddp_loop.__relative__"  # there are none: each name has one way to be imported
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ddp_loop":
            base = node.module or ""
            below = [f"{base}.{alias.name}" for alias in node.names]
            yield from ({name if name in modules else base for name in below})


ALLOWED = allowed_by((ROOT / "docs" / "design.md").read_text())
MODULES = {module_of(path) for path in SOURCES}


@functools.cache
def imports_by_module() -> dict[str, set[str]]:
    """What each module imports: not read when tests are collected, which each process does."""
    return {module_of(path): set(imports_of(path.read_text(), MODULES)) for path in SOURCES}


def questions_of_devices_in(source: str) -> list[int]:
    """The lines that ask what a device is: `device.type`, `.is_cuda`, `torch.cuda`, and so on."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            asks = name.endswith(("device.type", ".is_cuda", ".is_cpu")) or name in ("torch.cuda", "torch.accelerator")
            found += [node.lineno] if asks else []
        elif isinstance(node, ast.ImportFrom):
            found += [node.lineno] if (node.module or "").startswith("torch.cuda") else []
    return sorted(found)


def test_every_way_to_ask_what_a_device_is_is_seen() -> None:
    lines = ["one.device.type", "device.type", "x.is_cuda", "torch.cuda.Event()", "from torch.cuda import Event"]
    assert questions_of_devices_in("\n".join(lines)) == [1, 2, 3, 4, 5]
    assert questions_of_devices_in("x.kind.type\nfrom torch import nn\nx = 'torch.cuda.graphs'") == []


def test_only_one_module_asks_what_a_device_is() -> None:
    assert {path.name for path in SOURCES if questions_of_devices_in(path.read_text())} == {"accelerators.py"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import ddp_loop.data.shards", {"ddp_loop.data.shards"}),
        ("import ddp_loop", {"ddp_loop"}),
        ("from ddp_loop import data", {"ddp_loop.data"}),
        ("from ddp_loop.data import Batches", {"ddp_loop.data"}),
        ("from ddp_loop.data import shards, Batches", {"ddp_loop.data.shards", "ddp_loop.data"}),
        ("def f():\n    from ddp_loop.data.shards import Shard", {"ddp_loop.data.shards"}),
        ("from .shards import Shard", {"ddp_loop.__relative__"}),
        ("import torch\nfrom ddp_loop_else import x", set()),
    ],
)
def test_every_way_to_import_a_module_is_seen(line: str, found: set[str]) -> None:
    assert set(imports_of(line, {"ddp_loop.data", "ddp_loop.data.shards"})) == found


def test_the_table_of_the_rooms_is_read() -> None:
    table = "| room | what lives there | may import |\n|---|---|---|\n| `a` | x | |\n| `b`, `c` | y | `a` |\n"
    assert allowed_by(table + "| `d` | z | everything |\n\n| `e` | f | `g` |\n") == {
        "a": set(),
        "b": {"a"},
        "c": {"a"},
        "d": {"a", "b", "c", "d"},
    }


def test_the_table_has_the_rooms_that_exist() -> None:
    assert set(ALLOWED) == {room_of(module) for module in MODULES}


def test_a_room_imports_only_what_the_table_allows() -> None:
    found = {(room_of(module), room_of(name)) for module, names in imports_by_module().items() for name in names}
    assert {(room, other) for room, other in found if other != room and other not in ALLOWED[room]} == set()


def test_the_table_allows_nothing_that_no_room_needs() -> None:
    needed = {(room_of(module), room_of(name)) for module, names in imports_by_module().items() for name in names}
    allowed = {(room, other) for room, others in ALLOWED.items() if len(others) < len(ALLOWED) for other in others}
    assert allowed - needed == set()


def test_other_rooms_are_imported_by_their_faces() -> None:
    deep = {
        (module, name)
        for module, names in imports_by_module().items()
        for name in names
        if room_of(name) != room_of(module) and name.count(".") > 1
    }
    assert deep == set()


def test_a_face_only_exports_what_its_room_has() -> None:
    for path in PACKAGE.glob("*/__init__.py"):
        tree = ast.parse(path.read_text())
        _, *imports, names = tree.body
        assert isinstance(names, ast.Assign), path
        assert ast.unparse(names.targets[0]) == "__all__", path
        assert all(isinstance(node, ast.ImportFrom) for node in imports), path
        assert all(room_of(name) == path.parent.name for name in imports_by_module()[module_of(path)]), path
        exported = [alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert sorted(exported) == sorted(ast.literal_eval(names.value)), path


def test_inside_a_room_there_are_no_circles() -> None:
    left = {
        module: {name for name in names if room_of(name) == room_of(module) and name.count(".") > 1}
        for module, names in imports_by_module().items()
        if module.count(".") > 1
    }
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}
