"""Continuity of a client's state: what each reply says of it, and how the server notices a break.

A reply has a text of fixed length, `Thread`: the state it started from, the state it ended with,
and the client's data, each as a digest under a key that never leaves the client. The server learns
whether two of them are equal and nothing else: without the key it cannot test a guess of the data.
The digests of one run cannot be compared with those of another.

The server keeps the last digests of each client. A reply that does not start where the last one
ended is a break: a state that was rolled back, lost or continued by two machines.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import WireError

KEY = "continuity"  # in the header of a reply
NONE = "0" * 32  # the digest of no state
KEPT = 4  # accepted states of a client that the server remembers
FORM = re.compile(r"[0-9a-f]{10}\.[0-9a-f]{10}\.([0-9a-f]{32}\.){3}[0-9a-f]{16}")
RESTORE = "restore its state from a backup (bayflower deploy restore)"


class Thread(NamedTuple):
    """What a reply says of the client's state and data."""

    began: int  # the round of the state it started from; 0 = none
    held: int  # the newest round of which the client had a state
    started: str  # digest of the state it started from
    ended: str  # digest of the state after the round
    data: str  # fingerprint of the data
    store: str  # which key made these digests

    def text(self) -> str:
        """Return the text of a reply; its length is fixed."""
        return ".".join([f"{self.began:010x}", f"{self.held:010x}", *self[2:]])


BLANK = Thread(0, 0, NONE, NONE, NONE, NONE[:16])


def read(text: Any) -> Thread:
    """Return what a reply says; raise if it is no such text."""
    if not isinstance(text, str) or FORM.fullmatch(text) is None:
        raise WireError(f"{KEY} must be a text made by Bayflower, got {str(text)[:80]!r}")
    began, held, *rest = text.split(".")
    return Thread(int(began, 16), int(held, 16), *rest)


def mark(secret: bytes, what: str, run: str, client: int, content: str, length: int = 32) -> str:
    """Return a keyed digest of `content` that means something in one run and for one client."""
    message = f"{what}|{run}|{client}|{content}".encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:length]


class Link(NamedTuple):
    """One accepted reply: the state it started from and the one it ended with."""

    round: int
    started: str
    ended: str


class Continuity:
    """The states and data of a run's clients as their replies described them."""

    def __init__(self) -> None:
        self.links: dict[int, list[Link]] = {}  # by client, oldest first
        self.marks: dict[int, tuple[str, str]] = {}  # by client: (store, data)
        self.said: set[tuple[int, str]] = set()  # (client, text) that were reported

    def breaks(self, client: int, thread: Thread | None) -> list[str]:
        """Return what does not fit to the earlier replies of a client, each text once; raise if a
        client no longer says anything.
        """
        if thread is None and client in self.links:
            raise WireError(
                "it no longer says from which state it starts; install the same version of "
                "Bayflower there"
            )
        if thread is None:
            return []
        found = [self._state(client, thread), self._data(client, thread)]
        return self._new(client, [text for text in found if text])

    def accept(self, client: int, round: int, thread: Thread | None) -> None:
        """Keep what the reply of a round says; the next one must start there."""
        if thread is not None:
            link = Link(round, thread.started, thread.ended)
            older = [one for one in self.links.get(client, []) if one.round < round]
            self.links[client] = [*older, link][-KEPT:]
            self.marks[client] = (thread.store, thread.data)

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        return {
            "links": {str(client): some for client, some in sorted(self.links.items())},
            "marks": {str(client): both for client, both in sorted(self.marks.items())},
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continue from what `memory` returned."""
        links, marks = memory.get("links", {}), memory.get("marks", {})
        self.links = {int(client): [Link(*one) for one in some] for client, some in links.items()}
        self.marks = {int(client): (both[0], both[1]) for client, both in marks.items()}

    # -- inside -----------------------------------------------------------------------------------
    def _new(self, client: int, texts: list[str]) -> list[str]:
        fresh = [text for text in texts if (client, text) not in self.said]
        self.said |= {(client, text) for text in fresh}
        return fresh

    def _state(self, client: int, thread: Thread) -> str:
        """Return why a reply does not start where the last accepted one ended, or ''."""
        known = self.links.get(client)
        if not known or thread.started == known[-1].ended:
            return ""
        last = known[-1].round
        if thread.started == NONE and thread.held > last:
            return (
                f"it has no state of round {last}, only of round {thread.held}, and starts from "
                "nothing: the server's checkpoint was rolled back; resume from the newest "
                "checkpoint, or restore the clients' states of the same backup (bayflower deploy "
                "restore)"
            )
        if thread.started == NONE:
            other = client in self.marks and self.marks[client][0] != thread.store
            why = (
                "its disk was wiped, it moved, or a second machine runs with its key"
                if other
                else "its file was removed or damaged"
            )
            return (
                f"its state of round {last} is gone, and it starts from nothing: {why}; {RESTORE}"
            )
        at = next((one.round for one in known if one.ended == thread.started), None)
        forgotten = 0 < thread.began < known[0].round  # the server no longer has its digest
        if at is None and not forgotten:
            return (
                f"its state of round {thread.began} is not one with which it answered: its files "
                f"were changed, or a second machine runs with its key; {RESTORE}"
            )
        at = thread.began if at is None else at
        if not forgotten and at not in ancestors(known):
            return (
                f"two machines run with its key: both its state of round {at} and that of round "
                f"{last} are continued; stop one of them and give it a key of its own (bayflower "
                "deploy unregister)"
            )
        return (
            f"its state is that of round {at}, not of round {last}: it was rolled back, or a "
            f"second machine runs with its key; {RESTORE}, or stop the second machine"
        )

    def _data(self, client: int, thread: Thread) -> str:
        """Return why the data of a reply are not those of the earlier ones, or ''."""
        store, data = self.marks.get(client, (thread.store, thread.data))
        if store != thread.store:
            return (
                "its store of states has another key than before, so the server cannot tell "
                "whether its data are the same; ask its owner"
            )
        if data != thread.data:
            return (
                "its data have changed since its last reply, so results before and after are not "
                "those of one data set; restore the data, or start a new run"
            )
        return ""


def ancestors(known: list[Link]) -> set[int]:
    """Return the rounds from which the newest state comes."""
    found, at = set(), known[-1].started
    for link in reversed(known):
        if link.ended == at:
            found.add(link.round)
            at = link.started
    return found
