"""What a step costs on several machines: counted, measured on a network of this machine's own, and computed.

    python -m benchmarks scaling [PART ...]

"counts": collectives, bytes and rounds of a step, by torchrun's ranks on 2, 3, 4 and 8 hosts, and on 2 with 2 ranks
each. "links": the time of a step on two hosts over links of several delays and rates, beside what `step_model` expects.
"clusters": the model for 8, 64 and 1,024 GPUs, which measures nothing.

A host is a network namespace; packets go through `benchmarks.switch`. Both need root and Linux. What is measured goes
into docs/benchmarks/scaling.json, and all tables into docs/benchmarks/scaling.md, between their marks.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clusters import gradients_table, growth_table, steps_table
from benchmarks.hosts import PORT, NoHosts, run_all, switched, torchrun
from benchmarks.measuring import ms, table_lines
from benchmarks.step_model import (
    GLOO_THREADS,
    Compute,
    Cost,
    Link,
    Sum,
    all_reduce_cost,
    all_reduce_rounds,
    step_s,
)

# -- what is measured --------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
FIGURES, DOCUMENT = ROOT / "docs/benchmarks/scaling.json", ROOT / "docs/benchmarks/scaling.md"
HOSTS = ((2, 1), (3, 1), (4, 1), (8, 1), (2, 2))  # and the ranks of each
REFERENCE = "digit network", 1e-3, 1e9  # the step whose throughput is stated
LIMIT_S = 120.0  # for the ranks of all hosts


def measured(part: str, hosts: int, ranks: int = 1) -> dict[str, Any]:
    """What the ranks of so many hosts print, with `ranks` on each. Raises as `switched` and `run_all`."""
    with switched(hosts) as (names, controls_path, controls):
        controls.count_apart(PORT)
        job = f"--nproc-per-node={ranks}", "-m", "benchmarks.scaling_rank", str(controls_path), part
        printed = run_all(torchrun(names, *job), LIMIT_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def stored() -> dict[str, Any]:
    """The figures of the last measurement."""
    found: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    return found


def store(part: dict[str, Any]) -> None:
    """Replace the figures of a part."""
    FIGURES.write_text(json.dumps({**stored(), **part}, indent=1) + "\n")


def counts_table() -> Iterator[str]:
    """Collectives, bytes and rounds of a step, by hosts."""

    def rows() -> Iterator[tuple[object, ...]]:
        for world, figures in stored()["counts"].items():
            hosts, ranks = map(int, world.split(" x "))
            at_once = GLOO_THREADS if ranks == 1 else 1  # in two levels sums follow one another
            for name, one in figures["jobs"].items():
                expected = (1 + one["pieces"]) * (hosts - 1) / hosts * sum(one["sums"])
                is_gathered = "exchange" in one["operations"]
                turns = [2 * hosts if is_gathered else all_reduce_rounds(size, hosts) for size in one["sums"]]
                in_a_row = step_s(Compute(0, 0), [Sum(n, 1) for n in turns], lambda n: Cost(n, 0), at_once)
                made = ", ".join(f"{one['operations'].count(kind)} {kind}" for kind in dict.fromkeys(one["operations"]))
                sent = f"{one['bytes']:,.0f}", f"{expected:,.0f}", f"{one['bytes'] / expected:.3f}"
                of_rounds = f"{one['rounds']:.1f}", f"{in_a_row:.0f}"
                yield name, made, world, f"{one['gradients']:,}", *sent, *of_rounds

    head = (
        "network | collectives of a step | hosts x ranks | gradients, bytes | sent by a host, bytes | expected | ratio"
    )
    yield from table_lines(f"{head} | latencies in a row | expected", rows(), words=2)


def starting_table() -> Iterator[str]:
    """What joining and the first step take, and the store's traffic."""

    def rows() -> Iterator[tuple[object, ...]]:
        for world, figures in stored()["counts"].items():
            hosts, ranks = map(int, world.split(" x "))
            if ranks > 1:
                continue
            jobs = figures["jobs"]["digit network"]
            store = figures["store"]
            at_rest = f"{store['requests_per_s']:.1f}", f"{store['bytes_per_s']:.0f}"
            yield hosts, figures["sockets"], f"{1e3 * figures['joining_s']:.0f}", jobs["first"], jobs["more"], *at_rest

    head = "hosts | sockets of a rank | joining, ms | operations until the first step has ended | more in an epoch"
    yield from table_lines(f"{head} | requests to the store in a second, each rank | bytes", rows(), words=0)


def predicted_s(job: Mapping[str, Any], link: Link) -> float:
    """The model's seconds of a step of a measured job on two hosts."""
    compute = Compute(job["forward_s"], job["backward_s"], job["rest_s"])
    sums = [Sum(size, ready) for size, ready in job["sums"]]
    return step_s(compute, sums, lambda size: all_reduce_cost(size, 2, link), GLOO_THREADS)


@dataclass(frozen=True)
class Point:
    """A measured step of a job over a link, and the model's."""

    job: str
    samples: int
    delay_s: float
    bits_per_s: float
    step_s: float
    quartiles_s: tuple[float, float]
    steps: int
    model_s: float

    @property
    def error(self) -> float:
        """Of the model, relative to the measured step."""
        return self.model_s / self.step_s - 1


def points() -> Iterator[Point]:
    """The last measurement of the part "links"."""
    figures = stored()["links"]
    own = Link(**figures["link"])
    for name, job in figures["jobs"].items():
        for delay_s, bits_per_s, median, lower, upper, steps in job["points"]:
            link = Link(own.latency_s + delay_s, min(own.bytes_per_s, bits_per_s / 8))
            of_step = median, (lower, upper), steps, predicted_s(job, link)
            yield Point(name, job["samples"], delay_s, bits_per_s, *of_step)


def links_table() -> Iterator[str]:
    """Steps on two hosts over each link, beside the model."""

    def rows() -> Iterator[tuple[object, ...]]:
        for one in points():
            lower, upper = one.quartiles_s
            times = ms(one.step_s), f"{ms(lower)} to {ms(upper)}", ms(one.model_s), f"{round(100 * one.error):+d} %"
            yield one.job, f"{1e3 * one.delay_s:g}", f"{one.bits_per_s / 1e9:g}", *times, one.steps

    errors = sorted(abs(one.error) for one in points())
    near = sum(error <= 0.05 for error in errors)
    median, most = (f"{100 * error:.0f} %" for error in (statistics.median(errors), errors[-1]))
    yield f"{near} of {len(errors)} errors are within 5 %. The median is {median}, the largest {most}."
    for one in points():
        if (one.job, one.delay_s, one.bits_per_s) == REFERENCE:
            rate, expected = one.samples / one.step_s, one.samples / one.model_s
            yield f"The {one.job} at {1e3 * one.delay_s:g} ms and {one.bits_per_s / 1e9:g} Gbit/s trains"
            yield f"{rate:,.0f} samples/s. The model expects {expected:,.0f}, {expected / rate:.3f} of it.\n"
    head = "network | delay, ms | Gbit/s | step, ms | quartiles | model, ms | error | steps"
    yield from table_lines(head, rows())


def own_table() -> Iterator[str]:
    """What the model takes from measurement, at the link without delay and limit."""
    figures = stored()["links"]
    link = figures["link"]

    def rows() -> Iterator[tuple[object, ...]]:
        for name, job in figures["jobs"].items():
            times = (f"{1e3 * job[key]:.4g}" for key in ("forward_s", "backward_s", "rest_s", "unshaped_s"))
            model = predicted_s(job, Link(**link))
            sizes = ", ".join(f"{size:,}" for size, _ in job["sums"])
            yield name, sizes, *times, f"{1e3 * model:.4g}", f"{round(100 * (model / job['unshaped_s'] - 1)):+d} %"

    yield f"One latency: {1e3 * link['latency_s']:.3f} ms; rate: {8e-9 * link['bytes_per_s']:.2f} Gbit/s.\n"
    head = "network | sums, bytes | forward, ms | backward, ms | rest, ms | step without limits, ms | model, ms | error"
    yield from table_lines(head, rows(), words=2)


# -- the report --------------------------------------------------------------------------------------------

Table = Callable[[], Iterator[str]]
PARTS: dict[str, dict[str, Table]] = {
    "counts": {"counts": counts_table, "starting": starting_table},
    "links": {"own": own_table, "links": links_table},
    "clusters": {"gradients": gradients_table, "steps": steps_table, "growth": growth_table},
}


def filled(document: str, name: str, lines: Iterable[str]) -> str:
    """A document with other lines between the marks of a table."""
    begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
    text = "\n".join(lines)
    found, changes = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n\n{end}", document, flags=re.DOTALL
    )
    if changes != 1:
        raise ValueError(f"A document must have the marks of each table once. It has those of {name} {changes} times.")
    return found


def report(names: Iterable[str]) -> None:
    """Measure these parts, by default all; print their tables, and put them into docs/benchmarks/scaling.md."""
    for name in list(names) or PARTS:
        try:
            if name == "counts":
                for hosts, ranks in HOSTS:
                    store({name: stored().get(name, {}) | {f"{hosts} x {ranks}": measured(name, hosts, ranks)}})
            elif name == "links":
                store({name: measured(name, 2)})
        except NoHosts as no:
            print(f"{name} is left out: {no}\n")
            continue
        for mark, lines in PARTS[name].items():
            text = list(lines())
            print("\n".join(text) + "\n", flush=True)
            DOCUMENT.write_text(filled(DOCUMENT.read_text(), mark, text))
