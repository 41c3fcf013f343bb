"""What a client's reply says of its state and data, and what the server makes of it
(`wire/continuity.py`).
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Message
from torch.utils.weak import WeakTensorKeyDictionary

from ..files.store import Saved, Store
from ..rounds.solo import Samples
from ..tree import Tensors, digest
from ..wire.continuity import KEY as KEY  # part of a reply's header
from ..wire.continuity import NONE, Continuity, Thread, mark, read
from . import records

_digests = WeakTensorKeyDictionary()  # of data, by the tensor of training inputs


def digest_of(data: Samples) -> str:
    """Return the digest of a client's data: the rows with their labels, in their order."""
    x = data.train.x
    if x not in _digests:
        parts = {"train": data.train, "test": data.test, "held": data.held}
        _digests[x] = digest(
            {name: {"x": part.x, "y": part.y} for name, part in parts.items() if part is not None}
        )
    return str(_digests[x])


def state_mark(store: Store, run: str, client: int, round: int, state: Tensors) -> str:
    """Return the digest of a state after a round, under the store's key."""
    return mark(store.secret(), "state", run, client, f"{round}|{digest(state)}")


def thread_of(site: Any, head: dict[str, Any], known: list[Saved], before: Saved | None) -> Thread:
    """Return what a client says of a state that it only reads."""
    run, client, store = str(head["run"]), site.client, site.store
    started = NONE
    if before is not None:
        started = (
            read(before.thread).ended
            if before.thread
            else state_mark(store, run, client, before.round, before.state)
        )
    secret = store.secret()
    return Thread(
        before.round if before else 0,
        max((one.round for one in known), default=0),
        started,
        started,
        mark(secret, "data", run, client, digest_of(site.raw or site.data)),
        mark(secret, "store", run, client, "", 16),
    )


def ending(site: Any, run: str, thread: Thread, round: int, state: Tensors) -> str:
    """Return what a client says after a round that ended with `state`."""
    ended = state_mark(site.store, run, site.client, round, state)
    return thread._replace(ended=ended).text()


def said(saved: Saved) -> dict[str, Any]:
    """Return the part of a reply's header that the client saved."""
    return {KEY: saved.thread} if saved.thread else {}


def heard(reply: Message) -> Thread | None:
    """Return what a reply says of continuity; None if it says nothing."""
    head = reply.content.get(records.HEADER)
    text = head.get(KEY) if isinstance(head, ConfigRecord) else None
    return None if text is None else read(text)


def judged(reply: Message, client: int, known: Continuity, refuse: bool) -> list[str]:
    """Return the breaks that a reply shows; with `refuse`, raise if there is one."""
    found = known.breaks(client, heard(reply))
    if found and refuse:
        known.said -= {(client, text) for text in found}  # the next one is refused too
        raise records.WireError(found[0])
    return found
