"""Networks that write into what a layer has just given them: stacked all the same, with the loop
engine's numbers, though layers of stacks keep their output where torch's keep their input.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some
from devices import DEVICES
from torch import nn
from torch.func import functional_call, grad, vmap
from zoo import CLASSES, Case, agree

from bayflower.fused.trial import tried
from bayflower.networks.model import Model
from bayflower.stacked import filled, routes
from bayflower.stacked.rewriting import Seen

METHODS = ("fedavg", "fedbps", "fednp", "metavd", "pfedvmp")
FEW = {("hardswish", "fednp"), ("leaky", "fedavg"), ("pooled", "fedavg")}


class Doubled(nn.Module):
    """Writes twice its input into it."""

    def forward(self, x):
        return x.mul_(2)


def hardswish() -> nn.Module:
    """The end of torchvision's MobileNetV3."""
    start = (nn.Linear(12, 8), nn.Hardswish(inplace=True), Doubled())
    return nn.Sequential(*start, nn.Linear(8, 6), nn.Linear(6, CLASSES))


def leaky() -> nn.Module:
    start = (nn.Linear(12, 8), nn.LeakyReLU(0.2), nn.ELU(inplace=True))
    ends = (nn.Linear(8, 6), nn.LeakyReLU(0.1), Doubled(), nn.Linear(6, CLASSES))
    return nn.Sequential(*start, *ends)


def pooled() -> nn.Module:
    start = (nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3, 2, 1), Doubled())
    ends = (nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return nn.Sequential(*start, *ends)


NETWORKS = {
    "hardswish": Case(hardswish, (12,)),
    "leaky": Case(leaky, (12,)),
    "pooled": Case(pooled, (3, 8, 8)),
}


@pytest.fixture
def own_layers(monkeypatch):
    """Layers of stacks have the forms of a GPU on a CPU, too."""
    forms = Model.for_stacks
    monkeypatch.setattr(routes, "linear", lambda x, weight: x.ndim == 2)
    monkeypatch.setattr(Model, "for_stacks", lambda self, gpu: forms(self, gpu=True))


@pytest.mark.parametrize(
    "pair", some([(n, m) for n in NETWORKS for m in METHODS], FEW), ids=lambda pair: "-".join(pair)
)
@pytest.mark.usefixtures("own_layers")
def test_they_are_stacked_with_the_loops_numbers(pair):
    name, method = pair
    inner = {"inner_lr": 0.001} if method == "metavd" else {}
    agree(method, NETWORKS[name], local_steps=2, **inner)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_they_are_stacked_in_float32(name, device):
    """On a GPU these are kernels."""
    more = {"stacking": "yes", "dtype": "float32", "device": device, "local_steps": 2}
    agree("fedavg", NETWORKS[name], 1e-4, **more)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("own_layers")
def test_slopes_are_torchs_with_copies_of_what_layers_keep(name):
    case = NETWORKS[name]
    model = Model(case.factory, CLASSES)
    stacked, alone = model.for_stacks(gpu=True), case.factory().double()
    params = {n: torch.stack([v, 0.9 * v]) for n, v in model.initial(0, torch.float64)[0].items()}
    x = torch.randn(2, 4, *case.shape, generator=torch.Generator().manual_seed(0)).double()

    def ours(params, x):
        return stacked.forward(params, {}, x, train=True)[0].sin().sum()

    if name != "hardswish":  # its linear layer has no activation and keeps nothing
        with pytest.raises(RuntimeError, match=filled.CHANGED) as error:
            vmap(grad(ours))(params, x.clone())
        assert stacked.seen.again(error.value)
    got = vmap(grad(ours))(params, x.clone())
    for client in range(2):
        mine = {n: v[client].clone().requires_grad_() for n, v in params.items()}
        logits = functional_call(alone, mine, (x[client].clone(),))
        want = torch.autograd.grad(logits.sin().sum(), list(mine.values()))
        for name_of, slope in zip(mine, want, strict=True):
            torch.testing.assert_close(got[name_of][client], slope, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("own_layers")
def test_doctor_knows_them():
    for case in NETWORKS.values():
        found = tried(Model(case.factory, CLASSES), torch.rand(4, *case.shape))
        assert (found.training, found.curvature) == (None, None)


def test_a_stack_is_tried_again_once_for_each_reason():
    seen = Seen()
    changed = "one of the variables needed for gradient computation has been modified by an "
    assert not seen.again(RuntimeError("something else"))
    assert seen.again(RuntimeError(changed + "inplace operation: [torch.FloatTensor [16, 8]]"))
    assert seen.again(RuntimeError("vmap: inplace arithmetic(self, *extra_args) is not possible"))
    assert not seen.again(RuntimeError("vmap: inplace arithmetic, once more"))
    assert not seen.again(RuntimeError(changed + "inplace operation: once more"))
    assert seen.writes
    assert seen.fills
