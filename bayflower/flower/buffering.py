"""Rounds that do not wait (`aggregation=buffered`): the server takes a step as soon as `buffer`
valid replies came, and the other clients train on from the model they were sent.

`fraction_train` of all clients train at a time. A client that has replied waits for the next step:
it never trains twice from one model, so a message's round names its model, and a step has one reply
of a client. After a reply to an older model another idle client is asked at once; so a full buffer
is a round, whoever is slow. A reply to an older model is counted from the present one
(`rounds/rebased.py`). If nobody trains any more, a step takes what came.

The server keeps one copy of the state for every model from which some client still trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from ..contract import ServerHalf
from ..errors import BayflowerError, ConfigError
from ..files.arrivals import Pair, Record, Step, to_replay
from ..files.checkpoint import Checkpoint
from ..files.records import RoundRecord, Views, curve_point
from ..recipes.aggregation import Aggregation
from ..rounds import rebased, schedule
from ..rounds.clock import Clock
from ..tree import Tensors, flatten, unflatten
from . import continuing, records, replies
from .collected import Arriving, Collected
from .exchange import Request
from .flow import NOWHERE, Flow, Sent, lost
from .roster import Roster
from .round import Round

KEY = "buffered"  # of what a checkpoint remembers
ALONE = "aggregation=buffered needs start() of the strategy itself; call that, without a wrapper"

NO_REPLY = "round {}, client {}: no reply before the timeout"
HOOKED = (
    "aggregation=buffered makes and reads the messages of a step itself; remove the overridden "
    "configure_train and aggregate_train"
)


class Buffering:
    """The steps of one run."""

    def __init__(
        self, settings: Aggregation, clock: Clock | None, min_replies: int, facts: dict[str, Any]
    ) -> None:
        self.settings, self.min_replies = settings, min_replies
        self.facts = {**facts, "staleness": settings.staleness, "rate": settings.buffer_rate}
        path = Path(settings.replay).expanduser()
        self.steps = to_replay(path, self.facts) if settings.replay else None
        self.flow = Flow(None if self.steps is not None else clock)
        self.size = 1  # replies of a step
        self.members: list[int] = []  # the clients that may be asked in this step
        self.at_once = 1  # how many of them train at a time
        self.seed = 0
        self.record = Record(None, {}, 0)
        self.finished: dict[int, int] = {}  # by client of this step: the round of its message
        self.stale: set[int] = set()  # those of them whose reply was too old
        self.tested: dict[int, Views] = {}  # by round: tests that came with its messages
        self.began = 0  # the round before the first of this process
        self.again: dict[int, int] = {}  # by client: the round in which it is asked once more
        self.states: Mapping[int, Tensors] = {}  # by such a round: the server's state then

    def begin(self, half: ServerHalf, state: Any, roster: Roster, last: int, folder: Any) -> None:
        """Check the method on this network, and the record of a run to be replayed."""
        rebased.check(half, state, roster.training()[0], str(self.facts["method"]))
        if self.steps is not None and (missing := self._missing(last)):
            raise ConfigError(
                f"replay: {self.settings.replay} has no step {missing}; set rounds={missing - 1}"
            )
        self.record = Record(folder, self.facts, self.began)

    def _missing(self, last: int) -> int | None:
        assert self.steps is not None
        return next((one for one in range(self.began + 1, last + 1) if one not in self.steps), None)

    # -- who is asked ------------------------------------------------------------------------------
    def choose(
        self, round: int, clients: Iterable[int], fraction: float, *, seed: int, least: int
    ) -> list[int]:
        """Return the clients that are asked before a step: idle ones, so that enough of them
        train.
        """
        known = sorted(clients)
        self.members, self.seed = known, seed
        self.at_once = schedule.number_of(len(known), fraction, least)
        self.size = self.settings.size(self.at_once)
        if self.min_replies > self.size:
            raise ConfigError(
                f"min_replies is {self.min_replies}, but a step has {self.size} replies; set "
                f"buffer={self.min_replies} or less min_replies"
            )
        if self.steps is not None:
            asked = self.steps[round].asked
            if absent := sorted(set(asked) - set(known) | set(asked) & set(self.flow.out)):
                raise BayflowerError(
                    f"replay: step {round} asks client {absent[0]}, which is not idle here; start "
                    "the clients of the recorded run"
                )
            return sorted(asked)
        return schedule.drawn(self._idle(), self._free(), seed=seed, round=round)

    def _idle(self, others: Iterable[int] = ()) -> list[int]:
        """Return the clients that do not train, but for `others`."""
        busy = {*self.flow.out, *others}
        return [client for client in self.members if client not in busy]

    def _free(self) -> int:
        """Return how many more clients may train."""
        busy = sum(client in self.flow.out for client in self.members)
        return max(self.at_once - busy, 0)

    def refill(self, now: Round) -> None:
        """Ask idle clients in the middle of a step, from the present model."""
        if self.steps is not None:
            return
        idle = self._idle({*now.request.clients, *self.finished})
        # drawn anew each time: the clients that were asked so far are another number
        more = schedule.refilled(
            idle, self._free(), seed=self.seed, round=now.number, asked=len(now.request.clients)
        )
        if more:
            everyone = sorted({*now.request.clients, *more})
            now.request = now.request._replace(clients=everyone)
            self.flow.add(now, more)

    def patience(self, grid: Grid, roster: Roster) -> float:
        """Return how long to wait for nodes that are gone: not at all while others are there."""
        nodes = set(grid.get_node_ids())
        there = any(roster.members[one].node in nodes for one in roster.training())
        return 0.0 if there else math.inf

    # -- a step ------------------------------------------------------------------------------------
    def exchange(self, asked: Round, grid: Grid, timeout: float) -> Iterable[Any]:
        """Send the messages of a step; return the replies to all messages that are out, as (client,
        reply).
        """
        self.flow.open(asked, grid, timeout)
        if self.steps is not None:
            return self.flow.recorded(self.steps[asked.number].used)
        return self.flow.live() if self.flow.clock is None else self.flow.timed()

    def collect(
        self, now: Round, incoming: Iterable[Any], keep_metrics: bool, done: list[RoundRecord]
    ) -> Collected:
        """Return the aggregate of the first valid replies, each counted from the state of `now`."""
        found, half, journal = Collected(), now.half, now.facts.journal
        arriving = Arriving(half, now.state, now.facts.limiter, False)
        before = self.flow.clock.now if self.flow.clock is not None else None
        self.finished, self.stale = {}, set()
        used: dict[int, int] = {}  # by client: the steps since it was asked
        threads = {}
        for client, reply in incoming:
            sent = self.flow.out.pop(client, None) if client is not None else None
            asked = now if sent is None else sent.asked
            asked.heard(reply, client)
            if client is not None:
                self.finished[client] = asked.number
            late = now.number - asked.number
            try:
                expected = asked.expected()
                sender = replies.sender(reply, expected)
                size = records.num_bytes(reply.content)
                accepted = replies.accept(reply, sender, expected, half, asked.state, found.losses)
                asked.follow(reply, sender)
                if 0 < self.settings.most_stale < late:
                    self.stale.add(sender)
                    journal.fault(
                        f"round {now.number}, client {sender}: its reply started from the model of "
                        f"{late} steps ago, most_stale is {self.settings.most_stale}; not used"
                    )
                    self.refill(now)
                    continue
                update, weight = accepted.update, self.settings.weight(late)
                if late or weight != 1:
                    then = half.broadcast(asked.state, sender)
                    present = half.broadcast(now.state, sender)
                    update = rebased.rebased(then, present, update, weight)
                arriving.add(found.total, sender, update)
            except Exception as error:  # an invalid reply of one client must not stop the run
                asked.fault(reply, error)
                if not lost(reply) and client is not None:
                    found.answered.add(client)
                if late:
                    self.refill(now)
                continue
            found.losses[sender] = (int(accepted.update.num_examples), accepted.loss)
            used[sender] = late
            threads[sender] = continuing.heard(reply)
            if keep_metrics:
                found.metrics[sender] = replies.metrics_of(reply)
            found.bytes_up += size
            self._test(asked, sender, accepted.tallies, done)
            del accepted, reply, update  # frees the memory before the next reply
            if self.steps is None and len(found.losses) >= self.size:
                break
            if late:
                self.refill(now)
        for client in self._silent(now):
            journal.fault(NO_REPLY.format(self.finished[client], client), client)
        if self.steps is not None and len(used) < len(self.steps[now.number].used):
            raise BayflowerError(
                f"replay: step {now.number} used a reply that is invalid here; last fault: "
                f"{journal.cause()}"
            )
        held = arriving.settle(found.total)
        now.settle(found)
        for client in found.losses:
            accept = now.facts.roster.continuity.accept
            accept(client, self.finished[client], threads[client])
        now.facts.limiter.close()
        for client, update in held.items():
            found.total.add(half.statistic(now.state, client, update))
        found.more = {"staleness": sum(used.values()) / len(used)} if used else {}
        if before is not None and self.flow.clock is not None:
            found.more["simulated_seconds"] = self.flow.clock.now - before
        return found

    def _silent(self, now: Round) -> list[int]:
        """Return the clients that are given up in this step."""
        silent, self.flow.silent = self.flow.silent, []
        for client, number in silent:
            self.finished[client] = number
        if self.steps is not None:
            for client, number in self.steps[now.number].left_out:
                self.flow.drop(client)
                self.finished[client] = number
                self.stale.add(client)
        return [client for client, _ in silent]

    def _test(self, asked: Round, client: int, tallies: Mapping[str, Any], done: Any) -> None:
        """Add the test that came with a reply to the record of the round before its message."""
        if not tallies or asked.number <= self.began:
            return
        views = self.tested.setdefault(asked.number, {})
        for view, tally in tallies.items():
            views.setdefault(view, {})[client] = tally
        done[asked.number - 2].update(curve_point(views, asked.expected().task))

    def settle(self, now: Round, found: Collected) -> list[int]:
        """Update the counts of the clients of a step, and write its line of the record; return the
        clients that are dropped from the run.
        """
        roster, left = now.facts.roster, list[int]()
        for client, number in sorted(self.finished.items()):
            if client in self.stale:
                roster.unused.add(client)
            else:
                left += roster.settle(number, [client], found.losses, found.answered)
        pairs: dict[bool, list[Pair]] = {True: [], False: []}
        for client, number in sorted(self.finished.items()):
            pairs[client in found.losses].append((client, number))
        self.record.add(Step(now.number, now.request.clients, pairs[True], pairs[False]))
        out = {sent.asked.number for sent in self.flow.out.values()}
        self.tested = {one: views for one, views in self.tested.items() if one in out}
        return left

    def end(self, roster: Roster) -> None:
        """End the run's training: replies that are still out are not used."""
        roster.unused.update(self.flow.end())
        for client, number in self.flow.silent:
            roster.journal.fault(NO_REPLY.format(number, client), client)

    # -- memory ------------------------------------------------------------------------------------
    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs, in JSON types."""
        out = {str(client): sent.asked.number for client, sent in sorted(self.flow.out.items())}
        timed = {} if self.flow.clock is None else {"clock": self.flow.clock.memory()}
        return {KEY: {"out": out, **timed}}

    def kept(self) -> dict[int, Tensors]:
        """Return the states of the models from which clients still train, by round."""
        rounds = {sent.asked.number: sent.asked for sent in self.flow.out.values()}
        return {number: flatten(asked.state) for number, asked in sorted(rounds.items())}

    def restore(self, resume: Checkpoint | None, roster: Roster) -> None:
        """Go on from a checkpoint: what was out then is asked once more."""
        if resume is None:
            return
        self.began, self.states = resume.round, resume.sent
        known = resume.roster.get(KEY, {})
        out = {int(client): int(round) for client, round in known.get("out", {}).items()}
        here = set(roster.training())
        self.again = {client: round for client, round in out.items() if client in here}
        roster.unused |= out.keys() - here
        if (clock := self.flow.clock) is not None:
            clock.remember(known.get("clock", {}))
            clock.due = {client: at for client, at in clock.due.items() if client in here}

    def wake(
        self, make: Callable[[Any, Request], Round], half: ServerHalf, usual: Request, every: int
    ) -> None:
        """Count the clients of `restore` among those that train; `usual` is the next request, and
        messages have a test `every` so many rounds.
        """
        for number in sorted(set(self.again.values())):
            clients = sorted(one for one, round in self.again.items() if round == number)
            test = schedule.test_due(number, every)
            state: Any = unflatten(half.state_type, self.states[number])
            asked = make(state, usual._replace(clients=clients, round=number, test=test))
            self.flow.out |= {client: Sent(asked, NOWHERE, 0.0) for client in clients}
        self.again, self.states = {}, {}
