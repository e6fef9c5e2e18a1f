"""The recorder of CUDA graphs, on stand-ins for torch.cuda: on which stream it works, and what it undoes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddp_loop.accelerators import Cuda, CudaGraphRecorder

DEVICE = torch.device("cuda", 0)
INVALID = "operation failed due to a previous error during capture"


class Stream:
    """A stream with a name."""

    def __init__(self, cuda: CudaStandIn, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    """A CUDA graph: `reset` is refused where nothing was captured."""

    def __init__(self, cuda: CudaStandIn) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append("replays")

    def reset(self) -> None:
        raise RuntimeError("nothing was captured")


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Generator:
    """A generator that cannot draw while it believes that it is being captured."""

    def __init__(self, state: int = 7) -> None:
        self.state, self.is_stuck = state, False

    def clone_state(self) -> Generator:
        return Generator(self.state)

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        self.state = state

    def graphsafe_set_state(self, other: Generator) -> None:
        self.is_stuck, self.state = other.is_stuck, other.state


class CudaStandIn:
    """What the recorder uses of torch.cuda, and what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = self.usual = Stream(self, "usual")
        self.generator, self.pools = Generator(), 0
        self.ended: list[Any] = []
        self.is_invalid = False  # whether the function makes the capture invalid
        for name in ("current_stream", "stream", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "side"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch, "empty", lambda *size, device: self)
        monkeypatch.setattr(CudaGraphRecorder, "_failed", [])

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def graph(self, graph: Graph, pool: int, stream: Stream, *, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream
        self.generator.is_stuck = True
        self.log.append(f"captures into pool {pool} on {stream.name}")
        try:
            yield
        finally:
            if self.is_invalid:  # torch leaves its stream the current one, and the generator as it is
                raise RuntimeError(INVALID)
            self.generator.is_stuck, self.current = False, before

    def end_allocate(self, device: int, pool: int) -> None:
        if not self.is_invalid:
            raise RuntimeError("not allocating to this pool")
        self.ended.append((device, pool))

    def uniform_(self) -> None:
        if self.generator.is_stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.generator.state += 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaStandIn:
    return CudaStandIn(monkeypatch)


def failing(cuda: CudaStandIn, invalid: bool) -> Callable[[], None]:
    def function() -> None:
        assert cuda.current.name == "side"
        cuda.is_invalid = invalid
        raise ValueError("the first error")

    return function


def test_work_aside_comes_between_what_was_launched_before_and_after(cuda: CudaStandIn) -> None:
    recorder = Cuda(DEVICE).graph_recorder()
    with recorder.aside():
        cuda.log.append(f"works on {cuda.current.name}")
    assert cuda.log == ["side waits for usual", "works on side", "usual waits for side"]
    assert cuda.current is cuda.usual


def test_all_graphs_of_a_recorder_share_its_stream_and_its_pool(cuda: CudaStandIn) -> None:
    recorder = Cuda(DEVICE).graph_recorder()
    for number in range(2):
        found, replay = recorder.record(lambda number=number: number)  # type: ignore[misc]
        replay()
        assert found == number
    assert cuda.log == ["captures into pool 1 on side", "replays"] * 2
    assert (cuda.current, cuda.generator.state, cuda.ended) == (cuda.usual, 7, [])


@pytest.mark.parametrize("invalid", [False, True])
def test_a_failed_capture_leaves_stream_allocator_and_generator_as_they_were(cuda: CudaStandIn, invalid: bool) -> None:
    recorder = Cuda(DEVICE).graph_recorder()
    with pytest.raises(RuntimeError if invalid else ValueError) as caught:
        recorder.record(failing(cuda, invalid))
    first = caught.value.__context__ if invalid else caught.value
    assert str(first) == "the first error"
    assert cuda.current is cuda.usual
    assert cuda.ended == ([(0, 1)] if invalid else [])
    assert (cuda.generator.state, cuda.generator.is_stuck) == (7, False)
    assert len(CudaGraphRecorder._failed) == 1
    cuda.is_invalid = False
    assert recorder.record(lambda: "works")[0] == "works"
    assert cuda.log[-1] == "captures into pool 2 on side"
