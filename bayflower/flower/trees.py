"""The tree of objects that a reply announces, read from the bytes of the request.

Two bytes on the wire can stand for an object in memory. So the objects are counted, and their ids
compared, before protobuf builds anything of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import BayflowerError

MEGABYTE = 1_000_000
MOST_OBJECTS = 20_000  # parts of one reply: arrays, their chunks of 5 MiB, and a few records
LONGEST_BODY = 16 * MEGABYTE  # bytes of a record; arrays are in chunks
LONGEST_ARRAY = MEGABYTE  # bytes that describe an array: its shape, and which chunks it has
PARTS = {  # the kinds of objects in a message, and what each is made of
    "Message": ("RecordDict",),
    "RecordDict": ("ArrayRecord", "ConfigRecord", "MetricRecord"),
    "ArrayRecord": ("Array",),
    "Array": ("ArrayChunk",),
    "ArrayChunk": (),
    "ConfigRecord": (),
    "MetricRecord": (),
}
LONGEST_ENVELOPE = 64 * 1024  # bytes of a message without its content: ids, or an error
# the place of each kind of object in a message
DEPTHS = {"Message": 0, "RecordDict": 1, "Array": 3, "ArrayChunk": 4} | dict.fromkeys(
    PARTS["RecordDict"], 2
)
Tree = dict[bytes, tuple[int, tuple[bytes, ...]]]  # by object: its depth, and its children


class RefusedError(BayflowerError):
    """A request that no honest SuperNode sends."""


def digest(number: str) -> bytes:
    """Return an object's id as bytes; raise if it is not a hash in Flower's writing."""
    try:
        found = bytes.fromhex(number)
    except ValueError:
        found = b""
    if len(found) != 32 or found.hex() != number:
        raise RefusedError("it names an object that is not a hash")
    return found


def scanned(body: bytes) -> Tree:
    """Return the tree of objects in a `push-messages` request; raise if it is none that a SuperNode
    sends. Two bytes can stand for an object in memory, so they are counted first.
    """
    tree: Tree = {}
    counts = {1: 0, 2: 0, 3: 0, 4: 0}
    for field, start, end in fields(body, 0, len(body)):
        counts[field] = counts.get(field, 0) + 1
        if field in (1, 2, 4) and end - start > LONGEST_ENVELOPE:
            raise RefusedError("its reply has content outside its objects")
        if field == 3 and counts[3] == 1:
            planted(body, start, end, tree)
    if counts[2] != 1 or counts[3] != 1 or counts[1] != 1 or counts[4] > 8:
        raise RefusedError("it sends other than one message and one tree")
    return tree


def planted(body: bytes, start: int, end: int, tree: Tree) -> None:
    """Fill `tree` from the bytes of an ObjectTree, its root first."""
    todo: list[tuple[int, int, int]] = [(start, end, 0)]
    counted = 0
    while todo:
        here, there, depth = todo.pop()
        counted += 1
        if counted > MOST_OBJECTS or depth > max(DEPTHS.values()):
            raise RefusedError(f"its reply has more than {MOST_OBJECTS} parts, or is too deep")
        name, inner = b"", []
        for field, first, last in fields(body, here, there):
            if field == 1:
                name = body[first:last]
            elif field == 2:
                inner.append((first, last, depth + 1))
        own = digest(name.decode("ascii", "replace"))
        below = tuple(digest(named(body, first, last)) for first, last, _ in inner)
        if len(set(below)) != len(below) or tree.setdefault(own, (depth, below)) != (depth, below):
            raise RefusedError("the tree of its reply contradicts itself")
        todo.extend(inner)


def named(body: bytes, start: int, end: int) -> str:
    """Return the id in the bytes of an ObjectTree."""
    found = [body[a:b] for field, a, b in fields(body, start, end) if field == 1]
    return found[-1].decode("ascii", "replace") if found else ""


def fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, end) of each field in a protobuf message; raise if it is damaged."""
    counted = 0
    while start < end:
        counted += 1
        if counted > MOST_OBJECTS + 8:
            raise RefusedError(f"its request has more than {MOST_OBJECTS} parts")
        tag, start = varint(body, start, end)
        kind = tag & 7
        if kind == 2:
            size, start = varint(body, start, end)
        elif kind == 0:
            _, after = varint(body, start, end)
            size = after - start
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise RefusedError("its request is damaged")
        if start + size > end:
            raise RefusedError("its request is damaged")
        yield tag >> 3, start, start + size
        start += size


def varint(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the number that starts here, and where it ends."""
    value = shift = 0
    while start < end and shift < 64:
        byte = body[start]
        value |= (byte & 127) << shift
        start, shift = start + 1, shift + 7
        if byte < 128:
            return value, start
    raise RefusedError("its request is damaged")
