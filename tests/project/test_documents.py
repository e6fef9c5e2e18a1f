"""What the documents say, held against what is there: capability rows, commands, the tree, the version."""

import ast
import functools
import re
import subprocess
import tokenize
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import ddp_loop
from tests.support.documents import claimed_rows, fenced_blocks, states_of, text_of
from tests.support.paths import DOCS, ROOT
from tests.support.scripts import run

TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
# Where prose is held to plain English; Python files are checked in their strings, comments and function names.
SCOPES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "docs/**/*.rst", "launch/*"),
    *("ddp_loop/**/*.py", "tests/**/*.py", "examples/**/*.py", "benchmarks/**/*.py"),
)
SYSTEM_USERS = ('"nobody"',)  # string literals that are names, not prose
NO_ENGLISH = (  # another language's idiom, and machines that speak
    *(
        r"gone (through|on with)",
        r"goes on (at|with)",
        r"went on at",
        r"behind (the|an?|it|its|each)",
        r"in good order",
    ),
    *(r"(is|are|was|were|be|been) told", r"tells? each other", r"hears? of", r"los(e|es|ing) patience"),
    *(r"nobody", r"(one|rank|process) who", r"who leaves", r"such ones", r"is another one"),
)
ON_GPUS = re.compile(  # what a module asks of a device, or of its GPUs
    r"is_asynchronous|is_gpu\b|has_batch_norm_kernels|empty_on_host|start_cop(y|ies)\b|HostCopy|\.mark\(\)"
    r"|\.host_reads\(|memory_(held|free)\(|gpu_count|all_gpus|identity\(\)"
)
NOUNLESS = re.compile(r"\b(?:that|those)\s+of\b", re.IGNORECASE)  # a reader has to look back for the noun
MOST_NOUNLESS = 1.2  # in 10,000 words
EXTRAS = {"monitor": "monitor", "plot": "plots"}  # without which a command refuses
ROWS = {"A": 15, "B": 11, "C": 8, "D": 13, "E": 7, "F": 4, "G": 5, "H": 10, "I": 8, "J": 19}


@functools.cache
def covered_by(source: str) -> set[str]:
    """The rows in the `covers` markers of a file's tests: on functions, classes, parameters or the module."""
    marked: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.match("test_|Test", node.name):
            marked += node.decorator_list
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marked.append(node.value)
    calls = [node for tree in marked for node in ast.walk(tree) if isinstance(node, ast.Call)]
    rows = [row for call in calls if ast.unparse(call.func) == "pytest.mark.covers" for row in call.args]
    return {str(ast.literal_eval(row)) for row in rows}


def commands_in(document: str) -> set[str]:
    """X of every line `ddp_loop X ...` or `python -m ddp_loop X ...` in the blocks marked `sh`."""
    blocks = "".join(fenced_blocks(document, "sh"))
    return set(re.findall(r"^(?:python -m )?ddp_loop ([a-z][\w-]*)", blocks, re.MULTILINE))


def make_targets_in(document: str) -> set[str]:
    """X of every `make X` in code, inline or fenced; assignments such as RANKS=4 may stand before X."""
    prose = re.sub(r"^```.*?^```$", "", document, flags=re.MULTILINE | re.DOTALL)
    code = "\n".join([*fenced_blocks(document), *re.findall(r"`([^`\n]+)`", prose)])
    return set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z]\w*)", code))


def tree_in(document: str) -> dict[str, str]:
    """Folder -> clause, from the fenced block that begins with `ddp_loop/`; an indented line continues it."""
    found = (block for block in fenced_blocks(document) if block.startswith("ddp_loop/"))
    folder, tree = "", dict[str, str]()
    for line in next(found).splitlines():
        head, _, rest = line.partition(" ")
        folder = head or folder
        tree[folder] = f"{tree.get(folder, '')} {rest.strip()}".strip()
    return tree


def links_in(document: str) -> set[str]:
    """The files that a document links to; not the web, not places inside a document."""
    return {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document) if "://" not in link}


def prose_of(path: Path) -> str:
    """The words of a document, or of a module's strings, comments and function names; without line breaks."""
    if path.suffix != ".py":
        return " ".join(path.read_text().replace("# ", "").split())
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    kinds = ("STRING", "FSTRING_MIDDLE", "COMMENT")
    words = [one.string for one in tokens if tokenize.tok_name[one.type] in kinds and one.string not in SYSTEM_USERS]
    names = [name.string.replace("_", " ") for one, name in pairwise(tokens) if one.string == "def"]
    return " ".join(f"{' '.join(words)} . {' . '.join(names)}".replace("# ", "").split())


def guide_of(path: Path) -> str:
    """The words of a document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def remarks_of(path: Path) -> str:
    """A module's docstrings and comments."""
    tree = ast.parse(path.read_text())
    with path.open("rb") as file:
        comments = [one.string for one in tokenize.tokenize(file.readline) if one.type == tokenize.COMMENT]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [ast.get_docstring(node) or "" for node in nodes]
    return "\n".join([*docstrings, *(one.lstrip("# ") for one in comments)])


def phrases_in(prose: str) -> list[str]:
    """The phrases of `NO_ENGLISH` in a text."""
    return [match[0] for match in re.finditer(rf"\b({'|'.join(NO_ENGLISH)})\b", prose, re.IGNORECASE)]


CAPABILITIES = """
| row | what | state |
|---|---|---|
| A1 | x | owed |
| H10 | `a|b` | claimed |
"""

README = """
Be sure to make haste: `make test`, or see [the design](docs/design.md#one) and [the web](https://a.b/c).
```sh
make RANKS=4 train
cmake everything
python -m ddp_loop devices --all
ddp_loop stop runs/a
```
```python
python -m ddp_loop neither
```
```
ddp_loop/   the package;
            its modules
docs/       this; that
```
"""


def test_the_state_of_each_capability_is_read() -> None:
    assert states_of(CAPABILITIES) == [("A1", "owed"), ("H10", "claimed")]


def test_commands_targets_tree_and_links_are_read() -> None:
    assert commands_in(README) == {"devices", "stop"}
    assert make_targets_in(README) == {"test", "train"}
    assert tree_in(README) == {"ddp_loop/": "the package; its modules", "docs/": "this; that"}
    assert links_in(README) == {"docs/design.md"}


def test_markers_are_found_wherever_pytest_looks_for_them() -> None:
    source = """
pytestmark = [pytest.mark.slow, pytest.mark.covers("A1")]
@pytest.mark.covers("B2", "C3")
def test_one(): ...
@pytest.mark.covers("D4")
class TestTwo: ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.covers("E5"))])
def test_three(x): ...
@pytest.mark.covers("F6")
def helper(): ...
"""
    assert covered_by(source) == {"A1", "B2", "C3", "D4", "E5"}


def test_the_capabilities_are_complete_and_in_order() -> None:
    states = states_of(text_of("docs/capabilities.md"))
    assert [row for row, _ in states] == [f"{part}{k + 1}" for part, n in ROWS.items() for k in range(n)]
    assert {state for _, state in states} <= {"claimed", "owed"}


def test_every_claimed_capability_has_a_test() -> None:
    assert claimed_rows() - set().union(*(covered_by(path.read_text()) for path in TESTS)) == set()


def test_a_marker_names_rows_that_exist() -> None:
    rows = {row for row, _ in states_of(text_of("docs/capabilities.md"))}
    named = {path.relative_to(ROOT).as_posix(): covered_by(path.read_text()) for path in TESTS}
    assert {path: names - rows for path, names in named.items() if names - rows} == {}


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 120


def test_the_readme_installs_what_it_uses_and_has_the_commands_for_results() -> None:
    text = text_of("README.md")
    (extras,) = re.findall(r'pip install -e "\.\[(.*)\]"', text)
    commands = commands_in(text)
    needed = {"digits", "sweep"} | {extra for name, extra in EXTRAS.items() if name in commands}
    known = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert needed <= set(extras.split(",")) <= set(known)
    assert {"best", "export", "verify", "monitor", "plot"} <= commands


@pytest.mark.slow
def test_documented_commands_exist() -> None:
    documented = set().union(*(commands_in(path.read_text()) for path in DOCUMENTS))
    done = run("-m", "ddp_loop", "--help")
    assert done.returncode == 0, done.stderr
    assert documented
    assert documented <= set(re.findall(r"[a-z][\w-]*", done.stdout))


def test_documented_make_targets_exist() -> None:
    documented = make_targets_in(text_of("README.md")) | make_targets_in(text_of("CONTRIBUTING.md"))
    assert documented >= {"train", "test"}
    assert documented <= set(re.findall(r"^([a-z]\w*):", text_of("Makefile"), re.MULTILINE))


def test_the_tree_of_the_readme_is_the_tree() -> None:
    tree = tree_in(text_of("README.md"))
    assert [path for path in tree if not (ROOT / path).is_dir()] == []
    folders = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert {"ddp_loop/", "launch/", "tests/", "examples/", "docs/", "benchmarks/"} <= set(tree) & folders


def test_one_item_of_the_data_has_one_name() -> None:
    word = "observ" + "ation"  # a sample is a sample, in columns, errors and documents too
    paths = [*DOCUMENTS, *TESTS, *(path for path in (ROOT / "ddp_loop").rglob("*") if path.suffix in (".py", ".js"))]
    assert [path.name for path in paths if word in path.read_text().lower() and "uplot" not in path.parts] == []


def test_phrases_that_are_no_english_are_found(tmp_path: Path) -> None:
    source = 'x = 1  # is gone\n# on with\ny = f"Nobody {x}, who leaves"\nnobody = "test_nobody", "nobody"\n'
    (tmp_path / "a.py").write_text(source + "def test_it_is_told(): ...\ndef test_it_is(): ...\ndef told(): ...\n")
    assert phrases_in(prose_of(tmp_path / "a.py")) == ["gone on with", "Nobody", "who leaves", "is told"]
    (tmp_path / "a.sh").write_text("# A job goes on\n# at its checkpoint.\n")
    assert phrases_in(prose_of(tmp_path / "a.sh")) == ["goes on at"]
    (tmp_path / "a.md").write_text("Ranks are told what is behind\nthe fold; a rank gets an error after it.\n")
    assert phrases_in(prose_of(tmp_path / "a.md")) == ["are told", "behind the"]


@pytest.mark.slow
def test_the_prose_is_plain_english() -> None:
    here = Path(__file__).resolve()  # has the phrases
    paths = [path for scope in SCOPES for path in ROOT.glob(scope) if path.is_file() and path.resolve() != here]
    assert len(paths) > len(SCOPES)
    assert [(path.name, phrase) for path in paths for phrase in phrases_in(prose_of(path))] == []


def test_docstrings_comments_and_guides_are_read(tmp_path: Path) -> None:
    source = '"""Module."""\nx = "text"  # one\n# two, those\n# of it\nclass Loop:\n    """Class."""\n'
    source += '    def run(self):\n        """Method."""\n    def _run(self):\n        """Inner."""\n'
    (tmp_path / "a.py").write_text(source)
    assert " ".join(remarks_of(tmp_path / "a.py").split()) == "Module. Class. Method. Inner. one two, those of it"
    assert NOUNLESS.findall(remarks_of(tmp_path / "a.py")) == ["those\nof"]
    (tmp_path / "a.md").write_text("One.\n```sh\nthat of\n```\nTwo.\n")
    assert guide_of(tmp_path / "a.md").split() == ["One.", "Two."]


def test_sentences_name_their_nouns() -> None:
    guides = [guide_of(path) for path in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    texts = [*guides, *(remarks_of(path) for path in (ROOT / "ddp_loop").rglob("*.py"))]
    words = sum(len(text.split()) for text in texts)
    found = [text[max(0, match.start() - 40) : match.end() + 20] for text in texts for match in NOUNLESS.finditer(text)]
    assert words > 90_000
    assert len(found) <= MOST_NOUNLESS * words / 10_000, found


def test_nothing_strays_at_the_root() -> None:
    known = {
        ".dockerignore",
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "Dockerfile",
        "LICENSE",
        "Makefile",
        "README.md",
        "SECURITY.md",
    }
    known |= {"pyproject.toml"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    names = listed.stdout.split() or [path.name for path in ROOT.iterdir() if path.is_file()]  # outside of a checkout
    assert {name for name in names if "/" not in name} - known == {"requirements-dev.txt"}


def test_the_examples_of_the_documents_use_public_names() -> None:
    # Submodules are imported by their own name (`from ddp_loop import datasets`); `dl.x` is a public name.
    used = {name for path in DOCUMENTS for name in re.findall(r"\bdl\.(\w+)", path.read_text())}
    assert used - set(ddp_loop.__all__) == set()


def test_every_link_leads_to_a_file() -> None:
    links = [(path, link) for path in DOCUMENTS for link in links_in(path.read_text())]
    assert [(path.name, link) for path, link in links if not (path.parent / link).exists()] == []


def test_a_page_of_the_reference_has_its_help_beside_it() -> None:
    """In a clone the page has the names alone; `make docs` fills it in."""
    lines = [line for path in DOCUMENTS for line in path.read_text().splitlines() if re.search(r"/\w+\.rst\)", line)]
    assert lines
    assert [line for line in lines if "`help(ddp_loop." not in line] == []


def test_each_property_of_the_comparison_has_an_answer_and_a_test_of_ours() -> None:
    there = {name for path in TESTS for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)}
    rows = re.findall(r"^\| .+ \| [ADE ]+ \| (.+) \| ?(.*) \|$", text_of("docs/comparison_of_tests.md"), re.MULTILINE)
    named = [(here, re.findall(r"\*([^*]+)\*", ours)) for here, ours in rows]
    assert len(named) > 100
    assert [name for _, names in named for name in names if name.replace(" ", "_") not in there] == []
    answers = ("right", "refused", "not supported", "not needed")
    assert [here for here, _ in named if not here.startswith(answers)] == []
    assert [here for here, names in named if not names and not here.startswith("not ")] == []


def test_each_path_of_a_gpu_has_a_test_that_shows_it_or_a_reason() -> None:
    there = {name for path in TESTS for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)}
    _, _, section = text_of("docs/benchmarks/fake_gpu.md").partition("## What each GPU path is shown by\n")
    rows = re.findall(r"^\| (.+) \| (`.+`) \| ?(.*?) ?\| ?(.*?) ?\|$", section.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) > 15
    shown = [name for *_, ours, _ in rows for name in re.findall(r"\*([^*]+)\*", ours)]
    assert [name for name in shown if name.replace(" ", "_") not in there] == []
    assert [path for path, _, ours, real in rows if not ours and not real] == []
    named = {name for _, modules, *_ in rows for name in re.findall(r"`([\w/]+\.py)`", modules)}
    package = {str(path.relative_to(ROOT / "ddp_loop")): path.read_text() for path in (ROOT / "ddp_loop").rglob("*.py")}
    assert named - package.keys() == set()
    assert {name for name, text in package.items() if ON_GPUS.search(text)} - named == set()


def test_the_files_that_a_change_needs_are_there() -> None:
    _, _, section = text_of("docs/design.md").partition("## Where a change goes\n")
    named = re.findall(r"`(\w[\w/]*\.\w+)`", section.partition("\n## ")[0])
    assert len(named) > 7
    assert [name for name in named if not (ROOT / "ddp_loop" / name).is_file()] == []


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert f"## [{version}]" in text_of("CHANGELOG.md")


def test_what_is_installed_for_the_tests_is_pinned() -> None:
    lines = [line for line in text_of("requirements-dev.txt").splitlines() if not line.startswith("#")]
    pinned = {line.partition("==")[0] for line in lines if re.fullmatch(r"[\w-]+(?:\[\w+\])?==[\w.]+", line)}
    assert len(pinned) == len(lines)
    dependencies = tomllib.loads(text_of("pyproject.toml"))["project"]["dependencies"]
    assert {re.split(r"[^\w-]", dependency)[0] for dependency in dependencies} <= pinned
