"""The two forms of messages: our own, and plain arrays inside another strategy.

A wrapper strategy, such as Flower's for differential privacy, runs Flower's own loop. It changes
replies before they are aggregated (clipping) and arrays before they are sent (noise). It expects a
reply with one ArrayRecord: the arrays it sent, in the same order. So inside a wrapper a message
carries the global model's arrays unchanged, and one ConfigRecord with our header. This works for
methods whose server keeps only the averaged model (`ServerHalf.averages_models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from ..contract import ServerHalf
from ..errors import ConfigError, WireError
from ..methods import Method
from ..recipes import Training
from ..tree import Tensors
from ..wire.hello import is_whole
from . import records
from .whole import Whole

NO_SUPER = (
    "{} did not call super().aggregate_train(), which is the aggregation of {}; call it, and "
    "change the replies before or the result after"
)


class Form(Protocol):
    """How messages are built and replies are read."""

    tests_ride_along: bool  # whether a message to train may also ask for a test

    def contents(self, half: ServerHalf, state: Any) -> Contents:
        """Return the maker of the contents of one round's messages."""

    def arrays(self, shared: Tensors) -> ArrayRecord:
        """Return the global model as Flower's callers get it."""

    def update(self, reply: Message, state: Any) -> Tensors:
        """Return an update's tensors by name; they are removed from the reply."""


class Contents(Protocol):
    """Makes the content of a message to a client."""

    def __call__(
        self, client: int, head: dict[str, Any], config: ConfigRecord, round: int
    ) -> RecordDict:
        """Return the records for `client`."""


class OwnForm:
    """The method's own broadcast and update, beside our header."""

    tests_ride_along = True

    def __init__(self, arrayrecord_key: str, configrecord_key: str, whole: Whole | None) -> None:
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.whole = whole

    def contents(self, half: ServerHalf, state: Any) -> Contents:
        """Return the maker of contents; a broadcast shared by all clients is built once."""
        shared: list[ArrayRecord] = []

        def make(client: int, head: dict[str, Any], config: ConfigRecord, round: int) -> RecordDict:
            if not shared or half.per_client:
                shared[:] = [records.to_arrays(half.pack(half.broadcast(state, client)))]
            content = RecordDict(
                {self.arrayrecord_key: shared[0], records.HEADER: ConfigRecord(head)}
            )
            if config:
                told = ConfigRecord({**config, "server-round": round})
                content[self.configrecord_key] = told
            return content

        return make

    def arrays(self, shared: Tensors) -> ArrayRecord:
        """Return the whole network with the global model in it (`whole.py`)."""
        return records.to_arrays(shared) if self.whole is None else self.whole.arrays(shared)

    def update(self, reply: Message, state: Any) -> Tensors:
        """Return the update's tensors."""
        return records.arrays(reply, records.UPDATE, consume=True)


class WrappedForm:
    """The global model's plain arrays in both directions, for a strategy around this one."""

    tests_ride_along = False

    def __init__(self, given: ArrayRecord, arrayrecord_key: str) -> None:
        self.given, self.arrayrecord_key = given, arrayrecord_key

    def contents(self, half: ServerHalf, state: Any) -> Contents:
        """Return the maker of contents: the arrays that the outer strategy sends."""

        def make(client: int, head: dict[str, Any], config: ConfigRecord, round: int) -> RecordDict:
            told = ConfigRecord({**config, **head, "plain": True})
            return RecordDict({self.arrayrecord_key: self.given, records.HEADER: told})

        return make

    def arrays(self, shared: Tensors) -> ArrayRecord:
        """Return the global model in the order of the arrays that were given."""
        return ordered(shared, list(self.given))

    def update(self, reply: Message, state: Any) -> Tensors:
        """Return an update's tensors by name from the plain arrays of a reply and the number of
        samples beside them.
        """
        arrays = records.arrays(reply, records.UPDATE, consume=True)
        count = records.metric(reply, records.NUM_EXAMPLES)
        if not is_whole(count, 1, 2**40 - 1):
            raise WireError(
                f"{records.NUM_EXAMPLES} must be a positive whole number, got {str(count)[:80]}"
            )
        groups = {name: "params" for name in state.params}
        groups |= {name: "buffers" for name in state.buffers}
        named = {
            f"{groups[name]}/{name}" if name in groups else name: value
            for name, value in arrays.items()
        }
        return {"num_examples": torch.tensor(count), **named}


def refusal(row: Method, training: Training | None = None) -> str | None:
    """Return why a method cannot run inside another strategy, or None."""
    half: Any = row.server
    if training is not None and training.lasting(1) is not training:
        return (
            "schedule=cosine needs schedule_rounds: a wrapper does not say how many rounds it has"
        )
    if training is not None and (task := training.make_task(2)).extra() and not task.extra_stays:
        return f"task={task.name} has parameters beside the network, which a wrapper does not know"
    if half.averages_models:
        return None
    more = [name for name in half.state_type._fields if name not in ("params", "buffers")]
    what = (
        f"keeps more than an averaged model ({', '.join(more)})"
        if more
        else "does not average whole models weighted by sample count"
    )
    return f"{row.title} {what}, but a wrapper would clip and add noise to the model only"


def adopted(state: Any, arrays: ArrayRecord) -> Any:
    """Return the state with the arrays that the outer strategy sends."""
    given = records.to_tensors(arrays)
    return type(state)(
        *({name: given[name].to(old.dtype) for name, old in part.items()} for part in state)
    )


def refuse_counters(state: Any) -> None:
    """Raise if a buffer holds integers: Flower's clipping cannot scale them."""
    for name, value in state.buffers.items():
        if not value.is_floating_point():
            raise ConfigError(
                f"buffer {name!r} holds integers, which Flower's clipping cannot scale; use a "
                "network without it"
            )


def ordered(tensors: Mapping[str, torch.Tensor], names: list[str]) -> ArrayRecord:
    """Return the tensors as arrays in this order, under their plain names."""
    return ArrayRecord({name: records.to_array(tensors[name]) for name in names})
