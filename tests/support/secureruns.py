"""Runs with secure=sum on an in-process grid, on which messages can be lost, replies come in any
order, and the server can be stopped and resumed.
"""

from __future__ import annotations

import random

import torch
from flwr.app import Error, Message, MessageType

from bayflower import methods
from bayflower.config import parse
from bayflower.engines import prepare
from bayflower.files import checkpoint
from bayflower.files.store import MemoryStore
from bayflower.flower import course, records
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy
from bayflower.tree import flatten

BASE = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 5,
    "rounds": 2,
    "local_epochs": 1,
    "calibration": "off",
    "evaluate_every": 0,
    "device": "cpu",
    "robust": "off",  # under masks clients limit themselves: other bits than without
}
SECURE = {"secure": "sum", "secure_limbs": 3, "secure_threshold": 0.5}
ADDITIVE = [row.name for row in methods.ROWS if not row.additive]


class AnyOrder(InProcessGrid):
    """A grid whose nodes answer in an order of chance."""

    def __init__(self, *known):
        super().__init__(*known)
        self.chance = random.Random(7)

    def pull_messages(self, message_ids):
        waiting = list(self.inbox.items())
        self.chance.shuffle(waiting)
        self.inbox = dict(waiting)
        return super().pull_messages(message_ids)


def run(
    method,
    lost=None,
    seen=None,
    store=None,
    node=None,
    num_rounds=0,
    kind=InProcessGrid,
    resume=None,
    saved=None,
    **settings,
):
    """Return the strategy after a run on an in-process grid. `lost(request, client, round)` says
    which messages are never answered; "late": the client has done its work. `seen` gets every reply
    to a training request; `node` is added to the nodes' configurations. `saved` gets a checkpoint
    of the server after every round, as in a deployment; a run goes on from `resume`.
    """
    ready = prepare(parse(method, {**BASE, **settings}), "loop")
    app = federation_app(ready.run, ready.federation, ready.halves, store or MemoryStore())
    grid = kind(app, contexts(one.client for one in ready.federation.clients))

    for context in grid.contexts.values():
        context.node_config.update(node or {})

    def answer(message):
        head = message.content[records.HEADER]
        client = grid.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        train = message.metadata.message_type == MessageType.TRAIN
        request = "train" if train else str(head.get("secure", ""))
        round = int(head.get("round", strategy.journal.round))
        gone = lost(request, client, round) if lost else False
        if gone and gone != "late":
            return error_reply(message)
        reply = grid.ask(message)
        if train and seen is not None:
            seen.append((client, records.copy_content(reply.content)))
        return error_reply(message) if gone else reply

    def save(strategy, round, _):
        past = list(strategy.records), list(strategy.faults)
        known = (strategy.run, round, strategy.state, {}, *past)
        if saved is not None:
            saved.append(checkpoint.make(ready.run, *known, strategy.memory()))

    grid.fail = answer
    more = {"after_round": save, "resume": resume}
    strategy = make_strategy(ready.run, quiet=True, retries=0, **more)
    params, buffers = ready.halves.initial
    rounds = num_rounds or BASE["rounds"]
    strategy.start(grid, records.to_arrays({**params, **buffers}), num_rounds=rounds)
    return strategy


def error_reply(message):
    return Message(Error(code=2, reason="lost"), reply_to=message)


def same(one, other):
    ours, theirs = flatten(one.state), flatten(other.state)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


def dropping(request, client, round):
    """Client 4 never enrols, client 3 sends no update in round 2, client 2 does not unmask then."""
    return (
        (client == 4 and request in ("enrol", "train"))
        or (client == 3 and round == 2 and request == "train")
        or (client == 2 and round == 2 and request in ("unmask", "recover"))
    )


def summed(monkeypatch, method):
    """Let the server of plain runs add what clients add in secure ones."""
    made = methods.get(method).server

    class Summed(made):
        def check(self, state, client, update):
            return None  # it may need what secure sums do not keep

        def statistic(self, state, client, update):
            return made(self.config, self.anatomy).summand(state, client, update)

    initialise = course.Course._initialise

    def initialised(self, anatomy, initial):
        initialise(self, anatomy, initial)
        self.half = Summed(self.half.config, self.half.anatomy)

    monkeypatch.setattr(course.Course, "_initialise", initialised)
