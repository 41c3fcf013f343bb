"""Blocks of clients: what is trained together, stays together and moves together.

All clients are dealt to blocks, largest first, like cards: so blocks cost about the same. A block
never changes. Its clients of a round are one stack, so a client's numbers depend on its block and
not on the worker that has it. One by one, they depend on the client alone.

Where blocks are is decided by time. A worker's pace is the shortest time a sample took it in the
last rounds, so that a moment's load counts for nothing. A block moves to another worker if the
slowest worker of a round would then take clearly less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...data import ClientData

BLOCKS = 16  # blocks of a run, unless their size is given
ROUNDS = 3  # last rounds of which the shortest time counts
GAIN = 0.9  # a move must shorten a round to this share of its time, or less
Block = tuple[ClientData, ...]


def divided(clients: Iterable[ClientData], size: int) -> list[Block]:
    """Return the clients in blocks of `size` at most; 0 = a sixteenth of them."""
    ordered = sorted(clients, key=lambda data: (-len(data.y_train), data.client))
    number = -(-len(ordered) // size) if size else min(BLOCKS, len(ordered))
    return [tuple(ordered[first::number]) for first in range(number)]


def placed(costs: Sequence[float], workers: Sequence[int]) -> dict[int, int]:
    """Return the worker of each block: the costliest first, each to the worker with least."""
    load = dict.fromkeys(workers, 0.0)
    home = {}
    for block in sorted(range(len(costs)), key=lambda block: (-costs[block], block)):
        home[block] = min(workers, key=lambda worker: (load[worker], worker))
        load[home[block]] += costs[block]
    return home


class Balance:
    """What blocks cost and how fast workers are, from the times of the last rounds."""

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples  # by block
        self.paces: dict[int, list[float]] = {}  # by worker: seconds a sample in the last rounds
        self.prices: dict[int, list[float]] = {}  # by block: the same, as if on a usual worker

    def note(
        self, seconds: Mapping[int, float], trained: Mapping[int, int], home: Mapping[int, int]
    ) -> None:
        """Note the times of a round: by block its seconds and the samples that were trained."""
        spent: dict[int, list[float]] = {}
        for block, time in seconds.items():
            both = spent.setdefault(home[block], [0.0, 0.0])
            both[0], both[1] = both[0] + time, both[1] + trained[block]
        for worker, (time, number) in spent.items():
            if number:
                self.paces[worker] = [*self.paces.get(worker, []), time / number][-ROUNDS:]
        for block, time in seconds.items():
            if trained[block] and home[block] in self.paces:
                price = time / trained[block] / self.slowness(home[block])
                self.prices[block] = [*self.prices.get(block, []), price][-ROUNDS:]

    def slowness(self, worker: int) -> float:
        """Return how many times longer a worker takes than the usual one; 1 if it is not known."""
        known = sorted(min(paces) for paces in self.paces.values())
        usual = known[(len(known) - 1) // 2] if known else 0.0
        return min(self.paces[worker]) / usual if worker in self.paces and usual else 1.0

    def cost(self, block: int) -> float:
        """Return the seconds that a whole block takes a usual worker, in some unit."""
        known = [min(prices) for prices in self.prices.values()]
        usual = sum(known) / len(known) if known else 1.0
        return self.samples[block] * (
            min(self.prices.get(block, [])) if block in self.prices else usual
        )

    def loads(self, home: Mapping[int, int], workers: Iterable[int]) -> dict[int, float]:
        """Return the time that each worker is expected to take for all of its blocks."""
        load = dict.fromkeys(workers, 0.0)
        for block, worker in home.items():
            load[worker] += self.cost(block) * self.slowness(worker)
        return load

    def move(self, home: Mapping[int, int], workers: Sequence[int]) -> tuple[int, int] | None:
        """Return (a block, the worker to which it should go), None if all is well."""
        busy = {home[block] for block in home}
        if len(workers) < 2 or any(len(self.paces.get(one, [])) < ROUNDS for one in busy):
            return None
        load = self.loads(home, workers)
        slowest = max(load, key=lambda worker: load[worker])
        best, found = GAIN * load[slowest], None
        for block in sorted(block for block, worker in home.items() if worker == slowest):
            for worker in workers:
                if worker == slowest:
                    continue
                there = load[worker] + self.cost(block) * self.slowness(worker)
                left = load[slowest] - self.cost(block) * self.slowness(slowest)
                others = [load[one] for one in workers if one not in (slowest, worker)]
                if (longest := max([there, left, *others])) < best:
                    best, found = longest, (block, worker)
        return found

    def forget(self, worker: int) -> None:
        """Forget the pace of a worker whose blocks have changed, or which is gone."""
        self.paces.pop(worker, None)
