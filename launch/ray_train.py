"""Start the ranks of a script as workers of Ray Train, on the machines of a Ray cluster or on this one.

    python launch/ray_train.py --workers 8 --gpu --restarts 3 train.py --epochs 20 --run-dir /shared/run

Needs `pip install 'ddp_loop[ray]'` and, on each machine, the script and its data at the same paths. A worker is a rank.
When one fails, Ray starts all again, and the script resumes from its run folder, which all machines must see.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from ddp_loop.distributed import leave_open_worlds


def run_script(job: dict[str, Any]) -> None:
    """Run the script in a worker, whose variables Ray has set as torchrun does.

    Args:
        job: `words`, the script and its arguments; `folder`, in which it is started.
    """
    os.chdir(job["folder"])
    sys.argv[:] = job["words"]
    sys.path.insert(0, os.path.dirname(job["words"][0]))
    try:
        runpy.run_path(job["words"][0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):  # 0 is a stop with a checkpoint
            raise RuntimeError(f"{job['words'][0]} ended with exit code {end.code}") from None
    except BaseException as error:
        leave_open_worlds(error)
        raise
    leave_open_worlds(None)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start the ranks of a script as workers of Ray Train.")
    parser.add_argument("--workers", type=int, default=1, help="number of ranks")
    parser.add_argument("--gpu", action="store_true", help="give each rank a GPU")
    parser.add_argument("--restarts", type=int, default=0, help="how often all ranks start again after a failure")
    parser.add_argument("--storage", type=Path, default=Path("ray"), help="folder for Ray's own files")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args()


def main() -> None:
    options = read_arguments()
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise SystemExit(f"ray_train.py needs Ray. {error}. Install it: pip install 'ddp_loop[ray]'.") from None

    words = [os.path.abspath(options.script), *options.arguments]
    trainer = TorchTrainer(
        run_script,
        train_loop_config={"words": words, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            storage_path=str(options.storage.absolute()),
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
