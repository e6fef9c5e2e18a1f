"""The page that shows runs while they go on: a process of its own that reads run folders."""

from ddp_loop.monitor.server import serve, start_page

__all__ = [
    "serve",
    "start_page",
]
