"""What a client reports of itself in its first reply. With it a server needs no data and no model.

A client reports only what the result file shows: the names of the network's parameters, the shape
of an input, the number of classes, its numbers of samples, and the origin of the data with its
names of sites, classes and columns. Where a run weighs classes by everyone's labels, the server
asks for one more: how many training samples of each class the client has. A client may be faulty or
hostile, so every field is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data import Names, reported
from ..data.moments import input_sums
from ..errors import BayflowerError, WireError
from ..networks.model import Anatomy, Batch, Model
from ..recipes.labels import counted
from ..tasks.choice import target_sums

MAX_SUMS = 2**13  # numbers in the sums of targets
MAX_CLIENT = 2**31  # client numbers are below this
MAX_INPUT = 2**28  # numbers in one input
MAX_CLASSES = 2**20
MAX_SAMPLES = 2**40
MAX_TEXT = 4_000_000  # characters of a text in the first reply


class ClientInfo(NamedTuple):
    """What one client reports of itself."""

    anatomy: Anatomy
    input_shape: tuple[int, ...]
    num_classes: int
    train_size: int
    test_size: int
    # "dataset", "note", "partition" as in a result file; {} if the client does not say
    origin: dict[str, Any]
    # training samples of each class, if the server asked for them; else ()
    label_counts: tuple[int, ...] = ()
    # further names of tied parameters, each with the name that the anatomy has
    tied: Mapping[str, str] = {}
    # of training targets, if the server asked for sums: (n, Σ y, Σ y²) of numbers; (n, bin, count,
    # bin, count, …) of event times
    target_sums: tuple[float, ...] = ()
    # (n, …, Σ x, …, Σ x², …) of a table's columns, if the server asked for inputs
    input_sums: tuple[float, ...] = ()


class Summary(NamedTuple):
    """The federation as a result file describes it; the clients by number. `data.Federation` has
    the same fields, with data.
    """

    clients: tuple[int, ...]
    new_clients: tuple[int, ...]
    dataset: str
    partition: dict[str, Any]
    note: str
    names: Names = Names()


def facts_of(
    model: Model,
    train: Batch,
    test: Batch,
    origin: Mapping[str, Any],
    labels: bool = False,
    sums: bool = False,
    table: np.ndarray | None = None,
) -> ClientInfo:
    """Return what a client reports before the first round; with `labels` its counts of them, with
    `sums` those of its targets, with `table` those of its inputs.
    """
    return ClientInfo(
        model.anatomy,
        tuple(train.x.shape[1:]),
        model.num_classes,
        len(train.y),
        len(test.y),
        dict(origin),
        tuple(counted(train.y, model.num_classes).tolist()) if labels else (),
        model.further_names,
        target_sums(model.task.name, train.y) if sums else (),
        input_sums(train.x.cpu().numpy(), table) if table is not None else (),
    )


def to_header(facts: ClientInfo) -> dict[str, Any]:
    """Return the facts as the scalars of a header."""
    return {
        "anatomy": anatomy_to_text(facts.anatomy),
        "input_shape": json.dumps(list(facts.input_shape)),
        "num_classes": facts.num_classes,
        "train_size": facts.train_size,
        "test_size": facts.test_size,
        "origin": json.dumps(facts.origin),
        **({"label_counts": json.dumps(list(facts.label_counts))} if facts.label_counts else {}),
        **({"tied": json.dumps(dict(facts.tied))} if facts.tied else {}),
        **{
            name: json.dumps(list(some))
            for name, some in (
                ("target_sums", facts.target_sums),
                ("input_sums", facts.input_sums),
            )
            if some
        },
    }


def from_header(head: Mapping[str, Any]) -> ClientInfo:
    """Return what a header reports; raise if a value is out of range."""
    shape = parsed(head, "input_shape", list)
    if (
        len(shape) > 8
        or not all(is_whole(length, 1, MAX_INPUT) for length in shape)
        or math.prod(shape) > MAX_INPUT
    ):
        raise WireError(
            f"input_shape must be at most 8 whole numbers with a product up to {MAX_INPUT}, got "
            f"{str(shape)[:80]}"
        )
    for name, least, most in (
        ("num_classes", 1, MAX_CLASSES),
        ("train_size", 0, MAX_SAMPLES),
        ("test_size", 0, MAX_SAMPLES),
    ):
        if not is_whole(head.get(name), least, most):
            raise WireError(
                f"{name} must be a whole number from {least} to {most}, got "
                f"{str(head.get(name))[:80]!r}"
            )
    counts = parsed(head, "label_counts", list) if "label_counts" in head else []
    whole = all(is_whole(count, 0, MAX_SAMPLES) for count in counts)
    if counts and not (
        whole and len(counts) == head["num_classes"] and sum(counts) == head["train_size"]
    ):
        raise WireError(
            f"label_counts must be {head['num_classes']} whole numbers that add up to train_size "
            f"{head['train_size']}, got {str(counts)[:80]}"
        )
    sums = parsed(head, "target_sums", list) if "target_sums" in head else []
    real = all(isinstance(one, float) and math.isfinite(one) for one in sums)
    if sums and not (
        real
        and len(sums) % 2
        and len(sums) <= MAX_SUMS
        and sums[0] == head["train_size"]
        and min(sums[2::2], default=0) >= 0
    ):
        raise WireError(f"target_sums must be n and pairs of sums, got {str(sums)[:80]}")
    anatomy = text_to_anatomy(head.get("anatomy"))
    columns = parsed(head, "input_sums", list) if "input_sums" in head else []
    real = all(isinstance(one, float) and math.isfinite(one) for one in columns)
    if columns and not (real and len(columns) == 3 * shape[0] and len(shape) == 1):
        raise WireError(
            f"input_sums must be (n, Σ x, Σ x²) of {shape} columns, got {str(columns)[:80]}"
        )
    return ClientInfo(
        anatomy,
        tuple(shape),
        head["num_classes"],
        head["train_size"],
        head["test_size"],
        parsed(head, "origin", dict),
        tuple(counts),
        tied_names(head, anatomy),
        tuple(sums),
        tuple(columns),
    )


def tied_names(head: Mapping[str, Any], anatomy: Anatomy) -> dict[str, str]:
    """Return the further names of tied parameters that a header reports."""
    found = parsed(head, "tied", dict) if "tied" in head else {}
    if not all(isinstance(first, str) and first in anatomy.trainable for first in found.values()):
        raise WireError("tied must have a name of the anatomy for each further name")
    return found


def is_whole(value: Any, least: int, most: int) -> bool:
    """Return whether `value` is a whole number in [least, most]; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def parsed(head: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return the value of the JSON text called `name`; raise unless it is a `kind` that a result
    file can hold.
    """
    text = head.get(name)
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise WireError(f"{name} must be a text of at most {MAX_TEXT} characters")
    try:
        value = json.loads(text)
        # a result file has no NaN and no infinity
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{name} cannot be read ({str(error)[:80]})") from None
    if not isinstance(value, kind):
        raise WireError(f"{name} must contain a {kind.__name__}, got {type(value).__name__}")
    return value


def anatomy_to_text(anatomy: Anatomy) -> str:
    """Return the anatomy as JSON."""
    return json.dumps(
        {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in anatomy._asdict().items()
        }
    )


def text_to_anatomy(text: Any) -> Anatomy:
    """Return the anatomy a client reported."""
    raw = parsed({"anatomy": text}, "anatomy", dict)
    for name in Anatomy._fields:
        names = raw.get(name)
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise WireError(f"anatomy must have a list of names called {name!r}")
    return Anatomy(
        tuple(raw["trainable"]),
        tuple(raw["buffers"]),
        frozenset(raw["norm_names"]),
        frozenset(raw["head_names"]),
    )


SAME: tuple[tuple[str, Callable[[ClientInfo], Any], str], ...] = (
    ("different networks", lambda facts: facts.anatomy, "all must use the same model"),
    (
        "inputs of different shapes",
        lambda facts: facts.input_shape,
        "all must prepare their data alike",
    ),
    (
        "different numbers of classes",
        lambda facts: facts.num_classes,
        "give each the number of classes of the whole federation",
    ),
)


def agreed(known: Mapping[int, ClientInfo]) -> ClientInfo:
    """Return what more than half of the clients report of their network and data; raise with the
    clients that differ from the one with the lowest number if no such majority exists.
    """

    def alike(client: int) -> list[int]:
        return [one for one in sorted(known) if disagreement(known[one], known[client]) is None]

    for client in sorted(known):
        if 2 * len(alike(client)) > len(known):
            return known[client]
    first = min(known)
    for what, read, remedy in SAME:
        others = [client for client in sorted(known) if read(known[client]) != read(known[first])]
        if others:
            same = [client for client in sorted(known) if client not in others]
            raise BayflowerError(
                f"clients {listed(same)} and {listed(others)} have {what}; {remedy}"
            )
    return known[first]


def disagreement(facts: ClientInfo, common: ClientInfo) -> str | None:
    """Return why a client that joins later cannot take part, or None."""
    return next(
        (
            f"it has {what.replace('different', 'other')} than the other clients; {remedy}"
            for what, read, remedy in SAME
            if read(facts) != read(common)
        ),
        None,
    )


def listed(clients: Sequence[int], most: int = 10) -> str:
    """Return the clients' numbers as text for a message."""
    shown = ", ".join(str(client) for client in clients[:most])
    return shown if len(clients) <= most else f"{shown} and {len(clients) - most} more"


def summary(
    known: Mapping[int, ClientInfo], new: Mapping[int, ClientInfo], dataset: str
) -> Summary:
    """Return the federation of the clients `known` and `new`, with those facts on the origin of the
    data that all clients agree on.
    """
    everyone = [
        *(known[client] for client in sorted(known)),
        *(new[client] for client in sorted(new)),
    ]
    origins = [facts.origin for facts in everyone]
    partitions: list[dict[str, Any]] = [
        said if isinstance(said := origin.get("partition"), dict) else {} for origin in origins
    ]
    common = {
        key: value
        for key, value in partitions[0].items()
        if all(part.get(key) == value for part in partitions)
    }
    sizes = {
        "train_sizes": [facts.train_size for facts in everyone],
        "test_sizes": [facts.test_size for facts in everyone],
    }
    name, note = common_text(origins, "dataset", dataset), common_text(origins, "note", "")
    names = {reported(origin.get("names")) for origin in origins}
    said = names.pop() if len(names) == 1 else Names()
    clients = (tuple(sorted(known)), tuple(sorted(new)))
    return Summary(*clients, name, {**common, **sizes}, note, said)


def common_text(origins: Sequence[Mapping[str, Any]], key: str, otherwise: str) -> str:
    """Return the text under `key` if all clients report the same, else `otherwise`."""
    said = {str(origin.get(key, ""))[:1000] for origin in origins}
    return (said.pop() or otherwise) if len(said) == 1 else otherwise
