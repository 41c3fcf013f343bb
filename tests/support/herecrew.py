"""A crew whose workers are objects of this process: the same workers, herd and run without Ray, so
that every call of every worker can be made the one at which it dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from bayflower.errors import BayflowerError
from bayflower.fused.workers.crew import GoneError, LostError
from bayflower.fused.workers.worker import Worker


class Reference:
    """What a call returned, on the machine of a worker; None: of the run itself."""

    def __init__(self, value: Any, worker: int | None) -> None:
        self.value, self.worker = value, worker


class HereCrew:
    """As `Crew`. A worker dies at the call `dies` = (worker, method, which time), None: whichever
    worker is called; with `machine` everything that it returned is lost too.
    """

    gpu = False

    def __init__(
        self,
        number: int,
        dies: tuple[int | None, str, int] | None = None,
        machine: bool = False,
        kind: type[Worker] = Worker,
    ) -> None:
        self.actors: dict[int, Any] = {one: kind() for one in range(number)}
        self.dies, self.machine, self.lost = dies, machine, 0
        self.dead: set[int] = set()
        self.times = 0
        self.asked: list[tuple[int, str]] = []

    @property
    def workers(self) -> list[int]:
        return sorted(self.actors)

    def begin(self, halves: Any, run: Any, variables: Mapping[str, str]) -> None:
        self.bury(LostError(self.dead))
        for actor in self.actors.values():
            actor.begin(deepcopy(halves), run)

    def put(self, thing: Any) -> Reference:
        return Reference(deepcopy(thing), None)

    def call(self, worker: int, name: str, *args: Any, returns: int = 1) -> Any:
        self.asked.append((worker, name))
        if self.dies and self.dies[1] == name and self.dies[0] in (worker, None):
            self.times += 1
            if self.times == self.dies[2]:
                self.dead.add(worker)
        values: list[Any]
        try:
            given = [deepcopy(self.value(one)) for one in args]
            if worker in self.dead:
                raise LostError([worker])
            found = getattr(self.actors[worker], name)(*given)
            values = list(found) if returns > 1 else [found]
        except (LostError, GoneError, BayflowerError) as error:
            values = [error] * returns
        made = [Reference(value, worker) for value in values]
        return made if returns > 1 else made[0]

    def value(self, thing: Any) -> Any:
        """Return what a reference stands for; raise if it is lost."""
        if not isinstance(thing, Reference):
            return thing
        if isinstance(thing.value, Exception):
            raise thing.value
        if self.machine and thing.worker in self.dead:
            raise GoneError("its machine has died")
        return thing.value

    def get(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
        found, dead, gone = [], set(), None
        for _, reference in calls:
            try:
                found.append(self.value(reference))
            except LostError as error:
                dead |= set(error.workers)
            except GoneError as error:
                gone = error
        if dead:
            raise LostError(dead)
        if gone is not None:
            raise gone
        return found

    def bury(self, lost: LostError) -> None:
        for worker in lost.workers:
            self.lost += self.actors.pop(worker, None) is not None
        if not self.actors:
            raise BayflowerError("all workers have died")

    def close(self) -> None:
        self.actors = {}
