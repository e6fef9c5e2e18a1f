"""Sinks write what a run reports elsewhere: entries of `Loop(on_row=...)`, created on every rank, called on rank 0.

A sink gets the rows, the evaluations and what `Loop.log` and its neighbours log; see `Sink`. A resumed run continues
what the sink wrote: what came after the checkpoint is replaced.
"""

from ddp_loop.sinks.csv_files import csv_sink, read_csv
from ddp_loop.sinks.mlflow_runs import mlflow_sink
from ddp_loop.sinks.protocol import RunStart, Sink
from ddp_loop.sinks.tensorboard import tensorboard_sink
from ddp_loop.sinks.wandb_runs import wandb_sink

__all__ = ["RunStart", "Sink", "csv_sink", "mlflow_sink", "read_csv", "tensorboard_sink", "wandb_sink"]
