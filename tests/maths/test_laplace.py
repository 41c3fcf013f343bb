"""Posteriors of the last layer against dense matrices, evidence against numerical integration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from bayflower.maths import laplace
from bayflower.networks.last import forward_last, last_layer
from bayflower.networks.model import Batch, Model

N, D, C = 40, 5, 3


def net(outputs: int = C, bias: bool = True) -> Model:
    classes = 2 if outputs == 1 else outputs
    return Model(
        lambda: nn.Sequential(nn.Linear(4, D), nn.Tanh(), nn.Linear(D, outputs, bias=bias)),
        classes,
    )


def data(classes: int = C, number: int = N) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(number, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, classes, (number,), generator=draw)
    return Batch(x, y, torch.ones(number, dtype=torch.float64))


def seen(model: Model, params, batch: Batch) -> tuple[laplace.Seen, torch.Tensor, torch.Tensor]:
    layer = last_layer(model)
    logits, inputs = forward_last(model, params, {}, batch.x, layer)
    phi = laplace.with_bias(inputs, params, layer)
    return laplace.see(logits, inputs, phi, batch, model.num_classes), logits, phi


@pytest.mark.parametrize(("outputs", "bias"), [(C, True), (C, False), (1, True)])
def test_sums_of_the_last_layer_are_its_curvature(outputs: int, bias: bool) -> None:
    model = net(outputs, bias)
    params, _ = model.initial(0, torch.float64)
    batch = data(model.num_classes)
    found, _, phi = seen(model, params, batch)
    layer = last_layer(model)
    assert layer == "2"
    weights = laplace.last_weights(params, layer)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        own = flat.reshape(weights.shape)
        return model.nll(phi @ own.T, batch.y).sum()

    exact = torch.autograd.functional.hessian(loss, weights.flatten())
    # the diagonal is exact, and so is a single sample's Kronecker product
    assert torch.allclose(exact.diagonal().reshape(weights.shape), found.diagonal, atol=1e-10)
    one = Batch(batch.x[:1], batch.y[:1], batch.mask[:1])
    single, _, phi1 = seen(model, params, one)
    kron = torch.kron(single.curvature, single.gram)

    def loss1(flat: torch.Tensor) -> torch.Tensor:
        return model.nll(phi1 @ flat.reshape(weights.shape).T, one.y).sum()

    exact1 = torch.autograd.functional.hessian(loss1, weights.flatten())
    assert torch.allclose(exact1, kron, atol=1e-10)
    assert found.classes.tolist() == torch.bincount(batch.y, minlength=model.num_classes).tolist()


def test_padding_adds_nothing_and_pieces_add_up() -> None:
    model = net()
    params, _ = model.initial(0, torch.float64)
    batch = data()
    whole, _, _ = seen(model, params, batch)
    padded = Batch(
        torch.cat([batch.x, 7 * torch.ones(3, 4, dtype=torch.float64)]),
        torch.cat([batch.y, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([batch.mask, torch.zeros(3, dtype=torch.float64)]),
    )
    again, _, _ = seen(model, params, padded)
    parts = [seen(model, params, Batch(*(t[s] for t in batch)))[0] for s in (slice(9), slice(9, N))]
    for name in laplace.Seen._fields:
        assert torch.allclose(getattr(whole, name), getattr(again, name), atol=1e-10), name
        total = getattr(parts[0], name) + getattr(parts[1], name)
        assert torch.allclose(getattr(whole, name), total, atol=1e-10), name


def test_variance_and_prior_are_those_of_the_dense_posterior() -> None:
    model = net()
    params, _ = model.initial(0, torch.float64)
    batch = data()
    found, logits, phi = seen(model, params, batch)
    weights = laplace.last_weights(params, "2")
    posterior = laplace.fitted(found, weights)
    assert posterior.kind == "kronecker"
    known = torch.kron(found.curvature, found.gram / N)

    def evidence(prior: float) -> float:
        size = known.shape[0]
        dense = known + prior * torch.eye(size, dtype=torch.float64)
        fit = -0.5 * float(torch.logdet(dense)) - 0.5 * prior * float(weights.square().sum())
        return fit + 0.5 * size * math.log(prior)

    priors = torch.logspace(-3, 6, 73, dtype=torch.float64).tolist()
    best = max(priors, key=evidence)
    dense = torch.linalg.inv(known + best * torch.eye(known.shape[0], dtype=torch.float64))
    spread = torch.zeros(N, C, C, dtype=torch.float64)
    for n in range(N):
        slope = torch.kron(torch.eye(C, dtype=torch.float64), phi[n][None])
        spread[n] = slope @ dense @ slope.T
    offsets = laplace.offsets("kronecker", posterior.tensors, logits, phi)
    # the draws have unit variance in every direction of the output, so diagonals of U diag(w) Uᵀ
    # agree up to the draws' correlations; in the eigenbasis they agree exactly
    turned = offsets @ posterior.tensors["out"]
    want = torch.einsum("ji,njk,ki->ni", posterior.tensors["out"], spread, posterior.tensors["out"])
    assert torch.allclose(turned.square().mean(0), want, rtol=1e-9)
    assert torch.allclose(offsets.mean(0), torch.zeros(()).double(), atol=1e-12)


def test_wide_layers_get_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "LARGEST", D)
    model = net()
    params, _ = model.initial(0, torch.float64)
    found, logits, phi = seen(model, params, data())
    assert found.gram.shape == (0, 0)
    posterior = laplace.fitted(found, laplace.last_weights(params, "2"))
    assert posterior.kind == "diagonal"
    offsets = laplace.offsets("diagonal", posterior.tensors, logits, phi)
    want = phi.square() @ posterior.tensors["std"].square().T
    assert torch.allclose(offsets.square().mean(0), want, rtol=1e-9)


def test_class_gaussians_are_a_linear_discriminant() -> None:
    model = net()
    params, _ = model.initial(0, torch.float64)
    batch = data()
    found, logits, phi = seen(model, params, batch)
    own = laplace.class_gaussians(found)
    inputs = phi[:, :D]
    for k in range(C):
        assert torch.allclose(own.means[k], inputs[batch.y == k].mean(0))
    within = (inputs - own.means[batch.y]).square().mean(0)
    assert torch.allclose(own.variance, within + laplace.FLOOR * within.mean(), atol=1e-9)
    far = laplace.distance(inputs, own)
    slow = torch.stack(
        [((inputs - own.means[k]).square() / own.variance).mean(1) for k in range(C)], 1
    ).amin(1)
    assert torch.allclose(far, slow)
    centred = (inputs - own.means[batch.y]) / own.variance.sqrt()
    correlated = (centred.T @ centred / N).square().sum()
    assert float(own.dimension) == pytest.approx(D**2 / float(correlated))
    assert 1 < float(own.dimension) < D
    posterior = laplace.generative(own, "test")
    offsets = laplace.offsets("classes", posterior.tensors, logits, phi)
    wide = own.variance * D / own.dimension
    normal = torch.distributions.Normal(own.means, wide.sqrt())
    joint = normal.log_prob(inputs[:, None]).sum(-1) + own.prior
    assert torch.allclose((logits + offsets[0]).softmax(-1), joint.softmax(-1), atol=1e-9)


def test_sampled_weights_have_the_stated_deviation() -> None:
    model = net()
    params, _ = model.initial(0, torch.float64)
    std = {"2.weight": torch.full((C, D), 0.3, dtype=torch.float64)}
    x = data().x
    drawn = laplace.sampled_logits(model, params, {}, x, std)
    logits, _ = forward_last(model, params, {}, x, None)
    assert drawn.shape == (laplace.WEIGHT_DRAWS, N, C)
    assert torch.allclose(drawn.mean(0), logits, atol=1e-6)  # in pairs of opposite sign
    module = model.module(params, {})
    weight, noise = params["2.weight"], laplace.weight_draws((C, D), 0)
    again = torch.stack(
        [
            functional_call(module, {"2.weight": weight + std["2.weight"] * one.double()}, (x,))
            for one in noise
        ]
    )
    assert torch.allclose(drawn, again, atol=1e-9)


def test_logits_that_are_no_layers_output_have_no_last_layer() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.fc(x)

    model = Model(Doubled, C)
    params, _ = model.initial(0, torch.float64)
    logits, inputs = forward_last(model, params, {}, data().x, last_layer(model))
    assert inputs is None
    assert logits.shape == (N, C)


@pytest.mark.parametrize("broken", ["gram", "curvature"])
def test_a_client_that_diverged_takes_nothing_from_the_others(broken: str) -> None:
    """Three clients in one stack, one with numbers that are none: no error, and the others have the
    posterior they have alone.
    """
    model = net()
    params, _ = model.initial(0, torch.float64)
    found, _, _ = seen(model, params, data())
    weights = laplace.last_weights(params, last_layer(model))
    bad = found._replace(**{broken: torch.full_like(getattr(found, broken), math.nan)})
    several = laplace.Seen(*(torch.stack(rows) for rows in zip(found, bad, found, strict=True)))

    def parts(one: laplace.Seen) -> dict[str, torch.Tensor]:
        return laplace.fitted(one, weights).tensors

    alone = parts(found)
    stacked = torch.func.vmap(parts)(several)
    for name, value in alone.items():
        for place in (0, 2):
            torch.testing.assert_close(stacked[name][place], value, rtol=1e-9, atol=1e-9)
        assert stacked[name][1].isfinite().all()
