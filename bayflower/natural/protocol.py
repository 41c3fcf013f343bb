"""Who trains on which samples. A split depends on the case alone, so every rival has the same one.

* Owners with enough samples are the clients. A fifth of them, at least one, never trains: each of
  these new clients gets its n samples after the last round. Of at most five owners it is another
  one with each seed, in turn.
* A client's test samples are the same for every n, and its n samples are the first n of the larger
  ones: so numbers for different n can be compared.
* `later`: a client trains on its first n samples in time and is tested on its last ones.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import numpy as np

from ..data.federation import ClientData, Federation, hold_out
from ..errors import ConfigError
from .sets import ALL, Rows, Spec

TESTED = 0.3  # share of a client's samples, up to the most of the data set
HELD = 0.2  # share of training samples for calibration, where a rival asks for it


class Case(NamedTuple):
    """A data set, samples a client, whether tests are later in time, and a seed."""

    dataset: str
    n: int
    later: bool
    seed: int

    @property
    def title(self) -> str:
        """Return a name for people."""
        return f"{self.dataset}, {amount(self.n)}{', later' if self.later else ''}"


class Split(NamedTuple):
    """Rows of every client for training and test: the training clients, then the new ones."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    owners: list[int]
    num_new: int

    @property
    def num_old(self) -> int:
        """Return how many clients train."""
        return len(self.owners) - self.num_new

    @property
    def digest(self) -> str:
        """Return a fingerprint; two rivals of a case are paired if theirs are equal."""
        found = hashlib.sha256(repr((self.owners, self.num_new)).encode())
        for part in (*self.train, *self.test):
            found.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return found.hexdigest()[:12]


def amount(n: int) -> str:
    """Return n in words."""
    return "all samples" if n == ALL else f"n = {n}"


def cases(spec: Spec, seeds: int | None = None, quick: bool = False) -> list[Case]:
    """Return the cases of a data set; the quick form has two numbers of samples and two seeds."""
    pairs = [(n, False) for n in spec.sizes] + [(n, True) for n in spec.later]
    if quick:
        pairs = [pairs[0], pairs[min(2, len(pairs) - 1)]]
    number = seeds or (2 if quick else spec.seeds)
    return [Case(spec.name, n, later, seed) for seed in range(number) for n, later in pairs]


def split(spec: Spec, rows: Rows, case: Case) -> Split:
    """Return the split of a case."""
    draw = np.random.default_rng([case.seed, zlib.crc32(case.dataset.encode())])
    owners, counts = np.unique(rows.owner, return_counts=True)
    known = owners[(counts >= spec.least) & (owners >= 0)]
    if len(known) < 3:
        raise ConfigError(
            f"{spec.name} has {len(known)} clients with at least {spec.least} samples; at least 3 "
            "are needed"
        )
    chosen = draw.permutation(known)[: spec.most_clients]
    if len(known) <= 5:
        chosen = np.roll(known, -(case.seed % len(known)))
    num_new = max(1, len(chosen) // 5)
    train, test = [], []
    for owner in chosen:
        own = np.flatnonzero(rows.owner == owner)
        order = draw.permutation(own)
        tested = min(spec.most_tested, max(1, round(TESTED * len(own))))
        most = case.n if case.n != ALL else spec.most_rows
        if case.later:
            if rows.time is None:
                raise ConfigError(f"{spec.name} has no time to order its samples by")
            order = own[np.argsort(rows.time[own], kind="stable")]
            train.append(order[: min(most, len(own) - tested)])
            test.append(order[len(own) - tested :])
        else:
            train.append(order[tested : tested + most])
            test.append(order[:tested])
    last = [*train[num_new:], *train[:num_new]], [*test[num_new:], *test[:num_new]]
    names = [int(owner) for owner in (*chosen[num_new:], *chosen[:num_new])]
    return Split(*last, names, num_new)


def standardised(spec: Spec, rows: Rows, parts: Split) -> np.ndarray:
    """Return the inputs: tables standardised by the training clients' training samples, whose sums
    add up, with gaps at the mean; all others as they are.
    """
    if rows.x.ndim != 2 or not spec.linear:
        return rows.x.astype(np.float32)
    seen = rows.x[np.concatenate(parts.train[: parts.num_old])].astype(np.float64)
    there = ~np.isnan(seen)
    number = there.sum(0).clip(1)
    mean = np.where(there, seen, 0).sum(0) / number
    spread = np.sqrt(np.where(there, np.square(seen - mean), 0).sum(0) / number)
    scaled = (rows.x - mean) / np.where(spread > 1e-9, spread, 1.0)
    # what training samples never showed must not explode: no value beyond five deviations
    return np.nan_to_num(scaled).clip(-5, 5).astype(np.float32)


def federation(spec: Spec, rows: Rows, parts: Split, held: bool = False) -> Federation:
    """Return the clients of a split; with `held` a share of their samples is for calibration."""
    x = standardised(spec, rows, parts)
    made = []
    for number, (train, test) in enumerate(zip(parts.train, parts.test, strict=True)):
        kept, apart = hold_out(train, HELD, len(train)) if held else (train, train[:0])
        more = (x[apart], rows.y[apart]) if len(apart) else (None, None)
        made.append(ClientData(number, x[kept], rows.y[kept], x[test], rows.y[test], *more))
    old, new = made[: parts.num_old], made[parts.num_old :]
    shape = x.shape[1:]
    return Federation(tuple(old), tuple(new), rows.classes, shape, spec.name, {}, "")
