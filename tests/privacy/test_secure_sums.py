"""Secure sums: masked vectors add up to the plain sum, whoever drops out when, and clients refuse
a server that lies.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from fractions import Fraction

import numpy as np
import pytest

from bayflower.errors import BayflowerError
from bayflower.privacy import masks, shamir
from bayflower.privacy.party import Party
from bayflower.privacy.session import SecureError, Session, read_cards, read_session
from bayflower.privacy.sums import Gathering, make_session, read_offer

RUN, SIZE = "run-1", 40


class Town:
    """Some clients and a server that passes messages as JSON."""

    def __init__(self, clients=range(5), share=2 / 3, peers=None):
        self.share = share
        self.parties = {client: Party(RUN, client, {}, {}, peers) for client in clients}
        self.meet()

    def meet(self):
        self.cards = read_cards(
            json.loads(json.dumps([self.parties[k].card for k in sorted(self.parties)])), RUN
        )
        self.threshold = max(3, int(self.share * len(self.cards) + 1e-9) + 1)

    def offers(self, clients):
        found = {}
        for client in clients:
            said = json.loads(json.dumps(self.parties[client].enrol(self.cards, self.threshold)))
            card = self.parties[client].card
            found[client] = read_offer(said, card, self.cards, RUN, self.threshold)
        return found

    def open(self, clients, round=1):
        offers = self.offers(clients)
        session = make_session(RUN, round, "window", self.cards, offers, self.share)
        return Gathering(read_session(session.to_text()), offers, SIZE)

    def upload(self, gathering, client, vector):
        masked = vector.copy()
        party = self.parties[client]
        party.ready(gathering.session, "window")
        party.mask(gathering.session, masked)
        gathering.take(client, masked)
        return masked

    def ask(self, gathering, holder, kind, there=None, owners=None):
        there = gathering.there if there is None else there
        gone = [t.client for t in gathering.session.tickets if t.client not in there]
        owners = (there if kind == "seed" else gone) if owners is None else owners
        sealed = {int(k): v for k, v in json.loads(gathering.sealed_for(holder, owners)).items()}
        party, session = self.parties[holder], gathering.session
        if kind == "seed":
            return party.unmask(session, there, sealed)
        return party.recover(session, there, gathering.signatures, sealed)

    def finish(self, gathering, helpers):
        gathering.check()
        for kind in ("seed", "key"):
            if kind == "key" and not gathering.gone:
                continue
            for holder in helpers:
                said = json.loads(json.dumps(self.ask(gathering, holder, kind)))
                gathering.hear(holder, kind, said)
        return gathering.result()


def vectors(clients, seed=0):
    draw = np.random.default_rng(seed)
    return {k: draw.integers(0, 2**64, SIZE, dtype=np.uint64) for k in clients}


def plain(chosen):
    """The oracle: Python's integers."""
    return [sum(int(v[k]) for v in chosen) % 2**64 for k in range(SIZE)]


def test_masked_sums_are_plain_sums_with_drop_outs_at_every_stage_in_any_order():
    for share, number in ((2 / 3, 5), (0.5, 6)):
        town, values = Town(range(number), share), vectors(range(number))
        order = random.Random(1)
        least = max(3, int(share * number + 1e-9) + 1)
        for round, lost in enumerate(itertools.product(range(number - least + 1), repeat=3)):
            before, upload, late = lost  # never enrolled, enrolled but silent, gone when unmasking
            if before + upload > number - least:
                continue
            clients = order.sample(range(number), number)
            asked = sorted(clients[before:])
            gathering = town.open(asked, round + 1)
            if number - before - upload < gathering.session.least:
                continue
            for client in clients[before + upload :]:
                masked = town.upload(gathering, client, values[client])
                assert not np.any(masked == values[client])
            helpers = order.sample(range(number), number - late)
            found = town.finish(gathering, helpers)
            assert found.tolist() == plain([values[k] for k in clients[before + upload :]])


def test_fewer_than_the_threshold_are_refused_at_both_ends():
    town, values = Town(), vectors(range(5))
    gathering = town.open(range(5))
    for client in range(3):  # 4 of 5 are needed
        town.upload(gathering, client, values[client])
    with pytest.raises(BayflowerError, match="3 of 5 clients sent an update, 4 are needed"):
        gathering.check()
    with pytest.raises(SecureError, match="3 of 5 clients are in the sum, 4 are needed"):
        town.ask(gathering, 0, "seed")
    town.upload(gathering, 3, values[3])
    for holder in range(3):
        gathering.hear(holder, "seed", town.ask(gathering, holder, "seed"))
    with pytest.raises(BayflowerError, match=r"3 of 5 clients helped .* 4 are needed"):
        gathering.result()


def test_no_client_gives_both_secrets_of_another_within_a_session_or_across_sessions():
    town, values = Town(), vectors(range(5))
    gathering = town.open(range(5))
    for client in range(5):
        town.upload(gathering, client, values[client])
    town.ask(gathering, 0, "seed")
    with pytest.raises(SecureError, match="named other clients in this sum before"):
        town.ask(gathering, 0, "seed", there=[0, 1, 2, 3])  # 4 dropped out after all
    # a later session with an old ticket: client 4 is said to have dropped out of it
    town = Town()
    offers = town.offers(range(5))
    first = Gathering(make_session(RUN, 1, "window", town.cards, offers, 2 / 3), offers, SIZE)
    for client in range(5):
        town.upload(first, client, values[client])
    for holder in range(5):
        first.hear(holder, "seed", town.ask(first, holder, "seed"))
    fresh = town.offers(range(4)) | {4: offers[4]}
    second = Gathering(make_session(RUN, 2, "window", town.cards, fresh, 2 / 3), fresh, SIZE)
    for client in range(4):
        town.upload(second, client, values[client])
    for holder in range(5):
        second.hear(holder, "seed", town.ask(second, holder, "seed"))
    with pytest.raises(SecureError, match="both secrets of client 4 were asked for"):
        town.ask(second, 0, "key")
    with pytest.raises(SecureError, match="ticket is unknown or was used before"):
        town.parties[4].mask(second.session, values[4])  # and its owner uses a ticket once


def test_mask_keys_are_given_only_after_most_holders_signed_the_same_list():
    town, values = Town(range(6)), vectors(range(6))
    gathering = town.open(range(6))
    for client in range(5):
        town.upload(gathering, client, values[client])
    with pytest.raises(SecureError, match="signed no such list"):
        town.ask(gathering, 0, "key")
    for holder in range(4):  # 5 of 6 are needed
        gathering.hear(holder, "seed", town.ask(gathering, holder, "seed"))
    gathering.signatures[4] = gathering.signatures[3]  # somebody else's
    with pytest.raises(SecureError, match=r"4 holders signed .* 5 are needed"):
        town.ask(gathering, 0, "key")
    # the server tells the last two that client 4 dropped out as well, to get its mask key
    gathering.signatures.pop(4)
    for holder in (4, 5):
        with pytest.raises(SecureError, match="4 of 6 clients are in the sum, 5 are needed"):
            town.ask(gathering, holder, "seed", there=[0, 1, 2, 3])
    gathering.hear(4, "seed", town.ask(gathering, 4, "seed"))
    for holder in range(5):
        gathering.hear(holder, "key", town.ask(gathering, holder, "key"))
    assert gathering.result().tolist() == plain([values[k] for k in range(5)])


def test_a_server_cannot_stand_in_for_a_client():
    values = vectors(range(4))
    town = Town(range(4))
    gathering = town.open(range(4))
    for client in range(4):
        town.upload(gathering, client, values[client])
    town.finish(gathering, range(4))
    false = Party(RUN, 3, {}, {})  # a key that the server made
    real, town.parties[3] = town.parties[3], false
    town.meet()
    with pytest.raises(SecureError, match="client 3 shows another key than the one that it showed"):
        town.parties[0].enrol(town.cards, town.threshold)
    # with a list of peers not even the first time
    listed = {
        client: Party("", client, {}, {"key": f"{client:064x}"}).card.verify for client in range(4)
    }
    one = Party(RUN, 0, {}, {"key": f"{0:064x}"}, listed)
    with pytest.raises(SecureError, match="another key than the one in the file of peers"):
        one.enrol((one.card, *town.cards[1:]), 3)
    # a ticket of its own under a client's card
    town.parties[3] = real
    town.meet()
    offers = town.offers(range(4))
    forged = offers[3].ticket._replace(mask=masks.public_of(b"s" * 32).hex())
    session = make_session(RUN, 2, "window", town.cards, offers, 2 / 3)
    session = session._replace(tickets=(*session.tickets[:3], forged))
    with pytest.raises(SecureError, match="ticket of client 3 is not signed by that client"):
        read_session(session.to_text())
    # a client whose own card is replaced
    with pytest.raises(SecureError, match="client 0 itself is missing, or stood in for"):
        town.parties[0].enrol(town.cards[1:], 3)


def test_a_session_with_weak_numbers_is_refused():
    town = Town(range(6))
    session = town.open(range(6)).session
    for change, text in (
        ({"threshold": 3}, "no majority"),
        ({"least": 3}, "too small"),
        ({"least": 2, "tickets": session.tickets[:2]}, "too small"),
        ({"tickets": session.tickets[::-1]}, "in order"),
        ({"cards": session.cards[:4]}, "one a client with a card"),
    ):
        with pytest.raises(SecureError, match=text):
            read_session(session._replace(**change).to_text())
    with pytest.raises(SecureError, match="no majority"):
        town.parties[0].enrol(town.cards, 3)
    assert isinstance(read_session(session.to_text()), Session)


def test_a_round_is_summed_once():
    """Two sums over the same models would differ by the model of whoever is in one alone."""
    town, values = Town(range(4)), vectors(range(4))
    for round, text in ((5, ""), (5, "round 5 was summed before"), (4, "round 4 was summed")):
        gathering = town.open(range(4), round)
        if text:
            with pytest.raises(SecureError, match=text):
                town.upload(gathering, 0, values[0])
            with pytest.raises(SecureError, match=text):
                town.ask(gathering, 0, "seed", there=[0, 1, 2])
            continue
        for client in range(4):
            town.upload(gathering, client, values[client])
        assert town.finish(gathering, range(4)).tolist() == plain(values.values())


def test_different_views_of_a_session_share_no_mask():
    """A client that was shown another list of clients spoils the sum, and shows nothing."""
    town, values = Town(range(4)), vectors(range(4))
    gathering = town.open(range(4))
    other = gathering.session._replace(round=2)
    for client in range(3):
        town.upload(gathering, client, values[client])
    masked = values[3].copy()
    town.parties[3].mask(other, masked)
    gathering.take(3, masked)
    assert town.finish(gathering, range(4)).tolist() != plain(values.values())


def test_wrong_shares_are_noticed_and_passed_over_where_enough_others_are_right():
    town, values = Town(range(6), 0.5), vectors(range(6))
    gathering = town.open(range(6))
    for client in range(6):
        town.upload(gathering, client, values[client])
    for holder in range(6):
        said = town.ask(gathering, holder, "seed")
        if holder == 0:
            said["shares"]["2"] = f"{int(said['shares']['2'], 16) ^ 1:x}"
        gathering.hear(holder, "seed", said)
    assert gathering.result().tolist() == plain(values.values())
    gathering.shares["seed"][2] = {1: 5, 2: 6, 3: 7, 4: 8}
    with pytest.raises(BayflowerError, match="client 2's secret do not belong together"):
        gathering.result()


def test_shares_against_rational_arithmetic_on_small_numbers(monkeypatch):
    """Lagrange's formula over the integers gives f(0), and fewer shares fit every secret."""
    secret = bytes(31) + b"\x2a"
    shares = shamir.split(secret, [1, 2, 3, 4, 5], 3)
    for group in itertools.combinations(shares, 3):
        assert shamir.join({k: shares[k] for k in group}) == secret
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda _: 7)
    small = shamir.split(secret, [1, 2, 4], 3)
    assert small == {k: 42 + 7 * k + 7 * k * k for k in (1, 2, 4)}
    exact = sum(
        Fraction(value) * np.prod([Fraction(j, j - k) for j in small if j != k])
        for k, value in small.items()
    )
    assert exact == 42
    with pytest.raises(BayflowerError, match="do not belong together"):
        shamir.join({1: shares[1], 2: shares[2]})


def test_masks_are_the_key_stream_of_aes_in_counter_mode():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key, size = hashlib.sha256(b"k").digest(), 3 * masks.BLOCK + 5
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * size))
    vector = np.arange(size, dtype=np.uint64)
    masks.add(vector, key)
    assert np.array_equal(vector, np.frombuffer(stream, "<u8") + np.arange(size, dtype=np.uint64))
    masks.add(vector, key, -1)
    assert np.array_equal(vector, np.arange(size, dtype=np.uint64))
