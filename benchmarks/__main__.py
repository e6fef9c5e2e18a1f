"""Run the benchmarks and print a report for docs/benchmarks: `python -m benchmarks [NETWORK ...]`."""

from __future__ import annotations

import argparse
import datetime
import sys

import ddp_loop as dl
from benchmarks.measuring import hardware
from benchmarks.steps import JOBS, measure

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(JOBS)}; by default all")
    names = parser.parse_args().networks or list(JOBS)
    print(f"Command: `{' '.join(['python -m benchmarks', *sys.argv[1:]])}`")
    print(f"Hardware: {hardware()}; {RANKS} gloo ranks of 1 thread.\nDate: {datetime.date.today()}.\n")
    print("| network | what | median | quartiles | ms | pairs | goal |\n|---|---|--:|--:|--:|--:|--:|")
    for name in names:
        for what, ratio in dl.launch(measure, RANKS, name)[0].items():
            goal = f"{JOBS[name].goal:.2f}" if what == "ours / DDP" else ""
            print(
                f"| {name} | {what} | {ratio.median:.3f} | {ratio.lower:.3f} to {ratio.upper:.3f} | "
                f"{ratio.one_ms:.3f} / {ratio.other_ms:.3f} | {ratio.pairs} | {goal} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
