"""A seeded mutator of replies: what a broken or hostile client might send, in some twenty kinds."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from bayflower.flower import records

EXTREME = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-45, 1e30, 1e38, -1e38]
COUNTS = [0, -1, -(2**62), 2**31, 2**40, 2**62, 10**9]


def copied(reply: Message) -> Message:
    """Return the reply in containers of its own."""
    return Message(content=records.copy_content(reply.content), metadata=reply.metadata)


def raw(
    values: np.ndarray,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    pickle: bool = False,
) -> Array:
    """Return an array whose announcement may differ from what it holds."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=pickle)
    return Array(
        dtype=dtype or str(values.dtype),
        shape=tuple(shape if shape is not None else values.shape),
        stype="numpy.ndarray",
        data=file.getvalue(),
    )


class Mutator:
    """Changes copies of a client's reply; `old` is its reply of the round before."""

    def __init__(self, seed: str, old: Message) -> None:
        self.draw, self.old = random.Random(seed), old
        self.kinds: list[Callable[[Message], list[Message]]] = [
            self.bytes_in_numbers,
            self.bytes_anywhere,
            self.cut,
            self.keys,
            self.shape,
            self.lying_shape,
            self.dtype,
            self.extreme,
            self.negated,
            self.scaled,
            self.whole_numbers,
            self.header,
            self.header_of_another_kind,
            self.records,
            self.giant,
            self.duplicate,
            self.replay,
            self.replay_in_disguise,
            self.another_node,
            self.loss,
            self.error,
            self.pickled,
        ]

    def __call__(self, reply: Message) -> tuple[str, list[Message]]:
        """Return (the kind of mutation, the messages that come instead of `reply`)."""
        kind = self.draw.choice(self.kinds)
        return kind.__name__, kind(copied(reply))

    # -- arrays -----------------------------------------------------------------------------------
    def place(self, reply: Message) -> tuple[ArrayRecord, str]:
        keys = [
            key for key in (records.UPDATE, records.UPDATE, records.TALLY) if key in reply.content
        ]
        record = reply.content[self.draw.choice(keys)]
        return record, self.draw.choice(list(record))

    def numbers(self, record: ArrayRecord, name: str) -> np.ndarray:
        return record[name].numpy().copy()

    def with_bytes(self, reply: Message, first: Callable[[bytes], int]) -> list[Message]:
        record, name = self.place(reply)
        data = bytearray(record[name].data)
        start = min(first(record[name].data), len(data) - 1)
        for _ in range(self.draw.choice([1, 1, 4, 64])):
            data[self.draw.randrange(start, len(data))] = self.draw.randrange(256)
        old = record[name]
        record[name] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=bytes(data))
        return [reply]

    def bytes_in_numbers(self, reply: Message) -> list[Message]:
        return self.with_bytes(reply, lambda data: data.index(b"\n") + 1)

    def bytes_anywhere(self, reply: Message) -> list[Message]:
        return self.with_bytes(reply, lambda data: 0)

    def cut(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        old = record[name]
        data = (
            old.data[: self.draw.randrange(len(old.data))]
            if self.draw.random() < 0.7
            else old.data + b"x" * self.draw.choice([1, 8, 800])
        )
        record[name] = Array(
            dtype=old.dtype,
            shape=old.shape,
            stype=self.draw.choice([old.stype, old.stype, "pickle"]),
            data=data,
        )
        return [reply]

    def keys(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        array = record.pop(name) if self.draw.random() < 0.7 else record[name]
        if self.draw.random() < 0.7:
            other = self.draw.choice(
                [
                    name + "x",
                    "../../etc/passwd",
                    "",
                    "params/" + name,
                    "num_examples",
                    name.upper(),
                    "x" * 10_000,
                ]
            )
            record[other] = array
        return [reply]

    def shape(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        x = self.numbers(record, name)
        changed = self.draw.choice(
            [
                x.reshape(-1),
                x[None],
                x.T,
                np.concatenate([x.reshape(-1), x.reshape(-1)]),
                x.reshape(-1)[:0],
                np.zeros((0, 10**12), x.dtype),
                x.reshape(-1)[:1],
            ]
        )
        record[name] = raw(changed)
        return [reply]

    def lying_shape(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        x = self.numbers(record, name)
        shape = self.draw.choice([(10**15,), (2**63,), (-1,), (1,) * 40, (0,), (*x.shape, 7)])
        if self.draw.random() < 0.5:
            record[name] = raw(x, shape=shape)
        else:
            file = io.BytesIO()
            head = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, head)
            record[name] = Array(
                dtype="float32",
                shape=tuple(x.shape),
                stype="numpy.ndarray",
                data=file.getvalue() + b"\0" * 64,
            )
        return [reply]

    def dtype(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        x = self.numbers(record, name)
        kind = self.draw.choice(
            [
                "float16",
                "float64",
                "int32",
                "int64",
                "uint8",
                "bool",
                "complex64",
                ">f4",
                ">i8",
                "U3",
                "M8[s]",
            ]
        )
        with np.errstate(all="ignore"):
            changed = np.zeros(x.shape, kind) if kind in ("U3", "M8[s]") else x.astype(kind)
        record[name] = raw(
            changed, dtype=self.draw.choice([str(changed.dtype), str(x.dtype), "float99"])
        )
        return [reply]

    def pickled(self, reply: Message) -> list[Message]:
        record, name = self.place(reply)
        record[name] = raw(np.array([{"a": 1}, "b"], dtype=object), pickle=True)
        return [reply]

    def fill(self, reply: Message, change: Callable[[np.ndarray], None]) -> list[Message]:
        record, name = self.place(reply)
        x = self.numbers(record, name)
        with np.errstate(all="ignore"):
            change(x.reshape(-1) if x.ndim else x[None] if x.flags.writeable else x)
        record[name] = raw(x)
        return [reply]

    def extreme(self, reply: Message) -> list[Message]:
        value = self.draw.choice(EXTREME)

        def change(x: np.ndarray) -> None:
            if x.size and x.dtype.kind == "f":
                x[self.draw.randrange(x.size) if self.draw.random() < 0.7 else slice(None)] = value

        return self.fill(reply, change)

    def negated(self, reply: Message) -> list[Message]:
        def change(x: np.ndarray) -> None:
            if x.dtype.kind in "fi":
                np.negative(x, out=x)

        return self.fill(reply, change)

    def scaled(self, reply: Message) -> list[Message]:
        factor = 10.0 ** self.draw.choice([-300, -30, -6, 3, 6, 12, 30, 300])

        def change(x: np.ndarray) -> None:
            if x.dtype.kind == "f":
                x[:] = x * factor

        return self.fill(reply, change)

    def whole_numbers(self, reply: Message) -> list[Message]:
        """Huge ranks, counts and turns, masks of other weights."""
        record = reply.content[records.UPDATE]
        names = [name for name in record if np.dtype(record[name].dtype).kind in "iub"]
        name = self.draw.choice(names)
        x = self.numbers(record, name)
        flat = x.reshape(-1)
        at = self.draw.randrange(flat.size) if flat.size else slice(None)
        flat[at] = (
            self.draw.randrange(256) % (2 if x.dtype.kind == "b" else 256)
            if x.dtype.kind in "ub"
            else np.array(self.draw.choice(COUNTS)).astype(x.dtype)  # wraps in a small type
        )
        record[name] = raw(flat.reshape(x.shape))
        return [reply]

    # -- the rest of a message --------------------------------------------------------------------
    def header(self, reply: Message) -> list[Message]:
        name, values = self.draw.choice(
            [
                ("round", [0, 1, 3, -1, 2**62]),
                ("run", ["else", "../x", ""]),
                ("method", ["x", "../x", ""]),
                ("client", [0, 99, -1, 2**62]),
                ("protocol", [0, 2, -1]),
            ]
        )
        reply.content[records.HEADER] = ConfigRecord(
            {**dict(reply.content[records.HEADER]), name: self.draw.choice(values)}
        )
        return [reply]

    def header_of_another_kind(self, reply: Message) -> list[Message]:
        head = dict(reply.content[records.HEADER])
        name = self.draw.choice(list(head))
        value = self.draw.choice(
            [None, "x", 1.5, True, False, [1, 2], b"\0", [], "é\n\x1b[31m" * 300]
        )
        if value is None:
            head.pop(name)
        else:
            head[name] = value
        reply.content[records.HEADER] = ConfigRecord(head)
        return [reply]

    def records(self, reply: Message) -> list[Message]:
        key = self.draw.choice(list(reply.content))
        way = self.draw.randrange(4)
        if way == 0:
            del reply.content[key]
        elif way == 1:
            reply.content[key] = self.draw.choice(
                [ConfigRecord({"a": 1}), MetricRecord({"a": 1.0}), ArrayRecord({})]
            )
        elif way == 2:
            reply.content["more"] = self.draw.choice(
                [ConfigRecord({"path": "/etc/passwd"}), ArrayRecord({"x": raw(np.zeros(3))})]
            )
        else:
            return [Message(content=RecordDict({}), metadata=reply.metadata)]
        return [reply]

    def giant(self, reply: Message) -> list[Message]:
        reply.content["more"] = self.draw.choice(
            [
                ConfigRecord({"x": "y" * 3_000_000}),
                ArrayRecord({"x": raw(np.zeros(400_000))}),
                ConfigRecord({"x": [0] * 400_000}),
            ]
        )
        return [reply]

    def duplicate(self, reply: Message) -> list[Message]:
        return [reply, copied(reply)]

    def replay(self, reply: Message) -> list[Message]:
        return [Message(content=records.copy_content(self.old.content), metadata=reply.metadata)]

    def replay_in_disguise(self, reply: Message) -> list[Message]:
        content = records.copy_content(self.old.content)
        content[records.HEADER] = reply.content[records.HEADER]
        return [Message(content=content, metadata=reply.metadata)]

    def another_node(self, reply: Message) -> list[Message]:
        return [moved(reply, self.draw.choice([1, 1000, 1001, 77, 2**63]))]

    def loss(self, reply: Message) -> list[Message]:
        numbers = dict(reply.content[records.METRICS])
        value = self.draw.choice(
            [None, float("nan"), float("inf"), 1e308, -1e308, [1.0], [float("nan")], 2**62, -5.0]
        )
        numbers.pop(records.TRAIN_LOSS)
        reply.content[records.METRICS] = MetricRecord(
            numbers if value is None else {**numbers, records.TRAIN_LOSS: value}
        )
        return [reply]

    def error(self, reply: Message) -> list[Message]:
        reason = self.draw.choice(
            ["", "x" * 100_000, "a\nb\n\x1b[2Jc", "Traceback:\n" * 50, "é" * 10]
        )
        return [
            Message(
                error=Error(code=self.draw.choice([0, 1, 2, 5, 200]), reason=reason),
                metadata=reply.metadata,
            )
        ]


def moved(reply: Message, node: int) -> Message:
    """Return the reply as if it came from another node."""
    metadata = copy.copy(reply.metadata)
    metadata.__dict__["_src_node_id"] = node
    return Message(content=reply.content, metadata=metadata)


def tensors_of(reply: Message) -> dict[str, torch.Tensor]:
    """Return the update in a reply."""
    return records.to_tensors(records.copy_content(reply.content)[records.UPDATE])
