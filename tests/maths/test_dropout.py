"""Variational dropout: golden numbers, Monte Carlo, finite differences, and messages without the
dropped entries.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bayflower.errors import ConfigError, WireError
from bayflower.maths import dropout
from bayflower.networks.model import Model
from bayflower.networks.papers import build


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden_kl_its_slope_and_the_rate(golden):
    case = golden["metavd_kl"]
    log_alpha = double(case["alpha"]).log().requires_grad_()
    kl = dropout.kl(log_alpha)
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), double(case["kl"]), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(log_alpha.grad, double(case["dkl_dlogalpha"]), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(
        dropout.rate(log_alpha.detach()), double(case["dropout_rate"]), rtol=2e-5, atol=1e-9
    )
    for rate, alpha in ((0.8, 4.0), (0.9, 9.0)):  # E-V10
        assert dropout.log_alpha_of(rate) == pytest.approx(math.log(alpha))


def test_kl_against_finite_differences_and_the_best_prior():
    """The slope by differences; the value as the least KL to any N(0, gamma), found by trying
    (E-V7).
    """
    for log_alpha in (-8.5, -2.0, 0.3, 4.0, 8.5):
        x = double(log_alpha).requires_grad_()
        dropout.kl(x).backward()
        ends = [float(dropout.kl(double(log_alpha + sign * 1e-5))) for sign in (1, -1)]
        assert float(x.grad) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-10)
        theta, alpha = 0.7, math.exp(log_alpha)
        gammas = theta**2 * (1 + alpha) * torch.linspace(0.5, 2.0, 30001, dtype=torch.float64)
        kls = 0.5 * (
            gammas.log() - math.log(alpha * theta**2) + (alpha * theta**2 + theta**2) / gammas - 1
        )
        assert float(kls.min()) == pytest.approx(float(dropout.kl(x.detach())), abs=1e-8)


def variance(x, theta, log_alpha):
    _, of_weights = dropout.kl_and_variance(log_alpha, torch.zeros_like(theta), theta, None)
    return dropout.output_variance(x, of_weights())


def test_golden_outputs_of_a_layer(golden):
    case = golden["metavd_lrt"]
    x, theta, alpha = (double(case[name]) for name in ("x", "theta", "alpha"))
    torch.testing.assert_close(
        nn.functional.linear(x, theta, double(case["bias"])),
        double(case["mean"]),
        rtol=2e-5,
        atol=1e-9,
    )
    torch.testing.assert_close(
        variance(x, theta, alpha.log()), double(case["var"]), rtol=2e-5, atol=1e-9
    )


def test_local_reparameterisation_against_draws_of_the_weights():
    """Mean, variance and the spread of the outputs of 2·10^5 sampled layers (E-V12)."""
    draw = torch.Generator().manual_seed(0)
    x, theta, log_alpha = (
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((3, 6), (4, 6), (4, 6))
    )
    number = 200_000
    noise = torch.randn(number, 4, 6, dtype=torch.float64, generator=draw)
    drawn = torch.einsum("bi,noi->nbo", x, dropout.sampled(theta, log_alpha, noise))
    local = dropout.disturbed(
        x @ theta.T,
        variance(x, theta, log_alpha),
        torch.randn(number, 3, 4, dtype=torch.float64, generator=draw),
    )
    error = drawn.std(0) / number**0.5
    assert bool(((drawn.mean(0) - local.mean(0)).abs() < 5 * 1.5 * error).all())
    torch.testing.assert_close(local.var(0), drawn.var(0), rtol=0.02, atol=0)


def test_an_output_without_variance_has_a_slope():
    """Inputs that a ReLU cut to 0 have no noise; the root's infinite slope must not become NaN, nor
    in second derivatives.
    """
    x, theta = torch.zeros(2, 3), torch.ones(4, 3)

    def loss(log_alpha):
        return (
            dropout.disturbed(x @ theta.T, variance(x, theta, log_alpha), torch.ones(2, 4))
            .square()
            .sum()
        )

    first = torch.func.grad(loss)(torch.zeros(4, 3))
    second = torch.func.grad(lambda value: torch.func.grad(loss)(value).sum())(torch.zeros(4, 3))
    assert bool((first == 0).all())
    assert bool((second == 0).all())


def test_precisions_are_finite_at_every_limit():
    for theta in (0.0, 1e-30, 1.0, -1e4):
        for log_alpha in (-dropout.LIMIT, dropout.LIMIT):
            found = float(dropout.precision(torch.tensor(theta), torch.tensor(log_alpha), 1e-4))
            assert 0 < found <= 1e4


def test_the_layer_is_the_last_linear_one_before_the_head():
    for name, shape, want in (
        ("mlp-bn", (8,), "base.4.weight"),
        ("lenet5", (1, 28, 28), "base.9.weight"),
    ):
        model = build(name, shape, 10)
        assert dropout.find_layer(model.anatomy, model.shapes, model.shapes) == want
    model = build("resnet20", (3, 32, 32), 10)
    with pytest.raises(
        ConfigError, match=r"no linear layer before its head; name one, e\.g\. dropout_layer=head"
    ):
        dropout.find_layer(model.anatomy, model.shapes, model.shapes)
    assert dropout.find_layer(model.anatomy, model.shapes, model.shapes, "head") == "head.weight"
    with pytest.raises(ConfigError, match=r"dropout_layer 'base\.0' is no linear layer"):
        dropout.find_layer(model.anatomy, model.shapes, model.shapes, "base.0")


def test_a_forward_pass_is_changed_at_one_layer_only_while_it_lasts():
    model = Model(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 2, "two layers"
    )
    params, _ = model.initial(0)
    x = torch.randn(5, 3)
    plain, _ = model.forward(params, {}, x, train=True)
    seen = []
    changed, _ = model.forward_through(
        params, {}, x, True, "0", lambda into, out: seen.append(into) or out * 0
    )
    assert torch.equal(seen[0], x)
    assert torch.equal(changed, params["2.bias"].expand(5, 2))
    assert torch.equal(model.forward(params, {}, x, train=True)[0], plain)


@pytest.mark.parametrize("shape", [(3, 5), (8, 2), (1, 1)])
def test_thin_and_fill_are_inverse(shape):
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.4, 1.0):
        mask = torch.rand(shape, generator=draw) < share
        flat = {
            "mask": mask,
            "a": torch.randn(shape, generator=draw).masked_fill(mask, 0),
            "b": torch.ones(2),
        }
        sent = dropout.thin(flat, "mask", ("a",))
        assert sent["a"].shape == (int((~mask).sum()),)
        assert sent["mask"].shape == (-(-mask.numel() // 8),)
        back = dropout.fill(sent, "mask", ("a",), shape)
        assert all(torch.equal(back[name], flat[name]) for name in flat)
        with pytest.raises(WireError, match="the mask leaves"):
            dropout.fill({**sent, "a": torch.ones(mask.numel() + 1)}, "mask", ("a",), shape)
    with pytest.raises(WireError, match="key 'a' is missing"):
        dropout.fill({"mask": sent["mask"]}, "mask", ("a",), shape)
    with pytest.raises(WireError, match="the mask must be"):
        dropout.fill({**sent, "mask": torch.zeros(99, dtype=torch.uint8)}, "mask", ("a",), shape)


def test_the_ramp_rises_and_stays():
    values = [float(dropout.ramp(torch.tensor(done), 20)) for done in range(25)]
    assert values == sorted(values)
    assert values[0] < 0.01
    assert values[10] == pytest.approx(0.5)
    assert values[20:] == [1.0] * 5
    assert float(dropout.ramp(torch.tensor(0), 0)) == 1.0
