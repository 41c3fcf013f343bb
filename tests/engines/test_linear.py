"""Linear layers of stacks with the activation after them, and steps that leave their gradients as
products: against torch's layers and against steps that write their gradients.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bayflower.contract import ClientHalf
from bayflower.maths.optim import Optimizer
from bayflower.stacked import linear, products, routes, stackable
from bayflower.stacked.forms import has
from bayflower.stacked.linear import Linear
from bayflower.stacked.stackable import for_stacks
from bayflower.work import is_unchanged, unchanged

F64 = torch.float64
CUDA = DEVICES[1]
# clients, samples, inputs, outputs; slope below 0, bias
CASES = {
    "leaky": (3, 10, 100, 40, 0.1, True),
    "plain": (2, 7, 33, 10, 1.0, True),
    "relu, many samples": (1, 70, 200, 17, 0.0, False),
    "wide": (5, 10, 1024, 512, 0.1, True),
    "very wide": (3, 20, 9216, 128, 0.0, True),
}


def inputs(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], float]:
    clients, samples, width, outputs, slope, bias = CASES[name]
    make = torch.Generator().manual_seed(0)
    shapes = [(samples, width), (outputs, width), (outputs,)][: 3 if bias else 2]
    found = [torch.randn(clients, *shape, generator=make, dtype=F64) for shape in shapes]
    found[1] /= width**0.5
    return [one.to(device, dtype) for one in found], slope


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    return functional.leaky_relu(functional.linear(x, weight, bias), slope)


def own(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    return Linear.apply(x, weight, bias, slope, False)


def length(fn, slope):
    def of(*tensors):
        return (
            fn(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, slope).sin().sum()
        )

    return of


def again(fn, slope):
    def of(*tensors):
        every = tuple(range(len(tensors)))
        found = grad(length(fn, slope), argnums=every)(*tensors)
        return sum(value.square().sum() for value in found)

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [length, again], ids=["first", "second"])
def test_slopes_are_those_of_torchs_layer(name, device, order):
    dtype = F64 if device == "cpu" else torch.float32
    tensors, slope = inputs(name, device, dtype)
    every = tuple(range(len(tensors)))
    got = vmap(grad(order(own, slope), argnums=every))(*tensors)
    exact = [one.double() for one in tensors]
    want = vmap(grad(order(plain, slope), argnums=every))(*exact)
    torchs = vmap(grad(order(plain, slope), argnums=every))(*tensors)
    for one, two, three in zip(got, want, torchs, strict=True):
        # sums over 9,216 numbers in float32 differ by more, torch's own, too
        most = max(2e-6 * float(two.norm()), 2 * float((three.double() - two).norm()))
        assert float((one.double() - two).norm()) <= most
        assert float(two.norm()) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["leaky", "relu, many samples"])
def test_gradients_of_each_sample_share_their_layer(name, device):
    tensors, slope = inputs(name, device, F64 if device == "cpu" else torch.float32)
    x, params = tensors[0], tuple(tensors[1:])

    def by_sample(fn):
        def one(params, sample):
            return length(fn, slope)(sample[None], *params)

        return vmap(lambda params, x: vmap(grad(one), in_dims=(None, 0))(params, x))

    exact = tuple(one.double() for one in params)

    def to_sample(fn):
        def one(sample, params):
            return length(fn, slope)(sample[None], *params)

        return vmap(lambda params, x: vmap(grad(one), in_dims=(0, None))(x, params))

    got = (*by_sample(own)(params, x), to_sample(own)(params, x))
    want = (*by_sample(plain)(exact, x.double()), to_sample(plain)(exact, x.double()))
    for one, two in zip(got, want, strict=True):
        assert one.shape == two.shape
        assert float((one.double() - two).norm()) <= 2e-6 * float(two.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["leaky", "plain", "wide", "very wide"])
def test_a_step_by_products_is_the_step_of_written_gradients(name, device):
    dtype = torch.float32
    tensors, slope = inputs(name, device, dtype)
    x, params = tensors[0], {"weight": tensors[1], "bias": tensors[2]}
    rate = 0.3

    def loss(params, x):
        out = own(x, params["weight"], params["bias"], slope)
        return out.sin().sum() + params["weight"].square().sum()  # a gradient beside the product

    want = {name: value - rate * slope_of for name, value, slope_of in steps(loss, params, x)}
    with products.products(params) as left:
        grads = vmap(grad(loss))(params, x)
    assert len(left.found) == 1
    others = left.others(grads)
    assert "bias" not in others  # it is nothing but a product
    for key, value in others.items():
        params[key].sub_(rate * value)
    left.descend(rate)
    for key, value in params.items():
        assert float((value - want[key]).norm()) <= 1e-6 * float(want[key].norm())


def steps(loss, params, x):
    found = vmap(grad(loss))(params, x)
    return [(name, params[name].clone(), found[name]) for name in params]


def test_only_parameters_themselves_and_first_derivatives_are_left_as_products():
    (x, weight, bias), slope = inputs("leaky", "cpu", F64)
    params = {"weight": weight.float(), "bias": bias.float()}
    x = x.float()

    def scaled(params, x):  # the layer's weights are made of parameters
        return own(x, 2 * params["weight"], params["bias"], slope).sin().sum()

    def nested(params, x):
        def inner(params):
            return own(x, params["weight"], params["bias"], slope).sin().sum()

        return sum(value.square().sum() for value in grad(inner)(params).values())

    for loss, number in ((scaled, 0), (nested, 1)):
        want = vmap(grad(loss))(params, x)
        with products.products(params) as left:
            got = vmap(grad(loss))(params, x)
        assert len(left.found) == number
        full = {name: torch.zeros_like(value) for name, value in params.items()}
        for one, _ in left.found:
            moved = one._replace(weight=full["weight"], bias=full["bias"])
            products.step(moved, -1.0)
        for name, value in want.items():
            torch.testing.assert_close(got[name] + full[name], value, rtol=1e-4, atol=1e-4)
    assert not products._steps


def test_a_gradient_is_unchanged_only_if_its_half_says_so():
    from bayflower.clients import fedavg, fedper, metavd

    assert is_unchanged(fedper.Client.gradient)
    assert not is_unchanged(metavd.Client.gradient)

    class Doubled(fedavg.Client):
        def gradient(self, phase, work, batches, noise):
            grads, buffers, loss = super().gradient(phase, work, batches, noise)
            return {name: 2 * value for name, value in grads.items()}, buffers, loss

    assert not is_unchanged(Doubled.gradient)
    assert unchanged(len) is len
    assert not is_unchanged(ClientHalf.step)


def test_only_plain_descent_takes_products():
    assert Optimizer("sgd", 0.1).plain
    for more in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"clip_norm": 1.0}, {"scheduled": True}):
        assert not Optimizer("sgd", 0.1, **more).plain
    assert not Optimizer("adam", 0.1).plain


def test_an_activation_joins_the_layer_before_it_unless_a_hook_wants_its_output():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3), nn.Tanh())
    stacked, x = for_stacks(module.train()), torch.randn(2, 5)
    assert has(stacked[0], stackable.linear)
    assert [step.slope for step in stackable.steps(stacked)] == [0.1, None, None]
    assert list(map(type, stacked)) == list(map(type, module))
    assert list(stacked.state_dict()) == list(module.state_dict())
    params = dict(module.named_parameters())
    torch.testing.assert_close(functional_call(stacked, params, (x,)), module(x))
    seen: list[Tensor] = []
    stacked[0].register_forward_hook(lambda layer, args, out: seen.append(out))
    torch.testing.assert_close(functional_call(stacked, params, (x,)), module(x))
    torch.testing.assert_close(seen[0], module[0](x))
    assert len(stackable.steps(stacked)) == 4
    assert not has(for_stacks(module.eval())[0], stackable.linear)


def check(tile):
    assert tile.outputs & (tile.outputs - 1) == 0
    assert tile.inputs & (tile.inputs - 1) == 0
    assert 16 <= tile.outputs <= 128
    assert 16 <= tile.inputs <= 128


def test_blocks_of_a_linear_layer_fill_the_device_and_stay_powers_of_two():
    for clients in (1, 5, 50):
        for samples in (1, 10, 64):
            for outputs, width in ((10, 512), (512, 1024), (128, 9216)):
                for rule in (routes.linear_ahead, routes.linear_input):
                    check(rule(clients, samples, outputs, width))
                for step in (False, True):
                    tile, turns = routes.linear_weights(clients, samples, outputs, width, step)
                    check(tile)
                    assert turns in (2, 4)
    assert linear.ahead(torch.ones(1, 2, 3), torch.ones(1, 4, 3), None, 1.0, False).sum() == 24
