"""Rounds that are added up before their numbers are read have the results of rounds that wait: the
same bits, records and faults, whoever diverges or attacks.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_bits, small_prepared, some

from bayflower.engines import execute
from bayflower.files import checkpoint
from bayflower.fused import ahead
from bayflower.fused.engine import Fused
from bayflower.methods import METHODS
from bayflower.tree import flatten, unflatten

ROUNDS, VICTIM = 7, 3
# each round is limited by its own median, or no sum is fast
WAITING = {"pvi", "fedep", "fedep-ft", "fedsep", "qlsd", "qlsd-ft"}
GIVEN = {"rounds": ROUNDS, "num_clients": 9, "new_clients": 0, "stacking": "yes", "keep": 0.3}
GIVEN |= {"evaluate_every": 0}
# what the client does, and in which rounds
ATTACKS = {
    "peace": (0.0, range(0)),
    "flip": (-1.0, range(4, ROUNDS + 1)),
    "one flip": (-1.0, range(5, 6)),
    "far": (300.0, range(4, 5)),
    "far, twice": (300.0, (3, 6)),
    "far in the last round": (300.0, range(ROUNDS, ROUNDS + 1)),
    "diverged": (math.nan, range(5, 6)),
    "diverged for good": (math.nan, range(3, ROUNDS + 1)),
}
FEW = {("fedper", one) for one in ("far, twice", "diverged")}


def attacked(got, sent, factor):
    """Return replies in which the change of one client is multiplied by `factor`."""
    place, flat = got.clients.index(VICTIM), flatten(got.updates)
    names = {name.removeprefix("params/"): name for name in flat if name.startswith("params/")}
    for short, name in names.items():
        before = sent.get(short, torch.zeros_like(flat[name][place]))
        flat[name] = flat[name].clone()
        flat[name][place] = before + factor * (flat[name][place] - before)
    return got._replace(updates=unflatten(type(got.updates), flat))


def outcome_of(method, attack, patch, early, out=None, **more):
    """Return (the outcome of a run under attack, rounds that went ahead, rounds done again)."""
    factor, rounds = ATTACKS[attack]
    plain, went, again = Fused.train, [], []

    def train(self, chosen, broadcast, round):
        got = plain(self, chosen, broadcast, round)
        sent = getattr(broadcast, "params", {})
        return attacked(got, sent, factor) if round in rounds else got

    def settled(self):
        unread = self.unread
        well = known(self)
        (went if well else again).extend([unread.round] if unread is not None else [])
        return well

    known = ahead.Ahead.settled
    patch.setattr(ahead, "EVERYWHERE", early)
    patch.setattr(Fused, "train", train)
    patch.setattr(ahead.Ahead, "settled", settled)
    done = execute(small_prepared(method, "fused", **{**GIVEN, **more}), out=out)
    patch.undo()
    return done, went, again


def assert_same_outcome(one, two):
    assert_same_bits(one.server_state, two.server_state)
    assert one.client_states.keys() == two.client_states.keys()
    for client in one.client_states:
        assert_same_bits(one.client_states[client], two.client_states[client])
    assert one.faults == two.faults
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert a.keys() == b.keys()
        same = [name for name in a if "second" not in name]
        assert [a[name] for name in same] == [b[name] for name in same]


def compared(method, attack, **more):
    """Compare a run that goes ahead with one that waits; return the rounds of the first."""
    with pytest.MonkeyPatch.context() as patch:
        slow, none, _ = outcome_of(method, attack, patch, False, **more)
        quick, went, again = outcome_of(method, attack, patch, True, **more)
    assert none == []
    assert_same_outcome(quick, slow)
    return went, again, quick


@pytest.mark.parametrize("method", some(list(METHODS), ["fedper", "pfedvmp"]))
def test_every_method_goes_ahead_to_the_same_results(method):
    went, again, _ = compared(method, "peace", rounds=4)
    assert went == [] if method in WAITING else went[:1] == [2]
    assert again == [] or method == "fedivon"  # an honest client of it is far from the others


@pytest.mark.slow
def test_a_guess_that_is_always_wrong_is_made_ever_less_often(monkeypatch):
    """Each costs a round of training: four of them in twenty rounds, not eighteen."""
    plain = ahead.finite
    monkeypatch.setattr(ahead, "finite", lambda *given: plain(*given) & False)
    went, again, _ = compared("fedavg", "peace", rounds=20, keep=0.1)
    assert (went, again) == ([], [2, 3, 6, 13])
    seen = []
    monkeypatch.setattr(
        ahead, "finite", lambda *given: plain(*given) & (seen.append(1) or len(seen) not in (3, 12))
    )
    went, again, _ = compared("fedavg", "peace", rounds=20, keep=0.1)
    assert went == [2, 3, *range(5, 13), *range(14, 21)]
    assert again == [4, 13]  # eight good ones between them: both count as the first


@pytest.mark.parametrize(
    "pair",
    some(
        itertools.product(["fedper", "fedavg", "pfedvmp", "fedmap"], list(ATTACKS)[1:]),
        FEW,
    ),
    ids=lambda pair: "-".join(pair),
)
def test_who_attacks_or_diverges_is_found_as_if_rounds_waited(pair):
    method, attack = pair
    went, again, done = compared(method, attack)
    assert again, "nothing was taken back, so the attack was not seen"
    assert set(again) <= set(ATTACKS[attack][1])
    assert went, "no round went ahead"
    assert any(f"client {VICTIM}" in text for text in done.faults)


@pytest.mark.parametrize("method", some(["fedper", "scaffold", "fedavg", "pfedvmp"], ["fedper"]))
def test_rounds_without_a_client_that_is_known_to_oppose_the_others_go_ahead(method, monkeypatch):
    monkeypatch.setitem(ATTACKS, "flip", (-1.0, range(4, 15)))
    went, again, done = compared(method, "flip", rounds=14)
    assert went[-4:] == [11, 12, 13, 14]
    assert again == ([] if method == "scaffold" else [5])  # when it turns against its own past
    alone = outcome_of(method, "peace", monkeypatch, False, rounds=14)[0].server_state
    server = flatten(done.server_state)
    assert any(not torch.equal(server[name], one) for name, one in flatten(alone).items())


def test_the_time_of_a_round_that_is_done_again_counts_once(monkeypatch):
    """A clock that goes on by one in each training: the round of a wrong guess takes three, since
    it is trained twice and what was begun after it is lost.
    """
    plain, now = Fused.train, [0.0]

    def train(self, chosen, broadcast, round):
        now[0] += 1.0
        return plain(self, chosen, broadcast, round)

    monkeypatch.setattr("bayflower.fused.meter.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Fused, "train", train)
    with pytest.MonkeyPatch.context() as patch:
        done, _, again = outcome_of("fedper", "far", patch, True)
    assert again == [4]
    assert [record["seconds"] for record in done.rounds] == [1, 1, 1, 3, 1, 1, 1]


def test_rounds_are_read_before_a_test_and_before_a_checkpoint(tmp_path):
    more = {"evaluate_every": 3, "checkpoint_every": 2}
    written = []
    for early in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            out = tmp_path / str(early)
            done, went, again = outcome_of("fedper", "far, twice", patch, early, out, **more)
        written.append((done, checkpoint.read(out)))
    assert went
    assert again == [3, 6]
    assert_same_outcome(*(done for done, _ in written))
    one, two = (kept for _, kept in written)
    assert one.round == two.round == ROUNDS
    assert one.clients.keys() == two.clients.keys()
    assert one.faults == two.faults
    assert_same_bits(one.server, two.server)
    for client in one.clients:
        assert_same_bits(one.clients[client], two.clients[client])


def test_training_that_fails_on_a_wrong_sum_is_tried_again(monkeypatch):
    """A client's numbers are none, so the sum's are none, and the next training raises."""
    plain, raised = Fused.train, []

    def train(self, chosen, broadcast, round):
        if not all(bool(leaf.isfinite().all()) for leaf in broadcast.params.values()):
            raised.append(round)
            raise RuntimeError("a matrix has no inverse")
        return plain(self, chosen, broadcast, round)

    monkeypatch.setattr(Fused, "train", train)
    _, again, _ = compared("fedavg", "diverged")
    assert raised == [6]
    assert again == [5]


def test_other_errors_are_raised(monkeypatch):
    plain = Fused.train

    def train(self, chosen, broadcast, round):
        if round == 4:
            raise RuntimeError("no space left")
        return plain(self, chosen, broadcast, round)

    monkeypatch.setattr(Fused, "train", train)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no space left"):
        outcome_of("fedavg", "peace", patch, True)
