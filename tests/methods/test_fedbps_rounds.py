"""FedBPS in whole rounds: a slow round in numpy, the two methods it contains, and what travels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small_prepared, worst_difference
from rig import Rig
from torch import nn

from bayflower.data import batches
from bayflower.engines import execute
from bayflower.flower import records
from bayflower.maths.exact import Total
from bayflower.rounds import solo
from bayflower.strategies.fedbps import Broadcast

VIEWS = ("personal", "before")
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


@pytest.mark.parametrize(
    ("ranking", "delta"), [pytest.param("paper", None, marks=pytest.mark.slow), ("balanced", 2.0)]
)
def test_two_rounds_equal_numpy(ranking, delta):
    """Every step of a round the slow way: torch.optim, one gradient for each class of each sample,
    moments and mask in numpy.
    """
    settings = {
        **SGD,
        "dtype": "float64",
        "personal_share": 0.4,
        "ranking": ranking,
        "delta": delta,
        "model": "mlp",
        "keep": 0.12,
    }
    prepared = small_prepared("fedbps", **settings)
    halves, run = prepared.halves, prepared.run
    state = halves.server.init(*halves.initial, ())
    clients = prepared.federation.clients[:3]
    assert len({len(data.y_train) for data in clients}) > 1
    states = {data.client: halves.client.init(*halves.initial) for data in clients}
    names = sorted(halves.initial[0])

    def vector(tensors):
        return np.concatenate([tensors[name].detach().numpy().ravel() for name in names])

    shared = vector(halves.initial[0])
    own = {data.client: shared.copy() for data in clients}
    mask = np.zeros(len(shared), bool)
    for round_number in (1, 2):
        total, variances, sizes = Total(), {}, {}
        for data in clients:
            samples = solo.samples(data, torch.device("cpu"), torch.float64).train
            broadcast = halves.client.unpack(
                Broadcast, halves.server.pack(halves.server.broadcast(state, data.client))
            )
            keys = {"seed": 0, "client": data.client, "round": round_number}
            states[data.client], sent, _ = solo.train(
                halves.client, states[data.client], broadcast, samples, **keys
            )
            total.add(halves.server.statistic(state, data.client, sent))

            module = halves.model.factory().double()
            start = np.where(mask, own[data.client], shared)
            load(module, names, start)
            stepper = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
            for (rows,) in batches.plan(
                len(samples.y), run.training.phase("local"), **keys, purpose="train", coupled=False
            ):
                stepper.zero_grad()
                nn.functional.cross_entropy(module(samples.x[rows]), samples.y[rows]).backward()
                stepper.step()
            own[data.client] = vector(dict(module.named_parameters()))
            curvature = np.zeros(len(shared))
            for x in samples.x:
                logs = module(x[None])[0].log_softmax(0)
                for one in logs:
                    grads = torch.autograd.grad(
                        one,
                        [dict(module.named_parameters())[name] for name in names],
                        retain_graph=True,
                    )
                    curvature += (
                        float(one.detach().exp())
                        * np.concatenate([grad.numpy().ravel() for grad in grads]) ** 2
                    )
            sizes[data.client] = len(samples.y)
            prior = 5e-4 * len(samples.y) if delta is None else delta
            variances[data.client] = 1 / (curvature + prior)
            np.testing.assert_allclose(vector(sent.params), own[data.client], rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(vector(sent.variance), variances[data.client], rtol=1e-7)
            assert int(sent.num_examples) == len(samples.y)
        state = halves.server.finalise(state, total.value())
        weight = sum(sizes.values())
        shared = sum(sizes[c] * own[c] for c in own) / weight
        within = sum(sizes[c] * variances[c] for c in own) / weight
        between = sum(sizes[c] * (own[c] - shared) ** 2 for c in own) / weight
        if ranking == "balanced":
            middle = (len(shared) - 1) // 2
            within, between = within / np.sort(within)[middle], between / np.sort(between)[middle]
        mask = np.zeros(len(shared), bool)
        mask[np.argsort(-(within + between), kind="stable")[: round(0.4 * len(shared))]] = True
        np.testing.assert_allclose(vector(state.params), shared, rtol=1e-8, atol=1e-10)
        # two entries in the last bits of a tie may change places
        assert (vector(state.mask) == mask).mean() > 0.999
        mask = vector(state.mask)
    assert 0 < mask.sum() < len(mask)


def load(module: nn.Module, names: list[str], values: np.ndarray) -> None:
    params, at = dict(module.named_parameters()), 0
    with torch.no_grad():
        for name in names:
            size = params[name].numel()
            params[name].copy_(torch.as_tensor(values[at : at + size]).reshape(params[name].shape))
            at += size


@pytest.mark.parametrize(("share", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_the_ends_are_fedavg_and_local_training_to_the_bit(share, other):
    """Three rounds on the loop engine with sampled clients: equal tests, equal losses, and for p =
    0 equal global weights [eq. 5].
    """
    settings = {**SGD, "rounds": 3, "fraction_train": 0.6}
    got = execute(small_prepared("fedbps", **settings, personal_share=share))
    want = execute(small_prepared(other, **settings))
    assert got.views["personal"].keys() == want.views["personal"].keys()
    for client, tally in want.views["personal"].items():
        assert_same_bits(got.views["personal"][client], tally)
    for client, tally in want.new_clients["personal"].items():
        assert_same_bits(got.new_clients["personal"][client], tally)
    assert [one["train_loss"] for one in got.rounds] == [one["train_loss"] for one in want.rounds]
    if other == "fedavg":
        assert_same_bits(got.server_state.params, want.server_state.params)


def test_only_the_shared_entries_and_the_mask_travel_down():
    """(1 − p)·4P + P/8 bytes from the second round on; 8P up [eq. 3]."""
    rounds = {
        share: execute(
            small_prepared(
                "fedbps", personal_share=share, new_clients=0, rounds=3, keep=0.12, evaluate_every=0
            )
        ).rounds
        for share in (0.0, 0.5, 0.9)
    }
    number = small_prepared("fedbps").halves.model.num_parameters
    for share, found in rounds.items():
        assert found[0]["bytes_down"] == rounds[0.0][0]["bytes_down"]
        for record in found[1:]:
            saved = rounds[0.0][1]["bytes_down"] - record["bytes_down"]
            # five clients; a shape may take a digit less
            assert saved / 5 == pytest.approx(4 * round(share * number), abs=8)
            assert record["personal_share"] == pytest.approx(share, abs=1e-3)
            down = 4 * (number - round(share * number)) + number / 8
            # heads and instructions of a message
            assert down < record["bytes_down"] / 5 < down + 2500


def test_running_statistics_stay_or_are_averaged():
    """E-B8: local by default; averaged on request, and then nothing of them is private."""
    local = small_prepared("fedbps", model="mlp-bn", **SGD)
    shared = small_prepared("fedbps", model="mlp-bn", statistics="average", **SGD)
    data = solo.samples(local.federation.clients[0], torch.device("cpu"), torch.float32).train
    for prepared in (local, shared):
        halves = prepared.halves
        state, own = halves.server.init(*halves.initial, ()), halves.client.init(*halves.initial)
        kept, sent, _ = solo.train(
            halves.client, own, halves.server.broadcast(state, 0), data, seed=0, client=0, round=1
        )
        averaged = prepared is shared
        assert bool(sent.buffers) == bool(state.buffers) == averaged
        assert bool(kept.buffers) != averaged
        norm = halves.model.norm_names & set(sent.variance)
        assert norm  # scale and shift take part
        assert (
            worst_difference(
                {"x": (kept.buffers or sent.buffers)["base.2.running_mean"]}, {"x": torch.zeros(64)}
            )
            > 0
        )
    outcome = execute(small_prepared("fedbps", model="mlp-bn", statistics="average", **SGD))
    assert set(outcome.server_state.buffers) == set(shared.halves.initial[1])


def test_a_new_client_moves_its_personal_entries_alone():
    """Against torch.optim on a module whose shared entries are put back after every step."""
    prepared = small_prepared("fedbps", personal_share=0.6, dtype="float64", **SGD)
    halves = prepared.halves
    generator = torch.Generator().manual_seed(0)
    state = halves.server.init(*halves.initial, ())
    mask = {
        name: torch.rand(value.shape, generator=generator) < 0.6
        for name, value in state.params.items()
    }
    state = state._replace(
        mask=mask, params={name: 1.5 * value for name, value in state.params.items()}
    )
    broadcast = halves.server.broadcast(state, 9)
    data = solo.samples(
        prepared.federation.new_clients[0], torch.device("cpu"), torch.float64
    ).train
    fresh = halves.client.init(*halves.initial)
    keys = {"seed": 0, "client": 9, "round": 1}
    fitted = solo.adapt(halves.client, fresh, broadcast, data, "new", **keys)

    module = halves.model.factory().double()
    start = {
        name: torch.where(mask[name], fresh.params[name], value)
        for name, value in state.params.items()
    }
    module.load_state_dict(start)
    stepper = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    phase = halves.client.phases("new")[0]
    for (rows,) in batches.plan(len(data.y), phase, **keys, purpose="new", coupled=False):
        stepper.zero_grad()
        nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
        stepper.step()
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(torch.where(mask[name], value, start[name]))
    for name, value in module.named_parameters():
        torch.testing.assert_close(fitted.params[name], value.detach(), rtol=1e-8, atol=1e-10)
        assert torch.equal(fitted.params[name][~mask[name]], state.params[name][~mask[name]])
    assert worst_difference(fitted.params, start) > 1e-3


def test_weights_without_curvature_have_a_finite_variance():
    """E-B3: dead units give h = 0 exactly; their variance is 1/delta [eq. 2]."""
    prepared = small_prepared("fedbps", delta=0.25, **SGD)
    halves = prepared.halves
    params = copy.deepcopy(halves.initial[0])
    params["base.1.bias"][:40] = -1e4  # forty of 64 units never fire
    data = solo.samples(prepared.federation.clients[0], torch.device("cpu"), torch.float32).train
    state = halves.server.init(params, {}, ())
    _, sent, _ = solo.train(
        halves.client,
        halves.client.init(params, {}),
        halves.server.broadcast(state, 0),
        data,
        seed=0,
        client=0,
        round=1,
    )
    assert torch.equal(sent.variance["base.1.weight"][:40], torch.full((40, 64), 4.0))
    assert all(bool((value.isfinite() & (value > 0)).all()) for value in sent.variance.values())
    assert halves.server.check(state, 0, sent) is None


def test_the_report_has_the_share_of_every_layer():
    """The picture of the mask: shares by layer, which add up to p."""
    outcome = execute(small_prepared("fedbps", personal_share=0.3, **SGD))
    record = outcome.rounds[-1]
    layers = {
        name.removeprefix("personal_share/"): value
        for name, value in record.items()
        if name.startswith("personal_share/")
    }
    sizes = {"base.1": 64 * 64 + 64, "base.3": 64 * 32 + 32, "head": 32 * 10 + 10}
    assert layers.keys() == sizes.keys()
    total = sum(sizes.values())
    assert sum(layers[name] * sizes[name] for name in sizes) == pytest.approx(round(0.3 * total))
    assert record["personal_share"] == round(0.3 * total) / total
    assert 0 < record["disagreement"] < 1


def test_the_mask_is_read_from_real_messages():
    """What crosses the wire in round 2: bits and a vector of the shared entries, nothing else."""
    rig = Rig("fedbps", rounds=2, personal_share=0.7)
    rig.start(rounds=2)
    number = rig.halves.model.num_parameters
    last = [
        m
        for m in rig.seen
        if records.BROADCAST in m.content and dict(m.content[records.HEADER])["round"] == 2
    ][-1]
    flat = records.to_tensors(last.content[records.BROADCAST])
    assert {name: value.numel() for name, value in flat.items()} == {
        "mask": -(-number // 8),
        "values": number - round(0.7 * number),
    }
    assert rig.strategy.faults == []


def test_the_printed_ranking_sends_precisions_and_makes_the_most_certain_weights_personal():
    """E-B1: where the corrected client sends 1/(h + delta), the printed one sends h + delta."""
    sent = {}
    for ranking in ("paper", "printed"):
        prepared = small_prepared("fedbps", **SGD, dtype="float64", ranking=ranking, delta=2.0)
        halves, data = prepared.halves, prepared.federation.clients[0]
        state = halves.server.init(*halves.initial, ())
        sent[ranking] = solo.train(
            halves.client,
            halves.client.init(*halves.initial),
            halves.server.broadcast(state, data.client),
            solo.samples(data, torch.device("cpu"), torch.float64).train,
            **{"seed": 0, "client": data.client, "round": 1},
        ).update
        assert halves.server.check(state, data.client, sent[ranking]) is None
    for name, variance in sent["paper"].variance.items():
        torch.testing.assert_close(sent["printed"].variance[name], 1 / variance)


@pytest.mark.slow
def test_fine_tuning_gives_a_personal_model_and_leaves_the_one_before():
    """`finetune_epochs`: all entries are trained, as FedPer's are; "before" is the model that a run
    without it calls personal.
    """
    with_it, without = (
        execute(small_prepared("fedbps", **SGD, personal_share=0.3, finetune_epochs=epochs))
        for epochs in (2, 0)
    )
    assert set(without.views) == {"personal"}
    for client, tally in without.views["personal"].items():
        assert_same_bits(with_it.views["before"][client], tally)
    losses = [sum(float(one.nll) for one in with_it.views[view].values()) for view in VIEWS]
    assert losses[0] < losses[1]
    fedper = execute(small_prepared("fedper", **SGD))
    assert set(fedper.views) == {*VIEWS}
