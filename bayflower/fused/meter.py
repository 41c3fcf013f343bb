"""Measurement of a run's time by part, and of the device's utilisation."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..stacked.replay import side_stream

SAMPLE_SECONDS = 1.0  # interval between two samples of the device's utilisation
BESIDE = 100  # number of the side stream that copies results to the CPU


Mark = float | torch.cuda.Event


class Meter:
    """Seconds by name. On a GPU it is the device's time, read at the next synchronisation."""

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
        """Add the time of the enclosed code to `name`."""
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
        """Return the current time; on a GPU an event after all work queued so far."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def beside(self, mark: Mark) -> Iterator[None]:
        """Run the enclosed code after the mark, without waiting for GPU work queued since."""
        if not self.gpu:
            yield
            return
        stream = side_stream(self.device, BESIDE)
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield

    def reach(self, mark: Mark) -> None:
        """Wait until the device has come to a mark."""
        if not isinstance(mark, float):
            mark.synchronize()

    def between(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks; wait for the second if necessary."""
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
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
            # NVML's Python package is not installed
            except (ModuleNotFoundError, RuntimeError):
                self.looked = float("inf")

    def report(self) -> dict[str, Any]:
        """Return seconds by name, peak memory in bytes, and the device's mean utilisation in per
        cent (None if unknown).
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
