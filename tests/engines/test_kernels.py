"""The GPU kernels of stacks against torch's own layers in float64, client by client: convolutions
with and without pooling, the way that each takes, dropout's bits, LSTMs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from devices import GPU
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bayflower.data import batches
from bayflower.stacked import chance, lstm, randomly, routes
from bayflower.stacked.stackable import for_stacks

lstmwholekernels = pytest.importorskip("bayflower.stacked.lstmwholekernels")

pytestmark = GPU
CLIENTS, SAMPLES = 3, 40


@pytest.fixture(autouse=True)
def tensor_cores():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def net(channels: int, outputs: int, size: int, pad: int, stride: int = 1) -> nn.Module:
    """A smooth network: what is near a kink may fall on either side of it."""
    side = (12 + 2 * pad - size) // stride + 1
    return nn.Sequential(
        nn.Conv2d(channels, outputs, size, stride=stride, padding=pad),
        *(nn.Tanh(), nn.Flatten(), nn.Linear(outputs * side * side, 5)),
    )


def pooled(channels: int, outputs: int, size: int, pad: int) -> nn.Module:
    side = (12 + 2 * pad - size + 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels, outputs, size, padding=pad),
        *(nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(outputs * side * side, 5),
    )


# channels, outputs, window, padding, stride; the way it takes in TF32
CASES = {
    "direct, large window": (net(1, 32, 5, 0), 1, "direct"),
    "direct, inner layer": (net(32, 64, 5, 0), 32, "direct"),
    "direct, padded": (net(3, 64, 3, 1), 3, "direct"),
    "direct, strided": (net(8, 64, 3, 1, 2), 8, "direct"),
    "direct, odd numbers": (net(5, 67, 3, 0), 5, "direct"),
    "patches, few weights": (net(3, 32, 3, 0), 3, "patches"),
    "patches, wide": (net(256, 256, 3, 1), 256, "patches"),
    "grouped": (net(64, 64, 3, 1), 64, "grouped"),
    "grouped, strided": (net(64, 128, 3, 1, 2), 64, "grouped"),
}


def way(layer: nn.Conv2d, x: torch.Tensor) -> str:
    size, pad = tuple(layer.kernel_size), int(layer.padding[0])
    if routes.grouped(x, layer.out_channels, size, pad):
        return "grouped"
    return "direct" if routes.direct(x, layer.out_channels, size) else "patches"


def loss(module):
    def one(params, x, y):
        return functional.cross_entropy(functional_call(module, params, (x,)).float(), y)

    return one


def meta(module):
    def one(params, x, y):
        slopes = grad(loss(module))(params, x, y)
        moved = {name: value - 0.1 * slopes[name] for name, value in params.items()}
        return loss(module)(moved, x.flip(0), y.flip(0))

    return one


@pytest.mark.parametrize("low", [False, True], ids=["tf32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_layers_of_stacks_have_torchs_numbers_to_the_precision_of_their_products(name, low):
    module, channels, wanted = CASES[name]
    torch.manual_seed(0)
    module = copy.deepcopy(module).cuda().train()
    params = {
        name: torch.stack([value.detach() + 0.05 * torch.randn_like(value)] * CLIENTS)
        for name, value in module.named_parameters()
    }
    x = torch.randn(CLIENTS, SAMPLES, channels, 12, 12, device="cuda")
    y = torch.randint(0, 5, (CLIENTS, SAMPLES), device="cuda")
    if not low:
        assert way(module[0], x[0]) == wanted
    exact = {name: value.double() for name, value in params.items()}
    for make in (loss, lambda m: grad(loss(m)), lambda m: grad(loss(m), argnums=1)) + (
        () if low else (lambda m: grad(meta(m)),)
    ):
        plain = copy.deepcopy(module).double()
        want = vmap(make(plain))(exact, x.double(), y)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            got, torchs = (vmap(make(m))(params, x, y) for m in (for_stacks(module), module))
        every = map(torch.utils._pytree.tree_leaves, (got, torchs, want))
        for a, b, exactly in zip(*every, strict=True):
            assert a.shape == exactly.shape
            # as far from the truth as torch's own layers with these products, and hardly more
            far, usual = (a - exactly).norm(), (b - exactly).norm()
            assert far <= 2 * usual + (0.02 if low else 0.004) * exactly.norm()


@pytest.mark.parametrize("low", [False, True], ids=["tf32", "bf16"])
@pytest.mark.parametrize(
    ("channels", "outputs", "size", "pad"), [(1, 32, 5, 0), (3, 64, 3, 1), (64, 64, 3, 1)]
)
def test_convolutions_that_pool_pick_the_same_elements_but_for_ties(
    channels, outputs, size, pad, low
):
    module = pooled(channels, outputs, size, pad).cuda().train()
    params = {n: torch.stack([p.detach()] * CLIENTS) for n, p in module.named_parameters()}
    x = torch.randn(CLIENTS, SAMPLES, channels, 12, 12, device="cuda")
    y = torch.randint(0, 5, (CLIENTS, SAMPLES), device="cuda")
    exact = {name: value.double() for name, value in params.items()}
    want = vmap(grad(loss(copy.deepcopy(module).double())))(exact, x.double(), y)
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        got = vmap(grad(loss(for_stacks(module))))(params, x, y)
    for name, value in want.items():
        assert (got[name] - value).norm() <= (0.25 if low else 0.1) * value.norm()


@pytest.mark.parametrize("shape", [(7,), (5, 9), (4, 3, 6), (3, 4, 5, 6)])
def test_dropout_on_the_device_has_the_bits_of_a_cpu(shape):
    keys = torch.tensor([5, -77, 2**62])
    x = torch.randn(3, *shape)

    def one(key, x):
        with chance.step(key), chance.one_pass():
            return randomly.dropped(x, 0.3) + randomly.dropped(x, 0.9)

    want = vmap(one)(keys, x)
    got = vmap(one)(keys.cuda(), x.cuda())
    assert torch.equal(got.cpu(), want)
    alone = one(-77, x[1].cuda())
    assert torch.equal(alone.cpu(), want[1])
    slope = vmap(grad(lambda x, key: one(key, x).sum()))(x.cuda(), keys.cuda())
    assert torch.equal(slope.cpu(), vmap(grad(lambda x, key: one(key, x).sum()))(x, keys))


# the last two: more programs than the device has room for at once; wider than one kernel takes
LAYERS = [(3, 1, 40, 6), (3, 4, 256, 80), (2, 8, 8, 1), (3, 9, 64, 5), (3, 33, 100, 6)]
LAYERS += [(40, 4, 256, 7), (2, 4, 300, 5)]


@pytest.mark.parametrize(("clients", "batch", "wide", "times"), LAYERS)
@pytest.mark.parametrize("kind", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("way", ["one kernel", "one a time"])
def test_lstms_have_the_numbers_of_the_plain_formula(
    clients, batch, wide, times, kind, way, monkeypatch
):
    torch.backends.cuda.matmul.allow_tf32 = kind != "float32"
    if way == "one a time":
        monkeypatch.setattr(lstmwholekernels, "COOPERATIVE", False)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    inputs = (
        torch.randn(clients, times, batch, 4 * wide, device="cuda", dtype=dtype),
        torch.randn(clients, 4 * wide, wide, device="cuda", dtype=dtype) / wide**0.5,
        *(torch.randn(clients, batch, wide, device="cuda", dtype=dtype) for _ in range(2)),
    )
    taken = lstmwholekernels.shape_of(inputs[2])
    assert (taken is not None) == (way == "one kernel" and wide <= lstmwholekernels.WIDEST)

    def total(layer):
        def one(given, on, h, c):
            hs, last = layer(given, on, h, c)[:2]
            return (hs * torch.arange(times, device="cuda")[:, None, None]).sum() + last.sum()

        return grad(one, argnums=(0, 1, 2, 3))

    want = vmap(total(lstm.plain))(*(value.double() for value in inputs))
    near = {"float32": 1e-5, "tf32": 5e-3, "bfloat16": 5e-2}[kind]
    for _ in range(3):  # a race between programs would not show every time
        got = vmap(total(lstm.Lstm.apply))(*inputs)
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= near * b.norm()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 700)])
def test_noise_is_that_of_a_cpu(shape):
    keys, step = torch.tensor([5, 2**61 + 3, 0, 77]), torch.tensor(9)
    want = batches.normal(keys, step, shape)
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        got = batches.normal(keys.cuda(), step.cuda(), shape, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got.cpu().double(), want, rtol=near, atol=near)
