"""Networks whose layers are used in other ways than one after the other: in their forms for stacks,
for a GPU or not, they have torch's outputs, buffers and slopes.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.module import register_module_forward_hook
from zoo import CLASSES, Case, agree, federation

from bayflower.networks.check import trial
from bayflower.networks.model import Model
from bayflower.networks.papers import NETWORKS
from bayflower.stacked.stackable import for_stacks, steps

PICTURE, ROW = (3, 8, 8), (12,)


def conv(before: int = 3, after: int = 4) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1)


def flat(x):
    return torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1)


class Net(nn.Module):
    """Parts, what is done with them, and a head."""

    def __init__(self, use, width: int, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.use, self.end = use, nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.end(self.use(self, x))


def features(net, x):
    """What layers in the middle give, as of a VGG for a loss of styles, or of a U-Net."""
    kept = []
    for i, layer in enumerate(net.f):
        x = layer(x)
        if i in (1, 4):
            kept.append(x.amax((2, 3)) - x.mean((2, 3)))
    return torch.cat(kept, 1)


def images() -> nn.Sequential:
    return nn.Sequential(
        *(conv(), nn.ReLU(), nn.MaxPool2d(2)), *(conv(4, 6), nn.Tanh(), nn.MaxPool2d(2))
    )


def dense(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 12), nn.ReLU(), *more)


def sliced(net, x):
    low = net.f[:2](x)
    return torch.cat([flat(low), flat(net.f[2:](low))], 1)


def indexed(net, x):
    before = net.s[0](x)
    return torch.cat([before, net.s[1](before)], 1)


def by_type(net, x):
    for layer in net.s:
        x = layer(x)
        if type(layer) is nn.Linear or type(layer) is nn.BatchNorm1d:
            x = x * 0.5
    return x


def pooled_twice():
    pool = nn.MaxPool2d(2)
    ends = {"a": nn.Sequential(conv(), nn.ReLU(), pool), "b": nn.Sequential(conv(4), nn.Tanh())}
    return Net(lambda net, x: flat(net.p(net.b(net.a(x)))), 8, **ends, p=pool)


def pooled_in_both():
    pool = nn.MaxPool2d(2)
    a, b = nn.Sequential(conv(), nn.ReLU(), pool), nn.Sequential(conv(4), nn.Tanh(), pool)
    return Net(lambda net, x: flat(net.b(net.a(x))), 8, a=a, b=b)


def one_linear():
    layer = nn.Linear(12, 12)
    body = nn.Sequential(layer, nn.ReLU())
    return Net(lambda net, x: net.l(net.s(x)), 12, l=layer, s=body)


def linear_thrice():
    layer = nn.Linear(12, 12)
    body = nn.Sequential(layer, nn.ReLU(), layer, nn.LeakyReLU(0.3), layer)
    return Net(lambda net, x: net.s(x), 12, s=body)


def one_conv():
    layer = conv(3, 3)
    body = nn.Sequential(layer, nn.MaxPool2d(2))
    return Net(lambda net, x: flat(net.c(net.s(x))), 6, c=layer, s=body)


def one_activation():
    act = nn.LeakyReLU(0.2)
    body = nn.Sequential(nn.Linear(12, 12), act, nn.Linear(12, 12), act)
    return Net(lambda net, x: net.act(net.s(x)), 12, s=body, act=act)


class Difference(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x):
        first, second = self
        y = first(x)
        return y - second(y)


class Bumpy(nn.ReLU):
    """An activation that falls, too."""

    def forward(self, x):
        return super().forward(x) * (x - 1)


def bumpy():
    body = nn.Sequential(conv(), Bumpy(), nn.MaxPool2d(2))
    return Net(lambda net, x: flat(net.s(x)), 8, s=body)


def changed(layer: nn.Module) -> nn.Module:
    """A layer that somebody gave another forward."""
    layer.forward = MethodType(lambda self, x: type(self).forward(self, x) * (x.mean() - 2), layer)
    return layer


def changed_layers():
    parts = (changed(conv()), nn.ReLU(), changed(nn.MaxPool2d(2)), conv(4), changed(nn.ReLU()))
    body = nn.Sequential(*parts, nn.MaxPool2d(2))
    return Net(lambda net, x: flat(net.s(x)), 8, s=body)


def changed_whole():
    body = dense()
    body.forward = MethodType(lambda self, x: self[0](x) - self[1](x), body)
    return Net(lambda net, x: net.s(x), 12, s=body)


def watched_layers():
    """Hooks on layers of a Sequential change what they get and give."""
    body = images()
    body[0].register_forward_hook(lambda layer, args, out: out.sin())
    body[1].register_forward_hook(lambda layer, args, out: out * 1.5 + 0.1)
    body[3].register_forward_pre_hook(lambda layer, args: (args[0].cos(),))
    body[4].register_forward_pre_hook(lambda layer, args: (args[0] * -2,))
    body[5].register_forward_pre_hook(lambda layer, args: (args[0] * -3,))
    return Net(lambda net, x: flat(net.f(x)), 12, f=body)


def in_place():
    """An activation that writes into what it gets, which somebody else has seen."""
    body = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def use(net, x):
        x = net.c(x)
        y = net.s(x)
        return torch.cat([flat(x), flat(y)], 1)

    return Net(use, 16, c=conv(), s=body)


class View(nn.Module):
    def forward(self, x):
        return x.view_as(x)


def in_place_after_a_view():
    body = nn.Sequential(View(), nn.Identity(), nn.ReLU(True), nn.MaxPool2d(2))

    def use(net, x):
        x = net.c(x)
        y = net.s(x)
        return torch.cat([flat(x), flat(y)], 1)

    return Net(use, 16, c=conv(), s=body)


def with_places():
    body = nn.Sequential(conv(), nn.Tanh(), nn.MaxPool2d(2, return_indices=True))
    return Net(lambda net, x: flat(net.s(x)[0]), 8, s=body)


def without_a_batch():
    """Layers that get one picture, or a batch without channels."""
    body = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2))

    def use(net, x):
        rows = [flat(net.s(one)[None]) for one in x]
        return torch.cat([torch.cat(rows), net.p(x[:, 0]).flatten(1)], 1)

    return Net(use, 24, s=body, p=nn.MaxPool2d(2))


def by_keyword():
    body, linear = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2)), nn.Linear(8, 8)

    def use(net, x):
        return net.l(input=flat(net.p(input=net.c(input=net.s(input=x)))))

    return Net(use, 8, s=body, l=linear, c=conv(4), p=nn.MaxPool2d(2))


def one_body():
    """A Sequential in two places, in another Sequential, too."""
    body = nn.Sequential(conv(3, 3), nn.LeakyReLU(0.1), nn.MaxPool2d(2))
    whole = nn.Sequential(body, nn.Identity(), body)
    return Net(
        lambda net, x: flat(net.w(x)) + net.b(x).mean((2, 3)).repeat(1, 2), 6, b=body, w=whole
    )


def many_kinds():
    body = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.Sigmoid(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(4, 4, 2, padding=1), nn.LeakyReLU(0.5), nn.Tanh(), nn.MaxPool2d((2, 1))),
        *(conv(4), nn.Identity(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    )
    return Net(lambda net, x: flat(net.s(x)), 8, s=body)


NETS = {
    "features": Case(lambda: Net(features, 10, f=images()), PICTURE),
    "sliced": Case(lambda: Net(sliced, 20, f=images()), PICTURE),
    "pooled-twice": Case(pooled_twice, PICTURE),
    "pooled-in-both": Case(pooled_in_both, PICTURE),
    "one-linear": Case(one_linear, ROW),
    "linear-thrice": Case(linear_thrice, ROW),
    "one-conv": Case(one_conv, PICTURE),
    "one-activation": Case(one_activation, ROW),
    "indexed": Case(lambda: Net(indexed, 24, s=dense()), ROW),
    "own-forward": Case(lambda: Net(lambda net, x: net.s(x), 12, s=Difference(*dense())), ROW),
    "by-type": Case(lambda: Net(by_type, 12, s=dense(nn.Linear(12, 12), nn.BatchNorm1d(12))), ROW),
    "bumpy": Case(bumpy, PICTURE),
    "changed-layers": Case(changed_layers, PICTURE),
    "changed-whole": Case(changed_whole, ROW),
    "watched-layers": Case(watched_layers, PICTURE),
    "in-place": Case(in_place, PICTURE),
    "in-place-after-a-view": Case(in_place_after_a_view, PICTURE),
    "with-places": Case(with_places, PICTURE),
    "without-a-batch": Case(without_a_batch, PICTURE),
    "by-keyword": Case(by_keyword, PICTURE),
    "one-body": Case(one_body, PICTURE),
    "many-kinds": Case(many_kinds, PICTURE),
}


def differs(case: Case, gpu: bool, train: bool, scale: float) -> None:
    """Raise unless a stack of the network has torch's outputs, buffers and slopes; `scale` times
    the initial weights.
    """
    model = Model(case.factory, CLASSES)
    stacked = model.for_stacks(gpu=gpu)
    params, buffers = model.initial(3, torch.float64)
    params = {n: torch.stack([v, v * 1.1, v * 0.9]) * scale for n, v in params.items()}
    buffers = {n: torch.stack([v] * 3) for n, v in buffers.items()}
    x = torch.stack([torch.as_tensor(c.x_train[:4]) for c in federation(case).clients]).double()
    aim = torch.linspace(-1, 1, 4 * CLASSES).double().reshape(4, -1)

    def ours(params, buffers, x):
        ones = torch.ones(4).double()
        logits, after = stacked.forward(params, buffers, x.clone(), train=train, mask=ones)
        return (logits * aim).sum(), (logits, after)

    slopes, (logits, after) = vmap(grad(ours, has_aux=True))(params, buffers, x)
    own = {n: v[1].clone().requires_grad_() for n, v in params.items()}
    kept = {n: v[1].clone() for n, v in buffers.items()}
    alone = case.factory().double().train(train)
    want = functional_call(alone, {**own, **kept}, (x[1].clone(),))
    exact = torch.autograd.grad((want * aim).sum(), list(own.values()))
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(logits[1], want.detach(), **close)
    for name, slope in zip(own, exact, strict=True):
        torch.testing.assert_close(slopes[name][1], slope, **close, msg=name)
    for name, value in kept.items():
        torch.testing.assert_close(after[name][1], value, **close, msg=name)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu form", "cpu form"])
@pytest.mark.parametrize("name", NETS)
def test_outputs_and_slopes_are_torchs_whatever_is_done_with_layers(name, gpu, train):
    differs(NETS[name], gpu, train, 1.0)


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu form", "cpu form"])
@pytest.mark.parametrize("name", ["features", "one-linear", "many-kinds"])
def test_slopes_where_an_activation_bends_are_torchs(name, gpu):
    """Without weights every layer gives zeros."""
    differs(NETS[name], gpu, True, 0.0)


def test_a_hook_on_all_modules_sees_every_layer():
    seen: list[str] = []
    net = images().double()
    handle = register_module_forward_hook(lambda layer, *_: seen.append(type(layer).__name__))
    try:
        for_stacks(net)(torch.ones(2, *PICTURE).double())
    finally:
        handle.remove()
    assert seen == [*(type(layer).__name__ for layer in net), "Sequential"]


# at once: convolutions with their pooling, linear layers with their activation
FAST = {
    "mlp": (0, 2),
    "cnn": (2, 1),
    "cnn3": (3, 2),
    "lenet5": (2, 2),
    "lenet-wide": (2, 2),
    "resnet20": (0, 0),
}


@pytest.mark.parametrize("name", FAST)
def test_the_papers_networks_take_layers_at_once(name):
    """In the order of their layers, none of which is left out, and with torch's numbers."""
    shape = (3, 16, 16)
    case = Case(lambda: NETWORKS[name](shape, CLASSES), shape)
    base = Model(case.factory, CLASSES).for_stacks(gpu=True).module_for(True).base
    layers = [step.layer for step in steps(base) if step.slope is not None]
    kinds = [sum(type(layer) is kind for layer in layers) for kind in (nn.Conv2d, nn.Linear)]
    assert tuple(kinds) == FAST[name]
    assert len(steps(base)) == len(base) - 2 * kinds[0] - kinds[1]
    differs(case, True, True, 1.0)


def scripted():
    part = torch.jit.script(nn.Sequential(nn.Linear(12, 12), nn.ReLU()))
    return Net(lambda net, x: net.s(x), 12, s=part)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is (deprecated|not supported)")
def test_a_network_with_a_scripted_part_is_tried_and_trained():
    case = Case(scripted, ROW)
    x = torch.as_tensor(federation(case).clients[0].x_train)
    logits, last = trial(Model(scripted, CLASSES), x)
    assert logits.shape == (len(x), CLASSES)
    assert last == ""  # nobody can see which layer was the last
    agree("fedavg", case, local_steps=1)
