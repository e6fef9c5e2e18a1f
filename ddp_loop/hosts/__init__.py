"""Hosts: whether the machines of a run can do it, found out before it: `python -m ddp_loop hosts`."""

from ddp_loop.hosts.command import add_hosts

__all__ = ["add_hosts"]
