"""Limits under masks: the server sees the sum of the updates and no client's, so clients limit
themselves.

    M     how far the shared model moved in a round: median over the last ROUNDS rounds
    K     clients of the round
    ‖change of a client‖ ≤ SELF √K M            told to the clients with the round's request

The mean of K changes that have nothing in common is √K times shorter than each of them, so honest
clients are rarely cut. The server cannot check that a client keeps to it. It checks the sum: where
the method is a mean of models, a round that moves the model by more than MOST M is not used. It
counts as MOST M in later medians: a run whose course has changed goes on after a few rounds.
Nothing is limited before the first round has shown how far a round moves the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import Tensor

from ..contract import ServerHalf
from ..tree import Tensors

ROUNDS = 3
SELF = 2.0
MOST = 4.0
LIMITS = "limits"  # the key of the limits in the header of a request, and in a checkpoint


class Unseen:
    """How far the last rounds moved the shared model, by field."""

    def __init__(self, half: ServerHalf) -> None:
        self.half = half
        self.past: dict[str, list[float]] = {}

    def told(self, clients: int) -> dict[str, str]:
        """Return what the clients of a round are told; {} before the first one."""
        if not self.past:
            return {}
        far = SELF * math.sqrt(clients)
        return {LIMITS: json.dumps({name: far * median(one) for name, one in self.past.items()})}

    def why_not(self, before: Any, after: Any) -> str | None:
        """Return why the sum of a round must not be used, or None; its way is noted, at most MOST
        times the usual one.
        """
        moved = {
            field: distance(one, named(after, field))
            for field in models(self.half)
            if (one := named(before, field))
        }
        usual = {field: median(self.past.get(field) or [math.inf]) for field in moved}
        why = None
        for field, way in moved.items() if self.half.averages_models else ():
            if way > MOST * usual[field]:
                times = way / usual[field]
                why = (
                    f"the sum moved {field} {times:.3g} times as far as usual: a client did not "
                    "keep to its limit, or the run changed its course (robust); the round is not "
                    "used. To see who it was, run with secure=off"
                )
        for field, way in moved.items():
            if way > 0:
                noted = min(way, MOST * usual[field])
                self.past[field] = [*self.past.get(field, []), noted][-ROUNDS:]
        return why


def kept(half: ServerHalf, broadcast: Any, update: Any, told: Mapping[str, Any]) -> Any:
    """Return a client's update within the limits that it was told; the same if it is within."""
    limits = json.loads(str(told.get(LIMITS, "{}")))
    for field in models(half):
        sent, own = named(broadcast, field), named(update, field)
        if field not in limits or not sent or not own:
            continue
        way, most = distance(sent, own), float(limits[field])
        if way > most:
            update = update._replace(**{field: nearer(sent, own, most / way)})
    return update


def models(half: ServerHalf) -> list[str]:
    """Return the fields of an update that are models, or parts of one."""
    return [field for field, kind in half.update_fields.items() if kind == "model"]


def named(holder: Any, field: str) -> Tensors:
    """Return a field's tensors by name; {} without them."""
    found = holder._asdict().get(field)
    return found if isinstance(found, dict) else {}


def distance(sent: Tensors, own: Tensors) -> float:
    """Return how far two models are apart, over the names of both."""
    names = [name for name in own if name in sent and own[name].is_floating_point()]
    squares = [float((own[n].double() - sent[n].double()).square().sum()) for n in names]
    return math.sqrt(sum(squares))


def nearer(sent: Tensors, own: Tensors, by: float) -> Tensors:
    """Return a model with its way multiplied by `by`."""

    def short(there: Tensor, here: Tensor) -> Tensor:
        return (there.double() + by * (here.double() - there.double())).to(here.dtype)

    return {
        name: short(sent[name], value) if name in sent and value.is_floating_point() else value
        for name, value in own.items()
    }
