"""Buffers for copies to a GPU are used again, but never before their copy has finished."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bayflower import pinned

CPU = torch.device("cpu")


class Event:
    """The end of a copy, which a test sets."""

    def __init__(self) -> None:
        self.done, self.streams = False, []

    def record(self, stream: Any) -> None:
        """Begin a copy."""
        self.done = False
        self.streams.append(stream)

    def query(self) -> bool:
        """Return whether it has ended."""
        return self.done


class Made:
    """Buffers that count what is made; the "device" shares the CPU's memory, so that a buffer that
    is used too early shows.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.events: list[Event] = []
        self.buffers = pinned.Buffers(self.make, self.event)

    def make(self, size: int) -> torch.Tensor:
        """Return a buffer."""
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def event(self) -> Event:
        """Return an event."""
        self.events.append(Event())
        return self.events[-1]

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return the copy."""
        return self.buffers.send(values, CPU, "stream")


@pytest.mark.parametrize(
    "values",
    [
        np.arange(24).reshape(2, 3, 4).swapaxes(0, 1),
        [1.5, 2.5],
        3,
        [True, False, True],
        np.arange(5000, dtype=np.int32),
    ],
)
def test_values_arrive_as_they_are(values):
    want = torch.as_tensor(values)
    found = Made().send(want)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)


def test_a_buffer_whose_copy_is_under_way_is_left_alone():
    made = Made()
    first = made.send(torch.arange(9))
    second = made.send(torch.arange(9) + 100)
    assert made.sizes == [4096, 4096]
    assert torch.equal(first, torch.arange(9))
    assert torch.equal(second, torch.arange(9) + 100)


def test_a_buffer_whose_copy_has_finished_is_used_again():
    made = Made()
    made.send(torch.arange(9))
    for number in range(5):
        made.events[0].done = True
        assert torch.equal(made.send(torch.ones(number + 1)), torch.ones(number + 1))
        assert not made.events[0].done  # the new copy is waited for, too
    assert made.sizes == [4096]
    assert made.events[0].streams == ["stream"] * 6


def test_larger_values_have_larger_buffers():
    made = Made()
    made.send(torch.arange(9))
    made.events[0].done = True
    made.send(torch.zeros(4096, dtype=torch.uint8))
    made.events[0].done = True
    made.send(torch.zeros(4097, dtype=torch.uint8))
    assert made.sizes == [4096, 8192]
