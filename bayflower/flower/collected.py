"""What a round keeps of the replies to its training requests, and the way of updates into its sum:
added as they arrive, apart if their client may be left out, or held until all are there.
"""

from __future__ import annotations

from typing import Any

from flwr.app import RecordDict

from ..contract import ServerHalf
from ..errors import BayflowerError
from ..files.journal import Journal
from ..files.records import Views
from ..maths.exact import Total
from ..rounds.diverged import EMPTY_ROUNDS, stopped
from ..rounds.robust import Limiter
from ..rounds.suspects import Apart, Verdict, settled


class Collected:
    """What a round keeps of the replies to its training requests."""

    def __init__(self) -> None:
        self.total = Total()
        self.losses: dict[int, tuple[int, float]] = {}  # samples and mean loss by client
        # metrics of the replies by client, for the user's functions
        self.metrics: dict[int, RecordDict] = {}
        self.tested: Views = {}
        self.answered: set[int] = set()  # clients whose reply was invalid
        self.bytes_up = 0
        self.bytes_down = 0  # of messages beside the requests
        self.more: dict[str, float] = {}  # further numbers of the round's record

    def refuse(self, client: int) -> None:
        """Forget what a reply said: it turned out to be invalid."""
        self.answered.add(client)
        self.losses.pop(client, None)
        self.metrics.pop(client, None)
        for tallies in self.tested.values():
            tallies.pop(client, None)


class Arriving:
    """The updates of a round on their way into a sum. `waits`: weights depend on the claims of all
    clients, so that updates are held.
    """

    def __init__(self, half: ServerHalf, state: Any, limiter: Limiter, waits: bool) -> None:
        self.half, self.state, self.limiter, self.waits = half, state, limiter, waits
        self.holds = limiter.holds
        self.held: dict[int, Any] = {}
        self.judged: dict[int, Verdict] = {}  # held, and within their limits
        self.apart = Apart()

    def add(self, total: Total, client: int, update: Any) -> None:
        """Add an update to the sum, or keep it until the round is settled."""
        if self.holds:
            self.held[client] = update
            return
        verdict = Verdict(update, None, frozenset())
        if self.limiter.on:
            verdict = self.limiter.alone(self.state, client, update)
        if self.waits:
            self.judged[client] = verdict
        elif verdict.why:
            self.apart.add(self.half, self.state, client, verdict)
        else:
            total.add(self.half.statistic(self.state, client, verdict.used))
            total.drop(self.half.negligible(total.names()))

    def settle(self, total: Total) -> dict[int, Any]:
        """Decide who is left out, add what was apart, and return the updates still to be added."""
        limiter = self.limiter
        if self.holds and self.held:
            return limiter.together(self.state, self.held)
        limiter.settle()
        self.apart.into(total, limiter.suspects.standing)
        total.drop(self.half.negligible(total.names()))
        return settled(self.judged, limiter.suspects)


class Enough:
    """Stops a run if a round has too few valid replies, or several rounds have none."""

    def __init__(self, least: int, journal: Journal) -> None:
        self.least, self.journal = least, journal
        self.empty = 0  # rounds in a row without a valid reply

    def check(self, round: int, valid: int) -> None:
        """Raise if the replies of a round are too few."""
        if valid < self.least and (valid or self.least > 1):
            number = f"{valid} valid replies" if valid else "no valid reply"
            raise BayflowerError(
                f"round {round}: {number}, min_replies is {self.least}; the run stopped; "
                f"last fault: {self.journal.cause()}"
            )
        if valid:
            self.empty = 0
            return
        self.journal.no_reply(round)
        self.empty += 1
        if self.empty == EMPTY_ROUNDS:
            raise BayflowerError(stopped(EMPTY_ROUNDS, self.journal.cause()))
