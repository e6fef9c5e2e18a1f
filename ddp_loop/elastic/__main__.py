"""The process of a rank: `run` starts it as `python -m ddp_loop.elastic SCRIPT`. See `ddp_loop/elastic/rank.py`."""

import sys

from ddp_loop.elastic.rank import run_as_main

if __name__ == "__main__":
    run_as_main(sys.argv[1:])
