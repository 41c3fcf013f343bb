"""dp=local: what a client sends is noisy already, on every engine, and ε counts its rounds."""

from __future__ import annotations

import math

import pytest
import torch
from secureruns import run

from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.flower import records
from bayflower.privacy import accounting
from bayflower.privacy.noisy import Mechanism, local_half, private_half
from bayflower.rounds.halves import make_halves
from bayflower.tree import flatten

pytest.importorskip("dp_accounting")
LOCAL = {"dp": "local", "dp_noise": 3.0, "dp_clip": 0.5, "dp_epsilon": 20.0}


def test_every_update_that_leaves_has_all_of_the_noise():
    """Client for client: what left differs from what a plain run sends by clipping and noise."""
    plain, noisy = [], []
    run("fedmap", seen=plain, rounds=1)
    done = run("fedmap", seen=noisy, **LOCAL)
    assert done.faults == []
    first = {client: content for client, content in noisy[:5]}
    for client, content in plain[:5]:
        ours = records.to_tensors(first[client][records.UPDATE])
        theirs = records.to_tensors(content[records.UPDATE])
        names = [name for name in theirs if name.startswith("params/")]
        apart = torch.cat([(ours[n] - theirs[n]).double().reshape(-1) for n in names])
        spread = float(apart.std())
        assert spread == pytest.approx(3.0 * 0.5, rel=0.05)
        assert (int(ours["num_examples"]), float(ours["log_weight"])) == (1, 0.0)
    assert done.budget.spent == accounting.epsilon(3.0, 2, 1e-5)


@pytest.mark.parametrize("secure", ["off", "sum"])
def test_the_fused_engine_adds_the_noise_of_all_clients(secure):
    settings = {"dataset": "digits", "model": "mlp", "num_clients": 6, "rounds": 1, **LOCAL}
    settings |= {"local_epochs": 1, "calibration": "off", "device": "cpu", "secure": secure}
    ready = prepare(parse("fedavg", settings), "fused")
    found = run_to_result(ready)
    assert found["privacy"]["level"] == "local"
    assert found["privacy"]["noise_from"] == "clients"
    assert set(found["privacy"]["per_client"]) == set("012345")
    from bayflower.fused.run import FusedRun

    done = FusedRun(ready.run, ready.federation, ready.halves)
    before = torch.cat([one.reshape(-1) for one in done.state.params.values()])
    done.round(1)
    after = torch.cat([one.reshape(-1) for one in done.state.params.values()])
    # six clients' noise, averaged
    assert float((after - before).std()) == pytest.approx(1.5 / math.sqrt(6), rel=0.05)


def test_noisy_updates_are_the_private_sum_of_one_client():
    made = make_halves(parse("fedavg", {"model": "mlp", "calibration": "off"}), (6,), 3)
    state = made.server.init(*made.initial, (0,))
    update = made.server.expects(state)
    params = {name: value + 0.01 for name, value in update.params.items()}
    update = update._replace(params=params, num_examples=torch.tensor(50))
    mechanism = Mechanism(100.0, 1e-4, 1.0)
    sent = private_half(made.server, mechanism, None).noised(state, update)
    for name, value in flatten(sent.params).items():
        torch.testing.assert_close(value, params[name], atol=0.06, rtol=0)  # noise of 0.01
    assert int(sent.num_examples) == 1
    half = local_half(made.server, mechanism, None)
    plain = made.server.statistic(state, 0, sent)
    found = half.statistic(state, 0, sent)
    assert all(torch.equal(found[n].tensor, plain[n].tensor) for n in plain if "/" in n)
    assert half.bounds(state, 0, sent, None, None) is None
