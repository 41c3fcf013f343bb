"""Any client half as a Flower ClientApp: it answers queries, training requests and test requests.

A training request may also ask for a test of the model before training.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .. import methods
from ..contract import ClientHalf
from ..data import Scaling, Source, called, reported
from ..errors import BayflowerError, in_one_line
from ..files import journal
from ..files.store import DiskStore, Saved, Store
from ..networks.model import Model
from ..privacy.budget import for_card
from ..rounds import solo
from ..rounds.ownnoise import client_half
from ..rounds.unseen import kept
from ..tree import Tensors, digest, flatten, to, unflatten
from ..wire.continuity import Thread
from ..wire.hello import facts_of, is_whole, to_header
from ..wire.protocol import reply_header, reply_numbers
from . import calibrating, inputs, masking, records, spreading
from .continuing import ending, thread_of
from .guard import guarded, told
from .regions.relay import relayed
from .saved import flat_tallies, numbers_of_test, reply_records, test_records

log = logging.getLogger("bayflower")
# keys in the header of every message to a client
HEADER_KEYS = ("method", "run", "round", "seed", "evaluate", "purpose", "instructions")
Reply = Callable[..., RecordDict]  # `train_reply` or `evaluate_reply`
# what answers in place of one client alone, if many are answered together (`fusing.py`)
TOGETHER: ContextVar[Callable[[Message, dict[str, Any], Site, Reply], RecordDict] | None]
TOGETHER = ContextVar("TOGETHER", default=None)


class Site(NamedTuple):
    """One client: its number (the partition id), whether it is a new client, its network, its data,
    and the store of its states.
    """

    client: int
    new: bool
    model: Model
    data: solo.Samples
    store: Store
    # "dataset", "note", "partition": the origin of the data, for the result file; {} = not reported
    origin: Mapping[str, Any] = {}
    # the preprocessing of raw rows, for the personal model
    scaling: Callable[[], Scaling | None] | None = None
    source: Callable[[], Source | None] | None = None  # the data set; None = the user's own code
    # which columns are 0 or 1 by construction, if everyone's numbers are to standardise the others
    table: Any = None
    # secure sums: the other clients' keys by number (None: the first one that each shows), and
    # whether this client takes part in nothing else
    peers: Mapping[int, str] | None = None
    secure_only: bool = False
    raw: solo.Samples | None = None  # the data before they were standardised, if they were


def client_app(site_of: Callable[[Context], Site], mods: Sequence[Any] = ()) -> ClientApp:
    """Return the ClientApp that serves any method. `site_of` returns the site for Flower's context;
    `mods` are Flower mods around training.
    """
    app = ClientApp(mods=[guarded, relayed])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        site = site_of(context)
        if masking.asked(message):
            return masking.answer(message, site.client, site.store, site.peers)
        known = site.data.train, site.data.test, site.origin, records.asks(message, "labels")
        table = site.table if records.asks(message, "inputs") else None
        sums = records.asks(message, "sums")
        facts = to_header(facts_of(site.model, *known, sums=sums, table=table))
        head = records.make_header(client=site.client, new=site.new, **facts)
        return Message(RecordDict({records.HEADER: head}), reply_to=message)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        return answer(message, site_of(context), train_reply)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, site_of(context), evaluate_reply)

    return app


def alone(message: Message, head: dict[str, Any], site: Site, work: Reply) -> RecordDict:
    """Return the content of one client's reply."""
    with solo.one_thread():
        return work(message, head, site)


def answer(message: Message, site: Site, work: Reply) -> Message:
    """Return the reply; an error is raised again with client, round and stage in its text."""
    head = records.header(message, HEADER_KEYS)
    # the round becomes part of a file's name
    if not is_whole(head["round"], 0, 2**40) or head["purpose"] not in ("finetune", "new"):
        raise records.WireError(
            f"round must be a whole number and purpose finetune or new, got "
            f"{str(head['round'])[:80]!r} and {str(head['purpose'])[:80]!r}"
        )
    started = time.perf_counter()
    site = inputs.ready(site, told(str(head["method"]), str(head["instructions"]))[1])
    fields = {"run": head["run"], "round": head["round"], "client": site.client}
    try:
        content = (TOGETHER.get() or alone)(message, head, site, work)
        log.info(
            "%s answered in %.2f s",
            message.metadata.message_type,
            time.perf_counter() - started,
            extra=fields,
        )
    except Exception as error:
        where = f"client {site.client}, round {head['round']}, {message.metadata.message_type}"
        reason = in_one_line(error) + journal.origin_of(error)
        log.debug("%s", traceback.format_exc(), extra=fields)
        raise BayflowerError(f"{where}: {type(error).__name__}: {reason}") from error
    keys = {"method": head["method"], "run": head["run"], "round": head["round"]}
    said = dict(content.config_records.get(records.HEADER) or {})
    content[records.HEADER] = ConfigRecord({**reply_header(**keys, client=site.client), **said})
    return Message(content, reply_to=message)


class Begun(NamedTuple):
    """The state of a client at the start of a round."""

    half: ClientHalf
    broadcast: Any
    cause: str  # digest of the broadcast
    round: int
    seed: int
    state: Any
    repeated: Saved | None  # the saved reply, if the message is a duplicate
    tally: Tensors  # the test of the model before the round, if requested
    thread: Thread  # which state this is


def begin_round(message: Message, head: dict[str, Any], site: Site) -> Begun:
    """Return `open_round`, with the test of the client's model before the round."""
    half = make_half(head["method"], head["instructions"], site.model)
    broadcast = sent(half, message, head, site)
    begun = open_round(half, broadcast, digest(broadcast), head, site)
    if not head["evaluate"] or begun.repeated is not None:
        return begun
    keys = {"seed": begun.seed, "client": site.client, "round": begun.round - 1}
    views = tested(half, begun.state, broadcast, site, "finetune", **keys)
    return begun._replace(tally=flat_tallies(views))


def open_round(
    half: ClientHalf, broadcast: Any, cause: str, head: dict[str, Any], site: Site
) -> Begun:
    """Return the client's state before a round, without a test; `cause` is the broadcast's digest.
    For a duplicate, also the saved reply.
    """
    round, seed = int(head["round"]), int(head["seed"])
    cause += masking.session_name(head)
    known = site.store.load(head["run"], site.client)
    same = (one for one in known if (one.round, one.cause) == (round, cause))
    if (repeated := next(same, None)) is None:
        masking.check(half, broadcast, head, site)
        before = start_of_round(known, head, site)
    else:
        before = last_state(known, head, round - 1)
    state, thread = state_of(half, before, head, site), thread_of(site, head, known, before)
    return Begun(half, broadcast, cause, round, seed, state, repeated, {}, thread)


def end_round(begun: Begun, head: dict[str, Any], site: Site, trained: solo.Trained) -> Saved:
    """Save the client's state and return the reply to a round."""
    numbers = reply_numbers(len(site.data.train.y), trained.loss)
    if "session" in head:
        other = masking.server_half(begun.half, head)
        sent = other.unpack(begun.broadcast, begun.half.pack(trained.update))
        trained = trained._replace(update=kept(other, begun.broadcast, sent, head))
        update = masking.masked(begun.half, begun.broadcast, head, site, trained)
        numbers = {records.NUM_EXAMPLES: numbers[records.NUM_EXAMPLES]}
    else:
        update = begun.half.pack(masking.noisy(begun.half, begun.broadcast, head, trained.update))
    state = flatten(trained.state)
    thread = ending(site, head["run"], begun.thread, begun.round, state)
    saved = Saved(begun.round, begun.cause, state, update, begun.tally, numbers, thread)
    site.store.save(head["run"], site.client, saved)
    return saved


def train_reply(
    message: Message,
    head: dict[str, Any],
    site: Site,
    ready: tuple[Begun, solo.Trained | None] | None = None,
) -> RecordDict:
    """Return the update of a round, and the test of the model before it if requested; a duplicate
    gets the saved reply. `ready` is a round that was trained elsewhere.
    """
    begun, trained = ready or (begin_round(message, head, site), None)
    saved = begun.repeated
    if saved is None:
        keys = {"round": begun.round, "seed": begun.seed, "client": site.client}
        trained = trained or solo.train(
            begun.half, begun.state, begun.broadcast, site.data.train, **keys
        )
        saved = end_round(begun, head, site, trained)
    return reply_records(saved, order_of(message, head))


def evaluate_reply(
    message: Message,
    head: dict[str, Any],
    site: Site,
    formats: tuple[str, ...] = (),
    ready: tuple[Any, dict[str, Any]] | None = None,
) -> RecordDict:
    """Return the test of every view after the last round, and what a request to calibrate asks
    for; a duplicate gets the saved reply. `ready` is the adapted state and its test, if they were
    made elsewhere.

    If the client keeps its state on disk, the personal model is saved beside it.
    """
    half = make_half(head["method"], head["instructions"], site.model)
    broadcast = sent(half, message, head, site)
    known = site.store.load(head["run"], site.client)
    before = last_state(known, head, int(head["round"]))
    state, thread = state_of(half, before, head, site), thread_of(site, head, known, before)
    keys: dict[str, Any] = {
        "seed": int(head["seed"]),
        "client": site.client,
        "round": int(head["round"]),
    }
    order, sums = None, {}
    if "calibration" in head:
        order = calibrating.Order.read(head["calibration"])
        if order.stage != "hold":
            sums = records.arrays(message, records.CALIBRATION)
    inputs = [
        digest(broadcast),
        digest(state),
        *(str(head[name]) for name in ("seed", "purpose", "instructions")),
    ]
    tests, keeps = bool(head["evaluate"]), head.get("keep", True) is True
    cause = " ".join([*inputs, *([str(head["calibration"]), digest(sums)] if order else [])])
    cause += "" if tests and keeps else f" {tests} {keeps}"
    cause += f" {thread.text()}"
    done = site.store.load_test(head["run"], site.client)
    if done is not None and (done.round, done.cause) == (keys["round"], cause):
        return test_records(done)
    rows = (len(site.data.train.y), site.data.num_held)
    key = (head["run"], *keys.values(), *inputs, *rows, order.sets if order else "")
    begun = calibrating.MEMORY.recall(key) if order else None
    if begun or ready:
        adapted = begun.adapted if begun else ready and ready[0]
    else:
        adapted = solo.adapt(half, state, broadcast, site.data.train, head["purpose"], **keys)
    views: dict[str, Any] = {}
    said: Tensors = {}
    taken: Any = None
    if tests and (order is None or order.stage == "hold"):
        parts = (site.data.test, site.data.train)
        views = ready[1] if ready else solo.test(half, adapted, broadcast, *parts, **keys)
    if order is not None:
        ours = {"seed": keys["seed"], "client": site.client}
        if half.model.task.classes:
            begun = begun or calibrating.begin(order, half, adapted, broadcast, site.data)
            said, taken = calibrating.answer(order, half, begun, site.data, sums, **ours)
        else:
            begun = begun or spreading.begin(half, adapted, broadcast, site.data)
            said, taken = spreading.answer(order, begun, site.data, sums)
        if taken is None:  # another request will follow
            calibrating.MEMORY.keep(key, begun)
    if keeps and isinstance(site.store, DiskStore) and (order is None or taken):
        folder = site.store.folder(head["run"], site.client) / "personal"
        end: dict[str, Any] = {
            "method": head["method"],
            "half": half,
            "state": adapted,
            "broadcast": broadcast,
            "data": site.data,
            **keys,
            "new": site.new,
            "tally": views.get("personal"),
            "taken": taken,
            "dataset": str(site.origin.get("dataset", "")),
            "scaling": site.scaling() if site.scaling else None,
            **called(reported(site.origin.get("names")), site.client),
            "privacy": for_card(json.loads(str(head.get("privacy", "null"))), site.client),
        }
        save_personal(folder, end, formats, site.source() if site.source else None)
    numbers = numbers_of_test(views["personal"], half) if views else {}
    done = Saved(keys["round"], cause, {}, said, flat_tallies(views), numbers, thread.text())
    try:
        site.store.save_test(head["run"], site.client, done)
    # with a full disk the server still gets the test result
    except BayflowerError as error:
        log.warning("%s", error)
    return test_records(done)


def save_personal(folder: Path, end: dict[str, Any], formats: Any, source: Source | None) -> None:
    """Save the personal model; an error is only logged, so that the server gets the test result."""
    from ..personal.runs import Kept, described, keep  # only at the end of a run

    try:
        keep(folder, described(Kept(**end), source), ("safetensors", *formats))
    except Exception as error:
        log.warning(
            "the personal model of client %d was not saved in %s: %s",
            end["client"],
            folder,
            in_one_line(error),
        )


def tested(
    half: ClientHalf,
    state: Any,
    broadcast: Any,
    site: Site,
    purpose: Any,
    *,
    seed: int,
    client: int,
    round: int,
) -> dict[str, Any]:
    """Return the tally of every view after the adaptation for `purpose`."""
    keys = {"seed": seed, "client": client, "round": round}
    adapted = solo.adapt(half, state, broadcast, site.data.train, purpose, **keys)
    return solo.test(half, adapted, broadcast, site.data.test, site.data.train, **keys)


def make_half(method: str, instructions: str, model: Model) -> ClientHalf:
    """Return the client half that the server's message names, with the settings in it."""
    options, training = told(method, instructions)
    task = training.make_task(model.num_classes)
    if not model.task.classes:  # with everyone's moments
        model = copy(model)
        model.task = task
    return client_half(methods.get(method).client, options, training, model)


def sent(half: ClientHalf, message: Message, head: dict[str, Any], site: Site) -> Any:
    """Return the broadcast in the message, on the site's device."""
    kind = methods.get(head["method"]).server.broadcast_type
    flat = records.to_tensors(records.only_arrays(message))
    if head.get("plain"):
        groups = {"params": site.model.anatomy.trainable, "buffers": site.model.anatomy.buffers}
        flat = {
            f"{group}/{name}": flat[name]
            for group, names in groups.items()
            for name in sorted(names)
        }
    return to(half.unpack(kind, flat), site.data.train.x.device)


def order_of(message: Message, head: dict[str, Any]) -> list[str]:
    """Return the names of the received arrays if the reply must have the same ones (inside a
    wrapper); [] otherwise.
    """
    return list(records.only_arrays(message)) if head.get("plain") else []


def start_of_round(known: list[Saved], head: dict[str, Any], site: Site) -> Saved | None:
    """Return the client's saved state before a round; delete states whose reply was not used."""
    if "accepted" in head:
        site.store.drop(head["run"], site.client, int(head["accepted"]))
    return last_state(known, head, int(head["round"]) - 1)


def last_state(known: list[Saved], head: dict[str, Any], round: int) -> Saved | None:
    """Return the client's saved state after its last round up to `round` whose reply was used."""
    last = min(round, int(head.get("accepted", round)))
    return next((saved for saved in known if saved.round <= last), None)


def state_of(half: ClientHalf, before: Saved | None, head: dict[str, Any], site: Site) -> Any:
    """Return the client's state; without a saved one, that of a client before its first round."""
    device, dtype = site.data.train.x.device, site.data.train.mask.dtype  # x may hold integers
    if before is None:
        state = to(half.init(*site.model.initial(int(head["seed"]), dtype)), device)
        return half.lost(state) if head.get("accepted") else state
    state = to(unflatten(half.state_type, before.state), device)
    if int(head.get("accepted", before.round)) != before.round:
        return half.lost(state)  # the last one was damaged
    return half.rejoined(state) if head.get("returned") else state
