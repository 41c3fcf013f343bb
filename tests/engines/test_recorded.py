"""Chains of kernels that are recorded once: the results are those of the plain function, for new
numbers and in several streams. Recordings that follow each other are one.
"""

from __future__ import annotations

import torch
from devices import GPU

from bayflower.maths.manyclasses import inverse_of
from bayflower.stacked import recorded as module
from bayflower.stacked.recorded import recorded
from bayflower.stacked.replay import Graphs, Replay


def squares(x, y, factor):
    return x @ y * factor, x.sum()


def test_elsewhere_the_function_is_called():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    for _ in range(3):
        product, total = recorded(squares, (x, y), 2.0)
        assert torch.equal(product, x @ y * 2.0)
        assert torch.equal(total, x.sum())
    assert not module._seen


def waiting(x):
    return x * float(x.sum())  # the host asks for a number, which cannot be recorded


def test_elsewhere_a_sequence_is_its_calls():
    done = []
    replay = Replay(done.append, Graphs(torch.device("cpu")))
    for _ in range(3):
        replay.sequence([3, 3, 1])
    assert done == [3, 3, 1] * 3
    assert replay.whole is None


class TestOnAGpu:
    pytestmark = GPU

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

    def test_a_sequence_that_comes_again_is_started_as_one(self):
        total = torch.zeros(1, device="cuda", dtype=torch.float64)

        def body(size):
            total.mul_(3).add_(size)  # the order tells

        def wanted(sizes, value):
            for size in sizes:
                value = 3 * value + size
            return value

        replay, value = Replay(body, Graphs(total.device)), 0.0
        for sizes in ([5, 5, 2], [5, 5, 2], [5, 5, 2], [2, 5], [2, 5], [5, 5, 2], [2, 2]):
            total.fill_(1.0)
            replay.sequence(sizes)
            assert float(total) == wanted(sizes, 1.0)
            if sizes == replay.last == [2, 5]:
                value += replay.whole is not None
        assert value == 1
        replay.close()
        assert replay.whole is None
        total.fill_(1.0)
        replay.sequence([2, 5])
        assert float(total) == wanted([2, 5], 1.0)

    def test_what_cannot_be_recorded_is_called_and_random_numbers_go_on(self):
        torch.cuda.manual_seed(5)
        want = torch.randn(4, device="cuda")
        for number in range(1, 4):
            x = torch.full((number,), 2.0, device="cuda")
            for _ in range(3):
                assert torch.equal(recorded(waiting, (x,)), x * 2 * number)
            x = torch.full((2,), 1.0, device="cuda")
            assert torch.equal(recorded(squares, (x[None], x[:, None]), number)[1], x.sum())
        assert any(key[0] is waiting for key in module._refused)
        torch.cuda.manual_seed(5)
        assert torch.equal(torch.randn(4, device="cuda"), want)
