"""The client's side of secure sums in Flower's messages: queries about keys and shares, and the
masked update in the reply to a training request.

A training request of a secure run has in its header the session (`privacy/session.py`) and the
bounds of the window (`maths/window.py`). The reply has, instead of the method's update,

    masked   the client's statistic in limbs, plus masks
    offer    the client's ticket for its next sum with its sealed shares, as bytes of JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict

from .. import methods
from ..contract import ClientHalf, ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.store import Store
from ..maths.window import Window, agree, encode
from ..privacy import masks
from ..privacy.discrete import Entropy
from ..privacy.noisy import CHANGE, Mechanism, private_half, with_share
from ..privacy.party import Party
from ..privacy.session import SecureError, Session, canonical, read_cards, read_session, sealed_of
from ..tree import Tensors
from . import records

IDENTITY = "identity"  # the client's own key, for all runs
LOSS = "secure/loss"  # the name of the summed training loss in a vector
MASKED, OFFER = "masked", "offer"
REQUIRED = (
    "this client takes part in secure sums only (secure-only is set at its node); start the run "
    "with secure=sum"
)


def told(node: Mapping[str, Any]) -> tuple[Mapping[int, str] | None, bool]:
    """Return what a node's configuration says of secure sums: the keys of its peers, from the JSON
    file `peers`, and whether it takes part in nothing else (`secure-only`).
    """
    only = str(node.get("secure-only", "")).lower() in ("true", "1", "yes")
    if not node.get("peers"):
        return None, only
    path = Path(str(node["peers"]))
    try:
        found = {int(client): str(key) for client, key in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f'peers must name a JSON file like {{"0": "KEY", "1": "KEY"}}; {path} is none ({error})'
        ) from None
    return found, only


def public_key(store: Store, client: int) -> str:
    """Return the key by which others know a client in secure sums; it is made on first use."""
    desk = Desk(IDENTITY, client, store)
    store.note(IDENTITY, client, desk.own)
    return desk.party.card.verify


class Desk:
    """A client's part in the secure sums of a run, with what it remembers on disk."""

    def __init__(
        self, run: str, client: int, store: Store, peers: Mapping[int, str] | None = None
    ) -> None:
        self.run, self.client, self.store = run, client, store
        self.notes, self.own = store.notes(run, client), store.notes(IDENTITY, client)
        self.party = Party(run, client, self.notes, self.own, peers)

    def save(self) -> None:
        """Keep what must not be forgotten before an answer is sent."""
        self.store.note(IDENTITY, self.client, self.own)
        self.store.note(self.run, self.client, self.notes)


def asked(message: Message) -> bool:
    """Return whether a query is about secure sums."""
    return records.asks(message, "secure")


def answer(
    message: Message, client: int, store: Store, peers: Mapping[int, str] | None = None
) -> Message:
    """Return the reply to a query about secure sums."""
    head = records.header(message, ("secure", "run"))
    desk = Desk(str(head["run"]), client, store, peers)
    try:
        said = spoken(desk.party, str(head["secure"]), head)
    except (KeyError, TypeError, ValueError) as error:
        raise SecureError(f"a request of a secure sum cannot be read ({error!r:.80})") from None
    except BayflowerError as error:
        raise SecureError(f"client {client}: {error}") from None
    desk.save()
    found = records.make_header(client=client, secure=canonical(said))
    return Message(RecordDict({records.HEADER: found}), reply_to=message)


def spoken(party: Party, kind: str, head: Mapping[str, Any]) -> Any:
    """Return what the client says."""
    if kind == "card":
        return party.card
    if kind == "enrol":
        cards = read_cards(json.loads(head["cards"]), party.run)
        return party.enrol(cards, int(head["threshold"]))
    session = read_session(head["session"])
    survivors = [int(one) for one in json.loads(head["survivors"])]
    sealed = sealed_of(json.loads(head["sealed"]))
    if kind == "unmask":
        return party.unmask(session, survivors, sealed)
    if kind == "recover":
        signatures = {int(key): str(one) for key, one in json.loads(head["signatures"]).items()}
        return party.recover(session, survivors, signatures, sealed)
    raise SecureError(f"a secure sum has no request {kind[:40]!r}")


# -- a round -------------------------------------------------------------------------------------
def window_of(half: ServerHalf, state: Any, clients: int, bounds: str) -> Window:
    """Return the form of the vectors of a round; `state` may be the broadcast. `bounds` is JSON
    from the server: the largest number, and the limbs of a real number.
    """
    largest, limbs = json.loads(bounds)[:2]
    form = half.summand(state, 0, half.expects(state))
    form = {**form, LOSS: torch.zeros((), dtype=torch.float64)}
    return agree(form, clients, float(largest), int(limbs))


def form_of(window: Window) -> str:
    """Return a name for the form of vectors and masks: who makes others refuses the session."""
    return f"{masks.FORM}/{window.digest()}"


def server_half(half: ClientHalf, head: Mapping[str, Any]) -> ServerHalf:
    """Return the method's server half, whose `summand` the client computes; with private sums if
    the request asks for noise.
    """
    made = methods.get(str(head["method"])).server(half.config, half.model.anatomy)
    noise = json.loads(str(head["bounds"]))[2:]
    return private_half(made, asked_noise(noise[0]), Entropy()) if noise else made


def asked_noise(given: Any) -> Mechanism:
    """Return how the server asks sums to be made private; raise if that hides nothing."""
    clip, noise, people, shares = given
    found = Mechanism(float(clip), float(noise), float(people), int(shares))
    if not (found.clip > 0 and found.noise > 0 and found.shares >= 1):
        raise SecureError("the server asks for noise that hides nothing")
    return found


def opened(half: ClientHalf, broadcast: Any, head: Mapping[str, Any]) -> tuple[Session, Window]:
    """Return the session of a training request and the form of its vectors."""
    session = read_session(str(head["session"]))
    other = server_half(half, head)
    return session, window_of(other, broadcast, len(session.tickets), str(head["bounds"]))


def check(half: ClientHalf, broadcast: Any, head: Mapping[str, Any], site: Any) -> str:
    """Return the name of the request's session, "" without one; raise, before any training, if
    this client must not take part in it.
    """
    if "session" not in head:
        if site.secure_only:
            raise ConfigError(REQUIRED)
        return ""
    session, window = opened(half, broadcast, head)
    desk = Desk(str(head["run"]), site.client, site.store, site.peers)
    if session.round != int(head["round"]):
        raise SecureError(f"the session is of round {session.round}, not {head['round']}")
    desk.party.ready(session, form_of(window))
    return session.digest()


def noisy(half: ClientHalf, broadcast: Any, head: Mapping[str, Any], update: Any) -> Any:
    """Return the update, with this client's own noise if the request asks for it (dp=local)."""
    if "noise" not in head:
        return update
    other = methods.get(str(head["method"])).server(half.config, half.model.anatomy)
    mechanism = asked_noise(json.loads(str(head["noise"])))
    made: Any = private_half(other, mechanism, Entropy())
    return made.noised(broadcast, update)


def session_name(head: Mapping[str, Any]) -> str:
    """Return a name of the session in a header, "" without one: a request with another session is
    no duplicate.
    """
    return " " + read_session(str(head["session"])).digest() if "session" in head else ""


def masked(
    half: ClientHalf, broadcast: Any, head: Mapping[str, Any], site: Any, trained: Any
) -> Tensors:
    """Return what is sent in place of an update: the masked statistic, and the next ticket."""
    session, window = opened(half, broadcast, head)
    desk, other = (
        Desk(str(head["run"]), site.client, site.store, site.peers),
        server_half(half, head),
    )
    desk.party.ready(session, form_of(window))
    if why := other.check(broadcast, site.client, trained.update):
        raise BayflowerError(f"the update cannot be used: {why}")
    loss = torch.tensor(trained.loss * len(site.data.train.y), dtype=torch.float64)
    statistic = other.summand(broadcast, site.client, trained.update)
    if CHANGE in statistic:
        statistic = with_share(statistic, Entropy())
    vector = encode({**statistic, LOSS: loss}, window)
    desk.party.mask(session, vector.numpy().view(np.uint64))
    offer = desk.party.enrol(session.cards, session.threshold)
    desk.save()
    text = np.frombuffer(canonical(offer).encode(), dtype=np.uint8).copy()
    return {MASKED: vector, OFFER: torch.from_numpy(text)}
