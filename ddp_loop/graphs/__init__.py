"""A function whose work is recorded once as a CUDA graph, and then done by one launch: `capture`.

Reading order: `captured` (which call is recorded, replayed, or runs eagerly) -> `recorded` (a graph of a loss with its
backward, or of a whole update) -> `state` (what a graph takes for granted, and what an abandoned one must not change).
"""

from ddp_loop.graphs.captured import CapturedFunction, capture

__all__ = ["CapturedFunction", "capture"]
