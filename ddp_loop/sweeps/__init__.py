"""Sweeps: many networks, each an ordinary run, chosen, stored and shared out by Optuna."""

from ddp_loop.sweeps.command import add_sweep
from ddp_loop.sweeps.folders import stop_sweep
from ddp_loop.sweeps.results import TrialResult, sweep

__all__ = [
    "TrialResult",
    "add_sweep",
    "stop_sweep",
    "sweep",
]
