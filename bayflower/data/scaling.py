"""Tables standardised by each client, from its own training part, and images normalised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from . import normalise
from .settings import DataSettings
from .source import Source


class Scaling(NamedTuple):
    """How a table's columns, or the channels of images (C, 1, 1), are prepared: NaN becomes the
    median, then (x − mean) / std. A column without data has std ∞: it is 0.
    """

    median: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Return the inputs prepared, float32."""
        x = x.astype(np.float64)
        return ((np.where(np.isnan(x), self.median, x) - self.mean) / self.std).astype(np.float32)


def preparation(settings: DataSettings, source: Source | None, train: np.ndarray) -> Scaling | None:
    """Return how a client's inputs are prepared, from its own training part: tables are
    standardised, images normalised if the settings say so; None = not at all.
    """
    if source is not None and source.plain:
        if settings.normalise != normalise.NONE:
            raise ConfigError(
                "normalise is for images that are read from files, and these samples are taken as "
                "they are; leave it at none, or normalise them yourself"
            )
        return None
    if train.ndim == 2:
        if settings.normalise != normalise.NONE:
            raise ConfigError(
                "normalise is for images, and these data are a table, which input_scale is for; "
                "leave it at none"
            )
        if settings.scaling == "none" and np.isnan(train).any():
            raise ConfigError(
                "input_scale=none leaves missing values in the table; fill them in, or set "
                "input_scale=federation"
            )
        if settings.scaling != "client":  # everyone's numbers come later (`moments`)
            return None
        return scaling(train, None if source is None else source.flags())
    if settings.normalise == normalise.NONE:
        return None
    pixels = source is not None and source.pixels
    mean, std = normalise.channels(settings.normalise, settings.dataset, pixels, train)
    return Scaling(mean, mean, std)


def scaling(train: np.ndarray, flags: np.ndarray | None = None) -> Scaling:
    """Return the scaling that standardises a table, from its training part: NaN becomes the median,
    and columns have mean 0 and variance 1.

    A column that is constant in training keeps its scale; one that is all missing in training is 0
    throughout. Columns with a flag are 0 or 1 by construction and stay so.
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
