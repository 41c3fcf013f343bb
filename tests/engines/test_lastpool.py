"""Convolutions by cuDNN's grouped ones, with the bias and the pooling after them, on a GPU: slopes
and second slopes against torch's layers in float64.
"""

from __future__ import annotations

import pytest
import torch
from devices import GPU
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bayflower.stacked import routes
from bayflower.stacked.stackable import for_stacks, steps

pytestmark = GPU
EVERY = (0, 1, 2)


@pytest.fixture
def tensor_cores():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("slope", [0.1, 0.0, 1.0])
@pytest.mark.parametrize("shape", [(2, 32, 16, 16, 6), (3, 33, 16, 32, 7)])
@pytest.mark.usefixtures("tensor_cores")
def test_slopes_are_those_of_torchs_layers(shape, slope):
    torch.manual_seed(0)
    clients, samples, channels, outputs, side = shape
    bend = [nn.LeakyReLU(slope) if slope else nn.ReLU()] if slope < 1 else []
    conv = nn.Conv2d(channels, outputs, 3, padding=1)
    layer = for_stacks(nn.Sequential(conv, *bend, nn.MaxPool2d(2)))
    assert [step.slope for step in steps(layer)] == [slope]
    # few bits, so that TF32 is exact and no place of a window is named differently
    x, weight, bias = (
        torch.randint(-8, 9, one, device="cuda").float() / 8
        for one in (
            (clients, samples, channels, side, side),
            (clients, outputs, channels, 3, 3),
            (clients, outputs),
        )
    )
    assert routes.grouped(x[0], outputs, (3, 3), 1)

    def own(weight, bias, x):
        named = {"0.weight": weight, "0.bias": bias}
        return functional_call(layer, named, (x,)).square().sum()

    def plain(weight, bias, x):
        out = functional.max_pool2d(functional.conv2d(x, weight, bias, padding=1), 2)
        return torch.where(out > 0, out, slope * out).square().sum()

    def again(fn):
        return lambda *every: sum(v.square().sum() for v in grad(fn, argnums=EVERY)(*every))

    for one, two, far in ((own, plain, 2e-3), (again(own), again(plain), 5e-3)):
        got = vmap(grad(one, argnums=EVERY))(weight, bias, x)
        for client in range(clients):
            exact = (value[client].double() for value in (weight, bias, x))
            for a, b in zip(got, grad(two, argnums=EVERY)(*exact), strict=True):
                assert float((a[client].double() - b).norm()) <= far * float(b.norm())
