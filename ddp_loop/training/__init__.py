"""The loop and its step: a shard is the unit of arithmetic, and a fold brings all shards together.

A mini-batch is cut into shards, and each is trained as if it were alone. The fold sums the gradients over shards and
ranks, brings each shard's row of other values to every rank, and merges these rows in the shards' order:

- shard: a part of the mini-batch with a forward and a backward of its own; a rank has one or several
- row: the weight, loss, metrics, statistics and buffers of one shard; a layout says which, and in which columns
- fold: the sum of all shards' gradients, and the merge of their rows; the same on every rank
- pass: one iteration over the shards of a step, and its fold; a step may have several
- bucket: the gradients of neighbouring parameters in one flat tensor, which the ranks sum at once
- plan: which parameters are in which bucket; the gradients of others are summed apart
- piece: a partial sum over some of a rank's shards that the rank sends as it is, for the order of a tree
- extras: the end of the last bucket, with the control word and the rows
- word: a rank's message to all others in a fold; on a GPU a flag, sent earlier, tells the ranks whether to read the
  word in this fold or before the next pass

Reading order of a step: `loop` (which step comes next) -> `step` (shards, a backward for each; the fold, one reduction
over the ranks; the ranks' decisions in it; around it other modules, requests, checks) -> `rows` (the values beside the
gradients, and the step's result) -> `gradients` (added up over a rank's shards), `buckets` (where they lie and how the
ranks sum them) -> `ordered_sum` (in which order) -> `buffers`, `batch_norm/capture`, `batch_norm/pooled` (the other
merged values) -> `checks` (whether the step counts, and checks after it) -> `recorder` (rows, trace, checkpoints).

An asynchronous device changes four things: the word is a sum of its own, and is read late (`step`); the device
decides whether values are finite, or the host a step later (`checks`); buffers of the rule "same" and the state are
looked at a step later, silent writes seldom (`buffers`); batch statistics are not refined (`batch_norm`). Any GPU
changes the sizes of buckets, and the use of spare memory (`buckets`, `gradients`). With NCCL the ranks finish a sum
while backward continues.

Beside the path: `validation` (checks of arguments), `gather` (losses of the whole mini-batch), `parameter_checks`
(gradients of another backward, hooks, parameters outside of the state), `profiled` (a step whose phases are timed).
"""

from ddp_loop.training.buffers import Buffers, find_buffers
from ddp_loop.training.loop import Loop
from ddp_loop.training.rows import StepResult
from ddp_loop.training.step import Epoch, Fold, Step
from ddp_loop.training.validation import Sum, check_batches, check_mean, check_synced, refuse_wrapped

__all__ = [
    "Buffers",
    "Epoch",
    "Fold",
    "Loop",
    "Step",
    "StepResult",
    "Sum",
    "check_batches",
    "check_mean",
    "check_synced",
    "find_buffers",
    "refuse_wrapped",
]
