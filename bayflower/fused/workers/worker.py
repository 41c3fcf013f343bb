"""One worker: blocks of clients with their data and states, trained and tested as the fused engine
does. It knows nothing of Ray; `crew.py` makes an actor of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...config import Run
from ...contract import Purpose
from ...data import DataSettings
from ...errors import BayflowerError
from ...rounds.halves import Halves
from ...rounds.robust import Limiter
from ...tree import Shapes, flatten, to, unflatten
from .. import asked, choice, traffic
from ..calibrate import Calibration
from ..engine import Fused
from ..spread import Clients
from ..totals import Totals
from . import cargo
from .blocks import Block

Key = tuple[str, int]  # kind of clients ("train" or "new") and number of a block
Delta = tuple[list[int], dict[str, Any]]  # clients and their stacked states, by name


class Order(NamedTuple):
    """What workers need to know of a round. Without `limiter` single updates are asked for."""

    round: int
    name: str  # of the run
    alone: str | None  # why clients are trained one by one
    tests: Shapes = ()
    secure: tuple[int, int, int] | None = None
    limiter: Limiter | None = None


class Report(NamedTuple):
    """What a worker says of a round."""

    losses: dict[int, float]
    up: int
    down: int
    stacked: int
    seconds: dict[int, float]  # by block
    alone: str | None
    seen: dict[int, cargo.Seen]  # by block
    lost: dict[int, str]  # by client: why its reply is not used


class Resident:
    """A block on this worker, and the states that its clients had before the last round."""

    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.before: tuple[int, list[int], Any] | None = None

    def undo(self, round: int) -> None:
        """Go back to the states before `round`, if the block has trained in it."""
        if self.before is not None and self.before[0] == round:
            _, clients, states = self.before
            self.fused.bank.put(clients, states, round)
            self.before = None


class Worker:
    """Some blocks of a run's clients."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Resident] = {}
        self.held: dict[Key, Any] = {}  # calibrations that are under way
        self.signs: dict[Any, Any] = {}

    def process(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def look(self, folders: Sequence[str], variables: Mapping[str, str]) -> None:
        """Search these folders for modules too, and set variables of the environment: the next
        call may bring objects whose modules are there.
        """
        sys.path += [folder for folder in folders if folder not in sys.path]
        os.environ.update(variables)

    def begin(self, halves: Halves, run: Run) -> None:
        """Begin a run, without any clients yet."""
        self.blocks, self.held = {}, {}
        self.halves, self.run, self.device = halves, run, run.settings.torch_device()
        torch.backends.cuda.matmul.allow_tf32 = run.settings.tf32
        torch.backends.cudnn.allow_tf32 = run.settings.tf32
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # sums are split alike on every worker

    # -- blocks ------------------------------------------------------------------------------------
    def adopt(self, key: Key, block: Block, *states: dict[int, Delta]) -> None:
        """Take a block, with the states of its clients, the newest last."""
        fused = Fused(self.halves, block, self.run)
        for part in states:
            clients, flat = part[key[1]]
            known: Any = unflatten(self.halves.client.state_type, cargo.thawed(flat))
            fused.bank.put(clients, to(known, self.device), 0)
        self.blocks[key] = Resident(fused)

    def drop(self, key: Key) -> None:
        """Free a block."""
        self.held.pop(key, None)
        resident = self.blocks.pop(key, None)
        if resident is not None:
            resident.fused.close()

    def states(self, kind: str, blocks: Sequence[int]) -> dict[int, Delta]:
        """Return the states of all clients of some blocks."""
        these = {number: self.blocks[kind, number].fused for number in blocks}
        return {number: copies(one, list(one.stack.clients)) for number, one in these.items()}

    def copied(self, kind: str, blocks: Sequence[int]) -> tuple[int, dict[int, Delta]]:
        """Return a number that says that all went well, and the states of some blocks."""
        return len(blocks), self.states(kind, blocks)

    # -- a round -----------------------------------------------------------------------------------
    def decide(self, key: Key, clients: list[int], state: Any, round: int) -> str | None:
        """Return why clients should be trained one by one, None if not; that of one block counts
        for all.
        """
        fused = self.blocks[key].fused
        if not fused.undecided:
            return fused.one_by_one_because
        sent = self._sender(self._there(state))
        chosen = fused.chunks(clients, sent)[0]
        states = fused.bank.take(chosen)
        return choice.why_one_by_one(fused, states, sent(chosen), chosen, round)

    def train(
        self, order: Order, work: Mapping[int, list[int]], state: Any
    ) -> tuple[Report, Any, dict[int, Delta]]:
        """Train the clients of some blocks. Return a report, the sum of their statistics (or by
        block their chunks and updates), and their new states.
        """
        there = self._there(state)
        sent = self._sender(there)
        count = traffic.Count(self.run, order.name, order.round, {})
        count.tests, count.secure = order.tests, order.secure
        report = Report({}, 0, 0, 0, {}, order.alone, {}, {})
        singles: dict[int, list[tuple[list[int], Any]]] = {}
        sums = Totals(self.halves, False, Limiter(self.halves.server, "off"))
        after, alone, stacked = {}, order.alone, 0
        for number, clients in work.items():
            begun = time.perf_counter()
            resident = self.blocks["train", number]
            resident.undo(order.round)
            fused = told(resident.fused, order.alone)
            totals = self._totals(order, sums)
            resident.before = (order.round, clients, fused.bank.take(clients))
            for chunk in fused.chunks(clients, sent):
                message = sent(chunk)
                got = fused.train(chunk, message, order.round).valid(self.halves, there)
                fused.keep(got, order.round)
                report.losses.update(zip(got.clients, got.losses.tolist(), strict=True))
                report.lost.update(got.lost)
                sizes = {client: fused.stack.size(client) for client in chunk}
                count.add(chunk, self.halves, message, got.clients, got.updates, sizes)
                stacked = max(stacked, 0 if fused.one_by_one_because else len(chunk))
                if not got.clients:
                    continue
                if totals is None:
                    one = (got.clients, cargo.frozen(got.updates))
                    singles.setdefault(number, []).append(one)
                else:
                    totals.add(there, got.clients, got.updates)
            if totals is not None:
                self._fold(totals)
                report.seen[number] = cargo.shipped(cargo.seen_by(totals.limiter))
            alone = alone or fused.one_by_one_because
            after[number] = copies(fused, clients)
            report.seconds[number] = time.perf_counter() - begun
        count.settle()
        done = report._replace(up=count.up, down=count.down, stacked=stacked, alone=alone)
        return done, singles or cargo.sums_of(sums), after

    def _totals(self, order: Order, sums: Totals) -> Totals | None:
        """Return what adds up the clients of one block, to the sums of this worker."""
        if order.limiter is None:
            return None
        limiter = cargo.with_half(order.limiter, self.halves.server, self.signs)
        totals = Totals(self.halves, not order.alone, limiter)
        totals.exact, totals.suspects = sums.exact, sums.suspects
        return totals

    def _fold(self, totals: Totals) -> None:
        """Move the sums of a block to the exact ones; raise one line if they are not finite."""
        try:
            cargo.folded(totals)
        except ValueError as error:
            raise BayflowerError(
                f"training diverged: {error}; lower lr or set clip_norm"
            ) from error

    def merge(self, first: cargo.Sums, second: cargo.Sums) -> cargo.Sums:
        """Return the sum of two workers' sums."""
        return cargo.merged(first, second)

    # -- tests -------------------------------------------------------------------------------------
    def test(
        self,
        kind: str,
        work: Mapping[int, list[int]],
        state: Any,
        round: int,
        purpose: Purpose,
        alone: str | None,
    ) -> tuple[Any, str | None]:
        """Return every view's tally of the clients of some blocks, and why they were tested one by
        one.
        """
        sent = self._sender(self._there(state))
        views: dict[str, dict[int, Any]] = {}
        for number, clients in work.items():
            fused = told(self.blocks[kind, number].fused, alone)
            for view, tallies in asked.tested(fused, clients, sent, round, purpose).items():
                views.setdefault(view, {}).update(tallies)
            alone = alone or fused.one_by_one_because
        return cargo.frozen(views), alone

    def hold(
        self,
        kind: str,
        work: Mapping[int, list[int]],
        state: Any,
        round: int,
        purpose: Purpose,
        alone: str | None,
    ) -> tuple[Any, Any]:
        """Begin to calibrate the clients of some blocks. Return by client what its held-out samples
        say, and the kinds of posteriors.
        """
        sent = self._sender(self._there(state))
        found: dict[int, Any] = {}
        kinds: Any = None
        settings: DataSettings = self.run.data
        for number, clients in work.items():
            fused = told(self.blocks[kind, number].fused, alone)
            made: Any
            if self.halves.model.task.classes:
                chunks = fused.chunks(clients, sent)
                made = Calibration(fused, chunks, sent, round, purpose, settings)
                made.hold()
                kinds = made.uncertain.kinds
            else:
                made = Clients(fused, clients, sent, round, purpose)
                kinds = made.spread.kinds
            self.held[kind, number] = made
            found.update(made.own)
        return cargo.frozen(found), kinds

    def score(self, kind: str, blocks: Sequence[int], total: Any) -> Any:
        """Return by client the sums with its calibrated scores, given everyone's."""
        there, found = cargo.thawed(total), {}
        for number in blocks:
            made = self.held[kind, number]
            made.score(there)
            found.update(made.own)
        return cargo.frozen(found)

    def judge(self, kind: str, blocks: Sequence[int], total: Any) -> Any:
        """Return every client with what it uses and its tallies."""
        there, found = cargo.thawed(total), {}
        for number in blocks:
            made = self.held.pop((kind, number))
            numbers = isinstance(made, Clients)
            found.update(made.judged(there, self.run.data) if numbers else made.judge(there))
        return cargo.frozen(found)

    # -- inside ------------------------------------------------------------------------------------
    def _there(self, state: Any) -> Any:
        """Return the server's state on this worker's device."""
        return to(cargo.thawed(state), self.device)

    def _sender(self, state: Any) -> Callable[[list[int]], Any]:
        """Return what gives the broadcast to some clients: one for all, or a stack."""
        return partial(asked.broadcast_to, self.halves.server, state)


def told(fused: Fused, alone: str | None) -> Fused:
    """Return the engine of a block, which does as all others."""
    fused.undecided, fused.one_by_one_because = False, alone or fused.one_by_one_because
    return fused


def copies(fused: Fused, clients: list[int]) -> Delta:
    """Return the states of some clients as arrays."""
    return clients, cargo.frozen(flatten(fused.bank.take(clients)))
