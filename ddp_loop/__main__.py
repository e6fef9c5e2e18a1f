"""The command line: `python -m ddp_loop devices`."""

from __future__ import annotations

import argparse
import sys

from ddp_loop.devices import describe_devices


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddp_loop", description="Custom data-parallel training loops.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("devices", help="what this machine has for ranks")
    parser.parse_args(arguments)
    print(describe_devices())
    return 0


if __name__ == "__main__":
    sys.exit(main())
