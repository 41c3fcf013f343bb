"""Radon by county: FedMAP's posterior at the learned prior against the exact one, and against
samplers of the whole hierarchy.

    y = intercept_c + slope_c · (floor, uranium) + noise;  county's parameters θ_c ~ N(gamma, D)

* exact: θ_c given the learned gamma, D and noise, solved densely in float64 from the county's rows.
* gibbs, nuts: gamma, D and noise are sampled too, with flat priors on gamma and the standard
  deviations of D, and 1/s² on the squared noise. `nuts` (numpyro: pip install numpyro) integrates
  the counties out, so NUTS moves 7 numbers. Moments of θ_c are averages over the exact
  conditional distributions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from bayflower.config import parse
from bayflower.data.federation import ClientData, Federation
from bayflower.files.store import MemoryStore
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.rounds.halves import halves_for
from bayflower.tree import unflatten

NAMES = ("1", "floor", "uranium")  # the order of parameter names: bias, weight
USUAL = {"dataset": "given.npz", "partition": "iid", "model": "linear", "calibration": "off"}
USUAL |= {"task": "regression", "target_scale": "none", "dtype": "float64", "device": "cpu"}
ROUNDS = {"fused": 15, "loop": 10}
DRAWS, BURN = 3000, 500  # of Gibbs
NUTS_DRAWS, NUTS_WARMUP = 2000, 500


class Hierarchy(NamedTuple):
    """Radon, standardised, with the sums of each county."""

    clients: list[ClientData]
    design: np.ndarray  # (N, 3)
    y: np.ndarray
    index: np.ndarray  # the county of each row
    gram: np.ndarray  # (counties, 3, 3)
    right: np.ndarray  # (counties, 3)


class Learned(NamedTuple):
    """What FedMAP with a learned prior says."""

    gamma: np.ndarray
    wide: np.ndarray  # (3, 3)
    noise: float
    mean: np.ndarray  # (counties, 3)
    std: np.ndarray
    seconds: float


def hierarchy(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Hierarchy:
    """Return the data of all counties, which train on all of their rows."""
    x, y = x.astype(float), (y - y.mean()) / y.std()
    known, index = np.unique(owner, return_inverse=True)
    rows = [owner == c for c in known]
    clients = [ClientData(k, x[r], y[r], x[r][:1], y[r][:1]) for k, r in enumerate(rows)]
    design = np.c_[np.ones(len(x)), x]
    gram = np.stack([design[r].T @ design[r] for r in rows])
    right = np.stack([design[r].T @ y[r] for r in rows])
    return Hierarchy(clients, design, y, index, gram, right)


def learned(data: Hierarchy, engine: str = "fused", prior: str = "learned") -> Learned:
    """Run FedMAP and return its prior and the posteriors of all counties."""
    run = parse(
        "fedmap",
        {**USUAL, "prior": prior, "rounds": ROUNDS[engine], "evaluate_every": 1000}
        | {"stacking": "yes"},
    )
    there = Federation(tuple(data.clients), (), 1, (2,), "given", {}, "")
    halves = halves_for(run, there)
    start = time.process_time()
    states: dict[int, Any]
    if engine == "fused":
        found = run_fused(run, there, halves)
        states = dict(found.client_states)
    else:
        memory = MemoryStore()
        found = run_loop(run, there, halves, store=memory)
        states = {
            client: unflatten(halves.client.state_type, saved[0].state)
            for (_, client), saved in memory.kept.items()
            if saved
        }
    seconds = time.process_time() - start
    params, table = found.server_state.params, found.server_state.prior
    if "root" in table:
        wide = (table["root"] @ table["root"].mT).numpy()
    else:
        std = np.r_[table["std/head.bias"].numpy(), table["std/head.weight"][0].numpy()]
        wide = np.diag(std**2)
    every = [states[k] for k in range(len(data.clients))]
    return Learned(
        np.r_[params["head.bias"].numpy(), params["head.weight"][0].numpy()],
        wide,
        float(params["task_extra"].exp()),
        np.stack([[float(s.params["head.bias"]), *s.params["head.weight"][0]] for s in every]),
        np.stack([s.belief["covariance"].diagonal().sqrt().numpy() for s in every]),
        seconds,
    )


def line(who: str, data: Hierarchy, **more: Any) -> dict[str, Any]:
    """Return a line of the results."""
    return {"data": "radon", "who": who, "seed": 0, "counties": len(data.clients), **more}


# -- at the learned prior --------------------------------------------------------------------------
def exact(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Iterator[dict[str, Any]]:
    """Give the largest errors over all counties and parameters, of both engines and priors."""
    data = hierarchy(x, y, owner)
    for engine in ("fused", "loop"):
        for prior in ("learned", "full"):
            ours = learned(data, engine, prior)
            inverse = np.linalg.inv(ours.wide)
            away, ratio = [], []
            for k in range(len(data.clients)):
                rows = data.design[data.index == k]
                cover = np.linalg.inv(rows.T @ rows / ours.noise**2 + inverse)
                right = rows.T @ data.y[data.index == k] / ours.noise**2
                std = np.sqrt(cover.diagonal())
                away.append(np.abs(ours.mean[k] - cover @ (right + inverse @ ours.gamma)) / std)
                ratio.append(np.abs(ours.std[k] / std - 1))
            found = {"mean": float(np.max(away)), "std": float(np.max(ratio))}
            more = {"engine": engine, "prior": prior, "rounds": ROUNDS[engine]}
            yield line("exact", data, **more, worst=found, seconds=ours.seconds)


# -- with the prior's own uncertainty --------------------------------------------------------------
def given(
    data: Hierarchy, gamma: np.ndarray, variance: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of every county's parameters given the prior and the noise."""
    cover = np.linalg.inv(data.gram / noise + np.diag(1 / variance))
    return np.einsum("cde,ce->cd", cover, data.right / noise + gamma / variance), cover


def compared(who: str, data: Hierarchy, priors: np.ndarray, **more: Any) -> dict[str, Any]:
    """Return the line that compares FedMAP with the counties' posterior over drawn priors (draws,
    7): mean of the conditional means, and their variance plus the mean of conditional variances.
    """
    ours = learned(data)
    each = [given(data, one[:3], one[3:6] ** 2, float(one[6]) ** 2) for one in priors]
    means = np.stack([m for m, _ in each])
    inner = np.mean([v.diagonal(axis1=1, axis2=2) for _, v in each], 0)
    mean, std = means.mean(0), np.sqrt(means.var(0) + inner)
    away, ratio = np.abs(ours.mean - mean) / std, ours.std / std
    return line(
        who,
        data,
        rounds=ROUNDS["fused"],
        draws=len(priors),
        seconds=ours.seconds,
        away=[float(np.quantile(away, q)) for q in (0.5, 0.95, 1.0)],
        ratio=[float(np.quantile(ratio, q)) for q in (0.0, 0.05, 0.5, 0.95, 1.0)],
        names=[*(f"gamma {n}" for n in NAMES), *(f"std {n}" for n in NAMES), "noise"],
        learned=[*ours.gamma.tolist(), *np.sqrt(ours.wide.diagonal()).tolist(), ours.noise],
        sampled=priors.mean(0).tolist(),
        sampled_std=priors.std(0).tolist(),
        **more,
    )


def gibbs(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Iterator[dict[str, Any]]:
    """Sample all by Gibbs, exact for this model."""
    data = hierarchy(x, y, owner)
    draw, (count, d) = np.random.default_rng(0), data.right.shape
    gamma, variance, noise = np.zeros(d), np.ones(d), 1.0
    priors = []
    for step in range(DRAWS + BURN):
        mean, cover = given(data, gamma, variance, noise)
        swing = draw.normal(size=(count, d, 1))
        theta = mean + (np.linalg.cholesky(cover) @ swing)[..., 0]
        gamma = theta.mean(0) + draw.normal(size=d) * np.sqrt(variance / count)
        variance = np.square(theta - gamma).sum(0) / draw.chisquare(count - 1, size=d)
        left = data.y - (data.design * theta[data.index]).sum(1)
        noise = float(np.square(left).sum() / draw.chisquare(len(data.y)))
        if step >= BURN:
            priors.append([*gamma, *np.sqrt(variance), np.sqrt(noise)])
    yield compared("gibbs", data, np.array(priors))


def nuts(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Iterator[dict[str, Any]]:
    """Sample gamma, D and noise by NUTS with the counties integrated out.

    log p(y_c) = −½ [n log s² + log|I + D^½ G D^½ / s²| + (r'r − b' (G + s² D⁻¹)⁻¹ b) / s²] with
    r = y_c − X gamma, b = X'r, G = X'X
    """
    try:
        import jax
        import numpyro
    except ImportError:
        raise SystemExit("NUTS needs numpyro: pip install numpyro") from None
    numpyro.set_platform("cpu")
    numpyro.enable_x64()
    jnp = jax.numpy
    data = hierarchy(x, y, owner)
    gram, right = jnp.asarray(data.gram), jnp.asarray(data.right)
    total, rows = float(np.square(data.y).sum()), len(data.y)

    def potential(at: dict[str, Any]) -> Any:
        gamma, log_std, log_noise = at["gamma"], at["log_std"], at["log_noise"]
        noise, std = jnp.exp(2 * log_noise), jnp.exp(log_std)
        seen = jnp.einsum("cde,e->cd", gram, gamma)
        b = right - seen
        # r'r = y'y − 2 gamma'X'y + gamma'G gamma, summed over counties
        residual = total - (2 * right - seen).sum(0) @ gamma
        inner = jnp.eye(3) + std[:, None] * gram * std / noise
        root = jnp.linalg.cholesky(inner)
        half = jax.vmap(lambda r, v: jax.scipy.linalg.solve_triangular(r, v, lower=True))(
            root, b * std
        )
        determinant = 2 * jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum()
        quadratic = (residual - (half**2).sum() / noise) / noise
        likelihood = -0.5 * (rows * 2 * log_noise + determinant + quadratic)
        return -(likelihood + log_std.sum())  # flat in std; 1/s² on s² is flat in log s

    start = time.process_time()
    kernel = numpyro.infer.NUTS(potential_fn=potential)
    chain = numpyro.infer.MCMC(
        kernel, num_warmup=NUTS_WARMUP, num_samples=NUTS_DRAWS, progress_bar=False
    )
    first = {"gamma": jnp.zeros(3), "log_std": jnp.zeros(3) - 1.0, "log_noise": jnp.zeros(())}
    chain.run(jax.random.PRNGKey(0), init_params=first, extra_fields=("diverging",))
    seconds = time.process_time() - start
    by_chain = {k: np.asarray(v) for k, v in chain.get_samples(group_by_chain=True).items()}
    checks = numpyro.diagnostics.summary(by_chain)
    size = min(float(np.min(one["n_eff"])) for one in checks.values())
    split = max(float(np.max(one["r_hat"])) for one in checks.values())
    divergent = int(np.asarray(chain.get_extra_fields()["diverging"]).sum())
    kept = {k: np.asarray(v) for k, v in chain.get_samples().items()}
    priors = np.c_[kept["gamma"], np.exp(kept["log_std"]), np.exp(kept["log_noise"])]
    about = (
        f"numpyro {numpyro.__version__}, one chain, {NUTS_WARMUP} steps of warm-up, float64, seed "
        f"0, {seconds:.0f} CPU seconds: {divergent} divergences, smallest effective sample size "
        f"{size:.0f}, largest split R-hat {split:.3f}. The counties are integrated out of the "
        "chain; their moments are averages of the exact conditional ones."
    )
    yield compared("nuts", data, priors, about=about)
