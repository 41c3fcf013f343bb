"""Same seed, same work, whatever the engine: fused against loop, per tensor and norm-wise, and the
per-client metrics.
"""

from __future__ import annotations

import pytest
import torch
from conftest import BOTH, assert_same_bits, cases, small_prepared, some, worst_difference
from devices import DEVICES

from bayflower.engines import execute
from bayflower.files.store import DiskStore
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy, run_loop
from bayflower.flower.records import to_arrays
from bayflower.testing import runs
from bayflower.testing.runs import compare
from bayflower.tree import flatten

# methods that differ where a network has normalisation layers: in what they share, in a second
# derivative, in a correction of weights whose gradient is only rounding
NORMS = {"fedbn", "fedbps", "fednp", "metavd", "scaffold"}
# states, sums and steps of every form; the slow tests have all methods
FORMS = {*BOTH, "fedavg", "feddc", "fedpa", "fedper", "local", "maml", "scaffold"}
# methods whose new clients train all weights, behind BatchNorm
WHOLE = {"ditto": {"new_client_epochs": 1}}
# behind BatchNorm rounding may tip a number to the next code: codes are fine
WHOLE |= {name: {"qlsd_levels": 32767} for name in ("qlsd", "qlsd-ft")}
CODES = dict.fromkeys(("qlsd", "qlsd-ft"), 1e-4)  # three codes
# methods whose global model takes steps lambda = 15 times as long, with five passes in each step:
# behind BatchNorm a batch of two or three rows would magnify rounding in every pass
CALM = {name: {"lr": 0.005, "keep": 0.5} for name in ("pfedbred", "pfedme")}
# a few batches for each client, the last of them not full
FEW = {"keep": 0.15, "new_client_epochs": 1}


def outcomes(method: str, **settings):
    """Return (loop, fused) outcomes, with the loop's client states read back from its store."""
    return runs.outcomes(small_prepared(method, **settings))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", cases("mlp-bn", both=(), only=NORMS))
def test_one_float32_sgd_round_agrees_to_1e_5(case, device):
    """FedDC and FedDyn keep how far weights have moved; the rate is such that a move has enough
    digits in float32. More epochs of fine-tuning behind BatchNorm would only magnify rounding.
    """
    short = {"finetune_epochs": 1} if case[0].endswith("-ft") else {}
    short |= WHOLE.get(case[0], {})
    # batches of two or three rows would magnify it too
    settings = {"keep": 0.25, "rounds": 1, "optimizer": "sgd", "lr": 0.1, **short}
    settings |= CALM.get(case[0], {})
    tolerance = CODES.get(case[0], 1e-5)
    compare(*outcomes(case[0], model=case[1], device=device, **settings), tolerance=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", cases("mlp", both=(), only=FORMS))
def test_three_float64_rounds_agree_to_1e_9(case, device):
    """In the third round clients come back that were away in the second."""
    settings = {
        **FEW,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "fraction_train": 0.6,
        "dtype": "float64",
        "rounds": 3,
        "evaluate_every": 2,
    }
    method, model = case
    settings |= CALM.get(method, {})
    compare(*outcomes(method, model=model, device=device, **settings), tolerance=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_adaptive_optimisers_agree_where_every_gradient_is_real(optimizer):
    """Inputs without constant columns and no BatchNorm: elsewhere these optimisers turn rounding
    errors of zero gradients into steps.
    """
    settings = {
        "dataset": "synthetic",
        "num_clients": 4,
        "new_clients": 0,
        "keep": 1.0,
        "batch_size": 256,
        "dtype": "float64",
        "rounds": 2,
    }
    compare(*outcomes("fedmap", optimizer=optimizer, **settings), tolerance=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "method",
    some(["fedmap", "pfedvmp", "fedbps", "fednp", "metavd"], ["fedmap"]),
)
def test_a_cnn_agrees(tmp_path, method, device):
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 240)
    x = (
        (rng.normal(size=(240, 20, 20)) * 20 + 30 * y[:, None, None] + 60)
        .clip(0, 255)
        .astype(np.uint8)
    )
    np.savez(tmp_path / "images.npz", x=x, y=y)
    settings = {
        "dataset": str(tmp_path / "images.npz"),
        "keep": 1.0,
        "optimizer": "sgd",
        "lr": 0.05,
        "rounds": 1,
        "new_clients": 1,
        "local_epochs": 1,
        "new_client_epochs": 1,
    }
    loop, fused = outcomes(method, model="cnn", device=device, **settings)
    assert not fused.remarks  # or the clients were trained one by one
    compare(loop, fused, tolerance=1e-5)


@pytest.mark.parametrize("method", some(["fedmap", "fedbn"], ["fedmap"]))
def test_chunks_of_clients_change_nothing_that_matters(method):
    whole, parts = (
        execute(
            small_prepared(
                method, "fused", dtype="float64", optimizer="sgd", lr=0.05, max_fused=most
            )
        )
        for most in (0, 2)
    )
    assert worst_difference(parts.server_state, whole.server_state) < 1e-10
    assert worst_difference(parts.client_states, whole.client_states) < 1e-10


def test_loop_gives_the_same_bits_from_disk_and_in_any_order_of_arrival(tmp_path):
    """Replies in reverse, states in files: bit-equal to replies in order, states in memory."""
    prepared = small_prepared("fedmap", rounds=3)
    want = run_loop(prepared.run, prepared.federation, prepared.halves)

    class Reversed(InProcessGrid):
        def pull_messages(self, message_ids):
            wanted = set(message_ids)
            for number in reversed(list(self.inbox)):
                if number in wanted:
                    return [self._answer(self.inbox.pop(number))]
            return []

    run, federation, halves = prepared.run, prepared.federation, prepared.halves
    app = federation_app(run, federation, halves, DiskStore(tmp_path))
    grid = Reversed(
        app, contexts(data.client for data in (*federation.clients, *federation.new_clients))
    )
    strategy = make_strategy(run)
    strategy.start(grid, to_arrays({**halves.initial[0], **halves.initial[1]}), num_rounds=3)
    assert_same_bits(strategy.outcome.server_state, want.server_state)
    for view, tallies in want.views.items():
        for client, tally in tallies.items():
            assert_same_bits(strategy.outcome.views[view][client], tally)
    assert [record["train_loss"] for record in strategy.records] == [
        record["train_loss"] for record in want.rounds
    ]


def test_partial_participation_is_seeded_and_untouched_clients_keep_their_state():
    outcome = execute(small_prepared("local", "fused", fraction_train=0.4, rounds=1))
    prepared = small_prepared("local", "fused")
    fresh = flatten(prepared.halves.client.init(*prepared.halves.initial))
    same = [
        client
        for client, state in outcome.client_states.items()
        if all(torch.equal(a, fresh[n]) for n, a in flatten(state).items())
    ]
    assert len(same) == 3
