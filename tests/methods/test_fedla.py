"""FedLA against two rounds in plain torch, with the Fisher information sample by sample and class
by class.
"""

from __future__ import annotations

import pytest
import torch
from conftest import small
from plainsteps import assert_equal, both, half_rounds, numbers, plain_sgd

from bayflower.errors import ConfigError
from bayflower.strategies.fedla import Config, Server, Update


def fisher(module, data, kind):
    """The mean over samples of Σ_c w_c (∂ log p_c)², where w is p (fisher) or the true label
    (empirical).
    """
    found = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    for one, label in zip(data.x, data.y, strict=True):
        logs = torch.log_softmax(module(one[None])[0], 0)
        for c in range(len(logs)):
            grads = torch.autograd.grad(logs[c], list(module.parameters()), retain_graph=True)
            share = logs[c].detach().exp() if kind == "fisher" else float(c == int(label))
            for (name, _), grad in zip(module.named_parameters(), grads, strict=True):
                found[name] += share * grad**2 / len(data.x)
    return found


@pytest.mark.parametrize("kind", ["fisher", pytest.param("empirical", marks=pytest.mark.slow)])
def test_two_rounds_equal_plain_torch(kind):
    """[eq. 1], [eq. 2], [eq. 3], [eq. 4] with loops."""
    weight, start, memory = 0.7, 0.2, 0.6
    given = {"la_weight": weight, "la_start": start, "memory": memory, "curvature": kind}
    case = both("fedla", **given, local_epochs=1, keep=0.1)
    mu, precision = (
        case.start,
        {name: torch.full_like(value, start) for name, value in case.start.items()},
    )
    for round, (state, _, updates) in enumerate(half_rounds(case, 2), start=1):
        sums, shifts, count = dict.fromkeys(mu, 0.0), dict.fromkeys(mu, 0.0), 0
        for client in case.clients:

            def prior(module, x, mu=mu, precision=precision):
                return (
                    weight
                    / 2
                    * sum(
                        (precision[n] * (v - mu[n]) ** 2).sum()
                        for n, v in module.named_parameters()
                    )
                )

            module, _ = plain_sgd(case, mu, client, round, prior)
            found = fisher(module, case.samples[client], kind)
            mine = {
                name: (memory * precision[name] + value).clamp(min=1e-6)
                for name, value in found.items()
            }
            assert_equal(updates[client].params, numbers(module))
            assert_equal(updates[client].precision, mine)
            size = len(case.samples[client].y)
            count += size
            for name, value in numbers(module).items():
                sums[name] = sums[name] + size * mine[name]
                shifts[name] = shifts[name] + size * mine[name] * value
        mu = {name: shifts[name] / sums[name] for name in mu}
        precision = {name: value / count for name, value in sums.items()}
        assert_equal(state.params, mu)
        assert_equal(state.precision, precision)


def test_the_sketch_is_near_the_exact_precision():
    """One round of each: the same training, so the same weights; precisions that differ, but whose
    sum over weights is nearly the same.
    """
    exact, sketch = (
        half_rounds(both("fedla", curvature=kind, memory=0.0, local_epochs=1), 1)
        for kind in ("fisher", "sketch")
    )
    for (_, _, mine), (_, _, yours) in zip(exact, sketch, strict=True):
        for client in mine:
            assert_equal(yours[client].params, mine[client].params)
            whole, near = (
                torch.cat([value.reshape(-1) for value in one[client].precision.values()])
                for one in (mine, yours)
            )
            assert not torch.allclose(whole, near, rtol=0.01)
            assert float(near.sum()) == pytest.approx(float(whole.sum()), rel=0.25)


def test_a_precision_that_is_not_positive_is_refused():
    half = Server(Config(), None)
    state = half.init({"w": torch.zeros(2)}, {}, ())
    reply = Update(torch.tensor(3), {"w": torch.zeros(2)}, {}, {"w": torch.tensor([1.0, 0.0])})
    assert half.check(state, 0, reply) == "precision must be positive, got 0"
    assert "num_examples" in half.check(
        state, 0, reply._replace(num_examples=torch.tensor(0), precision={"w": torch.ones(2)})
    )


@pytest.mark.parametrize(
    ("key", "value"), [("la_weight", -1), ("la_start", 0), ("memory", 1.5), ("curvature", "kfac")]
)
def test_settings_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"{key} must"):
        small("fedla", **{key: value})
