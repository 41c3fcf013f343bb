"""Masks: streams of pseudo-random numbers modulo 2^64 that are added to a vector, or taken off.

A mask is the key stream of AES-256 in counter mode. Its key comes by HKDF from a secret that two
clients share (X25519) or that one client has for itself, and is bound to one session.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

BLOCK = 1 << 17  # numbers at a time: they stay in the cache
ZEROS = bytes(8 * BLOCK)


def derive(secret: bytes, info: str) -> bytes:
    """Return a key of 32 bytes for the purpose `info`."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=info.encode()).derive(secret)


def agreed(own: bytes, other: bytes, info: str) -> bytes:
    """Return the key that the private key `own` and the public key `other` have in common."""
    there = X25519PublicKey.from_public_bytes(other)
    return derive(X25519PrivateKey.from_private_bytes(own).exchange(there), info)


def public_of(own: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(own).public_key().public_bytes_raw()


def add(vector: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the mask of `key` to a vector of uint64 in place, or take it off with sign −1."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(8 * BLOCK + 16)
    for start in range(0, len(vector), BLOCK):
        part = vector[start : start + BLOCK]
        stream.update_into(memoryview(ZEROS)[: 8 * len(part)], buffer)
        mask = np.frombuffer(buffer, "<u8", len(part))
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def pair_sign(own: int, other: int) -> int:
    """Return the sign with which client `own` adds the mask it shares with `other`."""
    return 1 if own < other else -1
