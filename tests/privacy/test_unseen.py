"""robust under masks: clients keep to limits that they are told, and the server checks the sum."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.errors import ConfigError
from bayflower.flower import client
from bayflower.fused import secure
from bayflower.rounds.robust import Limiter
from bayflower.rounds.unseen import LIMITS, MOST, SELF, Unseen, kept
from bayflower.strategies import fedavg
from bayflower.tree import flatten

SETTINGS = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 5,
    "rounds": 2,
    "local_epochs": 1,
    "keep": 0.3,
    "calibration": "off",
    "evaluate_every": 0,
    "device": "cpu",
    "secure": "sum",
}


def half():
    found = fedavg.Server.__new__(fedavg.Server)
    found.config = fedavg.Config()
    return found


def state(values):
    return fedavg.State({"w": torch.tensor(values)}, {})


def test_a_client_keeps_to_the_limit_and_within_it_to_every_bit():
    """Oracle: numpy. The limit is SELF √K times the median way of the last three rounds."""
    rng, known = np.random.default_rng(0), Unseen(half())
    assert known.told(9) == {}
    place, ways = np.zeros(20), []
    for size in (5.0, 1.0, 2.0, 3.0):
        step = rng.normal(size=20)
        step *= size / np.linalg.norm(step)
        assert known.why_not(state(place), state(place + step)) is None
        place, ways = place + step, [*ways, size][-3:]
        told = known.told(9)
        most = SELF * 3 * float(np.median(ways))
        assert json.loads(told[LIMITS])["params"] == pytest.approx(most)
    for size in (0.5 * most, 4 * most):
        step = rng.normal(size=20)
        step *= size / np.linalg.norm(step)
        sent = fedavg.Update(torch.tensor(7), {"w": torch.tensor(place + step)}, {})
        got = kept(half(), state(place), sent, told)
        want = place + step * min(1.0, most / size)
        assert np.allclose(got.params["w"].numpy(), want, rtol=1e-12)
        assert torch.equal(got.params["w"], sent.params["w"]) == (size < most)
    far = place + rng.normal(size=20) * 1e3
    usual = float(np.median(ways))
    assert float(np.linalg.norm(far - place)) > MOST * usual
    assert "times as far as usual" in known.why_not(state(place), state(far))
    assert known.past["params"] == pytest.approx([*ways[1:], MOST * usual])  # not what it was
    rounds = 0  # a course that has really changed is followed after a few rounds
    while known.why_not(state(place), state(far)):
        rounds += 1
    assert 2 <= rounds <= 12


def test_a_resumed_server_knows_the_ways():
    one, two = (Limiter(half(), "gate", masked=True) for _ in range(2))
    assert not one.on
    assert one.accepted(1, state([0.0]), state([2.0]), print).params["w"] == 2
    two.remember(json.loads(json.dumps(one.memory())))
    assert two.told(4) == one.told(4) != {}
    assert Limiter(half(), "off", masked=True).told(4) == {}


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_the_default_runs_under_masks_and_a_leap_in_the_sum_is_not_used(engine, monkeypatch):
    limits = []

    def leaping(other, broadcast, update, told):
        limits.append(LIMITS in told)
        new = kept(other, broadcast, update, told)
        if LIMITS in told and wild and int(update.num_examples) == max(sizes):
            new = new._replace(params={n: v + 9.0 for n, v in new.params.items()})
        sizes.append(int(update.num_examples))
        return new

    place = client if engine == "loop" else secure
    monkeypatch.setattr(place, "kept", leaping)
    ends = []
    for wild in (False, True):
        sizes: list[int] = []
        outcome = execute(prepare(parse("fedavg", SETTINGS), engine))
        ends.append(flatten(outcome.server_state))
        assert any("the sum moved params" in fault for fault in outcome.faults) == wild
    assert all(limits[5:10])
    assert not any(limits[:5])
    assert any(not torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert max(float(value.abs().max()) for value in ends[1].values()) < 9


def test_rules_that_compare_updates_are_refused():
    for how in ("median", "trimmed", "krum"):
        with pytest.raises(ConfigError, match=f"robust={how} compares"):
            parse("fedavg", {**SETTINGS, "robust": how})
