"""The pages of the API reference: every public name stands on one of them, once. `make docs` builds them."""

import inspect
import re
import runpy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ddp_loop
from tests.support.paths import DOCS

PAGES = sorted((DOCS / "reference").glob("*.rst"))
MODULES = {name for name in ddp_loop.__all__ if isinstance(getattr(ddp_loop, name), ModuleType)}


def documented_in(page: str) -> list[tuple[str, str]]:
    """(directive, name) of what a page documents: `.. autoclass:: ddp_loop.Loop` is ("class", "Loop")."""
    return re.findall(r"^\.\. auto(\w+):: ddp_loop\.([\w.]+)$", page, re.MULTILINE)


def public_names_in(module: ModuleType) -> set[str]:
    """The classes and functions that a module has for its users."""
    own = {name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__}
    names = getattr(module, "__all__", {name for name in own if callable(getattr(module, name))})
    return {name for name in names if name[0] != "_"}


def shown_by(page: str) -> dict[str, Callable[..., Any]]:
    """The functions, classes and methods that a page shows, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for directive, name, options in re.findall(
        r"^\.\. auto(\w+):: ddp_loop\.([\w.]+)\n((?:   :.*\n?)*)", page, re.MULTILINE
    ):
        thing = getattr(ddp_loop, name)
        if directive == "module":
            parts = {f"{name}.{one}": getattr(thing, one) for one in public_names_in(thing)}
        elif members := re.search(r":members:(.*)", options):
            parts = {name: thing, **{f"{name}.{one}": getattr(thing, one) for one in re.findall(r"\w+", members[1])}}
        elif directive == "class":
            parts = {name: thing, **methods_of(name, thing)}
        else:
            parts = {name: thing}
        for key, one in parts.items():
            found |= {key: one, **(methods_of(key, one) if directive == "module" and inspect.isclass(one) else {})}
    return found


def methods_of(name: str, kind: type) -> dict[str, Callable[..., Any]]:
    """The methods of a class that have a docstring, as Sphinx shows them."""
    own = {key: one for key, one in vars(kind).items() if key[0] != "_" and inspect.isfunction(one) and one.__doc__}
    return {f"{name}.{key}": one for key, one in own.items()}


def is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Exception)


def arguments_in(docstring: str) -> set[str]:
    """The names under Args, or those of a dataclass under Attributes."""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.MULTILINE) if section else []
    return {one.lstrip("*") for group in names for one in group.split(", ")}


def test_the_directives_of_a_page_are_read() -> None:
    page = "A\n=\n\n.. autoclass:: ddp_loop.A\n   :members: b\n.. autofunction:: ddp_loop.c\n.. note:: ddp_loop.d\n"
    assert documented_in(page) == [("class", "A"), ("function", "c")]


def test_the_markdown_of_a_docstring_becomes_restructured_text() -> None:
    conf = runpy.run_path(str(DOCS / "site" / "conf.py"))
    lines = ["Shapes (n, *rest).", "", "    step.fold()", "", "    b = c", "", "Args:", "    x: one", "        thing"]
    conf["mark_code"](None, "function", "f", None, None, lines)
    code = [".. code-block:: python", "", "    step.fold()", "", "    b = c", ""]
    assert lines == [r"Shapes (n, \*rest).", "", *code, "Args:", "    x: one", "        thing"]
    formula = ["The mean::", "", "    sum_i m_i", ""]
    conf["mark_code"](None, "function", "f", None, None, formula)
    assert formula == ["The mean:", "", ".. code-block:: text", "", "    sum_i m_i", ""]


def test_every_public_name_stands_in_the_reference_once() -> None:
    found = [entry for page in PAGES for entry in documented_in(page.read_text())]
    assert sorted(name for _, name in found) == sorted(ddp_loop.__all__)
    assert {name for directive, name in found if directive == "module"} == MODULES


def test_what_a_public_module_has_is_documented() -> None:
    # Sphinx leaves out what has no docstring.
    for name in MODULES:
        module = getattr(ddp_loop, name)
        names = public_names_in(module)
        assert names, name
        assert [one for one in names if not inspect.getdoc(getattr(module, one))] == [], name


def test_the_names_under_args_are_read() -> None:
    text = "A.\n\nArgs:\n    a, *b: one:\n        c: no\n    d: x.\n\nRaises:\n    E: f."
    assert arguments_in(text) == {"a", "b", "d"}
    page = ".. autoclass:: ddp_loop.World\n   :members: sum, leave\n.. autofunction:: ddp_loop.launch\n"
    assert sorted(shown_by(page)) == ["World", "World.leave", "World.sum", "launch"]


def test_every_parameter_of_what_the_reference_shows_is_named_under_args() -> None:
    shown = {name: one for page in PAGES for name, one in shown_by(page.read_text()).items()}
    assert {"Loop", "Loop.save", "Step.hold", "World.sum", "datasets.digits", "sinks.read_csv"} <= set(shown)
    given = runpy.run_path(str(DOCS / "site" / "conf.py"))["GIVEN"]  # their constructors are not shown
    missing: dict[str, list[str]] = {}
    for name, one in shown.items():
        if callable(one) and f"ddp_loop.{name}" not in given and not is_error(one):
            named = arguments_in(inspect.getdoc(one) or "")
            if left := inspect.signature(one).parameters.keys() - named - {"self"}:
                missing[name] = sorted(left)
    assert missing == {}


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (DOCS / "site" / "conf.py").read_text()
    assert [page.stem for page in PAGES if f"\ndocs/reference/{page.stem}\n" not in contents] == []
