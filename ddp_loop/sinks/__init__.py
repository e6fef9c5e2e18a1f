"""Sinks write a run's reports elsewhere: entries of `Loop(on_row=...)`, created on every rank, called on rank 0.

A sink gets the rows, the evaluations and the values of `Loop.log` and its neighbours; see `Sink`. A resumed run
continues the sink's files: it replaces everything after the checkpoint.
"""

from ddp_loop.sinks.csv_files import csv_sink, read_csv
from ddp_loop.sinks.mlflow_runs import mlflow_sink
from ddp_loop.sinks.protocol import RunStart, Sink
from ddp_loop.sinks.tensorboard import tensorboard_sink
from ddp_loop.sinks.wandb_runs import wandb_sink

__all__ = ["RunStart", "Sink", "csv_sink", "mlflow_sink", "read_csv", "tensorboard_sink", "wandb_sink"]
