"""Runs side by side: those that differ by their seed alone take their training steps in one stack.

Each run has a thread of its own, but only one of them works at a time: the others wait for its
turn. A run that comes to a phase of training waits there until every other run waits, too. Then
the runs that wait in the same phase of the same round train it together, and each goes on with its
own part. Everything else of a round (messages, sums, tests, files) each run does as it does alone,
so that a run may end, fail or be resumed without the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import Run
from ..contract import Phase, Work
from ..errors import BayflowerError
from ..files.records import Outcome
from ..tree import Rows, map_tree, upload
from . import choice
from .bank import DeviceBank
from .engine import Fused
from .phases import StackedPhase
from .stack import Ragged, Stack

log = logging.getLogger("bayflower")
Member = tuple[int, int]  # (number of the run, number of the client)
Trained = tuple[Work, Tensor, np.ndarray]


class Asked(NamedTuple):
    """A phase of training for which a run waits."""

    phase: Phase
    purpose: str
    work: Work
    chosen: list[int]
    round: int

    @property
    def key(self) -> tuple[int, str, str]:
        """Return what runs that train together have in common."""
        return self.round, self.purpose, self.phase.name


class Beside:
    """Some runs side by side. `work` is called in the thread of each."""

    def __init__(self, runs: int) -> None:
        self.turn = threading.Condition()
        self.active = runs  # those that have not ended
        self.engines: dict[int, Fused] = {}
        self.sent: dict[int, Callable[[list[int]], Any]] = {}
        self.first: tuple[Run, Fused] | None = None
        self.asked: dict[int, Asked] = {}
        self.found: dict[int, Trained | Exception] = {}
        self.stack: JointStack | None = None
        self.phases: dict[Any, JointPhase] = {}
        self.most, self.fits = 0, 0  # as those of an engine: clients of all runs together
        self.stopped = False
        self.together = 0  # the largest number of runs that trained in one stack

    # -- the runs ----------------------------------------------------------------------------------
    def work(self, number: int, fn: Callable[[], Any]) -> Any:
        """Return fn() of a run; it works while it is the run's turn."""
        with self.turn:
            try:
                self._check()
                return fn()
            finally:
                self.active -= 1
                self.engines.pop(number, None)
                self._forget()
                self._serve()

    def stop(self) -> None:
        """Let every run end at its next phase."""
        self.stopped = True
        with self.turn:
            self.turn.notify_all()

    def join(self, number: int, engine: Fused, run: Run, sent: Callable[[list[int]], Any]) -> None:
        """Let a run's training be done together with that of the others, if they are alike."""
        self.first = self.first or (run, engine)
        if alike(engine, run, *self.first):
            self.engines[number], self.sent[number] = engine, sent
            engine.trainer = partial(Turn, self, number)

    def train(self, number: int, asked: Asked) -> Trained:
        """Return the work of one run after a phase that is trained together with others."""
        self.asked[number] = asked
        self._serve()
        self.turn.wait_for(lambda: number in self.found or self.stopped)
        self._check()
        found = self.found.pop(number)
        if isinstance(found, Exception):
            raise found
        return found

    def _check(self) -> None:
        if self.stopped:
            raise StoppedError("another run was interrupted")

    # -- training together -------------------------------------------------------------------------
    def _serve(self) -> None:
        """Train if every run waits: the phase for which most wait, the earliest of these."""
        if not self.asked or len(self.asked) < self.active or self.stopped:
            return
        waiting: dict[Any, list[int]] = {}
        for number in sorted(self.asked):
            waiting.setdefault(self.asked[number].key, []).append(number)
        some = min(waiting.items(), key=lambda item: (-len(item[1]), item[0]))[1]
        asked = {number: self.asked.pop(number) for number in some}
        try:
            for part in self._that_fit(asked):
                self.found |= self._trained({number: asked[number] for number in part})
        except Exception as error:  # all of them hear of it: none may wait for ever
            self.found |= dict.fromkeys(asked.keys() - self.found.keys(), error)
        self.turn.notify_all()

    def _that_fit(self, asked: dict[int, Asked]) -> list[list[int]]:
        """Return the runs in parts that fit into memory together."""
        total = sum(len(one.chosen) for one in asked.values())
        number = next(iter(asked))
        engine = self.engines[number]
        if not engine.most and len(asked) > 1 and total > self.fits:
            clients = [asked[number].chosen[0]] * total
            self.most = choice.clients_that_fit(engine, clients, self.sent[number])
            self.fits = total
        most = engine.most or self.most or total
        parts: list[list[int]] = [[]]
        for one in asked:
            held = sum(len(asked[other].chosen) for other in parts[-1])
            if parts[-1] and held + len(asked[one].chosen) > most:
                parts.append([])
            parts[-1].append(one)
        return parts

    def _trained(self, asked: dict[int, Asked]) -> dict[int, Trained | Exception]:
        """Return the trained work of some runs, or why it could not be trained, by run."""
        if len(asked) > 1:
            try:
                found: Any = self._together(asked)
                self.together = max(self.together, len(asked))
                return found
            except torch.OutOfMemoryError:
                log.info("%d runs side by side need too much memory; one at a time", len(asked))
                self._forget()
                self.fits, self.most = 10**9, 1
            except Exception as error:  # each run answers it as its own
                return dict.fromkeys(asked, error)
        done: dict[int, Trained | Exception] = {}
        for number, one in asked.items():
            own = self.engines[number].phase_of(one.phase, one.purpose, len(one.chosen))
            try:
                done[number] = own.run(one.work, one.chosen, one.round)
            except Exception as error:
                done[number] = error
        return done

    def _together(self, asked: dict[int, Asked]) -> dict[int, Trained]:
        self.stack = self.stack or JointStack(self.engines)
        pairs = [(number, client) for number, one in asked.items() for client in one.chosen]
        rows: Any = self.stack.row
        order = sorted(range(len(pairs)), key=lambda place: rows[pairs[place]])
        chosen, device = [pairs[place] for place in order], self.stack.device
        (first, *_), index = asked.values(), upload(order, device)
        key = (first.purpose, first.phase.name, len(chosen))
        if key not in self.phases:
            engine = self.engines[next(iter(asked))]
            half, graphs = engine.half, engine.graphs
            known = (first.phase, first.purpose, self.stack, len(chosen), 0, graphs)
            self.phases[key] = JointPhase(half, *known, engines=self.engines)
        works = [one.work for one in asked.values()]
        joined = map_tree(lambda *leaves: taken(torch.cat(leaves), index), *works)
        work, losses, seen = self.phases[key].run(joined, chosen, first.round)  # type: ignore[arg-type]
        back, begin = np.argsort(order), 0
        found: dict[int, Trained] = {}
        for number, one in asked.items():
            mine = back[begin : begin + len(one.chosen)]
            begin += len(one.chosen)
            places = upload(mine, device)
            own = map_tree(lambda leaf, places=places: taken(leaf, places), work)
            found[number] = own, losses[places], seen[mine]
        return found

    def _forget(self) -> None:
        """Free the memory of what was trained together; it is made again when it is needed."""
        for phase in self.phases.values():
            phase.replay.close()
        self.phases.clear()


class StoppedError(BayflowerError):
    """A run ends because another one was interrupted."""


class Seat(NamedTuple):
    """The place of one run among those side by side."""

    beside: Beside
    number: int

    def take(self, engine: Fused, run: Run, sent: Callable[[list[int]], Any]) -> None:
        """Let the run's training be done together with that of the others."""
        self.beside.join(self.number, engine, run, sent)

    def noted(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a line about the others."""
        if self.beside.together < 2:
            return outcome
        line = (
            f"seconds are those of up to {self.beside.together} runs with different seeds, which "
            "were trained side by side"
        )
        return outcome._replace(remarks=(*outcome.remarks, line))


class Turn:
    """The place of an engine's phase: it waits for the other runs."""

    def __init__(self, beside: Beside, number: int, phase: Phase, purpose: str, _: int) -> None:
        self.beside, self.number, self.phase, self.purpose = beside, number, phase, purpose

    def run(self, work: Work, chosen: Sequence[int], round: int) -> Trained:
        """Return what `StackedPhase.run` returns."""
        asked = Asked(self.phase, self.purpose, work, list(chosen), round)
        return self.beside.train(self.number, asked)


def side_by_side(jobs: Sequence[Callable[[Seat], Any]]) -> list[Any]:
    """Return what each job returns, or the exception that ended it; a job is a run with a seat. An
    interrupt ends all of them.
    """
    beside, found = Beside(len(jobs)), [None] * len(jobs)

    def one(number: int) -> None:
        try:
            found[number] = beside.work(number, lambda: jobs[number](Seat(beside, number)))
        except Exception as error:
            found[number] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(jobs))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # an interrupt comes through between two waits
                thread.join(0.2)
    except BaseException:
        beside.stop()
        for thread in threads:
            thread.join()
        raise
    return found


def alike(engine: Fused, run: Run, first: Run, other: Fused) -> bool:
    """Return whether two runs can be trained in one stack."""
    mine, yours = engine.half, other.half
    return (
        type(mine) is type(yours)
        and (mine.config, mine.training) == (yours.config, yours.training)
        and replace(run.settings, seed=0) == replace(first.settings, seed=0)
        and mine.model.shapes == yours.model.shapes
        and engine.stack.train.x.shape[1:] == other.stack.train.x.shape[1:]
        and not engine.stack.moving
        and isinstance(engine.bank, DeviceBank)
    )


class JointStack(Stack):
    """The training samples of the clients of several runs. A client is called (run, client). The
    runs' own stacks see the same memory from now on.
    """

    def __init__(self, engines: dict[int, Fused]) -> None:
        stacks = {number: engine.stack for number, engine in engines.items()}
        first = next(iter(stacks.values()))
        self.device, self.dtype = first.device, first.dtype
        named = [
            (int(size), number, client)
            for number, own in stacks.items()
            for client, size in zip(own.clients, own.sizes, strict=True)
        ]
        order = sorted(range(len(named)), key=lambda place: (-named[place][0], place))
        self.clients: Any = tuple(named[place][1:] for place in order)
        self.rows = Rows(self.clients, self.device)
        self.row = self.rows.of
        self.sizes = np.array([named[place][0] for place in order])
        x = torch.cat([own.train.x for own in stacks.values()])
        y = torch.cat([own.train.y for own in stacks.values()])
        starts, begin = [], 0
        for own in stacks.values():
            starts.append(own.train.start + begin)
            end = begin + len(own.train.y)
            own.train = own.train._replace(x=x[begin:end], y=y[begin:end])
            begin = end
        index = upload(order, self.device)
        start = torch.cat(starts)[index]
        size = torch.cat([own.train.size for own in stacks.values()])[index]
        self.train = Ragged(x, y, start, size, first.train.dtype)


class JointPhase(StackedPhase):
    """A phase of the clients of several runs: each client's batches and noise are those of its own
    run.
    """

    def __init__(self, *known: Any, engines: dict[int, Fused]) -> None:
        super().__init__(*known)
        self.engines = engines

    def draw(self, chosen: Sequence[Any], round: int) -> np.ndarray:
        """Return the batches of a round; each run may have drawn its own in advance."""
        shape = (self.steps, len(chosen), self.phase.batches, self.width)
        plan = np.full(shape, -1, np.int32)
        for number, places in runs_of(chosen).items():
            own = [chosen[place][1] for place in places]
            stacked = self.engines[number].phase_of(self.phase, self.purpose, len(own))
            mine = stacked.draw(own, round)
            plan[: mine.shape[0], places, :, : mine.shape[3]] = mine
        return plan

    def keys_of(self, draw: Callable[..., Any], *known: Any, round: int) -> Any:
        """Return the keys of clients' noise, each drawn with the seed of its run."""
        *stage, chosen = known
        keys = np.zeros(len(chosen), np.int64)
        for number, places in runs_of(chosen).items():
            own = [chosen[place][1] for place in places]
            keys[places] = draw(self.engines[number].seed, *stage, own, round)
        return keys


def taken(leaf: Tensor, places: Tensor) -> Tensor:
    """Return rows of a leaf, wherever it lives: what a half computes on the CPU stays there."""
    return leaf[places.to(leaf.device)]


def runs_of(chosen: Sequence[Member]) -> dict[int, list[int]]:
    """Return the places of each run's clients."""
    found: dict[int, list[int]] = {}
    for place, (number, _) in enumerate(chosen):
        found.setdefault(number, []).append(place)
    return found
