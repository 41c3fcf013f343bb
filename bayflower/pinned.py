"""Buffers of pinned memory through which numbers are copied to a GPU asynchronously.

Asking PyTorch for pinned memory costs more than such a copy. So buffers are kept by size and used
again once the copy out of them has finished, which a CUDA event says. If it has not, another buffer
is made: there are as many as copies are under way at one time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SMALLEST = 12  # buffers have 2^12 bytes or more
LARGEST = 2**24  # bytes; what is larger gets memory of its own


class Buffers:
    """The pinned buffers of one device. `make` returns one of so many bytes; `event` something that
    can be recorded after a copy, and asked whether that has finished.
    """

    def __init__(self, make: Callable[[int], Tensor], event: Callable[[], Any]) -> None:
        self.make, self.event = make, event
        # by size: buffers and the events of their last copies, the oldest first
        self.known: dict[int, deque[tuple[Tensor, Any]]] = {}

    def send(self, values: Tensor, device: torch.device, stream: Any) -> Tensor:
        """Return a tensor of the CPU on the device; the copy is queued on `stream`, its current
        one.
        """
        number = values.numel() * values.element_size()
        size = 1 << max((number - 1).bit_length(), SMALLEST)
        known = self.known.setdefault(size, deque())
        buffer, event = self.free(known) or (self.make(size), self.event())
        there = buffer[:number].view(values.dtype).view(values.shape).copy_(values.detach())
        found = there.to(device, non_blocking=True)
        event.record(stream)
        known.append((buffer, event))
        return found

    @staticmethod
    def free(known: deque[tuple[Tensor, Any]]) -> tuple[Tensor, Any] | None:
        """Take the oldest buffer if its copy has finished. Threads may do this at one time: each
        has its buffer for itself until its copy is queued.
        """
        try:
            oldest = known.popleft()
        except IndexError:
            return None
        if oldest[1].query():
            return oldest
        known.appendleft(oldest)
        return None


_buffers: dict[torch.device, Buffers] = {}


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a GPU, copied asynchronously."""
    number = values.numel() * values.element_size()
    recorded = torch.cuda.is_current_stream_capturing()  # then an event must not be asked
    if not 0 < number <= LARGEST or recorded or values.device.type != "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    if device not in _buffers:
        _buffers[device] = Buffers(pinned, torch.cuda.Event)
    return _buffers[device].send(values, device, torch.cuda.current_stream(device))


def pinned(size: int) -> Tensor:
    """Return so many bytes of pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
