"""The reasons for which a test may be skipped: in continuous integration any other one is a failure."""

from __future__ import annotations

import re

import pytest

KNOWN_REASONS = (
    "needs a GPU",
    "there is a GPU",
    "needs a browser",
    "needs playwright",
    "needs .*, which is not installed",
    "needs the extra ",
    "needs root, to ",
    "no network namespaces can be made here",
    "root may write everywhere",
    "needs a small disk, which root can mount",
    "needs Linux",
    "the fake GPU needs ",
)


def refuse_unknown_skip(report: pytest.TestReport) -> None:
    """Make the report of a test that was skipped for another reason that of a failure."""
    if report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return
    reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    if not any(re.match(known, reason) for known in KNOWN_REASONS):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/support/skips.py does not know: {reason}"
