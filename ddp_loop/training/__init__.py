"""The loop and its step.

Reading order of a step: `loop` (which step comes next) -> `step` (shards, a backward for each) -> `fold` (one reduction
over the ranks) -> `payload` (what travels beside the gradients) -> `gradients`, `buckets` (where they lie) ->
`ordered_sum` (how they are added) -> `buffers`, `batch_norm/pooled` (what else is merged) -> `nonfinite` (whether the
step counts) -> `recorder` (rows, trace, checkpoints).

Beside the way: `validation` (what is asked of arguments), `structure` (modules and parameters that come and go),
`optimizer_check`, `state_check` (what becomes wrong without an error), `gather` (losses of the whole mini-batch).
"""

from ddp_loop.training.buffers import Buffers, find_buffers
from ddp_loop.training.fold import Fold
from ddp_loop.training.loop import Loop
from ddp_loop.training.ordered_sum import IDENTITY
from ddp_loop.training.payload import StepResult
from ddp_loop.training.step import Step
from ddp_loop.training.validation import Sum, check_synced, refuse_wrapped

__all__ = [
    "IDENTITY",
    "Buffers",
    "Fold",
    "Loop",
    "Step",
    "StepResult",
    "Sum",
    "check_synced",
    "find_buffers",
    "refuse_wrapped",
]
