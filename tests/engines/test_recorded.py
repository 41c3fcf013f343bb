"""Chains of kernels that are recorded once: the results are those of the plain function, for new
numbers and in several streams.
"""

from __future__ import annotations

import pytest
import torch

from bayflower.maths.manyclasses import inverse_of
from bayflower.stacked import recorded as module
from bayflower.stacked.recorded import recorded

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def squares(x, y, factor):
    return x @ y * factor, x.sum()


def test_elsewhere_the_function_is_called():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    for _ in range(3):
        product, total = recorded(squares, (x, y), 2.0)
        assert torch.equal(product, x @ y * 2.0)
        assert torch.equal(total, x.sum())
    assert not module._seen


class TestOnAGpu:
    pytestmark = gpu

    def test_new_numbers_and_streams_give_the_plain_results(self):
        make = torch.Generator().manual_seed(0)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        for turn in range(4):
            for stream in streams:
                stream.wait_stream(streams[0])
                with torch.cuda.stream(stream):
                    half = torch.randn(3, 40, 20, generator=make, dtype=torch.float64).cuda()
                    matrix, floor = half @ half.mT, torch.full((3,), 1e-12, device="cuda").double()
                    inverse, rank = recorded(inverse_of, (matrix, floor), 1e-5)
                    want = torch.linalg.pinv(matrix, rtol=1e-5, hermitian=True)
                    assert torch.allclose(inverse, want, rtol=1e-6, atol=1e-9), turn
                    assert rank.tolist() == [20.0] * 3
        assert any(key[0] is inverse_of for key in module._kept)

    def test_the_oldest_makes_room_and_is_not_recorded_again(self):
        for _ in range(3):
            for size in range(2, module.MOST + 4):
                x, y = torch.randn(size, 2, device="cuda"), torch.randn(2, 2, device="cuda")
                assert torch.allclose(recorded(squares, (x, y), 3.0)[0], x @ y * 3.0)
        assert len(module._kept) <= module.MOST
