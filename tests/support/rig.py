"""An in-process grid with one client whose replies a test may change."""

from __future__ import annotations

from conftest import small_prepared
from flwr.app import Array, ConfigRecord, Message

from bayflower.files.store import MemoryStore
from bayflower.flower import records
from bayflower.flower.loop import InProcessGrid, contexts, federation_app, make_strategy

VICTIM = 2
FEW = {"keep": 0.15, "local_epochs": 1, "new_clients": 0}  # two or three steps for each client


class Rig:
    """A strategy on a grid in which a reply can be tampered with."""

    def __init__(self, method: str = "fedmap", tamper=None, members=None, **settings) -> None:
        self.prepared = small_prepared(method, **{**FEW, **settings})
        run, federation, halves = self.prepared.run, self.prepared.federation, self.prepared.halves
        app = federation_app(run, federation, halves, MemoryStore())
        self.seen: list[Message] = []

        def fail(message: Message):
            reply = self.grid.ask(message)
            self.seen.append(message)
            if reply.has_content():  # a copy, because the strategy empties what it reads
                self.seen.append(
                    Message(content=records.copy_content(reply.content), metadata=reply.metadata)
                )
            client = message.metadata.dst_node_id - 1000
            if tamper is None or message.metadata.message_type != "train" or client != VICTIM:
                return reply
            return tamper(message, reply)

        clients = members if members is not None else [data.client for data in federation.clients]
        self.grid = InProcessGrid(app, contexts(clients), fail)
        self.strategy = make_strategy(run)
        self.halves = halves

    def start(self, rounds: int = 1, timeout: float = 60):
        initial = {**self.halves.initial[0], **self.halves.initial[1]}
        return self.strategy.start(
            self.grid, records.to_arrays(initial), num_rounds=rounds, timeout=timeout
        )


def rewrite(change):
    """Return a tamper function that changes the update's tensors."""

    def tamper(message, reply):
        flat = records.arrays(reply, records.UPDATE)
        change(flat)
        reply.content[records.UPDATE] = records.to_arrays(flat)
        return reply

    return tamper


def head(**values):
    def tamper(message, reply):
        reply.content[records.HEADER] = ConfigRecord(
            {**dict(reply.content[records.HEADER]), **values}
        )
        return reply

    return tamper


def set_value(name, value):
    def change(flat):
        flat[name] = flat[name].clone()
        flat[name].view(-1)[0] = value

    return rewrite(change)


def set_loss(value):
    def tamper(message, reply):
        reply.content[records.METRICS].pop(records.TRAIN_LOSS)
        if value is not None:
            reply.content[records.METRICS][records.TRAIN_LOSS] = value
        return reply

    return tamper


def drop_record(key):
    def tamper(message, reply):
        del reply.content[key]
        return reply

    return tamper


def broken_array(message, reply):
    record = reply.content[records.UPDATE]
    name = next(iter(record))
    record[name] = Array(
        dtype="float32", shape=(2,), stype="numpy.ndarray", data=b"not a npy block"
    )
    return reply
