"""Tilted moments: golden cases, scipy's quadrature, the errors that the back-ends promise, and
behaviour at the edges.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gaussians import from_moments
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, special
from tilts import project_variance, site_from_moments
from torch.func import grad, vmap

from bayflower.maths import tilted
from bayflower.maths.gaussian import product

F64 = torch.float64
NAMES = ["trapezoid", "quadrature", "thm2", "logz", "probit"]
CLOSE = {"rel": 2e-5, "abs": 1e-9}


def scalar(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=F64) for value in values]


def by_scipy(mean: float, var: float, f: float) -> tuple[float, float]:
    """The oracle: mean and variance of N(mean, var) σ(f z),
    by adaptive quadrature around the mode.
    """
    sd = math.sqrt(var)

    def part(power: int, shift: float) -> float:
        def density(t: float) -> float:
            return (
                (mean + sd * t - shift) ** power
                * math.exp(-t * t / 2 + min(0.0, f * (mean + sd * t)))
                * special.expit(abs(f * (mean + sd * t)))
            )

        return sum(
            integrate.quad(density, a, a + 4, epsabs=0, epsrel=1e-12, limit=200)[0]
            for a in range(-16, 16, 4)
        )

    weight = part(0, 0.0)
    centre = part(1, 0.0) / weight
    return centre, part(2, centre) / weight


def grid_moments(name: str, nodes: int = tilted.NODES):
    """Return m, s and Tilted with cavity N(m, s), f = 1, on the grid of SPEC: m in [−6, 6], s in
    [0.01, 25].
    """
    m, s = torch.meshgrid(
        torch.linspace(-6, 6, 121, dtype=F64),
        torch.linspace(0.1, 5, 99, dtype=F64).square(),
        indexing="ij",
    )
    return m, s, tilted.tilt(m, s, torch.ones_like(m), tilted.make_slopes(name, nodes))


def test_golden_constants(golden):
    case = golden["fednp_constants"]
    assert pytest.approx(case["zeta2"]) == tilted.ZETA2
    for d in (1, 2, 3):
        assert tilted.constants(d) == pytest.approx(case[f"d{d}"], rel=1e-8, abs=1e-12)


def test_golden_moments(golden):
    for case in golden["fednp_moments"]:
        m, s, one = scalar(case["m"], case["s"], 1.0)
        e1, e2, e3 = tilted.powers(m, s, nodes=401)
        assert [float(e1), float(e2), float(e3)] == pytest.approx(case["E_sigma_123"], **CLOSE)
        assert [float(tilted.log_power(m, s, d).exp()) for d in (1, 2, 3)] == pytest.approx(
            case["E_sigma_123_thm2_corrected"], **CLOSE
        )
        first = (m + s) * e1 - s * e2  # E[Cσ] and E[C²σ] by Stein's identity (E-N1)
        second = ((m + s) ** 2 + s) * e1 - s * (2 * m + 3 * s) * e2 + 2 * s**2 * e3
        assert [float(first), float(second)] == pytest.approx(
            [case["E_C_sigma"], case["E_C2_sigma"]], **CLOSE
        )
        found = tilted.tilt(m, s, one, tilted.quadrature(65 if case["s"] <= 4 else 201))
        assert [float(found.mean), float(found.variance)] == pytest.approx(
            [case["mean_tilted"], case["var_tilted"]], **CLOSE
        )


def test_golden_tilt(golden):
    names = {
        "exact": "trapezoid",
        "closed_corrected": "thm2",
        "logz": "logz",
        "probit_site": "probit",
    }
    for case in golden["fednp_tilt"]:
        cavity = scalar(case["cavity_mean"], case["cavity_var"], case["f"])
        for key, name in names.items():
            found = tilted.tilt(*cavity, tilted.make_slopes(name))
            assert [float(found.mean), float(found.variance)] == pytest.approx(
                case[key], **CLOSE
            ), (key, case)
        site = tilted.tilt(*cavity, tilted.trapezoid).site
        assert [float(site.precision), float(site.shift)] == pytest.approx(
            case["own_factor_exact_precision_shift"], **CLOSE
        )


def test_golden_projection_and_floor(golden):
    for case in golden["fednp_projection"]:
        found = project_variance(*scalar(case["zs_raw"], case["cavity_var"], case["f"]))
        assert float(found) == pytest.approx(case["zs"], **CLOSE)
    case = golden["fednp_factor_floor"]
    found = site_from_moments(*scalar(*(case["in"][key] for key in ("zm", "zs", "cm", "cs"))))
    assert [float(found.precision), float(found.shift)] == case["precision_shift"]
    proper = site_from_moments(*scalar(0.413242, 0.829231, 0.0, 1.0))
    assert [float(proper.precision), float(proper.shift)] == pytest.approx(
        [0.205936, 0.498343], rel=1e-4
    )


@pytest.mark.parametrize("m", [-6.0, -3.0, -0.4, 1.0, 6.0])
@pytest.mark.parametrize("s", [0.01, 1.0, 4.0, 25.0])
def test_trapezoid_equals_scipy(m, s):
    """|m| ≤ 3, s ≤ 4: 3e-13 of E_d, and a few times that of moments; elsewhere 65 nodes give 1e-4
    of the variance, 401 nodes 1e-9.
    """
    want = by_scipy(m, s, 1.0)
    for nodes, near, far in ((65, 2e-11, 2e-3), (401, 2e-11, 1e-9)):
        found = tilted.tilt(*scalar(m, s, 1.0), tilted.quadrature(nodes))
        error = max(abs(float(found.mean) - want[0]), abs(float(found.variance) - want[1]))
        assert error <= (near if abs(m) <= 3 and s <= 4 else far) * max(1.0, s)


def test_powers_are_as_accurate_as_stated():
    """65 nodes against 2,001: 3e-13 in the usual region, 1.1e-5 on the whole grid."""
    m, s, _ = grid_moments("logz")
    error = torch.stack(
        [
            (a - b).abs()
            for a, b in zip(tilted.powers(m, s), tilted.powers(m, s, nodes=2001), strict=True)
        ]
    ).amax(0)
    assert float(error[(m.abs() <= 3) & (s <= 4)].max()) < 3e-13
    assert float(error.max()) < 1.1e-5


@pytest.mark.slow
def test_theorem_2_has_the_errors_of_e_n4():
    """Corrected constants: E_d within 0.0131, 0.0270, 0.0383; S1, S2, z_s within 1.98, 8.93, 4.73;
    as printed, z_s is negative.
    """
    m, s, closed = grid_moments("thm2")
    _, _, exact = grid_moments("quadrature", nodes=1001)
    worst = [
        float((tilted.log_power(m, s, d).exp() - e).abs().max())
        for d, e in zip((1, 2, 3), tilted.powers(m, s, nodes=1001), strict=True)
    ]
    assert worst == pytest.approx([0.0131, 0.0270, 0.0383], abs=2e-4)
    assert float((closed.mean - exact.mean).abs().max()) == pytest.approx(1.98, abs=0.02)
    assert float((closed.variance - exact.variance).abs().max()) == pytest.approx(4.73, abs=0.03)
    seconds = [one.variance + one.mean.square() for one in (closed, exact)]
    assert float((seconds[0] - seconds[1]).abs().max()) == pytest.approx(8.93, abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_variances_and_factors_stay_in_their_bounds(name):
    """E-N5: 0 < z_s ≤ z_{s,-k} and 0 ≤ λ ≤ f²/4, for every back-end; exact moments need no
    projection.
    """
    m, s, found = grid_moments(name)
    assert bool((found.variance > 0).all())
    assert bool((found.variance <= s).all())
    assert bool((found.site.precision >= 0).all())
    most = tilted.ZETA2 if name == "probit" else 0.25
    assert bool((found.site.precision <= most * (1 + 1e-12)).all())
    if name in ("trapezoid", "logz", "probit"):
        _, g2 = tilted.BACKENDS[name](m, s, torch.ones_like(m))
        slack = 1e-3 if name == "trapezoid" else 0  # 65 nodes at s = 25
        assert bool((g2 < 0).all())
        assert bool((g2 >= -1 / (1 / most + s) - slack).all())
    if name == "logz":
        assert float((found.variance / s).min()) > 0.363


@pytest.mark.parametrize("name", ["trapezoid", "thm2", "logz"])
def test_cavity_times_factor_is_the_tilted_gaussian(name):
    """The factor is what is left of tilted / cavity, without forming that difference; in float32
    too, where it would cancel.
    """
    mean, var, f = (
        torch.tensor(v, dtype=F64)
        for v in ([0.3, -2.0, 6.0, 0.0], [1.0, 0.2, 1.0, 0.5], [0.7, -2.0, 1.0, 0.0])
    )
    found = tilted.tilt(mean, var, f, tilted.make_slopes(name))
    whole = product(from_moments(mean, var), found.site)
    torch.testing.assert_close(whole.mean(), found.mean)
    torch.testing.assert_close(whole.variance(), found.variance)
    single = tilted.tilt(mean.float(), var.float(), f.float(), tilted.make_slopes(name)).site
    torch.testing.assert_close(
        single.precision.double(), found.site.precision, rtol=2e-4, atol=1e-7
    )


def test_small_factors_are_not_lost():
    """E-N5: cavities N(6,1), N(12,1), N(30,1) with f = 1 have λ = 4.0e-3, 1.0e-5, 1.5e-13."""
    site = tilted.tilt(
        torch.tensor([6.0, 12.0, 30.0], dtype=F64),
        torch.ones(3, dtype=F64),
        torch.ones(3, dtype=F64),
        tilted.trapezoid,
    ).site
    assert site.precision.tolist() == pytest.approx([4.0e-3, 1.0e-5, 1.5e-13], rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_f_zero_is_exact_and_f_near_zero_smooth(name):
    """E-N9: no division by f."""
    for f in (0.0, 1e-6, 1e-3, -1e-3):
        found = tilted.tilt(*scalar(0.3, 1.0, f), tilted.make_slopes(name))
        slack = 0 if f == 0 else abs(f)
        assert abs(float(found.mean) - 0.3) <= slack
        assert abs(float(found.variance) - 1.0) <= slack**2
        assert abs(float(found.site.precision)) <= f * f * tilted.curvature(
            tilted.make_slopes(name)
        )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(mean=st.floats(-1e6, 1e6), var=st.floats(1e-12, 1e6), f=st.floats(-1e3, 1e3))
@example(mean=0.0, var=1.0, f=9.281386541964645e-21)
def test_never_nan(name, dtype, mean, var, f):
    """Whatever comes in, moments, factor and gradients are finite and inside their bounds."""
    args = [torch.tensor(value, dtype=dtype) for value in (mean, var, f)]
    args[2] = tilted.bounded(args[2], args[1])
    found = tilted.tilt(*args, tilted.make_slopes(name))
    assert all(bool(x.isfinite()) for x in (found.mean, found.variance, *found.site))
    # two steps of the smallest numbers there are
    least = 2 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert (
        0
        <= float(found.site.precision)
        <= float(args[2] ** 2) * tilted.curvature(tilted.make_slopes(name)) * (1 + 1e-5) + least
    )
    assert 0 < float(found.variance) <= float(args[1])
    slope = grad(lambda f: sum(tilted.tilt(args[0], args[1], f, tilted.make_slopes(name))[:2]))(
        args[2]
    )
    assert bool(slope.isfinite())


@pytest.mark.parametrize("name", NAMES)
def test_stacks_and_gradients(name):
    """vmap equals a loop, and gradients in f equal finite differences."""
    rng = np.random.default_rng(0)
    mean, var, f = (
        torch.tensor(x)
        for x in (rng.normal(size=(5, 3)), rng.uniform(0.1, 1, (5, 3)), rng.normal(size=(5, 3)))
    )
    slopes = tilted.make_slopes(name)
    together = vmap(lambda a, b, c: tilted.tilt(a, b, c, slopes))(mean, var, f)
    for i in range(5):
        alone = tilted.tilt(mean[i], var[i], f[i], slopes)
        torch.testing.assert_close(together.mean[i], alone.mean)
        torch.testing.assert_close(together.site.shift[i], alone.site.shift)

    def total(f):
        found = tilted.tilt(mean, var, f, slopes)
        return (found.mean + 0.3 * found.variance).sum()

    step = 1e-6
    bumps = [
        (total(f + step * unit) - total(f - step * unit)) / (2 * step)
        for unit in torch.eye(15, dtype=F64).reshape(15, 5, 3)
    ]
    torch.testing.assert_close(grad(total)(f).reshape(-1), torch.stack(bumps), rtol=1e-6, atol=1e-8)


def test_the_spread_is_bounded():
    """f² z_{s,-k} ≤ 25 (E-N4)."""
    f, var = torch.tensor([-100.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 4.0])
    assert tilted.bounded(f, var).tolist() == [-5.0, 2.0, 2.5]


def test_unknown_names_and_few_nodes_are_refused():
    with pytest.raises(
        ValueError,
        match="back-end must be one of trapezoid, quadrature, thm2, logz, probit, got 'exact'",
    ):
        tilted.make_slopes("exact")
    with pytest.raises(ValueError, match="nodes must be at least 3, got 2"):
        tilted.quadrature(2)
