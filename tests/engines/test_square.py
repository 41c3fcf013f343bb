"""Convolutions of few channels that pool: the kernels that read each pixel once, against torch's
layers in float64 on a GPU, and the choice of their blocks.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from devices import GPU
from torch import Tensor
from torch.nn import functional

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton", allow_module_level=True)

from bayflower.stacked import convsquarekernels as square

# clients, samples, channels, rows, columns, outputs, window, padding
CASES = {
    "digits": (3, 10, 1, 28, 28, 32, (5, 5), 0),
    "colours": (2, 9, 3, 32, 32, 64, (3, 3), 1),
    "odd sides": (3, 7, 2, 13, 11, 20, (3, 3), 1),
    "odd without padding": (2, 3, 3, 9, 12, 67, (3, 3), 0),
    "oblong": (1, 3, 2, 10, 13, 7, (3, 2), 1),
    "a full square": (2, 5, 4, 9, 8, 17, (3, 3), 1),
}
SLOPE = 0.1


def test_they_are_for_small_squares_and_stride_1():
    assert square.fits(3, (3, 3), 1)
    assert square.fits(1, (5, 5), 1)
    assert square.fits(4, (3, 3), 1)
    assert not square.fits(3, (3, 3), 2)
    assert not square.fits(5, (3, 3), 1)
    assert not square.fits(3, (5, 5), 1)


def test_every_case_fits_and_its_square_is_a_block():
    for _, _, channels, _, _, _, size, _ in CASES.values():
        assert square.fits(channels, size, 1)
        assert square.pixels_of(channels, size) >= channels * (size[0] + 1) * (size[1] + 1)
        assert square.pitch(size[1]) in (2, 4, 8)


@pytest.mark.parametrize("clients", [1, 5, 50])
@pytest.mark.parametrize("outputs", [7, 32, 64, 100])
def test_blocks_cover_the_outputs_and_leave_programs_for_the_device(clients, outputs):
    for total in (100, 1440, 16384):
        block = square.square_ahead(clients, outputs, total, False)
        wide = -(-outputs // block.outputs)
        assert block.outputs in (16, 32, 64)
        assert wide * block.outputs >= outputs
        programs = clients * wide * -(-total // (block.windows * block.turns))
        assert block.turns == 1 or programs >= square.BLOCKS
        block, splits = square.square_weights(clients, outputs, total, False)
        assert splits == 1 or total // splits >= block.windows


@pytest.mark.parametrize("last", [False, True], ids=["rows", "last"])
@pytest.mark.parametrize("kind", ["tf32x3", "tf32", "bf16", "low"])
@pytest.mark.parametrize("name", CASES)
class TestKernels:
    pytestmark = GPU

    def numbers(self, name: str, kind: str) -> tuple[list[Tensor], list[Tensor], int]:
        torch.manual_seed(0)
        clients, samples, channels, rows, columns, outputs, size, pad = CASES[name]
        x = torch.randn(clients, samples, channels, rows, columns, device="cuda")
        weight = torch.randn(clients, outputs, channels, *size, device="cuda") / 3
        bias = torch.randn(clients, outputs, device="cuda")
        here = [part.bfloat16() if kind == "bf16" else part for part in (x, weight, bias)]
        return here, [part.double().requires_grad_() for part in here], pad

    def near(self, found: Tensor, exact: Tensor, kind: str) -> bool:
        most = {"tf32x3": 1e-5, "tf32": 2e-3}.get(kind, 0.02)
        return found.shape == exact.shape and bool((found - exact).norm() <= most * exact.norm())

    def whole(self, parts: list[Tensor], pad: int) -> Tensor:
        every = zip(*parts, strict=True)
        return torch.stack([functional.conv2d(x, w, b, 1, pad) for x, w, b in every])

    def how(self, kind: str) -> tuple[bool, str]:
        return kind == "low", kind if kind.startswith("tf32") else "tf32"

    @pytest.mark.parametrize("turns", [1, 3])
    def test_what_is_pooled_is_that_of_the_layers(self, name, kind, last, turns):
        (x, weight, bias), exact, pad = self.numbers(name, kind)
        whole = self.whole(exact, pad).detach()
        out = functional.max_pool2d(whole.flatten(0, 1), 2).unflatten(0, whole.shape[:2])
        out = functional.leaky_relu(out, SLOPE)
        block = square.Square(square.power(weight.shape[1]), 64, turns=turns)
        how = (1, pad, SLOPE, last, block, *self.how(kind))
        found, index = square.pooled(x, weight, bias, *how)
        assert self.near(found, out, kind)
        assert index.shape == found.shape
        assert index.stride() == found.stride()
        assert found.dtype == (torch.bfloat16 if kind in ("bf16", "low") else torch.float32)
        # the place that is named has the largest number of its window, but for the rounding
        places = [whole[..., t // 2 :: 2, t % 2 :: 2] for t in range(4)]
        table = torch.stack([place[..., : out.shape[3], : out.shape[4]] for place in places])
        named = table.gather(0, (index.long() % 4)[None])[0]
        assert self.near(functional.leaky_relu(named, SLOPE), out, kind)
        assert ((index < 4) == (found > 0)).all()
        assert torch.equal(found, square.pooled(x, weight, bias, *how)[0])

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("slope", [0.0, SLOPE])
    def test_gradients_are_those_of_autograd(self, name, kind, last, splits, slope):
        (x, weight, bias), exact, pad = self.numbers(name, kind)
        low, precision = self.how(kind)
        whole = self.whole(exact, pad)
        block = square.Square(square.power(weight.shape[1]), 64)
        how = (1, pad, slope, last, block, low, precision)
        found, index = square.pooled(x, weight, bias, *how)
        g = torch.randn_like(found)
        # autograd of the places that were taken: near a tie either is right
        places = [whole[..., t // 2 :: 2, t % 2 :: 2] for t in range(4)]
        table = torch.stack([place[..., : g.shape[3], : g.shape[4]] for place in places])
        named = table.gather(0, (index.long() % 4)[None])[0]
        named = torch.where(index < 4, named, slope * named)
        to_weight, to_bias = torch.autograd.grad(named, exact[1:], g.double())
        size = tuple(weight.shape[-2:])
        for with_bias in (True, False):
            how = (1, pad, slope, with_bias, block, splits, low, precision)
            got = square.pooled_weights(x, g, index, size, *how)
            assert got[0].dtype == x.dtype
            assert self.near(got[0], to_weight, kind)
            assert self.near(got[1], to_bias, kind) if with_bias else got[1].numel() == 0
            again = square.pooled_weights(x, g, index, size, *how)
            assert torch.equal(got[0], again[0])
