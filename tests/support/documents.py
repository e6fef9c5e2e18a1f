"""What the documents say, read."""

from __future__ import annotations

import re
from functools import cache

from tests.support.paths import ROOT


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def states_of(document: str) -> list[tuple[str, str]]:
    """(row, state) of every capability, in order: `| D4 | what | claimed |`."""
    return re.findall(r"^\| *([A-Z]\d+) *\|.+\| *(\w+) *\|$", document, re.MULTILINE)


def claimed_rows() -> set[str]:
    """The capabilities that are claimed."""
    return {row for row, state in states_of(text_of("docs/capabilities.md")) if state == "claimed"}


def fenced_blocks(document: str, language: str | None = None) -> list[str]:
    """The fenced blocks of a document: all, or those marked as one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    return [text for mark, text in blocks if language in (None, mark)]
