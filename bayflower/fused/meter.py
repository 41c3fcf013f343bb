"""Where the time of a run goes, and how much of the device it uses."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..stacked.replay import side_stream

SAMPLE_SECONDS = 1.0  # between two looks at the device's utilisation
BESIDE = 100  # number of the side stream in which results are fetched


Mark = float | torch.cuda.Event


class Meter:
    """Seconds by name; on a GPU the device's own time, read when it is waited for anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu = device, device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self.open: list[tuple[str, Any, Any]] = []
        self.used: list[int] = []
        self.looked = 0.0
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time of what is done inside to `name`."""
        if self.gpu:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self.open.append((name, start, stop))
            self._look()
            return
        begun = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def mark(self) -> Mark:
        """Return this moment; on a GPU the moment when it has done what it was given so far."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def beside(self, mark: Mark) -> Iterator[None]:
        """Let what is done inside wait for the mark alone, not for what a GPU was given since."""
        if not self.gpu:
            yield
            return
        stream = side_stream(self.device, BESIDE)
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield

    def between(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks, waiting for the second if need be."""
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if not self.gpu:
            return
        torch.cuda.synchronize(self.device)
        for name, start, stop in self.open:
            self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(stop) / 1000
        self.open.clear()

    def _look(self) -> None:
        now = time.perf_counter()
        if now - self.looked > SAMPLE_SECONDS:
            self.looked = now
            try:
                self.used.append(int(torch.cuda.utilization(self.device)))
            # nobody to ask: NVML's Python package is not there
            except (ModuleNotFoundError, RuntimeError):
                self.looked = float("inf")

    def report(self) -> dict[str, Any]:
        """Return seconds by name, peak memory in bytes, and the device's mean utilisation in per
        cent (None if it cannot be asked).
        """
        self.wait()
        peak = (
            torch.cuda.max_memory_allocated(self.device)
            if self.gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        used = sum(self.used) / len(self.used) if self.used else None
        return {
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "peak_memory": int(peak),
            "utilisation": used,
        }
