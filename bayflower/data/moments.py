"""A table's columns standardised by everyone's training rows, from sums that add up.

A client sends (n, Σ x, Σ x²) of each column over its own training rows, without missing values. The
server adds them, and everyone is told mean and standard deviation. No row leaves a client. A
missing value becomes the mean: a median would not add up. Columns that are 0 or 1 by construction
count no rows and stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..errors import ConfigError
from .federation import Federation
from .scaling import Scaling


def input_sums(train: np.ndarray, flags: np.ndarray | None = None) -> tuple[float, ...]:
    """Return (n of each column, Σ x, Σ x²), one after the other, of one client's training rows."""
    x = train.astype(np.longdouble)
    known = ~np.isnan(x)
    if flags is not None:
        known &= ~flags
    x = np.where(known, x, 0)
    parts = (known.sum(0), x.sum(0), np.square(x).sum(0))
    return tuple(float(one) for part in parts for one in part)


def together(sums: Sequence[Sequence[float]]) -> str:
    """Return everyone's means and standard deviations as MEAN,…/STD,…, from the clients' sums in
    any order; 0 and 1 of a column without values, and 1 of one that is constant.
    """
    total = [math.fsum(column) for column in zip(*sums, strict=True)]
    width = len(total) // 3
    means, stds = [], []
    for n, first, second in zip(total[:width], total[width:], total[2 * width :], strict=False):
        mean = first / n if n else 0.0
        variance = second / n - mean**2 if n else 1.0
        means.append(mean)
        stds.append(math.sqrt(variance) if variance > 1e-10 * mean**2 + 1e-30 else 1.0)
    return "/".join(",".join(map(repr, part)) for part in (means, stds))


@lru_cache(maxsize=16)
def read_scaling(text: str) -> Scaling:
    """Return the scaling in a text MEAN,…/STD,…."""
    try:
        mean, std = (np.array([float(one) for one in half.split(",")]) for half in text.split("/"))
    except ValueError:
        mean, std = np.zeros(0), np.zeros(1)
    good = len(mean) == len(std) and np.isfinite(mean).all() and np.isfinite(std).all()
    if not good or not (std > 0).all():
        raise ConfigError(
            "input_scale must be auto, client, federation, none or MEAN,…/STD,… with one positive "
            f"STD a column, got {text[:80]!r}"
        )
    return Scaling(mean, mean, std)


def sums_of(federation: Federation) -> list[tuple[float, ...]]:
    """Return the sums of each training client; () of each if inputs are ready."""
    table = federation.table
    if table is None:
        return [()] * len(federation.clients)
    return [input_sums(data.x_train, table) for data in federation.clients]


def ready(federation: Federation, text: str) -> Federation:
    """Return the clients with their inputs standardised by the numbers in a text."""
    if federation.table is None:
        return federation
    groups = [
        tuple(
            data._replace(
                x_train=apply(text, data.x_train),
                x_test=apply(text, data.x_test),
                x_held=None if data.x_held is None else apply(text, data.x_held),
            )
            for data in some
        )
        for some in (federation.clients, federation.new_clients)
    ]
    return federation._replace(clients=groups[0], new_clients=groups[1], table=None)


def apply(text: str, x: np.ndarray) -> np.ndarray:
    """Return rows standardised by the numbers in a text, float32."""
    known = read_scaling(text)
    if x.ndim != 2 or x.shape[1] != len(known.mean):
        raise ConfigError(
            f"input_scale has {len(known.mean)} columns, but a sample has shape {x.shape[1:]}; "
            "give one number a column"
        )
    return known.apply(x)
