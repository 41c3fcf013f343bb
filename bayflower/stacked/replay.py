"""A piece of work recorded once and replayed: on a GPU as CUDA graphs, one for each number of
active clients; elsewhere a plain call.

Starting some sixty small kernels from Python takes longer than running them. A graph starts them
all at once. What is recorded works in place on tensors that stay where they are (`Fixed`), so a
replay needs no arguments. The first call with a size is a plain one: it compiles what must be
compiled, and does the work. A sequence of calls that comes again is started as one (`joined.py`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from .joined import Joined, joined, new_graph

log = logging.getLogger("bayflower")
SIDE = 4  # side streams


class Graphs:
    """Whether work is recorded, and the memory that all recordings share: they never run at the
    same time, and keep nothing in it.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.on = wanted and device.type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if self.on else None


class Replay:
    """`body(size)` called many times; `size` decides the shapes of everything inside."""

    def __init__(self, body: Callable[[int], None], graphs: Graphs) -> None:
        self.body, self.graphs = body, graphs
        self.recorded: dict[int, Any] = {}
        self.seen: set[int] = set()
        self.last: list[int] = []  # the sequence before
        self.whole: Joined | None = None  # that sequence, as one

    def sequence(self, sizes: list[int]) -> None:
        """Do the work of these sizes, one after the other."""
        if sizes != self.last:
            self.last, self.whole = sizes, None
        elif self.whole is None and self.graphs.on and all(one in self.recorded for one in sizes):
            self.whole = joined([self.recorded[one] for one in sizes])
        if self.whole is not None:
            self.whole.replay()
            return
        for size in sizes:
            self(size)

    def __call__(self, size: int, times: int = 1) -> None:
        """Do the work of `size` clients `times` times."""
        for _ in range(times):
            if not self.graphs.on:
                self.body(size)
            elif size not in self.seen:
                self.seen.add(size)
                self.body(size)
            elif size in self.recorded or self._record(size):
                self.recorded[size].replay()
            else:
                self.body(size)

    def _record(self, size: int) -> bool:
        """Record a graph, which does no work yet; return False, and say why, if the work cannot be
        recorded.
        """
        graph = new_graph()
        try:
            with recording(graph, self.graphs.pool):
                self.body(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.graphs.on = False
            log.warning(
                "CUDA graphs are off: a training step cannot be recorded (%s); steps run one by "
                "one, which is slower",
                str(error).splitlines()[0],
            )
            return False
        self.recorded[size] = graph
        return True

    def close(self) -> None:
        """Give back what was recorded."""
        self.last, self.whole = [], None
        self.recorded.clear()
        self.seen.clear()


@contextmanager
def recording(graph: Any, pool: Any = None) -> Iterator[None]:
    """Record in a graph what is done, which does no work yet. If that fails, torch would go on as
    if it were recording: its random numbers could not be used again.
    """
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    spare, collecting = random.clone_state(), gc.isenabled()
    try:
        # another thread may wait for the device meanwhile (`fused/disk.py`)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            gc.disable()  # freeing what belongs to the device would spoil the recording
            yield
    except RuntimeError:
        torch.cuda.synchronize()
        random.graphsafe_set_state(spare)
        raise
    finally:
        if collecting:
            gc.enable()


class Streams:
    """Side streams of a GPU: what is done in each runs beside the rest, and all are joined at the
    end. Elsewhere nothing happens.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.number = device, 0
        self.used: list[Any] = []

    def __enter__(self) -> Streams:
        if self.device.type == "cuda":
            self.main = torch.cuda.current_stream(self.device)
            self.begun = self.main.record_event()
        return self

    def next(self) -> AbstractContextManager[Any]:
        """Return the next side stream, to work in; it begins with what was there when the streams
        were entered.
        """
        if self.device.type != "cuda":
            return nullcontext()
        stream = side_stream(self.device, self.number % SIDE)
        self.number += 1
        stream.wait_event(self.begun)
        self.used.append(stream)
        return torch.cuda.stream(stream)

    def __exit__(self, *_: object) -> None:
        for stream in self.used:
            self.main.wait_stream(stream)


@lru_cache(maxsize=64)
def side_stream(device: torch.device, number: int) -> Any:
    """Return a side stream. It is cached, so that its memory pool is reused."""
    return torch.cuda.Stream(device)
