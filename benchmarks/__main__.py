"""Run benchmarks and print a report for docs/benchmarks: `python -m benchmarks [TOPIC [PART ...]]`."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Collection, Iterable

from benchmarks import accuracy, faults, order, peers, reading, steps, watching
from benchmarks.measuring import RANKS, hardware

TOPICS: dict[str, tuple[Callable[[Iterable[str]], None], Collection[str]]] = {
    "steps": (steps.report, steps.JOBS),
    "order": (order.report, order.PARTS),
    "faults": (faults.report, faults.PARTS),
    "watching": (watching.report, watching.JOBS),
    "reading": (reading.report, reading.PARTS),
    "peers": (peers.report, peers.PARTS),
    "accuracy": (accuracy.report, accuracy.SETTINGS),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topic", nargs="?", choices=TOPICS, help="by default all but accuracy, which takes an hour")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of a topic, by default all")
    arguments = parser.parse_args()
    for topic in [arguments.topic] if arguments.topic else [topic for topic in TOPICS if topic != "accuracy"]:
        report, parts = TOPICS[topic]
        if unknown := set(arguments.parts) - set(parts):
            parser.error(f"the parts of {topic} are {', '.join(parts)}; got {', '.join(unknown)}")
        print(f"Command: `{' '.join(['python -m benchmarks', topic, *arguments.parts])}`  ")
        print(f"Hardware: {hardware()}; {RANKS} gloo ranks of 1 thread where nothing else is said.  ")
        print(f"Date: {datetime.date.today()}.\n")
        report(arguments.parts)


if __name__ == "__main__":
    main()
