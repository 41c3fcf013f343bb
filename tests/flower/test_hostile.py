"""Mutated replies, spread over every method (`make hostile`: ten thousand): each is refused with a
reason or harmless; none raises.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re

import pytest
import torch
from conftest import BOTH, assert_same_bits, some
from flwr.app import ConfigRecord
from mutate import Mutator, copied, tensors_of
from rig import Rig

from bayflower.config import Limits
from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower import bounds, records
from bayflower.methods import METHODS
from bayflower.tree import flatten
from bayflower.wire.continuity import Continuity

TRIALS = int(os.environ.get("BAYFLOWER_TRIALS", "300"))  # make hostile: 10,000
VICTIM, OTHER = 2, 0
SMALL = {"keep": 0.1, "local_epochs": 1, "evaluate_every": 1, "max_message_mb": 1}


class Siege:
    """A strategy after round 1, with honest replies to round 2 that are tampered with again and
    again.
    """

    def __init__(self, method: str, **settings) -> None:
        settings = {**SMALL, "robust": "off", **settings}  # bounds that need no other client
        self.rig = Rig(method, members=[OTHER, 1, VICTIM], **settings)
        self.rig.start(rounds=1)
        self.strategy = strategy = self.rig.strategy
        self.asked = asked = strategy._training_round(2, ConfigRecord())
        answers = [self.rig.grid.ask(message) for message in asked.messages(asked.request)]
        self.replies = {reply.metadata.src_node_id - 1000: reply for reply in answers}
        seen = (
            m
            for m in self.rig.seen
            if m.metadata.src_node_id == 1000 + VICTIM and records.UPDATE in m.content
        )
        self.old = next(seen)
        self.state, self.sent, self.records = (
            strategy.state,
            dict(asked.sent),
            [dict(one) for one in strategy.records],
        )
        self.threads = strategy.roster.continuity.memory()
        self.without, _ = self.after([])
        self.both, faults = self.after([copied(self.replies[VICTIM])])
        assert faults == ["round 2, client 1: no reply before the timeout; ignored in this round"]

    def after(self, replies) -> tuple[object, list[str]]:
        """Return (the state, the faults) after round 2 with these replies and an honest one of
        another client.
        """
        strategy = self.strategy
        strategy.state, strategy._round, strategy.enough.empty = self.state, self.asked, 0
        self.asked.sent = dict(self.sent)
        strategy.records = [type(strategy.records[0])(one) for one in self.records]
        strategy.faults.clear()
        strategy.journal.begin(2)
        roster = strategy.roster
        for known in (roster.faults, roster.silent, roster.excluded, roster.left, roster.unused):
            known.clear()
        roster.continuity = Continuity()
        roster.continuity.remember(self.threads)
        strategy.aggregate_train(2, iter([*replies, copied(self.replies[OTHER])]))
        return strategy.state, list(strategy.faults)


def same(a: object, b: object) -> bool:
    left, right = flatten(a), flatten(b)
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def valid(
    sent: dict[str, torch.Tensor], honest: dict[str, torch.Tensor], fixed_shapes: bool
) -> bool:
    """Return whether an update is one that a client could send: the definition, written again."""
    if sent.keys() != honest.keys() or any(sent[name].dtype != honest[name].dtype for name in sent):
        return False
    if fixed_shapes and any(sent[name].shape != honest[name].shape for name in sent):
        return False
    numbers = [tensor for tensor in sent.values() if tensor.is_floating_point()]
    size = all(
        bool(tensor.isfinite().all()) and (tensor.numel() == 0 or float(tensor.abs().max()) <= 1e12)
        for tensor in numbers
    )
    return size and 0 < int(sent["num_examples"]) <= 2 * int(honest["num_examples"])


siege_of = functools.cache(Siege)  # `after` begins at the same state every time


# each form of update once; `make hostile` and the slow tests have all methods
FORMS = {*BOTH, "fedavg", "feddc", "fedpa", "fedper", "scaffold", "local"}


@pytest.mark.parametrize("method", some(sorted(METHODS), FORMS))
def test_mutated_replies_are_refused_or_harmless(method):
    siege = siege_of(method)
    mutate = Mutator(method, siege.old)
    honest = tensors_of(siege.replies[VICTIM])
    counts = {"refused": 0, "as honest": 0, "valid": 0}
    for number in range(-(-TRIALS // len(METHODS))):
        kind, replies = mutate(siege.replies[VICTIM])
        where = f"{method}, trial {number}, {kind}"
        kept = [copied(reply) if reply.has_content() else reply for reply in replies]
        state, faults = siege.after(replies)
        mine = [fault for fault in faults if not fault.startswith("round 2, client 1: no reply")]
        if mine:
            counts["refused"] += 1
            assert same(state, siege.both if kind == "duplicate" else siege.without), where
            assert all(len(fault) <= 500 and fault.isprintable() for fault in faults), where
        elif same(state, siege.both):
            counts["as honest"] += 1
        else:
            counts["valid"] += 1
            sent = tensors_of(kept[0])
            assert valid(sent, honest, not method.startswith("pfedvmp")), where
        for name, leaf in flatten(state).items():
            old = flatten(siege.without)[name]
            assert (leaf.dtype, leaf.shape) == (old.dtype, old.shape), where
            assert not leaf.is_floating_point() or bool(leaf.isfinite().all()), f"{where}: {name}"
            if name.endswith(("precision", "running_var")):
                assert float(leaf.min()) >= 0, f"{where}: {name}"
        json.dumps(siege.strategy.records, allow_nan=False)
    # over 100 of the 385 that each method gets of ten thousand
    assert 385 * counts["refused"] > 100 * sum(counts.values()), counts
    # the run could go on
    siege.strategy.half.pack(siege.strategy.half.broadcast(siege.state, VICTIM))


def poisoned(siege: Siege, **changes: float) -> list[str]:
    """Return the faults after the victim's reply with these numbers put into its update."""
    reply = copied(siege.replies[VICTIM])
    flat = records.arrays(reply, records.UPDATE)
    for name, value in changes.items():
        key = next(key for key in flat if key.startswith(name.replace("__", "/")))
        flat[key] = torch.full_like(flat[key], value)
    reply.content[records.UPDATE] = records.to_arrays(flat)
    state, faults = siege.after([reply])
    assert same(state, siege.without) == (len(faults) > 1)
    return faults[:-1]


SEIZURES = {
    "fedavg": [
        ({"num_examples": 10**7}, "more than twice"),
        ({"params__": 1e8}, "'params' changed by"),
    ],
    "fedmap": [
        ({"log_weight": 50.0}, "log_weight must be at most"),
        ({"params__": 1e8}, "'params' changed by"),
    ],
    "fedbps": [
        ({"variance__": 5.0}, "variance must be at most 1"),
        ({"variance__": -1.0}, "variance must be in"),
    ],
    "fedla": [
        ({"precision__": 1e9}, "at most max_precision = 1e+06"),
        ({"precision__": -1.0}, "precision must be positive"),
    ],
    "fednp": [
        ({"change__precision": 1e9}, "must be at most max_precision"),
        ({"change__shift": 1e9}, "shift of a factor"),
        ({"change__precision": -1e3}, "must not be negative"),
        ({"turns": 7}, "that the ledger does not know"),
    ],
    "scaffold": [({"control_change__": 1e9}, "'control_change' changed by")],
    "feddc": [({"pace__": 1e9}, "'pace' changed by")],
    "metavd": [({"log_alpha_step": 100.0}, "log_alpha_step must be in")],
    "pfedvmp": [
        ({"means": 1e13}, "more than 1e+12"),
        ({"counts": 10**6}, "more than num_examples"),
    ],
    "feddyn": [({"params__": 1e30}, "more than 1e+12")],
}


@pytest.mark.parametrize("method", sorted(SEIZURES))
def test_nobody_seizes_the_aggregate(method):
    """An enormous count, precision, variance, log weight or step is refused with the bound in the
    reason.
    """
    siege = siege_of(method)
    for changes, words in SEIZURES[method]:
        (fault,) = poisoned(siege, **changes)
        assert words in fault, fault


def test_a_negative_running_variance_is_refused():
    siege = Siege("fedavg", model="mlp-bn")
    reply = copied(siege.replies[VICTIM])
    flat = records.arrays(reply, records.UPDATE)
    name = next(name for name in flat if name.endswith("running_var"))
    flat[name] = -flat[name]
    reply.content[records.UPDATE] = records.to_arrays(flat)
    state, faults = siege.after([reply])
    assert_same_bits(state, siege.without)
    assert "is a variance and must not be negative" in faults[0]


def test_bounds_can_be_set():
    """Training moves the model by more than a millionth of its norm: with such a bound nobody can
    take part.
    """
    rig = Rig("fedavg", max_change=1e-6)
    with pytest.raises(BayflowerError, match="no client could be trained"):
        rig.start()
    assert all("(max_change = 1e-06)" in fault for fault in rig.strategy.faults[:5])


@pytest.mark.parametrize(
    ("sizes", "share", "want"),
    [
        ({0: 10, 1: 10, 2: 10}, 0.5, {}),
        ({0: 1000, 1: 10, 2: 10}, 0.5, {0: 20}),
        ({0: 1000, 1: 900, 2: 10, 3: 10}, 0.4, {0: 40, 1: 40}),
        ({0: 1000, 1: 10}, 0.5, {0: 10}),
        ({0: 1000, 1: 500, 2: 10}, 0.3, {0: 10, 1: 10}),
        ({0: 7}, 0.5, {}),
        ({}, 0.5, {}),
    ],
)
def test_caps(sizes, share, want):
    """The cap is the largest with which nobody counts for more than the share; with fewer than
    1/share clients all count alike.
    """
    got = bounds.caps(sizes, share)
    assert got == want
    counted = {client: min(size, got.get(client, size)) for client, size in sizes.items()}
    if sizes and share * len(sizes) >= 1:
        assert max(counted.values()) <= share * sum(counted.values()) + 1


def test_a_client_counts_for_its_share_at_most():
    """max_share cuts a count off, says so once, and the average is that of the smaller count."""
    given = {"keep": 0.3, "robust": "off"}
    plain, cut = Rig("fedavg", **given), Rig("fedavg", max_share=0.25, **given)
    plain.start(rounds=2)
    cut.start(rounds=2)
    sizes = [len(data.y_train) for data in cut.prepared.federation.clients]
    want = bounds.caps(dict(enumerate(sizes)), 0.25)
    assert want
    assert [fault for fault in cut.strategy.faults] == [
        f"client {client}: its {sizes[client]} samples are counted as {want[client]} (max_share is "
        "0.25)"
        for client in sorted(want)
    ]
    assert not same(plain.strategy.state, cut.strategy.state)
    counted = [min(size, want.get(client, size)) for client, size in enumerate(sizes)]
    first = {
        reply.metadata.src_node_id - 1000: tensors_of(reply)
        for reply in cut.seen
        if records.UPDATE in reply.content and dict(reply.content[records.HEADER])["round"] == 2
    }
    name = "params/head.bias"
    mean = sum(first[client][name].double() * count for client, count in enumerate(counted)) / sum(
        counted
    )
    torch.testing.assert_close(
        cut.strategy.state.params["head.bias"].double(), mean, rtol=1e-6, atol=1e-7
    )


CENTROIDS = {"precision": "spread/weight", "diag": "spread/precision", "count_mean": ""}


def weights(siege: Siege, reply, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what a reply claims of class k as a matrix, its mean), read the slow way."""
    flat, option = tensors_of(reply), siege.strategy.options.centroid
    place = int((flat["counts"][:k] > 0).sum())
    mean = flat["means"][place].double()
    if option != "precision":
        given = (
            flat["spread/precision"][place].double()
            if option == "diag"
            else flat["counts"][k].double().expand(len(mean))
        )
        return torch.diag(given), mean
    ranks, dim = flat["spread/ranks"].tolist(), len(mean)
    if 2 * ranks[k] > dim:
        root = torch.zeros(dim, dim, dtype=torch.float64)
        root[tuple(torch.triu_indices(dim, dim))] = flat["spread/triangle"][
            sum(2 * rank > dim for rank in ranks[:k])
        ].double()
        return root.T @ root, mean
    start = sum(rank for rank in ranks[:k] if 2 * rank <= dim)
    rows, weight = (
        flat[f"spread/{name}"][start : start + ranks[k]].double() for name in ("basis", "weight")
    )
    return rows.T @ (weight[:, None] * rows), mean


@pytest.mark.parametrize(
    ("centroid", "share"),
    [
        ("precision", 0.6),
        ("precision", 1.0),
        *(
            pytest.param(name, share, marks=pytest.mark.slow)
            for name in ("diag", "count_mean")
            for share in (0.6, 1.0)
        ),
    ],
)
def test_a_claim_of_a_class_is_cut_down_to_its_share(centroid, share):
    """pFedVMP: whoever claims a precision ten thousand times the others' has the share that
    max_share leaves, and the result says so.
    """
    siege = Siege("pfedvmp", keep=0.4, centroid=centroid, max_message_mb=8, min_count=2)
    limits = dataclasses.replace(siege.strategy.limits, max_share=share)
    siege.strategy.limits = siege.strategy.roster.limits = limits
    siege.asked.facts = siege.asked.facts._replace(limits=limits)
    reply = copied(siege.replies[VICTIM])
    flat = records.arrays(reply, records.UPDATE)
    other = siege.replies[OTHER]
    both = ((flat["counts"] > 0) & (tensors_of(other)["counts"] > 0)).nonzero()[:, 0].tolist()
    if centroid != "count_mean":
        for name in (CENTROIDS[centroid], "spread/triangle"):
            if name in flat:
                flat[name] *= 1e4 if name != "spread/triangle" else 1e2
        flat["means"] += 5.0
    else:
        flat["counts"].clamp_(max=1)
        flat["counts"][both[0]] = int(flat["num_examples"]) - int(flat["counts"].sum())
    reply.content[records.UPDATE] = records.to_arrays(flat)
    state, faults = siege.after([copied(reply)])
    told = {
        int(k)
        for fault in faults
        if fault.startswith(f"client {VICTIM}: its claims on")
        for k in re.findall(r"class (\d+)", fault)
    }
    alpha = siege.strategy.options.alpha * (centroid == "precision")
    for k in both:
        (mine, mean), (theirs, other_mean) = weights(siege, reply, k), weights(siege, other, k)
        sizes = [float(mine.trace()), float(theirs.trace())]
        factors = [
            min(1.0, share / (1 - share) * rest / own) if share < 1 else 1.0
            for own, rest in (sizes, reversed(sizes))
        ]
        assert (k in told) == (factors[0] < 1)
        if centroid == "count_mean":
            counts = [float(mine[0, 0]), float(theirs[0, 0])]
            factors = [
                max(1, int(factor * count + 1e-9)) / count
                for factor, count in zip(factors, counts, strict=True)
            ]
        mine, theirs = (
            matrix * factor + alpha * torch.eye(len(mean), dtype=torch.float64)
            for matrix, factor in ((mine, factors[0]), (theirs, factors[1]))
        )
        want = torch.linalg.solve(mine + theirs, mine @ mean + theirs @ other_mean)
        torch.testing.assert_close(state.centroids[k].double(), want, rtol=1e-4, atol=1e-4)
        assert (
            share == 1
            or centroid == "count_mean"
            or float(mine.trace() / (mine + theirs).trace()) <= share + 1e-6
        )
    assert told or share == 1
    _, again = siege.after([copied(reply)])
    assert not any("its claims on" in fault for fault in again)  # it is reported once


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_share", 0.0), ("max_change", math.nan), ("max_faults", 0), ("max_message_mb", 0)],
)
def test_limits_are_checked(key, value):
    with pytest.raises(ConfigError, match=key):
        Limits(**{key: value})
