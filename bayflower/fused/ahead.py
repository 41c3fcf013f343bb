"""Rounds that are added up before the host knows whether their replies are good.

A host that reads a number from a GPU waits for all that is queued there, and then the GPU waits for
the host. But whether a client diverged (`replies.py`) or has to be left out (`rounds/robust.py`)
must be read before a round can be added up. So after a round without a surprise, the next one is
added as if it had none either: all replies are good, and only clients of which the rounds before
say so are left out (those that oppose the others). Its numbers are read while the round after it
trains.

The server's half guesses as well (`maths/guesses.py`).

If there was a surprise, both rounds are taken back. The first is done again, with the host waiting
for the device, and then the second. Nothing of what was guessed is left, so the results are those
of rounds that wait. Rounds wait until one has no surprise: a hostile client costs one round of
training twice, not one in every round. Where guesses go wrong again and again, more and more rounds
wait before the next guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..maths.guesses import guessing
from ..rounds.gate import Sketches
from ..rounds.robust import Measured
from ..rounds.suspects import OPPOSED
from ..tree import Tensors
from .bank import DeviceBank
from .meter import Mark
from .replies import Replies, finite
from .totals import Totals
from .traffic import Count

EVERYWHERE = False  # also on a CPU, where nobody waits: for tests
FINE = "fine"
TRUST = 8  # right guesses one after another, after which wrong ones are forgotten


class Unread(NamedTuple):
    """A round that was added up without a look at it, and how to take it back."""

    round: int
    clients: list[int]
    out: frozenset[int]  # those of them that were left out
    state: Any  # the server's, before
    states: Any  # the clients', before
    because: str | None  # why clients train one by one, before
    traffic: Count
    names: list[tuple[str, str]]  # of the rows of `values`: what they are, and of which part
    values: Tensor  # one column a client, on its way to the CPU
    seen: Measured | None
    mark: Mark  # after which `values` are there

    def read(self) -> dict[str, Tensors]:
        """Return the rows of each kind, by part."""
        found: dict[str, Tensors] = {kind: {} for kind in (FINE, "size", "cut", "claim")}
        for (kind, name), row in zip(self.names, self.values.unbind(), strict=True):
            found[kind][name] = row
        return found


class Ahead:
    """What a run has not read yet of its last round."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.unread: Unread | None = None
        self.calm = False  # whether the last round that was read had no surprise
        self.wrong = self.right = self.rest = 0  # guesses, and rounds that wait without one
        here = EVERYWHERE or run.device.type == "cuda"
        plain = not run.run.privacy.on and run.budget is None and run.refiner is None
        self.possible = here and plain

    def may(self, chunks: list[list[int]], totals: Totals, got: Replies) -> bool:
        """Return whether this round may be added up as if it had no surprise."""
        engine = self.run.engine
        alone = len(chunks) == 1 and engine.trainer == engine.phase_of
        fast = totals.wanted and not totals.holds and not engine.one_by_one_because
        there = isinstance(engine.bank, DeviceBank) and not got.lost
        may = self.possible and self.calm and alone and fast and there and self._sure(got.clients)
        if may and self.rest:
            self.rest -= 1
            return False
        return may

    def _sure(self, clients: list[int]) -> bool:
        """Return whether those that are left out for what is known can just be dropped: they are no
        majority, and the method lets them.
        """
        limiter = self.run.limiter
        out = limiter.opposed(clients)
        return not out or (len(out) <= len(clients) // 2 and not limiter.mutes)

    def add(self, round: int, got: Replies, totals: Totals, count: Count) -> None:
        """Add a round up as if it had no surprise; nothing here waits for the device."""
        run, because = self.run, self.run.engine.one_by_one_because
        before, out = run.state, run.limiter.opposed(got.clients)
        with guessing() as guessed:
            hasty = totals.hasty(before, got.clients, got.updates, out)
            run.engine.keep(got, round)
            run.state = run.server.finalise(before, totals.fast)
        seen = hasty.seen
        fine = finite(got.updates, got.losses, seen.telling if seen is not None else {})
        for truth in guessed:
            fine = fine & truth.to(fine.device)
        rows: dict[tuple[str, str], Tensor] = {(FINE, ""): fine}
        if seen is not None:
            rows |= {("size", name): value for name, value in seen.sizes.items()}
            rows |= {("cut", name): value for name, value in hasty.cuts.items()}
            rows |= {("claim", name): value for name, value in hasty.claims.items()}
            seen = light(seen)
        values = torch.stack([row.detach().double() for row in rows.values()])
        values = values.to("cpu", non_blocking=True)
        known = (round, got.clients, out, before, got.before, because, count)
        self.unread = Unread(*known, list(rows), values, seen, run.meter.mark())

    def tried(self, train: Callable[[], Any]) -> Any:
        """Return what a round's training gives, read what is unread of the round before while the
        device is busy, and train again if that round had to be done again.
        """
        try:
            found = train()
        except Exception:  # perhaps because the round before was added up wrongly
            if self.settled():
                raise
            return train()
        return found if self.settled() else train()

    def settled(self) -> bool:
        """Read what is unread of the last round. Return whether it had no surprise; if not, that
        round has been done again.
        """
        one, self.unread = self.unread, None
        if one is None:
            return True
        run = self.run
        run.meter.reach(one.mark)
        if not self._well(one):
            run.limiter.undo()
            run.state = one.state
            run.engine.bank.put(one.clients, one.states, one.round - 1)
            run.engine.one_by_one_because = one.because
            run.pending.drop()
            self.calm = False
            self.wrong, self.right = self.wrong + 1, 0
            self.rest = 2 ** min(self.wrong, 6) - 2  # none after the first
            run.round(one.round)
            return False
        self.right += 1
        if self.right >= TRUST:
            self.wrong = 0
        return True

    def _well(self, one: Unread) -> bool:
        """Return whether nobody diverged, and just those have to be left out that were; then the
        round is closed.
        """
        run, limiter, rows = self.run, self.run.limiter, one.read()
        if not bool(rows[FINE][""].all()):
            return False
        if one.seen is not None:
            seen = limiter.note(one.seen._replace(known=rows["size"]))
            limiter.suspect(seen)
            if limiter.suspects.surprises or limiter.suspects.of[OPPOSED] != one.out:
                return False
            limiter.suspects.cuts += [(one.clients, rows["cut"]), (one.clients, rows["claim"])]
        limiter.settle()
        run.faults += [f"round {one.round}, {text}" for _, text in limiter.lines()]
        limiter.close()
        one.traffic.weights = run.weights(one.clients)
        return True


def light(seen: Measured) -> Measured:
    """Return what was measured without the updates, and sketches on their way to the CPU."""
    parts = [part._replace(leaves={}, sent={}, only={}) for part in seen.parts]
    there = seen.sketches
    if there is not None:
        there = Sketches(there.rows.to("cpu", non_blocking=True), there.models)
    return seen._replace(parts=parts, updates=None, sizes={}, sketches=there)
