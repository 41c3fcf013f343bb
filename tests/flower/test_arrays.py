"""Arrays of messages: Flower's own bytes, and headers that say what is not so."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from bayflower.errors import WireError
from bayflower.flower.records import to_array, to_tensors

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "spread": torch.ones(1, 4).expand(3, 4),
    "number": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
    "yes or no": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.float16),
    "wide": torch.linspace(0, 1, 1000, dtype=torch.float64, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_array_has_flowers_own_bytes_and_comes_back(name):
    tensor = TENSORS[name]
    for _ in range(2):  # the second time its header is known
        array = to_array(tensor)
        assert array == Array.from_torch_tensor(tensor.contiguous())
        back = to_tensors(ArrayRecord({"a": array}))["a"]
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        back.fill_(1)  # memory of its own
    assert np.array_equal(array.numpy(), tensor.detach().numpy())


def written(array: np.ndarray, version: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_second_version_of_the_format_is_read(order):
    numbers = np.arange(12.0).reshape(3, 4).copy(order=order)
    array = Array("float64", (3, 4), "numpy.ndarray", written(numbers, (2, 0)))
    assert np.array_equal(to_tensors(ArrayRecord({"a": array}))["a"].numpy(), numbers)


GOOD = written(np.arange(5.0), (1, 0))
CUT = {
    "empty": (b"", "cannot be read"),
    "no magic": (b"x" * 200, "magic string is not correct"),
    "no length": (GOOD[:8], "cannot be read"),
    "half a header": (GOOD[:40], "EOF: reading array header"),
    "fewer numbers": (GOOD[:-8], "announces 40 bytes of numbers, but it has 32"),
    "more numbers": (GOOD + b"1234", "announces 40 bytes of numbers, but it has 44"),
    "third version": (written(np.arange(5.0), (3, 0)), r"version \(3, 0\) of the .npy format"),
    "words": (written(np.array(["a"]), (1, 0)), "it holds <U1, not numbers"),
    "below zero": (GOOD.replace(b"(5,)", b"(-5,)"), "announces"),
    "long header": (GOOD[:8] + b"\xff\xff" + b" " * 70_000, "[Hh]eader"),
}


@pytest.mark.parametrize("kind", CUT)
def test_arrays_that_cannot_be_are_refused(kind):
    data, words = CUT[kind]
    for _ in range(2):  # an error is not remembered as an answer
        with pytest.raises(WireError, match=words):
            to_tensors(ArrayRecord({"a": Array("float64", (5,), "numpy.ndarray", data)}))
