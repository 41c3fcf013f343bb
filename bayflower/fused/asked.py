"""What clients are sent, and their tests: the same in one process and on workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..contract import Purpose, ServerHalf
from ..files.records import Views
from .engine import Fused


def broadcast_to(server: ServerHalf, state: Any, chunk: list[int]) -> Any:
    """Return the broadcast to some clients: a single one, or a stack if each gets its own."""
    if not server.per_client:
        return server.broadcast(state, chunk[0])
    return server.broadcasts(state, tuple(chunk))


def tested(
    fused: Fused,
    chosen: Sequence[int],
    sent: Callable[[list[int]], Any],
    round: int,
    purpose: Purpose,
) -> Views:
    """Return every view's tally of some clients after a round."""
    views: Views = {}
    for chunk in fused.test_chunks(chosen, sent):
        for view, tallies in fused.test(chunk, sent(chunk), round, purpose).items():
            views.setdefault(view, {}).update(tallies)
    return views
