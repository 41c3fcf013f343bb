"""What server and clients tell each other in a secure sum, and the checks that each side makes.

    card      who a client is: the key its signatures are checked with, and the key that shares for
              it are sealed with
    ticket    the public part of the secrets with which a client masks one vector: used once
    session   one sum: its round, the form of the vectors, the holders of shares, the tickets of the
              clients that take part

Cards and tickets are signed by the client they are of, so the server cannot make one up. A session
has a digest that every mask is derived from: clients with different views of it share no mask, and
their vectors stay hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ..errors import BayflowerError
from . import masks

FEWEST = 3  # clients in a sum: of two, each would learn the other's part
MOST = 2_000  # holders of shares
SHARE = 66  # bytes of one share


class SecureError(BayflowerError):
    """The other side broke the rules of a secure sum."""


class Card(NamedTuple):
    """A client's public keys, as hexadecimal texts."""

    client: int
    verify: str  # Ed25519
    seal: str  # X25519
    signature: str = ""

    def text(self, run: str) -> list[Any]:
        """Return what is signed."""
        return ["card", run, *self[:-1]]


class Ticket(NamedTuple):
    """The public part of one mask."""

    client: int
    id: str
    mask: str  # X25519: the key of the masks that it shares with others
    commit: str  # digest of the seed of its own mask
    holders: str  # digest of the cards of those who hold shares of both secrets
    threshold: int  # shares that are needed
    signature: str = ""

    def text(self, run: str) -> list[Any]:
        """Return what is signed."""
        return ["ticket", run, *self[:-1]]


class Session(NamedTuple):
    """One sum."""

    run: str
    round: int
    window: str  # digest of the form of a vector
    cards: tuple[Card, ...]  # of the holders, by client
    tickets: tuple[Ticket, ...]  # of the clients that take part, by client
    threshold: int  # holders that must agree on who is in the sum
    least: int  # clients that must be in the sum

    def digest(self) -> str:
        """Return the name of the session."""
        return digest(["session", *self])

    def holders(self) -> dict[int, Card]:
        """Return the cards by client."""
        return {card.client: card for card in self.cards}

    def to_text(self) -> str:
        """Return the session as JSON."""
        return canonical(self)


def canonical(content: Any) -> str:
    """Return JSON that is the same for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def digest(content: Any) -> str:
    """Return the SHA-256 of some content."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def more_than(share: float, number: int) -> int:
    """Return the least whole number above `share` of `number`, at least 3."""
    return max(FEWEST, int(share * number + 1e-9) + 1)


def sign(key: bytes, content: Any) -> str:
    """Return the signature of a private Ed25519 key."""
    private = Ed25519PrivateKey.from_private_bytes(key)
    return private.sign(canonical(content).encode()).hex()


def is_signed(verify: str, content: Any, signature: str) -> bool:
    """Return whether the owner of `verify` has signed the content."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(verify))
        public.verify(bytes.fromhex(signature), canonical(content).encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def survivors_text(session: str, survivors: Iterable[int]) -> list[Any]:
    """Return what a holder signs when it agrees on who is in a sum."""
    return ["survivors", session, sorted(survivors)]


# -- reading what came ---------------------------------------------------------------------------
@lru_cache(maxsize=4)
def types_of(kind: Any) -> list[type]:
    """Return the types of the fields of a Card or Ticket."""
    return list(get_type_hints(kind).values())


def read(kind: Any, content: Any) -> Any:
    """Return a Card or Ticket that came as JSON."""
    if not isinstance(content, list) or [type(one) for one in content] != types_of(kind):
        raise SecureError(f"a {kind.__name__.lower()} of a secure sum cannot be read")
    return kind(*content)


def read_cards(content: Any, run: str) -> tuple[Card, ...]:
    """Return cards that came as JSON; raise unless each is signed by the key it shows."""
    if not isinstance(content, list) or not 0 < len(content) <= MOST:
        raise SecureError(f"a secure sum is for at most {MOST} holders of shares")
    cards = tuple(read(Card, one) for one in content)
    if [card.client for card in cards] != sorted({card.client for card in cards}):
        raise SecureError("the cards of a secure sum must be in order, one a client")
    for card in cards:
        if not 0 <= card.client < 2**31 or not is_signed(
            card.verify, card.text(run), card.signature
        ):
            raise SecureError(f"the card of client {card.client} is not signed by that client")
    return cards


@lru_cache(maxsize=4)
def read_session(text: str) -> Session:
    """Return a session that came as JSON; raise if it breaks a rule that makes a sum secure. A
    client needs it several times in a round, so signatures of the same text are checked once.
    """
    try:
        run, round, window, cards, tickets, threshold, least = json.loads(text)
        known = read_cards(cards, run)
        found = tuple(read(Ticket, one) for one in tickets)
    except (ValueError, TypeError) as error:
        raise SecureError(f"a session of a secure sum cannot be read ({error})") from None
    session = Session(run, round, window, known, found, threshold, least)
    if not all(isinstance(one, int) for one in (round, threshold, least)):
        raise SecureError("a session of a secure sum cannot be read")
    holders, clients = session.holders(), [ticket.client for ticket in found]
    if clients != sorted(set(clients)) or not set(clients) <= holders.keys():
        raise SecureError("the tickets of a secure sum must be in order, one a client with a card")
    if not (threshold >= FEWEST and 2 * threshold > len(holders) and threshold <= len(holders)):
        raise SecureError(
            f"{threshold} of {len(holders)} holders is no majority of at least {FEWEST}; two "
            "groups of them could be told different things"
        )
    if not (least >= FEWEST and 2 * least > len(clients)):
        raise SecureError(
            f"a sum over {least} of {len(clients)} clients is too small: at least {FEWEST} and "
            "more than half of them must be in it"
        )
    circle = digest(list(known))
    for ticket in found:
        card = holders[ticket.client]
        if not is_signed(card.verify, ticket.text(run), ticket.signature):
            raise SecureError(
                f"the ticket of client {ticket.client} is not signed by that client; somebody "
                "stands in for it"
            )
        if ticket.holders != circle or ticket.threshold != threshold:
            raise SecureError(
                f"the ticket of client {ticket.client} was made for other holders of shares"
            )
    return session


# -- sealed shares -------------------------------------------------------------------------------
def seal(own: masks.Key, to: Card, ticket: Ticket, run: str, key: int, seed: int) -> str:
    """Return the two shares of a ticket that the client `to` holds, readable by it alone."""
    content = key.to_bytes(SHARE, "big") + seed.to_bytes(SHARE, "big")
    cipher = ChaCha20Poly1305(masks.agreed(own, bytes.fromhex(to.seal), route(run, ticket, to)))
    return cipher.encrypt(bytes(12), content, None).hex()


def unseal(own: masks.Key, me: Card, owner: Card, ticket: Ticket, run: str, sealed: str) -> Any:
    """Return (the share of the key, the share of the seed) that were sealed for `me`."""
    key = masks.agreed(own, bytes.fromhex(owner.seal), route(run, ticket, me))
    try:
        content = ChaCha20Poly1305(key).decrypt(bytes(12), bytes.fromhex(sealed), None)
    except (InvalidTag, ValueError):
        raise SecureError(
            f"the shares of client {owner.client} for client {me.client} were changed on the way"
        ) from None
    return int.from_bytes(content[:SHARE], "big"), int.from_bytes(content[SHARE:], "big")


def route(run: str, ticket: Ticket, to: Card) -> str:
    """Return what the key of sealed shares is for: one ticket and one holder."""
    return canonical(["shares", run, ticket.client, ticket.id, to.client])


def sealed_of(content: Any) -> Mapping[int, str]:
    """Return sealed shares by client that came as JSON."""
    if not isinstance(content, dict) or not all(
        key.isdigit() and isinstance(value, str) for key, value in content.items()
    ):
        raise SecureError("sealed shares of a secure sum cannot be read")
    return {int(key): value for key, value in content.items()}
