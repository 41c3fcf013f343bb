"""Layers for stacks of networks: torch's own numbers, forward, first and second derivatives, with
and without vmap.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from devices import DEVICES
from torch import nn
from torch.func import functional_call, grad, vmap

from bayflower.maths.optim import Optimizer, OptState
from bayflower.networks.model import masked_mean
from bayflower.networks.papers import cnn
from bayflower.stacked.forms import has
from bayflower.stacked.losses import mean_nll, nll, pull
from bayflower.stacked.stackable import convolve, for_stacks, linear, pool, steps


def nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    strided = nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(5, 4, (1, 3), bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    odd = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d((3, 2)),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(18, 4),
    )
    kept = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 4),
    )
    return {
        "cnn": (cnn((1, 20, 20), 4, features=12), (1, 20, 20)),
        "strided": (strided, (3, 9, 16)),
        "odd": (odd, (1, 13, 15)),
        "kept": (kept, (2, 9, 9)),
    }


def stack_of(net: nn.Module, clients: int, shape: tuple[int, ...], device: str):
    draw = torch.Generator().manual_seed(1)
    params = {
        n: torch.randn(clients, *p.shape, generator=draw, dtype=torch.float64).to(device) * 0.3
        for n, p in net.named_parameters()
    }
    x = torch.randn(clients, 3, *shape, generator=draw, dtype=torch.float64).to(device)
    y = torch.randint(0, 4, (clients, 3), generator=draw).to(device)
    return params, x, y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["cnn", "strided", "odd", "kept"])
def test_values_and_derivatives_are_torchs(name, device):
    net, shape = nets()[name]
    net = net.double().to(device)
    params, x, y = stack_of(net, 4, shape, device)

    def loss(module):
        def one(p, x, y):
            return nn.functional.cross_entropy(functional_call(module, p, (x,)), y)

        return one

    def meta(module):
        """The loss after one gradient step: its gradient has second derivatives in it."""

        def one(p, x, y):
            g = grad(loss(module))(p, x, y)
            return loss(module)({n: v - 0.1 * g[n] for n, v in p.items()}, x.flip(0), y.flip(0))

        return one

    for make in (
        lambda m: loss(m),
        lambda m: grad(loss(m)),
        lambda m: grad(loss(m), argnums=1),
        lambda m: grad(meta(m)),
    ):
        want, got = (vmap(make(module))(params, x, y) for module in (net, for_stacks(net)))
        for a, b in zip(
            torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True
        ):
            assert a.shape == b.shape
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11), (a - b).abs().max()
        alone = make(for_stacks(net))({n: p[1] for n, p in params.items()}, x[1], y[1])
        for a, b in zip(
            torch.utils._pytree.tree_leaves(alone),
            torch.utils._pytree.tree_leaves(want),
            strict=True,
        ):
            assert torch.allclose(a, b[1], rtol=1e-9, atol=1e-11)


def test_shared_weights_and_shared_inputs_need_no_axis():
    net, shape = nets()["cnn"]
    net = for_stacks(net.double())
    params, x, _ = stack_of(net, 3, shape, "cpu")
    one = {n: p[0] for n, p in params.items()}

    def run(p, x):
        return functional_call(net, p, (x,))

    assert torch.allclose(vmap(run, (None, 0))(one, x)[2], run(one, x[2]))
    assert torch.allclose(
        vmap(run, (0, None))(params, x[0])[1], run({n: p[1] for n, p in params.items()}, x[0])
    )


def test_only_layers_of_the_right_kind_are_replaced():
    def changed(name: str, train: bool = False) -> nn.Module:
        return for_stacks(nets()[name][0].train(train))

    def number(name: str, form, train: bool = False) -> int:
        return sum(has(part, form) for part in changed(name, train).modules())

    assert [number("cnn", form) for form in (convolve, pool, linear)] == [2, 2, 0]
    assert number("cnn", linear, train=True) == 2
    slopes = [0.1, 0.1, None, None, None]
    assert [step.slope for step in steps(changed("cnn").base)] == slopes
    slopes = [0.1, 0.1, None, 0.1]  # and the activation of a layer
    assert [step.slope for step in steps(changed("cnn", train=True).base)] == slopes
    assert number("kept", convolve) == 0  # groups
    assert number("kept", pool) == 0  # windows overlap
    before, after = nets()["cnn"][0], changed("cnn")
    assert list(dict(after.named_parameters())) == list(dict(before.named_parameters()))
    assert [type(part) for part in after.modules()] == [type(part) for part in before.modules()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("classes", [2, 10, 47])
def test_the_loss_of_stacks_is_torchs(classes, device):
    draw = torch.Generator().manual_seed(3)
    logits = (torch.randn(4, 6, classes, generator=draw, dtype=torch.float64) * 20).to(device)
    y = torch.randint(0, classes, (4, 6), generator=draw).to(device)
    weight = torch.rand(4, 6, generator=draw, dtype=torch.float64).to(device)

    def mine(x, y, w):
        return (nll(x, y) * w).sum()

    def torchs(x, y, w):
        return (nn.functional.cross_entropy(x, y, reduction="none") * w).sum()

    def bent(loss):
        return lambda x, y, w: (
            (grad(loss)(x, y, w) ** 2).sum() + (grad(loss, argnums=2)(x, y, w) ** 3).sum()
        )

    for make in (
        lambda loss: loss,
        grad,
        lambda loss: grad(bent(loss)),
        lambda loss: grad(bent(loss), argnums=2),
    ):
        assert torch.allclose(
            vmap(make(mine))(logits, y, weight),
            vmap(make(torchs))(logits, y, weight),
            rtol=1e-9,
            atol=1e-10,
        )
        assert torch.allclose(
            make(mine)(logits[0], y[0], weight[0]),
            make(torchs)(logits[0], y[0], weight[0]),
            rtol=1e-9,
            atol=1e-10,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_the_mean_loss_of_stacks_leaves_padding_out(device):
    draw = torch.Generator().manual_seed(4)
    logits, y = (
        torch.randn(5, 9, 7, generator=draw, dtype=torch.float64).to(device) * 9,
        torch.randint(0, 7, (5, 9), generator=draw).to(device),
    )
    mask = (torch.rand(5, 9, generator=draw) < 0.6).double().to(device)
    mask[3] = 0

    def torchs(x, y, m):
        return masked_mean(nn.functional.cross_entropy(x, y, reduction="none"), m)

    for make in (
        lambda loss: loss,
        grad,
        lambda loss: grad(lambda x, y, m: (grad(loss)(x, y, m) ** 2).sum()),
    ):
        assert torch.allclose(
            vmap(make(mean_nll))(logits, y, mask),
            vmap(make(torchs))(logits, y, mask),
            rtol=1e-9,
            atol=1e-12,
        )
        assert torch.allclose(
            make(mean_nll)(logits[0], y[0], mask[0]),
            make(torchs)(logits[0], y[0], mask[0]),
            rtol=1e-9,
            atol=1e-12,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("samples", "dim", "dtype"),
    [(9, 21, torch.float64), (40, 512, torch.float32), (1, 700, torch.float32)],
)
def test_the_pull_to_centres_and_its_gradient(samples, dim, dtype, device):
    draw = torch.Generator().manual_seed(6)
    z = torch.randn(5, samples, dim, generator=draw, dtype=dtype).to(device)
    centres = torch.randn(4, dim, generator=draw, dtype=dtype).to(device)
    strength = torch.tensor([1.0, 0.0, 0.3, 20.0], dtype=dtype, device=device)
    start = torch.randn(5, generator=draw, dtype=dtype).to(device)
    y = torch.randint(0, 4, (5, samples), generator=draw).to(device)
    mask = (torch.rand(5, samples, generator=draw) < 0.7).to(dtype).to(device)
    mask[3] = 0

    def plain(z, centres, strength, y, m, start):
        return start + masked_mean((z - centres[y]).square().mean(-1) * strength[y], m)

    def doubled(loss):
        return lambda *args: 2 * loss(*args)

    close = {
        "rtol": 1e-9 if dtype == torch.float64 else 2e-5,
        "atol": 1e-12 if dtype == torch.float64 else 2e-6,
    }
    by_start = partial(grad, argnums=5)
    for make in (lambda loss: loss, grad, lambda loss: grad(doubled(loss)), by_start):
        shared = (0, None, None, 0, 0, 0)
        assert torch.allclose(
            vmap(make(pull), shared)(z, centres, strength, y, mask, start),
            vmap(make(plain), shared)(z, centres, strength, y, mask, start),
            **close,
        )
        moved = centres.expand(5, -1, -1) + z[:, :1, :1]
        own = (z, moved, strength.expand(5, -1), y, mask, start)
        assert torch.allclose(vmap(make(pull))(*own), vmap(make(plain))(*own), **close)
        assert torch.allclose(
            make(pull)(z[0], centres, strength, y[0], mask[0], start[0]),
            make(plain)(z[0], centres, strength, y[0], mask[0], start[0]),
            **close,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        {"name": "sgd", "clip_norm": 0.5},
        {"name": "adam", "weight_decay": 0.1},
        {"name": "rmsprop"},
        {"name": "rmsprop", "momentum": 0.5, "clip_norm": 1.0},
    ],
)
def test_stacks_are_stepped_in_place_as_one_by_one(settings):
    optimizer = Optimizer(lr=0.05, **settings)
    draw = torch.Generator().manual_seed(5)
    params = {
        name: torch.randn(3, *shape, generator=draw, dtype=torch.float64)
        for name, shape in (("w", (4, 2)), ("b", (4,)))
    }
    stepped = {name: value.clone() for name, value in params.items()}
    state = vmap(optimizer.init)(params)
    own = OptState(
        state.steps.clone(),
        *({name: value.clone() for name, value in moment.items()} for moment in state[1:]),
    )
    for _ in range(4):
        grads = {
            name: torch.randn(value.shape, generator=draw, dtype=torch.float64)
            for name, value in params.items()
        }
        params, state = vmap(optimizer.update)(params, grads, state)
        optimizer.update_stack(stepped, grads, own)
    for name, value in params.items():
        assert torch.allclose(stepped[name], value, rtol=1e-12, atol=1e-14), name
