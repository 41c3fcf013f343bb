"""A pooled data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Source:
    """A pooled data set. `x` is as stored (images of type uint8 stay so: a quarter of the memory);
    `samples` gives what a network sees.
    """

    name: str
    x: Any  # (N, ...): an array, or an object that can be indexed like one
    y: np.ndarray  # (N,) int64
    num_classes: int
    client: np.ndarray | None = None  # (N,) int64 natural owner, negative = none
    test: np.ndarray | None = None  # (N,) bool
    note: str = ""  # a note to show beside the name, such as "stand-in for ..."
    # (N,) the data set that each sample comes from, if several were joined
    domain: np.ndarray | None = None

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Return float32 samples: uint8 images as (x/255 - 0.5)/0.5 in NCHW, everything else as it
        is.
        """
        x: np.ndarray = self.x[indices]
        if x.dtype != np.uint8 or x.ndim == 2:
            return np.asarray(x, dtype=np.float32)
        x = (x.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
