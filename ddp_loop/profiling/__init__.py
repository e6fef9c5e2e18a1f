"""Profiles: where the time of a step goes on each rank, and hints that follow from it."""

from ddp_loop.profiling.clock import BACKWARD, COMMUNICATION, DATA, FOLD, FORWARD, PhaseClock
from ddp_loop.profiling.command import CannotProfile, profile
from ddp_loop.profiling.recording import WARM_UP, StepProfile

__all__ = [
    "BACKWARD",
    "COMMUNICATION",
    "DATA",
    "FOLD",
    "FORWARD",
    "WARM_UP",
    "CannotProfile",
    "PhaseClock",
    "StepProfile",
    "profile",
]
