"""How long the page of many or long runs takes in headless Chromium, 1400 x 900.

    python -m benchmarks page [PART ...]

"long" has 20 runs of 50 metrics and 100,000 rows each (3 GB in a temporary folder, several minutes), "many" 1,000 runs
of 50 rows. The monitor is a process of its own. Times are those until the page has changed; the processor time is the
monitor's since its start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measuring import print_table

if TYPE_CHECKING:
    from playwright.sync_api import Page

WINDOW = (1400, 900)
MOST_S = 600.0  # for anything


@dataclass(frozen=True)
class Lab:
    """How many runs there are, and how many rows and metrics each one has."""

    runs: int
    rows: int
    metrics: int


PARTS = {"long": Lab(20, 100_000, 50), "many": Lab(1000, 50, 3)}


def write_runs(top: Path, lab: Lab) -> None:
    """Write ended runs whose losses differ; the other metrics are the same in all of them."""
    generator, steps = np.random.default_rng(0), np.arange(1, lab.rows + 1)
    falling = np.exp(-3 * steps / lab.rows) + 0.05 * generator.normal(size=lab.rows)
    names = ["accuracy", *(f"group_{number % 7}/metric_{number}" for number in range(lab.metrics - 2))]
    form = "".join(f'"{name}": %.6g, ' for name in names)
    others = [form % tuple(row) for row in np.outer(falling, np.arange(1, len(names) + 1)).tolist()]
    each = max(1, lab.rows // 20)  # steps of an epoch
    for number in range(lab.runs):
        folder = top / f"run-{number:04}"
        folder.mkdir(parents=True)
        losses = (falling * (1 + number / lab.runs) + 0.3).tolist()
        with (folder / "rows.jsonl").open("w") as file:
            file.writelines(
                f'{{"epoch": {(step - 1) // each + 1}, "iteration": {step}, "samples": 128, "loss": {loss:.6g}, {more}'
                f'"elapsed_s": {step / 20:.4f}}}\n'
                for step, (loss, more) in enumerate(zip(losses, others, strict=True), 1)
            )
        about = {"began": 1.7e9 + 3600 * number, "config": {"rate": round(0.1 / (number + 1), 5), "seed": number}}
        (folder / "run.json").write_text(json.dumps(about))
        status = {"status": "done", "iteration": lab.rows, "steps_per_epoch": each, "epochs": 20, "ranks": 2}
        (folder / "status.json").write_text(json.dumps(status))


@contextmanager
def monitored(top: Path) -> Iterator[tuple[str, int]]:
    """The address of a monitor of this folder, and its process."""
    command = [sys.executable, "-m", "ddp_loop", "monitor", str(top)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line))), process.pid
        finally:
            process.terminate()


@contextmanager
def visited(link: str, complaints: list[str]) -> Iterator[Page]:
    """The page in Chromium; what it complains of is added to `complaints`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WINDOW[0], "height": WINDOW[1]})
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(link)
        yield page
        browser.close()


def waited(holds: Callable[[], Any], since: float | None = None) -> float:
    """The seconds until something holds.

    Raises:
        TimeoutError: it does not within MOST_S.
    """
    began = time.monotonic() if since is None else since
    while not holds():
        if time.monotonic() - began > MOST_S:
            raise TimeoutError(f"The page did not change within {MOST_S:g} s.")
        time.sleep(0.01)
    return time.monotonic() - began


def ends(page: Page) -> list[float]:
    """Where each line of the loss ends, in the units of the axis."""
    said = page.evaluate("document.querySelector('.chart[data-metric=loss]')?.dataset.last ?? '[]'")
    return [point[0] for point in json.loads(said) if point]


# A move of the mouse over a chart and a whole picture, and a keystroke in the search: medians, in ms.
MOVE = """() => new Promise((done) => {
    const over = document.querySelector(".u-over");
    const box = over.getBoundingClientRect();
    const took = [];
    const move = () => {
        const began = performance.now();
        const where = { clientX: box.left + 5 * took.length, clientY: box.top + 50, bubbles: true };
        over.dispatchEvent(new MouseEvent("mousemove", where));
        document.getElementById("marks").click();
        requestAnimationFrame(() => {
            took.push(performance.now() - began);
            if (took.length < 60) move(); else done(took.sort((one, other) => one - other)[30]);
        });
    };
    move();
})"""
KEYSTROKE = """(text) => [...text].map((_, at) => {
    const search = document.getElementById("search");
    search.value = text.slice(0, at + 1);
    const began = performance.now();
    search.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.offsetHeight;
    return performance.now() - began;
}).sort((one, other) => one - other)[Math.floor(text.length / 2)]"""


def measure_long(lab: Lab, page: Page, began: float) -> Iterator[tuple[str, str]]:
    """The rows of the report about long runs."""
    yield "first curve", f"{waited(lambda: ends(page), began):.1f} s"
    box = page.locator(".chart[data-metric=loss]").bounding_box()
    assert box is not None
    yield (
        "the first chart's upper and lower edge",
        f"{box['y']:.0f} to {box['y'] + box['height']:.0f} px of {WINDOW[1]}",
    )
    yield "the 10 runs drawn at first, whole", f"{waited(lambda: ends(page) == [lab.rows] * 10, began):.1f} s"
    page.get_by_role("button", name="Show only these").click()
    yield "the other 10, after a click", f"{waited(lambda: ends(page) == [lab.rows] * lab.runs):.1f} s"
    for axis, last in (("epoch", 20.0), ("time", lab.rows / 20), ("step", lab.rows)):
        page.get_by_label("Axis").select_option(axis)
        whole = [last] * lab.runs
        yield f"the axis shows {axis}", f"{waited(lambda whole=whole: ends(page) == whole):.1f} s"  # type: ignore[misc]
    page.get_by_label("Smoothing").select_option("1000")
    yield "smoothing over 1,000 steps", f"{waited(lambda: len(ends(page)) == 2 * lab.runs):.1f} s"
    yield "a move of the mouse and a picture", f"{page.evaluate(MOVE):.0f} ms"
    page.locator(".line[data-run='run-0003']").hover()
    page.locator(".line[data-run='run-0003'] .hide").click()
    yield "a run is hidden", f"{waited(lambda: len(ends(page)) == 2 * lab.runs - 2):.2f} s"
    page.locator(".chart[data-metric=loss]").hover()
    now = time.monotonic()
    with page.expect_download(timeout=1000 * MOST_S) as download:
        page.locator(".chart[data-metric=loss] .csv").click()
    size = os.path.getsize(download.value.path())
    yield f"CSV of all rows of the loss, {size / 1e6:.0f} MB", f"{time.monotonic() - now:.1f} s"


def measure_many(lab: Lab, page: Page, began: float) -> Iterator[tuple[str, str]]:
    """The rows of the report about many runs."""
    lines = page.locator(".lines .line")
    yield "first curve", f"{waited(lambda: ends(page), began):.1f} s"
    yield f"{lab.runs:,} runs in the list", f"{waited(lambda: lines.count() == lab.runs, began):.1f} s"
    yield "a keystroke in the search", f"{page.evaluate(KEYSTROKE, 'rate<0.0002 seed>900'):.0f} ms"
    page.get_by_label("Search runs").fill("rate<0.0002 seed>900")
    yield "99 of them found", f"{waited(lambda: page.locator('.lines .line:visible').count() == 99):.2f} s"
    page.get_by_label("Search runs").fill("")
    yield "all again", f"{waited(lambda: page.locator('.lines .line:visible').count() == lab.runs):.2f} s"
    page.get_by_role("tab", name="Results").click()
    yield "the table of results", f"{waited(lambda: page.locator('.trials tbody tr').count() == lab.runs):.1f} s"


def rows(part: str) -> Iterator[tuple[str, ...]]:
    """The rows of the report's table."""
    lab, complaints = PARTS[part], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), lab)
        with monitored(Path(folder)) as (link, process):
            began = time.monotonic()
            with visited(link, complaints) as page:
                for what, found in (measure_long if part == "long" else measure_many)(lab, page, began):
                    yield part, what, found
            yield part, "the monitor's processor time and memory", _used(process)
    yield part, "errors and warnings in the browser", str(len(complaints))


def _used(process: int) -> str:
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return f"{sum(map(int, ticks)) / os.sysconf('SC_CLK_TCK'):.0f} s, {int(memory[1]) // 1024 if memory else 0:,} MiB"


def report(parts: Sequence[str]) -> None:
    """Print the table."""
    print_table("runs | what | result", (row for part in parts or PARTS for row in rows(part)), words=2)
