"""Traces of the values in each step, and the comparison of two runs; scripts that run under a request."""

from ddp_loop.tracing.compare import compare_runs
from ddp_loop.tracing.trace import TRACE
from ddp_loop.tracing.tracer import Tracer, TraceRequest, trace_request_of
from ddp_loop.tracing.verification import CannotVerify, VerifyJob, last_output, run_requested, verify

__all__ = [
    "TRACE",
    "CannotVerify",
    "TraceRequest",
    "Tracer",
    "VerifyJob",
    "compare_runs",
    "last_output",
    "run_requested",
    "trace_request_of",
    "verify",
]
