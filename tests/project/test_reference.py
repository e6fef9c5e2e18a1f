"""The pages of the API reference: every public name stands on one of them, once. `make docs` builds them."""

import inspect
import re
import runpy
from types import ModuleType

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


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (DOCS / "site" / "conf.py").read_text()
    assert [page.stem for page in PAGES if f"\ndocs/reference/{page.stem}\n" not in contents] == []
