"""The monitor: a page with the curves of runs, served by a process of its own that reads their folders."""

from ddp_loop.monitor.server import serve, start_page

__all__ = [
    "serve",
    "start_page",
]
