"""An in-process grid whose nodes appear and disappear."""

from __future__ import annotations

from conftest import small_prepared
from flwr.app import Message

from bayflower.files.store import MemoryStore
from bayflower.flower import records
from bayflower.flower.loop import FIRST_NODE, InProcessGrid, contexts, federation_app, make_strategy

FAST = {
    "new_clients": 0,
    "local_epochs": 1,
    "evaluate_every": 0,
    "rejoin_seconds": 0.0,
    "keep": 0.15,
}


class Town:
    """A federation whose nodes come and go: `plan` gives, for each round, which clients are
    connected while it lasts.
    """

    def __init__(
        self, method: str, plan: dict[int, list[int]], store=None, tamper=None, **settings
    ) -> None:
        self.prepared = small_prepared(method, **{**FAST, "rounds": max(plan), **settings})
        run, federation, self.halves = (
            self.prepared.run,
            self.prepared.federation,
            self.prepared.halves,
        )
        self.store = store or MemoryStore()
        everyone = [data.client for data in (*federation.clients, *federation.new_clients)]
        self.contexts = {context.node_id - FIRST_NODE: context for context in contexts(everyone)}
        self.plan, self.states, self.kept, self.asked = plan, {}, {}, {}
        self.tamper = tamper
        self.grid = InProcessGrid(
            federation_app(run, federation, self.halves, self.store), [], self.answer
        )
        self.strategy = make_strategy(run, after_round=self.after)
        self.connect(plan[1])

    def connect(self, clients: list[int]) -> None:
        self.grid.contexts = {
            self.contexts[client].node_id: self.contexts[client] for client in clients
        }

    def answer(self, message: Message):
        told = dict(message.content[records.HEADER])
        if message.metadata.message_type == "train":
            self.asked.setdefault(told["round"], {})[message.metadata.dst_node_id - FIRST_NODE] = (
                told
            )
        reply = self.grid.ask(message)
        return (
            self.tamper(message, reply, told)
            if self.tamper and message.metadata.message_type == "train"
            else reply
        )

    def after(self, strategy, round: int, forced: bool) -> None:
        self.states[round] = strategy.state
        self.kept[round] = {
            client: self.store.load(strategy.run, client) for client in self.contexts
        }
        if round + 1 in self.plan:
            self.connect(self.plan[round + 1])

    def start(self):
        initial = {**self.halves.initial[0], **self.halves.initial[1]}
        self.strategy.start(
            self.grid, records.to_arrays(initial), num_rounds=max(self.plan), timeout=20
        )
        return self

    def trained(self, round: int) -> int:
        return self.strategy.records[round - 1]["num_clients"]


def silent(client: int, rounds: set[int]):
    def tamper(message, reply, told):
        return (
            None
            if message.metadata.dst_node_id == FIRST_NODE + client and told["round"] in rounds
            else reply
        )

    return tamper
