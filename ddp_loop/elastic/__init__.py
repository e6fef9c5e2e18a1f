"""The launcher: `python -m ddp_loop run SCRIPT` starts a script's ranks on this machine, through torch's own agent."""

from ddp_loop.elastic.command import add_run, run_command

__all__ = ["add_run", "run_command"]
