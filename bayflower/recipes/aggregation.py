"""Settings: whether the server waits for all clients of a round, or takes a step as soon as a few
replies came (FedBuff: Nguyen et al. 2022, AISTATS).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import ConfigError, check_choices, check_least
from ..settings import setting

SHARE = 0.3  # of the clients that train at a time: the buffer, unless it is set
PART = re.compile(r"(\d+)(?:-(\d+))?:([0-9.]+(?:e[+-]?\d+)?)")
MOVING = ("model", "buffers")  # kinds of fields whose change can be added to a later model


@dataclass(frozen=True)
class Aggregation:
    """When the server takes a step (`docs/running.md`)."""

    aggregation: Literal["rounds", "buffered"] = setting(
        "rounds",
        "rounds: a step when all clients of a round have replied; buffered: a step as soon as "
        "`buffer` replies came, while the other clients train on; engines loop, ray, deployment",
    )
    buffer: int = setting(
        0,
        "buffered: replies of one step; 0 = 30 % of the clients that train at a time, at least 1",
    )
    staleness: Literal["root", "linear", "none"] = setting(
        "root",
        "buffered: weight of a change that started t steps ago: root 1/sqrt(1+t), linear 1/(1+t), "
        "none 1",
    )
    most_stale: int = setting(
        0, "buffered: a reply that started more steps ago is not used, and named; 0 = no limit"
    )
    buffer_rate: float = setting(
        1.0,
        "buffered: the server's rate, by which every change is multiplied; less than 1 calms steps "
        "of few replies from clients with unlike data",
    )
    client_seconds: str = setting(
        "",
        "loop engine: simulated seconds of a client's training, such as 0-6:1,7-9:10; clients that "
        "are not named take 1; '' = all take 1",
    )
    replay: str = setting(
        "",
        "buffered: an arrivals.jsonl of an earlier run, whose replies are used in the same steps",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_least(self, buffer=0, most_stale=0)
        self.seconds()
        if not 0 < self.buffer_rate <= 1:
            raise ConfigError(
                f"buffer_rate must be in (0, 1], got {self.buffer_rate}; 1 uses changes as they are"
            )
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name != "client_seconds" and given != field.default and not self.buffered:
                raise ConfigError(
                    f"{field.name}={given} needs aggregation=buffered; remove it, or set both"
                )

    @property
    def buffered(self) -> bool:
        """Return whether a step does not wait for all clients."""
        return self.aggregation == "buffered"

    @property
    def simulates(self) -> bool:
        """Return whether times of clients are simulated: where one process does all the work."""
        return self.buffered or bool(self.client_seconds)

    def weight(self, late: int) -> float:
        """Return the rate times s(t), by which a change counts that started `late` steps ago."""
        how = {"root": 1 / math.sqrt(1 + late), "linear": 1 / (1 + late), "none": 1.0}
        return self.buffer_rate * how[self.staleness]

    def size(self, at_once: int) -> int:
        """Return the replies of a step if `at_once` clients train at a time."""
        return min(self.buffer or max(1, int(SHARE * at_once + 1e-9)), max(at_once, 1))

    def seconds(self) -> dict[int, float]:
        """Return the simulated seconds of the clients that `client_seconds` names."""
        found: dict[int, float] = {}
        for part in filter(None, self.client_seconds.replace(" ", "").split(",")):
            known = PART.fullmatch(part)
            try:
                first, last = int(known[1]), int(known[2] or known[1])  # type: ignore[index]
                time = float(known[3])  # type: ignore[index]
            except (TypeError, ValueError):
                raise ConfigError(
                    f"client_seconds must be like 0-6:1,7-9:10 (clients:seconds), got {part!r}"
                ) from None
            if not (first <= last < 2**31 and 0 < time < 1e9):
                raise ConfigError(
                    f"client_seconds: {part!r} must name clients in ascending order and seconds "
                    "in (0, 1e9)"
                )
            found |= dict.fromkeys(range(first, last + 1), time)
        return found

    def refuses(self, row: Any, privacy: Any, limits: Any) -> str | None:
        """Return why a run of a method cannot be buffered with these settings, or None."""
        if not self.buffered:
            return None
        if why := not_an_increment(row):
            return f"aggregation=buffered is not for {row.name}: {why}; use aggregation=rounds"
        for name, given in (("secure", privacy.secure), ("dp", privacy.dp)):
            if given != "off":
                return (
                    f"aggregation=buffered cannot be combined with {name}={given}, which needs to "
                    "know a round's clients beforehand; remove one of the two settings"
                )
        if limits.max_share < 1:
            return (
                "aggregation=buffered does not know beforehand who is in a step, so max_share "
                "cannot cap it; remove one of the two settings"
            )
        return None

    def refuses_engine(self, engine: str) -> str | None:
        """Return why an engine cannot run these settings, or None."""
        if engine == "fused" and self.buffered:
            return (
                "aggregation=buffered needs clients that reply one by one; use --engine loop "
                "(simulated times), ray or deployment"
            )
        if engine != "loop" and self.client_seconds:
            return (
                f"client_seconds is for simulated times, got engine {engine}; use --engine loop, "
                "or remove it"
            )
        return None


def not_an_increment(row: Any) -> str | None:
    """Return why a client's update of a method is not a change that can be added to a later model,
    or None.

    It is one if an update is nothing but the numbers that were sent, moved, and the server keeps
    nothing else: sent, update and state have the same fields, all of them models or running
    statistics. A velocity is made of the server's steps alone, so it may be beside them.
    """
    half, sent = row.server, set(row.server.broadcast_type._fields)
    if half.shares_nothing:
        return "it shares nothing, so no client waits for another"
    if half.per_client:
        return "what is sent depends on the client"
    told = set(row.client.update_type._fields) - {"num_examples"}
    for name in sorted(told):
        kind = half.update_fields.get(name, "other")
        if kind not in MOVING or name not in sent:
            return f"its clients send {name!r}, which is not the change of a model that was sent"
    if more := sorted(sent - told):
        return f"its clients are sent {more[0]!r}, which changes with the clients of a round"
    if more := sorted(set(half.state_type._fields) - sent - set(half.velocities)):
        return f"its server keeps {more[0]!r}, which must match what clients keep"
    if row.client.refiner is not None:
        return "its server trains after each round"
    return None


# runs of an earlier version did not have these settings
WAITING = {field.name: field.default for field in fields(Aggregation)}
