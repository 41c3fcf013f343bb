"""Tables standardised by each client, from its own training part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Scaling(NamedTuple):
    """How a table's columns are prepared: NaN becomes the median, then (x − mean) / std. A column
    without data has std ∞: it is 0.
    """

    median: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Return the table prepared, float32."""
        x = x.astype(np.float64)
        return ((np.where(np.isnan(x), self.median, x) - self.mean) / self.std).astype(np.float32)


def standardise(
    train: np.ndarray, *others: np.ndarray, flags: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Return all tables in float32 with NaN set to the training median and columns shifted and
    scaled to training mean 0, variance 1.

    A column that is constant in training keeps its scale; one that is all missing in training is 0
    throughout. Columns with a flag are 0 or 1 by construction and stay so.
    """
    known = scaling(train, flags)
    return tuple(known.apply(one) for one in (train, *others))


def scaling(train: np.ndarray, flags: np.ndarray | None = None) -> Scaling:
    """Return the scaling that standardises a table, from its training part; columns with a flag
    stay as they are.
    """
    train = train.astype(np.float64)
    unknown = np.isnan(train).all(axis=0)
    median = np.zeros(train.shape[1])
    median[~unknown] = np.nanmedian(train[:, ~unknown], axis=0)
    train = np.where(np.isnan(train), median, train)
    mean, std = train.mean(axis=0), train.std(axis=0)
    std = np.where(train.min(axis=0) == train.max(axis=0), 1.0, std)
    std = np.where(unknown, np.inf, std)
    if flags is not None:
        median, mean = np.where(flags, 0.0, median), np.where(flags, 0.0, mean)
        std = np.where(flags, 1.0, std)
    return Scaling(median, mean, std)
