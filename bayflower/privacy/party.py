"""The client's side of a secure sum: what it tells, and what it refuses.

    enrol     its card, and a ticket whose two secrets are shared among all holders
    mask      its vector plus masks: one of its own, one with every other client of the session
    unmask    its shares of the own masks of the clients in the sum; it signs who they are
    recover   its shares of the mask keys of clients that dropped out, once enough holders have
              signed the same list

A client never gives both shares of one ticket, signs one list a session, uses a ticket once, and
takes part in no session of a round that was summed before. Two lists cannot both be signed by more
than half of the holders. So what a lying server can learn is one sum over one list of clients.

`notes` is what a client remembers of a run, and `own` what it remembers of itself, in JSON types.
Whoever calls must write both to disk before the answer is sent.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import masks, shamir
from .session import (
    FEWEST,
    Card,
    SecureError,
    Session,
    Ticket,
    digest,
    is_signed,
    seal,
    sign,
    survivors_text,
    unseal,
)

KEPT = 8  # sessions whose signed list is remembered, and unused tickets


class Party:
    """One client in the secure sums of one run."""

    def __init__(
        self,
        run: str,
        client: int,
        notes: dict[str, Any],
        own: dict[str, Any],
        peers: Mapping[int, str] | None = None,
    ) -> None:
        self.run, self.client, self.notes, self.own, self.peers = run, client, notes, own, peers
        own.setdefault("key", secrets.token_bytes(32).hex())
        own.setdefault("known", {})  # by client: the key it showed first
        notes.setdefault("seal", secrets.token_bytes(32).hex())
        for name in ("cards", "tickets", "given", "signed"):
            notes.setdefault(name, {})
        notes.setdefault("summed", -1)  # the last round for which shares were given

    @property
    def card(self) -> Card:
        """Return the client's card."""
        key = bytes.fromhex(self.own["key"])
        bare = Card(self.client, verify_key(key), masks.public_of(self._seal).hex())
        return bare._replace(signature=sign(key, bare.text(self.run)))

    @property
    def _seal(self) -> bytes:
        return bytes.fromhex(self.notes["seal"])

    # -- who is there ------------------------------------------------------------------------------
    def meet(self, cards: Iterable[Card]) -> None:
        """Remember the others' keys; raise if one is not the key that was given or shown before."""
        for card in cards:
            name = str(card.client)
            if self.peers is not None:
                expected, where = self.peers.get(card.client), "in the file of peers"
                if expected is None:
                    raise SecureError(f"client {name} is not listed in the file of peers")
            else:
                expected, where = self.own["known"].get(name, card.verify), "that it showed before"
            if card.verify != expected:
                raise SecureError(
                    f"client {name} shows another key than the one {where}; somebody may stand in "
                    "for it. If its machine was set up anew, correct the file of peers, or remove "
                    "the known keys in the state folder"
                )
            if self.notes["cards"].setdefault(name, card.seal) != card.seal:
                raise SecureError(f"client {name} shows two sealing keys in one run")
            self.own["known"].setdefault(name, card.verify)
        if self.card not in tuple(cards):
            raise SecureError(f"client {self.client} itself is missing, or stood in for")

    # -- before a sum ------------------------------------------------------------------------------
    def enrol(self, cards: tuple[Card, ...], threshold: int) -> dict[str, Any]:
        """Return a new ticket, and its shares sealed for each of the holders."""
        self.meet(cards)
        if not (FEWEST <= threshold <= len(cards) and 2 * threshold > len(cards)):
            raise SecureError(f"{threshold} of {len(cards)} holders of shares is no majority")
        key, seed = secrets.token_bytes(32), secrets.token_bytes(32)
        bare = Ticket(
            self.client,
            secrets.token_hex(8),
            masks.public_of(key).hex(),
            hashlib.sha256(seed).hexdigest(),
            digest(list(cards)),
            threshold,
        )
        signature = sign(bytes.fromhex(self.own["key"]), bare.text(self.run))
        ticket = bare._replace(signature=signature)
        points = [card.client + 1 for card in cards]
        keys, seeds = (shamir.split(secret, points, threshold) for secret in (key, seed))
        own = masks.private(self._seal)
        sealed = {
            str(card.client): seal(
                own, card, ticket, self.run, keys[card.client + 1], seeds[card.client + 1]
            )
            for card in cards
        }
        unused = {**self.notes["tickets"], ticket.id: {"key": key.hex(), "seed": seed.hex()}}
        self.notes["tickets"] = dict(list(unused.items())[-KEPT:])
        return {"ticket": list(ticket), "sealed": sealed}

    # -- the sum -----------------------------------------------------------------------------------
    def mask(self, session: Session, vector: np.ndarray) -> None:
        """Mask a vector of uint64 in place."""
        own = self._ticket(session)
        secret = self.notes["tickets"].pop(own.id)  # used once, whatever happens
        key, seed, name = (
            masks.private(bytes.fromhex(secret["key"])),
            bytes.fromhex(secret["seed"]),
            session.digest(),
        )
        masks.add(vector, masks.derive(seed, name, masks.MASK))
        for other in session.tickets:
            if other.client != self.client:
                shared = masks.agreed(key, bytes.fromhex(other.mask), name, masks.MASK)
                masks.add(vector, shared, masks.pair_sign(self.client, other.client))

    def ready(self, session: Session, window: str) -> None:
        """Raise unless this client may take part in the session; nothing is trained in vain."""
        if session.run != self.run or session.window != window:
            raise SecureError("the session is of another run, or asks for other statistics")
        self._new(session)
        self.meet(session.cards)
        self._ticket(session)

    def _ticket(self, session: Session) -> Ticket:
        """Return this client's ticket in the session."""
        own = next((one for one in session.tickets if one.client == self.client), None)
        if own is None or own.id not in self.notes["tickets"]:
            raise SecureError("this client's ticket is unknown or was used before; enrol again")
        return own

    def _new(self, session: Session) -> None:
        """Raise if a sum of the session's round was made, or of a later one: the difference of two
        sums over the same models would tell a single one.
        """
        if session.round <= self.notes["summed"]:
            raise SecureError(
                f"round {session.round} was summed before; go on with round "
                f"{self.notes['summed'] + 1}, or start a new run"
            )

    # -- after the sum -----------------------------------------------------------------------------
    def unmask(
        self, session: Session, survivors: Iterable[int], sealed: Mapping[int, str]
    ) -> dict[str, Any]:
        """Return the shares of the survivors' own masks, and a signature of who they are."""
        name, there = session.digest(), sorted(survivors)
        signed = self.notes["signed"]
        clients = [ticket.client for ticket in session.tickets]
        if session.run != self.run:
            raise SecureError("the session is of another run")
        if name not in signed:
            self._new(session)
        self.meet(session.cards)
        if len(there) != len(set(there)) or not set(there) <= set(clients):
            raise SecureError("the list of clients in the sum names others than those asked")
        if len(there) < session.least:
            raise SecureError(
                f"{len(there)} of {len(clients)} clients are in the sum, {session.least} are "
                "needed; the round is refused"
            )
        if signed.get(name, there) != there:
            raise SecureError("the server named other clients in this sum before; refused")
        shares = self._give(session, there, sealed, "seed")
        signed[name] = there
        self.notes["signed"] = dict(list(signed.items())[-KEPT:])
        self.notes["summed"] = max(self.notes["summed"], session.round)
        content = survivors_text(name, there)
        return {"shares": shares, "signature": sign(bytes.fromhex(self.own["key"]), content)}

    def recover(
        self,
        session: Session,
        survivors: Iterable[int],
        signatures: Mapping[int, str],
        sealed: Mapping[int, str],
    ) -> dict[str, Any]:
        """Return the shares of the mask keys of all clients that are not survivors."""
        name, there, holders = session.digest(), sorted(survivors), session.holders()
        if self.notes["signed"].get(name) != there:
            raise SecureError("this client signed no such list of clients in the sum")
        self.meet(session.cards)
        content = survivors_text(name, there)
        agree = [
            client
            for client, signature in signatures.items()
            if client in holders and is_signed(holders[client].verify, content, signature)
        ]
        if len(agree) < session.threshold:
            raise SecureError(
                f"{len(agree)} holders signed the list of clients in the sum, "
                f"{session.threshold} are needed"
            )
        gone = [ticket.client for ticket in session.tickets if ticket.client not in there]
        return {"shares": self._give(session, gone, sealed, "key")}

    def _give(
        self, session: Session, owners: list[int], sealed: Mapping[int, str], kind: str
    ) -> dict[str, str]:
        """Return this client's shares of one kind; never both kinds of one ticket."""
        holders, given = session.holders(), self.notes["given"]
        tickets = {ticket.client: ticket for ticket in session.tickets}
        asked = [owner for owner in owners if owner in sealed]
        for owner in asked:
            if given.get(tickets[owner].id, kind) != kind:
                raise SecureError(
                    f"both secrets of client {owner} were asked for; together they would show "
                    "its update"
                )
        found, own = {}, masks.private(self._seal)
        for owner in asked:
            ticket = tickets[owner]
            given[ticket.id] = kind
            with suppress(SecureError):  # one client's broken shares must not stop the others' sum
                pair = unseal(
                    own,
                    holders[self.client],
                    holders[owner],
                    ticket,
                    self.run,
                    sealed[owner],
                )
                found[str(owner)] = f"{pair[kind == 'seed']:x}"
        return found


def verify_key(key: bytes) -> str:
    """Return the public key of a private Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()
