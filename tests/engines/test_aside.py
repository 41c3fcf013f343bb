"""Steps whose parts are computed in side streams of a GPU: the same weights as steps with written
gradients, step after step, plain and recorded.
"""

from __future__ import annotations

import pytest
import torch
from devices import GPU
from torch import nn
from torch.func import functional_call, grad, vmap

from bayflower.stacked import products
from bayflower.stacked.linear import Linear
from bayflower.stacked.replay import Graphs, Replay
from bayflower.stacked.stackable import for_stacks

pytestmark = GPU
STEPS, RATE = 12, 0.002


def network() -> nn.Module:
    made = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 256), nn.LeakyReLU(0.1), nn.Linear(256, 10)),
    )
    return for_stacks(made).cuda()


@pytest.fixture(params=["float32", "TF32"])
def products_of(request):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    here = request.param == "TF32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = here
    yield here
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("clients", [1, 7, 40])
def test_steps_beside_each_other_are_steps_one_after_the_other(clients, products_of, monkeypatch):
    torch.manual_seed(0)
    module = network()
    start = {
        name: torch.stack([torch.randn_like(value) * 0.05 for _ in range(clients)])
        for name, value in module.named_parameters()
    }
    x = torch.randn(STEPS, clients, 10, 1, 28, 28, device="cuda")

    def loss(params, x):
        out = functional_call(module, params, (x,))
        return out.sin().sum() / 10 + params["0.weight"].square().sum()

    def written(params, batch):
        for name, slope in vmap(grad(loss))(params, batch).items():
            params[name].sub_(RATE * slope)

    def left(params, batch):
        with products.products(params) as own:
            slopes = vmap(grad(loss))(params, batch)
        assert len(own.found) >= 3
        own.descend(RATE)
        for name, slope in own.others(slopes).items():
            params[name].sub_(RATE * slope)
        assert not own.busy

    def after(step, count):
        params = {name: value.clone() for name, value in start.items()}
        for batch in x[:count]:
            step(params, batch)
        return params

    beside = after(left, STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(products.Products, "fork", lambda own, device: torch.cuda.current_stream())
        in_turn = after(left, STEPS)
    params = {name: value.clone() for name, value in start.items()}
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def body(size):
        left({name: value[:size] for name, value in params.items()}, x.index_select(0, at)[0])
        at.add_(1)

    replay = Replay(body, Graphs(torch.device("cuda")))
    replay(clients, STEPS)
    assert replay.graphs.on
    one, want = after(left, 1), after(written, 1)
    for name, value in in_turn.items():  # the very same kernels
        assert torch.equal(beside[name], value), name
        assert torch.equal(params[name], value), name
        assert bool(value.isfinite().all()), name
        moved = want[name] - start[name]
        assert float((one[name] - want[name]).norm()) <= 2e-3 * float(moved.norm()), name


@pytest.mark.parametrize("clients", [1, 30])
def test_steps_of_shared_weights_wait_for_each_other(clients):
    """Two layers with the same weights leave two products, which a device must not add at once."""
    weight = torch.randn(clients, 700, 700, device="cuda") / 30
    x = torch.randn(clients, 10, 700, device="cuda")

    def loss(params, x):
        inner = Linear.apply(x, params["weight"], None, 0.5, False)
        return Linear.apply(inner, params["weight"], None, 1.0, False).sin().sum() / 100

    params = {"weight": weight.clone()}
    for _ in range(10):
        before = params["weight"].clone()
        slopes = vmap(grad(loss))({"weight": before}, x)
        with products.products(params) as own:
            vmap(grad(loss))(params, x)
        assert len(own.found) == 2
        own.descend(1.0)
        want = before - slopes["weight"]
        moved = float((want - before).norm())
        assert float((params["weight"] - want).norm()) <= 1e-3 * moved
