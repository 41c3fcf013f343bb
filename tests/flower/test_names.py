"""Strategies behave like Flower's own: its arguments, its callbacks, and inside its wrappers for
differential privacy.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small_prepared, some
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from rig import Rig

from bayflower import strategies
from bayflower.errors import ConfigError
from bayflower.files.store import MemoryStore
from bayflower.flower import records, wrapped
from bayflower.flower.classes import strategy_class
from bayflower.flower.loop import InProcessGrid, contexts, federation_app
from bayflower.methods import METHODS

SMALL = {"keep": 0.15, "local_epochs": 1, "rounds": 2}
PLAIN = ["fedavg", "fedavg-ft", "fedpa", "fedprox", "moon"]
PLAIN_TOO = ["pfedbred", "pfedme", "ditto", "fedala", "fedpa-ft", "fedrod", "moon-ft"]
ALIKE = {
    "fraction_train",
    "fraction_evaluate",
    "min_train_nodes",
    "min_evaluate_nodes",
    "min_available_nodes",
    "weighted_by_key",
    "configrecord_key",
}


def test_arguments_are_flowers():
    """Every argument of Flower's FedAvg is one of ours; where the default differs, the
    documentation says so.
    """
    theirs = inspect.signature(FlowersFedAvg.__init__).parameters
    ours = inspect.signature(strategies.FedMAP.__init__).parameters
    assert set(theirs) <= set(ours)
    assert {
        name for name in theirs if name in ours and theirs[name].default != ours[name].default
    } == {"arrayrecord_key"}
    assert all(theirs[name].default == ours[name].default for name in ALIKE)


def test_what_mathematics_forbids_is_refused():
    with pytest.raises(
        ConfigError,
        match="weighted_by_key must be 'num-examples', got 'quality'; a method defines its own "
        "weights",
    ):
        strategies.FedAvg(weighted_by_key="quality")
    with pytest.raises(ConfigError, match="fraction_evaluate must be in"):
        strategies.FedAvg(fraction_evaluate=2)


def start(rig: Rig, rounds: int = 2, **more):
    initial = {**rig.halves.initial[0], **rig.halves.initial[1]}
    return rig.strategy.start(
        rig.grid, records.to_arrays(initial), num_rounds=rounds, timeout=60, **more
    )


def test_evaluate_fn_sees_the_global_model_before_and_after_every_round():
    rig = Rig("fedavg", **SMALL)
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen[round] = records.to_tensors(arrays)
        return (
            MetricRecord({"norm": float(sum(value.norm() for value in seen[round].values()))})
            if round != 1
            else None
        )

    result = start(rig, evaluate_fn=evaluate)
    assert sorted(seen) == [0, 1, 2]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 2]
    assert_same_bits(seen[0], {**rig.halves.initial[0], **rig.halves.initial[1]})
    assert_same_bits(seen[2], records.to_tensors(result.arrays))
    assert not torch.equal(seen[0]["head.weight"], seen[1]["head.weight"])


def test_metric_callbacks_get_the_replies_metrics():
    """Flower's own function for metrics works as the callback, and gives the means weighted by
    sample count.
    """
    rig = Rig("fedavg", **SMALL)
    given: list[tuple[int, str]] = []

    def average(records, key):
        given.append((len(records), key))
        return aggregate_metricrecords(records, key)

    rig.strategy.train_metrics_aggr_fn = rig.strategy.evaluate_metrics_aggr_fn = average
    result = start(rig)
    assert given == [(5, "num-examples")] * 3
    assert result.train_metrics_clientapp[2]["train-loss"] == pytest.approx(
        rig.strategy.records[1]["train_loss"]
    )
    from bayflower.metrics import summarise

    want = summarise(rig.strategy.outcome.views["personal"])
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(want["accuracy"])
    assert result.evaluate_metrics_clientapp[2]["nll"] == pytest.approx(want["nll"])


def test_the_last_test_can_be_of_some_clients_or_of_none():
    some, none = Rig("fedavg", **SMALL), Rig("fedavg", **SMALL)
    some.strategy.fraction_evaluate, some.strategy.min_evaluate_nodes = 0.4, 1
    start(some)
    assert len(some.strategy.outcome.views["personal"]) == 2
    none.strategy.fraction_evaluate = 0.0
    result = start(none)
    assert result.evaluate_metrics_clientapp == {}
    assert none.strategy.outcome.views == {}
    assert_same_bits(none.strategy.state, some.strategy.state)


def test_records_have_the_names_one_gives_them():
    rig = Rig("fedavg", **SMALL)
    rig.strategy.arrayrecord_key, rig.strategy.configrecord_key = "arrays", "settings"
    start(rig, train_config=ConfigRecord({"mine": 3}))
    sent = [
        message
        for message in rig.seen
        if message.metadata.message_type == "train" and "arrays" in message.content
    ]
    assert len(sent) == 10
    assert dict(sent[-1].content["settings"]) == {"mine": 3, "server-round": 2}
    usual = Rig("fedavg", **SMALL)
    start(usual)
    assert_same_bits(usual.strategy.state, rig.strategy.state)


# -- inside another strategy ---------------------------------------------------------------------
class Federation:
    """A small federation for strategies that are wrapped."""

    def __init__(self, method: str = "fedavg", mods=(), **settings) -> None:
        self.prepared = small_prepared(method, **{**SMALL, "new_clients": 0, **settings})
        run, federation, self.halves = (
            self.prepared.run,
            self.prepared.federation,
            self.prepared.halves,
        )
        app = federation_app(run, federation, self.halves, MemoryStore())
        outer = ClientApp()
        outer.train(mods=list(mods))(app)
        outer.evaluate()(app)
        outer.query()(app)
        self.number = len(federation.clients)
        self.grid = InProcessGrid(outer, contexts(data.client for data in federation.clients))
        self.inner = strategy_class(method)(seed=run.settings.seed, local_epochs=1, batch_size=16)

    def start(self, outer, rounds: int = 2):
        np.random.seed(0)  # Flower's noise comes from numpy's own generator
        initial = {**self.halves.initial[0], **self.halves.initial[1]}
        return outer.start(self.grid, records.to_arrays(initial), num_rounds=rounds)


def inside(kind, federation: Federation, noise: float, clip: float):
    if "Adaptive" in kind.__name__:
        return kind(
            federation.inner,
            noise_multiplier=noise,
            num_sampled_clients=federation.number,
            initial_clipping_norm=clip,
        )
    return kind(
        federation.inner,
        noise_multiplier=noise,
        clipping_norm=clip,
        num_sampled_clients=federation.number,
    )


WRAPPERS = {
    "server, fixed": (DifferentialPrivacyServerSideFixedClipping, ()),
    "client, fixed": (DifferentialPrivacyClientSideFixedClipping, (fixedclipping_mod,)),
    "server, adaptive": (DifferentialPrivacyServerSideAdaptiveClipping, ()),
    "client, adaptive": (DifferentialPrivacyClientSideAdaptiveClipping, (adaptiveclipping_mod,)),
}


@pytest.mark.parametrize("way", some(WRAPPERS, ["server, fixed", "client, adaptive"]))
def test_inside_flowers_wrappers(way):
    """Without noise and with a clipping norm that nothing reaches, the result is that of the method
    alone; with a small one it is not.
    """
    kind, mods = WRAPPERS[way]
    alone = Federation()
    want = alone.start(alone.inner)
    wide = Federation(mods=mods)
    got = wide.start(inside(kind, wide, 0.0, 1e6))
    assert wide.inner.faults == []
    for name, value in records.to_tensors(want.arrays).items():
        torch.testing.assert_close(
            records.to_tensors(got.arrays)[name], value, rtol=1e-5, atol=1e-6
        )
    assert sorted(got.evaluate_metrics_clientapp) == [1, 2]
    narrow = Federation(mods=mods)
    less = narrow.start(inside(kind, narrow, 0.0, 0.01), rounds=1)
    initial = narrow.halves.initial[0]
    moved = (
        sum(
            float((value - initial[name]).square().sum())
            for name, value in records.to_tensors(less.arrays).items()
        )
        ** 0.5
    )
    assert moved <= 0.01 + 1e-5
    assert moved > 0


def test_noise_goes_into_what_clients_are_sent():
    """The noisy arrays of round 1 are the broadcast of round 2, to the bit: the inner strategy
    keeps none of its own.
    """
    federation = Federation()
    sent: dict[int, dict[str, torch.Tensor]] = {}
    ask = federation.grid.ask

    def spy(message):
        head = dict(message.content[records.HEADER])
        if message.metadata.message_type == "train":
            sent[head["round"]] = records.to_tensors(records.only_arrays(message))
        return ask(message)

    federation.grid.ask = spy
    outer = inside(DifferentialPrivacyServerSideFixedClipping, federation, 0.5, 1.0)
    after: dict[int, dict[str, torch.Tensor]] = {}
    aggregate = outer.aggregate_train

    def watch(round, replies):
        arrays, metrics = aggregate(round, replies)
        after[round] = records.to_tensors(arrays)
        return arrays, metrics

    outer.aggregate_train = watch
    federation.start(outer)
    assert_same_bits(sent[2], after[1])
    assert_same_bits(
        {name: federation.inner.state.params[name] for name in sorted(after[2])},
        dict(sorted(after[2].items())),
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_other_methods_are_refused_with_the_reason(method):
    why = wrapped.refusal(METHODS[method])
    if method in (*PLAIN, *PLAIN_TOO):
        assert why is None
        return
    federation = Federation(method)
    with pytest.raises(
        ConfigError, match=r"(shares a part of the network only|keeps more than|does not average)"
    ):
        federation.start(inside(DifferentialPrivacyServerSideFixedClipping, federation, 0.0, 1.0))
    assert why is not None


@pytest.mark.parametrize("method", some([*PLAIN[1:], *PLAIN_TOO], ["fedprox", "moon"]))
def test_every_method_that_is_not_refused_runs_inside(method):
    federation = Federation(method)
    got = federation.start(inside(DifferentialPrivacyServerSideFixedClipping, federation, 0.1, 1.0))
    assert federation.inner.faults == []
    assert sorted(got.train_metrics_clientapp) == [1, 2]


def test_counters_of_batchnorm_are_refused():
    federation = Federation("fedavg", model="mlp-bn")
    with pytest.raises(
        ConfigError,
        match="num_batches_tracked' holds integers, which Flower's clipping cannot scale",
    ):
        federation.start(inside(DifferentialPrivacyServerSideFixedClipping, federation, 0.0, 1.0))
