"""The loop engine: an in-process Flower `Grid` with real messages; clients answer one after
another. It is the reference for the other engines, and useful for debugging.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun

# the one internal import: Message() asks for it
from flwr.supercore.task_identity import TaskIdentity

from ..config import Run
from ..data import Federation
from ..files.checkpoint import Checkpoint, make, write
from ..files.records import Outcome, Progress
from ..files.store import MemoryStore, Saved, Store
from ..rounds import prints, solo
from ..rounds.clock import Clock
from ..rounds.halves import Halves
from ..rounds.refine import refiner_of
from ..rounds.schedule import checkpoint_due
from ..tree import flatten
from . import masking, records
from .classes import strategy_class
from .client import Site, client_app
from .strategy import BayflowerStrategy

SERVER_NODE = 1
FIRST_NODE = 1000


class InProcessGrid(Grid):
    """A grid whose nodes live in this process. A message is processed when its reply is pulled, one
    at a time, so replies never accumulate.
    """

    def __init__(
        self,
        app: ClientApp,
        contexts: Iterable[Context],
        fail: Callable[[Message], Message | None] | None = None,
    ) -> None:
        self.app = app
        self.contexts = {context.node_id: context for context in contexts}
        # for tests: replaces the reply to a message; a function that returns None drops the reply
        self.fail = fail
        self.inbox: dict[str, Message] = {}
        self._run = FlowerRun.create_empty(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER_NODE, 1

    def set_run(self, run: FlowerRun) -> None:
        """Set the run this grid belongs to."""
        self._run = run

    @property
    def run(self) -> FlowerRun:
        """Return the run this grid belongs to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages; return their ids."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self.inbox[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Process the first queued message of `message_ids` and return its reply."""
        wanted = set(message_ids)
        for number in list(self.inbox):
            if number in wanted:
                reply = self._answer(self.inbox.pop(number))
                return [] if reply is None else [reply]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to all messages."""
        ids = list(self.push_messages(messages))
        return [reply for number in ids for reply in self.pull_messages([number])]

    def _answer(self, message: Message) -> Message | None:
        received = Message(content=records.copy_content(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        if self.fail is not None:
            return self.fail(received)
        return self.ask(received)

    def ask(self, message: Message) -> Message:
        """Return the ClientApp's reply, or Flower's error reply."""
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
        try:
            return self.app(message, context)
        except Exception as error:  # a client's failure becomes an error reply
            return Message(Error(code=2, reason=f"{error}".splitlines()[0]), reply_to=message)


def contexts(clients: Iterable[int]) -> list[Context]:
    """Return Flower contexts of nodes that hold these partitions."""
    known = list(clients)
    return [
        Context(
            1,
            FIRST_NODE + client,
            {"partition-id": client, "num-partitions": len(known)},
            RecordDict(),
            {},
        )
        for client in known
    ]


def federation_app(run: Run, federation: Federation, halves: Halves, store: Store) -> ClientApp:
    """Return the ClientApp whose sites are the federation's clients."""
    settings = run.settings
    everyone = {data.client: data for data in (*federation.clients, *federation.new_clients)}
    new = {data.client for data in federation.new_clients}
    loaded: dict[int, solo.Samples] = {}

    def site_of(context: Context) -> Site:
        client = int(context.node_config["partition-id"])
        if client not in loaded:
            loaded[client] = solo.samples(
                everyone[client], settings.torch_device(), settings.torch_dtype()
            )
        peers, only = masking.told(context.node_config)
        site = Site(client, client in new, halves.model, loaded[client], store)
        return site._replace(peers=peers, secure_only=only)

    return client_app(site_of)


def run_loop(
    run: Run,
    federation: Federation,
    halves: Halves,
    progress: Progress | None = None,
    out: Path | None = None,
    resume: Checkpoint | None = None,
    store: Store | None = None,
    made: Callable[[ClientApp, list[Context]], Grid] = InProcessGrid,
) -> Outcome:
    """Return the outcome of all rounds and the final test; checkpoints go to `out`. `made` returns
    the grid of some nodes.
    """
    settings = run.settings
    memory = store or MemoryStore()
    data: dict[str, Any] = {}  # fingerprints, made with the first checkpoint
    noticed: list[str] = []
    if resume:
        prints.check_states(resume, halves, here=True)
        noticed = prints.changed(federation, resume.data)
        accepted = resume.roster.get("accepted", {})
        for client, state in resume.clients.items():
            # a client may be in the middle of a round that began before the last step
            last = int(accepted.get(str(client), 0)) if resume.sent else resume.round
            memory.save(resume.run, client, Saved(last, "", state, {}, {}, {}))
    app = federation_app(run, federation, halves, memory)
    grid = made(
        app, contexts(data.client for data in (*federation.clients, *federation.new_clients))
    )

    def save(strategy: BayflowerStrategy, round: int, forced: bool) -> None:
        every = settings.checkpoint_every
        due = checkpoint_due(round, every, settings.rounds) or (forced and every > 0)
        if out is not None and due:
            fresh = flatten(halves.client.init(*halves.initial))
            data.update(data or prints.of(federation))
            known = {
                data.client: memory.load(strategy.run, data.client) for data in federation.clients
            }
            last = {client: strategy.roster.state_round(client, round) for client in known}
            clients = {
                client: next((one.state for one in saved if one.round <= last[client]), fresh)
                for client, saved in known.items()
            }
            write(
                out,
                make(
                    run,
                    strategy.run,
                    round,
                    strategy.state,
                    clients,
                    strategy.records,
                    strategy.faults,
                    # the clients' states are in this file: they cannot differ from the server's
                    {**strategy.memory(), "continuity": {}},
                    data,
                    strategy.kept(),
                ),
            )

    known: dict[str, Any] = {"after_round": save, "resume": resume, "folder": out}
    if run.aggregation.simulates:
        known["clock"] = Clock(run.aggregation.seconds(), settings.seed)
    known["refiner"] = refiner_of(run, halves, federation.input_shape)
    strategy = make_strategy(run, progress, **known, quiet=True)
    strategy.faults.extend(noticed)
    params, buffers = halves.initial
    strategy.start(grid, records.to_arrays({**params, **buffers}), num_rounds=settings.rounds)
    assert strategy.outcome is not None
    return strategy.outcome


def make_strategy(run: Run, progress: Progress | None = None, **more: Any) -> BayflowerStrategy:
    """Return the strategy of `run.method` with the run's settings."""
    settings = run.settings
    return strategy_class(run.method)(
        fraction_train=settings.fraction_train,
        fraction_evaluate=settings.fraction_evaluate,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        min_replies=settings.min_replies,
        evaluate_every=settings.evaluate_every,
        seed=settings.seed,
        progress=progress,
        parsed=run,
        **more,
    )
