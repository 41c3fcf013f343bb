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
or are BEYOND times their limit, but never a majority (`suspects.py`). Under masks clients limit
themselves (`unseen.py`).

robust=median, trimmed and krum keep the updates of every round. They look at all of them: each
coordinate's median, each coordinate within the middle clients', or only the clients that are near
each other. The limits above hold as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..files.checkpoint import Checkpoint
from ..tree import Tensors, map_tree, take, upload
from .gate import Gate, Sketches
from .measured import measure
from .medians import FEW, joined, limits_of
from .order import ordered
from .parts import LEVEL, TINY, Limited, Part, limited, parts_of
from .suspects import BEYOND, EXACT, FAR, OPPOSED, TURNED, Suspects, Verdict, settled
from .unseen import Unseen

ROUNDS = 3  # rounds whose clients make a median
ROBUST = "robust"  # the key of the limits in a checkpoint
GATE = "gate"
HOLDING = ("median", "trimmed", "krum")
LEAPS = ("model", "slope", "factor", "rows")  # far beyond their limits the whole update is left out
MOST = 2**53  # samples of a client that no limit caps


class Measured(NamedTuple):
    """Stacked updates of some clients, and what was measured of them."""

    clients: Sequence[int]
    parts: list[Part]
    updates: Any
    sizes: Tensors  # where the updates are
    sketches: Sketches | None = None
    known: Tensors = {}  # the sizes on the CPU, once they have been read

    @property
    def telling(self) -> Tensors:
        """Return by field the sizes that are finite only if all numbers of the field are."""
        rules = ("step", "exact", "precision", "certainty")
        return {
            part.field: self.sizes[part.name]
            for part in self.parts
            if part.rule in rules and not part.only
        }


class Limiter:
    """The limits of a run: what is usual in its last rounds. `refuses`: an update can be refused,
    and its client then goes back to the state before it.
    """

    def __init__(
        self, half: ServerHalf, how: str, masked: bool = False, refuses: bool = True
    ) -> None:
        self.half, self.how, self.refuses = half, how, refuses
        active = how != "off" and half.comparable and not half.shares_nothing
        self.on = active and not masked  # whether updates are limited here
        self.unseen = Unseen(half) if active and masked else None
        self.past: dict[str, list[Tensor]] = {}  # by name: the sizes of each of the last rounds
        self.now: dict[str, list[Tensor]] = {}  # by name: those of this round
        self.factors: dict[str, float] = {}  # by name: how far above the median a limit is
        self.limits: Tensors = {}
        self.gate = Gate(half.adds_up) if how == GATE else None
        self.suspects = Suspects()  # of this round
        self.left: set[int] = set()  # clients that are left out of this round, once it is settled
        self.refused: set[int] = set()  # those of them whose reply counts as invalid
        self.most = MOST  # samples for which a client may count in this round
        self.known: set[tuple[int | None, str]] = set()  # (client, kind) already reported
        self.open = False  # whether the last round has still to be closed

    @property
    def holds(self) -> bool:
        """Return whether this round's updates must wait for each other."""
        self.catch_up()
        return self.on and (self.by_itself or self.how in HOLDING)

    @property
    def by_itself(self) -> bool:
        """Return whether a round is limited by its own median: the first one, and where changes
        shrink from round to round by far more than they differ (PVI: a factor of 10 to 100).
        """
        return not self.past or "factor" in self.half.update_fields.values()

    @property
    def mutes(self) -> bool:
        """Return whether updates cannot be dropped: server and client count the changes of a factor
        alike, and all would start anew.
        """
        return any(kind in ("exact", "factor") for kind in self.half.update_fields.values())

    def see(
        self, state: Any, clients: Sequence[int], updates: Any, claims: Mapping[str, Tensor]
    ) -> Measured:
        """Note the sizes and directions of stacked updates, and return what was measured."""
        self.catch_up()
        return self.note(self.look(state, clients, updates, claims))

    def look(
        self, state: Any, clients: Sequence[int], updates: Any, claims: Mapping[str, Tensor]
    ) -> Measured:
        """Return what is measured of stacked updates, without waiting for a GPU."""
        parts = parts_of(self.half, state, updates)
        sizes, sketches = measure(parts, self.gate)
        sizes |= {"num_examples": updates.num_examples.double(), **claims}
        return Measured(clients, parts, updates, sizes, sketches)

    def note(self, seen: Measured) -> Measured:
        """Note what was measured, and return it with the sizes on the CPU."""
        clients = seen.clients
        if not seen.known:
            values = torch.stack([*seen.sizes.values()]).detach().cpu()
            seen = seen._replace(known=dict(zip(seen.sizes, values.unbind(), strict=True)))
        self.factors |= {part.name: part.factor for part in seen.parts}
        for name, value in seen.known.items():
            self.now.setdefault(name, []).append(value)
        self.suspects.clients.update(clients)
        if self.gate is not None:
            if seen.sketches is not None:
                self.gate.note(clients, seen.sketches)
            self.suspects.of[OPPOSED] |= self.opposed(clients)
            self.suspects.of[TURNED] |= {one for one in clients if one in self.gate.turned}
        return seen

    def opposed(self, clients: Sequence[int]) -> frozenset[int]:
        """Return those of some clients that the rounds before leave out of this one."""
        return frozenset(self.gate.out.keys() & set(clients) if self.gate is not None else ())

    def limit(self, seen: Measured) -> Limited:
        """Return stacked updates within the limits, but for claims. Note who is far beyond them."""
        self.suspect(seen)
        done = self.cut(seen)
        self.suspects.cuts.append((seen.clients, done.factors))
        return done

    def suspect(self, seen: Measured) -> None:
        """Note who is far beyond the limits."""
        exact = [part for part in seen.parts if part.rule == "exact"]
        far = leaps(seen, exact, self.limits)
        self.suspects.of[EXACT] |= far if self.refuses else set()
        if self.gate is not None:
            far |= leaps(seen, [part for part in seen.parts if part.kind in LEAPS], self.limits)
        self.suspects.of[FAR] |= far

    def cut(self, seen: Measured, blindly: bool = False) -> Limited:
        """Return stacked updates within the limits, but for claims, and all factors. `blindly`:
        without waiting for a GPU.
        """
        known = (seen.parts, seen.updates, seen.sizes, self.limits, not self.past)
        done = limited(*known, blindly=blindly)
        kept = {part.name: seen.sizes[part.name] for part in seen.parts if part.rule == "exact"}
        return Limited(done.updates, {**done.factors, **self.within(kept)})

    def muted(self, seen: Measured) -> Any:
        """Return stacked updates of clients that are left out, but cannot be dropped: they change
        nothing and count for one sample.
        """
        zero, one = torch.tensor([0.0, 1.0], dtype=torch.float64)
        none = {part.name: zero for part in seen.parts if part.rule == "step"}
        limits = {**self.limits, **none, "num_examples": one}
        return limited(seen.parts, seen.updates, seen.sizes, limits, not self.past).updates

    def why(self, client: int) -> frozenset[str]:
        """Return for what a client of this round may be left out."""
        return self.suspects.why(client)

    def kept_anyway(self, why: frozenset[str]) -> bool:
        """Return whether a client that is left out for `why` is muted, not dropped."""
        return self.mutes and EXACT not in why

    def settle(self) -> None:
        """Decide who is left out of this round, now that all of its clients have replied."""
        self.suspects.settle()
        self.left = self.suspects.left
        self.refused = self.left & self.suspects.of[EXACT]
        cap = self.limits.get("num_examples")
        self.most = MOST if cap is None or cap.isinf() else max(1, int(cap))

    def counted(self, client: int, number: int) -> int:
        """Return for how many samples a client counted in the last round."""
        return 1 if client in self.left else min(number, self.most)

    def lines(self) -> list[tuple[int | None, str]]:
        """Return what is to be said of a settled round: each client and kind once a run, and each
        reply that is refused.
        """
        found = self.suspects.lines()
        for client in sorted(self.left):
            why = self.gate.why(client) if self.gate is not None else None
            if why is not None:
                found[client, "out"] = why
        new = {
            key: text
            for key, text in found.items()
            if key not in self.known or key[0] in self.refused
        }
        self.known |= new.keys()
        return [(client, text) for (client, _), text in new.items()]

    def within(self, sizes: Mapping[str, Tensor]) -> Tensors:
        """Return by name the factors by which sizes exceed their limits, at most 1."""
        names = [name for name in sizes if name in self.limits]
        if not names:
            return {}
        # all at once: a GPU takes as long for one name as for twenty
        size = torch.stack([sizes[name] for name in names])
        most = upload(torch.stack([self.limits[name] for name in names]), size.device)[:, None]
        factors = torch.where(size > most, most / size.clamp(min=TINY), 1.0)
        return dict(zip(names, factors.unbind(), strict=True))

    def claimed(self, clients: Sequence[int], sizes: Mapping[str, Tensor]) -> Tensors:
        """Return the factors of claims, by name."""
        found = self.within(sizes)
        self.suspects.cuts.append((clients, found))
        return found

    def alone(self, state: Any, client: int, update: Any) -> Verdict:
        """Return one update within the limits of the rounds before, and for what its client may be
        left out.
        """
        return self.short(state, client, update, self.sight(state, client, update))

    def sight(self, state: Any, client: int, update: Any) -> Measured:
        """Note the sizes of one update, and return them."""
        claims = {
            name: torch.tensor([size], dtype=torch.float64)
            for name, size in self.half.claims(state, update).items()
        }
        return self.see(state, [client], stacked(update), claims)

    def short(self, state: Any, client: int, update: Any, seen: Measured) -> Verdict:
        """Return one update within the limits."""
        new = take(self.limit(seen).updates, 0)
        names = self.half.claims(state, update)
        claims = self.claimed([client], {name: seen.sizes[name] for name in names})
        least = {name: float(one) for name, one in claims.items() if float(one) < 1}
        if least:
            new = self.half.reduced(state, new, least)
        why = self.why(client)
        left = take(self.muted(seen), 0) if why and self.kept_anyway(why) else None
        return Verdict(new, left, why)

    def together(self, state: Any, updates: Mapping[int, Any]) -> dict[int, Any]:
        """Return the updates of a round that waited for each other, within their limits, without
        those that are left out; with robust=krum the farthest ones are. The round is settled.
        """
        seen = {client: self.sight(state, client, one) for client, one in sorted(updates.items())}
        self.renew()
        verdicts = {c: self.short(state, c, updates[c], own) for c, own in seen.items()}
        self.settle()
        found = settled(verdicts, self.suspects)
        if self.how in HOLDING and len(found) > 2:
            near = ordered(self.how, self.half, state, found)
            self.suspects.farthest = found.keys() - near.keys()
            gone = self.suspects.farthest if self.mutes else set()
            found = near | {client: take(self.muted(seen[client]), 0) for client in gone}
        return found

    def renew(self) -> None:
        """Take the limits from this round's updates, if it is limited by its own."""
        if self.by_itself:
            self.limits = limits_of(self.now, self.factors)

    def close(self, late: bool = False) -> None:
        """End a round: what was seen in it counts for the next ones. With `late` this waits for
        `catch_up`, so that it can be done while the clients of the next round train.
        """
        self.open = late
        if late:
            return
        if not self.on or not self.now:
            return
        if sum(map(len, self.now["num_examples"])) >= FEW:
            for name in {*self.past, *self.now}:
                rounds = [*self.past.get(name, [])]
                if name in self.now:
                    rounds.append(joined(self.now[name]))
                self.past[name] = rounds[-ROUNDS:]
        self.now = {}
        self.limits = limits_of(self.past, self.factors)
        if self.gate is not None:
            self.gate.close(self.left)
        self.suspects = Suspects()

    def catch_up(self) -> None:
        """Close the last round, if that has waited."""
        if self.open:
            self.close()

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
        self.catch_up()
        self.now, self.suspects = {}, Suspects()
        if self.gate is not None:
            self.gate.undo()

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types; {} before the first round."""
        self.catch_up()
        if self.unseen is not None:
            return {ROBUST: {"moved": self.unseen.past}} if self.unseen.past else {}
        if not self.past:
            return {}
        sizes = {name: [value.tolist() for value in past] for name, past in self.past.items()}
        agreed = self.gate.memory() if self.gate is not None else {}
        sizes = dict(sorted(sizes.items()))
        known = sorted([one if one is not None else -1, kind] for one, kind in self.known)
        return {
            ROBUST: {"sizes": sizes, "factors": self.factors, "agreed": agreed, "reported": known}
        }

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
        known = memory.get("reported", [])
        self.known = {(None if client < 0 else client, kind) for client, kind in known}
        self.limits = limits_of(self.past, self.factors)
        if self.gate is not None:
            self.gate.remember(memory.get("agreed", {}))


def leaps(seen: Measured, parts: Sequence[Part], limits: Tensors) -> set[int]:
    """Return the clients that go BEYOND times their limit in one of these parts. A client with more
    samples than most trains for longer, and may go farther in the same proportion.
    """
    sizes, names = seen.known, [part.name for part in parts if part.name in limits]
    if not names:
        return set()
    number, count = sizes["num_examples"], limits["num_examples"]
    longer = (number * LEVEL / count).clamp(min=1.0)
    times = torch.stack(
        [sizes[name] / limits[name].clamp(min=TINY) / longer for name in names]
    ).amax(0)
    return {one for one, far in zip(seen.clients, times.tolist(), strict=True) if far > BEYOND}


def changed(resume: Checkpoint, now: str) -> list[str]:
    """Return a line on a resumed run whose `robust` was another one before."""
    was, first = resume.config.get("robust", "off"), resume.round + 1
    return [] if was == now else [f"from round {first} on robust is {now}; before, it was {was}"]


def stacked(update: Any) -> Any:
    """Return one update as a stack of one."""
    return map_tree(lambda leaf: leaf[None], update)
