"""Sphinx for `make docs`: a site of the docstrings and the Markdown files, which loads nothing from elsewhere."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import ddp_loop
from ddp_loop.cli import main

project = "ddp_loop"
release = version = ddp_loop.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]

# The source folder is the root of the repository, so that the links between the Markdown files hold on the site too.
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "docs/reference/*.rst"]
exclude_patterns = [".*", "build", "ddp_loop", "tests", "examples", "benchmarks", "launch", "runs"]
myst_heading_anchors = 3

# In docstrings `x` is code, and a link where x is a public name.
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
viewcode_line_numbers = True

html_theme = "furo"
html_title = f"ddp_loop {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
templates_path = ["templates"]
html_additional_pages = {"index": "index.html"}  # leads to the home page

# Objects that a user is given and does not make: their constructors are no part of the reference.
GIVEN = {
    *("ddp_loop.Epoch", "ddp_loop.PeerFailed", "ddp_loop.RankFailed"),
    *("ddp_loop.SequenceChunk", "ddp_loop.Step", "ddp_loop.StepResult", "ddp_loop.Stopped", "ddp_loop.TrialResult"),
    *("ddp_loop.World", "ddp_loop.sinks.Sink"),
}

CONTENTS = """
```{toctree}
:hidden:
:caption: First steps

docs/tutorial
docs/how_do_i
docs/migrate
docs/faq
docs/when_to_use
```

```{toctree}
:hidden:
:caption: Guides

docs/data
docs/batch_norm
docs/buffers
docs/gradient_accumulation
docs/checkpoints
docs/faults
docs/watching
docs/logging
docs/sweeps
docs/what_equals_what
docs/compile
docs/larger_models
```

```{toctree}
:hidden:
:caption: Ranks and machines

docs/launching
docs/cluster
docs/slurm
docs/kubernetes
docs/ray
docs/hosts
docs/shares
docs/profile
docs/scaling
```

```{toctree}
:hidden:
:caption: Reference

docs/reference/loop
docs/reference/data
docs/reference/evaluation
docs/reference/batch_norm
docs/reference/distributed
docs/reference/sweeps
docs/reference/checkpoints
docs/reference/determinism
docs/reference/monitoring
docs/reference/datasets
docs/reference/networks
docs/reference/command_line
```

```{toctree}
:hidden:
:caption: Project

docs/design
docs/decisions
docs/capabilities
docs/comparison_of_tests
docs/benchmarks/README
CONTRIBUTING
CHANGELOG
```
"""

# The measurements are one entry of the contents, which unfolds.
MEASUREMENTS = """
```{toctree}
:hidden:
:glob:
:maxdepth: 1

*
```
"""

LONE_STAR = re.compile(r"(?<![*\w\\`])\*(?=\w[^*`]*$)")


class CommandHelp(Directive):
    """What each command of `ddp_loop` prints with `--help`, a section for each."""

    def run(self) -> list[nodes.Node]:
        commands = re.findall(r"^    ([a-z]+)\b", help_of(), re.MULTILINE)
        sections: list[nodes.Node] = []
        for command in commands:
            section = nodes.section(ids=[command], names=[command])
            section += nodes.title(text=command)
            section += nodes.literal_block(text=help_of(command), language="text")
            sections.append(section)
        return sections


def help_of(*command: str) -> str:
    """The text of `ddp_loop COMMAND --help`."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the home page, which is README.md, the table of contents, and the measurements theirs."""
    source[0] += {root_doc: CONTENTS, "docs/benchmarks/README": MEASUREMENTS}.get(name, "")


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def mark_code(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring's Markdown: mark indented blocks as code, escape a star in prose."""
    # Of a property napoleon would take what stands before a colon for its type; an empty comment prevents it.
    marked: list[str] = ["..", ""] if what in ("attribute", "property") else []
    depth, inside = 0, False  # the indent of the prose before; whether this line is of a block
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() and (not inside or indent <= depth):
            inside = number > 0 and not lines[number - 1].strip() and indent > depth
            if inside:
                marked[-2:-1] = [re.sub(r"::$", ":", before) for before in marked[-2:-1]]  # has such a mark
                language = "python" if is_python(block_at(lines, number, depth)) else "text"
                marked += [" " * depth + f".. code-block:: {language}", ""]
            else:
                depth = indent
        marked.append(line if inside else LONE_STAR.sub(r"\\*", line))
    lines[:] = marked


def block_at(lines: list[str], start: int, depth: int) -> str:
    """The lines from `start` on that are indented more than `depth`, without their common indent."""
    block: list[str] = []
    for line in lines[start:]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        block.append(line)
    common = min(len(line) - len(line.lstrip()) for line in block if line.strip())
    return "\n".join(line[common:] for line in block)


def hide_constructor(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    return ("", returns) if name in GIVEN else None


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", hide_constructor)
