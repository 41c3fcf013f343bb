"""All clients of one kind (training or new) on the workers of a crew.

A round is tried until it succeeds. A worker that dies in it loses its blocks: others take them,
with the states from before the round, and the round is repeated by all, from the same states.

States survive in copies. Each round's new states stay in the object store of the machine that made
them, and so outlive the worker. If the machine dies too, `GoneError` goes up, and the run goes back
to its last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ...contract import Purpose
from ...data import ClientData
from ...tree import Tensors, flatten, stack, take, unflatten
from . import cargo
from .blocks import Balance, divided, placed
from .crew import Crew, LostError
from .worker import Order, Report

log = logging.getLogger("bayflower")
DEEP = 16  # rounds of copies of a block before all of its states are copied at once
T = TypeVar("T")


class Trained(NamedTuple):
    """A round: the workers' reports, and the sum of its statistics or by block its updates."""

    reports: list[Report]
    sums: cargo.Sums | None
    singles: dict[int, list[tuple[list[int], Any]]]

    def seen(self) -> list[cargo.Seen]:
        """Return what was seen of the clients, in the order of blocks."""
        found = {block: one for report in self.reports for block, one in report.seen.items()}
        return [cargo.received(found[block]) for block in sorted(found)]


class Herd:
    """Blocks of clients, the worker that has each, and copies of their states."""

    def __init__(
        self, crew: Crew, kind: str, clients: Sequence[ClientData], size: int, state_type: type
    ) -> None:
        self.crew, self.kind, self.state_type = crew, kind, state_type
        self.blocks = divided(clients, size)
        self.block_of = {data.client: n for n, block in enumerate(self.blocks) for data in block}
        # largest first, as one process has them
        self.clients = [
            data.client for data in sorted(clients, key=lambda one: (-len(one.y_train), one.client))
        ]
        self.samples = {data.client: len(data.y_train) for data in clients}
        self.home: dict[int, int] = {}
        self.copies: dict[int, list[Any]] = {number: [] for number in range(len(self.blocks))}
        self.balance = Balance([sum(len(one.y_train) for one in block) for block in self.blocks])
        self.one_by_one_because: str | None = None
        self.decided, self.moved = False, 0
        self.told: list[str] = []  # what went wrong since someone asked

    @property
    def bank(self) -> Herd:
        """Return itself: it has the states."""
        return self

    # -- where blocks are --------------------------------------------------------------------------
    def tried(self, fn: Callable[[], T]) -> T:
        """Return fn() with all blocks on live workers; repeat it if some die meanwhile."""
        while True:
            try:
                self.settle()
                return fn()
            except LostError as lost:
                self._mourn(lost)

    def _mourn(self, lost: LostError) -> None:
        """Leave dead workers out, and note what they had."""
        self.crew.bury(lost)
        for worker in lost.workers:
            self.balance.forget(worker)
            orphans = [number for number, home in self.home.items() if home == worker]
            clients = sum(len(self.blocks[number]) for number in orphans)
            self.told.append(f"a worker died; {clients} clients moved to other workers")
            log.warning("%s (%s)", self.told[-1], self.kind)

    def settle(self) -> None:
        """Give blocks without a living worker to others."""
        alive = self.crew.workers
        orphans = [n for n in range(len(self.blocks)) if self.home.get(n) not in alive]
        if not orphans:
            return
        if len(orphans) == len(self.blocks):
            chosen = placed(self.balance.samples, alive)
        else:
            kept = {n: worker for n, worker in self.home.items() if worker in alive}
            loads = self.balance.loads(kept, alive)
            chosen = {}
            for number in sorted(orphans, key=lambda n: (-self.balance.cost(n), n)):
                chosen[number] = min(alive, key=lambda one: (loads[one], one))
                loads[chosen[number]] += self.balance.cost(number)
        self.crew.get([(worker, self._adopt(n, worker)) for n, worker in chosen.items()])
        self.home.update(chosen)

    def _adopt(self, number: int, worker: int) -> Any:
        data = self.crew.put(self.blocks[number])
        return self.crew.call(worker, "adopt", (self.kind, number), data, *self.copies[number])

    def rebalance(self) -> None:
        """Move one block away from a worker that is slower than the others, if that pays."""
        alive = self.crew.workers
        if not set(self.home.values()) <= set(alive):
            return  # blocks of a dead worker come first
        found = self.balance.move(self.home, alive)
        if found is None:
            return
        number, worker = found
        before = self.home[number]
        try:
            self._copy_all([number])
            self.crew.get([(worker, self._adopt(number, worker))])
            self.home[number] = worker
            self.moved += 1
            self.crew.get([(before, self.crew.call(before, "drop", (self.kind, number)))])
        except LostError as lost:
            self._mourn(lost)
        log.info("block %d moved from worker %d to worker %d", number, before, worker)

    def shares(self, chosen: Sequence[int]) -> dict[int, dict[int, list[int]]]:
        """Return by worker and block the clients among `chosen`."""
        found: dict[int, dict[int, list[int]]] = {}
        for client in sorted(chosen):
            number = self.block_of[client]
            found.setdefault(self.home[number], {}).setdefault(number, []).append(client)
        return found

    # -- a round -----------------------------------------------------------------------------------
    def decide(self, chosen: Sequence[int], state: Any, round: int) -> None:
        """Settle whether clients are stacked: what suits the first block suits all."""
        if self.decided:
            return
        sent = self.crew.put(cargo.frozen(state))
        first = min(self.block_of[client] for client in chosen)
        clients = sorted(client for client in chosen if self.block_of[client] == first)

        def ask() -> str | None:
            worker = self.home[first]
            key = (self.kind, first)
            calls = [(worker, self.crew.call(worker, "decide", key, clients, sent, round))]
            why: str | None = self.crew.get(calls)[0]
            return why

        self.one_by_one_because, self.decided = self.tried(ask), True

    def train(self, order: Order, chosen: Sequence[int], state: Any) -> Trained:
        """Train some clients, and keep copies of their new states."""
        sent = self.crew.put(cargo.frozen(state))
        found = self.tried(lambda: self._trained(order, chosen, sent))
        if deep := [n for n, copies in self.copies.items() if len(copies) > DEEP]:
            try:
                self._copy_all(deep)
            except LostError as lost:
                self._mourn(lost)
        return found

    def _trained(self, order: Order, chosen: Sequence[int], sent: Any) -> Trained:
        order = order._replace(alone=self.one_by_one_because)
        shares, told = self.shares(chosen), self.crew.put(order)
        calls = {
            worker: self.crew.call(worker, "train", told, work, sent, returns=3)
            for worker, work in shares.items()
        }
        reports = self.crew.get([(worker, parts[0]) for worker, parts in calls.items()])
        if not order.alone and (why := [one.alone for one in reports if one.alone]):
            self.one_by_one_because = why[0]  # a stack failed: all do without, from this round on
            return self._trained(order, chosen, sent)
        sums, singles = None, {}
        made = [(worker, parts[1]) for worker, parts in calls.items()]
        if order.limiter is None:
            singles = {n: one for part in self.crew.get(made) for n, one in part.items()}
        else:
            sums = self._added(made)
        for worker, work in shares.items():
            for number in work:
                self.copies[number].append(calls[worker][2])
        self._note(reports, shares)
        return Trained(reports, sums, singles)

    def _added(self, sums: list[tuple[int, Any]]) -> cargo.Sums:
        """Return the sum of all workers' sums, added up by pairs on the workers."""
        while len(sums) > 1:
            pairs = list(zip(sums[::2], sums[1::2], strict=False))
            odd = [sums[-1]] if len(sums) % 2 else []
            sums = [
                (worker, self.crew.call(worker, "merge", mine, other))
                for (worker, mine), (_, other) in pairs
            ] + odd
        found: cargo.Sums = self.crew.get(sums)[0]
        return found

    def _note(self, reports: list[Report], shares: Mapping[int, Mapping[int, list[int]]]) -> None:
        seconds = {n: time for report in reports for n, time in report.seconds.items()}
        trained = {
            number: sum(self.samples[client] for client in clients)
            for work in shares.values()
            for number, clients in work.items()
        }
        self.balance.note(seconds, trained, self.home)

    def _copy_all(self, blocks: Sequence[int]) -> None:
        """Replace the copies of some blocks by one of all of their clients' states."""
        by_worker: dict[int, list[int]] = {}
        for number in blocks:
            by_worker.setdefault(self.home[number], []).append(number)
        for worker, some in by_worker.items():
            done, reference = self.crew.call(worker, "copied", self.kind, some, returns=2)
            self.crew.get([(worker, done)])
            self.copies.update({number: [reference] for number in some})

    # -- tests -------------------------------------------------------------------------------------
    def test(self, chosen: Sequence[int], state: Any, round: int, purpose: Purpose) -> Any:
        """Return every view's tally of some clients."""
        sent = self.crew.put(cargo.frozen(state))

        def ask() -> Any:
            found: dict[str, dict[int, Any]] = {}
            for views, why in self._asked("test", chosen, sent, round, purpose):
                if why and not self.one_by_one_because:
                    self.one_by_one_because = why
                    return ask()
                for view, tallies in cargo.thawed(views).items():
                    found.setdefault(view, {}).update(tallies)
            known = set(chosen)
            order = [client for client in self.clients if client in known]
            return {view: {one: tallies[one] for one in order} for view, tallies in found.items()}

        return self.tried(ask)

    def _asked(self, name: str, chosen: Sequence[int], *known: Any) -> list[Any]:
        """Return what each worker says of its clients among `chosen`."""
        calls = [
            (worker, self.crew.call(worker, name, self.kind, work, *known, self.one_by_one_because))
            for worker, work in self.shares(chosen).items()
        ]
        return self.crew.get(calls)

    def hold(self, state: Any, round: int, purpose: Purpose) -> tuple[dict[int, Any], Any]:
        """Return by client, largest first, what held-out samples say, and the kinds of
        posteriors.
        """
        found, kinds = {}, None
        sent = self.crew.put(cargo.frozen(state))
        for own, kinds in self._asked("hold", self.clients, sent, round, purpose):  # noqa: B007
            found.update(cargo.thawed(own))
        return {client: found[client] for client in self.clients}, kinds

    def asked_of_all(self, name: str, total: Any) -> dict[int, Any]:
        """Return by client, largest first, the next step of calibration."""
        sent, found = self.crew.put(cargo.frozen(total)), {}
        by_worker: dict[int, list[int]] = {}
        for number, worker in self.home.items():
            by_worker.setdefault(worker, []).append(number)
        calls = [
            (worker, self.crew.call(worker, name, self.kind, some, sent))
            for worker, some in by_worker.items()
        ]
        for part in self.crew.get(calls):
            found.update(cargo.thawed(part))
        return {client: found[client] for client in self.clients}

    # -- states ------------------------------------------------------------------------------------
    def load(self, known: Mapping[int, Tensors]) -> None:
        """Begin with the states of a checkpoint."""
        for number, block in enumerate(self.blocks):
            clients = [data.client for data in block if data.client in known]
            if clients:
                own: list[Any] = [unflatten(self.state_type, known[client]) for client in clients]
                states: Any = stack(own)
                part = {number: (clients, cargo.frozen(flatten(states)))}
                self.copies[number] = [self.crew.put(part)]

    def states(self) -> Iterator[tuple[int, Any]]:
        """Yield (client, state) of every client."""

        def ask() -> list[Any]:
            by_worker: dict[int, list[int]] = {}
            for number, worker in self.home.items():
                by_worker.setdefault(worker, []).append(number)
            calls = [
                (worker, self.crew.call(worker, "states", self.kind, some))
                for worker, some in by_worker.items()
            ]
            return self.crew.get(calls)

        found: dict[int, Any] = {}
        for part in self.tried(ask):
            for clients, flat in part.values():
                states: Any = unflatten(self.state_type, cargo.thawed(flat))
                found.update({one: take(states, place) for place, one in enumerate(clients)})
        for client in self.clients:
            yield client, found[client]

    def save(self, round: int) -> None:
        """Do nothing: a checkpoint contains all states."""

    def tidy(self, round: int) -> None:
        """Do nothing: a checkpoint contains all states."""

    def close(self) -> None:
        """Free the blocks."""
        calls = [
            (worker, self.crew.call(worker, "drop", (self.kind, number)))
            for number, worker in self.home.items()
            if worker in self.crew.workers
        ]
        self.home, self.copies = {}, {}
        try:
            self.crew.get(calls)
        except LostError as lost:
            self.crew.bury(lost)
