"""The server's side of a secure sum: it adds masked vectors and takes the masks off the sum.

The server holds no vector of a single client but a masked one, and adds that to the sum at once.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import BayflowerError
from . import masks, shamir
from .session import (
    Card,
    SecureError,
    Session,
    Ticket,
    canonical,
    digest,
    is_signed,
    more_than,
    read,
    sealed_of,
    survivors_text,
)

TRIES = 50  # groups of shares that are tried if some shares are wrong


class Offer(NamedTuple):
    """A ticket and its shares, sealed for each holder."""

    ticket: Ticket
    sealed: Mapping[int, str]


def read_offer(content: Any, card: Card, cards: Sequence[Card], run: str, threshold: int) -> Offer:
    """Return the offer of a client that came as JSON; raise if nobody could use it."""
    if not isinstance(content, dict) or set(content) != {"ticket", "sealed"}:
        raise SecureError("the ticket of a client cannot be read")
    ticket, sealed = read(Ticket, content["ticket"]), sealed_of(content["sealed"])
    if ticket.client != card.client or not is_signed(
        card.verify, ticket.text(run), ticket.signature
    ):
        raise SecureError(f"the ticket of client {card.client} is not signed by that client")
    if ticket.holders != digest(list(cards)) or ticket.threshold != threshold:
        raise SecureError(f"the ticket of client {card.client} was made for other holders")
    if set(sealed) != {one.client for one in cards}:
        raise SecureError(f"client {card.client} did not share its secrets with all holders")
    return Offer(ticket, sealed)


def make_session(
    run: str,
    round: int,
    window: str,
    cards: Sequence[Card],
    offers: Mapping[int, Offer],
    share: float,
) -> Session:
    """Return the session of a round; more than `share` of its clients must be in the sum."""
    tickets = tuple(offers[client].ticket for client in sorted(offers))
    threshold, least = more_than(share, len(cards)), more_than(share, len(tickets))
    return Session(run, round, window, tuple(cards), tickets, threshold, least)


class Gathering:
    """The sum of one session."""

    def __init__(self, session: Session, offers: Mapping[int, Offer], size: int) -> None:
        self.session, self.offers = session, offers
        self.name = session.digest()
        self.sum = np.zeros(size, dtype=np.uint64)
        self.there: list[int] = []  # clients in the sum
        self.shares: dict[str, dict[int, dict[int, int]]] = {"seed": {}, "key": {}}
        self.signatures: dict[int, str] = {}

    @property
    def gone(self) -> list[int]:
        """Return the clients that are not in the sum."""
        return [one.client for one in self.session.tickets if one.client not in self.there]

    def take(self, client: int, vector: np.ndarray) -> None:
        """Add the masked vector of a client."""
        if client in self.there or client not in self.offers:
            raise SecureError(f"client {client} has a vector in the sum, or was not asked for one")
        if vector.shape != self.sum.shape or vector.dtype != np.uint64:
            raise SecureError(
                f"the masked vector of client {client} has {vector.size} numbers, agreed were "
                f"{self.sum.size}"
            )
        self.sum += vector
        self.there = sorted([*self.there, client])

    def check(self) -> None:
        """Raise if too few clients are in the sum."""
        if len(self.there) < self.session.least:
            raise BayflowerError(
                f"{len(self.there)} of {len(self.session.tickets)} clients sent an update, "
                f"{self.session.least} are needed for a secure sum; the round is refused"
            )

    # -- what holders are asked, and what they say -------------------------------------------------
    def sealed_for(self, holder: int, owners: Sequence[int]) -> str:
        """Return what holder `holder` keeps of the owners' secrets, as JSON."""
        return canonical({str(one): self.offers[one].sealed[holder] for one in owners})

    def hear(self, holder: int, kind: str, content: Any) -> None:
        """Take a holder's shares, and its signature with those of seeds."""
        if not isinstance(content, dict) or not isinstance(content.get("shares"), dict):
            raise SecureError(f"the shares from client {holder} cannot be read")
        owners = self.there if kind == "seed" else self.gone
        if kind == "seed":
            signature, card = str(content.get("signature")), self.session.holders()[holder]
            if not is_signed(card.verify, survivors_text(self.name, self.there), signature):
                raise SecureError(f"client {holder} signed another list of clients in the sum")
            self.signatures[holder] = signature
        for owner in owners:
            share = content["shares"].get(str(owner))
            if isinstance(share, str) and len(share) <= 132:
                self.shares[kind].setdefault(owner, {})[holder + 1] = int(share, 16)

    # -- the end -----------------------------------------------------------------------------------
    def result(self) -> np.ndarray:
        """Return the sum without masks; raise if too few shares came."""
        self.check()
        tickets = {ticket.client: ticket for ticket in self.session.tickets}
        seeds = {one: self._secret("seed", tickets[one]) for one in self.there}
        keys = {one: self._secret("key", tickets[one]) for one in self.gone}
        total = self.sum.copy()
        for seed in seeds.values():
            masks.add(total, masks.derive(seed, self.name, masks.MASK), -1)
        for gone, secret in keys.items():
            key = masks.private(secret)
            for one in self.there:
                there = bytes.fromhex(tickets[one].mask)
                shared = masks.agreed(key, there, self.name, masks.MASK)
                masks.add(total, shared, -masks.pair_sign(one, gone))
        return total

    def _secret(self, kind: str, ticket: Ticket) -> bytes:
        """Return a client's secret from the shares that came."""
        owner = ticket.client
        shares, needed = self.shares[kind].get(owner, {}), self.session.threshold
        if len(shares) < needed:
            raise BayflowerError(
                f"{len(shares)} of {len(self.session.cards)} clients helped to take the masks of "
                f"client {owner} off, {needed} are needed; the round is refused"
            )
        groups: Any = itertools.chain(
            [sorted(shares)[:needed]],
            (random.sample(sorted(shares), needed) for _ in range(TRIES)),
        )
        for group in groups if len(shares) > needed else [sorted(shares)]:
            try:
                found = shamir.join({point: shares[point] for point in group})
            except BayflowerError:
                continue
            if fits(kind, found, ticket):
                return found
        raise BayflowerError(
            f"the shares of client {owner}'s secret do not belong together; the round is refused"
        )


def fits(kind: str, secret: bytes, ticket: Ticket) -> bool:
    """Return whether a secret is the one that the ticket was made of."""
    if kind == "seed":
        return hashlib.sha256(secret).hexdigest() == ticket.commit
    return masks.public_of(secret).hex() == ticket.mask
