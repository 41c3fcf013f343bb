"""Shamir's shares of a secret of 32 bytes: any `threshold` of them give the secret, fewer tell
nothing.

The secret is f(0) of a random polynomial f of degree threshold − 1 over the integers modulo the
prime 2^521 − 1; the share of point i is f(i).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from ..errors import BayflowerError

PRIME = 2**521 - 1
SECRET = 32  # bytes


def split(secret: bytes, points: Iterable[int], threshold: int) -> dict[int, int]:
    """Return the share of every point; points are positive and differ."""
    at = list(points)
    if len(secret) != SECRET or not 1 <= threshold <= len(at) or min(at) < 1:
        raise ValueError("a secret has 32 bytes, a threshold at most as many as there are points")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in at[1:threshold])]
    found = {}
    for point in at:
        value = 0
        for term in reversed(terms):
            value = (value * point + term) % PRIME
        found[point] = value
    return found


def join(shares: Mapping[int, int]) -> bytes:
    """Return f(0) of the polynomial through these shares; raise if it is no secret."""
    total = 0
    for point, share in shares.items():
        above = below = 1
        for other in shares:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        total = (total + share * above * pow(below, -1, PRIME)) % PRIME
    if total >= 2 ** (8 * SECRET):
        raise BayflowerError("shares do not belong together")
    return total.to_bytes(SECRET, "big")
