"""Convolutions of few clients, whose sums are split over several programs: the rule that splits
them, and the kernels against torch's layers in float64 on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from devices import GPU
from torch import Tensor
from torch.nn import functional

from bayflower.stacked import routes
from bayflower.stacked.routes import Tile

# clients, samples, channels, side, outputs, window, stride, padding
CASES = {
    "one client": (1, 10, 32, 12, 64, 5, 1, 0),
    "odd numbers": (3, 7, 5, 9, 67, 3, 1, 1),
    "strided": (2, 5, 8, 13, 20, 3, 2, 1),
    "one channel": (5, 10, 1, 28, 32, 5, 1, 0),
}
SLOPE = 0.1


def test_a_sum_is_split_until_there_are_enough_programs_but_not_into_crumbs():
    for blocks in (1, 10, 100, 263, 264, 1000):
        for length in (25, 96, 800, 5760):
            splits = routes.parts(blocks, 264, length, 96)
            assert splits == 1 or length // splits >= 96
            assert blocks * splits >= 264 or length // (2 * splits) < 96
            assert blocks * splits < 2 * 264 or splits == 1


@pytest.fixture
def tensor_cores():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def conv(x: Tensor, weight: Tensor, bias: Tensor, stride: int, pad: int) -> Tensor:
    every = zip(x, weight, bias, strict=True)
    return torch.stack([functional.conv2d(a, w, b, stride, pad) for a, w, b in every])


def near(found: Tensor, exact: Tensor, low: bool, more: float = 1.0) -> bool:
    far = (found.double() - exact).norm()
    return found.shape == exact.shape and bool(far <= more * (0.02 if low else 2e-3) * exact.norm())


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("low", [False, True], ids=["tf32", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("tensor_cores")
class TestKernels:
    pytestmark = GPU

    def numbers(self, name: str, low: bool) -> tuple[list[Tensor], list[Tensor], int, int]:
        clients, samples, channels, side, outputs, size, stride, pad = CASES[name]
        kind = torch.bfloat16 if low else torch.float32
        x = torch.randn(clients, samples, channels, side, side, device="cuda").to(kind)
        weight = torch.randn(clients, outputs, channels, size, size, device="cuda") / 5
        bias = torch.randn(clients, outputs, device="cuda")
        here = [x, weight.to(kind), bias.to(kind)]
        return here, [part.double().requires_grad_() for part in here], stride, pad

    def test_splitting_changes_nothing_but_the_rounding(self, name, low, splits):
        from bayflower.stacked import convkernels

        (x, weight, bias), exact, stride, pad = self.numbers(name, low)
        out = conv(*exact, stride, pad)
        g = torch.randn_like(out).to(x.dtype)
        to_x, to_weight, to_bias = torch.autograd.grad(out, exact, g.double())
        size = tuple(weight.shape[-2:])
        found = convkernels.forward(x, weight, bias, stride, pad, Tile(64, 64, 32), splits)
        assert near(found, out.detach(), low)
        how = (stride, pad, True, Tile(32, 32, 32), splits)
        got = convkernels.weights_slope(x, g, size, *how)
        assert near(got[0], to_weight, low)
        assert near(got[1], to_bias, low)
        how = (tuple(x.shape), stride, pad, Tile(32, 64, 32), splits)
        assert near(convkernels.input_slope(g, weight, *how), to_x, low)

    def test_pooling_takes_the_parts_or_is_done_at_once(self, name, low, splits):
        from bayflower.stacked import convkernels, convoncekernels, partkernels

        (x, weight, bias), exact, stride, pad = self.numbers(name, low)
        whole = conv(*exact, stride, pad)
        out = functional.max_pool2d(whole.flatten(0, 1), 2).unflatten(0, whole.shape[:2])
        out = functional.leaky_relu(out, SLOPE)
        parts = convkernels.forward_parts(x, weight, bias, stride, pad, Tile(64, 64, 32), splits)
        more = None if parts.shape[1] == 1 else bias
        several = partkernels.pooled(parts, more, x.dtype, SLOPE)
        how = (stride, pad, SLOPE, Tile(32, 128, 32))
        once = convoncekernels.pooled_once(x, weight, bias, *how)
        for found, index in (several, once):
            assert near(found, out.detach(), low)
            assert index.shape == out.shape
        # near a tie either element may be taken, so few of them differ
        assert (several[1] != once[1]).float().mean() < (0.03 if low else 0.005)

    def test_two_runs_give_the_same_bits(self, name, low, splits):
        from bayflower.stacked import convkernels

        (x, weight, bias), _, stride, pad = self.numbers(name, low)
        how = (stride, pad, Tile(64, 64, 32), splits)
        first, again = (convkernels.forward(x, weight, bias, *how) for _ in range(2))
        assert torch.equal(first, again)
