"""The loop and its step.

Reading order of a step: `loop` (which step comes next) -> `step` (shards, a backward for each) -> `fold` (one reduction
over the ranks) -> `control` (what the ranks decide in it) -> `payload`, `slots`, `moments` (what travels beside the
gradients) -> `gradients`, `buckets` (where they lie and how they are summed) -> `ordered_sum` (in which order) ->
`buffers`, `batch_norm/capture`, `batch_norm/pooled` (what else is merged) -> `nonfinite` (whether the step
counts) -> `recorder` (rows, trace, checkpoints).

Beside the path: `job` (what a loop trains, and whether the script replaces or never moves it), `validation` (checks of
arguments), `state_check` (NaN in parameters and state), `gather` (losses of the whole mini-batch).
"""

from ddp_loop.training.buffers import Buffers, find_buffers
from ddp_loop.training.fold import Fold
from ddp_loop.training.loop import Loop
from ddp_loop.training.payload import StepResult
from ddp_loop.training.step import Epoch, Step
from ddp_loop.training.validation import Sum, check_synced, refuse_wrapped

__all__ = [
    "Buffers",
    "Epoch",
    "Fold",
    "Loop",
    "Step",
    "StepResult",
    "Sum",
    "check_synced",
    "find_buffers",
    "refuse_wrapped",
]
