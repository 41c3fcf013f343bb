"""FedPA against a round in plain torch, and a dense inverse."""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, mean, plain_sgd

from bayflower.clients.fedpa import delta
from bayflower.errors import ConfigError


def flat(named, order):
    return torch.cat([named[name].reshape(-1) for name in order])


def test_two_rounds_equal_plain_torch():
    """[eq. 1], [eq. 2], [eq. 3]: samples as means of iterates; Σ Δ is theta − mean, which only Δ =
    Σ⁻¹ (theta − mean) solves.
    """
    rho, number, length = 0.4, 3, 4
    case = both("fedpa", num_samples=number, sample_steps=length, shrinkage=rho)
    theta, order = case.start, list(case.start)
    for round, (state, _, updates) in enumerate(half_rounds(case, 2), start=1):
        sent = {}
        for client in case.clients:
            iterates: list[torch.Tensor] = []

            def keep(phase, module, iterates=iterates):
                if phase == "sample":
                    iterates.append(
                        flat({n: v.detach() for n, v in module.named_parameters()}, order)
                    )

            plain_sgd(case, theta, client, round, lambda module, x: 0.0, keep)
            samples = torch.stack(iterates).reshape(number, length, -1).mean(1)
            weight, centred = 1 / (1 + (number - 1) * rho), samples - samples.mean(0)
            sent[client] = updates[client].params
            moved = flat(theta, order) - flat(sent[client], order)
            # Σ Δ
            applied = weight * moved + (1 - weight) * centred.T @ (centred @ moved) / (number - 1)
            torch.testing.assert_close(
                applied, flat(theta, order) - samples.mean(0), rtol=1e-8, atol=1e-11
            )
        theta = mean(case, sent)
        assert_equal(state.params, theta)


def test_the_delta_equals_a_dense_inverse():
    """[eq. 2] and [eq. 3] with the matrix formed and inverted, over two tensors."""
    generator = torch.Generator().manual_seed(0)
    samples = {
        name: torch.randn(5, *shape, dtype=torch.float64, generator=generator)
        for name, shape in (("a", (2, 3)), ("b", (4,)))
    }
    anchor = {
        name: torch.randn(value.shape[1:], dtype=torch.float64, generator=generator)
        for name, value in samples.items()
    }
    rows = torch.cat([value.reshape(5, -1) for value in samples.values()], 1)
    weight = 1 / (1 + 4 * 0.3)
    sigma = weight * torch.eye(10, dtype=torch.float64) + (1 - weight) * torch.cov(rows.T)
    want = torch.linalg.inv(sigma) @ (flat(anchor, ["a", "b"]) - rows.mean(0))
    torch.testing.assert_close(flat(delta(anchor, samples, 0.3), ["a", "b"]), want)


def test_the_delta_trusts_the_samples_where_they_agree():
    """[eq. 3]: along a direction of large sample variance the delta is small; across it, the
    distance over rho_ell.
    """
    samples = {"w": torch.tensor([[-3.0, 1.0], [0.0, 1.0], [3.0, 1.0]], dtype=torch.float64)}
    found = delta({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}, samples, shrinkage=1.0)["w"]
    rho = 1 / 3
    assert found.tolist() == pytest.approx([1 / (rho + (1 - rho) * 9), 1 / rho])


def test_one_sample_is_averaged_sgd():
    anchor, samples = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([[0.5, 4.0]])}
    assert delta(anchor, samples, 0.3)["w"].tolist() == pytest.approx([0.5, -2.0])


@pytest.mark.parametrize(
    ("key", "value"), [("num_samples", 0), ("sample_steps", 0), ("shrinkage", -0.1)]
)
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"{key} must"):
        small("fedpa", **{key: value})
