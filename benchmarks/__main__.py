"""Run benchmarks and print a report for docs/benchmarks.

    python -m benchmarks [TOPIC [--ranks N] [--exchange NAME] [--tests WHICH] [--record FILE] [PART ...]]

Each topic's module has its parts and its options.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass

from benchmarks import (
    accuracy,
    bits,
    calls,
    exchange,
    fake_gpu,
    faults,
    gpu,
    job,
    launching,
    mutants,
    order,
    page,
    payload,
    peers,
    reading,
    scaling,
    shares,
    steps,
    suggest,
    surface,
    sweep,
    versions,
    watching,
)
from benchmarks.measuring import RANKS, exchanges, hardware


@dataclass(frozen=True)
class Topic:
    """Prints its report; its parts, which all run by default; which options it takes; whether it has a heading."""

    report: Callable[..., None]
    parts: Collection[str] = ()
    options: Collection[str] = ()
    has_heading: bool = False


TOPICS = {
    "steps": Topic(steps.report, steps.JOBS, ("ranks", "exchange")),
    "calls": Topic(calls.report),
    "exchange": Topic(exchange.report, exchange.PARTS, ("ranks", "exchange")),
    "order": Topic(order.report, order.PARTS, ("exchange",)),
    "payload": Topic(payload.report, payload.PARTS, ("ranks", "exchange")),
    "faults": Topic(faults.report, faults.PARTS),
    "watching": Topic(watching.report, watching.JOBS),
    "reading": Topic(reading.report, reading.PARTS),
    "scaling": Topic(scaling.report, scaling.PARTS),
    "shares": Topic(shares.report, shares.PARTS, ("exchange",)),
    "surface": Topic(surface.report, surface.PARTS),
    "suggest": Topic(suggest.report, suggest.PARTS),
    "sweep": Topic(sweep.report, sweep.PARTS),
    "peers": Topic(peers.report, peers.PARTS),
    "gpu": Topic(gpu.report, gpu.PARTS, has_heading=True),
    "fake-gpu": Topic(fake_gpu.report, has_heading=True),
    "versions": Topic(versions.report, (), ("ranks", "exchange")),
    "bits": Topic(bits.report),
    "mutants": Topic(mutants.report, (), ("tests", "record")),
    "accuracy": Topic(accuracy.report, accuracy.SETTINGS),
    "job": Topic(job.report, job.WAYS),
    "launching": Topic(launching.report, launching.PARTS),
    "page": Topic(page.report, page.PARTS),
}
ASKED_FOR = (
    "gpu",
    "fake-gpu",
    "versions",
    "bits",
    "mutants",
    "accuracy",
    "scaling",
    "job",
    "suggest",
    "launching",
    "page",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "topic",
        nargs="?",
        choices=TOPICS,
        help=f"by default all but {', '.join(ASKED_FOR)}, which take long, need root or have a file of their own",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="of a topic, by default all; versions takes another checkout's folder first, mutants numbers and rooms",
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2, 3, 4), help="of the topics that have a choice")
    parser.add_argument("--exchange", choices=exchanges(), help="between our ranks; by default join_world's own choice")
    parser.add_argument("--tests", choices=mutants.TESTS, help="how far mutants go; by default to the quick tests")
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="a JSON file for the results of mutants; what it has already does not run again",
    )
    arguments = parser.parse_intermixed_args()
    options = ("ranks", "exchange", "tests", "record")
    given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    for name in [arguments.topic] if arguments.topic else [name for name in TOPICS if name not in ASKED_FOR]:
        topic = TOPICS[name]
        if topic.parts and (unknown := set(arguments.parts) - set(topic.parts)):
            parser.error(f"the parts of {name} are {'; '.join(topic.parts)}. Got {'; '.join(unknown)}.")
        if unknown := given.keys() - topic.options:
            parser.error(f"{name} does not take --{' or --'.join(sorted(unknown))}.")
        if not topic.has_heading:
            print(f"Command: `{shlex.join(['python', '-m', 'benchmarks', name, *words, *arguments.parts])}`  ")
            print(f"Hardware: {hardware()}; {arguments.ranks or RANKS} ranks of 1 thread unless stated otherwise.  ")
            print(f"Date: {datetime.date.today()}.\n")
        topic.report(arguments.parts, **given)


if __name__ == "__main__":
    main()
