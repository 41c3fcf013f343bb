"""What a method does when clients come and go: three functions that its halves may have, and what holds where they have none.

    server half    admit(state, client)     the state with a client that begins to train in the middle of a run; once for each such client
                   forget(state, client)    the state without what a client that has left contributes to totals; what only itself would
                                            miss is kept for its return
    client half    rejoined(state)          the state of a client that was forgotten and is back

Without them nothing changes: a sum over the clients of a round needs no word about those who are not there.
"""

from __future__ import annotations

from typing import Any

from .types import ClientHalf, ServerHalf


def admit(half: ServerHalf, state: Any, client: int) -> Any:
    """Return the server's state with a client that comes during a run."""
    own = getattr(half, "admit", None)
    return state if own is None else own(state, client)


def forget(half: ServerHalf, state: Any, client: int) -> Any:
    """Return the server's state without a client that has left."""
    own = getattr(half, "forget", None)
    return state if own is None else own(state, client)


def rejoined(half: ClientHalf, state: Any) -> Any:
    """Return the state with which a client that was forgotten goes on."""
    own = getattr(half, "rejoined", None)
    return state if own is None else own(state)
