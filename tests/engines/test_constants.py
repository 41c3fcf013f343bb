"""Constants that are made once can be used anywhere later, wherever they were made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad

from bayflower.maths import classwise, laplace, processes
from bayflower.networks.model import Model
from bayflower.stacked import products

CPU = torch.device("cpu")
KEPT = {
    "quadrature": lambda: processes.quadrature(torch.float64, CPU),
    "draws": lambda: laplace.draws(3),
    "weight draws": lambda: laplace.weight_draws((2, 3), 1),
    "corners": lambda: classwise.corners(4, CPU),
    "zero": lambda: products.zero(CPU, torch.float64),
}


@pytest.fixture(autouse=True)
def nothing_kept():
    made = processes.quadrature, laplace.draws, laplace.weight_draws
    for fn in (*made, classwise.corners, products.zero):
        fn.cache_clear()


def in_gradient(make):
    def loss(x):
        make()
        return x.square()

    grad(loss)(torch.tensor(1.0))


def in_inference(make):
    with torch.inference_mode():
        make()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("place", [in_gradient, in_inference])
def test_a_constant_is_plain_wherever_it_was_made_first(name, place):
    make = KEPT[name]
    place(make)
    found = make()
    assert make() is found  # kept
    for one in found if isinstance(found, tuple) else (found,):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(one)
        assert not one.is_inference()
        if one.is_floating_point():  # it can take part in a gradient
            x = torch.ones_like(one, requires_grad=True)
            (x * one).sum().backward()
            assert torch.equal(x.grad, one)


class Frozen(nn.Module):
    """A layer that is not trained, and numbers that are no state."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)
        self.register_buffer("place", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.head(self.body(x) + self.place)


@pytest.mark.parametrize("place", [in_gradient, in_inference])
def test_what_a_network_does_not_train_is_plain_wherever_it_was_needed_first(place):
    """In another dtype than the network was made with, so that it is made anew."""
    model = Model(Frozen, 2)
    params, buffers = model.initial(0, torch.float64)
    x = torch.ones(5, 3, dtype=torch.float64)
    place(lambda: model.forward(params, buffers, x, train=True))
    (known,) = model.constants_in_use()
    assert sorted(known) == ["body.bias", "body.weight", "place"]
    for value in known.values():
        assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
        assert not value.is_inference()
        assert not value.requires_grad
