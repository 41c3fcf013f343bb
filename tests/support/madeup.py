"""Small made-up files in the form of the natural data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def heart(folder: Path, seed: int = 0) -> None:
    """Write four hospitals of unequal size with gaps; their rules differ."""
    draw = np.random.default_rng(seed)
    xs, ys, owners = [], [], []
    for owner, size in enumerate((90, 48, 70, 60)):
        x = draw.normal(size=(size, 13))
        rule = np.r_[1.5, -1.0, np.zeros(11)] + 0.5 * draw.normal(size=13)
        ys.append((draw.random(size) < 1 / (1 + np.exp(-x @ rule))).astype(np.int64))
        x[draw.random(x.shape) < 0.05] = np.nan
        xs.append(x)
        owners.append(np.full(size, owner))
    np.savez(
        folder / "heart.npz",
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        client=np.concatenate(owners),
        test=np.zeros(sum(map(len, ys)), bool),
    )


def radon(folder: Path, seed: int = 0, counties: int = 7) -> None:
    """Write counties of unequal size with slopes and levels of their own."""
    draw = np.random.default_rng(seed)
    xs, ys, owners = [], [], []
    for owner in range(counties):
        size = 45 + 10 * (owner % 3)
        x = np.stack([draw.integers(0, 2, size), np.full(size, draw.normal())], 1).astype(float)
        level, slope = 1 + 0.6 * draw.normal(), -0.6 + 0.3 * draw.normal()
        ys.append(level + slope * x[:, 0] + 0.7 * draw.normal(size=size))
        xs.append(x)
        owners.append(np.full(size, owner))
    np.savez(
        folder / "radon.npz",
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        client=np.concatenate(owners),
    )
