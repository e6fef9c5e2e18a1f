"""The limits that continuous integration holds: a quick test is quick, and nothing is skipped for an unknown reason.

[Note: Twice] On a shared machine a test can be late through no fault of its own. Its time is divided by the machine's
slowness, which is measured after a test that was late. One that is over the limit in spite of that runs again, and only
if it is over it again does it fail: a slow test is slow each time. What a test found the first time counts; a test that
failed is not run again.
"""

from __future__ import annotations

import re
import time

import pytest
from _pytest.runner import runtestprotocol

from tests.support.tiers import is_quick

SAMPLE_S = 0.3  # of work, to measure how slow the machine is
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


def reason_of(report: pytest.TestReport) -> str | None:
    """Why a test was skipped; None if it was not."""
    if report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return None
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def is_known(reason: str) -> bool:
    """Whether tests may be skipped for this reason."""
    return any(re.match(known, reason) for known in KNOWN_REASONS)


def slowness() -> float:
    """How many times as long as alone on its core this thread now takes for work."""
    began, used = time.perf_counter(), time.thread_time()
    while (spent := time.thread_time() - used) < SAMPLE_S:
        pass
    return max(1.0, (time.perf_counter() - began) / spent)


def seconds_over(reports: list[pytest.TestReport], limit_s: float) -> float | None:
    """How long a passed test would take alone on the machine, if that is over the limit."""
    call = next((report for report in reports if report.when == "call" and report.passed), None)
    if call is None or call.duration <= limit_s:
        return None
    alone_s = call.duration / slowness()
    return alone_s if alone_s > limit_s else None


def hold(reports: list[pytest.TestReport], over: list[float], limit_s: float) -> None:
    """Make the reports those of a failure, if a limit was broken."""
    for report in reports:
        reason = reason_of(report)
        if reason is not None and not is_known(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/support/limits.py does not know: {reason}"
        if len(over) == 2 and report.when == "call":
            report.outcome = "failed"
            took = " and ".join(f"{seconds:.1f} s" for seconds in over)
            report.longrepr = f"a quick test takes {limit_s:g} s at most; this one took {took}: mark it slow"


def run_within_limits(item: pytest.Item, nextitem: pytest.Item | None, limit_s: float) -> None:
    """Run a test as pytest does, and hold it against the limits. See [Note: Twice]."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    over = [] if (seconds := seconds_over(reports, limit_s)) is None or not is_quick(item) else [seconds]
    if over:
        item._initrequest()  # type: ignore[attr-defined]
        again = runtestprotocol(item, log=False, nextitem=nextitem)
        if (seconds := seconds_over(again, limit_s)) is not None:
            over.append(seconds)
    hold(reports, over, limit_s)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
