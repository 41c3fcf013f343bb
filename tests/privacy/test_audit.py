"""An attack on whole private trainings: canaries in every round; an attacker sees all models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.fused.run import FusedRun
from bayflower.privacy import accounting
from bayflower.privacy.budget import Budget

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.slow
HONEST, ROUNDS, NOISE, DELTA = 6, 5, 2.0, 1e-5
SETTINGS = {
    "dataset": "digits",
    "model": "linear",
    "partition": "iid",
    "num_clients": HONEST + 30,
    "rounds": ROUNDS,
    "local_epochs": 1,
    "calibration": "off",
    "evaluate_every": 0,
    "device": "cpu",
    "dp": "client",
    "dp_clip": 0.5,
    "dp_noise": NOISE,
    "dp_epsilon": 900.0,
    "dp_delta": DELTA,
}


def trained(ready, there, dead):
    """Return how far the model moved along each canary's coordinate in each round of a training,
    times the number of clients. Client HONEST + k sends a canary along coordinate k in every round
    that it is chosen for, if `there[k]`; otherwise it sends what it was sent.
    """
    run = FusedRun(ready.run, ready.federation, ready.halves)
    train = run.engine.train
    name = next(one for one in run.state.params if run.state.params[one].ndim == 2)
    people, moved = run.server.mechanism.people, []

    def with_canaries(chunk, message, round):
        replies = train(chunk, message, round)
        updates = replies.updates
        for place, client in enumerate(replies.clients):
            canary = client - HONEST
            if canary < 0:
                continue
            for one, sent in message.params.items():
                updates.params[one][place] = sent
            if there[canary]:
                updates.params[name][place].view(-1)[dead[canary]] += 50.0  # cut to the clip
        return replies

    run.engine.train = with_canaries
    for round in range(1, ROUNDS + 1):
        before = run.state.params[name].reshape(-1)[dead].double()
        run.round(round)
        after = run.state.params[name].reshape(-1)[dead].double()
        moved.append(((after - before) * people).numpy())
    return np.array(moved), run


def dead_weights(ready):
    """Return the coordinates of weights of pixels that are 0 in every image: nobody else moves
    them, so the attacker knows what all others add there.
    """
    pixels = np.concatenate(
        [one.x_train.reshape(len(one.x_train), -1) for one in ready.federation.clients]
    )
    columns = np.flatnonzero((pixels == 0).all(0))
    assert len(columns) == 3
    size = pixels.shape[1]
    return torch.tensor([row * size + column for row in range(10) for column in columns])


def proved(scores, there, delta):
    """Return the greatest ε that the scores prove with 95 % confidence: an attacker says "it took
    part" above some score (Clopper and Pearson, both kinds of error, shared out to all thresholds).
    """
    inside, outside = scores[there], scores[~there]
    places = np.quantile(scores, np.linspace(0.005, 0.995, 25))
    level, best = 0.05 / (4 * len(places)), 0.0
    for place in places:
        hits, alarms = (inside > place).sum(), (outside > place).sum()
        for right, of, wrong, others in (
            (hits, len(inside), alarms, len(outside)),
            (len(outside) - alarms, len(outside), len(inside) - hits, len(inside)),
        ):
            least = stats.beta.ppf(level, right, of - right + 1) if right else 0.0
            most = stats.beta.ppf(1 - level, wrong + 1, others - wrong) if wrong < others else 1.0
            if least > delta:
                best = max(best, math.log((least - delta) / most))
    return best


def attack(trainings, **settings):
    """Return (the ε that is proved, the ε that is accounted for) of so many trainings."""
    ready = prepare(parse("fedavg", {**SETTINGS, **settings}), "fused")
    dead, draw = dead_weights(ready), np.random.default_rng(5)
    scores, presence, run = [], [], None
    for _ in range(trainings):
        there = draw.random(30) < 0.5
        moved, run = trained(ready, there, dead)
        scores.append(moved.sum(0))
        presence.append(there)
    return proved(np.concatenate(scores), np.concatenate(presence), DELTA), run.budget.spent


@pytest.mark.parametrize(
    "settings",
    [{}, {"fraction_train": 0.5}, {"secure": "sum"}],
    ids=["server", "sampled", "secure"],
)
def test_whole_trainings_prove_no_more_than_is_accounted_for(settings):
    """100 trainings with 30 canaries each: about 1,500 take part and 1,500 do not."""
    found, spent = attack(100, **settings)
    share = settings.get("fraction_train", 1.0)
    assert spent == pytest.approx(accounting.epsilon(NOISE, ROUNDS, DELTA, share))
    assert 0.3 < found <= spent


def test_the_attack_sees_a_training_with_too_little_noise(monkeypatch):
    """What is accounted for is the noise that was asked for; a sixth of it is added."""
    mechanism = Budget.mechanism

    def weak(self, *known):
        made = mechanism(self, *known)
        return made._replace(noise=made.noise / 6)

    monkeypatch.setattr(Budget, "mechanism", weak)
    found, spent = attack(100)
    assert found > spent
