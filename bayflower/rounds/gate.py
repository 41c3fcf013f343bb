"""Clients whose changes oppose those of the others, and clients that turn against their own past.

A change with its sign turned round has the size of an honest one, so no limit on sizes sees it. Its
direction tells it: the others pull the model back, and the cosine between its change and the sum of
theirs is far below zero. Honest clients with rare data are sometimes below zero, too. So a client
is left out only if the mean of its last rounds is far below zero and far below that of most
clients. After more rounds less is enough, if most clients are near each other.

    u_k     the client's change, of length 1
    a_k     mean over the last LAST rounds of cos(u_k, Σ_{j≠k} u_j), over the clients that count
    m, s    median of the a_k, and median of |a_k − m|
    suspect if    a_k < EARLY and m − a_k > AWAY                          after two rounds
    or if         a_k < AGAINST and m − a_k > APART                       after LEAST rounds
    or if         a_k < BELOW and m − a_k > max(NEAR, TIMES s)            after LATER rounds
    counts again if a_k > min(AGAIN, m − BACK)

A suspect is left out only if it stands apart. In a model of few numbers, honest clients with unlike
data oppose each other (radon: four numbers, counties above and below the mean), and their a_k have
every value from −0.7 to 0.7. A client stands apart

    below a gap    it is one of the lowest a_k, at most (K − 1) // 3 of them, and the gap to the
                   next client is above GAP and above WIDER times every gap between those above
    or far down    m − a_k > TAIL (m − q), with q the lower quartile of the a_k

and goes on doing so below a gap of STILL, or with TAIL_STILL in place of TAIL.

Several clients that oppose the others together lower the median and widen s. So two or more of the
lowest a_k are also looked at as a group: after LEAST rounds they are left out if all of them are
below UNDER and below a gap.

A client pulls the model towards its own optimum, so that its changes resemble those that it sent
before. One that suddenly sends the opposite is left out of that round, before anything is added:

    p_k   its changes so far, p ← (1 − MEMORY) p + MEMORY u
    b_k   cos(u_k, p_k)
    left out if b_k < TURNED, and the mean of the last LAST b_k before is above STEADY

If it goes on, the new direction becomes its past, and the rule above judges it.

Where a client adds what it sent to what it sends later (`ServerHalf.adds_up`; FedDC's drift), a
change c is its move of this round and the sum of all its moves so far. These sums come to oppose
each other, honest or not, so the moves are compared in their place:

    v_k = (c_k − h_k) / 2     the move of this round
    h_k ← c_k − v_k           the sum of its moves, 0 at the start

One that is left out goes on adding, and costs such a method more than elsewhere. So of the rules
above only the first two hold, with m − a_k > CARRIED, and it counts again if a_k > 0.

The server does not keep changes. It keeps a sketch of each, SIZE numbers: entry i is added to place
i mod SIZE with a random sign, so that products of sketches are those of changes but for an error of
1/√SIZE. One round's sketches are all that a round needs; of a client's past, OWN bytes are kept.
With more than KEPT clients, those that took part longest ago are forgotten, unless they are left
out at that time: a run with a million clients would not fit into memory.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .averages import Table
from .parts import TINY, Part

Vector = np.ndarray[Any, Any]
SIZE = 1024
OWN = 256
KEPT = 50_000
LAST = 8  # rounds of a client that count
LEAST = 3  # rounds of a client that say something
MANY = 5  # fewer clients than this say nothing of what most do
CROWD = 8  # of fewer clients one alone may oppose all others, honestly
EARLY, AWAY = -0.33, 0.45
AGAINST, APART = -0.3, 0.4
LATER, BELOW, NEAR, TIMES = 5, -0.15, 0.3, 5.0
AGAIN, BACK = -0.1, 0.25
UNDER, GAP, WIDER = -0.12, 0.2, 1.5
STILL = 0.15
TAIL, TAIL_STILL = 4.0, 3.0
CARRIED = 0.5
HUGE = 1e30  # of larger numbers no sum is kept
MEMORY = 0.3
TURNED = -0.15
STEADY = 0.2
BLOCK = 256  # rows that are worked on at once
CANCELLED = 1e-6  # share of a squared sum below which a difference of squares has few digits left
NOTHING = 1e-24  # times the number of rows: the square of what rounding leaves of their sum
SMALLEST, LARGEST = 1e-56, 1e200  # squared lengths of rows that need no scaling


class Sketches(NamedTuple):
    """Sketches of the changes of some clients, and whether they are changes of models."""

    rows: Tensor
    models: bool


class Gate:
    """How far the clients of a run agree, and which of them are left out."""

    def __init__(self, adds_up: bool = False) -> None:
        self.adds_up = adds_up  # then moves are compared, not changes
        self.past: dict[int, list[float]] = {}  # by client: the cosines of its last rounds
        self.table = Table()  # of these cosines
        # by client: the sketch of this round's change, of length 1 unless moves are compared
        self.now: dict[int, Vector] = {}
        self.drift: dict[int, Vector] = {}  # if adds_up, by client: the sketch of its moves' sum
        self.out: dict[int, float] = {}  # by client that is left out: its mean cosine
        self.middle = 0.0  # median of the clients' mean cosines
        self.own: dict[int, Vector] = {}  # by client: its changes so far, int8; last seen last
        self.steady: dict[int, list[float]] = {}  # by client: cosines with its own past
        self.itself: dict[int, float] = {}  # by client: the one of this round
        self.turned: dict[int, float] = {}  # by client of this round that turned: its cosine
        self.signs: dict[tuple[Any, ...], Tensor] = {}  # by number of entries, type and place

    def see(
        self, clients: Sequence[int], parts: Sequence[Part], rows: Mapping[str, Tensor]
    ) -> None:
        """Note the directions of stacked changes, and who turned against its own past; `rows` are
        the changes of parts by name, one row a client.
        """
        wanted, models = self.wanted(parts)
        found = added([self.sketch(rows[name]) for name in wanted], models)
        if found is not None:
            self.note(clients, found)

    def wanted(self, parts: Sequence[Part]) -> tuple[list[str], bool]:
        """Return the names of the parts whose changes are compared, and whether they are models."""
        chosen = [part for part in parts if part.kind == "model" and not part.name.endswith(")")]
        chosen = chosen or [part for part in parts if part.rule == "rows"]
        models = bool(chosen)
        chosen = chosen or [part for part in parts if part.rule == "step"]
        return [part.name for part in chosen], models

    def note(self, clients: Sequence[int], sketches: Sketches) -> None:
        """Note the directions of changes, and who turned against its own past."""
        found = sketches.rows.cpu().double().numpy()
        whole = unit(found)
        now = np.clip(np.nan_to_num(found), -HUGE, HUGE) if self.adds_up else whole
        self.now.update(zip(clients, now, strict=True))
        known = [
            place for place, client in enumerate(clients) if sketches.models and client in self.own
        ]
        if not known:
            return
        past = unit(np.stack([self.own[clients[place]] for place in known]), fresh=True)
        mine = short(whole if len(known) == len(clients) else whole[known])
        for place, agreed in zip(known, along(past, mine).tolist(), strict=True):
            client = clients[place]
            self.itself[client] = agreed
            before = self.steady.get(client, [])
            if agreed < TURNED and len(before) >= LEAST and fmean(before) > STEADY:
                self.turned[client] = agreed

    def moves(self, clients: Sequence[int], changes: Vector) -> Vector:
        """Return the sketches of this round's moves, of length 1, and add them to their sums."""
        before = np.stack([self.drift.get(client, np.zeros(SIZE)) for client in clients])
        found = (changes - before) / 2
        self.drift.update(zip(clients, (changes - found).astype(np.float32), strict=True))
        return unit(found)

    def sketch(self, rows: Tensor) -> Tensor:
        """Return SIZE numbers of each client's change."""
        rows = rows * self.sign(rows.shape[1], rows.dtype, rows.device)
        times = rows.shape[1] // SIZE
        found = rows[:, : times * SIZE].unflatten(1, (times, SIZE)).sum(1)
        rest = rows[:, times * SIZE :]
        found[:, : rest.shape[1]] += rest
        return found

    def sign(self, number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a sign for each of `number` columns, always the same."""
        key = (number, dtype, device)
        if key not in self.signs:
            drawn = torch.randint(2, (number,), generator=torch.Generator().manual_seed(number))
            self.signs[key] = (2 * drawn - 1).to(device, dtype)
        return self.signs[key]

    def close(self, gone: Collection[int] = ()) -> None:
        """End a round, of which the clients `gone` are left out: compare the changes, and say who
        opposes the others in the next one.
        """
        clients = sorted(self.now)  # so that the order of arrival does not matter
        seen = (
            np.stack([self.now[client] for client in clients]) if clients else np.zeros((0, SIZE))
        )
        whole = self.moves(clients, seen) if self.adds_up and clients else seen
        if len(clients) >= MANY:
            now = short(seen)
            counts = np.array([client not in gone for client in clients], float)
            agreed = with_others(whole, counts) if len(clients) >= CROWD else []
            for client, one in zip(clients, agreed, strict=bool(agreed)):
                self.past[client] = [*self.past.get(client, []), one][-LAST:]
            self.table.note(self.past, clients if agreed else ())
            for client, mine in self.itself.items():
                self.steady[client] = [*self.steady.get(client, []), mine][-LAST:]
            before = unit(
                np.stack([self.own.pop(c, one) for c, one in zip(clients, now, strict=True)]),
                fresh=True,
            )
            self.own.update(zip(clients, small(MEMORY * now + (1 - MEMORY) * before), strict=True))
        self.undo()
        self.judge()
        self.forget()

    def forget(self) -> None:
        """Forget the clients beyond KEPT that took part longest ago."""
        many = len(self.own) - KEPT
        if many <= 0:
            return
        oldest = list(islice((one for one in self.own if one not in self.out), many))
        for client in oldest:
            for known in (self.own, self.past, self.steady, self.drift):
                known.pop(client, None)  # type: ignore[attr-defined]
        self.table.drop(oldest)

    def learn(self, past: dict[int, list[float]]) -> None:
        """Take over the cosines of each client's last rounds."""
        self.past, self.table = past, Table()
        self.table.note(past, past)

    def undo(self) -> None:
        """Forget what was seen in this round."""
        self.now, self.itself, self.turned = {}, {}, {}

    def judge(self) -> None:
        """Decide who is left out."""
        if len(self.past) < CROWD:
            self.out = {}
            return
        clients, means, rounds = self.table.all()
        self.middle = middle = float(np.median(means))
        if not self.out and not (means < max(UNDER, BELOW, AGAINST, EARLY)).any():
            return  # as in most rounds: every rule asks for less
        below, spread = middle - means, float(np.median(np.abs(means - middle)))
        opposed = ((rounds >= 2) & (means < EARLY) & (below > AWAY)) | (
            (rounds >= LEAST) & (means < AGAINST) & (below > APART)
        )
        if self.adds_up:
            opposed &= below > CARRIED
        else:
            late = (rounds >= LATER) & (means < BELOW)
            opposed |= late & (below > max(NEAR, TIMES * spread))
        before = np.isin(clients, list(self.out)) if self.out else np.zeros(len(clients), bool)
        if opposed.any() or before.any():
            wide = middle - float(np.quantile(means, 0.25))
            apart = np.isin(clients, list(low_group(clients, means, 1, math.inf)))
            opposed &= apart | (below > TAIL * wide)
        if before.any():
            still = np.isin(clients, list(low_group(clients, means, 1, math.inf, STILL, 0.0)))
            still |= below > TAIL_STILL * wide
            still &= (means < AGAIN) & (below > BACK)
            opposed = np.where(before, means < 0 if self.adds_up else still, opposed)
        if not self.adds_up:
            enough = rounds >= LEAST
            group = low_group(clients[enough], means[enough])
            if group:
                opposed |= np.isin(clients, list(group))
        self.out = {one: self.table.mean(one) for one in clients[opposed].tolist()}

    def why(self, client: int) -> str | None:
        """Return a line on a client that is left out, None if it is not."""
        if client in self.turned:
            return (
                f"client {client}: its change is the opposite of those that it sent before "
                f"(cosine {self.turned[client]:.2f}); left out of this round (robust)"
            )
        if client not in self.out:
            return None
        return (
            f"client {client}: its changes oppose those of the others (mean cosine "
            f"{self.out[client]:.2f}, of most clients {self.middle:.2f}); left out of the sum "
            "until they agree (robust)"
        )

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        found = {
            "past": {str(client): values for client, values in sorted(self.past.items())},
            "steady": {str(client): values for client, values in sorted(self.steady.items())},
            "own": packed(self.own),  # last seen last
            "out": sorted(self.out),
        }
        return found | ({"drift": packed(self.drift)} if self.drift else {})

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` returned."""
        past = memory.get("past", {}).items()
        self.learn({int(client): list(values) for client, values in past})
        self.steady = {int(c): list(values) for c, values in memory.get("steady", {}).items()}
        self.own = unpacked(memory.get("own", {}), np.int8)
        self.drift = unpacked(memory.get("drift", {}), np.float32)
        self.out = dict.fromkeys(memory.get("out", []), 0.0)
        self.judge()


def added(sketches: Sequence[Tensor], models: bool) -> Sketches | None:
    """Return the sum of the sketches of some parts, None without any."""
    return Sketches(sum(sketches[1:], sketches[0]), models) if sketches else None


def low_group(
    clients: Vector,
    values: Vector,
    least: int = 2,
    under: float = UNDER,
    gap: float = GAP,
    wider: float = WIDER,
) -> set[int]:
    """Return the largest group of at least `least` clients, all below `under`, that stands apart
    below the others.
    """
    order = np.lexsort((clients, values))
    clients, values = clients[order], values[order]
    gaps = np.diff(values)
    sizes = np.arange(least, (len(clients) - 1) // 3 + 1)
    if not len(sizes):
        return set()
    above = np.maximum.accumulate(gaps[::-1])[::-1]  # the widest gap from each place on
    wide = np.maximum(gap, wider * above[sizes])
    found = sizes[(values[sizes - 1] < under) & (gaps[sizes - 1] > wide)]
    return set(clients[: found[-1]].tolist()) if len(found) else set()


def packed(vectors: Mapping[int, Vector]) -> dict[str, str]:
    """Return vectors by client as text."""
    return {str(c): base64.b64encode(one.tobytes()).decode() for c, one in vectors.items()}


def unpacked(texts: Mapping[str, str], dtype: Any) -> dict[int, Vector]:
    """Return the vectors of `packed`."""
    return {int(c): np.frombuffer(base64.b64decode(one), dtype) for c, one in texts.items()}


def with_others(rows: Vector, counts: Vector) -> list[float]:
    """Return the cosine of each row (length 1, or 0) with the sum of the others that count (1, or
    0): of c and T − c, from the products of c with T and itself. It is 0 where they cancel.
    """
    total: Vector = np.einsum("i,ij->j", counts, rows)  # a BLAS has other bits with more threads
    ahead, own = np.einsum("ij,j->i", rows, total), along(rows, rows)
    whole = along(total[None], total[None])
    length = whole - counts * (2 * ahead - own)
    found = (ahead - counts * own) / np.sqrt(np.maximum(length, TINY))
    for place in np.flatnonzero(length < CANCELLED * np.maximum(whole, 1.0)).tolist():
        row = rows[place][None]
        rest = total - counts[place] * row
        rounding = along(rest, rest) < NOTHING * len(rows)
        found[place] = 0.0 if rounding else along(row, unit(rest, fresh=True))[0]
    return found.tolist()  # type: ignore[no-any-return]


def along(rows: Vector, others: Vector) -> Vector:
    """Return the product of each row with its other."""
    found: Vector = np.einsum("ij,ij->i", rows, others)
    return found


def unit(rows: Vector, fresh: bool = False) -> Vector:
    """Return rows of length 1; numbers that are none count as 0. `fresh`: may be overwritten."""
    found = np.asarray(rows, float) if fresh else np.array(rows, float)
    for begin in range(0, len(found), BLOCK):  # small enough for a processor's cache
        part = found[begin : begin + BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            squares = along(part, part)
        if not ((squares > SMALLEST) & (squares < LARGEST)).all():
            np.nan_to_num(part, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            part /= np.maximum(largest(part), TINY)  # so that no square is inf
            squares = along(part, part)
        part /= np.maximum(np.sqrt(squares), TINY)[:, None]
    return found


def largest(rows: Vector) -> Vector:
    """Return the largest size of a number in each row, as a column."""
    high, low = rows.max(-1, keepdims=True), rows.min(-1, keepdims=True)
    found: Vector = np.maximum(high, -low)
    return found


def short(sketches: Vector) -> Vector:
    """Return OWN numbers of each sketch, of length 1: sketches of the same changes."""
    return unit(sketches.reshape(len(sketches), -1, OWN).sum(1), fresh=True)


def small(rows: Vector) -> Vector:
    """Return rows in one byte a number; their lengths are lost."""
    return np.round(rows * 127 / np.maximum(largest(rows), TINY)).astype(np.int8)
