"""The Laplace approximation of a whole network against dense matrices and explicit sums."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bayflower.maths import laplace
from bayflower.networks.last import forward_last
from bayflower.networks.model import Batch, Model
from bayflower.tree import stack

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kfac

N, K = 7, 3


class Both(nn.Module):
    """Convolutions with stride and padding, with and without bias, BatchNorm, Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.two = nn.Conv2d(3, 2, (2, 1), bias=False)
        self.hidden, self.fc = nn.Linear(12, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.one(x)))
        return self.fc(torch.tanh(self.hidden(torch.tanh(self.two(x)).flatten(1))))


def made(factory=Both, shape=(2, 6, 5), classes: int = K, rows: int = N, seed: int = 0):
    """Return (model, parameters, buffers, samples) in float64."""
    draw = torch.Generator().manual_seed(seed)
    model = Model(factory, classes)
    params, buffers = model.initial(seed, torch.float64)
    x = torch.randn(rows, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (rows,), generator=draw)
    return model, params, buffers, Batch(x, y, torch.ones(rows, dtype=torch.float64))


def hessian(logits: Tensor) -> Tensor:
    """Return ∂²(−log p_y)/∂f² of one sample."""
    if len(logits) == 1:
        p = torch.sigmoid(logits)
        return (p * (1 - p))[:, None]
    p = logits.softmax(0)
    return torch.diag(p) - torch.outer(p, p)


def jacobian(model: Model, params, buffers, x: Tensor, path: str) -> Tensor:
    """Return the Jacobian of one sample's logits in a layer's weights (C, O, D'), by autograd."""
    names = [name for name in (f"{path}.weight", f"{path}.bias") if name in params]

    def logits(*values: Tensor) -> Tensor:
        own = {**params, **dict(zip(names, values, strict=True))}
        return model.forward(own, buffers, x[None], train=False)[0][0]

    found = torch.autograd.functional.jacobian(logits, tuple(params[name] for name in names))
    parts = [part.flatten(2) if part.ndim > 2 else part[..., None] for part in found]
    return torch.cat(parts, -1)


class One(nn.Module):
    """A network of one layer, under a name."""

    def __init__(self, outputs: int = K) -> None:
        super().__init__()
        self.fc = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize(("outputs", "classes"), [(3, 3), (1, 2)])
def test_a_network_of_one_layer_and_one_sample_has_the_dense_posterior(outputs, classes):
    """The covariance of new samples' logits is that of the dense generalised Gauss-Newton matrix
    and its prior.
    """
    model, params, buffers, train = made(lambda: One(outputs), (4,), classes, rows=1)
    seen = kfac.see(model, params, buffers, train)
    j = jacobian(model, params, buffers, train.x[0], "fc").flatten(1)
    logits = model.forward(params, buffers, train.x, train=False)[0][0]
    dense = j.T @ hessian(logits) @ j
    factors = torch.kron(seen.outputs["fc"], seen.inputs["fc"])
    assert torch.allclose(dense, factors, atol=1e-12)
    tensors = kfac.fitted(seen, params)
    values = torch.linalg.eigvalsh(dense)
    weights = laplace.last_weights(params, "fc")
    prior = laplace.best_prior(values.clamp(min=0), weights)
    inverse = torch.linalg.inv(dense + prior * torch.eye(len(dense), dtype=torch.float64))
    new = made(lambda: One(outputs), (4,), classes, seed=1)[3]
    found = kfac.covariance(model, params, buffers, new.x, tensors)
    for place, x in enumerate(new.x):
        j = jacobian(model, params, buffers, x, "fc").flatten(1)
        assert torch.allclose(found[place], j @ inverse @ j.T, rtol=1e-8, atol=1e-12)


def test_of_the_last_layer_it_is_the_approximation_of_the_last_layer():
    model, params, buffers, train = made(One, (4,))
    logits, features = forward_last(model, params, buffers, train.x, "fc")
    phi = laplace.with_bias(features, params, "fc")
    last = laplace.see(logits, features, phi, train, K)
    seen = kfac.see(model, params, buffers, train)
    assert torch.allclose(seen.inputs["fc"], last.gram)
    assert torch.allclose(seen.outputs["fc"], last.curvature)
    posterior = laplace.fitted(last, laplace.last_weights(params, "fc"))
    offsets = laplace.offsets(posterior.kind, posterior.tensors, logits, phi)
    wanted = torch.einsum("jnk,jnl->nkl", offsets, offsets) / len(offsets)
    found = kfac.offsets(model, params, buffers, train.x, kfac.fitted(seen, params))
    # both are fixed draws, whose directions are independent up to a few percent
    near = torch.einsum("jnk,jnl->nkl", found, found) / len(found)
    exact = kfac.covariance(model, params, buffers, train.x, kfac.fitted(seen, params))
    scale = exact.diagonal(dim1=1, dim2=2).amax()
    assert float((near - exact).abs().max() / scale) < 0.35
    assert float((wanted - exact).abs().max() / scale) < 0.35


@pytest.mark.parametrize("path", ["one", "two", "hidden", "fc"])
def test_factors_are_explicit_sums(path):
    """a and g of every sample, column and position, one by one."""
    model, params, buffers, train = made()
    seen = kfac.see(model, params, buffers, train)
    layer = dict(model.module_for(False).named_modules())[path]
    kept = []

    def look(_, args, out):
        out.retain_grad()
        kept.append((args[0], out))

    into, out = torch.zeros_like(seen.inputs[path]), torch.zeros_like(seen.outputs[path])
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    for x in train.x:
        handle = layer.register_forward_hook(look)
        logits = model.forward(leaves, buffers, x[None], train=False)[0][0]
        handle.remove()
        a, s = kept.pop()
        if isinstance(layer, nn.Conv2d):
            a = nn.functional.unfold(a, layer.kernel_size, 1, layer.padding, layer.stride)[0].T
        if layer.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        for row in a.detach():
            into += torch.outer(row, row)
        root = torch.linalg.cholesky(
            hessian(logits.detach()) + 1e-14 * torch.eye(K, dtype=torch.float64)
        )
        for column in root.T:
            (g,) = torch.autograd.grad(logits, s, column, retain_graph=True)
            positions = g[0].flatten(1).T if g.ndim > 2 else g
            for row in positions:
                out += torch.outer(row, row) / len(positions)
    assert torch.allclose(seen.inputs[path], into, atol=1e-10)
    assert torch.allclose(seen.outputs[path], out, atol=1e-10)


def test_the_covariance_is_that_of_explicit_jacobians_and_dense_blocks():
    model, params, buffers, train = made()
    seen = kfac.see(model, params, buffers, train)
    assert set(seen.inputs) == {"one", "two", "hidden", "fc"}
    tensors = kfac.fitted(seen, params)
    new = made(seed=1)[3]
    total = torch.zeros(N, K, K, dtype=torch.float64)
    for path, gram in seen.inputs.items():
        weight = params[f"{path}.weight"].flatten(1)
        if f"{path}.bias" in params:
            weight = torch.cat([weight, params[f"{path}.bias"][:, None]], 1)
        dense = torch.kron(seen.outputs[path], gram / N)
        prior = laplace.best_prior(torch.linalg.eigvalsh(dense).clamp(min=0), weight)
        inverse = torch.linalg.inv(dense + prior * torch.eye(len(dense), dtype=torch.float64))
        for place, x in enumerate(new.x):
            j = jacobian(model, params, buffers, x, path).flatten(1)
            total[place] += j @ inverse @ j.T
    found = kfac.covariance(model, params, buffers, new.x, tensors)
    assert torch.allclose(found, total, rtol=1e-6, atol=1e-10)


def test_padding_adds_nothing_and_pieces_add_up():
    model, params, buffers, train = made()
    whole = kfac.see(model, params, buffers, train)
    padded = train._replace(mask=torch.tensor([1, 1, 1, 1, 0, 0, 0]).double())
    first = Batch(*(tensor[:4] for tensor in train))
    rest = Batch(*(tensor[4:] for tensor in train))
    some, part, other = (kfac.see(model, params, buffers, one) for one in (padded, first, rest))
    for path in whole.inputs:
        for name in ("inputs", "outputs"):
            a, b, c, d = (getattr(one, name)[path] for one in (whole, some, part, other))
            assert torch.allclose(b, c)
            assert torch.allclose(a, c + d)
    assert (float(whole.number), float(some.number)) == (7, 4)


def test_stacked_clients_have_the_numbers_of_clients_alone():
    clients = [made(seed=seed) for seed in range(3)]
    model = clients[0][0].for_stacks(gpu=False)

    def alone(model, params, buffers, train, x):
        tensors = kfac.fitted(kfac.see(model, params, buffers, train), params)
        return kfac.offsets(model, params, buffers, x, tensors)

    params, buffers, train = (stack([one[k] for one in clients]) for k in (1, 2, 3))
    x = train.x.flip(1)
    stacked = torch.func.vmap(lambda *args: alone(model, *args))(params, buffers, train, x)
    for place, one in enumerate(clients):
        wanted = alone(*one, x[place])
        assert torch.allclose(stacked[place], wanted, rtol=1e-6, atol=1e-9)
