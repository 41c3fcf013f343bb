"""Secure and plain sums are equal to the bit for every additive method: with no drop-outs, one, and
30 % of the clients at every stage, with replies in any order and a server that is resumed.
"""

from __future__ import annotations

import pytest
from secureruns import ADDITIVE, SECURE, AnyOrder, run, same, summed

from bayflower import methods
from bayflower.contract import ServerHalf
from bayflower.files import checkpoint
from bayflower.files.store import DiskStore, MemoryStore

SMALL = {"num_clients": 10, "keep": 0.3, "rounds": 4}
FIRST = ("pfedvmp",)
# by round: who is lost before it has shared a ticket, before and after it trained, when it is asked
# for shares of seeds, and of keys. The server is resumed after round 2, so all enrol in round 3.
# In round 3 these are 3 of 10, 2 of the 7 that are asked for an update, and 3 of 10.
LOST = {
    2: {"train": {3}, "late": set(), "unmask": {5}, "recover": {6}},
    3: {"enrol": {0, 4, 9}, "train": {2}, "late": {7}, "unmask": {1, 8}, "recover": {5}},
    4: {"enrol": {4}, "train": set(), "late": {8}, "unmask": {0}, "recover": {2}},
}
COUNTS = [10, 9, 5, 8]  # clients in the sums


def lost(request, client, round):
    """Say who is lost; "late": it trains, and its reply is lost."""
    gone = LOST.get(round, {})
    if request == "train" and client in gone.get("late", ()):
        return "late"
    if request == "train" and client in gone.get("enrol", ()):
        return True  # a plain run does not ask for tickets
    return client in gone.get(request, ())


def resumed(method, tmp_path, **settings):
    """Return the strategy of a secure run whose server is another process after two rounds."""
    store, saved = MemoryStore(), []
    known = {"store": store, "kind": AnyOrder, **SMALL, **settings}
    run(method, lost, saved=saved, num_rounds=2, **known)
    assert [one.round for one in saved] == [1, 2]
    checkpoint.write(tmp_path, saved[-1])
    return run(method, lost, resume=checkpoint.read(tmp_path), num_rounds=4, **known)


@pytest.mark.parametrize(
    "method",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in ADDITIVE],
)
def test_every_method_has_the_bits_of_plain_sums(method, tmp_path, monkeypatch):
    secure = resumed(method, tmp_path, **SECURE)
    if methods.get(method).server.summand is not ServerHalf.summand:
        summed(monkeypatch, method)
    plain = run(method, lost, num_rounds=4, **SMALL)  # in order, and never stopped
    assert [one["num_clients"] for one in plain.records] == COUNTS
    assert [one["num_clients"] for one in secure.records] == COUNTS
    assert same(secure, plain)
    for ours, theirs in zip(secure.records, plain.records, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-12)


@pytest.mark.slow
def test_a_server_that_dies_between_a_sum_and_its_checkpoint_goes_on_without_that_sum(tmp_path):
    """Clients refuse a second sum of the same round; the next round is summed again."""
    store, saved = DiskStore(tmp_path / "state"), []
    known = {"store": store, **SMALL, **SECURE}
    run("fedavg", saved=saved, num_rounds=2, **known)
    again = run("fedavg", resume=saved[0], num_rounds=4, **known)
    assert [one["num_clients"] for one in again.records] == [10, 0, 10, 10]
    assert any("round 2 was summed before" in fault for fault in again.faults)
    plain = run(
        "fedavg",
        lambda request, _, round: "late" if (request, round) == ("train", 2) else False,
        num_rounds=4,
        **SMALL,
    )
    assert same(again, plain)
