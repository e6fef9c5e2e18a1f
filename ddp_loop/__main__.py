"""`python -m ddp_loop`: see `ddp_loop/cli.py`."""

import sys

from ddp_loop.cli import main

if __name__ == "__main__":
    sys.exit(main())
