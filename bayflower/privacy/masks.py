"""Masks: streams of pseudo-random numbers modulo 2^64 that are added to a vector, or taken off.

A mask is the key stream of AES-128 in counter mode. Its key comes by HKDF from a secret that two
clients share (X25519) or that one client has for itself, and is bound to one session. X25519 has a
security of 128 bits, so a longer key would cost time and protect nothing.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FORM = "aes128"  # part of what clients agree on before a sum: other masks would not cancel
BLOCK = 1 << 15  # numbers at a time: they stay in the cache
ZEROS = memoryview(bytes(8 * BLOCK))
MASK = 16  # bytes of the key of a mask
Key = bytes | X25519PrivateKey


def derive(secret: bytes, info: str, size: int = 32) -> bytes:
    """Return a key of `size` bytes for the purpose `info`."""
    return HKDF(hashes.SHA256(), size, salt=None, info=info.encode()).derive(secret)


def agreed(own: Key, other: bytes, info: str, size: int = 32) -> bytes:
    """Return the key that the private key `own` and the public key `other` have in common."""
    there = X25519PublicKey.from_public_bytes(other)
    here = private(own) if isinstance(own, bytes) else own
    return derive(here.exchange(there), info, size)


def private(own: bytes) -> X25519PrivateKey:
    """Return a private key that is used several times."""
    return X25519PrivateKey.from_private_bytes(own)


def public_of(own: bytes) -> bytes:
    """Return the public key of a private one."""
    return private(own).public_key().public_bytes_raw()


def add(vector: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the mask of `key` to a vector of uint64 in place, or take it off with sign −1."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(8 * BLOCK + 16)
    mask, turn = np.frombuffer(buffer, "<u8", BLOCK), np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), BLOCK):
        part = vector[start : start + BLOCK]
        stream.update_into(ZEROS[: 8 * len(part)], buffer)
        turn(part, mask[: len(part)], out=part)


def pair_sign(own: int, other: int) -> int:
    """Return the sign with which client `own` adds the mask it shares with `other`."""
    return 1 if own < other else -1
