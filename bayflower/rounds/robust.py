"""Robust aggregation for every method: what one client can do to a sum is bounded by what the
others do.

A method adds up statistics of updates. Each update is limited before it is added, so a method needs
no rule of its own, and sums stay sums (streaming, any order of replies). `parts.py` says what is
limited of a field; the claimed number of samples and what an update claims by name (pFedVMP: the
precision of a class) are limited as well.

A limit is the median over clients of the last rounds times a factor. So the server knows it before
a round begins, and an update is limited when it arrives. Only the first round keeps its updates
until all are there. A minority of clients cannot move a median far. An update within its limits is
used bit for bit as it came.

robust=gate also leaves clients out whose changes oppose the others' or their own past (`gate.py`),
or are FAR times beyond their limit. Under masks clients limit themselves (`unseen.py`).

robust=median, trimmed and krum keep the updates of every round. They look at all of them: each
coordinate's median, each coordinate within the middle clients', or only the clients that are near
each other. The limits above hold as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..errors import WireError
from ..tree import Tensors, map_tree, take
from .gate import MANY, Gate
from .order import ordered
from .parts import LEVEL, TINY, Limited, Part, flat, limited, parts_of, size_of, usual
from .unseen import Unseen

ROUNDS = 3  # rounds whose clients make a median
FEW = 4  # a round with fewer clients says nothing of what is usual
FAR = 10.0  # beyond this multiple of its limit a client is reported
FAR_CLAIM = 1e5  # so far beyond for claims: those of honest clients differ by a thousand times
ROBUST = "robust"  # the key of the limits in a checkpoint
GATE = "gate"
HOLDING = ("median", "trimmed", "krum")
LEAPS = ("model", "slope", "factor", "rows")  # far beyond their limits the whole update is left out


class Measured(NamedTuple):
    """Stacked updates of some clients, and what was measured of them."""

    clients: Sequence[int]
    parts: list[Part]
    updates: Any
    sizes: Tensors


class Limiter:
    """The limits of a run: what is usual in its last rounds."""

    def __init__(self, half: ServerHalf, how: str, masked: bool = False) -> None:
        self.half, self.how = half, how
        active = how != "off" and half.comparable and not half.shares_nothing
        self.on = active and not masked  # whether updates are limited here
        self.unseen = Unseen(half) if active and masked else None
        self.past: dict[str, list[Tensor]] = {}  # by name: the sizes of each of the last rounds
        self.now: dict[str, list[Tensor]] = {}  # by name: those of this round
        self.factors: dict[str, float] = {}  # by name: how far above the median a limit is
        self.limits: Tensors = {}
        self.gate = Gate() if how == GATE else None
        self.far: dict[int, float] = {}  # by client of this round: how far beyond its limit it is

    @property
    def holds(self) -> bool:
        """Return whether this round's updates must wait for each other."""
        return self.on and (self.by_itself or self.how in HOLDING)

    @property
    def by_itself(self) -> bool:
        """Return whether a round is limited by its own median: the first one, and where changes
        shrink from round to round by far more than they differ (PVI: a factor of 10 to 100).
        """
        return not self.past or "factor" in self.half.update_fields.values()

    def out(self, client: int) -> bool:
        """Return whether a client is left out of this round's sum."""
        gate = self.gate
        return client in self.far or (
            gate is not None and (client in gate.out or client in gate.turned)
        )

    @property
    def mutes(self) -> bool:
        """Return whether updates cannot be dropped: server and client count the changes of a factor
        alike, and all would start anew.
        """
        return any(kind in ("exact", "factor") for kind in self.half.update_fields.values())

    def drops(self, client: int) -> bool:
        """Return whether the update of a client is dropped in this round."""
        return self.out(client) and not self.mutes

    def see(
        self, state: Any, clients: Sequence[int], updates: Any, claims: Mapping[str, Tensor]
    ) -> Measured:
        """Note the sizes and directions of stacked updates, and return what was measured."""
        parts = parts_of(self.half, state, updates)
        rows = {part.name: flat(part) for part in parts if part.rule in ("step", "exact", "rows")}
        sizes = {part.name: size_of(part, rows.get(part.name)) for part in parts}
        self.factors |= {part.name: part.factor for part in parts}
        sizes |= {"num_examples": updates.num_examples.double(), **claims}
        for name, value in sizes.items():
            self.now.setdefault(name, []).append(value.detach())
        if self.gate is not None:
            self.gate.see(clients, parts, rows)
        return Measured(clients, parts, updates, sizes)

    def limit(self, seen: Measured) -> Limited:
        """Return stacked updates within the limits, but for claims. An update that is left out, but
        cannot be dropped, changes nothing and counts for one sample.
        """
        limits = self.limits
        if self.gate is not None:
            self.far |= leaps(seen, limits) if self.many else {}
        if self.mutes and any(map(self.out, seen.clients)):
            out = torch.tensor([self.out(client) for client in seen.clients])
            steps = [part.name for part in seen.parts if part.rule == "step"]
            least = {name: 0.0 for name in steps} | {"num_examples": 1.0}
            limits = {
                name: torch.where(out.to(most.device), least[name], most) if name in least else most
                for name, most in limits.items()
            }
        return limited(seen.parts, seen.updates, seen.sizes, limits, not self.past)

    @property
    def many(self) -> bool:
        """Return whether enough clients were seen to say who is far from most."""
        name = "num_examples"
        return sum(map(len, (*self.past.get(name, []), *self.now.get(name, [])))) >= MANY

    def claimed(self, sizes: Mapping[str, Tensor]) -> Tensors:
        """Return the factors of claims, by name."""
        found = {}
        for name, size in sizes.items():
            if name in self.limits:
                most = self.limits[name].to(size.device)
                found[name] = torch.where(size > most, most / size.clamp(min=TINY), 1.0)
        return found

    def alone(self, state: Any, client: int, update: Any) -> tuple[Any, dict[str, float]]:
        """Return one update within the limits of the rounds before, None if it is left out; and how
        far it was reduced by name.
        """
        return self.short(state, client, update, self.sight(state, client, update))

    def sight(self, state: Any, client: int, update: Any) -> Measured:
        """Note the sizes of one update, and return them."""
        claims = {
            name: torch.tensor([size], dtype=torch.float64)
            for name, size in self.half.claims(state, update).items()
        }
        return self.see(state, [client], stacked(update), claims)

    def short(
        self, state: Any, client: int, update: Any, seen: Measured
    ) -> tuple[Any, dict[str, float]]:
        """Return one update within the limits or None, and how far it was reduced."""
        sizes = seen.sizes
        for field, kind in self.half.update_fields.items():
            if kind == "exact" and field in self.limits and field in sizes:
                times = float(sizes[field]) / max(float(self.limits[field]), TINY)
                if times > FAR:
                    raise WireError(f"{field} is {times:.3g} times what is usual (robust)")
        done = self.limit(seen)
        names = self.half.claims(state, update)
        claims = self.claimed({name: sizes[name] for name in names})
        factors = {name: float(one) for name, one in {**done.factors, **claims}.items()}
        if self.drops(client):
            return None, factors
        new = take(done.updates, 0)
        least = {name: factors[name] for name in claims if factors[name] < 1}
        if least:
            new = self.half.reduced(state, new, least)
        return new, factors

    def together(self, state: Any, updates: Mapping[int, Any]) -> tuple[dict[int, Any], Outliers]:
        """Return the updates of a round that waited for each other, and how far each was reduced.
        Clients that cannot be reduced, and with robust=krum the farthest ones, are left out.
        """
        seen = {client: self.sight(state, client, one) for client, one in sorted(updates.items())}
        self.renew()
        found, cuts = {}, {}
        for client, own in seen.items():
            try:
                new, cuts[client] = self.short(state, client, updates[client], own)
                if new is not None:
                    found[client] = new
            except WireError:
                cuts[client] = {}
        if self.how in HOLDING and len(found) > 2:
            found = ordered(self.how, self.half, state, found)
        return found, cuts

    def renew(self) -> None:
        """Take the limits from this round's updates, if it is limited by its own."""
        if self.by_itself:
            self.limits = limits_of(self.now, self.factors)

    def close(self) -> None:
        """End a round: what was seen in it counts for the next ones."""
        if not self.on or not self.now:
            return
        if sum(map(len, self.now["num_examples"])) >= FEW:
            for name in {*self.past, *self.now}:
                rounds = [*self.past.get(name, [])]
                if name in self.now:
                    rounds.append(joined(self.now[name]))
                self.past[name] = rounds[-ROUNDS:]
        self.now, self.far = {}, {}
        self.limits = limits_of(self.past, self.factors)
        if self.gate is not None:
            self.gate.close()

    def notes(self) -> tuple[str, ...]:
        """Return a line on each client that is left out after the last round."""
        gate = self.gate
        lines = [gate.why(client) for client in sorted(gate.out)] if gate is not None else []
        return tuple(line for line in lines if line)

    def told(self, clients: int) -> dict[str, str]:
        """Return the limits that clients keep themselves, as keys of a request's header."""
        return self.unseen.told(clients) if self.unseen is not None else {}

    def accepted(self, round: int, before: Any, after: Any, report: Callable[[str], Any]) -> Any:
        """Return the state after a round: the one before if the sum must not be used."""
        why = self.unseen.why_not(before, after) if self.unseen is not None else None
        if why:
            report(f"round {round}: {why}")
        return before if why else after

    def undo(self) -> None:
        """Forget what was seen in this round."""
        self.now = {}
        if self.gate is not None:
            self.gate.undo()
        self.far = {}

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types; {} before the first round."""
        if self.unseen is not None:
            return {ROBUST: {"moved": self.unseen.past}} if self.unseen.past else {}
        if not self.past:
            return {}
        sizes = {name: [value.tolist() for value in past] for name, past in self.past.items()}
        agreed = self.gate.memory() if self.gate is not None else {}
        sizes = dict(sorted(sizes.items()))
        return {ROBUST: {"sizes": sizes, "factors": self.factors, "agreed": agreed}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` returned."""
        memory = memory.get(ROBUST, {})
        if self.unseen is not None:
            self.unseen.past = {name: list(one) for name, one in memory.get("moved", {}).items()}
        self.past = {
            name: [torch.tensor(values, dtype=torch.float64) for values in rounds]
            for name, rounds in memory.get("sizes", {}).items()
        }
        self.factors = dict(memory.get("factors", {}))
        self.limits = limits_of(self.past, self.factors)
        if self.gate is not None:
            self.gate.remember(memory.get("agreed", {}))


Outliers = dict[int, dict[str, float]]


def leaps(seen: Measured, limits: Tensors) -> dict[int, float]:
    """Return the clients whose change is FAR times beyond its limit, and how many times. A client
    with more samples than most trains for longer, and may go farther in the same proportion.
    """
    sizes = seen.sizes
    names = [part.name for part in seen.parts if part.kind in LEAPS and part.name in limits]
    if not names:
        return {}
    number, count = sizes["num_examples"], limits["num_examples"]
    longer = (number * LEVEL / count.to(number.device)).clamp(min=1.0)
    times = torch.stack(
        [sizes[name] / limits[name].to(number.device).clamp(min=TINY) / longer for name in names]
    ).amax(0)
    return {
        client: far for client, far in zip(seen.clients, times.tolist(), strict=True) if far > FAR
    }


def limits_of(sizes: Mapping[str, Sequence[Tensor]], factors: Mapping[str, float]) -> Tensors:
    """Return the limits that the sizes of some rounds give, by name."""
    seen = {name: joined(values) for name, values in sizes.items()}
    claims = [seen[name] for name in sorted(seen) if claims_of(name)]
    return {
        name: limit_of(name, values, factors.get(name, LEVEL), claims)
        for name, values in seen.items()
    }


def limit_of(name: str, values: Tensor, factor: float, claims: Sequence[Tensor]) -> Tensor:
    """Return the limit that the sizes of some clients give; infinity where too few say something.
    A claim that few others make is compared with all claims.
    """
    if name == "log_weight":
        middle = values.median() + math.log(LEVEL)
        return middle if len(values) >= FEW else torch.full_like(middle, math.inf)
    own = enough(values, factor)
    if not claims_of(name):
        return own
    return torch.where(own.isinf(), enough(joined(claims), factor), own)


def enough(values: Tensor, factor: float) -> Tensor:
    """Return the median of the positive numbers times `factor`; infinity if they are too few."""
    middle = factor * usual(values[:, None])[0]
    return torch.where((values > 0).sum() < FEW, torch.full_like(middle, math.inf), middle)


def joined(values: Sequence[Tensor]) -> Tensor:
    """Return the numbers of some clients as one tensor, where the last of them are."""
    return torch.cat([value.to(values[-1].device) for value in values])


def claims_of(name: str) -> bool:
    """Return whether a size is a claim."""
    return name.startswith("class ")


def stacked(update: Any) -> Any:
    """Return one update as a stack of one."""
    return map_tree(lambda leaf: leaf[None], update)


def reported(client: int, factors: Mapping[str, float]) -> str | None:
    """Return a line on a client that was far beyond its limits, or None."""
    far = {
        name: 1 / one if one else math.inf
        for name, one in factors.items()
        if one < 1 / (FAR_CLAIM if claims_of(name) else FAR)
    }
    if not far:
        return None
    what = ", ".join(f"{name} by {times:.3g}" for name, times in sorted(far.items())[:4])
    return (
        f"client {client}: far beyond what is usual ({what} times its limit); cut down to the limit"
    )
