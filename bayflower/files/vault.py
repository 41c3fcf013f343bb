"""Encryption at rest, if a key file is named: BAYFLOWER_KEY_FILE.

Then every file of tensors that Bayflower writes (client states, personal models, checkpoints) is
encrypted with AES-256-GCM. A file that was changed, or another key, is refused. The key is 32 bytes
in hexadecimal, as `bayflower deploy init --encrypt` makes it; whoever loses it loses the files.
Files that were written without a key are still read, and encrypted when they are written again.

A file is `MAGIC`, 16 random bytes from which its own key is derived, then parts of at most a
gigabyte, each with its length. Parts are numbered, and the last one says so: none can be left out,
moved or taken from another file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ..errors import BayflowerError, ConfigError

VARIABLE = "BAYFLOWER_KEY_FILE"
MAGIC = b"BAYFLOWER-SEALED-1\n"
PART = 2**30  # the library encrypts at most 2 GiB at once
SALT = 16


_other: ContextVar[str | None] = ContextVar("other key file", default=None)


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Use another key file than this process's, for instance that of one client of several."""
    token = _other.set(str(path))
    try:
        yield
    finally:
        _other.reset(token)


def key() -> bytes | None:
    """Return the key of this process; None if no key file is named."""
    name = _other.get() or os.environ.get(VARIABLE)
    if not name:
        return None
    try:
        text = Path(name).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE}: {name} cannot be read ({error}); nothing is written without its key"
        ) from None
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(
            f"{VARIABLE}: {name} must hold 32 bytes as 64 hexadecimal digits; make one with: "
            "openssl rand -hex 32"
        )
    return bytes.fromhex(text)


def is_sealed(content: bytes) -> bool:
    """Return whether the content of a file is encrypted."""
    return content.startswith(MAGIC)


def seal(content: bytes, secret: bytes) -> bytes:
    """Return the content encrypted."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt = secrets.token_bytes(SALT)
    cipher, parts = AESGCM(own_key(secret, salt)), [MAGIC, salt]
    starts = range(0, max(len(content), 1), PART)
    for number, start in enumerate(starts):
        about = mark(number, number == len(starts) - 1)
        made = cipher.encrypt(number.to_bytes(12, "big"), content[start : start + PART], about)
        parts += [len(made).to_bytes(8, "big"), made]
    return b"".join(parts)


def opened(content: bytes, what: str) -> bytes:
    """Return the content of a file, decrypted if it is encrypted; `what` names it in errors."""
    if not is_sealed(content):
        return content
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    secret = key()
    if secret is None:
        raise ConfigError(f"{what} is encrypted; name its key file in {VARIABLE}")
    at = len(MAGIC) + SALT
    cipher, found, number = AESGCM(own_key(secret, content[len(MAGIC) : at])), [], 0
    try:
        while at < len(content):
            end = at + 8 + int.from_bytes(content[at : at + 8], "big")
            about = mark(number, end >= len(content))
            found.append(cipher.decrypt(number.to_bytes(12, "big"), content[at + 8 : end], about))
            at, number = end, number + 1
        if not found:
            raise InvalidTag
    except (InvalidTag, OverflowError, ValueError):
        raise BayflowerError(
            f"{what} cannot be decrypted: it is damaged, or was encrypted with another key than "
            f"that in {VARIABLE}; name the right key file, or restore the file from a back-up"
        ) from None
    return b"".join(found)


def own_key(secret: bytes, salt: bytes) -> bytes:
    """Return the key of one file: no two files share one, so part numbers can be nonces."""
    return hmac.new(secret, MAGIC + salt, hashlib.sha256).digest()


def mark(number: int, last: bool) -> bytes:
    """Return what a part says of its place; it is authenticated, not written."""
    return MAGIC + number.to_bytes(8, "big") + bytes([last])
