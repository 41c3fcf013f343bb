"""A TLS handshake without a network."""

from __future__ import annotations

import ssl
from pathlib import Path


def accepted(server: Path, trusted: Path) -> bool:
    """Return whether a client that trusts `trusted` accepts the server's certificate, over TLS."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(server / "server.crt", server / "server.key")
    asks = ssl.create_default_context(cafile=str(trusted))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = asks.wrap_bio(to_client, to_server, server_hostname="fl.example.org")
    two = served.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for _ in range(10):
        for end in (one, two):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return len(done) == 2
