"""A client that opposes the others is left out only if it stands apart from them: honest clients of
a model of few numbers oppose each other, and none of them does.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bayflower.rounds import gate
from bayflower.rounds.gate import Gate

ROUNDS = 15


def groups(means, gap, wider):
    """Oracle: the groups of lowest clients that end at a gap, one size after another."""
    order = sorted(means, key=lambda one: (means[one], one))
    found = []
    for size in range(1, (len(order) - 1) // 3 + 1):
        above = [means[one] for one in order[size:]]
        widest = max(b - a for a, b in pairwise(above))
        if above[0] - means[order[size - 1]] > max(gap, wider * widest):
            found.append(set(order[:size]))
    return found


def left_out(means, rounds, before):
    """Oracle: who is left out, client by client, from the definition in gate.py."""
    values = list(means.values())
    m, q = np.median(values), np.quantile(values, 0.25)
    s = np.median([abs(one - m) for one in values])
    apart, still = groups(means, gate.GAP, gate.WIDER), groups(means, gate.STILL, 0)
    out = set()
    for client, a in means.items():
        if client in before:
            suspect = a < gate.AGAIN and m - a > gate.BACK
            stands = any(client in one for one in still) or m - a > gate.TAIL_STILL * (m - q)
        else:
            suspect = a < gate.EARLY and m - a > gate.AWAY
            if rounds >= gate.LEAST:
                suspect |= a < gate.AGAINST and m - a > gate.APART
            if rounds >= gate.LATER:
                suspect |= a < gate.BELOW and m - a > max(gate.NEAR, gate.TIMES * s)
            stands = any(client in one for one in apart) or m - a > gate.TAIL * (m - q)
        if suspect and stands:
            out.add(client)
    if rounds >= gate.LEAST:
        for one in apart:
            if len(one) > 1 and all(means[client] < gate.UNDER for client in one):
                out |= one
    return out


def test_who_is_left_out_is_what_the_definition_says():
    rng, seen = np.random.default_rng(0), []
    for _ in range(2000):
        number, low = int(rng.integers(8, 40)), int(rng.integers(0, 6))
        values = rng.normal(rng.choice([0.1, 0.3, 0.5]), rng.choice([0.05, 0.15, 0.3]), size=number)
        values[:low] = rng.uniform(-0.7, -0.1, size=low)
        means = dict(enumerate(values.clip(-1, 1).tolist()))
        before = set(rng.choice(number, size=int(rng.integers(0, 4)), replace=False).tolist())
        rounds = int(rng.choice([1, 2, 3, 5, 8]))
        before = before if rounds > 1 else set()
        found = Gate()
        found.learn({client: [mean] * rounds for client, mean in means.items()})
        found.out = dict.fromkeys(before, 0.0)
        found.judge()
        wanted = left_out({c: found.table.mean(c) for c in means}, rounds, before)
        if rounds == 1:
            wanted = set()
        assert set(found.out) == wanted
        seen.append(len(wanted))
    assert 200 < sum(one > 0 for one in seen) < 1800


def federation(size, clients, liars, seed, unlike):
    """Return how many updates of honest clients, and of liars, are left out over all rounds, where
    each client goes a step of length 1 towards its own optimum and the server takes the mean.
    """
    rng, found = np.random.default_rng(seed), Gate()
    optima = rng.standard_normal(size) * 6 + unlike * rng.standard_normal((clients, size))
    model, gone = np.zeros(size), {True: 0, False: 0}
    spread = np.zeros((clients, gate.SIZE))
    for _ in range(ROUNDS):
        steps = gate.unit(optima - model)
        steps[:liars] *= -1
        spread[:, :size] = steps
        found.now = dict(enumerate(spread.copy()))
        out = set(found.out)
        for client in out:
            gone[client < liars] += 1
        model += np.mean([steps[one] for one in range(clients) if one not in out], 0)
        found.close(out)
    return gone[False], gone[True]


def test_honest_clients_of_a_model_of_four_numbers_are_hardly_ever_left_out():
    """As counties on radon: their optima lie around the mean, and each opposes many others. 4.5 %
    of their updates were left out before clients had to stand apart.
    """
    honest = sum(federation(4, 66, 0, seed, 4.0)[0] for seed in range(6))
    assert honest <= 0.015 * 66 * ROUNDS * 6


@pytest.mark.parametrize("seed", range(3))
def test_liars_among_many_clients_are_left_out(seed):
    """Eight of forty turn their changes round: from the third round on they are left out, also
    where honest clients fill the gap below the others.
    """
    honest, liars = federation(400, 40, 8, seed, 2.0)
    assert honest == 0
    assert liars >= 8 * (ROUNDS - 4)
