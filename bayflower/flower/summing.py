"""The server's side of secure sums in Flower's messages: who has shown a card, whose tickets are
there, and the sum of a round.

The first round needs two further messages to every client (cards, tickets). Later rounds need one,
to unmask; the next tickets come with the replies. Drop-outs need one more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ..errors import BayflowerError
from ..maths.window import Window, decode, scalar
from ..privacy.budget import Budget
from ..privacy.session import FEWEST, Card, canonical, more_than, read_cards
from ..privacy.sums import Gathering, Offer, make_session, read_offer
from ..recipes.secrecy import Privacy
from . import records, replies
from .collected import Collected
from .exchange import CLOCKS, LOST, reason, stream
from .masking import LOSS, MASKED, OFFER, form_of, window_of
from .roster import Roster
from .round import Round

log = logging.getLogger("bayflower")
ROUNDED = (
    "%d numbers of clients' statistics were rounded in a secure sum; with a larger secure_limbs it "
    "has the bits of a plain sum"
)


ALONE = "secure=sum needs start() of the strategy itself; call that, without a wrapper"


class Plain:
    """Sums that are not secure."""

    def collect(self, asked: Round, incoming: Iterable[Message], keep_metrics: bool) -> Collected:
        """Return the aggregate of the valid replies."""
        return asked.collect(incoming, keep_metrics)


class Summing:
    """The secure sums of one run."""

    def __init__(self, privacy: Privacy, run: str, roster: Roster) -> None:
        self.privacy, self.run, self.roster = privacy, run, roster
        roster.secure = True
        self.cards: dict[int, Card] = {}
        self.circle: tuple[Card, ...] = ()  # the holders of shares
        self.offers: dict[int, Offer] = {}  # tickets that were not used
        self.gathering: Gathering | None = None
        self.window: Window | None = None
        self.grid: Any = None
        self.timeout = 0.0
        self.up = self.down = 0  # bytes of the further messages of a round
        self.told = False

    # -- before a round ----------------------------------------------------------------------------
    def open(self, asked: Round, grid: Grid, timeout: float, budget: Budget | None = None) -> None:
        """Prepare the session of a round; clients without a ticket are left out of it."""
        self.grid, self.timeout = grid, timeout
        self.up = self.down = 0
        training = self.roster.training()
        unknown = [client for client in training if client not in self.cards]
        for client, said in self._ask(unknown, "card", lambda _: {}):
            with self._blaming(asked, client):
                (card,) = read_cards([said], self.run)
                if card.client != client:
                    raise BayflowerError(f"it shows the card of client {card.client}")
                self.cards[client] = card
        self._choose([client for client in training if client in self.cards])
        chosen = [client for client in asked.request.clients if client in self._holders()]
        lacking = [client for client in chosen if client not in self.offers]
        told = {"cards": canonical(self.circle), "threshold": self._threshold()}
        for client, said in self._ask(lacking, "enrol", lambda _: told):
            with self._blaming(asked, client):
                self.offers[client] = self._offer(client, said)
        chosen = [client for client in chosen if client in self.offers]
        if len(chosen) < FEWEST:
            raise BayflowerError(
                f"round {asked.number}: {len(chosen)} clients can take part, secure=sum needs at "
                f"least {FEWEST}; start more clients, or raise fraction_train; last fault: "
                f"{asked.facts.journal.cause()}"
            )
        used = {client: self.offers.pop(client) for client in chosen}
        largest = max(self.roster.members[one].facts.train_size for one in chosen)
        known: list[Any] = [self.privacy.secure_range * max(1, largest), self.privacy.secure_limbs]
        half: Any = asked.half
        if (
            budget is not None and self.privacy.hides_clients
        ):  # each client adds a share of the noise; `least` shares are enough
            half.mechanism = budget.mechanism(len(chosen), budget.least(len(chosen)))
            known.append(half.mechanism)
        bounds = json.dumps(known)
        self.window = window_of(half, asked.state, len(chosen), bounds)
        session = make_session(
            self.run,
            asked.number,
            form_of(self.window),
            self.circle,
            used,
            self.privacy.secure_threshold,
        )
        self.gathering = Gathering(session, used, self.window.size)
        asked.request = asked.request._replace(clients=chosen)
        asked.further = {"session": session.to_text(), "bounds": bounds}

    def _holders(self) -> set[int]:
        return {card.client for card in self.circle}

    def _threshold(self) -> int:
        return more_than(self.privacy.secure_threshold, len(self.circle))

    def _choose(self, members: list[int]) -> None:
        """Let all members hold shares if somebody joined, or too few of the holders are there."""
        new = [client for client in members if self.cards[client] not in self.circle]
        there = self._holders() & set(members)
        if self.circle and not new and len(there) >= self._threshold():
            return
        self.circle = tuple(self.cards[client] for client in sorted(members))
        self.offers.clear()  # they were made for other holders

    def _offer(self, client: int, said: Any) -> Offer:
        return read_offer(said, self.cards[client], self.circle, self.run, self._threshold())

    # -- the sum -----------------------------------------------------------------------------------
    def collect(self, asked: Round, incoming: Iterable[Message], keep_metrics: bool) -> Collected:
        """Return the sum of a round without masks. No update of a client is ever seen."""
        found, expected, journal = Collected(), asked.expected(), asked.facts.journal
        sizes: dict[int, int] = {}
        assert self.gathering is not None
        for reply in incoming:
            try:
                client = replies.sender(reply, expected)
                size = records.num_bytes(reply.content)
                records.few(reply, records.UPDATE, 2)
                flat = records.arrays(reply, records.UPDATE, consume=True)
                tallies = {}
                if records.TALLY in reply.content:
                    tallies = replies.tallies_of(reply, expected, client)
                if set(flat) != {MASKED, OFFER}:
                    raise records.WireError("the reply is not masked, but the run is secure")
                self.gathering.take(client, flat[MASKED].numpy().view(np.uint64))
            except Exception as error:  # an invalid reply of one client must not stop the run
                asked.fault(reply, error)
                lost = reply.has_error() and reply.error.code in LOST
                if not lost and (named := asked.client_of(reply)) is not None:
                    found.answered.add(named)
                    if reply.has_error():  # its keys may be gone
                        self.cards.pop(named, None)
                continue
            with self._blaming(asked, client):
                self.offers[client] = self._offer(client, json.loads(bytes(flat[OFFER].tolist())))
            sizes[client] = self.roster.members[client].facts.train_size
            if keep_metrics:
                found.metrics[client] = replies.metrics_of(reply)
            found.bytes_up += size
            for view, tally in tallies.items():
                found.tested.setdefault(view, {})[client] = tally
            del flat, reply
        for client in sorted(set(asked.sent) - set(sizes) - journal.blamed):
            journal.fault(
                f"round {asked.number}, client {client}: no reply before the timeout; ignored in "
                "this round",
                client,
            )
        try:
            loss = self._unmasked(found)
            mean = loss / max(1, sum(sizes.values()))
            found.losses = {client: (count, mean) for client, count in sizes.items()}
        except BayflowerError as error:
            journal.fault(f"round {asked.number}: {error}")
        found.bytes_up += self.up
        found.bytes_down = self.down
        self.gathering = None
        return found

    def _unmasked(self, found: Collected) -> float:
        """Add the sum to `found.total` and return the summed training loss."""
        gathering, window = self.gathering, self.window
        assert gathering is not None
        assert window is not None
        gathering.check()
        present = [client for client in self.roster.present() if client in self._holders()]
        late = [client for client in present if client in gathering.gone]
        self._help("unmask", "seed", [one for one in present if one not in late])
        if not self._enough("seed"):
            self._help("unmask", "seed", late)
        if gathering.gone and self._enough("seed"):
            signed = sorted(gathering.signatures)
            self._help("recover", "key", signed)
            if not self._enough("key"):  # some have gone since they signed: let others sign
                rest = [one for one in present if one not in signed]
                self._help("unmask", "seed", rest, all_of_them=True)
                further = [one for one in sorted(gathering.signatures) if one not in signed]
                self._help("recover", "key", further)
        vector = torch.from_numpy(gathering.result().view(np.int64))
        rounded = decode(vector, window, found.total)
        found.total.drop([LOSS])
        if rounded and not self.told:
            self.told = True
            log.warning(ROUNDED, rounded)
        return float(scalar(vector, window, LOSS))

    def _enough(self, kind: str) -> bool:
        """Return whether enough shares of one kind came."""
        gathering = self.gathering
        assert gathering is not None
        owners = gathering.there if kind == "seed" else gathering.gone
        least = min((len(gathering.shares[kind].get(one, {})) for one in owners), default=0)
        return not owners or least >= gathering.session.threshold

    def _help(self, request: str, kind: str, clients: list[int], all_of_them: bool = False) -> None:
        """Ask holders for shares until enough of them came."""
        gathering = self.gathering
        assert gathering is not None
        owners = gathering.there if kind == "seed" else gathering.gone
        text, signatures = gathering.session.to_text(), canonical(gathering.signatures)

        def told(client: int) -> dict[str, Any]:
            found = {
                "session": text,
                "survivors": json.dumps(gathering.there),
                "sealed": gathering.sealed_for(client, owners),
            }
            return {**found, "signatures": signatures} if kind == "key" else found

        for client, said in self._ask(clients, request, told):
            try:
                gathering.hear(client, kind, said)
            except (BayflowerError, ValueError) as error:
                self.roster.journal.fault(f"client {client}: {error}", client)
            if self._enough(kind) and not all_of_them:
                return

    # -- messages ----------------------------------------------------------------------------------
    def _ask(
        self, clients: list[int], kind: str, told: Callable[[int], dict[str, Any]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (client, what it says) for each client that answers a query."""
        roster, asked, answered = self.roster, dict[str, int](), set[str]()

        def ask(nodes: list[int], ttl: float) -> Iterator[Message]:
            for node in nodes:
                client = roster.client_at(node)
                more = told(client) if client is not None else {}
                head = records.make_header(secure=kind, run=self.run, **more)
                content = RecordDict({records.HEADER: head})
                self.down += records.num_bytes(content)
                yield Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)

        if not clients:
            return
        nodes = roster.nodes(clients)
        try:
            for reply in stream(self.grid, nodes, ask, self.timeout, roster.history, asked):
                number = reply.metadata.reply_to_message_id
                answered.add(number)
                client = roster.client_at(asked.get(number, reply.metadata.src_node_id))
                try:
                    if reply.has_error():
                        raise BayflowerError(reason(reply))
                    records.weigh(reply.content, roster.limits.max_message_mb)
                    head = records.header(reply, ("client", "secure"))
                    if client is None or head["client"] != client:
                        raise BayflowerError("it answers for another client")
                    said = json.loads(str(head["secure"]))
                except (BayflowerError, ValueError) as error:
                    roster.journal.fault(f"client {client}: secure sum, {kind}: {error}", client)
                    continue
                self.up += records.num_bytes(reply.content)
                yield client, said
        finally:  # replies that nobody waits for any more
            until = time.monotonic() + CLOCKS
            roster.history.spare.update(
                {number: until for number in asked if number not in answered}
            )

    def _blaming(self, asked: Round, client: int) -> Blaming:
        return Blaming(asked, client)


class Blaming:
    """Reports an error in what a client said, and goes on."""

    def __init__(self, asked: Round, client: int) -> None:
        self.asked, self.client = asked, client

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if not isinstance(error, BayflowerError | ValueError | TypeError):
            return False
        text = f"round {self.asked.number}, client {self.client}: {error}"
        self.asked.facts.journal.fault(text, self.client)
        return True
