"""Diagonal curvature against the exact Hessian, a loop over
samples and classes, and laplace-torch.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from itertools import pairwise, product
from types import MethodType

import pytest
import torch
from conftest import some, worst_difference
from devices import DEVICES
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from bayflower.maths.curvature import diagonal, signs
from bayflower.maths.formulas import make_plan
from bayflower.networks.model import Batch, Model
from bayflower.networks.papers import build
from bayflower.tree import map_tree, stack, take, to


class Odd(nn.Module):
    """Layers with and without a formula: strides, groups, a norm that couples channels, a layer
    used twice, tied weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.group_norm = nn.GroupNorm(2, 4)
        self.flat = nn.Linear(64, 6)
        self.norm1 = nn.BatchNorm1d(6)
        self.twice = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.group_norm(self.grouped(x))).flatten(1)
        x = torch.relu(self.twice(torch.relu(self.norm1(self.flat(x)))))
        return self.head(torch.relu(self.tied(torch.relu(self.twice(x)))))


class Tokens(nn.Module):
    """A Linear layer on several positions of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.token(x)).mean(1))


class Between(nn.Module):
    """Two layers, and something that is done with the first."""

    def __init__(self, use, change=None) -> None:
        super().__init__()
        self.first, self.head, self.use = nn.Linear(5, 5), nn.Linear(5, 3), use
        if change is not None:
            change(self.first)

    def forward(self, x):
        return self.head(self.use(self.first, x))


def other_forward(layer: nn.Module) -> None:
    layer.forward = MethodType(lambda self, x: x.sin() @ (2 * self.weight) + self.bias, layer)


# how weights are used beyond their layer, or what is done with what it gets and gives
USES = {
    "twice": lambda a, x: torch.relu(a(x) + functional.linear(x, a.weight)),
    "both ways": lambda a, x: functional.linear(torch.tanh(a(x)), a.weight.t()),
    "the bias": lambda a, x: torch.relu(a(x)) * a.bias,
    "by keyword": lambda a, x: torch.relu(a(input=x)),
    "solved": lambda a, x: torch.linalg.solve(a.weight @ a.weight.T + torch.eye(5).to(x), a(x).T).T,
}
CHANGES = {
    "hook": lambda a: a.register_forward_hook(lambda layer, args, out: 1.5 * out),
    "forward": other_forward,
}


def layers(*widths: int, norm: bool = False) -> nn.Module:
    """A perceptron of these widths."""
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def strides() -> nn.Module:
    """Two convolutions, the second with a kernel, strides and padding that are not square."""
    second = nn.Conv2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0))
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
        second,
        nn.Flatten(),
        nn.Linear(8, 4),
    )


CASES = {
    "mlp": (build("mlp", (5,), 3), (5,)),
    "one logit": (build("mlp", (5,), 2), (5,)),
    "batchnorm": (build("mlp-bn", (5,), 3), (5,)),
    "lenet5": (build("lenet5", (1, 16, 16), 10), (1, 16, 16)),
    "cnn": (Model(strides, 4), (1, 8, 8)),
    "resnet20": (build("resnet20", (3, 16, 16), 10), (3, 16, 16)),
    "small": (Model(lambda: layers(5, 6, 4, 3), 3), (5,)),
    "small, one logit": (Model(lambda: layers(5, 6, 4, 1), 2), (5,)),
    "small, batchnorm": (Model(lambda: layers(5, 6, 4, 3, norm=True), 3), (5,)),
    "odd": (Model(Odd, 3), (2, 8, 8)),
    "tokens": (Model(Tokens, 3), (7, 3)),
    **{name: (Model(partial(Between, use), 3), (5,)) for name, use in USES.items()},
    **{
        name: (Model(partial(Between, lambda a, x: torch.relu(a(x)), change), 3), (5,))
        for name, change in CHANGES.items()
    },
}


def problem(
    model: Model,
    shape: tuple[int, ...],
    samples: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
):
    generator = torch.Generator().manual_seed(seed)
    params, buffers = model.initial(seed, dtype)
    for name, value in buffers.items():
        if "running_var" in name:
            buffers[name] = 0.5 + torch.rand(value.shape, generator=generator, dtype=dtype)
        elif value.is_floating_point():
            buffers[name] = 0.1 * torch.randn(value.shape, generator=generator, dtype=dtype)
    x = torch.randn(samples, *shape, generator=generator, dtype=dtype)
    y = torch.randint(0, model.num_classes, (samples,), generator=generator)
    return params, buffers, Batch(x, y, torch.ones(samples, dtype=dtype))


def loop(model: Model, params, buffers, batch: Batch, kind: str):
    """The oracle: autograd of log p for every class of every sample (or its true label), squared,
    weighted, added.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for x, y in zip(batch.x, batch.y, strict=True):
        logs = model.probabilities(
            functional_call(model.module_for(train=False), (leaves, buffers), (x[None],))
        )[0].log()
        for label in range(model.num_classes) if kind == "fisher" else [int(y)]:
            grads = torch.autograd.grad(logs[label], list(leaves.values()), retain_graph=True)
            weight = float(logs[label].detach().exp()) if kind == "fisher" else 1.0
            for name, grad in zip(leaves, grads, strict=True):
                total[name] += weight * grad**2
    return total


@pytest.mark.parametrize("kind", ["fisher", "empirical"])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_samples_and_classes(name, kind):
    model, shape = CASES[name]
    params, buffers, batch = problem(model, shape, samples=3 if name == "resnet20" else 5)
    want = loop(model, params, buffers, batch, kind)
    with torch.no_grad():  # as a survey after training
        got = diagonal(model, params, buffers, batch, kind)
    assert list(got) == list(params)
    assert any(bool(value.any()) for value in want.values())
    for key in params:
        torch.testing.assert_close(
            got[key], want[key], rtol=1e-8, atol=1e-12 * float(max(v.max() for v in want.values()))
        )


@pytest.mark.parametrize("name", ["small", "small, one logit", "small, batchnorm", "cnn"])
def test_equals_the_exact_hessian_of_a_relu_network(name):
    """E-B4: the model-label Fisher information is the diagonal of the Hessian of the summed loss;
    the empirical one is not.
    """
    model, shape = CASES[name]
    params, buffers, batch = problem(model, shape)
    leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
    loss = model.nll(
        functional_call(model.module_for(train=False), (leaves, buffers), (batch.x,)), batch.y
    ).sum()
    hessian = {}
    for key, grad in zip(
        leaves, torch.autograd.grad(loss, list(leaves.values()), create_graph=True), strict=True
    ):
        rows = [
            torch.autograd.grad(one, leaves[key], retain_graph=True)[0].reshape(-1)[i]
            for i, one in enumerate(grad.reshape(-1))
        ]
        hessian[key] = torch.stack(rows).reshape(grad.shape)
    fisher = diagonal(model, params, buffers, batch, "fisher")
    empirical = diagonal(model, params, buffers, batch, "empirical")
    for key in params:
        torch.testing.assert_close(fisher[key], hessian[key], rtol=1e-6, atol=1e-9)
    assert worst_difference(empirical, hessian) > 0.01


@pytest.mark.parametrize("kind", ["fisher", "empirical"])
@pytest.mark.parametrize("name", ["one logit", "lenet5", "batchnorm", "odd"])
def test_stacks_over_clients_and_padding_contributes_nothing(name, kind):
    model, shape = CASES[name]
    params, buffers, batch = (
        stack([problem(model, shape, seed=seed)[i] for seed in (1, 2)]) for i in range(3)
    )
    together = vmap(lambda *one: diagonal(model, *one, kind))(params, buffers, batch)
    garbage = batch._replace(
        x=torch.cat([batch.x, 7 * batch.x[:, :2]], 1),
        y=torch.cat([batch.y, batch.y[:, :2]], 1),
        mask=torch.cat([batch.mask, torch.zeros(2, 2)], 1),
    )
    padded = vmap(lambda *one: diagonal(model, *one, kind))(params, buffers, garbage)
    for row in (0, 1):
        alone = diagonal(model, *(take(tree, row) for tree in (params, buffers, batch)), kind)
        assert worst_difference(take(together, row), alone) < 1e-12
        assert worst_difference(take(padded, row), alone) < 1e-12


def test_chunks_add_up_and_certain_predictions_have_no_curvature():
    model, shape = CASES["lenet5"]
    params, buffers, batch = problem(model, shape, samples=7)
    whole = diagonal(model, params, buffers, batch)
    pieces = [
        diagonal(model, params, buffers, Batch(*(t[s : s + 3] for t in batch))) for s in (0, 3, 6)
    ]
    assert worst_difference(map_tree(lambda *parts: sum(parts), *pieces), whole) < 1e-12
    params["head.bias"][0] = 1e4
    assert all(
        bool((value == 0).all()) for value in diagonal(model, params, buffers, batch).values()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", some(["cnn", "resnet20"], ["cnn"]))
def test_networks_changed_for_stacks_have_the_same_formulas(name, device):
    shape = (1, 20, 20)
    plain = build(name, shape, 3, 8)
    changed = plain.for_stacks(gpu=True)
    changed.bf16 = True  # only training passes are
    assert make_plan(changed, shape) == make_plan(plain, shape)
    assert not make_plan(changed, shape).others
    problems = [
        (
            *plain.initial(seed, torch.float64),
            Batch(
                torch.randn(4, *shape, dtype=torch.float64),
                torch.tensor([0, 2, 1, 1]),
                torch.ones(4, dtype=torch.float64),
            ),
        )
        for seed in (1, 2)
    ]
    stacks = [to(stack([problem[i] for problem in problems]), device) for i in range(3)]
    together = to(vmap(lambda *one: diagonal(changed, *one))(*stacks), "cpu")
    for row, problem in enumerate(problems):
        want = diagonal(plain, *problem)
        for name, found in take(together, row).items():
            assert torch.allclose(found, want[name], rtol=1e-9, atol=1e-12), name


def test_which_layers_have_a_formula():
    """The rest is computed sample by sample: grouped convolutions, other norms, layers used twice,
    tied weights, positions, weights that are used outside of their layer, layers with hooks.
    """
    model, shape = CASES["odd"]
    assert {tap.path for tap in make_plan(model, shape).taps} == {
        "conv",
        "norm",
        "flat",
        "norm1",
        "head",
    }
    assert set(make_plan(model, shape).others) == {
        "grouped.weight",
        "grouped.bias",
        "group_norm.weight",
        "group_norm.bias",
        "twice.weight",
        "twice.bias",
    }
    for name in ("tokens", "twice", "hook", "forward"):
        assert [tap.path for tap in make_plan(*CASES[name]).taps] == ["head"], name
    for name in ("lenet5", "resnet20", "batchnorm"):
        assert make_plan(*CASES[name]).others == ()


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_equals_laplace_torch(name):
    """Daxberger et al. 2021's library, its diagonal of the generalised Gauss-Newton matrix (by
    BackPACK).
    """
    if importlib.util.find_spec("laplace") is None or importlib.util.find_spec("backpack") is None:
        pytest.skip("laplace-torch is not installed; pip install laplace-torch compares with it")
    from bayflower.data.vision import prepare_torchvision

    prepare_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports and hooks
        from laplace.curvature import BackPackGGN

        model, shape = CASES[name]
        params, buffers, batch = problem(model, shape, dtype=torch.float32)
        module = model.factory().eval()
        module.load_state_dict({**params, **buffers})
        plain = nn.Sequential(*module.base, module.head)  # BackPACK wants a Sequential
        _, flat = BackPackGGN(plain, "classification").diag(batch.x, batch.y)
    got = diagonal(model, params, buffers, batch)
    names = [
        f"base.{key}" if f"base.{key}" in got else f"head.{key.split('.')[-1]}"
        for key, _ in plain.named_parameters()
    ]
    mine = torch.cat([got[key].reshape(-1) for key in names])
    torch.testing.assert_close(mine, flat, rtol=1e-4, atol=1e-7)


def test_the_sketch_is_fisher_on_average_over_signs(monkeypatch):
    """Over all sign patterns of three classes the mean is exact; a single pattern is not."""
    model, shape = CASES["small"]
    params, buffers, batch = problem(model, shape, samples=4)
    found = []
    for pattern in product((1.0, -1.0), repeat=3):
        monkeypatch.setattr(
            "bayflower.maths.curvature.signs",
            lambda like, pattern=pattern: like.new_tensor(pattern).expand_as(like),
        )
        found.append(diagonal(model, params, buffers, batch, "sketch"))
    exact = diagonal(model, params, buffers, batch)
    assert worst_difference(map_tree(lambda *parts: sum(parts) / 8, *found), exact) < 1e-12
    assert worst_difference(found[0], exact) > 1e-3


def test_the_sketch_comes_close_with_many_samples():
    model, shape = CASES["lenet5"]
    params, buffers, batch = problem(model, shape, samples=256)
    exact, sketch = (
        torch.cat(
            [value.reshape(-1) for value in diagonal(model, params, buffers, batch, kind).values()]
        )
        for kind in ("fisher", "sketch")
    )
    assert float((sketch - exact).norm() / exact.norm()) < 0.15
    size = len(exact) // 2  # what FedBPS takes from it: the weights of lowest curvature
    chosen, wanted = (set(torch.topk(-value, size).indices.tolist()) for value in (sketch, exact))
    assert len(chosen & wanted) / size > 0.95


def test_signs_are_balanced_and_independent():
    drawn = signs(torch.zeros(2000, 10, dtype=torch.float64))
    assert set(drawn.unique().tolist()) == {1.0, -1.0}
    products = drawn.mT @ drawn / 2000
    assert float(drawn.mean(0).abs().max()) < 0.08
    assert float((products - torch.eye(10)).abs().max()) < 0.08
