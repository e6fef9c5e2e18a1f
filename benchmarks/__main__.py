"""Run benchmarks and print a report for docs/benchmarks: `python -m benchmarks [TOPIC [PART ...]]`."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Collection, Iterable

from benchmarks import accuracy, calls, faults, mutants, order, peers, reading, steps, versions, watching
from benchmarks.measuring import RANKS, hardware

TOPICS: dict[str, tuple[Callable[[Iterable[str]], None], Collection[str]]] = {
    "steps": (steps.report, steps.JOBS),
    "calls": (calls.report, ()),
    "order": (order.report, order.PARTS),
    "faults": (faults.report, faults.PARTS),
    "watching": (watching.report, watching.JOBS),
    "reading": (reading.report, reading.PARTS),
    "peers": (peers.report, peers.PARTS),
    "versions": (versions.report, ()),
    "mutants": (mutants.report, ()),
    "accuracy": (accuracy.report, accuracy.SETTINGS),
}
ASKED_FOR = ("versions", "mutants", "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "topic",
        nargs="?",
        choices=TOPICS,
        help=f"by default all but {', '.join(ASKED_FOR)}, which take an hour or more",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="of a topic, by default all; versions takes another checkout's folder first, mutants their numbers",
    )
    arguments = parser.parse_args()
    for topic in [arguments.topic] if arguments.topic else [topic for topic in TOPICS if topic not in ASKED_FOR]:
        report, parts = TOPICS[topic]
        if parts and (unknown := set(arguments.parts) - set(parts)):
            parser.error(f"the parts of {topic} are {', '.join(parts)}; got {', '.join(unknown)}")
        print(f"Command: `{' '.join(['python -m benchmarks', topic, *arguments.parts])}`  ")
        print(f"Hardware: {hardware()}; {RANKS} gloo ranks of 1 thread where nothing else is said.  ")
        print(f"Date: {datetime.date.today()}.\n")
        report(arguments.parts)


if __name__ == "__main__":
    main()
