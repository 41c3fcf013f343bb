"""The ClientApp of a region: it hands every message on to the region's own server, and returns what
that answers. It is a Flower mod, and does nothing at a node whose configuration has no `spool`.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from .spool import Spool


def relayed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the reply of a region, or that of the client at this node."""
    place = str(context.node_config.get("spool") or "")
    if not place:
        return call_next(message, context)
    facts = message.metadata
    spool = Spool(Path(place) / str(facts.run_id))
    number = spool.request(message.content, context.run_config)
    return Message(spool.take(number, facts.created_at + facts.ttl), reply_to=message)
