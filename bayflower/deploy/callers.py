"""Who calls: the clients whose public keys are in the server's folder `nodes`, known by the headers
of a request alone.

Flower signs the time of a request, not its body. So a caller is known before a byte of the body is
read. `nodes/client-K.pub` is the truth: a key that is not there is refused, whatever the SuperLink
knows.
"""

from __future__ import annotations

import binascii
import time
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

AHEAD, LATE = 5.0, 305.0  # seconds a client's clock may be ahead or behind; Flower refuses more
STAMP, WHO, SIGNED = "flwr-timestamp", "flwr-public-key", "flwr-signature"  # a SuperNode's headers
LONGEST = 1024  # letters of each of them
LOOK_SECONDS = 1.0  # between two looks at the folder


class Caller(NamedTuple):
    """A client with its key."""

    name: str  # "client-K"
    key: ec.EllipticCurvePublicKey


class StrangerError(Exception):
    """A request that no client of the folder has signed; its text is for the caller. `name` is the
    client whose key it shows, if it is one.
    """

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class Callers:
    """The clients in a folder of public keys. Changes of the folder take effect at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looked = -LOOK_SECONDS
        self.listing: tuple[tuple[str, int], ...] = ()
        self.known: dict[bytes, Caller] = {}

    def __len__(self) -> int:
        self.look()
        return len(self.known)

    def look(self) -> None:
        """Read the keys again if a file of the folder has changed."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        try:
            files = sorted(self.folder.glob("client-*.pub"))
            listing = tuple((file.name, file.stat().st_mtime_ns) for file in files)
        except OSError:
            files, listing = [], ()
        if listing != self.listing:
            self.listing = listing
            self.known = {key: caller for file in files for key, caller in read(file)}

    def who(self, headers: Mapping[str, str], now: float) -> Caller:
        """Return the client that signed a request at `now`; raise if there is none."""
        self.look()
        shown, stamp, signed = (headers.get(name, "") for name in (WHO, STAMP, SIGNED))
        if not shown or max(len(shown), len(stamp), len(signed)) > LONGEST:
            raise StrangerError("this request has no key of a client")
        try:
            caller = self.known.get(b64decode(shown, validate=True))
            signature = b64decode(signed, validate=True)
            when = stamp.encode("ascii")
        except (ValueError, binascii.Error):
            raise StrangerError("this request has no key of a client") from None
        if caller is None:
            raise StrangerError(
                "this key belongs to no client of the server; its public part must be in the "
                "server's folder nodes"
            )
        try:
            caller.key.verify(signature, when, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise StrangerError("this request is not signed with the key it shows") from None
        if (why := wrong_clock(stamp, now)) is not None:
            raise StrangerError(why, caller.name)
        return caller


def read(file: Path) -> list[tuple[bytes, Caller]]:
    """Return the key of a file as Flower sends it, and whose it is; nothing if it is none."""
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return []
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return []
    sent = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return [(sent, Caller(file.stem, key))]


def wrong_clock(stamp: str, now: float) -> str | None:
    """Return why Flower refuses a request signed at `stamp`: the client's clock, or no time."""
    try:
        ahead = datetime.fromisoformat(stamp).timestamp() - now
    except (ValueError, OverflowError, OSError):
        return "this request does not say when it was signed"
    if -LATE < ahead < AHEAD:
        return None
    where = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
    return (
        f"this client's clock is {where} the server's, so Flower refuses it (at most {AHEAD:.0f} s "
        f"ahead, {LATE:.0f} s behind); set the clock of either machine, for instance with NTP"
    )
