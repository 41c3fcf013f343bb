"""Which samples of a client are for training, for its test, and held out for calibration."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError


def parted(
    size: int,
    fraction: float,
    marks: np.ndarray | None,
    order: np.ndarray,
    by_time: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training positions, test positions), each in the given order; `by_time`: the last
    ones are for the test.
    """
    if marks is not None:
        return order[~marks[order]], order[marks[order]]
    count = min(max(int(fraction * size + 0.5), 1), size - 1)
    if by_time:
        return order[: size - count], order[size - count :]
    return order[count:], order[:count]


def validated(
    train: np.ndarray, share: float, client: int, few: bool = False, by_time: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's training positions, which are in random order, as (training, validation);
    its test part is not used. With `few` one sample alone is for training. Positions `by_time` are
    in that order, and the last ones are for validation.
    """
    if few and len(train) < 2:
        return train, train[:0]
    if len(train) < 2:
        raise ConfigError(
            f"client {client} has {len(train)} training sample, too few to split off validation "
            "data; raise min_size"
        )
    count = min(max(int(share * len(train) + 0.5), 1), len(train) - 1)
    if by_time:
        return train[: len(train) - count], train[len(train) - count :]
    return train[count:], train[:count]


def hold_out(train: np.ndarray, share: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training positions, which are in random order, as (training, held out for
    calibration); at least one stays for training. In the order of time the first ones are held out:
    they lie as far before the training samples as later ones lie behind them, and the model keeps
    the newest.
    """
    count = min(int(share * len(train) + 0.5), most, len(train) - 1)
    return train[count:], train[:count]
