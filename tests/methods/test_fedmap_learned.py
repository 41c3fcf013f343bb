"""FedMAP with a learned prior against the exact hierarchical posterior, computed densely."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHARED, assert_same_bits, small_prepared
from oracles.hierarchy import Client, drawn, log_marginal, posterior
from scipy.optimize import minimize
from torch import nn

from bayflower.config import parse
from bayflower.data.federation import ClientData, Federation
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.files import checkpoint, place
from bayflower.files.records import Outcome
from bayflower.files.store import MemoryStore
from bayflower.flower.loop import run_loop
from bayflower.fused.run import run_fused
from bayflower.maths import scoring
from bayflower.rounds import solo
from bayflower.rounds.halves import halves_for
from bayflower.testing import Bench, MethodContract
from bayflower.tree import unflatten

USUAL = {
    "dataset": "given.npz",
    "partition": "iid",
    "task": "regression",
    "model": "linear",
    "dtype": "float64",
    "stacking": "yes",
    "calibration": "off",
    "hyperprior": "flat",
}
VOTES = {"task": "classification", "dtype": "float32", "dataset": "digits"}
SIZES = [1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 9, 12, 14, 17, 20, 24, 30, 35, 40]


def federation(clients: list[Client], new: list[Client] = ()) -> Federation:  # type: ignore[assignment]
    """Return clients that train and are tested on the same samples."""

    def data(number: int, one: Client) -> ClientData:
        x = one.x[:, :-1]  # the network has its own intercept
        return ClientData(number, x, one.y, x, one.y)

    made = [data(number, one) for number, one in enumerate([*clients, *new])]
    train, rest = tuple(made[: len(clients)]), tuple(made[len(clients) :])
    return Federation(train, rest, 1, made[0].x_train.shape[1:], "hierarchy", {}, "")


def result(clients: list[Client], engine: str, new: Any = (), **settings: Any) -> Outcome:
    run = parse("fedmap", {**USUAL, "rounds": 30, "evaluate_every": 30, **settings})
    there = federation(clients, new)
    halves = halves_for(run, there)
    if engine == "fused":
        return run_fused(run, there, halves)
    memory = MemoryStore()
    outcome = run_loop(run, there, halves, store=memory)
    states: dict[int, Any] = {
        client: unflatten(halves.client.state_type, saved[0].state)
        for (_, client), saved in memory.kept.items()
        if saved
    }
    return outcome._replace(client_states=states)


def prior_of(outcome: Outcome) -> tuple[np.ndarray, np.ndarray, float]:
    """Return gamma, its covariance and the noise, in the order of inputs and intercept."""
    params, prior = outcome.server_state.params, outcome.server_state.prior
    gamma = torch.cat([params["head.weight"][0], params["head.bias"]]).numpy()
    order = [*range(1, len(gamma)), 0]  # vectors have the bias first
    if "root" in prior:
        wide = (prior["root"] @ prior["root"].mT).numpy()[np.ix_(order, order)]
    else:
        std = torch.cat([prior["std/head.weight"][0], prior["std/head.bias"]])
        wide = torch.diag(std.square()).numpy()
    return gamma, wide, float(params["task_extra"].exp())


def worst(clients: list[Client], outcome: Outcome) -> tuple[float, float]:
    """Return the largest errors of means, in standard deviations, and of standard deviations."""
    gamma, wide, noise = prior_of(outcome)
    order = [*range(1, len(gamma)), 0]
    means, stds = [], []
    for number, one in enumerate(clients):
        state = outcome.client_states[number]
        mean, cover = posterior(one, gamma, wide, noise)
        found = torch.cat([state.params["head.weight"][0], state.params["head.bias"]]).numpy()
        std = np.sqrt(state.belief["covariance"].numpy().diagonal()[order])
        exact = np.sqrt(cover.diagonal())
        means.append(np.abs(found - mean) / exact)
        stds.append(np.abs(std / exact - 1))
    return float(np.max(means)), float(np.max(stds))


def thought(gamma: np.ndarray, wide: np.ndarray) -> float:
    """Return the log density of a weak hyperprior, of log variances (a covariance: as a client's
    squares), up to a constant; the last parameter is the intercept.
    """
    mean = np.sum(gamma**2 / np.r_[np.ones(len(gamma) - 1), 25.0])
    return -0.5 * float(mean + np.linalg.slogdet(wide)[1] + 0.25 * np.trace(np.linalg.inv(wide)))


def best(clients: list[Client], outcome: Outcome, weak: bool = False) -> float:
    """Return the largest log marginal likelihood near the learned prior, by a search; with a weak
    hyperprior its density is counted in.
    """
    gamma, wide, noise = prior_of(outcome)
    full = "root" in outcome.server_state.prior
    d = len(gamma)
    lower = np.tril_indices(d)

    def value(free: np.ndarray) -> float:
        root = np.zeros((d, d))
        if full:
            root[lower] = free[d:-1]
        else:
            root[np.arange(d), np.arange(d)] = np.exp(np.clip(free[d:-1], -15, 5))
        more = thought(free[:d], root @ root.T) if weak else 0.0
        noise = np.exp(np.clip(free[-1], -15, 5))
        return -log_marginal(clients, free[:d], root @ root.T, noise) - more

    spread = np.linalg.cholesky(wide)[lower] if full else 0.5 * np.log(wide.diagonal())
    start = np.r_[gamma, spread, np.log(noise)]
    return -float(minimize(value, start, method="BFGS", options={"gtol": 1e-6}).fun)


@pytest.mark.parametrize(
    ("engine", "prior"),
    [pytest.param("loop", "learned", marks=pytest.mark.slow), ("fused", "full")],
)
def test_posteriors_are_the_exact_ones_and_the_prior_is_the_most_likely(
    engine: str, prior: str
) -> None:
    rounds = 10 if engine == "loop" else 30
    clients = drawn(0, SIZES, [0.5, 0.4, 0.5], 0.7)  # no variance of the best prior is 0
    outcome = result(clients, engine, prior=prior, target_scale="none", rounds=rounds)
    assert outcome.faults == ()
    mean, std = worst(clients, outcome)
    assert mean < (0.05 if engine == "loop" else 0.01)
    assert std < (0.05 if engine == "loop" else 0.01)
    reached = log_marginal(clients, *prior_of(outcome))
    assert best(clients, outcome) - reached < 1e-3
    # the clients' evidence, reported by the server, is the marginal likelihood
    said = float(outcome.server_state.course["evidence"]) * sum(SIZES)
    assert said == pytest.approx(reached, abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["learned", "full"])
def test_a_weak_hyperprior_gives_the_most_probable_prior(prior: str) -> None:
    """Three clients with few samples each: the prior alone would let gamma run away."""
    clients = drawn(9, [2, 3, 4], [0.5, 0.4, 0.5], 0.7)
    there = {"target_scale": "none", "rounds": 60, "prior": prior}
    outcome = result(clients, "fused", **there, hyperprior="weak")
    gamma, wide, noise = prior_of(outcome)
    reached = log_marginal(clients, gamma, wide, noise) + thought(gamma, wide)
    assert best(clients, outcome, weak=True) - reached < 1e-3
    flat = prior_of(result(clients, "fused", **there))
    assert thought(gamma, wide) > thought(flat[0], flat[1] + 1e-9 * np.eye(3)) + 0.1


def test_a_weak_hyperprior_and_em_stop_at_the_same_place() -> None:
    """Networks too large for Newton's method: steps of EM, parameter by parameter."""
    rng = np.random.default_rng(0)
    theta, gains = rng.normal(0.8, 0.6, 7), np.array([0.2, 1, 5, 0.5, 2, 9, 1.0])
    hyper = scoring.Hyper({"w": torch.tensor([2.0])}, 1.0, 0.5)
    params, prior = {"w": torch.zeros(1)}, {"std/w": torch.ones(1)}
    params, prior = ({k: v.double() for k, v in one.items()} for one in (params, prior))

    def sums(gamma: float, std: float) -> dict[str, torch.Tensor]:
        """Of clients that saw theta with these precisions."""
        share = std**2 * gains / (1 + std**2 * gains)
        z = share * (theta - gamma) / std
        excess = np.sum(z**2 - share)
        found = {"z/w": [z.sum()], "excess/w": [excess]}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}

    count, rate = torch.tensor(7.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    for _ in range(3000):
        total = sums(float(params["w"]), float(prior["std/w"]))
        params, prior = scoring.climbed(params, prior, total, count, rate, rate, hyper)

    def value(free: np.ndarray) -> float:
        gamma, v = free[0], np.exp(2 * free[1])
        wide = v + 1 / gains
        fits = np.sum(np.log(wide) + (theta - gamma) ** 2 / wide)
        return 0.5 * float(fits + gamma**2 / 2 + np.log(v) + 0.25 / v)

    want = minimize(value, np.zeros(2), method="BFGS", options={"gtol": 1e-9}).x
    assert float(params["w"]) == pytest.approx(want[0], abs=1e-5)
    assert float(prior["std/w"].log()) == pytest.approx(want[1], abs=1e-5)


def test_both_engines_learn_the_same_prior() -> None:
    clients = drawn(1, SIZES[::2], [0.3, 0.2, 0.4], 0.7)
    settings = {"prior": "learned", "rounds": 3, "fraction_train": 0.6, "new_client_epochs": 1}
    new = drawn(2, [2, 5], [0.3, 0.2, 0.4], 0.7)
    loop, fused = (result(clients, engine, new, **settings) for engine in ("loop", "fused"))
    assert fused.remarks == ()
    for one, other in zip(prior_of(loop), prior_of(fused), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    for view in ("personal", "global"):
        for client, tally in loop.new_clients[view].items():
            torch.testing.assert_close(tally, fused.new_clients[view][client], rtol=1e-9, atol=1e-9)


def test_no_difference_between_clients_is_found_where_there_is_none() -> None:
    """EM alone would need hundreds of rounds for a variance of 0."""
    clients = drawn(3, [12] * 20, [0.0, 0.0, 0.0], 0.7)
    outcome = result(clients, "fused", prior="learned", target_scale="none")
    gamma, wide, noise = prior_of(outcome)
    pooled = Client(np.concatenate([c.x for c in clients]), np.concatenate([c.y for c in clients]))
    least = np.linalg.lstsq(pooled.x, pooled.y, rcond=None)[0]
    np.testing.assert_allclose(gamma, least, atol=0.05)
    assert best(clients, outcome) - log_marginal(clients, gamma, wide, noise) < 0.01
    assert wide.diagonal().min() < 1e-5


def test_what_no_data_tell_stays_as_it_is() -> None:
    """Adding the same to both logits changes nothing: in float32, too, the prior's mean must not
    drift along it.
    """
    votes = [
        Client(one.x, (one.y > 1).astype(np.int64))
        for one in drawn(8, [30] * 12, [0.5, 0.4, 0.5], 0.7)
    ]
    run = parse("fedmap", {**USUAL, **VOTES, "prior": "learned", "rounds": 12})
    there = federation(votes)._replace(num_classes=2)
    halves = halves_for(run, there)
    outcome = run_fused(run, there, halves)
    for name, value in outcome.server_state.params.items():
        moved = (value - halves.initial[0][name]).sum(0)
        assert float(moved.abs().max()) < 1e-3, name
    assert all(float(std.max()) < 10 for std in outcome.server_state.prior.values())


def test_a_part_of_the_clients_in_each_round_is_enough() -> None:
    clients = drawn(4, SIZES, [0.3, 0.2, 0.4], 0.7)
    outcome = result(
        clients, "fused", prior="learned", target_scale="none", fraction_train=0.4, seed=5
    )
    reached = log_marginal(clients, *prior_of(outcome))
    start = log_marginal(clients, np.zeros(3), np.eye(3), 1.0)
    most = best(clients, outcome)
    assert most - reached < 0.05 * (most - start)


def test_a_new_client_gets_its_exact_posterior_under_the_learned_prior() -> None:
    clients = drawn(6, SIZES, [0.3, 0.2, 0.4], 0.7)
    outcome = result(clients, "fused", prior="learned", target_scale="none", rounds=8)
    run = parse("fedmap", {**USUAL, "prior": "learned", "target_scale": "none"})
    (new,) = drawn(7, [3], [0.3, 0.2, 0.4], 0.7)
    there = federation(clients, [new])
    half = halves_for(run, there).client
    server = halves_for(run, there).server
    broadcast = server.broadcast(outcome.server_state, 99)
    data = solo.samples(there.new_clients[0], torch.device("cpu"), torch.float64)
    fresh = half.init(*halves_for(run, there).initial)
    state = solo.adapt(half, fresh, broadcast, data.train, "new", seed=0, client=99, round=1)
    gamma, wide, noise = prior_of(outcome)
    mean, cover = posterior(new, gamma, wide, noise)
    found = torch.cat([state.params["head.weight"][0], state.params["head.bias"]]).numpy()
    np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-8)
    # its predictions have the posterior's variance and the noise; the global ones the prior's
    for view, center, spread in (("personal", mean, cover), ("global", gamma, wide)):
        said = half.predict(view, state, broadcast, data.test.x, {}).numpy()
        np.testing.assert_allclose(said[:, 0], new.x @ center, rtol=1e-6, atol=1e-8)
        variance = np.einsum("bd,de,be->b", new.x, spread, new.x) + noise**2
        np.testing.assert_allclose(said[:, 1], variance, rtol=1e-6)


def test_what_cannot_be_learned_is_refused_in_one_line() -> None:
    for settings, said in (
        ({"prior": "learned", "start_variance": 0.0}, "start_variance must be positive"),
        ({"prior": "half"}, "prior must be one of fixed, learned, full"),
        ({"hyperprior": "strong"}, "hyperprior must be one of weak, flat"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse("fedmap", {**USUAL, **settings})
    with pytest.raises(ConfigError, match="changes the likelihood"):
        parse("fedmap", {"prior": "learned", "mixup": 0.2})
    with pytest.raises(ConfigError, match="prior=full is for at most 32 parameters"):
        small_prepared("fedmap", prior="full")


def test_a_run_from_before_there_was_a_hyperprior_goes_on_without(tmp_path: Path) -> None:
    usual = {"prior": "learned", "model": "linear", "rounds": 2, "checkpoint_every": 1}
    prepared = small_prepared("fedmap", **usual, hyperprior="flat")
    execute(prepared, out=tmp_path)
    found = checkpoint.read(tmp_path)
    assert found is not None
    config = {key: value for key, value in found.config.items() if key != "hyperprior"}
    checkpoint.write(tmp_path, found._replace(config=config))
    assert checkpoint.to_resume(tmp_path, prepared.run).round == found.round
    weak = small_prepared("fedmap", **usual).run
    assert weak.options.hyperprior == "weak"
    with pytest.raises(ConfigError, match="hyperprior is 'weak' but the run"):
        checkpoint.to_resume(tmp_path, weak)
    assert place.decisive(config)["hyperprior"] == "flat"


def test_a_posterior_that_is_none_is_refused() -> None:
    half = small_prepared("fedmap", prior="learned", model="linear").halves
    state = half.server.init(*half.initial, (0, 1))
    update = half.server.expects(state)
    one = update._replace(num_examples=torch.tensor(3))
    bad = {name: value * 0 + 2 for name, value in update.belief.items()}
    assert "data's share" in half.server.check(state, 0, one._replace(belief=bad))
    good = {name: value * 0 + 0.5 for name, value in update.belief.items()}
    assert half.server.check(state, 0, one._replace(belief=good)) is None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fused", "loop"])
@pytest.mark.parametrize("prior", ["learned", "full"])
def test_radon_by_county_is_the_exact_hierarchy(engine: str, prior: str, tmp_path: Path) -> None:
    """386 counties, some with one house: means within 0.05 posterior standard deviations, standard
    deviations within 5 %, after 30 rounds at most.
    """
    if not (SHARED / "unpack").is_file():
        pytest.skip("the real data sets (../shared/data) are not beside this repository")
    command = [sys.executable, str(SHARED / "unpack"), str(tmp_path), "radon"]
    subprocess.run(command, check=True, capture_output=True)
    with np.load(tmp_path / "radon.npz") as found:
        x, y, client = found["x"], found["y"], found["client"]
    y = (y - y.mean()) / y.std()
    clients = [
        Client(np.c_[x[client == k], np.ones((client == k).sum())], y[client == k])
        for k in np.unique(client)
    ]
    assert len(clients) == 386
    rounds = 30 if engine == "fused" else 10
    outcome = result(clients, engine, prior=prior, target_scale="none", rounds=rounds)
    mean, std = worst(clients, outcome)
    print(f"radon {engine} {prior}: mean {mean:.2g}, std {std:.2g}, prior {prior_of(outcome)}")
    assert mean < 0.05
    assert std < 0.05
    assert best(clients, outcome) - log_marginal(clients, *prior_of(outcome)) < 0.1


def tiny() -> nn.Module:
    """Return a network with 50 parameters, for the images of digits."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 10))


class TestOfNetworks(MethodContract):
    """All promises of the contract for a network with a diagonal posterior."""

    method = "fedmap"
    settings = {"prior": "learned", "start_variance": 0.1}
    returns_one_update = False
    pytestmark = pytest.mark.slow


class TestOfSmallModels(TestOfNetworks):
    """All promises for a model whose posterior is solved for."""

    settings = {"prior": "learned", "model": "test_fedmap_learned:tiny"}

    def test_the_same_seed_gives_the_same_bits(self, bench: Bench) -> None:
        """Nothing is drawn: another round gives the same bits too."""
        client = bench.clients[0]
        assert_same_bits(bench.train(client).update, bench.trained[client].update)
        assert_same_bits(bench.train(client, round=2).update, bench.trained[client].update)
