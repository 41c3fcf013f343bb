"""Clients that wait in their calls of an app, and the fused engine that trains them together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from flwr.app import Message, MessageType, RecordDict

from .. import methods
from ..config import Limits, Run, Settings
from ..contract import ClientHalf
from ..data import ClientData, DataSettings
from ..errors import BayflowerError, in_one_line
from ..files.store import DiskStore, RunStore, Store
from ..fused.engine import Fused
from ..fused.run import SMALL_MODEL
from ..networks.model import Batch
from ..rounds import solo
from ..rounds.halves import Halves
from ..stacked.shaped import losing, shape
from ..tree import digest, map_tree, stack, take, to
from . import calibrating, client, plug, records
from .calls import Call
from .client import Reply, Site
from .saved import flat_tallies

log = logging.getLogger("bayflower")


class Options(NamedTuple):
    """How the fused engine stacks clients (`Settings` has the meanings)."""

    stacking: str = "auto"
    max_fused: int = 0


class Seat:
    """A client that waits for the others of its round."""

    def __init__(self, message: Message, head: dict[str, Any], site: Site, work: Reply) -> None:
        self.message, self.head, self.site, self.work = message, head, site, work
        self.ready: Any = None  # what its reply is made of; None = the client answers alone
        self.own = shape().own  # the app's own loss, which holds in the client's call

    def reply(self) -> RecordDict:
        """Return the content of the client's reply."""
        work = self.work if self.ready is None else partial(self.work, ready=self.ready)
        return client.alone(self.message, self.head, self.site, work)


class Bank:
    """The states of the clients that are worked on, as a store of the fused engine."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def take(self, chosen: Sequence[int]) -> Any:
        """Return the stacked states of some clients."""
        return stack([self.known[client] for client in chosen])

    def put(self, chosen: Sequence[int], states: Any, round: int) -> None:
        """Keep the states of some clients."""
        self.known.update(apart(chosen, states))

    def ahead(self, chosen: Sequence[int], training: Sequence[int]) -> None:
        """Do nothing: the states are in memory."""

    def save(self, round: int) -> None:
        """Do nothing: there are no files."""

    def tidy(self, round: int) -> None:
        """Do nothing: there are no files."""

    def shut(self) -> None:
        """Do nothing: there are no files."""

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state)."""
        yield from self.known.items()


class Crew:
    """The clients of an app on one device: who waits, and the engine that trains them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.remarks: list[str] = []
        self.bank = Bank()
        self.engine: Fused | None = None
        self.key: tuple[Any, ...] = ()  # what the engine was made for
        self.stores: dict[str, RunStore] = {}
        self.stacked = 0  # how many clients the last round had in one stack

    # -- in a client's call ------------------------------------------------------------------------
    def join(
        self, call: Call, message: Message, head: dict[str, Any], site: Site, work: Reply
    ) -> RecordDict:
        """Return the content of a client's reply, after all clients of the round were worked on."""
        site = site._replace(store=self.store(site.store))
        call.seat = seat = Seat(message, head, site, work)
        call.pause()
        return seat.reply()

    def store(self, store: Store) -> Store:
        """Return the store of a client's states while the run lasts."""
        if not isinstance(store, DiskStore):
            return store
        return self.stores.setdefault(str(store.root), RunStore(store))

    # -- for all of them ---------------------------------------------------------------------------
    def work(self, calls: Sequence[Call]) -> None:
        """Train or test the clients that wait, those with the same instructions together. If that
        fails, each client answers alone, and its own error is its reply.
        """
        groups: dict[tuple[Any, ...], list[Seat]] = {}
        for call in calls:
            seat: Seat = call.seat
            if not tests_a_model(seat.head):
                continue
            names = ("method", "instructions", "seed", "run", "round", "purpose", "evaluate")
            key = (seat.message.metadata.message_type, *(str(seat.head[name]) for name in names))
            more = (seat.site.new, seat.site.data.train.x.device, id(seat.own))
            groups.setdefault((*key, *more), []).append(seat)
        for (kind, *_), seats in groups.items():
            try:
                with losing(seats[0].own):
                    self.answer(seats, kind == MessageType.TRAIN)
            except Exception as error:
                log.debug("clients could not be worked on together", exc_info=True)
                reason = in_one_line(error, 200) or type(error).__name__
                self.remark(f"clients were answered one by one because of an error: {reason}")
                for seat in seats:
                    seat.ready = None

    def answer(self, seats: list[Seat], train: bool) -> None:
        """Train or test clients with the same instructions."""
        first = seats[0]
        half = client.make_half(first.head["method"], first.head["instructions"], first.site.model)
        engine = self.engine_for(first, half)
        received = self.received(seats, half)
        parts: dict[str, list[Seat]] = {}
        for seat, (_, cause) in zip(seats, received, strict=True):
            # a mod may change what one client gets
            parts.setdefault("" if engine.per_client else cause, []).append(seat)
        told = {
            seat.site.client: broadcast
            for seat, (broadcast, _) in zip(seats, received, strict=True)
        }

        def sent(chunk: list[int]) -> Any:
            if engine.per_client:
                return stack([told[client] for client in chunk])
            return told[chunk[0]]

        small = half.model.num_parameters < SMALL_MODEL and engine.device.type == "cpu"
        with solo.one_thread() if small else nullcontext():
            if train:
                causes = {
                    seat.site.client: cause
                    for seat, (_, cause) in zip(seats, received, strict=True)
                }
                for some in parts.values():
                    self.train(engine, half, some, causes, sent)
            else:
                for some in parts.values():
                    self.test(engine, half, some, sent)
        if engine.one_by_one_because:
            self.remark(engine.one_by_one_because)

    def train(
        self,
        engine: Fused,
        half: ClientHalf,
        seats: list[Seat],
        causes: dict[int, str],
        sent: Callable[[list[int]], Any],
    ) -> None:
        """Do one round of some clients."""
        fresh: dict[int, tuple[Seat, client.Begun]] = {}
        for seat in seats:
            number = seat.site.client
            begun = client.open_round(half, sent([number]), causes[number], seat.head, seat.site)
            if engine.per_client:
                begun = begun._replace(broadcast=take(begun.broadcast, 0))
            if begun.repeated is not None:
                seat.ready = (begun, None)
            else:
                fresh[number] = seat, begun
        if not fresh:
            return
        self.bank.known = {number: begun.state for number, (_, begun) in fresh.items()}
        round = int(seats[0].head["round"])
        if seats[0].head["evaluate"]:
            for chunk in engine.test_chunks(list(fresh), sent):
                _, views = engine.adapted_test(chunk, sent(chunk), round - 1, "finetune")
                for number in chunk:
                    seat, begun = fresh[number]
                    own = {view: tallies[number] for view, tallies in views.items()}
                    fresh[number] = seat, begun._replace(tally=flat_tallies(own))
        self.stacked = 0
        for chunk in engine.chunks(list(fresh), sent):
            got = engine.train(chunk, sent(chunk), round)
            engine.keep(got, round)
            updates = apart(got.clients, to(got.updates, "cpu"))
            for number, loss in zip(got.clients, got.losses.tolist(), strict=True):
                update = updates[number]
                seat, begun = fresh[number]
                seat.ready = begun, solo.Trained(self.bank.known[number], update, loss)
            if not engine.one_by_one_because:
                self.stacked = max(self.stacked, len(chunk))

    def test(
        self,
        engine: Fused,
        half: ClientHalf,
        seats: list[Seat],
        sent: Callable[[list[int]], Any],
    ) -> None:
        """Test some clients after a round."""
        self.bank.known = {}
        for seat in seats:
            head, site = seat.head, seat.site
            known = site.store.load(head["run"], site.client)
            last = client.last_state(known, head, int(head["round"]))
            self.bank.known[site.client] = client.state_of(half, last, head, site)
        waiting = {seat.site.client: seat for seat in seats}
        round, purpose = int(seats[0].head["round"]), seats[0].head["purpose"]
        for chunk in engine.test_chunks(list(waiting), sent):
            states, views = engine.adapted_test(chunk, sent(chunk), round, purpose)
            for number, state in apart(chunk, states).items():
                own = {view: tallies[number] for view, tallies in views.items()}
                waiting[number].ready = state, own

    # -- inside ------------------------------------------------------------------------------------
    def received(self, seats: list[Seat], half: ClientHalf) -> list[tuple[Any, str]]:
        """Return the broadcast to each client and its digest; arrays that several messages share
        are read once.
        """
        known: dict[tuple[int, ...], tuple[Any, str]] = {}
        found = []
        for seat in seats:
            arrays = records.only_arrays(seat.message)
            key = tuple(id(array.data) for array in arrays.values())
            if key not in known:
                broadcast = client.sent(half, seat.message, seat.head, seat.site)
                known[key] = broadcast, digest(broadcast)
            found.append(known[key])
        return found

    def engine_for(self, seat: Seat, half: ClientHalf) -> Fused:
        """Return the engine with the data of all clients that are known, made when needed."""
        head, site = seat.head, seat.site
        sites = alike(site)
        key = (
            *(str(head[name]) for name in ("method", "instructions", "seed")),
            *((number, one.data.train.y.data_ptr()) for number, one in sorted(sites.items())),
        )
        if self.engine is None or key != self.key:
            self.close()
            shapes = {
                (tuple(one.data.train.x.shape[1:]), one.data.train.x.dtype): number
                for number, one in sites.items()
            }
            if len(shapes) > 1:
                (a, first), (b, second), *_ = shapes.items()
                raise BayflowerError(
                    f"client {first} has samples of shape {a[0]} ({a[1]}), client {second} of "
                    f"shape {b[0]} ({b[1]})"
                )
            self.engine, self.key = self.made(head, site, half, sites), key
        return self.engine

    def made(
        self, head: dict[str, Any], site: Site, half: ClientHalf, sites: dict[int, Site]
    ) -> Fused:
        """Return a new engine."""
        train, seed = site.data.train, int(head["seed"])
        settings = Settings(
            seed=seed,
            device=str(train.x.device),
            dtype="float64" if train.mask.dtype == torch.float64 else "float32",
            stacking=self.options.stacking,  # type: ignore[arg-type]
            max_fused=self.options.max_fused,
        )
        row = methods.get(head["method"])
        server = row.server(half.config, half.model.anatomy)
        halves = Halves(server, half, half.model, half.model.initial(seed, train.mask.dtype))
        data = DataSettings()
        run = Run(row.name, settings, data, half.training, half.config, Limits())
        return Fused(halves, [samples(one) for one in sites.values()], run, self.bank)

    def remark(self, text: str) -> None:
        """Tell the user something about how the run is executed, once."""
        if text not in self.remarks:
            self.remarks.append(text)
            log.warning("%s", text)

    def close(self) -> None:
        """Free the device's memory."""
        if self.engine is not None:
            self.engine.close()
        self.engine, self.key = None, ()


def tests_a_model(head: dict[str, Any]) -> bool:
    """Return whether a request trains or tests a model; the later ones to calibrate use the model
    that was tested.
    """
    try:
        order = head.get("calibration")
        return order is None or calibrating.Order.read(order).stage == "hold"
    except BayflowerError:
        return False  # the client's own error says what is wrong


def apart(chosen: Sequence[int], stacked: Any) -> dict[int, Any]:
    """Return copies of the clients' parts of a stack, or of a list."""
    return {
        client: map_tree(lambda leaf: leaf.detach().clone(), take(stacked, place))
        for place, client in enumerate(chosen)
    }


def alike(site: Site) -> dict[int, Site]:
    """Return the loaded clients of the same app and kind, which are trained by one engine."""
    names = {name for (name, _), one in plug.SITES.items() if one.site.data is site.data}
    found = {
        one.site.client: one.site
        for (name, _), one in plug.SITES.items()
        if name in names and one.site.new == site.new
    }
    return found or {site.client: site}


def samples(site: Site) -> ClientData:
    """Return a client's samples as the fused engine takes them."""

    def arrays(part: Batch | None) -> tuple[Any, Any]:
        return (None, None) if part is None else (part.x.cpu().numpy(), part.y.cpu().numpy())

    data = site.data
    return ClientData(site.client, *arrays(data.train), *arrays(data.test), *arrays(data.held))
