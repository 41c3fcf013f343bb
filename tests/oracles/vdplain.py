"""MetaVD the slow way: its halves on numbers of a test's own, and its rounds in plain torch."""

from __future__ import annotations

import torch
from conftest import worst_difference
from metaplain import slopes
from torch import nn

from bayflower.data import batches
from bayflower.maths.exact import Total
from bayflower.networks.model import Anatomy
from bayflower.rounds import solo
from bayflower.strategies.metavd import Config, Server, Update
from bayflower.tree import stack

LR, INNER, DELTA, ALPHA_RATE, KL, RAMP, FLOOR, ETA, MU = (
    0.05,
    0.3,
    0.05,
    5.0,
    3.0,
    3,
    1e-3,
    0.7,
    0.3,
)
BASES = ["fedavg", "reptile", "maml", "perfedavg"]
LAYER = "base.3.weight"
SETTINGS = {
    "optimizer": "sgd",
    "lr": LR,
    "dtype": "float64",
    "server_lr": ETA,
    "server_momentum": MU,
    "inner_lr": INNER,
    "adapt_steps": 1,
    "hf_delta": DELTA,
    "alpha_rate": ALPHA_RATE,
    "kl_weight": KL,
    "ramp_rounds": RAMP,
    "variance_floor": FLOOR,
    "log_alpha_start": -1.0,
    "hyper_reach": 0,
}


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def server(**config) -> Server:
    return Server(
        Config(**config),
        Anatomy(("w.weight", "head.weight"), (), frozenset(), frozenset({"head.weight"})),
    )


def replied(half: Server, state, thetas, log_alphas, counts, masks=None):
    """The state after clients 0, 1, … reply with these layers and log alphas."""
    total, updates = Total(), []
    for client, (theta, log_alpha, count) in enumerate(
        zip(thetas, log_alphas, counts, strict=True)
    ):
        step = log_alpha - half.log_alpha(state, client)
        mask = {} if masks is None else {"layer": masks[client]}
        updates.append(
            Update(
                torch.tensor(count),
                {"w.weight": theta, "head.weight": torch.ones(1, 1).double()},
                {},
                step,
                mask,
            )
        )
        total.add(half.statistic(state, client, updates[-1]))
    fast = half.total(state, tuple(range(len(updates))), stack(updates))
    assert worst_difference(fast, total.value()) < 1e-12
    return half.finalise(state, total.value())


# -- the oracle of whole rounds ------------------------------------------------------------------
def plain_loss(p: dict, step, log_alpha, beta: float, x, y, noise):
    """[eq. 4] of the perceptron, layer by layer."""
    x = torch.relu(x.flatten(1) @ p["base.1.weight"].T + p["base.1.bias"])
    now = (log_alpha + step).clamp(-8.5, 8.5)
    mean = x @ p[LAYER].T + p["base.3.bias"]
    variance = (x**2) @ (now.exp() * p[LAYER] ** 2).T
    x = torch.relu(mean + (variance + 1e-300).sqrt() * noise[: len(x)])
    nll = nn.functional.cross_entropy(x @ p["head.weight"].T + p["head.bias"], y)
    return nll + beta * (0.5 * torch.log(1 + 1 / now.exp())).mean()


def plain_direction(base: str, p: dict, step, loss, groups, noise) -> dict:
    """The direction of one step for theta and log alpha, on leaves that need a gradient."""
    both = {**p, "step": step}
    if base in ("fedavg", "reptile"):
        return slopes(loss(p, step, *groups[0], noise), both, False)
    exact = base == "maml"
    inner = slopes(loss(p, step, *groups[0], noise[0]), p, exact)
    fast = {name: p[name] - INNER * inner[name] for name in p}
    if exact:
        return slopes(loss(fast, step, *groups[1], noise[1]), both, False)
    fast = {name: value.detach().requires_grad_() for name, value in fast.items()}
    g = slopes(loss(fast, step, *groups[1], noise[1]), {**fast, "step": step}, False)
    length = torch.cat([g[name].reshape(-1) for name in p]).norm()
    ends = []
    for sign in (1, -1):
        there = {
            name: (p[name] + sign * DELTA * g[name] / length).detach().requires_grad_()
            for name in p
        }
        ends.append(slopes(loss(there, step, *groups[0], noise[0]), {**there, "step": step}, False))
    return {
        name: g[name] - INNER * (ends[0][name] - ends[1][name]) * length / (2 * DELTA) for name in g
    }


def as_module(psi: dict) -> nn.Sequential:
    sizes = [psi["0.weight"].shape[::-1], psi["1.weight"].shape[::-1], psi["2.weight"].shape[::-1]]
    parts = [nn.Linear(*size) for size in sizes]
    module = nn.Sequential(
        parts[0], nn.LeakyReLU(0.1), parts[1], nn.LeakyReLU(0.1), parts[2]
    ).double()
    module.load_state_dict({f"{2 * int(name[0])}{name[1:]}": value for name, value in psi.items()})
    return module


def assert_adapts(prepared, state, theta: dict) -> None:
    """Assert that before a test theta takes a step down [eq. 4], its noise included, and alpha
    none; on fedavg nothing moves.
    """
    half, client, _, (params, buffers) = prepared.halves
    data = prepared.federation.clients[1]
    samples = solo.samples(data, torch.device("cpu"), torch.float64).train
    broadcast = half.broadcast(state, data.client)
    keys = {"seed": 0, "client": data.client, "round": 2}
    got = solo.adapt(client, client.init(params, buffers), broadcast, samples, "finetune", **keys)
    if prepared.run.options.base == "fedavg":
        assert not got.tuned
        return
    (phase,) = client.phases("finetune")
    assert phase.optimizer.lr == (
        INNER if prepared.run.options.base in ("maml", "perfedavg") else LR
    )
    ((rows,),) = batches.plan(len(samples.y), phase, **keys, purpose="finetune", coupled=False)
    noise = batches.noise(
        client.noise(phase.name, phase.batch_size),
        **keys,
        stage="finetune/adapt",
        step=0,
        dtype=torch.float64,
    )["output"]
    theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
    loss = plain_loss(
        theta, torch.zeros(()), broadcast.log_alpha, 1.0, samples.x[rows], samples.y[rows], noise
    )
    for name, slope in slopes(loss, theta, False).items():
        torch.testing.assert_close(
            got.tuned[name],
            (theta[name] - phase.optimizer.lr * slope).detach(),
            rtol=1e-6,
            atol=1e-9,
        )
