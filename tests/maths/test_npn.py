"""Natural-parameter layers against golden cases and sampling."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import vmap

from bayflower.maths import npn
from bayflower.maths.npn import Gauss

F64 = torch.float64


def test_golden_layers(golden):
    case = {key: torch.tensor(value, dtype=F64) for key, value in golden["fednp_npn"].items()}
    found = npn.linear(
        Gauss(case["in_mean"], case["in_var"]),
        Gauss(case["W_mean"], case["W_var"]),
        Gauss(case["b_mean"], case["b_var"]),
    )
    torch.testing.assert_close(found.mean, case["linear_mean"], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(found.var, case["linear_var"], rtol=2e-5, atol=1e-9)
    found = npn.sigmoid(found)
    torch.testing.assert_close(found.mean, case["sigmoid_mean"], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(found.var, case["sigmoid_var"], rtol=2e-5, atol=1e-9)


def test_a_centred_network_predicts_its_target():
    """At z ~ N(0, 1) the mean is the target; computed coordinate by coordinate. Only the last bias
    differs.
    """
    plain = npn.initial(3, 4, 5, 0.1, torch.Generator().manual_seed(0), F64)
    target = torch.linspace(-2, 2, 5, dtype=F64)
    found = npn.centred(plain, target)
    assert {name for name in plain if not torch.equal(plain[name], found[name])} == {"2.bias.mean"}
    for i in range(5):
        mean = float(found["2.bias.mean"][i])
        for j in range(4):
            # z has mean 0 and variance 1: the unit's input has mean b and variance Σ (s + m²) + s_b
            var = math.log1p(math.exp(float(found["1.bias.rho"][j]))) + sum(
                math.log1p(math.exp(float(found["1.weight.rho"][k, j])))
                + float(found["1.weight.mean"][k, j]) ** 2
                for k in range(3)
            )
            unit = 1 / (
                1 + math.exp(-float(found["1.bias.mean"][j]) / math.sqrt(1 + math.pi / 8 * var))
            )
            mean += unit * float(found["2.weight.mean"][j, i])
        assert mean == pytest.approx(float(target[i]), abs=1e-12)


def test_golden_kl_theta(golden):
    case = golden["fednp_kl_theta"]
    mean, var, target = (torch.tensor(case[key], dtype=F64) for key in ("mu", "s", "theta"))
    each = [float(npn.kl_theta(Gauss(mean[i], var[i]), target[i], case["eps"])) for i in range(2)]
    assert each == pytest.approx(case["per_param"], rel=2e-5)
    assert float(npn.kl_theta(Gauss(mean, var), target, case["eps"])) == pytest.approx(
        case["sum"], rel=2e-5
    )


def test_golden_kl_z(golden):
    for case in golden["fednp_tilt"]:
        mean, var = (torch.tensor([value], dtype=F64) for value in case["exact"])
        assert float(npn.kl_z(mean, var)) == pytest.approx(case["kl_q_to_N01"], rel=1e-4, abs=1e-6)


def test_linear_equals_sampling():
    generator = torch.Generator().manual_seed(0)

    def draw(g: Gauss) -> torch.Tensor:
        return g.mean + g.var.sqrt() * torch.randn(
            200_000, *g.mean.shape, generator=generator, dtype=F64
        )

    x, w, b = (
        Gauss(
            torch.randn(*shape, generator=generator, dtype=F64),
            torch.rand(*shape, generator=generator, dtype=F64),
        )
        for shape in ((3,), (3, 2), (2,))
    )
    found = npn.linear(x, w, b)
    samples = torch.einsum("ni,nio->no", draw(x), draw(w)) + draw(b)
    torch.testing.assert_close(found.mean, samples.mean(0), rtol=0, atol=0.03)
    torch.testing.assert_close(found.var, samples.var(0), rtol=0.03, atol=0)


def test_the_variance_of_a_sigmoid_is_never_negative():
    """E-N14: at least 0.01 as the input's variance vanishes, and at most ¼."""
    mean, var = torch.meshgrid(
        torch.linspace(-12, 12, 97, dtype=F64), torch.logspace(-6, 3, 50, dtype=F64), indexing="ij"
    )
    found = npn.sigmoid(Gauss(mean, var)).var
    assert float(found.min()) > 0
    assert float(found.max()) < 0.25
    assert float(
        npn.sigmoid(Gauss(torch.zeros((), dtype=F64), torch.tensor(0.01, dtype=F64))).var
    ) == pytest.approx(0.0131, abs=2e-4)


def test_a_fresh_network_says_nothing_about_the_weights():
    """Its output is near N(0, ε), so that KL_θ starts at the size of the weights; and it stacks."""
    params = npn.initial(4, 5, 7, 0.1, torch.Generator().manual_seed(0), F64)
    x = Gauss(torch.randn(6, 4, dtype=F64), torch.rand(6, 4, dtype=F64))
    out = vmap(lambda mean, var: npn.forward(params, Gauss(mean, var)))(*x)
    assert float(out.mean.abs().max()) < 0.05
    torch.testing.assert_close(out.var, torch.full_like(out.var, 0.1), rtol=0.05, atol=0)
    assert math.isclose(
        float(torch.nn.functional.softplus(torch.tensor(npn.unsoftplus(0.1), dtype=F64))), 0.1
    )
